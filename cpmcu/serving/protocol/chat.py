"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from cpmcu.checks import shown_json
from cpmcu.serving.errors import ApiError, of_body, refused, unknown_part
from cpmcu.serving.http import strict_json
from cpmcu.serving.protocol.base import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    ApiModel,
    ChatUsage,
    GenerationRequest,
    Items,
    PromptLogprobs,
    RequestModel,
)


class ContentPart(RequestModel):
    """A part of a message. Only text is supported, and refusals of earlier answers as text."""

    type: str
    text: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refusal_as_text(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("type") == "refusal" and "refusal" in value:
            return {"type": "text", "text": value["refusal"]}
        return value


class FunctionText(RequestModel):
    """A function call. `arguments` is JSON as a string."""

    name: str
    arguments: str = "{}"


class ToolCallPart(RequestModel):
    """A tool call in an assistant message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionText


class ChatMessage(RequestModel):
    """A message. The chat template gets its other fields too."""

    role: str = Field(min_length=1, max_length=64)
    content: str | Items[ContentPart] | None = None
    name: str | None = None
    tool_calls: Items[ToolCallPart] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @field_validator("tool_calls")
    @classmethod
    def _none_without_calls(cls, value: Items[ToolCallPart] | None) -> Items[ToolCallPart] | None:
        return value or None  # templates ask whether there are calls, not how many

    def texts(self) -> Sequence[str]:
        """All texts of the message."""
        parts = self.content if isinstance(self.content, list) else []
        found = [self.content] if isinstance(self.content, str) else [part.text for part in parts]
        found += [self.reasoning_content, self.reasoning]
        found += [call.function.arguments for call in self.tool_calls or []]
        return [text for text in found if text]

    def to_template(self, *, arguments_as_text: bool = False) -> dict[str, Any]:
        """The message as chat templates expect it: the arguments of calls are objects.

        `arguments_as_text`: they stay the text that the client sent.
        """
        message = self.model_dump(exclude_none=True)
        message.setdefault("content", None if self.role == "assistant" else "")
        reasoning = self.reasoning_content or self.reasoning
        if reasoning is not None:  # templates read it under one of these names
            message["reasoning_content"] = reasoning
            message.setdefault("thinking", reasoning)
        for call in [] if arguments_as_text else message.get("tool_calls", []):
            try:
                arguments = call["function"]["arguments"] or "{}"
                call["function"]["arguments"] = strict_json.read(arguments)
            except ValueError:
                continue  # the template gets the string
        return message


def text_length(messages: Sequence[ChatMessage]) -> int:
    """Characters of all messages together."""
    return sum(len(text) for message in messages for text in message.texts())


MAX_TOOLS = 512
FunctionName = Annotated[str, Field(min_length=1, max_length=128)]


class FunctionSpec(RequestModel):
    """Name and parameters of a function."""

    name: FunctionName
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
    """A tool_choice that forces a call of one function."""

    type: Literal["function"]
    function: NamedFunction


class AllowedFunctions(RequestModel):
    """The subset of tools that may be called."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedTools(RequestModel):
    """OpenAI's tool_choice that restricts calls to a subset of tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


def _switch(value: Any) -> Any:
    """Converts 0 and 1 to booleans: some clients send a number, as for /v1/completions."""
    return bool(value) if type(value) is int and value in (0, 1) else value


# Names of thinking_token_budget: llama.cpp's and Qwen's.
BUDGETS = ("reasoning_budget_tokens", "thinking_budget_tokens", "thinking_budget")


class TransferParams(RequestModel):
    """vLLM's hand-over of a request from one server to another."""

    prompt_token_ids: Items[int] | None = Field(None, min_length=1)


class ChatRequest(GenerationRequest):
    """A conversation to answer."""

    messages: Items[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, description="Default: up to the context length")
    max_completion_tokens: int | None = Field(None, ge=1, description="Overrides max_tokens")
    logprobs: Annotated[bool | None, BeforeValidator(_switch)] = False
    top_logprobs: int | None = Field(None, ge=-1, le=MAX_LOGPROBS, description="-1: most")
    tools: Items[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: return only the first call")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables of the chat template, such as enable_thinking"
    )
    reasoning_effort: str | None = Field(None, description="Passed to the chat template")
    thinking_token_budget: int | None = Field(
        None, ge=-1, description="Most tokens of reasoning; -1: any number"
    )
    add_generation_prompt: bool = True
    continue_final_message: bool = Field(False, description="Continue the last message")
    add_special_tokens: bool = Field(False, description="Encode the prompt with BOS")
    separate_reasoning: bool = Field(True, description="Return reasoning apart from content")
    include_reasoning: bool = Field(True, description="false: omit the reasoning")
    kv_transfer_params: TransferParams | None = Field(
        None, description="prompt_token_ids: the prompt, in place of the rendered messages"
    )
    verbose: bool = Field(False, description="Add llama.cpp's `__verbose` with the prompt")
    echo: bool | None = Field(
        False, description="Prepend the last message if its role is that of the answer"
    )

    @model_validator(mode="before")
    @classmethod
    def _budget_under_other_names(cls, body: Any) -> Any:
        names = [name for name in BUDGETS if isinstance(body, dict) and name in body]
        if not names:
            return body
        body = dict(body)
        found = [body.pop(name) for name in names]
        return {"thinking_token_budget": found[0], **body}

    @model_validator(mode="after")
    def _effort_none_is_no_thinking(self) -> ChatRequest:
        if self.reasoning_effort == "none":
            kwargs = self.chat_template_kwargs or {}
            self.chat_template_kwargs = {"enable_thinking": False, **kwargs}
        return self

    def num_logprobs(self, most: int) -> int | None:
        """Likeliest tokens for each token of the answer; None: no log-probabilities."""
        if not self.logprobs:
            return None
        return most if self.top_logprobs == -1 else self.top_logprobs or 0

    def check(self, field: str = "messages") -> None:
        """Raises ApiError (400) for an invalid combination of fields.

        `field`: the client's name of the conversation.
        """
        self.check_extra()
        self.check_stream()
        if self.kv_transfer_params is not None:
            self.kv_transfer_params.check_extra()
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
                f"continue_final_message needs an assistant message at the end of {field}.",
                param="continue_final_message",
                code="invalid_value",
            )
        explicit = "add_generation_prompt" in self.model_fields_set
        if self.continue_final_message and explicit and self.add_generation_prompt:
            raise ApiError(
                400,
                "continue_final_message and add_generation_prompt are both true, expected one of "
                "them: the answer goes on with the last message or begins a new one.",
                param="add_generation_prompt",
                code="invalid_value",
            )
        for i, message in enumerate(self.messages):
            place = f"{field}[{i}].content"
            if message.role == "user" and message.content in (None, []):
                found = shown_json(message.content)
                raise ApiError(
                    400,
                    f"{place} is {found}, but must be a text or a list of parts.",
                    param=place,
                    code="invalid_value",
                )
            for part in message.content if isinstance(message.content, list) else []:
                if part.type != "text" or part.text is None:
                    raise unknown_part(place, part.type, ("text",))
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
                    f"Tool {name!r} not found in tools list, though tool_choice names it.",
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
    def wants_logprobs(self) -> bool:
        """True if the tokens of the answer must have log-probabilities."""
        return bool(self.logprobs)

    @property
    def token_limit(self) -> int | None:
        """Maximum number of tokens of an answer; None: up to the context length."""
        return self.max_completion_tokens or self.max_tokens or self.predict_limit

    @property
    def limit_field(self) -> str:
        """The field that `token_limit` comes from."""
        names = ("max_completion_tokens", "max_tokens")
        return next((name for name in names if getattr(self, name)), "n_predict")

    @property
    def tools_wanted(self) -> list[Tool]:
        """The tools in the prompt."""
        tools = self.tools or []
        if isinstance(self.tool_choice, AllowedTools):
            allowed = {tool.function.name for tool in self.tool_choice.allowed_tools.tools}
            return [tool for tool in tools if tool.function.name in allowed]
        return [] if self.tool_choice == "none" else tools

    @property
    def must_call(self) -> bool:
        """True if the answer must be tool calls."""
        if isinstance(self.tool_choice, AllowedTools):
            return self.tool_choice.allowed_tools.mode == "required"
        return self.tool_choice == "required"

    @property
    def echoed(self) -> str:
        """The text prepended to the answer: the last message's if `echo` applies, else "".

        vLLM's rule: the answer's role is "assistant" if add_generation_prompt is set. Otherwise it
        is the role of the last message.
        """
        last = self.messages[-1]
        if not self.echo or (self.add_generation_prompt and last.role != "assistant"):
            return ""
        if isinstance(last.content, list):
            return "".join(part.text or "" for part in last.content)
        return last.content or ""


