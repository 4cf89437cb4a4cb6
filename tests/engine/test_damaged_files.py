"""Damaged tokenizer, config and draft files: the error is one sentence that names the file."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpmcu import LLM
from tests.reference.engines import extension_or_skip
from tests.reference.tiny_checkpoints import write_tiny
from tests.reference.tiny_drafts import write_draft

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from tokenizers_for_tests import byte_level, write_directory

extension_or_skip()

SETTINGS: dict[str, Any] = {"device": "cpu", "memory_limit": 0.2, "num_threads": 1}
DIGITS = "9" * 10_000
LONG = "x" * 100_000


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("good")
    target = write_tiny(directory / "target", "llama", vocab_size=byte_level().get_vocab_size())
    write_directory(target.directory, byte_level())
    write_draft(directory / "draft", "eagle", target)
    counts = np.arange(byte_level().get_vocab_size())
    np.save(directory / "draft" / "token_counts.npy", counts)
    return directory


@pytest.fixture
def copy(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "copy"))


def load(directory: Path, **fields: Any) -> LLM:
    draft = {"draft_model_path": str(directory / "draft"), "frspec_vocab_size": 64}
    return LLM(str(directory / "target"), speculative_config=draft, **SETTINGS, **fields)


def complaint(directory: Path) -> str:
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        load(directory).close()
    assert type(error.value) in (
        ValueError,
        FileNotFoundError,
    )  # not an exception class of a library
    message = str(error.value)
    assert message.isprintable() and len(message) < 1000
    return message


def change(path: Path, how: Callable[[Any], Any]) -> None:
    value = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(how(value) or value), "utf-8")


def test_undamaged_copy_loads(copy: Path) -> None:
    with load(copy) as llm:
        assert llm.generate("a")[0].outputs


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"eos_token": {}}, "eos_token"),
        ({"bos_token": 5}, "bos_token"),
        ({"bos_token": {"content": None}}, "bos_token"),
        ({"pad_token": "\ud800"}, "pad_token"),
        ({"additional_special_tokens": [{"a": 1}]}, "additional_special_tokens"),
        ({"additional_special_tokens": [None]}, "additional_special_tokens"),
        ({"additional_special_tokens": 7}, "additional_special_tokens"),
        ({"additional_special_tokens": LONG}, "additional_special_tokens"),
        ({"added_tokens_decoder": [1]}, "added tokens"),
        ({"added_tokens_decoder": {"5": {"content": "\ud800"}}}, "added tokens"),
        ({"added_tokens_decoder": {"5": "a"}}, "added tokens"),
        ({"added_tokens_decoder": {LONG: {}}}, "added tokens"),
        ({"unk_token": [LONG]}, "unk_token"),
    ],
)
def test_tokenizer_config(copy: Path, fields: dict[str, Any], key: str) -> None:
    change(copy / "target" / "tokenizer_config.json", lambda value: value | fields)
    message = complaint(copy)
    assert "tokenizer_config.json" in message and key in message


@pytest.mark.parametrize("token", [" ", "<nothing>"])
def test_post_processor_with_an_unknown_token(copy: Path, token: str) -> None:
    """The tokenizers library panics at load or at the first text."""
    processor = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": token, "type_id": 0}}],
        "pair": [],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
    }
    path = copy / "target" / "tokenizer.json"
    change(path, lambda value: value | {"post_processor": processor})
    assert str(path) in complaint(copy)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        f'{{"a": {DIGITS}}}',
        '{"a": ' + "[" * 100_000,
        '{"a": "\xff"}',
        f'{{"{LONG}": }}',
    ],
)
def test_no_json(copy: Path, file: str, text: str) -> None:
    (copy / "target" / file).write_bytes(text.encode("latin-1"))
    message = complaint(copy)
    assert str(copy / "target" / file) in message and "expected an object" in message


@pytest.mark.parametrize("value", [LONG, [LONG] * 9, {LONG: {}}, -1, 1e400, "\x1b[2J\n"])
@pytest.mark.parametrize(
    "key", ["architectures", "hidden_size", "rope_scaling", "torch_dtype", "quantization_config"]
)
def test_a_value_is_not_repeated_at_length(copy: Path, key: str, value: Any) -> None:
    change(copy / "target" / "config.json", lambda config: config | {key: value})
    message = complaint(copy)
    assert "config.json" in message or "quantised with" in message


def test_a_name_is_not_repeated_at_length(copy: Path) -> None:
    path = copy / "target" / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header[LONG] = header.pop("model.norm.weight") | {"dtype": "F7"}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    assert str(path) in complaint(copy)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"{'descr'", b"{'descr:"),
        (b"{'descr'", b"((((((((("),
        (b"'<i8'", b"'|O8'"),
        (b"'<i8'", b"'<q9'"),
        (b"(400,)", b"(10**9,)"),
        (b"(400,)", b"(9999999999999,)"),
        (b"(400,)", b"(-1,)"),
        (b"(400,)", b"(401,)"),
        (b"NUMPY", b"NOMPY"),
        (b"\x01\x00", b"\x09\x00"),
        (b"False", b"[].x "),
    ],
)
def test_counts_of_tokens(copy: Path, old: bytes, new: bytes) -> None:
    path = copy / "draft" / "token_counts.npy"
    size = f"({byte_level().get_vocab_size()},)".encode()
    data = path.read_bytes().replace(size, b"(400,)")
    assert old in data
    path.write_bytes(data.replace(old, new, 1))
    assert str(path) in complaint(copy)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("kind", ["pipe", "directory", "link to nothing", "link to itself"])
def test_path_that_is_not_a_file(copy: Path, name: str, kind: str) -> None:
    path = copy / "target" / name
    path.unlink()
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "link to nothing":
            path.symlink_to("nothing")
        case "link to itself":
            path.symlink_to(name)
    assert name in complaint(copy)


def test_end_token_outside_the_vocabulary(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The model cannot output the token, so it still works."""
    vocab_size = byte_level().get_vocab_size()
    change(copy / "target" / "tokenizer.json", lambda value: _with_token(value, vocab_size))
    change(copy / "target" / "tokenizer_config.json", lambda value: value | {"eos_token": "<end>"})
    with caplog.at_level(logging.WARNING), load(copy) as llm:
        assert llm.generate("a")[0].outputs
    assert f"eos_token '<end>' has the id {vocab_size}, but the model's vocabulary" in caplog.text


def _with_token(tokenizer: dict[str, Any], number: int) -> None:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"].append({"id": number, "content": "<end>", "special": True, **flags})
