"""/v1/responses: the request. `response_object.py` has the response."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from cpmcu.serving.errors import ApiError, refused
from cpmcu.serving.protocol.base import (
    IGNORED,
    MAX_LOGPROBS,
    REFUSED,
    ApiModel,
    Items,
    JsonSchema,
    ResponseFormat,
    SamplingRequest,
)
from cpmcu.serving.protocol.chat import MAX_TOOLS, FunctionName

LOGPROBS = "message.output_text.logprobs"
SEALED_REASONING = "reasoning.encrypted_content"

# Field of /v1/chat/completions -> the field of /v1/responses with the same meaning.
_OTHER_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "functions": "tools",
    "function_call": "tool_choice",
    "guided_json": "text.format",
    "structured_outputs": "text.format",
}


class Member(ApiModel):
    """A part of the request. Undeclared members are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


class ItemPart(Member):
    """A part of an item's content. Only text is supported."""

    type: str
    text: str | None = None
    refusal: str | None = None

    @property
    def words(self) -> str | None:
        """The text of the part; None if it is not text."""
        return self.refusal if self.type == "refusal" else self.text


class InputItem(Member):
    """An item of a conversation. Its type decides which members it needs.

    A message: role, content. A function_call: call_id, name, arguments. A function_call_output:
    call_id, output. A reasoning item: content, encrypted_content or summary. An item_reference: id.
    """

    type: str | None = Field(None, description="Default: message, or item_reference for an id")
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Items[ItemPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | Items[ItemPart] | None = None
    summary: Items[ItemPart] | None = None
    encrypted_content: str | None = None

    @property
    def kind(self) -> str:
        """The type. Clients may leave it out for messages and for references."""
        named = self.id is not None and self.role is None and self.content is None
        return self.type or ("item_reference" if named else "message")

    @property
    def length(self) -> int:
        """Characters of all texts."""
        plain = (self.arguments, self.input, self.encrypted_content, self.content, self.output)
        lists = (self.content, self.output, self.summary)
        parts = [part.words for found in lists if isinstance(found, list) for part in found]
        return sum(len(text) for text in (*plain, *parts) if isinstance(text, str))


class ToolSpec(Member):
    """A tool. Only functions are used."""

    type: str
    name: FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(Member):
    """A tool_choice that names a function, or the functions that are allowed."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[ToolSpec] | None = Field(None, max_length=MAX_TOOLS)


class TextFormat(Member):
    """The format of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Member):
    """Options of the answer's text."""

    format: TextFormat | None = None
    verbosity: str | None = Field(None, description="Without effect")


class ReasoningOptions(Member):
    """Options of the reasoning."""

    effort: str | None = Field(None, description='Passed to the chat template; "none": no thinking')
    summary: str | None = Field(None, description="Without effect: reasoning is given in full")


class ResponsesRequest(SamplingRequest):
    """A conversation to answer, as items."""

    ignored_fields: ClassVar[Set[str]] = IGNORED | {
        "access_programs",
        "background_options",
        "client_metadata",
        "image",
        "personality",
    }
    refused_fields: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **REFUSED,
        "best_of": (1,),
        "context_management": ([],),
        "conversation": (),
        "logprobs": (False,),
        "n": (1,),
        "prompt": (),
    }

    input: str | Items[InputItem] | None = Field(None, description="A text or items")
    instructions: str | None = Field(None, description="The system message of this response only")
    max_output_tokens: int | None = Field(
        None, ge=1, description="Reasoning included. Default: up to the context length"
    )
    previous_response_id: str | None = Field(None, description="Continue a stored response")
    store: bool | None = Field(True, description="Keep the response in memory")
    background: bool | None = Field(False, description="Answer at once; GET has the response")
    stream: bool | None = False
    stream_options: dict[str, Any] | None = Field(None, description="Without effect")
    include: Items[str] | None = None
    tools: Items[ToolSpec] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: return only the first call")
    max_tool_calls: int | None = Field(None, description="Without effect: of built-in tools")
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    return_metrics: bool | None = Field(
        None, description="Add `metrics`: draft acceptance and timings"
    )
    enable_response_messages: bool | None = Field(
        False, description="vLLM's: the ended response has the texts and tokens of both sides"
    )
    timings_per_token: bool = Field(False, description="Add llama.cpp's `timings` to events")
    return_progress: bool = Field(
        False, description="In a stream: send `prompt_progress` during prefill"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables of the chat template, such as enable_thinking"
    )
    thinking_token_budget: int | None = Field(
        None, ge=-1, description="Most tokens of reasoning; -1: any number"
    )

    def check(self) -> None:
        """Raises ApiError (400) for fields of other endpoints and for fields without support."""
        for name in self.model_extra or {}:
            if name in _OTHER_NAMES:
                raise refused(
                    name,
                    f"{name} is a field of /v1/chat/completions; "
                    f"in /v1/responses it is {_OTHER_NAMES[name]}.",
                )
        self.check_extra()
        if self.input is None and self.previous_response_id is None:
            raise ApiError(
                400,
                "input is missing, expected a text or a list of items, or previous_response_id.",
                param="input",
                code="missing_required_parameter",
            )
        self._check_schemas()
        if self.truncation == "auto":
            raise refused(
                "truncation",
                'truncation "auto" is not supported: a conversation that is too long is refused.',
            )
        form = None if self.text is None else self.text.format
        if form is not None and form.type == "json_schema" and form.schema_ is None:
            raise ApiError(
                400,
                "text.format.schema is missing, but type json_schema needs it.",
                param="text.format.schema",
                code="invalid_value",
            )
        if self.background and self.stream:
            raise refused(
                "background",
                "background and stream exclude each other: GET /v1/responses/ID has the response.",
            )
        if self.background and not self.wants_store:
            raise refused("background", "background can only be used when `store` is true.")

    def _check_schemas(self) -> None:
        """Raises ApiError (400) for a schema that the response could not repeat."""
        schemas: list[tuple[str, Any]] = [
            (f"tools[{i}].parameters", tool.parameters) for i, tool in enumerate(self.tools or [])
        ]
        if self.text is not None and self.text.format is not None:
            schemas.append(("text.format.schema", self.text.format.schema_))
        for place, schema in schemas:
            try:
                json.dumps(schema, allow_nan=False)
            except (ValueError, RecursionError) as error:
                raise ApiError(
                    400, f"{place} is not JSON: {error}.", param=place, code="invalid_value"
                ) from error

    @property
    def wants_store(self) -> bool:
        """True unless `store` is false."""
        return self.store is not False

    @property
    def wants_logprobs(self) -> bool:
        """True if the answer's text must have log-probabilities."""
        return LOGPROBS in (self.include or []) or bool(self.top_logprobs)

    @property
    def response_format(self) -> ResponseFormat | None:
        """The format of the text as /v1/chat/completions has it."""
        form = None if self.text is None else self.text.format
        if form is None:
            return None
        schema = None
        if form.type == "json_schema":
            schema = JsonSchema(name=form.name, schema=form.schema_, strict=form.strict)
        return ResponseFormat(type=form.type, json_schema=schema, schema=None)

    @property
    def items(self) -> Sequence[InputItem]:
        """The input as items."""
        if self.input is None:
            return []
        if isinstance(self.input, str):
            return [InputItem(type="message", role="user", content=self.input)]
        return self.input
