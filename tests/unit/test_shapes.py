"""The tree shapes to choose from."""

from __future__ import annotations

import itertools

from cpmcu.engine.shapes import is_chain, shapes_of


def test_shapes():
    chains = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
    assert sorted(shapes_of(4, 8, 24)) == sorted([*chains, (2, 8), (4, 8), (4, 16), (4, 24)])
    assert shapes_of(2, 10, 12) == [(0, 1), (1, 2), (2, 3), (2, 4), (2, 8), (2, 12)]
    assert shapes_of(4, 1, 5) == chains
    assert shapes_of(1, 1, 2) == [(0, 1), (1, 2)]
    assert shapes_of(16, 4, 64)[-1] == (16, 64)
    assert shapes_of(6, 1, 4) == [(0, 1), (1, 2), (2, 3), (6, 4)]
    assert sorted(shapes_of(4, 2, 15)) == sorted([*chains, (2, 7), (4, 8), (4, 15)])
    assert [s for s in shapes_of(16, 4, 64) if is_chain(s)][1:] == [
        (1, 2), (2, 3), (4, 5), (8, 9), (16, 17)
    ]  # fmt: skip


def test_the_engine_accepts_every_shape() -> None:
    """Engine::check_shape requires: within the largest shape, at most as many nodes as drafted."""
    for depth, topk in itertools.product(range(1, 17), range(1, 33)):
        for tree_size in range(2, min(64, 1 + topk + (depth - 1) * topk**2) + 1):
            shapes = shapes_of(depth, topk, tree_size)
            assert len(set(shapes)) == len(shapes) and shapes[-1] == (depth, tree_size)
            for levels, nodes in shapes[1:]:
                assert 1 <= levels <= depth and 2 <= nodes <= tree_size
                assert nodes <= 1 + topk + (levels - 1) * topk**2
