"""Bounds on the tokens of long texts from their length, and encoding of long texts."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers

from cpmcu.text.token_length import longest_token
from cpmcu.tokenizer import Tokenizer
from tests.unit.tokenizers_for_tests import TEXT, byte_fallback, byte_level, write_directory


def changed(tokenizer: tokenizers.Tokenizer, **parts: Any) -> tokenizers.Tokenizer:
    """A copy of the tokenizer with other parts."""
    copy = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    for name, part in parts.items():
        setattr(copy, name, part)
    return copy


def with_added(**fields: Any) -> tokenizers.Tokenizer:
    data = json.loads(byte_level().to_str())
    data["added_tokens"][0] |= fields
    return tokenizers.Tokenizer.from_str(json.dumps(data))


def test_longest_token():
    for tokenizer in (byte_level(), byte_fallback()):
        assert longest_token(tokenizer) == max(map(len, tokenizer.get_vocab()))
    nfc = changed(byte_level(), normalizer=normalizers.NFC())
    assert longest_token(nfc) == 4 * longest_token(byte_level())


@pytest.mark.parametrize(
    "tokenizer",
    [
        changed(byte_level(), normalizer=normalizers.Strip()),
        changed(byte_level(), normalizer=normalizers.NFKC()),
        changed(byte_level(), normalizer=normalizers.Replace("ab", "c")),
        changed(byte_level(), normalizer=normalizers.Replace(tokenizers.Regex(" +"), " ")),
        changed(byte_level(), pre_tokenizer=pre_tokenizers.Whitespace()),
        changed(
            byte_level(),
            pre_tokenizer=pre_tokenizers.Sequence(
                [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]
            ),
        ),
        with_added(lstrip=True),
        with_added(rstrip=True),
        tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, [])),
        tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
        tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0)),
    ],
)
def test_tokenizers_without_a_bound(tokenizer):
    """A stage or an added token may absorb any number of characters."""
    assert longest_token(tokenizer) is None


MARKS = "\u0313\u0300\u0345"  # NFC merges alpha and these marks into one letter
HARD = st.sampled_from([*TEXT, " " * 30, "the", "hello", "α" + MARKS, "<s>", "각"])


@pytest.mark.parametrize(
    "tokenizer",
    [
        byte_level(),
        byte_fallback(),
        changed(byte_level(), normalizer=normalizers.NFC()),
        changed(byte_fallback(), normalizer=None, pre_tokenizer=pre_tokenizers.Metaspace()),
    ],
)
def test_the_bound_holds(tokenizer):
    longest = longest_token(tokenizer)
    assert longest is not None

    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(st.one_of(st.text(), st.lists(HARD).map("".join)))
    def check(text: str) -> None:
        assert len(text) <= longest * len(tokenizer.encode(text, add_special_tokens=False).ids)

    check()


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}])
def test_long_texts_have_the_same_tokens(tmp_path, make, config):
    """Long texts use another function of the library and are converted in pieces."""
    words = TEXT.split(" ")
    rng = random.Random(1)
    text = " ".join(rng.choices(words, k=45_000))
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, make(), **config))
    ids = tokenizer.encode(text)
    plain = make().encode(text, add_special_tokens=False).ids
    assert len(plain) > 2 * 32768
    assert ids == ([tokenizer.bos_token_id] if config else []) + plain
    assert tokenizer.encode(text, add_special_tokens=False) == plain
    assert tokenizer.decode(plain) == make().decode(plain)
    assert tokenizer.encode(text, max_length=len(ids)) == ids
    with pytest.raises(ValueError, match=f"the prompt has {len(ids)} tokens, but prompt and"):
        tokenizer.encode(text, max_length=len(ids) - 1)


def test_a_text_that_is_too_long_is_not_tokenised(tmp_path, monkeypatch):
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, byte_level()))
    longest = longest_token(byte_level())
    monkeypatch.setattr(tokenizer._backend, "encode", None)
    message = f"has {longest * 100 + 1} characters, which are at least 101 tokens, but prompt and"
    with pytest.raises(ValueError, match=message):
        tokenizer.encode("x" * (longest * 100 + 1), max_length=100)
