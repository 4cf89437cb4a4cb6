"""Translates requests of /v1/messages to requests of /v1/chat/completions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from cpmcu.serving import strict_json
from cpmcu.serving.config import ServerConfig
from cpmcu.serving.errors import ApiError, refused
from cpmcu.serving.limits import check_text
from cpmcu.serving.protocol.base import JsonSchema, ResponseFormat
from cpmcu.serving.protocol.chat import (
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
from cpmcu.serving.protocol.messages import (
    Block,
    CountRequest,
    InputTool,
    MessagesRequest,
    ResultBlock,
)

# Role of a message -> the types of its blocks.
_TYPES = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}


def to_chat(
    body: CountRequest, config: ServerConfig, *, later_system: Literal["system", "user"] = "system"
) -> ChatRequest:
    """Returns the chat request whose prompt and answer are those of `body`.

    `later_system`: the role of system messages that do not begin the conversation. Raises ApiError
    (400) for a block that is malformed or not supported.
    """
    turns = _Turns(config.max_text_length, later_system)
    if body.system:
        turns.add("system", body.system, "system")
    for i, message in enumerate(body.messages):
        turns.add(message.role, message.content, f"messages[{i}].content")
    messages = turns.messages()
    continued = body.messages[-1].role == "assistant"
    if continued and messages[-1].tool_calls:
        raise _invalid(
            "messages", "The last message has a tool_use block, but no tool_result follows it."
        )
    fields: dict[str, Any] = {"model": body.model, "messages": messages}
    fields |= {"add_generation_prompt": not continued, "continue_final_message": continued}
    fields |= _tool_fields(body) | _thinking_fields(body)
    if isinstance(body, MessagesRequest):
        fields |= _sampling_fields(body)
    return ChatRequest(**fields)


def _sampling_fields(body: MessagesRequest) -> dict[str, Any]:
    names = ("stream", "temperature", "top_p", "top_k", "min_p", "seed", "cache_salt")
    form = body.output_format
    if body.output_config is not None and body.output_config.format is not None:
        form = body.output_config.format
    response_format = None
    if form is not None:
        schema = JsonSchema(schema=form.schema_)
        response_format = ResponseFormat(type="json_schema", json_schema=schema, schema=None)
    return {
        **{name: getattr(body, name) for name in (*names, "return_metrics")},
        "max_tokens": max(body.max_tokens, 1),
        "stop": body.stop_sequences,
        "response_format": response_format,
    }


def _thinking_fields(body: CountRequest) -> dict[str, Any]:
    effort = body.output_config.effort if body.output_config else None
    variables = dict(body.chat_template_kwargs or {})
    thinks = body.thinking is None or body.thinking.type != "disabled"
    if body.thinking is not None:
        variables.setdefault("enable_thinking", thinks)
    return {
        "chat_template_kwargs": variables,
        "reasoning_effort": effort,
        "include_reasoning": thinks,
    }


def _tool_fields(body: CountRequest) -> dict[str, Any]:
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or [])]
    choice = body.tool_choice
    if choice is None:
        return {"tools": tools}
    wanted: Any = "required" if choice.type == "any" else choice.type
    if choice.type == "tool":
        if choice.name is None:
            raise _invalid("tool_choice", "tool_choice.name is missing.")
        wanted = NamedTool(type="function", function=NamedFunction(name=choice.name))
    elif choice.type == "any" and not tools:
        raise _invalid("tool_choice", "tool_choice any needs tools.")
    parallel = False if choice.disable_parallel_tool_use else None
    return {"tools": tools, "tool_choice": wanted, "parallel_tool_calls": parallel}


def _tool(tool: InputTool, path: str) -> Tool:
    if tool.type not in (None, "custom"):
        raise refused(
            f"{path}.type",
            f"{path} has type {tool.type[:64]!r}, but only tools with an input_schema are known.",
        )
    if tool.input_schema is None:
        raise _invalid(f"{path}.input_schema", f"{path}.input_schema is missing.")
    # Nothing else: a cache_control, which moves from request to request, would change the prompt.
    function = FunctionSpec(
        name=tool.name, description=tool.description, parameters=tool.input_schema
    )
    return Tool(type="function", function=function)


@dataclasses.dataclass(slots=True)
class _Turn:
    """A message of the chat. Adjacent blocks of one role form one turn."""

    role: str
    texts: list[str] = dataclasses.field(default_factory=list)
    thoughts: list[str] = dataclasses.field(default_factory=list)
    calls: list[ToolCallPart] = dataclasses.field(default_factory=list)
    more: dict[str, Any] = dataclasses.field(default_factory=dict)  # of a tool's result

    def message(self) -> ChatMessage:
        """Returns the turn as a chat message."""
        content: str | list[ContentPart] | None = "".join(self.texts)
        if len(self.texts) > 1:
            content = [ContentPart(type="text", text=text) for text in self.texts]
        return ChatMessage(
            role=self.role,
            content=content,
            reasoning_content="\n".join(self.thoughts) or None,
            tool_calls=self.calls or None,
            **self.more,
        )


class _Turns:
    """Collects content blocks as messages of the chat."""

    def __init__(self, max_text_length: int, later_system: str) -> None:
        self._max_text_length = max_text_length
        self._later_system = later_system
        self._turns: list[_Turn] = []
        self._names: dict[str, str] = {}  # id of a call -> the tool's name

    def messages(self) -> list[ChatMessage]:
        """Returns all messages."""
        return [turn.message() for turn in self._turns]

    def add(self, role: str, content: str | Sequence[Block], path: str) -> None:
        """Adds a message's content, which is at `path` of the request."""
        if role == "system" and any(turn.role != "system" for turn in self._turns):
            role, known = self._later_system, _TYPES["system"]
        else:
            known = _TYPES[role]
        if isinstance(content, str):
            self._turn(role).texts.append(self._checked(content, path))
            return
        if not content:
            self._turn(role)
        for j, block in enumerate(content):
            self._add_block(role, block, f"{path}[{j}]", known)

    def _add_block(self, role: str, block: Block, path: str, known: Sequence[str]) -> None:
        if block.type not in known:
            raise _unknown(path, block.type, known)
        if block.type == "text":
            text = self._required(block.text, f"{path}.text")
            self._turn(role).texts.append(self._checked(text, f"{path}.text"))
        elif block.type == "thinking":
            text = self._required(block.thinking, f"{path}.thinking")
            self._turn(role).thoughts += [self._checked(text, f"{path}.thinking")] if text else []
        elif block.type == "redacted_thinking":  # encrypted by the server that thought it
            self._turn(role)
        elif block.type == "tool_use":
            self._add_call(block, path)
        else:
            self._add_result(block, path)

    def _add_call(self, block: Block, path: str) -> None:
        call_id = self._required(block.id, f"{path}.id")
        name = self._required(block.name, f"{path}.name")
        if block.input is None:
            raise _invalid(f"{path}.input", f"{path}.input is missing.")
        try:
            arguments = strict_json.write(block.input)
        except ValueError as error:
            raise _invalid(f"{path}.input", f"{path}.input is not valid: {error}.") from error
        self._names[call_id] = name
        function = FunctionText(name=name, arguments=self._checked(arguments, f"{path}.input"))
        self._turn("assistant").calls.append(ToolCallPart(id=call_id, function=function))

    def _add_result(self, block: Block, path: str) -> None:
        call_id = self._required(block.tool_use_id, f"{path}.tool_use_id")
        content = block.content or ""
        if isinstance(content, str):
            texts = [self._checked(content, f"{path}.content")]
        else:
            texts = [self._result(part, f"{path}.content[{k}]") for k, part in enumerate(content)]
        if block.is_error:
            texts[:1] = [f"Error: {text}" for text in texts[:1] or [""]]
        more = {"tool_call_id": call_id, "name": self._names.get(call_id)}
        self._turns.append(_Turn("tool", texts, more=more))

    def _result(self, part: ResultBlock, path: str) -> str:
        if part.type == "text":
            return self._checked(self._required(part.text, f"{path}.text"), f"{path}.text")
        if part.type == "tool_reference":  # the prompt describes every tool anyway
            return self._required(part.tool_name, f"{path}.tool_name")
        raise _unknown(path, part.type, ("text", "tool_reference"))

    def _turn(self, role: str) -> _Turn:
        if not self._turns or self._turns[-1].role != role:
            self._turns.append(_Turn(role))
        return self._turns[-1]

    def _checked(self, text: str, path: str) -> str:
        check_text(text, path, self._max_text_length)
        return text

    @staticmethod
    def _required(value: str | None, path: str) -> str:
        if value is None:
            raise _invalid(path, f"{path} is missing.")
        return value


def _unknown(path: str, found: str, known: Sequence[str]) -> ApiError:
    why = ": the model reads text only" if found in ("image", "document") else ""
    return refused(path, f"{path} has type {found[:64]!r}, but must be {' or '.join(known)}{why}.")


def _invalid(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")
