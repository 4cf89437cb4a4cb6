"""Plans an answer: the grammar that constrains it, and the parsers of its text.

Every route that answers a conversation uses this module, so reasoning and tool calls mean the same
on each of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from cpmcu.grammar import Grammar
from cpmcu.serving import grammar
from cpmcu.serving.answers import AnswerParser, CallParser, ForcedCalls
from cpmcu.serving.errors import refused
from cpmcu.serving.protocol.chat import ChatRequest, NamedTool
from cpmcu.serving.reasoning import ReasoningSplitter, is_open
from cpmcu.serving.service import Model
from cpmcu.serving.tools import ToolParser
from cpmcu.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerPlan:
    """The grammar and the parsers of an answer."""

    grammar: Grammar | None  # of the whole output, reasoning included
    special_tokens: list[int]  # of tags that the output text must keep
    new_parser: Callable[[], AnswerParser]  # one parser for each choice


def plan_answer(
    model: Model, body: ChatRequest, prompt: str, structure: Grammar | None
) -> AnswerPlan:
    """Returns the plan of the answer to `prompt`, the rendered conversation of `body`.

    `structure` is the grammar that the request asks for. Raises ApiError (400).
    """
    forced = _forced(body)
    if forced is not None and structure is not None:
        raise refused(
            "tool_choice", "A forced tool_choice and structured output exclude each other."
        )
    whole = forced or structure
    notation = model.tool_notation if body.tools_wanted and not forced else None
    tags = model.reasoning_tags if body.separate_reasoning else None
    if tags is not None and whole is not None:
        whole, tags = _with_thinking(whole, tags, model.llm.tokenizer, prompt, body)
    in_use = [*(tags or ()), *((notation.begin, notation.end) if notation else ())]

    def new_parser() -> AnswerParser:
        splitter = None
        if tags is not None:
            inside = is_open(prompt, tags, continues=body.continue_final_message)
            splitter = ReasoningSplitter(tags, inside=inside)
        calls: CallParser | None = None if notation is None else ToolParser(notation)
        if forced:
            named = body.tool_choice if isinstance(body.tool_choice, NamedTool) else None
            calls = ForcedCalls(named.function.name if named else None)
        return AnswerParser(splitter, calls, only_one_call=body.parallel_tool_calls is False)

    return AnswerPlan(whole, _special(model.llm.tokenizer, in_use), new_parser)


def _special(tokenizer: Tokenizer, tags: Sequence[str | None]) -> list[int]:
    """Returns the special tokens among tags. The output text must keep them."""
    ids = {tokenizer.id_of(tag) for tag in tags if tag}
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


def _with_thinking(
    answer: Grammar,
    tags: tuple[str, str],
    tokenizer: Tokenizer,
    prompt: str,
    body: ChatRequest,
) -> tuple[Grammar, tuple[str, str] | None]:
    """Returns (grammar with optional reasoning, tags), or (`answer`, None) without reasoning.

    Reasoning is not allowed in three cases: the prompt has closed it; the answer continues a
    message that has no open reasoning; include_reasoning is false.
    """
    begun = is_open(prompt, tags, continues=body.continue_final_message)
    closed = prompt.rstrip().endswith(tags[1]) or (body.continue_final_message and not begun)
    if closed or not body.include_reasoning:
        return answer, None
    ids = [tokenizer.encode(tag, add_special_tokens=False) for tag in tags]
    begin, end = (found[0] if len(found) == 1 else None for found in ids)
    return grammar.after_thinking(answer, tags, (begin, end), begun=begun), tags
