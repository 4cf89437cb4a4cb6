"""The tokenizer of a checkpoint directory: special tokens, eos ids, errors."""

from __future__ import annotations

import json
import sys

import pytest
from tokenizers_for_tests import byte_fallback, byte_level, write_directory

from cpmcu.tokenizer import Tokenizer


def test_round_trip_and_special_tokens(tmp_path):
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, byte_level()))
    ids = tokenizer.encode("def hello(): # 你好")
    assert tokenizer.decode(ids) == "def hello(): # 你好"
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (0, (1,))
    marked = tokenizer.encode("<|im_start|>a")
    assert tokenizer.decode(marked) == "a"
    assert tokenizer.decode(marked, skip_special_tokens=False) == "<|im_start|>a"


def test_half_a_surrogate_pair_is_no_text(tmp_path):
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, byte_level()))
    with pytest.raises(ValueError, match=r"the prompt holds '\\ud83d', half of a surrogate pair"):
        tokenizer.encode("a\ud83d")


@pytest.mark.parametrize(("add", "first"), [(True, "<s>"), (False, "▁a")])
def test_bos_follows_the_configuration(tmp_path, add, first):
    directory = write_directory(tmp_path, byte_fallback(), add_bos_token=add)
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.encode("a")[0] == byte_fallback().token_to_id(first)
    assert tokenizer.encode("a", add_special_tokens=False)[0] != tokenizer.bos_token_id


def test_eos_ids_are_merged_in_order(tmp_path):
    write_directory(tmp_path, byte_level())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 2]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert Tokenizer.from_directory(tmp_path).eos_token_ids == (3, 2, 1)


def test_errors(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="has no tokenizer"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="needs the transformers package: pip install"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="not a tokenizer that can be read"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ValueError, match="must hold an object"):
        Tokenizer.from_directory(tmp_path)


def test_ends_of_sequences_are_ids(tmp_path):
    write_directory(tmp_path, byte_level())
    (tmp_path / "config.json").write_text('{"eos_token_id": 2.0}')
    with pytest.raises(ValueError, match=r"config\.json: eos_token_id is 2\.0, expected an"):
        Tokenizer.from_directory(tmp_path)
