"""/v1/chat/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from cpmcu.outputs import CompletionOutput, StreamChunk, TokenLogprobs
from cpmcu.serving.chat.answers import AnswerParser, Part, metrics_of
from cpmcu.serving.chat.job import ChatJob, prepare
from cpmcu.serving.generation import PrefillProgress
from cpmcu.serving.http import sse
from cpmcu.serving.logprobs import entries, of_prompt
from cpmcu.serving.protocol.base import ERRORS, ChatUsage, CompletionTokensDetails
from cpmcu.serving.protocol.chat import (
    AnswerMessage,
    ChatChoice,
    ChatRequest,
    ChatResponse,
    ChoiceLogprobs,
    TokenLogprob,
    ToolCallPart,
)
from cpmcu.serving.replies import Reply, answer, service_of, written
from cpmcu.text.token_text import TokensUpTo

router = APIRouter(tags=["generation"])

_BARE = 3  # a streamed choice without content has so many members


@router.post(
    "/v1/chat/completions",
    response_model=ChatResponse,
    responses={**ERRORS, 200: {"content": sse.CONTENT}},
)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answers a conversation."""
    service = service_of(request)
    body.check()
    service.check_model(body.model)
    loop = asyncio.get_running_loop()
    job = await service.workers.run(request, body.text_length, prepare, service, body, loop)
    chat = ChatReply(Reply(body, service, "chatcmpl", "chat.completion.chunk"), body, job)
    return await answer(
        request,
        job.generation,
        body.stream,
        chat.events,
        lambda outputs: written(chat.whole(outputs), **chat.verbose()),
    )


