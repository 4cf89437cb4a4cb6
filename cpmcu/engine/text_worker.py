"""Makes the text of steps, on a thread of its own if a step has many sequences.

The engine thread adds the jobs of a step and then flushes them. With few sequences, `flush` runs
the jobs at once, which is faster than waking a thread. With many, a thread runs the jobs while the
engine thread launches the next step. Jobs run in the order in which they were added.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

Job = Callable[[], None]

FEW_SEQS = 16  # maximum number of sequences of a step whose jobs run on the engine thread
# Maximum number of steps that wait for their text; beyond it the engine thread waits.
MOST_BEHIND = 32


class TextWorker:
    """Used by the engine thread only, except `is_current`."""

    def __init__(self) -> None:
        self._jobs: list[Job] = []  # jobs of the current step
        self._queue: queue.Queue[list[Job] | None] = queue.Queue(MOST_BEHIND)
        self._thread: threading.Thread | None = None
        self._posted = 0  # number of lists of jobs that were handed to the worker
        self._done = 0  # number of lists that are done; only the worker's thread counts

    @property
    def is_current(self) -> bool:
        """Is the calling thread the worker's?"""
        return threading.current_thread() is self._thread

    def add(self, job: Job) -> None:
        """Adds a job to the current step."""
        self._jobs.append(job)

    def flush(self, num_seqs: int) -> None:
        """Runs the jobs added so far, here or on the thread. `num_seqs`: sequences of the step."""
        while self._jobs:  # a job may add jobs
            jobs, self._jobs = self._jobs, []
            if num_seqs > FEW_SEQS or self._done < self._posted:
                self._post(jobs)
            else:
                _run(jobs)

    def close(self) -> None:
        """Waits for all jobs and ends the thread."""
        self.flush(0)
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()

    def _post(self, jobs: list[Job]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="cpmcu-text", daemon=True)
            self._thread.start()
        self._posted += 1
        self._queue.put(jobs)

    def _work(self) -> None:
        while (jobs := self._queue.get()) is not None:
            _run(jobs)
            del jobs  # the requests of the last step must not outlive their callers
            self._done += 1


def _run(jobs: list[Job]) -> None:
    for job in jobs:
        try:
            job()
        except Exception:
            logger.exception("the text of a step could not be made")
