"""Generation for one HTTP request: the bridge from the engine's thread to asyncio."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from cpmcu.checks import FieldError, PromptTooLongError, shown
from cpmcu.engine.request import Request
from cpmcu.errors import OutputError
from cpmcu.grammar import GrammarError
from cpmcu.outputs import CompletionOutput, StreamChunk
from cpmcu.sampling import SamplingParams
from cpmcu.serving.errors import ApiError
from cpmcu.serving.http.request_id import request_id

if TYPE_CHECKING:
    from cpmcu.serving.metrics import Metrics
    from cpmcu.serving.model import Model
    from cpmcu.serving.protocol.base import GenerationRequest
    from cpmcu.serving.waker import Waker
    from cpmcu.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillProgress:
    """Progress of one prompt: `processed` of `total` tokens are in the KV cache.

    `cached` of them were found in the prefix cache.
    """

    prompt_index: int
    cached: int
    processed: int
    total: int
    seconds: float


Item = PrefillProgress | StreamChunk


class Host(Protocol):
    """The part of the server that a generation uses: the model, admission, and counting."""

    metrics: Metrics

    @property
    def model(self) -> Model:
        """The model. Raises ApiError (503) while there is none."""

    def waker(self, loop: asyncio.AbstractEventLoop) -> Waker:
        """Returns the waker of an event loop."""

    def submit(self, generation: Generation) -> None:
        """Queues a generation. Raises ApiError if it is refused."""

    def done(self, generation: Generation) -> None:
        """Takes note of the end of a generation."""


class Generation:
    """The engine requests of one HTTP request; their chunks are an async iterator.

    Output p * n + c is choice c of prompt p. `prompt_field`, `grammar_field`: the request's fields
    from which prompt and grammar came, for errors. `keep_special_tokens`: see LLM.prepare. Raises
    ApiError (400) for a prompt or parameters that the engine refuses.
    """

    def __init__(
        self,
        service: Host,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        loop: asyncio.AbstractEventLoop,
        *,
        prompt_field: str = "prompt",
        grammar_field: str | None = None,
        progress: bool = False,
        keep_special_tokens: Sequence[int] = (),
    ) -> None:
        llm = service.model.llm
        self.prompts = prompts
        self.params = params
        self.request_id = request_id.get()
        self._service = service
        self._loop = loop
        # (number of the choice, item) from the engine's thread.
        self._inbox: deque[tuple[int, Item | Exception]] = deque()
        self._ready: deque[tuple[int, Item | Exception]] = deque()
        self._waker = service.waker(loop)
        self._waiter: asyncio.Future[None] | None = None
        self._waking = False
        self._created = time.perf_counter()
        self.requests: list[Request] = []
        for p, prompt in enumerate(prompts):
            try:
                resolved = params.resolve(llm.generation_config)
                on_prefill = self._reporter(p) if progress else None
                emit = self._emitter(p * params.n)
                self.requests += llm.prepare(
                    prompt, resolved, emit, on_prefill, keep_special_tokens
                )
            except ValueError as error:
                raise bad_value(error, prompt_field, grammar_field) from error
        self.left = len(self.requests)
        self._times: list[float | None] = [None] * self.left

    @property
    def num_tokens(self) -> int:
        """Tokens of all outputs generated so far."""
        return sum(request.num_tokens for request in self.requests)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were found in the prefix cache; each prompt counts once."""
        return sum(request.cached_tokens or 0 for request in self.requests[:: self.params.n])

    def start(self) -> None:
        """Queues the requests; see Service.submit."""
        service = self._service
        service.submit(self)
        try:
            for prompt in self.prompts:
                service.metrics.started(len(prompt), self.params, service.model.llm.max_length)
        except Exception:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Ends unfinished requests with finish reason "abort". Any thread may call it."""
        for request in self.requests:
            request.cancel()

    async def items(self) -> AsyncIterator[tuple[int, Item]]:
        """Yields (output number, item) until every output has ended.

        Raises RuntimeError if the engine fails. Raises ApiError: 400 if the engine refuses the
        request or cannot follow the grammar, 500 if it cannot finish an output.
        """
        open_outputs = len(self.requests)
        while open_outputs:
            while self._ready:
                number, item = self._ready.popleft()
                if isinstance(item, Exception):
                    self.cancel()
                    raise _answered(item)
                if isinstance(item, StreamChunk) and item.finish_reason is not None:
                    open_outputs -= 1
                yield number, item
            if open_outputs:
                self._waiter = self._loop.create_future()
                try:
                    await self._waiter
                finally:
                    self._waiter = None

    async def outputs(self) -> list[CompletionOutput]:
        """Waits for all outputs and returns them. Raises the exceptions of `items`."""
        async for _ in self.items():
            pass
        return [request.output() for request in self.requests]

    # ---- on the engine's thread

    def _emitter(self, base: int) -> Callable[[StreamChunk | Exception], None]:
        def emit(item: StreamChunk | Exception) -> None:
            # An exception has no output number. It ends the whole response.
            index = 0 if isinstance(item, Exception) else item.index
            self._deliver(base + index, item)

        return emit

    def _reporter(self, prompt_index: int) -> Callable[[int, int], None]:
        def report(done: int, total: int) -> None:
            seconds = time.perf_counter() - self._created
            number = prompt_index * self.params.n
            cached = self.requests[number].cached_tokens or 0
            self._deliver(number, PrefillProgress(prompt_index, cached, done, total, seconds))

        return report

    def _deliver(self, number: int, item: Item | Exception) -> None:
        self._inbox.append((number, item))
        if self._waking:  # the pending _wake processes this item too
            return
        self._waking = True
        try:
            self._waker.add(self._wake)
        except RuntimeError:  # the event loop is closed
            self.cancel()

    # ---- on the event loop's thread

    def _wake(self) -> None:
        self._waking = False
        while self._inbox:
            number, item = self._inbox.popleft()
            self._account(number, item)
            self._ready.append((number, item))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _account(self, number: int, item: Item | Exception) -> None:
        metrics = self._service.metrics
        if isinstance(item, StreamChunk):
            if item.token_ids:
                now = time.perf_counter()
                before = self._times[number]
                metrics.tokens(len(item.token_ids), None if before is None else now - before)
                self._times[number] = now
            if item.finish_reason is None:
                return
            metrics.finished(self.requests[number].output())
        elif isinstance(item, PrefillProgress):
            return
        self.left -= 1
        if self.left == 0:
            self._service.done(self)


def check_limits(body: GenerationRequest, context: int | None, name: str | None = None) -> None:
    """Raises ApiError (400) if a request's `token_limit` is too small or too large.

    At least: `min_tokens`. At most: `context`, the context length; None: a larger limit is cut, as
    that of llama.cpp's `n_predict` always is. `name`: the client's name of `limit_field`.
    """
    limit = body.token_limit
    if limit is None:
        return
    field = name or body.limit_field
    if limit < (body.min_tokens or 0):
        raise ApiError(
            400,
            f"min_tokens is {body.min_tokens}, but must be at most {field}, which is {limit}.",
            param="min_tokens",
            code="invalid_value",
        )
    if context is not None and limit > context and body.limit_field != "n_predict":
        known = "max_tokens or max_completion_tokens" if name is None else name
        raise ApiError(
            400,
            f"{known} is too large: {shown(limit)}. The model's context has {context} tokens, for "
            "prompt and output together.",
            param=field,
            code="invalid_value",
        )


def sampling_params(**fields: Any) -> SamplingParams:
    """Creates SamplingParams. Raises ApiError (400) for a value out of range."""
    try:
        return SamplingParams(**fields)
    except ValueError as error:
        raise bad_value(error) from error


def encode(
    tokenizer: Tokenizer, text: str, field: str, *, special: bool, max_length: int | None = None
) -> list[int]:
    """Returns the tokens of the text in a request's field.

    Raises ApiError (400) if the text cannot be encoded or has more than `max_length` tokens.
    """
    try:
        return tokenizer.encode(text, add_special_tokens=special, max_length=max_length)
    except ValueError as error:
        raise bad_value(error, field) from error


def _answered(error: Exception) -> Exception:
    """Returns the exception that a client gets for an exception of the engine."""
    if isinstance(error, GrammarError | OutputError):
        message = f"{str(error)[0].upper()}{str(error)[1:]}."
        if isinstance(error, GrammarError):
            return ApiError(400, message, code="grammar_failed")
        return ApiError(500, message, code="output_failed")
    return bad_value(error) if isinstance(error, ValueError) else error


def bad_value(
    error: ValueError, prompt_field: str = "prompt", grammar_field: str | None = None
) -> ApiError:
    """Returns a 400 with the message of SamplingParams, LLM.prepare or a tokenizer.

    If `error` names a field of the engine, `param` is the name that this field has in the request.
    """
    message = str(error)
    field = error.field if isinstance(error, FieldError) else None
    code = "invalid_value"
    too_long = error if isinstance(error, PromptTooLongError) else None
    if too_long is not None:
        code = "context_length_exceeded"
        # Clients recognise a full context by these words: aider's LiteLLM by the first, clients of
        # llama.cpp by the second.
        message += ": it is longer than the model's context length"
        message += " and exceeds the available context size"
    if message.startswith(("the ", "a ")):
        message = message[0].upper() + message[1:]
    names = {"prompt": prompt_field, "grammar": grammar_field}
    param = names.get(field, field) if field else None
    return ApiError(400, f"{message}.", param=param, code=code, too_long=too_long)
