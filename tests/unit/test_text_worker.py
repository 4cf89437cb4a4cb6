"""The text of steps on a thread of its own."""

from __future__ import annotations

import functools
import threading

import pytest

from cpmcu.engine import text_worker
from cpmcu.engine.text_worker import FEW_SEQS, TextWorker


@pytest.fixture
def worker():
    worker = TextWorker()
    yield worker
    worker.close()


def test_few_sequences_need_no_thread(worker):
    ran: list[threading.Thread] = []
    worker.add(lambda: ran.append(threading.current_thread()))
    worker.flush(FEW_SEQS)
    assert ran == [threading.current_thread()]


def test_jobs_run_in_order_on_either_thread(worker):
    """While the thread works, jobs of small steps wait for it."""
    ran: list[int] = []
    ready = threading.Event()
    worker.add(ready.wait)
    worker.flush(FEW_SEQS + 1)
    for i in range(10):
        worker.add(functools.partial(ran.append, i))
        worker.flush(FEW_SEQS + 1 if i % 2 else 1)
    assert ran == []
    ready.set()
    worker.close()
    assert ran == list(range(10))


def test_the_engine_thread_waits_if_the_text_is_far_behind(worker, monkeypatch):
    """At most MOST_BEHIND steps wait for their text."""
    ready, flushed = threading.Event(), threading.Event()

    def fill() -> None:
        for _ in range(text_worker.MOST_BEHIND + 2):  # one of them runs
            worker.add(ready.wait)
            worker.flush(FEW_SEQS + 1)
        flushed.set()

    thread = threading.Thread(target=fill)
    thread.start()
    assert not flushed.wait(0.2)
    ready.set()
    assert flushed.wait(60)
    thread.join()


@pytest.mark.parametrize("num_seqs", [1, FEW_SEQS + 1])
def test_a_job_that_fails_does_not_stop_the_others(worker, caplog, num_seqs):
    ran: list[int] = []
    worker.add(lambda: 1 // 0)
    worker.add(functools.partial(ran.append, 1))
    worker.flush(num_seqs)
    worker.close()
    assert ran == [1]
    assert "could not be made" in caplog.text
