"""Streamed text equals text decoded at once and holds no incomplete character."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers_for_tests import SPECIAL, byte_fallback, byte_level

from cpmcu.engine.detokenizer import REPLACEMENT, Detokenizer


def stream(tokenizer, prompt, ids, cuts=()):
    """The pieces of text if `ids` arrive in bursts split at `cuts`; default: one by one."""
    detokenizer = Detokenizer(tokenizer.decode, prompt)
    edges = sorted({0, len(ids), *(cuts or range(len(ids)))})
    pieces = [detokenizer.push(ids[a:b]) for a, b in itertools.pairwise(edges)]
    return [*pieces, detokenizer.push([], final=True)]


texts = st.text(
    st.sampled_from("abc hello the ox. \n") | st.sampled_from("你好世é🙂🚀👩‍👩‍👧Ωह"), max_size=40
)
cuts = st.lists(st.integers(0, 60), max_size=8)


@given(text=texts, cuts=cuts)
@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_streamed_text_equals_the_input(make, text, cuts):
    tokenizer = make()
    prompt = tokenizer.encode("the").ids
    ids = tokenizer.encode("the" + text).ids[len(prompt) :]
    whole = tokenizer.decode(prompt + ids)
    if not whole.startswith("the") or tokenizer.encode("the" + text).ids[: len(prompt)] != prompt:
        return  # the beginning of the text merged with the prompt
    pieces = stream(tokenizer, prompt, ids, [c for c in cuts if c < len(ids)])
    assert "".join(pieces) == text
    assert not any(REPLACEMENT in piece for piece in pieces)


@settings(max_examples=300)
@given(data=st.data(), cuts=cuts)
def test_any_bytes_give_the_one_shot_text(data, cuts):
    """Byte-level and special tokens in any order, also invalid UTF-8, decode the same."""
    tokenizer = byte_level()
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=50))
    pieces = stream(tokenizer, [], ids, [c for c in cuts if c < len(ids)])
    assert "".join(pieces) == tokenizer.decode(ids)


@given(data=st.data())
def test_any_bytes_with_fallback_never_fail(data):
    tokenizer = byte_fallback()
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=50))
    pieces = stream(tokenizer, [], ids)
    assert all(not piece.endswith(REPLACEMENT) for piece in pieces[:-1])


def test_valid_run_of_fallback_bytes_is_streamed_by_character():
    tokenizer = byte_fallback()
    ids = [tokenizer.token_to_id(f"<0x{b:02X}>") for b in "好🙂é".encode()]
    pieces = stream(tokenizer, [], ids)
    assert [piece for piece in pieces if piece] == ["好", "🙂", "é"]


def test_bad_byte_after_a_good_character_does_not_take_it_back():
    tokenizer = byte_fallback()
    ids = [tokenizer.token_to_id(f"<0x{b:02X}>") for b in "好".encode() + b"\xff"]
    ids.append(tokenizer.token_to_id("o"))
    assert "".join(stream(tokenizer, [], ids)) == "好" + REPLACEMENT + "o"


def test_leading_space_of_the_first_token_is_kept_after_a_prompt():
    tokenizer = byte_fallback()
    prompt, hello = tokenizer.encode("the").ids, tokenizer.token_to_id("▁hello")
    assert "".join(stream(tokenizer, prompt, [hello, hello])) == " hello hello"
    assert "".join(stream(tokenizer, [], [hello, hello])) == "hello hello"


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_a_character_begun_in_the_prompt_is_emitted_whole(make):
    tokenizer = make()
    if make is byte_level:
        ids = [tokenizer.token_to_id(c) for c in ("ð", "Ł", "ļ", "Ģ")]  # bytes f0 9f 9a 80
    else:
        ids = [tokenizer.token_to_id(f"<0x{b:02X}>") for b in "🚀".encode()]
    assert "".join(stream(tokenizer, ids[:2], ids[2:])) == "🚀"


@pytest.mark.parametrize("prompt", ["🙂🙂", "a🙂🙂", "a你🙂", "你你🙂", "é🙂🙂🙂", "🙂" * 30])
@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_a_prompt_that_ends_in_bytes(make, prompt):
    """The window never begins within a character."""
    tokenizer = make()
    output = tokenizer.encode("a🙂好").ids[len(tokenizer.encode("a").ids) :]
    assert "".join(stream(tokenizer, tokenizer.encode(prompt).ids, output)) == "🙂好"


def test_a_prompt_that_ends_in_many_special_tokens():
    tokenizer = byte_fallback()
    hello, end = (tokenizer.token_to_id(token) for token in ("▁hello", "<|im_end|>"))
    for count in (5, 6, 20):
        prompt = [*tokenizer.encode("the").ids, *[end] * count]
        assert "".join(stream(tokenizer, prompt, [hello])) == " hello"


def test_incomplete_character_is_emitted_only_at_the_end():
    tokenizer = byte_level()
    ids = tokenizer.encode("a").ids + [tokenizer.token_to_id("ð")]
    assert stream(tokenizer, [], ids) == ["a", "", REPLACEMENT]
    assert stream(tokenizer, ids, []) == [
        ""
    ]  # the incomplete character of the prompt is not output


def test_text_before_an_incomplete_character_is_not_held_back():
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer.decode)
    open_byte = tokenizer.token_to_id("ð")
    assert detokenizer.push([*tokenizer.encode("abc").ids, open_byte]) == "abc"


def test_special_tokens_leave_no_trace():
    tokenizer = byte_level()
    ids = tokenizer.encode("a").ids + [tokenizer.token_to_id(t) for t in SPECIAL]
    assert "".join(stream(tokenizer, [], ids + tokenizer.encode("b").ids)) == "ab"


def test_cost_of_a_token_does_not_grow():
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer.decode)
    ids = tokenizer.encode("the quick brown fox jumps over 你好 " * 300).ids
    times = []
    for part in (ids[:2000], ids[2000:4000]):
        start = time.thread_time()
        for token in part:
            detokenizer.push([token])
        times.append(time.thread_time() - start)
    assert times[1] < 5 * times[0]
    assert len(detokenizer._window) < 16


def test_cost_of_special_tokens_does_not_grow():
    """The text after many special tokens is still correct."""
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer.decode, tokenizer.encode("a").ids)
    special = tokenizer.token_to_id(SPECIAL[0])
    for _ in range(300):
        assert detokenizer.push([special]) == ""
    assert len(detokenizer._window) < 16
    pieces = [detokenizer.push([tokenizer.token_to_id(c)]) for c in ("ð", "Ł", "ļ", "Ģ")]
    assert pieces == ["", "", "", "🚀"]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("tail", [REPLACEMENT, REPLACEMENT * 2, "好" + REPLACEMENT])
def test_replacement_characters_of_the_prompt_are_not_output(make, tail):
    tokenizer = make()
    prompt = tokenizer.encode("the " + tail).ids
    ids = tokenizer.encode("ox").ids
    text = tokenizer.decode([*prompt, *ids]).removeprefix(tokenizer.decode(prompt))
    assert "".join(stream(tokenizer, prompt, ids)) == text
    assert REPLACEMENT not in text
    assert stream(tokenizer, prompt, []) == [""]


def test_endless_invalid_bytes_are_emitted():
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer.decode)
    token = tokenizer.token_to_id("ð")
    pieces = [detokenizer.push([token]) for _ in range(500)]
    assert len("".join(pieces)) > 400
    assert len(detokenizer._window) < 200


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 5])
def test_what_follows_a_character_begun_in_the_prompt_is_right(cut: int):
    """Each byte is a token, as in a prompt of ids that continues an output."""
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {"<unk>": 0, "x": 1} | {f"<0x{byte:02X}>": byte + 2 for byte in range(256)}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    ids = [1] + [byte + 2 for byte in "字符é串".encode()]
    stream = Detokenizer(made.decode, ids[:cut])
    pieces = [stream.push([token]) for token in ids[cut:]] + [stream.push([], final=True)]
    begun = made.decode(ids[:cut]).rstrip(REPLACEMENT)
    assert "".join(pieces) == made.decode(ids).removeprefix(begun)
