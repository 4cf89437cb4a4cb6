"""/infill, /completion and /apply-template, with llama.cpp's names."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from cpmcu.serving.protocol.base import GenerationRequest, Items, RequestModel
from cpmcu.serving.protocol.chat import ChatMessage, Tool, text_length


class NativeRequest(GenerationRequest):
    """What both generating routes have."""

    n_predict: int | None = Field(None, ge=-1, description="Most new tokens; -1: no limit")

    @property
    def token_limit(self) -> int | None:
        """Most new tokens; None: up to the context length."""
        return None if self.n_predict in (None, -1) else max(1, self.n_predict)


class NativeCompletion(NativeRequest):
    """A text to continue."""

    prompt: str | Items[int] = Field(min_length=1, description="A text or token ids")


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
