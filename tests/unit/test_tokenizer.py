"""The tokenizer of a checkpoint directory: special tokens, eos ids, errors."""

from __future__ import annotations

import json
import sys

import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing
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


def test_the_text_of_one_token_is_remembered_for_each_kind_of_skipping(tmp_path):
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, byte_level()))
    (special,) = tokenizer.encode("<|im_start|>", add_special_tokens=False)
    (letter,) = tokenizer.encode("a", add_special_tokens=False)
    for _ in range(2):
        assert tokenizer.decode([special]) == ""
        assert tokenizer.decode([special], skip_special_tokens=False) == "<|im_start|>"
        assert tokenizer.decode([letter]) == "a"


def test_half_a_surrogate_pair_is_refused(tmp_path):
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, byte_level()))
    with pytest.raises(ValueError, match=r"the prompt holds '\\ud83d', half of a surrogate pair"):
        tokenizer.encode("a\ud83d")
    with pytest.raises(ValueError, match="or the byte 0xe9 that is not UTF-8, but must be Unicode"):
        tokenizer.encode("caf\udce9")


def test_a_directory_without_a_vocabulary(tmp_path):
    """An incomplete download must not send its user to install transformers."""
    directory = write_directory(tmp_path, byte_level())
    (directory / "tokenizer.json").unlink()
    message = "has tokenizer_config.json but no vocabulary, expected tokenizer.json"
    with pytest.raises(FileNotFoundError, match=message):
        Tokenizer.from_directory(directory)


@pytest.mark.parametrize(("add", "first"), [(True, "<s>"), (False, "▁a")])
def test_bos_follows_the_configuration(tmp_path, add, first):
    directory = write_directory(tmp_path, byte_fallback(), add_bos_token=add)
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.encode("a")[0] == byte_fallback().token_to_id(first)
    assert tokenizer.encode("a", add_special_tokens=False)[0] != tokenizer.bos_token_id


def framed(path, post: str, **config) -> list[str]:
    """The tokens of "a" with the post-processor `post`."""
    tokenizer = tokenizers.Tokenizer.from_str(byte_level().to_str())
    special = [(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")]
    tokenizer.post_processor = TemplateProcessing(single=post, special_tokens=special)
    read = Tokenizer.from_directory(write_directory(path, tokenizer, **config))
    return [read.piece(token) for token in read.encode("a")]


@pytest.mark.parametrize(
    ("post", "config", "pieces"),
    [
        ("<s> $A", {}, ["<s>", "a"]),
        ("<s> $A", {"add_bos_token": None}, ["<s>", "a"]),
        ("<s> $A", {"add_bos_token": False}, ["a"]),
        ("<s> $A", {"add_eos_token": False}, ["<s>", "a"]),
        ("<s> $A", {"add_eos_token": True}, ["<s>", "a", "</s>"]),
        ("<s> $A </s>", {"add_bos_token": True}, ["<s>", "a", "</s>"]),
        ("<s> $A </s>", {"add_eos_token": False}, ["<s>", "a"]),
        ("<s> $A", {"add_bos_token": True, "bos_token": None}, ["<s>", "a"]),
        ("$A", {"add_bos_token": True}, ["<s>", "a"]),
    ],
)
def test_the_configuration_overrides_the_side_that_it_names(tmp_path, post, config, pieces):
    assert framed(tmp_path, post, **config) == pieces


def test_special_tokens_of_an_older_file(tmp_path):
    names = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": "</s>"}
    write_directory(tmp_path, byte_level(), bos_token=None, eos_token="<|im_end|>")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(names))
    tokenizer = Tokenizer.from_directory(tmp_path)
    expected = {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "</s>"}
    assert tokenizer.special_tokens == expected
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (0, (3,))


@pytest.mark.parametrize("place", ["tokenizer_config.json", "added_tokens.json"])
def test_added_tokens_in_other_files(tmp_path, place):
    size, config = byte_level().get_vocab_size(), {}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    if place == "tokenizer_config.json":
        stated = {str(size): "<tool>", str(size + 1): "<end>", str(size + 9): "<far>"}
        config["added_tokens_decoder"] = {
            number: {"content": name, "special": name == "<end>", **flags}
            for number, name in stated.items()
        }
    else:
        stated = {"<tool>": size, "<end>": size + 1}
        write_directory(tmp_path, byte_level())
        (tmp_path / place).write_text(json.dumps(stated))
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, byte_level(), **config))
    assert tokenizer.vocab_size == size + 2
    ids = tokenizer.encode("a<tool>b<end>")
    assert [ids[1], ids[3]] == [size, size + 1]
    shown = "a<tool>b" if config else "a<tool>b<end>"
    assert tokenizer.decode(ids) == shown
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<tool>b<end>"
    (tmp_path / "added_tokens.json").write_text('{"<x>": "far"}')
    with pytest.raises(ValueError, match=r"added tokens beside tokenizer\.json, .* cannot be read"):
        Tokenizer.from_directory(tmp_path)


