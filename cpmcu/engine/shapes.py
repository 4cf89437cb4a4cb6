"""The tree shapes that a speculative step may have. `chooser.py` chooses among them."""

from __future__ import annotations

from cpmcu.config import num_candidates

Shape = tuple[int, int]  # tokens of the longest drafted path, verified nodes (root included)

PLAIN: Shape = (0, 1)


def shapes_of(depth: int, topk: int, tree_size: int) -> list[Shape]:
    """Tree shapes up to the given depth, width and size. The last one is the given shape.

    The list is short: each shape needs a CUDA graph and trial steps. The deep and narrow shape
    suits predictable text, where few tokens off the likeliest path are accepted.
    """
    smaller = [(levels, nodes) for levels, nodes in ((1, 2), (2, 8)) if levels < depth]
    if depth > 2:
        smaller.append((depth, 2 * depth))
    drafted = [(levels, min(nodes, 1 + num_candidates(topk, levels))) for levels, nodes in smaller]
    found = {(levels, nodes) for levels, nodes in drafted if nodes < tree_size}
    return [PLAIN, *sorted(found), (depth, tree_size)]
