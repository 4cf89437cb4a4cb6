"""Compares the log-probabilities of two models over a text, computed by the engine."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cpmcu.config import EngineConfig, SpeculativeConfig
from cpmcu.loading.loader import load_model
from cpmcu.loading.progress import LoadProgress

WINDOW = 256  # tokens that one pass reads; a token does not attend to other windows
TOKENS = 1024  # maximum number of tokens that are compared

Floats = npt.NDArray[np.float32]


@dataclass(slots=True)
class Difference:
    """Errors of a model's log-probabilities (in nats) over the tokens of a text."""

    # Signed errors of the log-probabilities of the text's own tokens.
    errors: list[float] = field(default_factory=list)
    # KL divergence from the original model at each token.
    divergences: list[float] = field(default_factory=list)
    losses: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    agreeing: int = 0  # number of tokens where both models find the same next token likeliest

    def add(self, original: Floats, other: Floats, following: Sequence[int]) -> None:
        """Adds log-probabilities [n, V] of both models. `following` [n]: the text's tokens."""
        rows = np.arange(len(following))
        stated = [each[rows, list(following)] for each in (original, other)]
        self.errors += (stated[1] - stated[0]).tolist()
        probability = np.exp(original.astype(np.float64))
        self.divergences += (probability * (original - other)).sum(-1).tolist()
        for losses, values in zip(self.losses, stated):
            losses += (-values).tolist()
        self.agreeing += int((original.argmax(-1) == other.argmax(-1)).sum())

    def notes(self) -> list[str]:
        """Two lines of text for the user: errors of log-probabilities, and perplexities."""
        count = len(self.errors)
        largest = float(np.abs(self.errors).max())
        mean = float(np.abs(self.errors).mean())
        before, after = (math.exp(float(np.mean(losses))) for losses in self.losses)
        return [
            f"log-probability of {count} tokens: error {mean:.4f} on average, {largest:.3f} at "
            f"most; KL divergence {float(np.mean(self.divergences)):.4f} nats a token",
            f"perplexity {before:.3f} before, {after:.3f} after; the likeliest token is the same "
            f"at {self.agreeing / count:.1%} of the tokens",
        ]


def compare(
    original: str | Path,
    other: str | Path,
    ids: Sequence[int],
    *,
    device: str = "cpu",
    progress: LoadProgress | None = None,
) -> Difference:
    """Runs both models over a text of at least two tokens, one model after the other.

    Keeps the original's log-probabilities of at most `TOKENS` tokens in memory. Raises the errors
    of `load_model`.
    """
    windows = [list(ids[at : at + WINDOW]) for at in range(0, min(len(ids), TOKENS), WINDOW)]
    windows = [window for window in windows if len(window) > 1]
    kept = list(_log_probabilities(original, windows, device, progress))
    found = Difference()
    for window, before, after in zip(
        windows, kept, _log_probabilities(other, windows, device, progress)
    ):
        found.add(before[:-1], after[:-1], window[1:])
    return found


def _log_probabilities(
    model: str | Path, windows: Sequence[Sequence[int]], device: str, progress: LoadProgress | None
) -> Iterator[Floats]:
    """Yields the log-probabilities [T, V] of each window."""
    from cpmcu import C

    config = EngineConfig(
        model=str(model),
        device=device,
        max_num_seqs=1,
        max_model_len=WINDOW,
        chunk_length=WINDOW,
        prefix_cache=False,
        speculative_config=SpeculativeConfig(no_speculation=True),
    )
    engine = load_model(str(model), config=config, progress=progress).engine
    for ids in windows:
        slot = engine.add_sequence(C.SamplingConfig(), [])
        engine.reserve(slot, len(ids))
        logits = engine.prefill_logits(slot, ids)
        engine.collect()
        engine.release(slot)
        logits -= logits.max(-1, keepdims=True)
        yield logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    del engine
    gc.collect()  # the next model may need the device memory
