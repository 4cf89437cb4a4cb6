"""/v1/responses: the response. The schema of what ResponseRun and ResponseOutput write."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from cpmcu.serving.protocol.base import ApiModel
from cpmcu.serving.protocol.chat import TokenLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(ApiModel):
    """The text of a message."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class MessageItem(ApiModel):
    """A message of the model."""

    id: str
    type: Literal["message"] = "message"
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningText(ApiModel):
    """A text of reasoning."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class ReasoningItem(ApiModel):
    """Reasoning of the model."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    status: ItemStatus
    summary: list[Any] = Field([], description="Empty: the reasoning is given in full")
    content: list[ReasoningText]
    encrypted_content: str | None = Field(None, description="The text in base64, if included")


class FunctionCallItem(ApiModel):
    """A call of a function."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class InputTokensDetails(ApiModel):
    """Input tokens that were found in the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(ApiModel):
    """Tokens up to the end of the reasoning."""

    reasoning_tokens: int


class ResponseUsage(ApiModel):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(ApiModel):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(ApiModel):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class RawMessage(ApiModel):
    """vLLM's prompt or output as the model has it, special tokens included."""

    type: Literal["raw_message_tokens"] = "raw_message_tokens"
    message: str
    tokens: list[int]


class ResponseObject(ApiModel):
    """A response."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[MessageItem | ReasoningItem | FunctionCallItem]
    usage: ResponseUsage | None
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    presence_penalty: float
    frequency_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    user: str | None
    metrics: dict[str, Any] = {}
    input_messages: list[RawMessage] = []
    output_messages: list[RawMessage] = []


class DeletedResponse(ApiModel):
    """The answer to DELETE."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ItemList(ApiModel):
    """A page of input items."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(ApiModel):
    """Number of tokens of the prompt."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
