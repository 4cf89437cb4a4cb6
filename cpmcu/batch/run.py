"""Runs a batch file: submits requests ahead, and writes each result as soon as it is complete.

If a line cannot be read, or its request is refused or fails, a message states the line's number and
no result is written. So another run with the same files tries only such lines again.
"""

from __future__ import annotations

import dataclasses
import json
import queue
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from cpmcu.batch.lines import BatchRequest, Id, Lines, read_request, sampling_of
from cpmcu.batch.openai_calls import OpenAICalls
from cpmcu.errors import sentence
from cpmcu.outputs import StreamChunk
from cpmcu.sampling import SamplingParams
from cpmcu.terminal.result_json import result_object
from cpmcu.ui.display import Display

if TYPE_CHECKING:
    from cpmcu.engine.request import Request
    from cpmcu.llm import LLM

_AHEAD = 2  # requests that are submitted for each slot of the engine

PromptIds = Callable[[str], list[int]]  # token ids of a prompt's text


@dataclasses.dataclass(slots=True, eq=False)
class _Job:
    """A submitted request. `error`: why it failed. `response`: None outside OpenAI's form."""

    number: int  # number of the request's line
    id: Id
    prompt: list[int] = dataclasses.field(default_factory=list)
    params: SamplingParams | None = None
    requests: Sequence[Request] = ()
    left: int = 0  # outputs that have not ended
    response: dict[str, Any] | None = None
    error: BaseException | None = None


