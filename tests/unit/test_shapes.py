"""The shapes of drafts among which each step chooses."""

from __future__ import annotations

import itertools

from cpmcu.engine.shapes import Shape, is_chain


def beam(depth: int, topk: int, tree_size: int) -> list[Shape]:
    from cpmcu import C

    return C.beam_shapes(depth=depth, topk=topk, tree_size=tree_size)


def test_shapes_of_trees_that_grow_level_by_level() -> None:
    chains = [(1, 2), (2, 3), (3, 4), (4, 5)]
    assert beam(4, 8, 24) == sorted([*chains, (2, 8), (4, 8), (4, 16), (4, 24)])
    assert beam(2, 10, 12) == [(1, 2), (2, 3), (2, 4), (2, 8), (2, 12)]
    assert beam(4, 1, 5) == chains
    assert beam(1, 1, 2) == [(1, 2)]
    assert beam(16, 4, 64)[-1] == (16, 64)
    assert beam(6, 1, 4) == [(1, 2), (2, 3), (6, 4)]
    assert beam(4, 2, 15) == sorted([*chains, (2, 7), (4, 8), (4, 15)])
    assert [s for s in beam(16, 4, 64) if is_chain(s)] == [(1, 2), (2, 3), (4, 5), (8, 9), (16, 17)]


def test_every_shape_is_one_that_such_a_tree_has() -> None:
    """Within the largest shape, at most as many nodes as drafted."""
    for depth, topk in itertools.product(range(1, 17), range(1, 33)):
        for tree_size in range(2, min(64, 1 + topk + (depth - 1) * topk**2) + 1):
            shapes = beam(depth, topk, tree_size)
            assert len(set(shapes)) == len(shapes) and shapes[-1] == (depth, tree_size)
            for levels, nodes in shapes:
                assert 1 <= levels <= depth and 2 <= nodes <= tree_size
                assert nodes <= 1 + topk + (levels - 1) * topk**2
