"""Limit on the tokens of reasoning: forces the end tag when they are used up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from cpmcu.sampling import ThinkingLimit

Words = npt.NDArray[np.uint32]
# The number of output tokens before the reasoning, and whether no reasoning goes on.
State = tuple[int | None, bool]

_MAX_BLANK = 64  # maximum number of white-space tokens before the begin tag
_AHEAD = 256  # more tokens than the steps in flight can emit


class ThinkingBudget:
    """Allows only the next token of the end tag once an output has `limit.tokens` of reasoning.

    `end_ids`: tokens of the end tag. `decode`: text of tokens, special ones included. Reasoning
    begins only at the start of an output. Format of a mask: see cpmcu/engine/grammar.py.
    """

    def __init__(
        self,
        limit: ThinkingLimit,
        end_ids: Sequence[int],
        decode: Callable[[Sequence[int]], str],
        vocab_size: int,
    ) -> None:
        self._limit = limit
        self._end = tuple(end_ids)
        self._decode = decode
        self._num_words = -(-vocab_size // 32)
        self._state: State = (0 if limit.begun else None, False)

    def may_force(self, num_tokens: int) -> bool:
        """May a step launched when `num_tokens` are known need a mask?"""
        return not self._state[1] and num_tokens + _AHEAD >= self._limit.tokens

    def accept(self, output: Sequence[int]) -> None:
        """Takes note of the last token of `output`."""
        self._state = self._after(self._state, output)

    def masks(
        self,
        output: Sequence[int],
        tokens: Sequence[int],
        parents: Sequence[int],
        others: dict[int, Words],
        *,
        unmasked: bool = True,
    ) -> dict[int, Words]:
        """Node -> mask of the tokens that may follow it, for a tree drafted behind `output`.

        Node 0 is the last token of `output`. `others`: masks of other rules. If they forbid
        the end tag, they win. If not `unmasked`, a node without a mask in `others` gets none.
        """
        masks = dict(others)
        paths: list[list[int]] = []
        states: list[State] = []
        for node, parent in enumerate(parents):
            if node == 0:
                paths.append(list(output))
                states.append(self._state)
            else:
                paths.append([*paths[parent], tokens[node]])
                drafted = tokens[node] >= 0
                states.append(self._after(states[parent], paths[node]) if drafted else (None, True))
            token = self._forced(states[node], paths[node])
            if token is None or not (unmasked or node in others):
                continue
            mask = np.zeros(self._num_words, np.uint32)
            mask[token // 32] = 1 << token % 32
            if node in others:
                mask &= others[node]
            if mask.any():
                masks[node] = mask
        return masks

    def _after(self, state: State, path: Sequence[int]) -> State:
        """State after `path`. `state`: the state after all but its last token."""
        start, over = state
        if over:
            return state
        limit = self._limit
        if start is None:
            text = self._decode(path).lstrip()
            if text.startswith(limit.begin):
                return len(path), False
            return None, not limit.begin.startswith(text) or len(path) > _MAX_BLANK
        tail = path[max(start, len(path) - len(limit.end) - 1) :]
        ended = limit.end in self._decode(tail) or tuple(tail[-len(self._end) :]) == self._end
        return start, ended

    def _forced(self, state: State, path: Sequence[int]) -> int | None:
        """The only token that may follow `path`; None if any may."""
        start, over = state
        if over or start is None or len(path) - start < self._limit.tokens:
            return None
        known = next(
            length
            for length in range(min(len(self._end) - 1, len(path) - start), -1, -1)
            if tuple(path[len(path) - length :]) == self._end[:length]
        )
        return self._end[known]
