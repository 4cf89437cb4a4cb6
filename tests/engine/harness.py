"""Small engines that tests drive step by step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest

from cpmcu.config import EngineConfig
from cpmcu.loading.loader import load_model

if TYPE_CHECKING:
    from cpmcu import C

SHIPPED = Path(__file__).parents[2] / "cpmcu" / "assets" / "tiny-python-minicpm"
SMALL = os.environ.get("CPMCU_SMALL") == "1"  # under a sanitizer
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def make_engine(directory: Path, device: str = "cpu", **config: Any) -> C.Engine:
    """An engine with the weights of a checkpoint directory."""
    if device == "cuda":
        config.setdefault("memory_limit", 0.2)
    name = str(directory)
    return load_model(name, config=EngineConfig(model=name, device=device, **config)).engine


def sampling(**fields: Any) -> C.SamplingConfig:
    from cpmcu import C

    return C.SamplingConfig(**fields)


def prefill(engine: C.Engine, slot: int, ids: Sequence[int], chunk: int) -> int:
    """Prefills a prompt in chunks of `chunk` and returns the first token."""
    assert engine.reserve(slot, len(ids) + 1)
    for begin in range(0, len(ids), chunk):
        part = list(ids[begin : begin + chunk])
        engine.prefill([(slot, part, begin + chunk >= len(ids))])
        outputs = engine.collect()
    return outputs[0].tokens[0]


def generate(
    engine: C.Engine, ids: Sequence[int], count: int, *, chunk: int = 0, **fields: Any
) -> list[int]:
    """Generates `count` tokens after a prompt, with one sequence in the engine."""
    slot = engine.add_sequence(sampling(**fields), list(ids))
    tokens = [prefill(engine, slot, ids, chunk or engine.chunk_length)]
    while len(tokens) < count:
        assert engine.reserve(slot, len(ids) + len(tokens))
        engine.decode([slot])
        tokens += engine.collect()[0].tokens
    engine.release(slot)
    return tokens


def random_ids(count: int, vocab_size: int, seed: int = 0) -> list[int]:
    ids: npt.NDArray[np.int64] = np.random.default_rng(seed).integers(3, vocab_size, count)
    return ids.tolist()
