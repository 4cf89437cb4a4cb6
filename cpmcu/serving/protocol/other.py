"""Messages of /v1/models, /tokenize, /detokenize, /tokenizer_info, /health and /version."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from cpmcu.serving.errors import ApiError
from cpmcu.serving.protocol.base import ApiModel, Items, RequestModel
from cpmcu.serving.protocol.chat import ChatMessage, Tool, text_length
from cpmcu.serving.protocol.codex import CodexModel


class ModelInfo(ApiModel):
    """A served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "cpmcu"
    root: str
    max_model_len: int


class ModelList(ApiModel):
    """The served model under each of its names."""

    object: Literal["list"] = "list"
    data: list[ModelInfo]
    models: list[CodexModel] = Field(description="The same names, as Codex reads them")


class TokenizeRequest(RequestModel):
    """A text or a conversation to tokenize."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = Field(None, description="llama.cpp's prompt, without special tokens")
    add_special: bool = Field(False, description="Add special tokens to content")
    with_pieces: bool = Field(False, description="Give content's tokens as id and piece")
    messages: Items[ChatMessage] | None = Field(None, min_length=1)
    tools: Items[Tool] | None = None
    add_special_tokens: bool | None = Field(
        None, description="Default: true for a prompt, false for messages"
    )
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = Field(
        False, description="Add token_strs: the tokens' spellings in the vocabulary"
    )

    @property
    def text_length(self) -> int:
        """Characters of the prompt, or of all messages together."""
        return len(self.prompt or self.content or "") + text_length(self.messages or [])

    def check(self) -> None:
        """Raises ApiError (400) unless exactly one of prompt, content and messages is given."""
        self.check_extra()
        given = [each for each in (self.prompt, self.content, self.messages) if each is not None]
        if len(given) != 1:
            raise ApiError(400, "Give one of prompt, content and messages.", param="prompt")


class TokenizeResponse(ApiModel):
    """The tokens."""

    count: int
    max_model_len: int
    tokens: list[int] | list[dict[str, Any]]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestModel):
    """Tokens to convert to text. The text includes special tokens."""

    model: str | None = None
    tokens: Items[int]


class DetokenizeResponse(ApiModel):
    """The text."""

    prompt: str
    content: str = Field(description="The same, under llama.cpp's name")


class TokenizerInfo(ApiModel):
    """The tokenizer's configuration. lm-eval uses it instead of a local tokenizer.

    The object also has the other members of tokenizer_config.json.
    """

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    tokenizer_class: str
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None
    sep_token: str | None = None
    cls_token: str | None = None
    chat_template: str | None
    max_model_len: int


class Health(ApiModel):
    """State of the server."""

    status: Literal["ok", "loading", "failed", "stopping"]
    model_loaded: bool


class Load(ApiModel):
    """Load of the server."""

    server_load: int


class Version(ApiModel):
    """The version of cpmcu."""

    version: str
