"""Translates requests of /v1/messages to requests of /v1/chat/completions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from cpmcu.checks import shown
from cpmcu.serving.chat.conversation import Origin
from cpmcu.serving.errors import ApiError, refused
from cpmcu.serving.http import strict_json
from cpmcu.serving.protocol.base import JsonSchema, ResponseFormat, SamplingRequest
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
BLOCK_TYPES = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}


def to_chat(body: CountRequest) -> tuple[ChatRequest, Origin]:
    """Returns the chat request whose prompt and answer are those of `body`.

    Raises ApiError (400) for a block that is malformed or not supported.
    """
    turns = _Turns()
    if body.system:
        turns.add("system", body.system, "system")
    for i, message in enumerate(body.messages):
        turns.add(message.role, message.content, f"messages[{i}].content")
    messages, origin = turns.messages()
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
        if body.output_config is None or body.output_config.format is None:
            origin = dataclasses.replace(origin, format_field="output_format")
    found = ChatRequest(**fields)
    found.check()
    return found, origin


def _sampling_fields(body: MessagesRequest) -> dict[str, Any]:
    form = body.output_format
    if body.output_config is not None and body.output_config.format is not None:
        form = body.output_config.format
    response_format = None
    if form is not None:
        schema = JsonSchema(schema=form.schema_)
        response_format = ResponseFormat(type="json_schema", json_schema=schema, schema=None)
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return {
        **{name: getattr(body, name) for name in SamplingRequest.model_fields},
        # As in llama.cpp, agents may ask for more than a small context has.
        "n_predict": max(body.max_tokens, 1),
        "stop": [*(body.stop_sequences or []), *stops],
        "stream": body.stream,
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
        "thinking_token_budget": body.thinking.budget_tokens if body.thinking else None,
    }


def _tool_fields(body: CountRequest) -> dict[str, Any]:
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or [])]
    places: dict[str, int] = {}
    for i, tool in enumerate(tools):
        first = places.setdefault(tool.function.name, i)
        if first != i:
            raise _invalid(
                f"tools[{i}].name",
                f"tools[{i}].name is {shown(tool.function.name)}, but tools[{first}] has this "
                "name, too.",
            )
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
    # No other members: cache_control moves from request to request, and would change the prompt.
    function = FunctionSpec(
        name=tool.name, description=tool.description, parameters=tool.input_schema
    )
    return Tool(type="function", function=function)


@dataclasses.dataclass(slots=True)
class _Turn:
    """A message of the chat. Adjacent blocks of one role form one turn."""

    role: str
    place: str  # place of its first block in the request
    texts: list[str] = dataclasses.field(default_factory=list)
    thoughts: list[str] = dataclasses.field(default_factory=list)
    calls: list[ToolCallPart] = dataclasses.field(default_factory=list)
    # Further members of a tool's result.
    more: dict[str, Any] = dataclasses.field(default_factory=dict)

    def message(self) -> ChatMessage:
        """Returns the turn as a chat message."""
        content: str | list[ContentPart] | None = "".join(self.texts)
        if len(self.texts) > 1:
            content = [ContentPart(type="text", text=text) for text in self.texts]
        return ChatMessage(
            role=self.role,
            content=content,
            reasoning_content="\n".join(filter(None, self.thoughts)) or None,
            tool_calls=self.calls or None,
            **self.more,
        )


class _Turns:
    """Collects content blocks as messages of the chat."""

    def __init__(self) -> None:
        self._turns: list[_Turn] = []
        self._names: dict[str, str] = {}  # id of a call -> the tool's name

    def messages(self) -> tuple[list[ChatMessage], Origin]:
        """Returns all messages, and their places in the request."""
        places = [turn.place for turn in self._turns]
        return [turn.message() for turn in self._turns], Origin(
            "messages", places, "output_config.format", "max_tokens"
        )

    def add(self, role: str, content: str | Sequence[Block], path: str) -> None:
        """Adds a message's content, which is at `path` of the request."""
        known = BLOCK_TYPES[role]
        if isinstance(content, str):
            self._turn(role, path).texts.append(content)
            return
        if not content:
            self._turn(role, path)
        for j, block in enumerate(content):
            if block.type not in known:
                raise _unknown(f"{path}[{j}]", block.type, known)
            self._add_block(role, block, f"{path}[{j}]")

    def _add_block(self, role: str, block: Block, path: str) -> None:
        if block.type == "tool_result":
            self._add_result(block, path)
            return
        turn = self._turn(role, path)
        if block.type == "text":
            turn.texts.append(_required(block.text, f"{path}.text"))
        elif block.type == "thinking":
            turn.thoughts.append(_required(block.thinking, f"{path}.thinking"))
        elif block.type == "tool_use":
            turn.calls.append(self._call(block, path))
        # redacted_thinking is left out: only the server that encrypted it can read it.

    def _call(self, block: Block, path: str) -> ToolCallPart:
        call_id = _required(block.id, f"{path}.id")
        name = _required(block.name, f"{path}.name")
        if block.input is None:
            raise _invalid(f"{path}.input", f"{path}.input is missing.")
        try:
            arguments = strict_json.write(block.input)
        except ValueError as error:
            raise _invalid(f"{path}.input", f"{path}.input is not valid: {error}.") from error
        self._names[call_id] = name
        return ToolCallPart(id=call_id, function=FunctionText(name=name, arguments=arguments))

    def _add_result(self, block: Block, path: str) -> None:
        call_id = _required(block.tool_use_id, f"{path}.tool_use_id")
        content = block.content or ""
        if isinstance(content, str):
            texts = [content]
        else:
            texts = [_result(part, f"{path}.content[{k}]") for k, part in enumerate(content)]
        if call_id not in self._names:
            raise _invalid(
                f"{path}.tool_use_id",
                f"{path}.tool_use_id is {shown(call_id)}, but no tool_use block before it has "
                "this id.",
            )
        if block.is_error:
            texts[0] = f"Error: {texts[0]}"
        more = {"tool_call_id": call_id, "name": self._names[call_id]}
        self._turns.append(_Turn("tool", path, texts, more=more))

    def _turn(self, role: str, place: str) -> _Turn:
        """Returns the last turn if it has this role, else a new one."""
        if not self._turns or self._turns[-1].role != role:
            self._turns.append(_Turn(role, place))
        return self._turns[-1]


def _result(part: ResultBlock, path: str) -> str:
    """Returns the text of a part of a tool's result."""
    if part.type == "text":
        return _required(part.text, f"{path}.text")
    if part.type == "tool_reference":  # the prompt describes every tool anyway
        return _required(part.tool_name, f"{path}.tool_name")
    raise _unknown(path, part.type, ("text", "tool_reference"))


def _required(value: str | None, path: str) -> str:
    if value is None:
        raise _invalid(path, f"{path} is missing.")
    return value


def _unknown(path: str, found: str, known: Sequence[str]) -> ApiError:
    why = ": the model reads text only" if found in ("image", "document") else ""
    return refused(path, f"{path} has type {found[:64]!r}, but must be {' or '.join(known)}{why}.")


def _invalid(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")
