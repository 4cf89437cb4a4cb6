"""The tree shapes that a speculative step may have. `chooser.py` chooses among them."""

from __future__ import annotations

from cpmcu.config import num_candidates

Shape = tuple[int, int]  # tokens of the longest drafted path, verified nodes (root included)

PLAIN: Shape = (0, 1)
MOST_CHAINS = 5  # each shape needs a CUDA graph and trial steps


def is_chain(shape: Shape) -> bool:
    """Has the draft no branches? Then it is made of the likeliest tokens, one in each pass."""
    return shape[1] - 1 <= shape[0]


def shapes_of(depth: int, topk: int, tree_size: int) -> list[Shape]:
    """Tree shapes up to the given depth, width and size. The last one is the given shape.

    Chains of every depth suit predictable text, where few tokens off the likeliest path are
    accepted, and many sequences, where each row costs. Of a deep tree, only some depths.
    """
    found = {(levels, levels + 1) for levels in _depths(depth)}
    trees = [(2, 8), (depth, 2 * depth), (depth, 4 * depth)]
    found |= {
        (levels, min(nodes, 1 + num_candidates(topk, levels)))
        for levels, nodes in trees
        if topk > 1 and levels <= depth
    }
    smaller = {shape for shape in found if shape[1] < tree_size}
    return [PLAIN, *sorted(smaller - {(depth, tree_size)}), (depth, tree_size)]


def _depths(depth: int) -> list[int]:
    """Depths of chains: all, or if there are many, those that grow by about a constant factor."""
    if depth <= MOST_CHAINS:
        return list(range(1, depth + 1))
    last = MOST_CHAINS - 1
    return sorted({round(depth ** (i / last)) for i in range(MOST_CHAINS)} | {2})
