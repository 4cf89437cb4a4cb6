"""The rnn Markov head of DSpark in numpy: scores that depend on all tokens of a path."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class RnnMarkov:
    """D positions with K candidates each."""

    own: Array  # [D, K] log-probabilities without the head
    root: Array  # [r] W1's row of the root
    predecessors: Array  # [D, K, r] W1's rows of the candidates
    successors: Array  # [D, K, r] W2's rows of the candidates
    inputs: Array  # [D, 3 r] columns for the hidden states times these states, plus bias
    weight: Array  # [3 r, 2 r] columns for the state and for the token before

    @functools.cached_property
    def _steps(self) -> dict[tuple[int, ...], tuple[Array, Array]]:
        return {}

    def step(self, path: tuple[int, ...]) -> tuple[Array, Array]:
        """Returns (state after a path, output that scores the candidates below it), each [r]."""
        if path not in self._steps:
            rank = len(self.root)
            state = self.step(path[:-1])[0] if path else np.zeros(rank)
            token = self.predecessors[len(path) - 1, path[-1]] if path else self.root
            z = self.weight @ np.concatenate([state, token]) + self.inputs[len(path)]
            gate = 1 / (1 + np.exp(-z[:rank]))
            after = gate * state + (1 - gate) * np.tanh(z[rank : 2 * rank])
            self._steps[path] = after, np.tanh(z[2 * rank :])
        return self._steps[path]

    def below(self, path: tuple[int, ...]) -> Array:
        """Log-probabilities [K] of the candidates below a path. Other tokens keep their logits."""
        own = self.own[len(path)]
        known = np.where(np.isnan(own), -np.inf, own)
        logits = known + self.successors[len(path)] @ self.step(path)[1]
        rest = max(0.0, 1 - float(np.exp(known).sum()))
        with np.errstate(divide="ignore"):
            return logits - np.log(np.exp(logits).sum() + rest)
