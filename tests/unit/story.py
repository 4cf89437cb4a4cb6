"""An LLM whose fake engine always generates one story, for tests of the code around it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_engine import PAGE_SIZE, FakeEngine
from tokenizers_for_tests import byte_level, write_directory

import cpmcu
from cpmcu import LLM

STORY = "the quick brown 🙂 fox, 你好 jumps over the lazy dog. "


def first_outside(ids: list[object], vocab_size: int) -> int:
    """As in the extension."""
    bad = (i for i, item in enumerate(ids) if type(item) is not int or not 0 <= item < vocab_size)
    return next(bad, -1)


class StoryEngine(FakeEngine):
    """Generates the same story for every prompt."""

    def __init__(self, **options: object) -> None:
        ids = byte_level().encode(STORY * 50).ids
        super().__init__(lambda stream, position: ids[position], **options)

    num_ranks = 1

    def memory_plan(self, rank: int = 0) -> list[dict[str, object]]:
        return [{"name": "kv", "offset": 0, "bytes": 1 << 20, "first": 0, "last": 1, "group": "kv"}]


def told(prompt_length: int, count: int) -> list[int]:
    """Returns the story's tokens after a prompt of the given length."""
    return byte_level().encode(STORY * 50).ids[prompt_length : prompt_length + count]


class Stage:
    """Installs a fake extension and loader. `engines`: weak references to the engines made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
        self.directory = directory
        self.engines: list[weakref.ref[StoryEngine]] = []
        self.loaded: dict[str, object] = {}
        extension = SimpleNamespace(
            PAGE_SIZE=PAGE_SIZE,
            MAX_TOKEN_ID=(1 << 31) - 1,
            first_outside=first_outside,
            SamplingConfig=lambda **fields: SimpleNamespace(key=fields.get("stream", 0), **fields),
        )
        monkeypatch.setitem(sys.modules, "cpmcu.C", extension)
        monkeypatch.setitem(vars(cpmcu), "C", extension)
        loader = SimpleNamespace(load_model=self._load)
        monkeypatch.setitem(sys.modules, "cpmcu.loading.loader", loader)
        uncached = SimpleNamespace(make_page_cache=lambda loaded, config: None)
        monkeypatch.setitem(sys.modules, "cpmcu.loading.page_cache", uncached)

    def prepare(
        self,
        *,
        generation_config: dict[str, object] | None = None,
        tokenizer_config: dict[str, object] | None = None,
        **options: object,
    ) -> None:
        """Prepares the result of the next load. `options` are the engine's."""
        write_directory(self.directory, byte_level(), **(tokenizer_config or {}))
        self.loaded = {"options": {"max_model_len": 200, **options}, "config": generation_config}

    def _load(
        self,
        model: str,
        *,
        config: object,
        progress: Callable | None = None,
        before_tensors: Callable = lambda directory: None,
        reads_weights: bool = True,
        plans_for: int | None = None,
    ) -> SimpleNamespace:
        before_tensors(self.directory)
        engine = StoryEngine(**self.loaded["options"])
        self.engines.append(weakref.ref(engine))
        if progress is not None:
            progress.start(10_000_000, "story")
            progress.update(10_000_000)
            progress.finish()
        return SimpleNamespace(
            engine=engine,
            directory=self.directory,
            hf_config={},
            generation_config=self.loaded["config"] or {},
            draft=None,
            shapes=(),
            spec=SimpleNamespace(vocab_size=byte_level().get_vocab_size()),
        )

    def __call__(self, **options: object) -> LLM:
        self.prepare(**options)
        return LLM(str(self.directory))
