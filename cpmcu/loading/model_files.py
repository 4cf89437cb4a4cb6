"""The files of a model: its configs, tokenizer, chat template and tensors.

A model is named by a path. `model_files` opens it: a directory in Hugging Face format, or one GGUF
file, whose metadata answers in place of the JSON files.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from cpmcu.errors import about
from cpmcu.loading.index import read_json

if TYPE_CHECKING:
    import tokenizers

    from cpmcu.loading.gguf.checkpoint import GgufCheckpoint
    from cpmcu.loading.gguf.header import GgufHeader
    from cpmcu.loading.tensors import Checkpoint


class ModelFiles(Protocol):
    """The files of a model. Errors are FileNotFoundError and ValueError with the path."""

    path: Path

    def json(self, name: str) -> dict[str, Any]:
        """The content of a JSON file by Hugging Face's name; empty if there is none."""

    def checkpoint(self) -> Checkpoint:
        """The tensors; their data is not read yet."""

    def decoded(self) -> ModelFiles:
        """The same model, with the tensors of a GGUF file decoded to 16 or 32 bits."""

    def on_cpu(self) -> ModelFiles:
        """The same model for device cpu.

        Forms of a GGUF file with halves are decoded. The CPU reads the decoded weights five times
        as fast.
        """

    @property
    def build_tokenizer(self) -> Callable[[], tokenizers.Tokenizer] | None:
        """Makes the tokenizer; None: it is in files of the directory."""


class DirectoryFiles:
    """A directory in Hugging Face format."""

    build_tokenizer = None

    def decoded(self) -> ModelFiles:
        return self

    def on_cpu(self) -> ModelFiles:
        return self

    def __init__(self, path: Path) -> None:
        self.path = path

    def json(self, name: str) -> dict[str, Any]:
        file = self.path / name
        # A dangling link is an error, not a missing file.
        return read_json(file) if os.path.lexists(file) else {}

    def checkpoint(self) -> Checkpoint:
        from cpmcu.loading.checkpoint import open_checkpoint  # loads numpy

        return open_checkpoint(self.path)


class GgufFiles:
    """One GGUF file, or the first of several."""

    def __init__(self, path: Path, *, packs: bool = True, halves: bool = True) -> None:
        from cpmcu.loading.gguf import config, header, vocabulary

        self.path, self._packs, self._halves = path, packs, halves
        self._checkpoint: GgufCheckpoint | None = None
        self._header: GgufHeader = header.read_header(path)
        self._rotated = config.rotated_heads
        self._makers: dict[str, Callable[[GgufHeader], dict[str, Any]]] = {
            "config.json": config.hf_config,
            "generation_config.json": config.generation_config,
            "tokenizer_config.json": vocabulary.tokenizer_config,
        }
        self._build = vocabulary.build_tokenizer

    def json(self, name: str) -> dict[str, Any]:
        with about(self.path):
            found = self._makers[name](self._header) if name in self._makers else {}
        if name == "config.json" and self._packs and self.checkpoint().has_packed:
            found["quantization_config"] = {"quant_method": "gguf"}
        return found

    def checkpoint(self) -> GgufCheckpoint:
        from cpmcu.loading.gguf.checkpoint import GgufCheckpoint

        if self._checkpoint is None:
            with about(self.path):
                rotated = self._rotated(self._header)
                self._checkpoint = GgufCheckpoint(
                    self._header, rotated, packs=self._packs, halves=self._halves
                )
        return self._checkpoint

    def decoded(self) -> ModelFiles:
        return GgufFiles(self.path, packs=False)

    def on_cpu(self) -> ModelFiles:
        return GgufFiles(self.path, packs=self._packs, halves=False)

    def build_tokenizer(self) -> tokenizers.Tokenizer:
        with about(self.path):
            return self._build(self._header)


def is_gguf(path: Path) -> bool:
    """Is the path that of a GGUF file, by its name?"""
    return path.suffix.lower() == ".gguf"


def model_files(path: Path) -> ModelFiles:
    """Opens the model at `path`. Raises FileNotFoundError or ValueError for an unusable file."""
    if not is_gguf(path):
        return DirectoryFiles(path)
    stat = path.stat()
    return _gguf(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=4)  # a load asks several times, and a header takes 0.1 s
def _gguf(path: Path, size: int, changed: int) -> GgufFiles:
    return GgufFiles(path)


def model_name(path: Path) -> str:
    """The name of the model at `path`, without a GGUF file's ending."""
    if not is_gguf(path):
        return path.name
    from cpmcu.loading.gguf.checkpoint import name_of

    return name_of(path)