class ChatReply:
    """Formats the response to a chat request."""

    def __init__(self, reply: Reply, body: ChatRequest, job: ChatJob) -> None:
        self._reply = reply
        self._body = body
        self._job = job
        self._thoughts = [TokensUpTo(job.texts) for _ in job.generation.requests]

    def whole(self, outputs: Sequence[CompletionOutput]) -> ChatResponse:
        """Returns the response as one object."""
        reply, generation = self._reply, self._job.generation
        return ChatResponse(
            id=reply.id,
            created=reply.created,
            model=reply.model,
            system_fingerprint=reply.system_fingerprint,
            choices=[self.choice(output) for output in outputs],
            usage=self.usage(),
            prompt_logprobs=of_prompt(
                self._job.texts,
                generation.requests[0].prompt_logprobs,
                self._reply.num_prompt_logprobs,
            ),
            prompt_token_ids=generation.prompts[0] if self._body.return_token_ids else None,
            metrics=metrics_of(outputs) if reply.wants_metrics else None,
            timings=reply.timings(outputs),
        )

    def verbose(self) -> dict[str, Any]:
        """Returns llama.cpp's member with the rendered prompt, as requested."""
        return {"__verbose": {"prompt": self._job.prompt}} if self._body.verbose else {}

    def choice(self, output: CompletionOutput) -> ChatChoice:
        """Returns the answer of one output."""
        parser = self._job.new_parser()
        part = parser.push(output.text, final=True)
        self._thoughts[output.index].add(output.token_ids, part.reasoning)
        thought = part.reasoning if self._body.include_reasoning else ""
        content = None if part.calls and not part.content.strip() else part.content
        message = AnswerMessage(
            content=self._body.echoed + (content or "") if self._body.echoed else content,
            reasoning_content=thought or None,
            reasoning=thought or None,
            tool_calls=[ToolCallPart(**call.to_dict()) for call in part.calls] or None,
        )
        logprobs = None
        if output.logprobs is not None:
            found = [TokenLogprob(**entry) for entry in self._logprobs(output.logprobs)]
            logprobs = ChoiceLogprobs(content=found)
        return ChatChoice(
            index=output.index,
            message=message,
            logprobs=logprobs,
            finish_reason=_finish_reason(output.finish_reason, parser),
            stop_reason=output.stop_reason,
            matched_stop=self._reply.matched_stop(output),
            token_ids=output.token_ids if self._body.return_token_ids else None,
        )

    async def events(self) -> AsyncIterator[bytes]:
        """Yields the events of the stream."""
        reply, generation = self._reply, self._job.generation
        parsers = [self._job.new_parser() for _ in generation.requests]
        begun = [False] * len(parsers)
        tokens = 0  # tokens of all choices so far, this chunk included
        async for index, item in generation.items():
            if isinstance(item, PrefillProgress):
                yield reply.progress(item)
                continue
            if not begun[index]:  # not earlier: clients time the first token by it
                begun[index] = True
                first = _delta(index, {"role": "assistant", "content": None})
                usage = self._usage_so_far(tokens)
                yield reply.chunk([first], **usage, **self._prompt(), **self.verbose())
                if self._body.echoed:
                    yield reply.chunk([_delta(index, {"content": self._body.echoed})], **usage)
            tokens += len(item.token_ids)
            part = parsers[index].push(item.text, final=item.finish_reason is not None)
            if reply.has_usage and parsers[index].may_think:
                self._thoughts[index].add(item.token_ids, part.reasoning)
            fields = self._fields(part)
            choice = _delta(index, fields)
            self._add_details(choice, item)
            if item.finish_reason is not None:
                choice["finish_reason"] = _finish_reason(item.finish_reason, parsers[index])
                choice["stop_reason"] = item.stop_reason
                choice["matched_stop"] = reply.matched_stop(item)
            elif not fields and len(choice) == _BARE:
                continue  # the text is held back, and the chunk has no other content
            more = reply.timings_so_far(generation, index)
            yield reply.chunk([choice], **self._usage_so_far(tokens), **more)
        last = reply.last(generation, self.usage())
        if last is not None:
            yield last

    def usage(self, tokens: int | None = None) -> ChatUsage:
        """Returns the token counts. `tokens`: number in the outputs (default: all generated)."""
        counts = dict(self._reply.usage(self._job.generation, tokens))
        thought = sum(each.count for each in self._thoughts)
        details = CompletionTokensDetails(reasoning_tokens=thought)
        return ChatUsage(**counts, completion_tokens_details=details)

    def _usage_so_far(self, tokens: int) -> dict[str, Any]:
        return {"usage": self.usage(tokens).model_dump()} if self._reply.has_usage_so_far else {}

    def _prompt(self) -> dict[str, Any]:
        """Returns the prompt's members of a choice's first chunk, as requested."""
        if not self._body.return_token_ids:
            return {}
        return {"prompt_token_ids": self._job.generation.prompts[0]}

    def _fields(self, part: Part) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if part.reasoning and self._body.include_reasoning:
            fields |= {"reasoning_content": part.reasoning, "reasoning": part.reasoning}
        if part.content:
            fields["content"] = part.content
        if part.deltas:
            fields["tool_calls"] = [delta.to_dict() for delta in part.deltas]
        return fields

    def _add_details(self, choice: dict[str, Any], item: StreamChunk) -> None:
        if item.logprobs:
            choice["logprobs"] = {"content": self._logprobs(item.logprobs)}
        if self._body.return_token_ids:
            choice["token_ids"] = item.token_ids

    def _logprobs(self, scores: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        return entries(
            self._job.texts,
            scores,
            as_ids=self._reply.tokens_as_ids,
            with_chosen=bool(self._body.logprob_token_ids),
        )


def _delta(index: int, fields: dict[str, Any]) -> dict[str, Any]:
    # OpenAI's library has no attribute for an absent member, and clients read this one unasked.
    delta = {"reasoning_content": None, **fields}
    return {"index": index, "delta": delta, "finish_reason": None}


def _finish_reason(reason: str, parser: AnswerParser) -> Any:
    return "tool_calls" if reason == "stop" and parser.has_calls else reason
