"""stop_regex ends an output at the first match of a pattern, with drafts and without."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpmcu import SamplingParams
from cpmcu.grammar import GrammarError
from tests.unit.test_bad_words import models, output_of

pytest.importorskip("llguidance")

from cpmcu.engine.stop_regex import StopRegex
from cpmcu.engine.stopping import StopStrings

__all__ = ["models"]

PATTERNS = ["a好|b", "ab+\n", "[^ab]b", "(a|好)(b|好)$", "(?s:a.b)", r"b\s*$", "好{2,3}"]
texts = st.lists(st.text(st.sampled_from("ab好\n"), max_size=4), max_size=12)


def cut(pieces: list[str], patterns: list[str], first: int = 0) -> tuple[str, str | None]:
    """Reference: cuts the text at the first end of a match, beginning with piece `first`."""
    text = ""
    for number, piece in enumerate(pieces):
        for at, letter in enumerate(piece, start=1):
            text += letter
            for pattern in patterns:
                counts = number >= first and (at == len(piece) or not pattern.endswith("$"))
                if counts and re.search(f"(?:{pattern.removesuffix('$')})\\Z", text):
                    return text, pattern
    return text, None


def stream(pieces, patterns, stops=(), first: int = 0) -> tuple[str, str | None]:
    matcher = StopStrings(stops, patterns=[StopRegex(pattern) for pattern in patterns])
    found = ""
    for number, piece in enumerate([*pieces, ""]):
        text, stop = matcher.push(piece, final=number == len(pieces), stops=number >= first)
        found += text
        if stop is not None:
            return found, stop
    return found, None


@settings(max_examples=300, deadline=None)
@given(pieces=texts, patterns=st.lists(st.sampled_from(PATTERNS), max_size=3), data=st.data())
def test_text_is_cut_at_the_first_end_of_a_match(pieces, patterns, data):
    first = data.draw(st.sampled_from([0, 0, 3]))
    assert stream(pieces, patterns, first=first) == cut(pieces, patterns, first)


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["xan", "d b"], ["b"], ("xand", "and|or")),
        (["xan", "d b"], ["n"], ("xa", "n")),
        (["xan", "d b"], ["and"], ("x", "and")),  # a stop string that ends with the match
        (["xan", "d b"], ["and b"], ("xand", "and|or")),  # text held back is part of the output
    ],
)
def test_beside_stop_strings(pieces, stops, expected):
    assert stream(pieces, ["and|or"], stops) == expected


def test_the_first_pattern_wins_at_the_same_character():
    assert stream(["ab"], ["b", "ab"]) == ("ab", "b")
    assert stream(["ab"], ["ab", "b"]) == ("ab", "ab")


def test_copies_read_texts_of_their_own():
    first = StopRegex("ab")
    assert first.read("a") is None
    second = first.copy()
    assert second.read("b") is None
    assert first.read("b") == 1


@pytest.mark.parametrize(
    "pattern", ["(", "a)|(b", r"\bx", "(?=a)b", r"(a)\1", "^a", "[", "a$b", "((a{1,900}){1,900})*"]
)
def test_unusable_patterns(pattern):
    """A pattern is refused, or it ends the output only at a match."""
    try:
        regex = StopRegex(pattern)
    except ValueError as error:
        assert str(error).startswith("the pattern '")
    else:
        assert pattern.startswith("((")
        assert regex.read("b") == 1  # it matches the empty text


@pytest.mark.parametrize("pattern", ["(?s:.{1,200}){1,200}zz", "(?:a|b|ab){1000}c", "(a+)+z"])
def test_a_hostile_pattern_takes_little_time(pattern):
    """The pattern is refused with a reason, or reading takes no longer than with other patterns."""
    begin = time.perf_counter()
    regex = StopRegex(pattern)
    try:
        for _ in range(400):
            assert regex.read("abaabbbaab") is None
    except GrammarError as error:
        assert "has become too complex" in str(error)
    assert time.perf_counter() - begin < 20


def test_wrong_values():
    for value in (3, [3], ["a"] * 9, "a" * 1025, "\ud800"):
        with pytest.raises(ValueError, match="stop_regex"):
            SamplingParams(stop_regex=value)
    assert SamplingParams(stop_regex=["", "a"]).stop_patterns == ("a",)
    assert SamplingParams(stop_regex="a").stop_patterns == ("a",)


@pytest.mark.parametrize("temperature", [0, 1.2])
def test_an_output_ends_with_the_first_match(models, temperature):
    plain = output_of(models, temperature=temperature)
    pattern = r"[a-z]\s+[a-z\d]"
    end = re.search(pattern, plain.text).end()
    found = output_of(models, temperature=temperature, stop_regex=pattern)
    assert (found.text, found.stop_reason) == (plain.text[:end], pattern)
    assert found.finish_reason == "stop"
    assert found.token_ids == plain.token_ids[: len(found.token_ids)]
    assert len(found.token_ids) < len(plain.token_ids)


def test_min_tokens_hold_a_pattern_back(models):
    found = output_of(models, temperature=0, stop_regex=".", min_tokens=9)
    assert len(found.token_ids) == 10


def test_a_pattern_that_becomes_too_complex_fails_its_own_output(models):
    for llm in models:
        with pytest.raises(GrammarError, match="too complex"):
            llm.generate(
                "a",
                SamplingParams(
                    stop_regex="(?s:.{1,200}){1,200}zz", max_tokens=200, ignore_eos=True
                ),
            )
        assert llm.generate("a", SamplingParams(max_tokens=2))[0].outputs[0].token_ids
