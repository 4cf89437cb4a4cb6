"""Stop strings are found at every position and for every division of the text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers_for_tests import byte_level

from cpmcu.engine.detokenizer import Detokenizer
from cpmcu.engine.stopping import Finish, StopStrings, StopTokens


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Reference: cuts the shortest prefix of `text` that ends in a stop string."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def stream(pieces: list[str], stops: list[str]) -> tuple[str, str | None, list[str]]:
    matcher = StopStrings(stops)
    given_out = []
    for piece in pieces:
        text, stop = matcher.push(piece)
        given_out.append(text)
        if stop is not None:
            return "".join(given_out), stop, given_out
    text, stop = matcher.push("", final=True)
    return "".join(given_out) + text, stop, given_out


letters = st.text(st.sampled_from("ab好\n"), min_size=1, max_size=4)


@settings(max_examples=500)
@given(pieces=st.lists(st.text(st.sampled_from("ab好\n"), max_size=6), max_size=12), data=st.data())
def test_streamed_text_is_the_text_cut_at_the_first_stop(pieces, data):
    stops = data.draw(st.lists(letters, max_size=4))
    text, stop, given_out = stream(pieces, stops)
    assert (text, stop) == cut("".join(pieces), stops)
    for i in range(len(given_out)):  # returned text is never retracted
        assert text.startswith("".join(given_out[: i + 1]))


@settings(max_examples=300)
@given(
    early=st.lists(st.text(st.sampled_from("ab好"), max_size=4), max_size=6),
    late=st.lists(st.text(st.sampled_from("ab好"), max_size=4), max_size=6),
    stops=st.lists(letters, min_size=1, max_size=3),
)
def test_stop_strings_that_end_early_do_not_match(early, late, stops):
    """A stop string that begins early and ends late matches."""
    matcher, found, stop = StopStrings(stops), [], None
    for piece in early:
        text, stop = matcher.push(piece, stops=False)
        assert stop is None
        found.append(text)
    for piece in [*late, None]:
        text, stop = matcher.push(piece or "", final=piece is None)
        found.append(text)
        if stop is not None:
            break
    before, whole = len("".join(early)), "".join([*early, *late])
    ends = {
        (at + len(each), -len(each), each)
        for each in stops
        for at in range(len(whole))
        if whole.startswith(each, at) and at + len(each) > before
    }
    end, length, expected = min(ends, default=(len(whole), 0, None))
    assert ("".join(found), stop) == (whole[: end + length], expected)


@given(text=st.text(st.sampled_from("abc 你好🙂"), max_size=30), data=st.data())
def test_with_a_tokenizer_in_front(text, data):
    tokenizer = byte_level()
    stops = data.draw(st.lists(st.text(st.sampled_from("ab 你🙂"), min_size=1, max_size=3)))
    detokenizer = Detokenizer(tokenizer.decode)
    pieces = [detokenizer.push([token]) for token in tokenizer.encode(text).ids]
    assert stream([*pieces, detokenizer.push([], final=True)], stops)[:2] == cut(text, stops)


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["Hello wor", "ld!"], ["wor"], ("Hello ", "wor")),  # inside a piece
        (["Hel", "lo", " world"], ["llo w"], ("He", "llo w")),  # across pieces
        (["aaab"], ["aab"], ("a", "aab")),
        (["a", "a", "a", "b"], ["aab"], ("a", "aab")),
        (["abc"], ["abcd", "bc"], ("a", "bc")),  # the one that is complete first
        (["abc"], ["c", "bc"], ("a", "bc")),  # the longest of these
        (["abc"], [], ("abc", None)),
        (["ab"], ["abc"], ("ab", None)),  # held back, then returned
    ],
)
def test_cases(pieces, stops, expected):
    assert stream(pieces, stops)[:2] == expected


def test_only_a_prefix_of_a_stop_string_is_held_back():
    matcher = StopStrings(["</s>", "\n\n"])
    assert matcher.push("one<") == ("one", None)
    assert matcher.push("/b") == ("</b", None)
    assert matcher.push("\n") == ("", None)
    assert matcher.push("x") == ("\nx", None)


def test_stop_tokens():
    stops = StopTokens([0, 1], [7], max_tokens=3)
    assert stops.check(5, 1) is None
    assert stops.check(0, 1) == Finish("stop", None)
    assert stops.check(7, 1) == Finish("stop", 7)
    assert stops.check(5, 3) == Finish("length", None)
    assert stops.check(1, 3) == Finish("stop", None)
    assert stops.is_stop(7) and stops.is_stop(1) and not stops.is_stop(5)
