"""Translates the items of /v1/responses to the messages and tools of /v1/chat/completions."""

from __future__ import annotations

import base64
import binascii
import functools
import json
import logging
from collections.abc import Callable, Sequence
from typing import Literal

from cpmcu.serving.chat.conversation import Origin
from cpmcu.serving.errors import ApiError, refused, unknown_part
from cpmcu.serving.protocol.base import SamplingRequest
from cpmcu.serving.protocol.chat import (
    AllowedFunctions,
    AllowedTools,
    ChatMessage,
    ChatRequest,
    ContentPart,
    FunctionSpec,
    FunctionText,
    NamedFunction,
    NamedTool,
    Tool,
    ToolCallPart,
)
from cpmcu.serving.protocol.responses import InputItem, ItemPart, ResponsesRequest, ToolSpec

logger = logging.getLogger(__name__)

Placed = tuple[str, InputItem]  # (place in the request, such as input[0]; item)

_SEAL = "cpmcu:"
_SYSTEM = ("system", "developer")


def to_chat(body: ResponsesRequest, items: Sequence[Placed]) -> tuple[ChatRequest, Origin]:
    """Returns the request to /v1/chat/completions that continues `items`.

    Raises ApiError (400) for items and tools that are malformed or of unknown types.
    """
    conversation = _Conversation()
    if body.instructions is not None:
        conversation.add_message("instructions", "system", body.instructions)
    for place, item in items:
        conversation.add(place, item)
    messages, places = conversation.finish()
    effort = None if body.reasoning is None else body.reasoning.effort
    sampling = {name: getattr(body, name) for name in SamplingRequest.model_fields}
    chat = ChatRequest(
        **sampling,
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        tools=functions_of(body.tools) or None,
        tool_choice=_tool_choice(body),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=body.response_format,
        logprobs=body.wants_logprobs,
        top_logprobs=body.top_logprobs,
        reasoning_effort=effort,
        chat_template_kwargs=body.chat_template_kwargs,
        return_progress=bool(body.stream) and body.return_progress,
        thinking_token_budget=body.thinking_token_budget,
    )
    chat.check()
    return chat, Origin("input", places, "text.format", "max_output_tokens")


# ---- items


class _Conversation:
    """Joins items to messages. The reasoning, text and calls of one turn are one message."""

    def __init__(self) -> None:
        self._messages: list[ChatMessage] = []
        self._places: list[str] = []
        self._turn: ChatMessage | None = None  # the turn of the assistant that is still open
        self._calls: set[str] = set()

    def add(self, place: str, item: InputItem) -> None:
        """Adds an item."""
        handler = _HANDLERS.get(item.kind)
        if handler is None:
            known = ", ".join(_HANDLERS)
            raise refused(
                f"{place}.type",
                f"{place} is a {item.kind[:64]!r} item, but this server knows only {known}.",
            )
        handler(self, place, item)

    def add_message(
        self, place: str, role: str, content: str | list[ContentPart], call_id: str | None = None
    ) -> None:
        """Adds a message that is not the assistant's."""
        self._turn = None
        self._messages.append(ChatMessage(role=role, content=content, tool_call_id=call_id))
        self._places.append(place)

    def finish(self) -> tuple[list[ChatMessage], list[str]]:
        """Returns the messages and their places in the request.

        System messages at the beginning become one: most templates allow no others. Without any
        other message, an empty one of the user is added.
        """
        roles = [message.role for message in self._messages] + ["end"]
        count = next(i for i, role in enumerate(roles) if role != "system")
        if count > 1:
            texts = [_text_of(message) for message in self._messages[:count]]
            self._messages[:count] = [ChatMessage(role="system", content="\n\n".join(texts))]
            self._places[:count] = ["input"]
        if len(self._messages) == min(count, 1):
            self.add_message("input", "user", "")
        return self._messages, self._places

    # ---- by type

    def _message(self, place: str, item: InputItem) -> None:
        if item.role is None:
            raise missing(place, "role")
        content = _content(item.content, f"{place}.content")
        if item.role == "assistant":
            turn = self._turn
            if turn is None or turn.content is not None or turn.tool_calls:
                turn = self._open(place)
            turn.content = content
        else:
            role = "system" if item.role in _SYSTEM else item.role
            self.add_message(place, role, content)

    def _call(self, place: str, item: InputItem) -> None:
        arguments = item.arguments
        if item.kind == "custom_tool_call":
            arguments = None if item.input is None else _as_arguments(item.input)
        for name, value in (
            ("call_id", item.call_id),
            ("name", item.name),
            ("input" if item.kind == "custom_tool_call" else "arguments", arguments),
        ):
            if value is None:
                raise missing(place, name)
        turn = self._turn or self._open(place)
        function = FunctionText(name=item.name or "", arguments=arguments or "{}")
        turn.tool_calls = [
            *(turn.tool_calls or []),
            ToolCallPart(id=item.call_id, function=function),
        ]
        self._calls.add(item.call_id or "")

    def _result(self, place: str, item: InputItem) -> None:
        if item.call_id is None:
            raise missing(place, "call_id")
        if item.call_id not in self._calls:
            raise ApiError(
                400,
                f"{place} is the output of the call {item.call_id[:64]!r}, "
                "but no item before it is that call.",
                param=f"{place}.call_id",
                code="invalid_value",
            )
        self.add_message(place, "tool", _content(item.output, f"{place}.output"), item.call_id)

    def _reasoning(self, place: str, item: InputItem) -> None:
        text = _reasoning_text(place, item)
        if not text:
            return
        turn = self._turn
        if turn is None or turn.content is not None or turn.tool_calls:
            turn = self._open(place)
        turn.reasoning_content = (turn.reasoning_content or "") + text

    def _open(self, place: str) -> ChatMessage:
        self._turn = ChatMessage(role="assistant")
        self._messages.append(self._turn)
        self._places.append(place)
        return self._turn


