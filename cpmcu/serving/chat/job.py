"""From a conversation to the engine's request and the parsers of its outputs.

Every endpoint that answers a conversation translates its request to a ChatRequest and calls
`prepare`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

from cpmcu.serving.chat.answer_plan import plan_answer, unusable_tool
from cpmcu.serving.chat.answers import AnswerParser
from cpmcu.serving.chat.conversation import IN_MESSAGES, Origin, checked, render
from cpmcu.serving.errors import ApiError
from cpmcu.serving.generation import Generation, check_limits, encode, sampling_params
from cpmcu.serving.protocol.chat import ChatRequest
from cpmcu.serving.service import Service
from cpmcu.text.token_text import TokenTexts


@dataclasses.dataclass(frozen=True, slots=True)
class ChatJob:
    """The engine's requests and the parsers of their outputs."""

    prompt: str
    generation: Generation
    new_parser: Callable[[], AnswerParser]
    texts: TokenTexts


def prepare(
    service: Service,
    body: ChatRequest,
    loop: asyncio.AbstractEventLoop,
    origin: Origin = IN_MESSAGES,
) -> ChatJob:
    """Renders, tokenizes and checks a request. Slow, so it runs off the event loop.

    `origin`: the client's names of the fields, for errors.
    """
    model = service.model
    prompt = prompt_text(service, body, origin)
    transferred = body.kv_transfer_params and body.kv_transfer_params.prompt_token_ids
    ids = transferred or encode(
        model.llm.tokenizer,
        prompt,
        origin.field,
        special=body.add_special_tokens,
        max_length=model.llm.max_length if body.truncate_prompt_tokens is None else None,
    )
    ids = body.truncated(ids, model.llm.max_length)
    check_limits(body, service.longest_limit, origin.limit_field)
    fields = body.sampling_fields(origin.format_field, lambda: model.llm.named_tokens)
    grammar = fields.pop("grammar")
    most = service.config.most_logprobs
    plan = plan_answer(model, body, prompt, grammar)
    params = sampling_params(
        max_tokens=body.token_limit,
        logprobs=body.num_logprobs(most),
        prompt_logprobs=body.num_prompt_logprobs(most),
        grammar=plan.grammar,
        thinking=plan.thinking,
        **fields,
    )
    grammar_field = body.grammar_field
    if grammar is None or plan.forced:
        grammar_field = "tools"
    elif grammar_field == "response_format":
        grammar_field = origin.format_field
    try:
        generation = Generation(
            service,
            [ids],
            params,
            loop,
            prompt_field="kv_transfer_params.prompt_token_ids" if transferred else origin.field,
            grammar_field=grammar_field,
            progress=body.return_progress,
            keep_special_tokens=plan.special_tokens,
        )
    except ApiError as error:
        unusable = unusable_tool(model, body) if plan.forced and error.param == "tools" else None
        raise (unusable or error) from error
    return ChatJob(prompt, generation, plan.new_parser, model.llm.token_texts)


def num_prompt_tokens(service: Service, body: ChatRequest, origin: Origin = IN_MESSAGES) -> int:
    """Returns the number of tokens of a request's prompt. Slow, as `prepare`."""
    prompt = prompt_text(service, body, origin)
    return len(encode(service.model.llm.tokenizer, prompt, origin.field, special=False))


def prompt_text(service: Service, body: ChatRequest, origin: Origin = IN_MESSAGES) -> str:
    """Returns the rendered conversation of a request."""
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    return render(
        service.model.template,
        checked(body.messages, service.config, origin),
        tools=body.tools_wanted,
        variables=variables,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        origin=origin,
    )
