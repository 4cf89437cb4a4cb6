"""/v1/completions."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from cpmcu.serving.errors import ApiError
from cpmcu.serving.protocol.base import (
    MAX_LOGPROBS,
    ApiModel,
    GenerationRequest,
    Items,
    PromptLogprobs,
    UsageInfo,
)

Prompts = str | Items[str] | Items[int] | Items[Items[int]]


class CompletionRequest(GenerationRequest):
    """Texts to continue."""

    prompt: Prompts = Field(description="A text, token ids, or a list of either")
    suffix: str | None = Field(None, description="Fill the gap between the prompt and this text")
    max_tokens: int | None = Field(16, ge=0, description="0 needs echo")
    max_completion_tokens: int | None = Field(None, ge=1, description="Overrides max_tokens")
    echo: bool | None = Field(False, description="Prepend the prompt")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool = True

    def check(self) -> None:
        """Raises ApiError (400) for an invalid combination of fields."""
        self.check_extra()
        self.check_stream()
        if self.token_limit == 0 and not self.echo:
            raise ApiError(
                400, "max_tokens 0 needs echo.", param="max_tokens", code="invalid_value"
            )
        if self.prompt == []:
            raise ApiError(
                400, "prompt is [], but must have a prompt.", param="prompt", code="invalid_value"
            )

    @property
    def wants_logprobs(self) -> bool:
        """True if the tokens of the text must have log-probabilities."""
        return self.logprobs is not None

    @property
    def token_limit(self) -> int | None:
        """Maximum number of new tokens; None: up to the context length."""
        predicts = self.limit_field == "n_predict"
        return self.predict_limit if predicts else self.max_completion_tokens or self.max_tokens

    @property
    def limit_field(self) -> str:
        """The field that `token_limit` comes from."""
        given = {"max_tokens", "max_completion_tokens"} & self.model_fields_set
        if self.n_predict is not None and not given:
            return "n_predict"
        return "max_completion_tokens" if self.max_completion_tokens else "max_tokens"

    @property
    def prompt_length(self) -> int:
        """Total characters and token ids of all prompts."""
        prompts = self.prompts()
        return sum(map(len, prompts))

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]


class CompletionLogprobs(ApiModel):
    """Log-probabilities, one entry a token. The first token of an echoed prompt has null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(ApiModel):
    """One continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length", "abort"]
    stop_reason: int | str | None = None
    matched_stop: int | str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionResponse(ApiModel):
    """The continuations."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageInfo
    metrics: dict[str, Any] | None = None
    timings: dict[str, Any] | None = None
