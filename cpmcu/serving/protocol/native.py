"""/infill, /completion and /apply-template, with llama.cpp's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from cpmcu.serving.errors import ApiError, refused
from cpmcu.serving.protocol.base import (
    MAX_LOGPROBS,
    ApiModel,
    GenerationRequest,
    Items,
    RequestModel,
    few_biases,
)
from cpmcu.serving.protocol.chat import ChatMessage, Tool, text_length

Bias = float | Literal[False]
# A list of two in JSON, which has no tuples.
BiasPair = Annotated[tuple[int | str, Bias], Field(strict=False)]
NEVER = -1e9  # a bias that no logit outweighs
Biases = Annotated[dict[str, Bias] | Items[BiasPair], BeforeValidator(few_biases)]


class NativeRequest(GenerationRequest):
    """Fields that /completion and /infill share."""

    max_tokens: int | None = Field(None, ge=1, description="As n_predict, which overrides it")
    n_probs: int = Field(0, ge=0, le=MAX_LOGPROBS, description="Likeliest tokens at each position")
    return_tokens: bool = Field(False, description="Fill `tokens` outside streams, too")
    response_fields: Items[str] | None = Field(
        None, max_length=64, description="The only members of the reply; a/b: member b of a"
    )
    logit_bias: Biases | None = Field(  # type: ignore[assignment]
        None, description="Token id or text -> bias of its tokens; false: never"
    )

    @property
    def token_limit(self) -> int | None:
        """Maximum number of new tokens; None: up to the context length."""
        return self.max_tokens if self.n_predict is None else self.predict_limit

    @property
    def limit_field(self) -> str:
        """The field that `token_limit` comes from."""
        return "max_tokens" if self.n_predict is None else "n_predict"

    def biases(self, encode: Callable[[str], list[int]]) -> dict[int, float] | None:
        """Token id -> bias. `encode` returns the tokens of a text."""
        given = self.logit_bias or {}
        found: dict[int, float] = {}
        for key, bias in given.items() if isinstance(given, dict) else given:
            is_id = isinstance(key, int) or (isinstance(given, dict) and key.isdecimal())
            tokens = [int(key)] if is_id else encode(str(key))
            found |= dict.fromkeys(tokens, NEVER if bias is False else float(bias))
        return found or None

    def _bias(self) -> None:
        """See `biases`."""


class TextPrompt(ApiModel):
    """A prompt as an object."""

    model_config = ConfigDict(extra="forbid")

    prompt_string: str


# Texts and token ids in one list are one prompt.
NativePrompt = str | TextPrompt | Items[int | str]


class NativeCompletion(NativeRequest):
    """Texts to continue."""

    prompt: str | TextPrompt | Items[int | str | TextPrompt | Items[int | str]] = Field(
        description="A text, a list of texts and token ids, or a list of prompts"
    )

    def prompts(self) -> list[NativePrompt]:
        """The prompts as a list. Raises ApiError (400) for a list that is neither."""
        prompt = self.prompt
        if not isinstance(prompt, list):
            return [prompt]
        if not any(isinstance(part, int) for part in prompt):
            many: list[NativePrompt] = prompt  # type: ignore[assignment]
        elif all(isinstance(part, int | str) for part in prompt):
            many = [prompt]  # type: ignore[list-item]
        else:
            raise refused("prompt", "prompt has token ids beside prompts: put them into a list.")
        if not many or [] in many:
            raise ApiError(
                400, "prompt is empty, but must have tokens.", param="prompt", code="invalid_value"
            )
        return many

    @property
    def text_length(self) -> int:
        """Characters and token ids of all prompts together."""
        return sum(map(_length, self.prompts()))


def _length(prompt: NativePrompt | int) -> int:
    if isinstance(prompt, list):
        return sum(map(_length, prompt))
    if isinstance(prompt, int):
        return 1
    return len(prompt.prompt_string if isinstance(prompt, TextPrompt) else prompt)


class OtherFile(RequestModel):
    """A file that the filling may refer to."""

    filename: str = ""
    text: str


class InfillRequest(NativeRequest):
    """A gap to fill."""

    input_prefix: str = Field(description="The text before the gap")
    input_suffix: str = Field(description="The text behind the gap")
    input_extra: Items[OtherFile] | None = None
    prompt: str = Field("", description="More of the text before the gap")

    @property
    def text_length(self) -> int:
        """Characters of all texts together."""
        files = sum(len(file.text) for file in self.input_extra or ())
        return len(self.input_prefix) + len(self.input_suffix) + len(self.prompt) + files


class TemplateRequest(RequestModel):
    """A conversation to render."""

    messages: Items[ChatMessage] = Field(min_length=1)
    tools: Items[Tool] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def text_length(self) -> int:
        """Characters of all messages together."""
        return text_length(self.messages)


class RenderedTemplate(RequestModel):
    """The prompt of a conversation."""

    prompt: str
