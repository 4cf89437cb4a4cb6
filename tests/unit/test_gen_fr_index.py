"""scripts/gen_fr_index.py: counts, indices, tokenizers that add BOS, and errors."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from tokenizers_for_tests import TEXT, byte_fallback, byte_level, write_directory

from cpmcu.drafters.frspec import frequent_ids
from cpmcu.tokenizer import Tokenizer

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gen_fr_index.py"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gen_fr_index", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


script = load_script()


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus" / "deep"
    folder.mkdir(parents=True)
    (folder / "a.txt").write_text(TEXT, encoding="utf-8")
    (folder / "b.py").write_text(TEXT * 3, encoding="utf-8")
    (folder / "c.bin").write_bytes(b"\0\1\2" * 100)
    return tmp_path / "corpus"


@pytest.mark.parametrize("tokenizer", [byte_level, byte_fallback])
@pytest.mark.parametrize("add_bos", [False, True])
def test_counts_do_not_depend_on_bos(tmp_path: Path, corpus: Path, tokenizer, add_bos) -> None:
    directory = write_directory(tmp_path / "t", tokenizer(), add_bos_token=add_bos)
    (directory / "config.json").write_text(json.dumps({"vocab_size": 500, "eos_token_id": [2]}))
    out = tmp_path / "made" / "here"
    arguments = ["--tokenizer", str(directory), "--text", str(corpus), "--out", str(out)]
    assert script.main([*arguments, "--vocab-size", "16", "64"]) == 0
    counts = np.load(out / "token_counts.npy")
    assert counts.shape == (500,) and counts.dtype == np.int64
    mine = Tokenizer.from_directory(directory)
    bos = mine.bos_token_id
    assert bos is not None and counts[bos] == 0
    lines = sum(len(mine.encode(TEXT, add_special_tokens=False)) for _ in range(4))
    assert abs(counts.sum() - lines) < 0.01 * lines  # whole texts are encoded
    ids = frequent_ids(out, 16, 500, mine.eos_token_ids)
    assert len(set(ids)) == 16 and set(mine.eos_token_ids) <= set(ids)
    best = np.argsort(-counts, kind="stable")
    assert ids[:14] == best[:14].tolist()


def test_torch_index(tmp_path: Path, corpus: Path) -> None:
    torch = pytest.importorskip("torch")
    directory = write_directory(tmp_path / "t", byte_level(), add_bos_token=True)
    script.run(directory, [corpus], tmp_path / "out", [8, 398])
    eos = Tokenizer.from_directory(directory).eos_token_ids
    for size in (8, 398):
        ids = torch.load(tmp_path / "out" / f"freq_{size}.pt", weights_only=True)
        assert type(ids) is list and len(ids) == size and set(eos) <= set(ids)
        (tmp_path / "only").mkdir(exist_ok=True)
        np.save(tmp_path / "only" / "token_counts.npy", np.load(tmp_path / "out/token_counts.npy"))
        assert frequent_ids(tmp_path / "only", size, 398, eos) == ids


def test_limit_and_files(tmp_path: Path, corpus: Path) -> None:
    directory = write_directory(tmp_path / "t", byte_level())
    files = script.text_files([corpus])
    assert [file.name for file in files] == ["a.txt", "b.py"]
    assert "".join(script.pieces(files, 0)) == TEXT * 4
    assert "".join(script.pieces(files, 100)) == TEXT[:100]
    script.run(directory, [corpus / "deep" / "a.txt"], tmp_path / "out", [], limit=50)
    expected = byte_level().encode(TEXT[:50], add_special_tokens=False).ids
    assert np.load(tmp_path / "out" / "token_counts.npy").sum() == len(expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vocab-size", "900"], "--vocab-size is 900, expected 1 to 398"),
        (["--text", "nothing/here"], "nothing/here does not exist"),
        (["--tokenizer", "nothing"], "no tokenizer"),
    ],
)
def test_errors(tmp_path: Path, corpus: Path, capsys, arguments, message) -> None:
    directory = write_directory(tmp_path / "t", byte_level())
    base = ["--tokenizer", str(directory), "--text", str(corpus), "--out", str(tmp_path / "out")]
    assert script.main([*base, *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_empty_text(tmp_path: Path, capsys) -> None:
    directory = write_directory(tmp_path / "t", byte_level())
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no text files"):
        script.run(directory, [tmp_path / "empty"], tmp_path / "out", [])
    (tmp_path / "empty" / "a.txt").write_text("")
    with pytest.raises(ValueError, match="is empty"):
        script.run(directory, [tmp_path / "empty"], tmp_path / "out", [])
