"""The model behind the routes: admission, and the end of requests at shutdown."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from typing import TYPE_CHECKING, Literal
from weakref import WeakKeyDictionary

import cpmcu
from cpmcu.config import EngineConfig
from cpmcu.engine.runner import EngineLoad
from cpmcu.serving.config import ServerConfig
from cpmcu.serving.errors import ApiError, server_stopping
from cpmcu.serving.metrics import Metrics
from cpmcu.serving.model import Model, model_root, served_names
from cpmcu.serving.responses.store import ResponseStore
from cpmcu.serving.waker import Waker
from cpmcu.serving.workers import Workers

if TYPE_CHECKING:
    from cpmcu.sampling import SamplingParams
    from cpmcu.serving.generation import Generation

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 1


class Service:
    """The model of all requests. Only the event loop's thread may queue and end requests."""

    def __init__(self, engine_config: EngineConfig, config: ServerConfig) -> None:
        self.config = config
        self.created = int(time.time())
        self.root = model_root(engine_config)
        self.names = served_names(engine_config, config)
        self.fingerprint = _fingerprint(self.root, engine_config)
        self.verify_strategy = engine_config.speculation.strategy
        self._wakers: WeakKeyDictionary[asyncio.AbstractEventLoop, Waker] = WeakKeyDictionary()
        self.metrics = Metrics(
            self.names[0], self._load_of_engine, self._cache_config, self.verify_strategy
        )
        self._engine_config = engine_config
        self._model: Model | None = None
        self.workers = Workers()
        self._stopping = False
        self._running: set[Generation] = set()
        self.responses = ResponseStore(config.response_store)

    # ---- life

    def load(self) -> None:
        """Loads the model. Slow. Raises the exceptions of `Model.load`."""
        self.take(Model.load(self._engine_config, self.config))

    def take(self, model: Model) -> None:
        """Makes `model` the one that answers requests."""
        self._model = model

    def close(self) -> None:
        """Frees the model."""
        self.workers.close()
        if self._model is not None:
            self._model.llm.close()

    def stop(self) -> None:
        """Refuses new requests from now on."""
        self._stopping = True

    def cancel_all(self) -> None:
        """Ends every request with finish reason "abort"."""
        for generation in list(self._running):
            generation.cancel()

    # ---- used by routes

    @property
    def state(self) -> Literal["loading", "ready", "failed", "stopping"]:
        """The state that /health returns. "failed": the engine has stopped by itself."""
        if self._stopping:
            return "stopping"
        if self._model is None:
            return "loading"
        return "ready" if self._model.llm.is_open else "failed"

    @property
    def model(self) -> Model:
        """The model. Raises ApiError (503) while it is loading or the server stops."""
        if self._stopping:
            raise server_stopping()
        if self._model is None:
            raise ApiError(
                503, "The model is still loading.", code="loading", retry_after=_RETRY_SECONDS
            )
        return self._model

    @property
    def longest_limit(self) -> int | None:
        """The largest max_tokens that a request may have; None: larger ones are cut."""
        return None if self.config.cut_max_tokens else self.model.llm.max_length

    @property
    def num_busy(self) -> int:
        """Outputs that wait or run; 0 while the model loads."""
        load = self._load_of_engine()
        return 0 if load is None else load.waiting + load.running

    def check_model(self, name: str | None) -> None:
        """Raises ApiError (404) if `name` is not a name of the served model."""
        if name is not None and name not in self.names:
            raise ApiError(
                404,
                f"The model {name[:128]!r} is not served here; there is {self.names[0]!r}.",
                param="model",
                code="model_not_found",
            )

    def check_size(self, size: int, param: str | None = None) -> None:
        """Raises ApiError (400) for `param` if `size` outputs exceed the queue's capacity."""
        if size > self.config.max_queue:
            raise ApiError(
                400,
                f"The request asks for {size} outputs, but this server takes at most "
                f"{self.config.max_queue}.",
                param=param,
                code="too_many_outputs",
            )

    def _check_logprobs(self, params: SamplingParams) -> None:
        most = self.config.most_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            found = getattr(params, name) or 0
            if found > most:
                raise ApiError(
                    400,
                    f"The request asks for {found} likeliest tokens at a position, but this server "
                    f"gives at most {most} (--max-logprobs).",
                    param=name,
                    code="invalid_value",
                )

    def submit(self, generation: Generation) -> None:
        """Queues a request.

        Raises ApiError: 400 if the request exceeds the queue's capacity or --max-logprobs,
        429 if the queue is full, 503 if the engine has stopped.
        """
        size, limit = len(generation.requests), self.config.max_queue
        self.check_size(size)
        self._check_logprobs(generation.params)
        busy = sum(each.left for each in self._running)
        if busy + size > limit:
            self.metrics.rejected()
            raise ApiError(
                429,
                f"The queue is full: {busy} of {limit} outputs are queued or running.",
                code="queue_full",
                retry_after=_RETRY_SECONDS,
            )
        model = self.model
        self._running.add(generation)
        try:
            model.llm.submit(generation.requests)
        except RuntimeError as error:
            self._running.discard(generation)
            logger.error("the engine takes no more requests: %s", error)
            raise _engine_stopped() from error

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prompts; waits for the engine. Raises ApiError (503) if there is none.

        Must not run on the event loop's thread, which it would block.
        """
        model = self.model
        try:
            model.llm.reset_prefix_cache()
        except RuntimeError as error:
            raise _engine_stopped() from error

    def waker(self, loop: asyncio.AbstractEventLoop) -> Waker:
        """The waker of an event loop. Only that loop's thread may call this."""
        return self._wakers.setdefault(loop, Waker(loop))

    def done(self, generation: Generation) -> None:
        """Removes a finished request and logs it."""
        self._running.discard(generation)
        ends = [request.finish for request in generation.requests]
        fields = {
            "prompt_tokens": sum(map(len, generation.prompts)),
            "cached_tokens": generation.cached_tokens,
            "completion_tokens": generation.num_tokens,
            "finish_reasons": ",".join("error" if end is None else end.reason for end in ends),
        }
        logger.info(
            "%d prompt tokens, %d of them cached, %d new ones: %s",
            *fields.values(),
            extra={"fields": fields, "request_id": generation.request_id},
        )

    def _load_of_engine(self) -> EngineLoad | None:
        return None if self._model is None else self._model.llm.engine_load()

    def _cache_config(self) -> dict[str, str]:
        """Returns the KV cache's properties under vLLM's label names; {} while loading."""
        if self._model is None:
            return {}
        llm = self._model.llm
        load = llm.engine_load()
        found = {
            "block_size": load.page_size,
            "num_gpu_blocks": load.num_pages,
            "kv_cache_size_tokens": load.page_size * load.num_pages,
            "kv_cache_max_concurrency": f"{load.page_size * load.num_pages / llm.max_length:.2f}",
            "cache_dtype": llm.spec.dtype,
            "gpu_memory_utilization": llm.config.memory_limit,
            "enable_prefix_caching": llm.config.prefix_cache,
        }
        return {name: str(value) for name, value in found.items()}


def _fingerprint(root: str, config: EngineConfig) -> str:
    """OpenAI's system_fingerprint. If it differs, the same seed may give another answer."""
    settings = repr((root, config)).encode()
    return f"cpmcu-{cpmcu.__version__}-{hashlib.sha256(settings).hexdigest()[:8]}"


def _engine_stopped() -> ApiError:
    return ApiError(503, "The engine has stopped.", code="engine_stopped")
