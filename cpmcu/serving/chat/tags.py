"""Tags in a text that arrives in pieces."""

from __future__ import annotations


def held_back(text: str, tag: str) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of `tag`."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
