"""/infill."""

from __future__ import annotations

from pydantic import Field

from cpmcu.serving.protocol.base import GenerationRequest, Items, RequestModel


class OtherFile(RequestModel):
    """A file that the filling may refer to."""

    filename: str = ""
    text: str


class InfillRequest(GenerationRequest):
    """A gap to fill, with llama.cpp's names."""

    input_prefix: str = Field(description="The text before the gap")
    input_suffix: str = Field(description="The text behind the gap")
    input_extra: Items[OtherFile] | None = None
    prompt: str = Field("", description="More of the text before the gap")
    n_predict: int | None = Field(None, ge=-1, description="Most new tokens; -1: no limit")

    @property
    def text_length(self) -> int:
        """Characters of all texts together."""
        files = sum(len(file.text) for file in self.input_extra or ())
        return len(self.input_prefix) + len(self.input_suffix) + len(self.prompt) + files

    @property
    def token_limit(self) -> int | None:
        """Most new tokens; None: up to the context length."""
        return None if self.n_predict in (None, -1) else max(1, self.n_predict)
