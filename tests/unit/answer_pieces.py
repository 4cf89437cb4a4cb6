"""Texts in pieces, for tests of the parsers of answers."""

from __future__ import annotations

import itertools
import json

from cpmcu.serving.chat.answers import AnswerParser


def pieces(text: str, cuts: list[int]) -> list[str]:
    """A text divided at some places."""
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(edges)] or [""]


def parsed(parser: AnswerParser, parts: list[str]) -> tuple[str, str, list[tuple[str, object]]]:
    """Parses a text in pieces. Returns (reasoning, content, calls).

    The arguments are objects, or texts if they are not JSON. The deltas must add up to the calls.
    """
    thought, content, calls = "", "", []
    deltas: dict[int, list[str]] = {}
    for i, part in enumerate(parts):
        found = parser.push(part, final=i == len(parts) - 1)
        thought += found.reasoning
        content += found.content
        calls += found.calls
        for delta in found.deltas:
            assert (delta.index in deltas) == (delta.id is None) == (delta.name is None)
            deltas.setdefault(delta.index, [delta.name, delta.id, ""])[2] += delta.arguments
    assert [[c.name, c.id, c.arguments] for c in calls] == [*deltas.values()]
    assert list(deltas) == [*range(len(calls))]
    assert len({call.id for call in calls}) == len(calls)
    assert parser.has_calls == bool(calls)
    return thought, content, [(call.name, as_object(call.arguments)) for call in calls]


def as_object(arguments: str) -> object:
    """The value of JSON, or the text itself."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
