"""Expected and optimistic numbers of tokens of a shape."""

from __future__ import annotations

import pytest

from cpmcu.engine.emitted_tokens import EmittedTokens

SMALL, SLIM, WHOLE = (1, 2), (4, 5), (4, 24)


def test_nothing_is_expected_and_all_is_hoped_for():
    tokens = EmittedTokens()
    assert tokens.expected(WHOLE) == 1.0 and tokens.hoped(WHOLE) == 5.0
    assert tokens.expected((0, 1)) == tokens.hoped((0, 1)) == 1.0


@pytest.mark.parametrize("rate", [0.0, 0.5, 0.75, 1.0])
def test_a_small_shape_tells_of_a_deep_one(rate: float) -> None:
    tokens = EmittedTokens()
    for i in range(200):
        tokens.add(SMALL, [1 + (i % 4 < 4 * rate)])
    expected = 1 + rate + rate**2 + rate**3 + rate**4
    assert tokens.expected(SMALL) == pytest.approx(1 + rate, rel=0.05)
    assert tokens.expected(SLIM) == pytest.approx(expected, rel=0.05)
    assert tokens.expected(SLIM) <= tokens.hoped(SLIM) <= tokens.hoped(WHOLE) + 1e-9


def test_a_shape_of_its_own_counts_more():
    tokens = EmittedTokens()
    for _ in range(20):
        tokens.add(SMALL, [1])
        tokens.add(WHOLE, [4])
    assert tokens.expected(WHOLE) > 3.5 and tokens.expected(SMALL) < 1.2


def test_hope_comes_back_with_time():
    tokens = EmittedTokens()
    for _ in range(30):
        tokens.add(SMALL, [1])
    early = tokens.hoped(SMALL)
    for _ in range(300):
        tokens.add((0, 1), [1])
    assert early < 1.1 and tokens.hoped(SMALL) > 1.3


def test_forgetting_keeps_what_it_is_told_to():
    tokens = EmittedTokens()
    for _ in range(30):
        tokens.add(WHOLE, [5, 5])
    tokens.forget(1, kept=[(WHOLE, [1, 1]), (WHOLE, [1, 2])])
    assert tokens.expected(WHOLE) < 2.5
    tokens.forget(0.0)
    assert tokens.expected(WHOLE) < 2.5
