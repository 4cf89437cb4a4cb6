"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from cpmcu.serving import strict_json
from cpmcu.serving.errors import ApiError, refused
from cpmcu.serving.protocol.base import (
    MAX_LOGPROBS,
    ApiModel,
    GenerationRequest,
    Items,
    PromptLogprobs,
    RequestModel,
    UsageInfo,
)


class ContentPart(RequestModel):
    """A part of a message. Only texts are understood."""

    type: str
    text: str | None = None


class FunctionText(RequestModel):
    """A called function; `arguments` is JSON."""

    name: str
    arguments: str = "{}"


class ToolCallPart(RequestModel):
    """A call in an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionText


class ChatMessage(RequestModel):
    """A message; further fields go to the chat template."""

    role: str = Field(min_length=1, max_length=64)
    content: str | Items[ContentPart] | None = None
    name: str | None = None
    tool_calls: Items[ToolCallPart] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    def texts(self) -> Sequence[str]:
        """The texts of the message."""
        parts = self.content if isinstance(self.content, list) else []
        found = [self.content] if isinstance(self.content, str) else [part.text for part in parts]
        found += [self.reasoning_content, self.reasoning]
        found += [call.function.arguments for call in self.tool_calls or []]
        return [text for text in found if text]

    def to_template(self) -> dict[str, Any]:
        """The message as chat templates know it: arguments of calls are objects, not texts."""
        message = self.model_dump(exclude_none=True)
        message.setdefault("content", "")
        if self.reasoning is not None:
            message.setdefault("reasoning_content", self.reasoning)
        for call in message.get("tool_calls", []):
            try:
                arguments = call["function"]["arguments"] or "{}"
                call["function"]["arguments"] = strict_json.read(arguments)
            except ValueError:
                continue  # the template shows it as it is
        return message


def text_length(messages: Sequence[ChatMessage]) -> int:
    """Characters of all messages together."""
    return sum(len(text) for message in messages for text in message.texts())


class FunctionSpec(RequestModel):
    """A function that the model may call."""

    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestModel):
    """A tool that the model may use."""

    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(RequestModel):
    """The name of a function."""

    name: str


class NamedTool(RequestModel):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class AllowedFunctions(RequestModel):
    """Tools that may be called, of those given."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=512)


class AllowedTools(RequestModel):
    """OpenAI's way to leave tools in the request that may not be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


def _switch(value: Any) -> Any:
    """0 and 1, which clients that take it for /v1/completions' number send, as JSON's booleans."""
    return bool(value) if type(value) is int and value in (0, 1) else value


class ChatRequest(GenerationRequest):
    """A conversation to answer."""

    messages: Items[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, description="Default: until the context is full")
    max_completion_tokens: int | None = Field(None, ge=1, description="The same, and wins")
    logprobs: Annotated[bool | None, BeforeValidator(_switch)] = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Items[Tool] | None = Field(None, max_length=512)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = Field(
        None, description="false: only the first call is given"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables for the chat template, such as enable_thinking"
    )
    reasoning_effort: str | None = Field(None, description="Given to the chat template")
    add_generation_prompt: bool = True
    continue_final_message: bool = Field(False, description="Go on with the last message")
    add_special_tokens: bool = Field(False, description="Beyond those the chat template writes")
    separate_reasoning: bool = Field(True, description="Split thinking from the answer")
    include_reasoning: bool = Field(True, description="false: leave the thinking out")
    echo: bool | None = Field(
        False, description="Begin with the last message, if it is of the same role as the answer"
    )

    def check(self) -> None:
        """Raises ApiError (400) for fields that do not go together."""
        self.check_extra()
        self.check_stream()
        if self.top_logprobs and not self.logprobs:
            raise ApiError(
                400,
                "top_logprobs needs logprobs: true.",
                param="top_logprobs",
                code="invalid_value",
            )
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise ApiError(
                400,
                "continue_final_message needs a conversation that ends with an assistant message.",
                param="continue_final_message",
                code="invalid_value",
            )
        for i, message in enumerate(self.messages):
            for part in message.content if isinstance(message.content, list) else []:
                if part.type != "text" or part.text is None:
                    raise refused(
                        f"messages[{i}].content",
                        f"messages[{i}].content has a {part.type[:64]!r} part: only text is known.",
                    )
        self._check_tool_choice()

    def _check_tool_choice(self) -> None:
        names = [tool.function.name for tool in self.tools or []]
        named: list[str] = []
        if isinstance(self.tool_choice, NamedTool):
            named = [self.tool_choice.function.name]
        elif isinstance(self.tool_choice, AllowedTools):
            named = [tool.function.name for tool in self.tool_choice.allowed_tools.tools]
        for name in named:
            if name not in names:
                raise ApiError(
                    400,
                    f"tool_choice names {name!r}, which is not in tools.",
                    param="tool_choice",
                    code="invalid_value",
                )
        if self.must_call and not self.tools:
            raise ApiError(
                400, "tool_choice required needs tools.", param="tool_choice", code="invalid_value"
            )

    @property
    def text_length(self) -> int:
        """Characters of all messages together."""
        return text_length(self.messages)

    @property
    def token_limit(self) -> int | None:
        """Most tokens of an answer."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def tools_wanted(self) -> list[Tool]:
        """The tools that the model hears of."""
        tools = self.tools or []
        if isinstance(self.tool_choice, AllowedTools):
            allowed = {tool.function.name for tool in self.tool_choice.allowed_tools.tools}
            return [tool for tool in tools if tool.function.name in allowed]
        return [] if self.tool_choice == "none" else tools

    @property
    def must_call(self) -> bool:
        """Must the answer be calls of any of the tools?"""
        if isinstance(self.tool_choice, AllowedTools):
            return self.tool_choice.allowed_tools.mode == "required"
        return self.tool_choice == "required"

    @property
    def echoed(self) -> str:
        """What the answer begins with: the text of the last message, if it is to be echoed.

        vLLM's rule: the answer's role is "assistant", unless the template writes no prompt for it.
        """
        last = self.messages[-1]
        if not self.echo or (self.add_generation_prompt and last.role != "assistant"):
            return ""
        if isinstance(last.content, list):
            return "\n".join(part.text or "" for part in last.content)
        return last.content or ""


class TopLogprob(ApiModel):
    """A token that could have been."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob] = []


class ChoiceLogprobs(ApiModel):
    """Log-probabilities of an answer."""

    content: list[TokenLogprob] | None = None


class AnswerMessage(ApiModel):
    """The model's message."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallPart] | None = None


class ChatChoice(ApiModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls", "abort"]
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatResponse(ApiModel):
    """The answers to a conversation."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    metrics: dict[str, Any] | None = None
