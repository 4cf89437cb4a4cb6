"""One response of /v1/responses while it runs: its events, its object, and its end."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from fastapi.responses import Response

from cpmcu.outputs import CompletionOutput, StreamChunk, TokenLogprobs
from cpmcu.serving.chat.answers import metrics_of, timings_of
from cpmcu.serving.chat.job import ChatJob
from cpmcu.serving.errors import ApiError, internal_error
from cpmcu.serving.generation import PrefillProgress
from cpmcu.serving.http.sse import encoded
from cpmcu.serving.protocol.responses import SEALED_REASONING, ResponsesRequest
from cpmcu.serving.replies import progress_members
from cpmcu.serving.responses.items import functions_of
from cpmcu.serving.responses.output import Event, ResponseOutput
from cpmcu.serving.service import Service
from cpmcu.text.token_text import tokens_up_to

logger = logging.getLogger(__name__)

_NO_END = {"code": "server_error", "message": "The server ended this response before its end."}


class ResponseRun:
    """A response from its start to its end. `on_end` gets the ended response object."""

    def __init__(
        self,
        body: ResponsesRequest,
        job: ChatJob,
        service: Service,
        on_end: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self.id = f"resp_{uuid.uuid4().hex}"
        self.generation = job.generation
        self._job = job
        self._body = body
        self._on_end = on_end
        self._parser = job.new_parser()
        self._output = ResponseOutput(
            seal_reasoning=SEALED_REASONING in (body.include or []),
            texts=job.texts if body.wants_logprobs else None,
            as_ids=service.config.return_tokens_as_token_ids,
        )
        self._status = "queued" if body.background else "in_progress"
        self._error: dict[str, Any] | None = None
        self._completed_at: int | None = None
        self._final: dict[str, Any] | None = None  # the response object when the response has ended
        self._cancelled = False
        self._ended = False
        self._number = 0  # number of the next event
        wanted = body.return_metrics
        self._wants_metrics = service.config.return_metrics if wanted is None else wanted
        self._tokenizer = service.model.llm.tokenizer
        self._frame = self._fixed(service)
        self._task: asyncio.Task[None] | None = None

    # ---- the forms of an answer

    async def events(self) -> AsyncIterator[bytes]:
        """Yields the events of a stream."""
        for kind in ("created", self._status):
            yield self._bytes({"type": f"response.{kind}", "response": self.response()})
        async for _, item in self.generation.items():
            if self._status == "queued":
                self._status = "in_progress"
                yield self._bytes({"type": "response.in_progress", "response": self.response()})
            if isinstance(item, PrefillProgress):
                members = progress_members(item, timings=self._body.timings_per_token)
                known = {"type": "response.in_progress", "response": self.response()}
                yield self._bytes({**known, **members})
                continue
            for event in self._take(item):
                if event["type"].endswith(".delta"):
                    event |= self._timings()
                yield self._bytes(event)
        self.end()
        # OpenAI has no event for a cancelled response; a failed one would be tried again.
        kind = "incomplete" if self._status == "cancelled" else self._status
        last = {"type": f"response.{kind}", "response": self.response()}
        yield self._bytes({**last, **self._timings()})

    def whole(self, outputs: Sequence[CompletionOutput]) -> Response:
        """Returns the response as one object. May run on another thread than the event loop's."""
        for _ in self._take(outputs[0]):
            pass
        return Response(encoded(self.response()), media_type="application/json")

    def start_in_background(self) -> None:
        """Starts the response, which runs to its end without a client."""
        self.generation.start()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            async for _ in self.events():
                pass
        except ApiError as error:
            self.failed(error)
        except Exception:
            logger.exception("a response in the background failed")
            self.failed(internal_error())
        finally:
            self.end()

    # ---- its end

    def cancel(self) -> None:
        """Ends the response with status "cancelled"."""
        self._cancelled = True
        self.generation.cancel()

    def failed(self, error: ApiError) -> bytes:
        """Ends the response with an error. Returns the event that tells of it."""
        if not self._ended:
            code = "invalid_prompt" if error.status < 500 else "server_error"
            self._error = {"code": code, "message": str(error)}
            self._close("failed")
            self.end()
        return self._bytes({"type": "response.failed", "response": self.response()})

    def end(self) -> None:
        """Ends the response, if it has not ended, because no client waits for it any more."""
        if self._ended:
            return
        self._ended = True
        self.generation.cancel()
        if self._is_open:
            self._close("cancelled")
        self._on_end(self.id, self.response())

    def _take(self, item: StreamChunk | CompletionOutput) -> Iterator[Event]:
        if self._ended:
            return
        reason = item.finish_reason
        part = self._parser.push(item.text, final=reason is not None)
        scores: list[TokenLogprobs] | None = item.logprobs
        yield from self._output.add(part, scores)
        if reason is None:
            return
        status = {"stop": "completed", "length": "incomplete", "abort": "failed"}[reason]
        if self._cancelled:
            status = "cancelled"
        elif reason == "abort":
            self._error = _NO_END
        yield from self._end_output(status)

    def _close(self, status: str) -> None:
        for _ in self._end_output(status):
            pass

    def _end_output(self, status: str) -> Iterator[Event]:
        yield from self._output.end("completed" if status == "completed" else "incomplete")
        self._status = status
        if status == "completed":
            self._completed_at = int(time.time())

    @property
    def _is_open(self) -> bool:
        return self._status in ("queued", "in_progress")

    # ---- the object

    def response(self) -> dict[str, Any]:
        """Returns the response object as it is now."""
        if self._final is not None:
            return self._final
        running = self._is_open
        status = self._status
        if status == "queued" and self.generation.requests[0].cached_tokens is not None:
            status = "in_progress"  # the engine has begun to read its prompt
        cut = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        found = {
            **self._frame,
            "status": "cancelled" if running and self._cancelled else status,
            "completed_at": self._completed_at,
            "error": self._error,
            "incomplete_details": cut,
            "output": self._output.items(),
            "usage": None if running else self._usage(),
        }
        request = self.generation.requests[0]
        if self._wants_metrics and request.finish is not None:
            found["metrics"] = metrics_of([request.output()])
        if not running:
            if self._body.enable_response_messages:
                found |= self._messages()
            self._final = found
        return found

    def _messages(self) -> dict[str, Any]:
        """The prompt and the output as the model has them, as vLLM returns them on request."""
        prompt, tokens = self.generation.prompts[0], self.generation.requests[0].output_tokens
        said = self._tokenizer.decode(tokens, skip_special_tokens=False)
        sides = {
            "input_messages": (self._job.prompt, prompt),
            "output_messages": (said, tokens),
        }
        return {
            name: [{"type": "raw_message_tokens", "message": text, "tokens": list(ids)}]
            for name, (text, ids) in sides.items()
        }

    def _timings(self) -> dict[str, Any]:
        """Returns llama.cpp's member of an event, as requested."""
        if not self._body.timings_per_token:
            return {}
        return {"timings": timings_of(self.generation.requests[0].timings())}

    def _usage(self) -> dict[str, Any]:
        generation = self.generation
        prompt, tokens = len(generation.prompts[0]), generation.requests[0].output_tokens
        thought = tokens_up_to(self._job.texts, tokens, self._output.reasoning)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {
                "cached_tokens": generation.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": len(tokens),
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": prompt + len(tokens),
        }

    def _bytes(self, event: Event) -> bytes:
        numbered = {"type": event["type"], "sequence_number": self._number, **event}
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encoded(numbered))

    def _fixed(self, service: Service) -> dict[str, Any]:
        """Returns the members of the response object that do not change."""
        body = self._body
        params = self.generation.params.resolve(service.model.llm.generation_config)
        choice = body.tool_choice
        reasoning = body.reasoning
        text = body.text
        form = None if text is None or text.format is None else text.format
        plain = form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}
        return {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": body.model or service.names[0],
            "background": bool(body.background),
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {
                "effort": reasoning.effort if reasoning else None,
                "summary": reasoning.summary if reasoning else None,
            },
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": body.wants_store and service.responses.limit > 0,
            "temperature": params.temperature,
            "text": {"format": plain, "verbosity": text.verbosity if text else None},
            "tool_choice": (
                choice.model_dump(exclude_none=True)
                if choice is not None and not isinstance(choice, str)
                else choice or "auto"
            ),
            "tools": [
                {"type": "function", "description": None, "parameters": None, "strict": None}
                | tool.function.model_dump()
                for tool in functions_of(body.tools)
            ],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "user": body.user,
        }
