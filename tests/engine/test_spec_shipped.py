"""The drafts of the package, on Python code."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

from tests.engine.drafted import (
    SAMPLINGS,
    TREES,
    Drive,
    memory_full_of,
)
from tests.engine.harness import SHIPPED
from tests.reference.engines import extension_or_skip

extension_or_skip()

SHIPPED_DRAFTS = [
    *("tiny-python-eagle2", "tiny-python-eagle3", "tiny-python-mtp", "tiny-python-draft"),
    "ngram",
]

SOURCES = ("heapq", "textwrap", "bisect", "fnmatch", "queue", "shlex", "string", "sched")


def shipped_engine(device: str, speculation: dict[str, Any], dtype: str = "auto") -> Any:
    from cpmcu.config import EngineConfig, SpeculativeConfig
    from cpmcu.loading.loader import load_model

    config = EngineConfig(
        device=device,
        dtype=dtype,
        memory_limit=0.2,
        max_num_seqs=1,
        chunk_length=256,
        max_model_len=1024,
        speculative_config=SpeculativeConfig(**speculation),
    )
    return load_model(str(SHIPPED), config=config).engine


def count_on(device: str) -> int:
    """Tokens of a text."""
    return 60 if device == "cpu" else 200


@pytest.fixture(scope="module")
def python_texts(device: str) -> list[tuple[list[int], dict[str, Any], list[int]]]:
    """8 prompts of Python code, sampling parameters, and tokens without speculation."""
    from cpmcu.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_directory(SHIPPED)
    plain = Drive(shipped_engine(device, {"no_speculation": True}), ahead=2)
    texts = []
    for i in range(8):
        module = importlib.import_module(SOURCES[i % len(SOURCES)])
        ids = tokenizer.encode(inspect.getsource(module)[200 * i : 200 * i + 60 + 257 * i])
        fields = {
            **list(SAMPLINGS.values())[i % len(SAMPLINGS)],
            "stop_ids": list(tokenizer.eos_token_ids),
        }
        texts.append((ids, fields, plain.one(ids, count_on(device), **fields)))
    return texts


def test_an_eagle_head_after_a_short_draft_and_plain_steps(device: str) -> None:
    """The result must not depend on uninitialised memory of the auxiliary hidden states.

    The memory is filled with bytes 0x7f, which are NaN in float16.
    """
    from cpmcu.tokenizer import Tokenizer

    ids = Tokenizer.from_directory(SHIPPED).encode(
        inspect.getsource(importlib.import_module("heapq"))
    )
    draft = {"draft_model_path": str(SHIPPED.parent / "tiny-python-eagle2"), **TREES["narrow"]}
    with memory_full_of(0x7F):
        engine = shipped_engine(device, draft, dtype="float16")
    shapes = iter([(1, 2)] + [(0, 1)] * 8 + [(3, 12)] * 60)
    drive = Drive(engine, shapes=lambda: next(shapes))
    drive.one(ids[:300], 60)
    trees = drive.emitted[9:]
    assert sum(trees) / len(trees) > 1.8


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED_DRAFTS)
def test_the_shipped_drafts(device: str, python_texts: Any, name: str) -> None:
    """Continues 8 prompts of Python code with each draft.

    Most drafts get two tokens a step accepted.
    """
    if name != "ngram" and not (SHIPPED.parent / name / "model.safetensors").is_file():
        pytest.skip(f"{name} is not there")
    draft: dict[str, Any] = {"method": "ngram"}
    if name != "ngram":
        draft = {"draft_model_path": str(SHIPPED.parent / name), **TREES["narrow"]}
    drafted = Drive(shipped_engine(device, draft), ahead=2)
    emitted: list[int] = []
    count = count_on(device)
    for ids, fields, expected in python_texts:
        tokens = drafted.one(ids, count, **fields)
        # Without a drafter the device does not check stop ids.
        assert tokens == expected[: len(tokens)]
        assert len(tokens) == count or tokens[-1] in fields["stop_ids"]
        emitted += drafted.emitted
    assert sum(emitted) / len(emitted) > (1.05 if name == "ngram" else 1.8)