class BatchChatRequest(RequestModel):
    """Conversations to answer side by side, with the fields of ChatRequest for all of them."""

    model: str | None = None
    messages: Items[Items[ChatMessage]] = Field(min_length=1, max_length=MAX_CHOICES)

    def conversations(self) -> list[ChatRequest]:
        """A request for each conversation.

        Raises ApiError (400) for a field that a batch does not have, RequestValidationError for a
        wrong one.
        """
        extra = self.model_extra or {}
        neutrals = {"stream": False, "tools": [], "n": 1, "verbose": False}
        for name, neutral in neutrals.items():
            if extra.get(name) not in (None, neutral):
                raise refused(name, f"{name} is not possible for a batch of conversations.")
        try:
            fields = {**extra, "model": self.model}
            return [
                ChatRequest.model_validate({**fields, "messages": [m.model_dump() for m in each]})
                for each in self.messages
            ]
        except ValidationError as error:
            raise of_body(error) from error


class TopLogprob(ApiModel):
    """A likely token at one position of the answer."""

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
    matched_stop: int | str | None = None
    token_ids: list[int] | None = None


class ChatResponse(ApiModel):
    """The answers to a conversation."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: ChatUsage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    metrics: dict[str, Any] | None = None
    timings: dict[str, Any] | None = None