class BatchRun:
    """One run of a batch file. `skipped`: ids whose results exist."""

    def __init__(
        self,
        display: Display,
        llm: LLM,
        params: SamplingParams,
        prompt_ids: PromptIds,
        skipped: set[Id],
    ) -> None:
        self._display, self._llm, self._params = display, llm, params
        self._prompt_ids = prompt_ids
        self._skipped = skipped
        self._seen: dict[Id, int] = {}  # id -> number of the line that has it
        self._ended: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._open: set[_Job] = set()
        self._calls: OpenAICalls | None = None
        self._counts = {"answered": 0, "skipped": 0, "failed": 0}
        self._tokens = 0  # tokens of all answers
        self._out: TextIO = sys.stdout

    def run(self, lines: Lines, output: Path | None) -> bool:
        """Answers the requests of `lines`. Returns True if no line failed.

        `output`: a file that results are appended to; None: stdout. Raises OSError for a file that
        cannot be read or written, RuntimeError if the engine fails.
        """
        start = time.perf_counter()
        total = sum(1 for _ in lines())
        bar = self._display.bar("batch", total, "requests", lines=output is None)
        try:
            if output is not None:
                self._out = open(  # noqa: SIM115
                    output, "a", encoding="utf-8", errors="backslashreplace"
                )
            bar.start()
            for number, text in lines():
                self._begin(number, text)
                while len(self._open) >= _AHEAD * self._llm.max_num_seqs:
                    self._finish(self._ended.get())
                bar.update(sum(self._counts.values()))
            while self._open:
                self._finish(self._ended.get())
                bar.update(sum(self._counts.values()))
        finally:
            bar.finish()
            self._close(output)
            self._display.note(self._summary(time.perf_counter() - start))
        return not self._counts["failed"]

    def _begin(self, number: int, text: bytes) -> None:
        """Submits the request of a line, unless its result exists or it is refused."""
        try:
            request = read_request(text)
            if request.id in self._seen:
                raise ValueError(
                    f"its id {request.id!r} is also that of line {self._seen[request.id]}"
                )
            self._seen[request.id] = number
            if request.id in self._skipped:
                self._counts["skipped"] += 1
                return
            job = _Job(number, request.id)
            submit = self._prepared(job, request)
        except (ValueError, ImportError) as error:
            self._fail(number, error)
            return
        self._open.add(job)
        submit()

    def _prepared(self, job: _Job, request: BatchRequest) -> Callable[[], object]:
        """Checks a request. Returns the function that submits it."""
        if request.url is not None:
            if self._calls is None:
                self._calls = OpenAICalls(self._llm)
            return partial(self._post, job, request.url, request.fields)
        params = sampling_of(request, self._params).resolve(self._llm.generation_config)
        job.prompt, job.params = self._ids_of(request), params
        emit = partial(self._emit, job)
        job.requests = self._llm.prepare(job.prompt, params, emit, is_streamed=False)
        job.left = len(job.requests)
        return partial(self._llm.submit, job.requests)

    def _ids_of(self, request: BatchRequest) -> list[int]:
        fields = request.fields
        if "prompt" in fields:
            read = self._prompt_ids if isinstance(fields["prompt"], str) else self._llm.tokenize
            return read(fields["prompt"])
        messages, variables = fields["messages"], fields.get("chat_template_kwargs") or {}
        if not isinstance(messages, list) or not all(isinstance(turn, dict) for turn in messages):
            raise ValueError("messages is no list of objects, expected [{role, content}, ...]")
        if not isinstance(variables, dict):
            raise ValueError("chat_template_kwargs is no object")
        return self._llm.tokenize_chat(messages, self._llm.max_length, **variables)

    def _emit(self, job: _Job, item: StreamChunk | Exception) -> None:
        """Takes an item of the engine, on its thread."""
        if isinstance(item, Exception):
            job.error = job.error or item
        elif item.finish_reason is None:
            return
        job.left -= 1
        if job.left == 0:
            self._ended.put(job)

    def _post(self, job: _Job, url: str, body: Any) -> None:
        assert self._calls is not None
        self._calls.post(url, body).add_done_callback(partial(self._responded, job))

    def _responded(self, job: _Job, future: Future[dict[str, Any]]) -> None:
        """Takes a response, on the thread of the calls."""
        if not future.cancelled():
            job.error = future.exception()
            job.response = None if job.error else future.result()
        self._ended.put(job)

    def _finish(self, job: _Job) -> None:
        """Writes the result of a request that has ended."""
        self._open.discard(job)
        if job.error is None and job.response is not None and job.response["status_code"] >= 400:
            job.error = ValueError(job.response["body"]["error"]["message"])
        if job.error is not None:
            if not self._llm.is_open:
                raise job.error
            self._fail(job.number, job.error)
            return
        result = self._openai_result(job) if job.response is not None else self._result(job)
        self._out.write(json.dumps(result, ensure_ascii=False) + "\n")
        self._out.flush()
        self._counts["answered"] += 1

    def _result(self, job: _Job) -> dict[str, Any]:
        assert job.params is not None
        result = self._llm.result(job.prompt, job.params, job.requests)
        self._tokens += result.usage.completion_tokens
        return {"id": job.id, **result_object(result)}

    def _openai_result(self, job: _Job) -> dict[str, Any]:
        assert job.response is not None
        usage = job.response["body"].get("usage") or {}
        self._tokens += usage.get("completion_tokens", usage.get("output_tokens", 0))
        name = f"batch_req_{uuid.uuid4().hex}"
        return {"id": name, "custom_id": job.id, "response": job.response, "error": None}

    def _fail(self, number: int, error: BaseException) -> None:
        self._counts["failed"] += 1
        self._display.error(f"line {number}: {sentence(error)}")

    def _close(self, output: Path | None) -> None:
        """Aborts open requests, as after Ctrl-C."""
        for job in self._open:
            for request in job.requests:
                request.cancel()
        if self._calls is not None:
            self._calls.close()
        if output is not None and self._out is not sys.stdout:
            self._out.close()

    def _summary(self, seconds: float) -> str:
        parts = [f"{count} {name}" for name, count in self._counts.items() if count]
        parts.append(f"{self._tokens} tokens in {seconds:.1f} s")
        if self._tokens:
            parts.append(f"{self._tokens / seconds:.1f} tokens/s")
        return ", ".join(parts)