_HANDLERS: dict[str, Callable[[_Conversation, str, InputItem], None]] = {
    "message": _Conversation._message,
    "function_call": _Conversation._call,
    "function_call_output": _Conversation._result,
    "reasoning": _Conversation._reasoning,
    "custom_tool_call": _Conversation._call,
    "custom_tool_call_output": _Conversation._result,
}


def missing(place: str, name: str) -> ApiError:
    """Returns a 400 for a missing member that an item or a tool needs."""
    param = f"{place}.{name}"
    return ApiError(400, f"{param} is missing.", param=param, code="invalid_value")


def _content(value: str | list[ItemPart] | None, place: str) -> str | list[ContentPart]:
    if value is None:
        raise ApiError(400, f"{place} is missing.", param=place, code="invalid_value")
    if isinstance(value, str):
        return value
    texts = _texts(value, place)
    return texts[0] if len(texts) == 1 else [ContentPart(type="text", text=t) for t in texts]


def _texts(parts: Sequence[ItemPart], place: str) -> list[str]:
    texts = [part.words for part in parts]
    for part, text in zip(parts, texts):
        if text is None:
            raise unknown_part(place, part.type, ("input_text", "output_text", "text"))
    return [text for text in texts if text is not None]


def _text_of(message: ChatMessage) -> str:
    content = message.content or ""
    return content if isinstance(content, str) else "\n".join(part.text or "" for part in content)


def _as_arguments(text: str) -> str:
    """The input of a custom tool, as arguments of a function."""
    return json.dumps({"input": text})


# ---- reasoning


def seal(text: str) -> str:
    """Returns `encrypted_content` of a reasoning item: the text in base64.

    Clients that keep no text of reasoning (store: false) send it back. `unseal` reads it.
    """
    return base64.b64encode(f"{_SEAL}{text}".encode()).decode()


def unseal(sealed: str) -> str | None:
    """Returns the text of `seal`; None for content of another server."""
    try:
        text = base64.b64decode(sealed, validate=True).decode()
    except (binascii.Error, ValueError):  # UnicodeDecodeError is a ValueError
        return None
    return text.removeprefix(_SEAL) if text.startswith(_SEAL) else None


def _reasoning_text(place: str, item: InputItem) -> str:
    """The text of a reasoning item, else its sealed text, else its summary."""
    if isinstance(item.content, str):
        return item.content
    if item.content:
        return "".join(_texts(item.content, f"{place}.content"))
    found = unseal(item.encrypted_content) if item.encrypted_content else None
    return found or "\n".join(_texts(item.summary or [], f"{place}.summary"))


# ---- tools


def functions_of(tools: Sequence[ToolSpec] | None) -> list[Tool]:
    """Returns the functions among tools; logs the types of the others once."""
    found = []
    for i, tool in enumerate(tools or []):
        if tool.type != "function":
            _tell_of_skipped(tool.type[:64])
            continue
        if tool.name is None:
            raise missing(f"tools[{i}]", "name")
        function = FunctionSpec(
            name=tool.name,
            description=tool.description,
            parameters=tool.parameters,
            strict=tool.strict,
        )
        found.append(Tool(type="function", function=function))
    return found


@functools.lru_cache(maxsize=256)  # once for each type
def _tell_of_skipped(kind: str) -> None:
    logger.info("tools of type %r are skipped: only functions are known", kind)


def _tool_choice(
    body: ResponsesRequest,
) -> Literal["none", "auto", "required"] | NamedTool | AllowedTools | None:
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        return choice
    if choice.type == "function":
        if choice.name is None:
            raise missing("tool_choice", "name")
        return NamedTool(type="function", function=NamedFunction(name=choice.name))
    if choice.type == "allowed_tools":
        for name in ("mode", "tools"):
            if not getattr(choice, name):
                raise missing("tool_choice", name)
        named = [
            NamedTool(type="function", function=NamedFunction(name=tool.name or ""))
            for tool in choice.tools or []
            if tool.type == "function"
        ]
        if not named:
            raise refused("tool_choice", "tool_choice allows no functions.")
        allowed = AllowedFunctions(mode=choice.mode or "auto", tools=named)
        return AllowedTools(type="allowed_tools", allowed_tools=allowed)
    raise refused(
        "tool_choice",
        f"tool_choice has type {choice.type[:64]!r}, but must have function or allowed_tools.",
    )
