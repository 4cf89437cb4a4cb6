"""Texts that an output must not have: masks out the last token of each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]


class BadWords:
    """Masks out the last token of a word where the output ends with its other tokens.

    `words`: tokens of each word, two at least. A word of one token gets a logit bias, not a mask.
    Format of a mask: see cpmcu/engine/grammar.py.
    """

    def __init__(self, words: Sequence[Sequence[int]], vocab_size: int) -> None:
        self._words = [tuple(word) for word in words]
        bits = np.ones(-(-vocab_size // 32) * 32, np.uint8)
        bits[vocab_size:] = 0
        self._all: Words = np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)
        # Tokens before the last one that a match can read.
        self._reach = max(map(len, self._words)) - 1

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

        Node 0 is the last token of `output`. `others`: masks of other rules. If a word would
        leave no token, these masks win. If not `unmasked`, a node without a mask in `others` gets
        none.
        """
        masks = dict(others)
        paths: list[tuple[int, ...]] = []
        for node, parent in enumerate(parents):
            before = tuple(output) if node == 0 else (*paths[parent], tokens[node])
            paths.append(before[-self._reach :])
            if not unmasked and node not in others:
                continue
            banned = [
                word[-1] for word in self._words if paths[node][-len(word) + 1 :] == word[:-1]
            ]
            if not banned:
                continue
            mask = masks.get(node, self._all).copy()
            for token in banned:
                mask[token // 32] &= ~np.uint32(1 << token % 32)
            if mask.any():
                masks[node] = mask
        return masks
