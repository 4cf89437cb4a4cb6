"""Shapes of speculative steps. The drafter offers them (`Engine.draft_shapes`)."""

from __future__ import annotations

Shape = tuple[int, int]  # (tokens of the longest drafted path, verified nodes with the root)

PLAIN: Shape = (0, 1)


def is_chain(shape: Shape) -> bool:
    """Has the draft no branches? Then it is made of the likeliest tokens, one in each pass."""
    return shape[1] - 1 <= shape[0]