def test_a_special_token_that_is_text_in_tokenizer_json(tmp_path):
    """The end of sequence in tokenizer_config.json is one special token."""
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, byte_level(), eos_token="he"))
    ids = tokenizer.encode("a he")
    assert ids[-1] == byte_level().token_to_id("he") and ids[-1] in tokenizer.eos_token_ids
    assert tokenizer.decode(ids) == "a "


def test_properties_of_special_tokens_in_the_file_stay(tmp_path):
    tokenizer = tokenizers.Tokenizer.from_str(byte_level().to_str())
    data = json.loads(tokenizer.to_str())
    for token in data["added_tokens"]:
        token["lstrip"] = token["rstrip"] = token["content"] == "</s>"
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(data))
    expected = tokenizer.encode("a </s> b").ids
    assert len(expected) == 3
    read = Tokenizer.from_directory(write_directory(tmp_path, tokenizer))
    assert read.encode("a </s> b") == expected


def test_split_special_tokens(tmp_path):
    directory = write_directory(tmp_path, byte_level(), split_special_tokens=True)
    assert len(Tokenizer.from_directory(directory).encode("</s>")) > 1


def test_through_transformers(tmp_path):
    """Without tokenizer.json, special tokens come from the class; unknown tokens have no id."""
    pytest.importorskip("transformers", reason="reads these files")
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4, "ab": 5}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    fields = {"tokenizer_class": "GPT2Tokenizer", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(names))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.id_of("ab") == 5 and tokenizer.id_of("Ġ") is None
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))


def test_eos_ids_are_merged_in_order(tmp_path):
    write_directory(tmp_path, byte_level())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 2]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert Tokenizer.from_directory(tmp_path).eos_token_ids == (3, 2, 1)


def test_errors(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="has no tokenizer"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "vocab.txt").write_text("a")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="needs the transformers package: pip install"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="not a tokenizer that can be read"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(
        ValueError, match=r"tokenizer_config\.json: is a JSON list, expected an object"
    ):
        Tokenizer.from_directory(tmp_path)


def test_end_of_sequence_ids_are_checked(tmp_path):
    write_directory(tmp_path, byte_level())
    (tmp_path / "config.json").write_text('{"eos_token_id": 2.0}')
    with pytest.raises(ValueError, match=r"config\.json: eos_token_id is 2\.0, expected an"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("missing", [("sentencepiece",), ("sentencepiece", "google.protobuf")])
def test_tokenizer_model_names_the_missing_packages(
    tmp_path, monkeypatch, missing: tuple[str, ...]
) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "tokenizer.model").write_bytes(b"model")
    monkeypatch.setattr("cpmcu.tokenizer.is_installed", lambda name: name not in missing)
    named = " and ".join({"google.protobuf": "protobuf"}.get(name, name) for name in missing)
    with pytest.raises(ImportError, match=rf"needs {named}: pip install 'cpmcu\[hf\]'"):
        Tokenizer.from_directory(tmp_path)
