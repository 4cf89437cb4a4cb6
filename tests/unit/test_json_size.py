"""ValueCounter counts the values of JSON without parsing it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpmcu.serving.http.json_size import ValueCounter

TEXTS = st.text(alphabet='a"\\,:[]{}\n你', max_size=8)
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


def counted(pieces: list[bytes]) -> tuple[int, int]:
    counter = ValueCounter()
    for piece in pieces:
        counter.feed(piece)
    return counter.values, counter.parts


def parts(value: Any) -> int:
    if not isinstance(value, list | dict):
        return 0
    if isinstance(value, list):
        return 1 + sum(map(parts, value))
    return 1 + len(value) + sum(map(parts, value.values()))


def separators(value: Any) -> int:
    """Commas and colons between values."""
    if not isinstance(value, list | dict):
        return 0
    inner = value if isinstance(value, list) else value.values()
    colons = len(value) if isinstance(value, dict) else 0
    return max(0, len(value) - 1) + colons + sum(map(separators, inner))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(value=VALUES, ascii_only=st.booleans(), cuts=st.lists(st.integers(0, 200), max_size=6))
def test_signs_in_texts_do_not_count(value: Any, ascii_only: bool, cuts: list[int]) -> None:
    """The counts are equal for every division into pieces."""
    data = json.dumps(value, ensure_ascii=ascii_only).encode()
    ends = sorted(min(cut, len(data)) for cut in cuts)
    pieces = [data[a:b] for a, b in zip([0, *ends], [*ends, len(data)])]
    assert counted(pieces) == (1 + separators(value), parts(value))


@pytest.mark.parametrize(
    "piece", [b'"' + b'\\"' * 500_000, b'"' * 1_000_001, b"\\" * 1_000_000, b'"\\' * 500_000]
)
def test_quotes_and_backslashes_take_linear_time(piece: bytes) -> None:
    """The time is linear in the number of backslashes and quotes."""
    counted([piece, piece])
