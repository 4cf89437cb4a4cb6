"""Engines for tests: loads the extension or skips, and loads tiny checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cpmcu import _extension
from cpmcu.config import EngineConfig
from cpmcu.loading.loader import LoadedModel, load_model
from tests.missing import missing


def extension_or_skip() -> Any:
    """cpmcu.C; skips the test module if it is not built."""
    try:
        return _extension.load()
    except ImportError as error:
        missing(str(error))


def load_tiny(directory: Path, **config: Any) -> LoadedModel:
    """Loads a directory with settings for small models; the default device is the CPU."""
    settings: dict[str, Any] = {
        "device": "cpu",
        "memory_limit": 0.5,
        "max_num_seqs": 1,
        "chunk_length": 256,
        "num_threads": 1,
    }
    return load_model(str(directory), config=EngineConfig(**(settings | config)))


def prompt_logits(engine: Any, ids: Sequence[int]) -> npt.NDArray[np.float32]:
    """Logits [n, V] of every position of a prompt."""
    slot = engine.add_sequence(extension_or_skip().SamplingConfig(), [])
    try:
        assert engine.reserve(slot, len(ids))
        chunks = []
        for begin in range(0, max(1, len(ids)), engine.chunk_length):
            part = list(ids[begin : begin + engine.chunk_length])
            chunks.append(engine.prefill_logits(slot, part))
            engine.collect()
    finally:
        engine.release(slot)
    return np.concatenate(chunks)


def check_ranks(
    make: Callable[..., Any], ids: Sequence[int], tolerance: float, share: float = 1
) -> None:
    """Logits of two ranks are those of one, up to another order of additions, but not its bits.

    `make(tensor_parallel_size=n)` returns an engine. `tolerance`: limit of the error as a share
    of the largest logit. `share`: the share of positions that must be within it. In 16 bits, a
    router whose scores nearly tie may choose another expert.
    """
    expected, got = (prompt_logits(make(tensor_parallel_size=n), ids) for n in (1, 2))
    errors = np.abs(got - expected).max(axis=1) / np.abs(expected).max()
    assert errors.max() > 0
    assert np.mean(errors < tolerance) >= share, np.sort(errors)


def engine_logits(directory: Path, ids: Sequence[int], **config: Any) -> npt.NDArray[np.float32]:
    """Returns the logits [T, V] of every position of the prompt."""
    return prompt_logits(load_tiny(directory, **config).engine, ids)


def random_ids(vocab_size: int, length: int, seed: int = 1) -> list[int]:
    """Random token ids that include the first and the last of the vocabulary."""
    ids = np.random.default_rng(seed).integers(0, vocab_size, length)
    ids[: length // 2 : 7] = vocab_size - 1
    return [int(i) for i in ids]
