"""Anthropic's /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from cpmcu.checks import shown
from cpmcu.serving.errors import ApiError, refused
from cpmcu.serving.protocol.base import (
    IGNORED,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    REFUSED,
    ApiModel,
    Items,
    RequestModel,
    SamplingRequest,
)
from cpmcu.serving.protocol.chat import MAX_TOOLS, ChatRequest, FunctionName

# Anthropic's fields that cannot change the output here. They are ignored without a log line.
WITHOUT_EFFECT = {
    "betas",
    "billing_policy",
    "cache_control",
    "context_management",
    "diagnostics",
    "fallback_credit_token",
    "inference_geo",
    "metadata",
    "service_tier",
    "speed",
    "user_profile_id",
    "workspace_id",
}
# Anthropic's fields that are refused -> their neutral values, which are accepted.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "compaction": (),
    "container": (),
    "fallbacks": ([],),
    "mcp_servers": ([],),
}


# Thinking blocks of a response have their text, are empty, or are left out.
ThinkingShown = Literal["whole", "empty", "none"]


class ResultBlock(RequestModel):
    """A content block of a tool's result."""

    type: str
    text: str | None = None
    tool_name: str | None = None


class Block(RequestModel):
    """A content block of a message. Its type decides which other members count."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | Items[ResultBlock] | None = None
    is_error: bool | None = None


class InputMessage(RequestModel):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Items[Block]


class InputTool(RequestModel):
    """A tool that the model may use."""

    name: FunctionName
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    eager_input_streaming: bool | None = Field(
        None, description="Stream the input as it comes, even if it turns out not to be JSON"
    )


class ToolUseChoice(RequestModel):
    """How the model uses the tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(RequestModel):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=1, description="Most tokens of thinking")
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="omitted: thinking blocks are empty"
    )


class JsonFormat(RequestModel):
    """A JSON schema that the answer follows."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestModel):
    """Effort and format of the answer."""

    effort: str | None = Field(None, description="Passed to the chat template: reasoning_effort")
    format: JsonFormat | None = None


class MessageThread(RequestModel):
    """A conversation that Anthropic's server keeps; this one keeps none."""

    type: str
    previous_message_id: str | None = None


class CountRequest(RequestModel):
    """A conversation whose tokens are counted: the fields that determine the prompt."""

    model: str | None = Field(None, description="An id of /v1/models; optional")
    messages: Items[InputMessage] = Field(min_length=1)
    system: str | Items[Block] | None = None
    tools: Items[InputTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolUseChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = Field(None, description="Old name: output_config.format")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables of the chat template"
    )
    thread: MessageThread | None = Field(
        None, description="create has no effect; continue is a 404, and clients send all messages"
    )

    ignored_fields: ClassVar[Set[str]] = IGNORED | WITHOUT_EFFECT
    refused_fields: ClassVar[Mapping[str, tuple[Any, ...]]] = REFUSED | UNSUPPORTED

    def check_extra(self) -> None:
        """Logs unknown fields once. Raises ApiError (400) for a field that changes the output.

        Raises ApiError (404) for a request that continues a thread: it has only new messages.
        """
        if self.thread is not None and self.thread.type == "continue":
            raise ApiError(
                404,
                f"thread.previous_message_id is {shown(self.thread.previous_message_id)}, but this "
                "server keeps no threads: send all messages.",
                param="thread",
                code="thread_not_found",
            )
        own = MessagesRequest.model_fields
        for name, value in (self.model_extra or {}).items():
            if name in ChatRequest.model_fields and name not in own and value is not None:
                raise refused(name, f"{name} is a field of /v1/chat/completions, not of this path.")
        super().check_extra()

    def texts(self) -> Iterator[str]:
        """All texts of the conversation."""
        blocks = [self.system, *(message.content for message in self.messages)]
        for content in blocks:
            if isinstance(content, str):
                yield content
                continue
            for block in content or []:
                yield from (each for each in (block.text, block.thinking) if each)
                results = block.content or []
                if isinstance(results, str):
                    yield results
                else:
                    yield from (result.text for result in results if result.text)

    @property
    def text_length(self) -> int:
        """Characters of the conversation."""
        return sum(map(len, self.texts()))


class MessagesRequest(CountRequest, SamplingRequest):
    """A conversation to answer."""

    max_tokens: int = Field(ge=0, description="0: only put the prompt into the prefix cache")
    stop_sequences: Items[Annotated[str, Field(max_length=MAX_STOP_LENGTH)]] | None = Field(
        None, max_length=MAX_STOPS
    )
    stream: bool | None = False
    return_metrics: bool | None = Field(
        None, description="Add `metrics`: draft acceptance and timings"
    )

    @property
    def eager_tools(self) -> set[str]:
        """Names of the tools whose input is streamed as it comes."""
        return {tool.name for tool in self.tools or [] if tool.eager_input_streaming}

    @property
    def thinking_shown(self) -> ThinkingShown:
        """Tells how the response shows the reasoning."""
        if self.thinking is None or self.thinking.type != "disabled":
            omitted = self.thinking is not None and self.thinking.display == "omitted"
            return "empty" if omitted else "whole"
        return "none"


class TextBlock(ApiModel):
    """Text of the answer."""

    type: Literal["text"] = "text"
    text: str


class ThinkingBlock(ApiModel):
    """The model's reasoning. The signature has no meaning; some clients need one."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str


class ToolUseBlock(ApiModel):
    """A call of a tool."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


OutputBlock = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class OutputTokensDetails(ApiModel):
    """A part of the output's tokens."""

    thinking_tokens: int


class MessagesUsage(ApiModel):
    """Token counts. The prompt is `input_tokens` and `cache_read_input_tokens` together."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails


class MessagesResponse(ApiModel):
    """The model's message."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[OutputBlock]
    stop_reason: StopReason
    stop_sequence: str | None
    usage: MessagesUsage
    metrics: dict[str, Any] | None = None


class CountResponse(ApiModel):
    """Number of tokens of the prompt."""

    input_tokens: int


class MessagesErrorInfo(ApiModel):
    """The description of an error."""

    type: str
    message: str


class MessagesError(ApiModel):
    """An error in Anthropic's format."""

    type: Literal["error"] = "error"
    error: MessagesErrorInfo
    request_id: str | None = None
