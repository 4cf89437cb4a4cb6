"""Shapes of drafted trees: which a speculative step may have. `chooser.py` chooses among them."""

from __future__ import annotations

from cpmcu.config import num_candidates

Shape = tuple[int, int]  # tokens of the longest drafted path, nodes verified with the root

PLAIN: Shape = (0, 1)


def shapes_of(depth: int, topk: int, tree_size: int) -> list[Shape]:
    """The shapes worth having of trees of at most this depth, width and size; the last is that.

    A few: each is a CUDA graph, and each is tried. The deep and slim one is for text that is easy
    to guess, of which hardly anything off the likeliest path is ever accepted.
    """
    smaller = [(levels, nodes) for levels, nodes in ((1, 2), (2, 8)) if levels < depth]
    if depth > 2:
        smaller.append((depth, 2 * depth))
    drafted = [(levels, min(nodes, 1 + num_candidates(topk, levels))) for levels, nodes in smaller]
    found = {(levels, nodes) for levels, nodes in drafted if nodes < tree_size}
    return [PLAIN, *sorted(found), (depth, tree_size)]
