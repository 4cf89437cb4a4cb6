"""Plans an answer: the grammar that constrains it, and the parsers of its text.

Every route that answers a conversation uses this module, so reasoning and tool calls mean the same
on each of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from cpmcu.grammar import Grammar
from cpmcu.sampling import ThinkingLimit
from cpmcu.serving import request_grammar as grammar
from cpmcu.serving.chat.answers import AnswerParser
from cpmcu.serving.errors import ApiError, refused
from cpmcu.serving.model import Model
from cpmcu.serving.protocol.chat import ChatRequest, NamedTool
from cpmcu.serving.reasoning_parsers.base import ReasoningParser
from cpmcu.serving.tool_parsers.forced import ForcedCalls
from cpmcu.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerPlan:
    """The grammar, the limit of the reasoning and the parsers of an answer."""

    grammar: Grammar | None  # grammar of the whole output, reasoning included; None: no grammar
    thinking: ThinkingLimit | None
    forced: bool  # the grammar forces calls
    special_tokens: list[int]  # ids of tags that the output text must keep
    new_parser: Callable[[], AnswerParser]  # makes one parser for each choice


def plan_answer(
    model: Model, body: ChatRequest, prompt: str, structure: Grammar | None
) -> AnswerPlan:
    """Returns the plan of the answer to `prompt`, the rendered conversation of `body`.

    `structure` is the grammar that the request asks for. Raises ApiError (400).
    """
    forced = _forced(body)
    if forced is not None and structure is not None:
        if body.grammar_field != "response_format":
            raise refused(
                "tool_choice", f"A forced tool_choice and {body.grammar_field} exclude each other."
            )
        structure = None  # response_format describes text, and a forced call is not text
    whole = forced or structure
    tools = {tool.function.name: tool.function.parameters or {} for tool in body.tools_wanted}
    calls = model.tool_format if tools and not forced else None
    tokenizer = model.llm.tokenizer
    begins = calls.make(tools).begins() if calls and structure else ()
    if calls is not None and structure is not None and begins:  # the model may call or answer
        tags = {tag: _token_of(tokenizer, tag) for tag in calls.tags}
        whole = grammar.or_calls(structure, begins, tags)
    thinking = model.reasoning_parser
    begun = thinking is not None and thinking.is_open(prompt, continues=body.continue_final_message)
    if thinking is not None and whole is not None:
        if not _may_think(thinking, prompt, body, begun=begun):
            thinking = None
        else:
            whole = _after_thinking(whole, thinking, tokenizer, begun=begun)
    limit = None if thinking is None else _limit(body, thinking, prompt, tokenizer, begun=begun)
    if not body.separate_reasoning and not forced:
        thinking = None
    named = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None

    def new_parser() -> AnswerParser:
        parser = ForcedCalls(named, tools) if forced else calls.make(tools) if calls else None
        return AnswerParser(
            None if thinking is None else thinking(inside=begun),
            parser,
            only_one_call=body.parallel_tool_calls is False,
        )

    of_thinking = (thinking.begin, thinking.end, *thinking.tags) if thinking else ()
    in_use = (*of_thinking, *(calls.tags if calls else ()))
    return AnswerPlan(whole, limit, forced is not None, _special(tokenizer, in_use), new_parser)


def _special(tokenizer: Tokenizer, tags: Sequence[str]) -> list[int]:
    """Returns the special tokens among tags. The output text must keep them."""
    ids = {tokenizer.id_of(tag) for tag in tags}
    return [token for token in ids if token is not None and tokenizer.is_special(token)]


def _forced(body: ChatRequest) -> Grammar | None:
    """Returns the grammar of a forced tool call; None if no call is forced."""
    anything: dict[str, Any] = {"type": "object"}
    schemas = {t.function.name: t.function.parameters or anything for t in body.tools_wanted}
    if isinstance(body.tool_choice, NamedTool):
        return grammar.of_arguments(schemas[body.tool_choice.function.name])
    if body.must_call:
        return grammar.of_calls(schemas, several=body.parallel_tool_calls is not False)
    return None


def unusable_tool(model: Model, body: ChatRequest) -> ApiError | None:
    """Returns the error (400) of the first tool whose schema cannot be enforced."""
    for tool in body.tools_wanted:
        try:
            arguments = grammar.of_arguments(tool.function.parameters or {})
            model.llm.check_grammar(arguments)
        except ValueError as error:
            return ApiError(
                400,
                f"Tool {tool.function.name!r} has an invalid 'parameters' schema: {error}.",
                param="tools",
                code="invalid_value",
            )
    return None


def _may_think(
    parser: type[ReasoningParser], prompt: str, body: ChatRequest, *, begun: bool
) -> bool:
    """May reasoning precede the grammar? If the prompt has begun reasoning, it may.

    Otherwise it may not in three cases. The prompt has closed the reasoning, the answer continues a
    message, or the request wants reasoning within the content.
    """
    return begun or not (
        prompt.rstrip().endswith(parser.end)
        or body.continue_final_message
        or not body.separate_reasoning
    )


def _after_thinking(
    answer: Grammar, parser: type[ReasoningParser], tokenizer: Tokenizer, *, begun: bool
) -> Grammar:
    """Returns the grammar of reasoning and then `answer`."""
    tags = (parser.begin, parser.end)
    tokens = (_token_of(tokenizer, parser.begin), _token_of(tokenizer, parser.end))
    return grammar.after_thinking(answer, tags, tokens, begun=begun)


def _limit(
    body: ChatRequest,
    parser: type[ReasoningParser],
    prompt: str,
    tokenizer: Tokenizer,
    *,
    begun: bool,
) -> ThinkingLimit | None:
    """Returns `thinking_token_budget` less the reasoning tokens of the prompt; None: no limit."""
    budget = body.thinking_token_budget
    if budget is None or budget < 0:
        return None
    if begun:
        known = prompt[prompt.rfind(parser.begin) + len(parser.begin) :]
        budget = max(0, budget - len(tokenizer.encode(known, add_special_tokens=False)))
    return ThinkingLimit(tokens=budget, begin=parser.begin, end=parser.end, begun=begun)


def _token_of(tokenizer: Tokenizer, tag: str) -> int | None:
    """Returns a tag's token id; None if the tag is several tokens."""
    ids = tokenizer.encode(tag, add_special_tokens=False)
    return ids[0] if len(ids) == 1 else None
