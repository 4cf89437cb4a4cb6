"""Minimum length of an output: masks out the tokens that would end it earlier."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]


class MinTokens:
    """Masks out the tokens in `end_ids` until an output has `count` tokens.

    Format of a mask: see cpmcu/engine/grammar.py.
    """

    def __init__(self, count: int, end_ids: Collection[int], vocab_size: int) -> None:
        self.count = count
        self.holds_back = bool(end_ids)  # False: no mask is needed
        bits = np.ones(-(-vocab_size // 32) * 32, np.uint8)
        bits[vocab_size:] = 0
        bits[[token for token in end_ids if token < vocab_size]] = 0
        self._mask: Words = np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)

    def masks(
        self,
        num_tokens: int,
        parents: Sequence[int],
        grammar: dict[int, Words] | None = None,
    ) -> dict[int, Words]:
        """Node -> mask of the tokens that may follow it, for a tree drafted after `num_tokens`.

        `grammar`: the masks of a grammar; a node without one gets none. If the grammar allows only
        end tokens, its mask is used unchanged and the output may end.
        """
        depths: list[int] = []
        masks = dict(grammar or {})
        for node, parent in enumerate(parents):
            depths.append(depths[parent] + 1 if node else 0)
            if num_tokens + depths[node] >= self.count:
                continue
            if grammar is None:
                masks[node] = self._mask
            elif node in masks:
                both = masks[node] & self._mask
                masks[node] = both if both.any() else masks[node]
        return masks
