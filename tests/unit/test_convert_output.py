"""Output of conversions: atomic writes, copies of small files, error messages."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cpmcu.convert.__main__ import main
from cpmcu.convert.gptq_to_marlin import gptq_to_marlin
from cpmcu.convert.minicpm_to_llama import minicpm_to_llama
from cpmcu.convert.output import NewTensor, new_directory, write_safetensors
from cpmcu.loading.safetensors import read_header
from cpmcu.loading.tensors import TensorMeta
from cpmcu.ui.display import Display
from tests.python_path import python_path
from tests.reference.tiny_checkpoints import write_tiny
from tests.reference.tiny_gptq import write_gptq

ROOT = Path(__file__).resolve().parents[2]


class Interrupting:
    """Progress that stops the conversion once `share` of the bytes are written."""

    def __init__(self, error: type[BaseException], share: float = 0.5) -> None:
        self.error, self.share, self.total_bytes, self.finished = error, share, 0, False

    def start(self, total_bytes: int, what: str) -> None:
        self.total_bytes = total_bytes

    def update(self, done_bytes: int) -> None:
        if done_bytes >= self.share * self.total_bytes:
            raise self.error("stop")

    def finish(self) -> None:
        self.finished = True


def snapshot(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir() if p.is_file()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_gptq(tmp_path / "in", num_hidden_layers=1)
    return tmp_path / "in"


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("there", [False, True])
def test_interruption_leaves_nothing(
    tmp_path: Path, source: Path, error: type[BaseException], share: float, there: bool
) -> None:
    destination = tmp_path / "deep" / "out"
    if there:
        gptq_to_marlin(str(source), destination)
        before = snapshot(destination)
    progress = Interrupting(error, share)
    with pytest.raises(error):
        gptq_to_marlin(str(source), destination, overwrite=there, progress=progress)
    assert progress.finished
    left = list((tmp_path / "deep").iterdir())
    assert left == ([destination] if there else [])
    if there:
        assert snapshot(destination) == before


def test_interruption_when_progress_starts(tmp_path: Path, source: Path) -> None:
    class Starting(Interrupting):
        def start(self, total_bytes: int, what: str) -> None:
            raise KeyboardInterrupt

    progress = Starting(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        gptq_to_marlin(str(source), tmp_path / "out", progress=progress)
    assert progress.finished


def test_killed_program_leaves_no_destination(tmp_path: Path) -> None:
    """A killed program cannot clean up."""
    write_tiny(tmp_path / "in", "minicpm", vocab_size=200003)
    command = [sys.executable, "-m", "cpmcu.convert", "minicpm-to-llama"]
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    with subprocess.Popen(
        [*command, "--src", "in", "--dst", "out"],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.DEVNULL,
    ) as process:
        while process.poll() is None and not list(tmp_path.glob(".out.*/model.safetensors")):
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()


def test_ctrl_c(tmp_path: Path, source: Path, monkeypatch: Any, capsys: Any) -> None:
    progress = Interrupting(KeyboardInterrupt)
    monkeypatch.setattr(Display, "load_progress", lambda self, verb: progress)
    assert main(["gptq-to-marlin", "--src", str(source), "--dst", str(tmp_path / "out")]) == 130
    assert capsys.readouterr().err == f"stopped: {tmp_path / 'out'} is unchanged\n"
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("error", [OSError("no"), KeyboardInterrupt()])
def test_errors_after_the_rename_do_not_fail_the_conversion(
    tmp_path: Path, source: Path, monkeypatch: Any, capsys: Any, caplog: Any, error: BaseException
) -> None:
    """A failure to remove the replaced directory is only logged."""
    destination = tmp_path / "out"
    gptq_to_marlin(str(source), destination)
    (destination / "old.txt").write_text("old")
    remove = shutil.rmtree

    def fail(path: Path, ignore_errors: bool = False) -> None:
        if path.name.endswith(".replaced"):
            raise error
        remove(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", fail)
    arguments = ["gptq-to-marlin", "--src", str(source), "--dst", str(destination), "--overwrite"]
    assert main(arguments) == 0
    assert f"written: {destination}\n" in capsys.readouterr().err
    (left,) = tmp_path.glob(".out.*")
    assert f"what it replaced is left in {left}" in caplog.text
    assert (left / "old.txt").exists() and not (destination / "old.txt").exists()


def test_failing_rename(tmp_path: Path, source: Path, monkeypatch: Any) -> None:
    destination = tmp_path / "out"
    gptq_to_marlin(str(source), destination)
    before, rename = snapshot(destination), Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.name.endswith(".incomplete"):
            raise OSError("device is busy")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="device is busy"):
        gptq_to_marlin(str(source), destination, overwrite=True)
    assert snapshot(destination) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_all_files_are_flushed(tmp_path: Path, source: Path, monkeypatch: Any) -> None:
    (source / "tokenizer.json").write_text("{}")
    flushed, sync = set(), os.fsync

    def record(descriptor: int) -> None:
        flushed.add(os.fstat(descriptor).st_ino)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    gptq_to_marlin(str(source), tmp_path / "out")
    written = [tmp_path, tmp_path / "out", *(tmp_path / "out").iterdir()]
    assert len(written) == 5 and flushed == {path.stat().st_ino for path in written}


def test_overwrite(tmp_path: Path, source: Path) -> None:
    destination = tmp_path / "out"
    destination.mkdir()
    gptq_to_marlin(str(source), destination)  # an empty directory counts as absent
    (destination / "old.txt").write_text("old")
    with pytest.raises(ValueError, match=r"out is not empty, expected a new directory"):
        gptq_to_marlin(str(source), destination)
    assert (destination / "old.txt").exists()
    gptq_to_marlin(str(source), destination, overwrite=True)
    assert not (destination / "old.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_a_link_to_a_directory_stays_one(tmp_path: Path, source: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    done = gptq_to_marlin(str(source), tmp_path / "out")
    assert done.directory == tmp_path / "disk"
    assert (tmp_path / "out").is_symlink() and (tmp_path / "out" / "config.json").is_file()


def test_refused_destinations(tmp_path: Path, source: Path, monkeypatch: Any) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("dear diary")
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path / "disk")
    before = snapshot(source)
    for destination, message in [
        (source, "is or holds the source"),
        (tmp_path, "is or holds the source"),
        (source / "out", "is inside the source"),
        (tmp_path / "file", "is a file, expected a directory"),
        (tmp_path / "file" / "out", "file is a file, expected a directory"),
        (tmp_path / "disk", "disk is a mount point, which cannot be replaced, expected"),
        (tmp_path / "notes", "holds files but no config.json, expected what a run before"),
    ]:
        with pytest.raises(ValueError, match=message):
            gptq_to_marlin(str(source), destination, overwrite=True)
    assert snapshot(source) == before and (tmp_path / "notes" / "diary.txt").exists()


def test_a_destination_that_cannot_be_written(
    tmp_path: Path, source: Path, monkeypatch: Any
) -> None:
    """A read-only disk is found before the conversion begins."""
    asked: list[Path] = []

    def access(path: Path, mode: int) -> bool:
        asked.append(path)
        return False

    monkeypatch.setattr(os, "access", access)
    (tmp_path / "empty").mkdir()
    for name in ("empty", "new/out"):
        with pytest.raises(PermissionError, match=f"{tmp_path} cannot be written, expected"):
            gptq_to_marlin(str(source), tmp_path / name)
    assert asked == [tmp_path, tmp_path]


def test_full_disk(tmp_path: Path, source: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**5))
    with pytest.raises(OSError, match=r"has 0.1 MB free, expected at least 0.\d MB"):
        gptq_to_marlin(str(source), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_small_files_are_copied(tmp_path: Path) -> None:
    source = tmp_path / "in"
    write_gptq(source, num_hidden_layers=1, shards=2)
    kept = {
        "tokenizer.json": b"{}",
        "tokenizer.model": b"\0\1",
        "chat_template.jinja": b"{{ x }}",
        "README.md": "数字".encode(),
        "freq_32768.pt": b"index",
        "token_counts.npy": b"counts",
        "modeling_minicpm.py": b"code",
    }
    left = ["pytorch_model.bin", "old.gguf", ".gitattributes", "pytorch_model.bin.index.json"]
    for name, content in kept.items():
        (source / name).write_bytes(content)
    for name in left:
        (source / name).write_bytes(b"")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("tools")
    (source / "logs").mkdir()
    (source / "logs" / "log.txt").write_text("log")
    gptq_to_marlin(str(source), tmp_path / "out")
    found = snapshot(tmp_path / "out")
    assert set(found) == {*kept, "config.json", "model_gptq.safetensors"}
    assert {name: found[name] for name in kept} == kept
    folders = [path for path in (tmp_path / "out").iterdir() if path.is_dir()]
    assert [path.name for path in folders] == ["additional_chat_templates"]
    assert (folders[0] / "tools.jinja").read_text() == "tools"


def test_a_dangling_link(tmp_path: Path, source: Path) -> None:
    (source / "tokenizer.json").symlink_to("/no/such/blob")
    with pytest.raises(FileNotFoundError, match=r"tokenizer.json: is a link to /no/such/blob, whi"):
        gptq_to_marlin(str(source), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_config_keeps_its_keys_and_characters(tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path / "in", "minicpm")
    config = {"zeta": "数字", **tiny.config, "alpha": [1, {"b": None}]}
    (tmp_path / "in" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    minicpm_to_llama(str(tmp_path / "in"), tmp_path / "out")
    text = (tmp_path / "out" / "config.json").read_text(encoding="utf-8")
    written = json.loads(text)
    assert written["zeta"] == "数字" and "数字" in text
    assert written["alpha"] == config["alpha"] and next(iter(written)) == "zeta"


def test_permissions_follow_the_umask(tmp_path: Path, source: Path) -> None:
    before = os.umask(0o027)
    try:
        gptq_to_marlin(str(source), tmp_path / "out")
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "out" / "model_gptq.safetensors").stat().st_mode & 0o777 == 0o640


# ---- the writer


def made(name: str, dtype: str, *chunks: Any) -> NewTensor:
    arrays = [np.asarray(chunk) for chunk in chunks]
    size = sum(array.size for array in arrays)
    return NewTensor(TensorMeta(name, dtype, (size,)), lambda: iter(arrays))


def test_writer(tmp_path: Path) -> None:
    tensors = [
        made("a", "int64", np.arange(3)),
        made("b", "bfloat16", np.ones(1, np.uint16), np.zeros(4, np.uint16)),
        made("empty", "float32"),
        made("c", "bool", np.array([True, False, True])),
    ]
    sizes: list[int] = []
    write_safetensors(tmp_path / "x", tensors, sizes.append)
    assert sizes == [24, 26, 34, 37]
    header = read_header(tmp_path / "x")
    assert {n: (s.meta.dtype, s.meta.shape) for n, s in header.items()} == {
        "a": ("int64", (3,)),
        "b": ("bfloat16", (5,)),
        "empty": ("float32", (0,)),
        "c": ("bool", (3,)),
    }
    raw = (tmp_path / "x").read_bytes()
    assert raw[-37:] == np.arange(3).tobytes() + b"\1\0" + 8 * b"\0" + b"\1\0\1"
    assert (len(raw) - 37) % 64 == 0


@pytest.mark.parametrize(
    ("chunk", "message"),
    [(np.zeros(3, np.int32), "made 12 bytes, planned 8"), (np.zeros(2), "made float64, planned")],
)
def test_writer_checks_chunks(tmp_path: Path, chunk: Any, message: str) -> None:
    def chunks() -> Iterator[Any]:
        yield chunk

    tensor = NewTensor(TensorMeta("a", "int32", (2,)), chunks)
    with pytest.raises((TypeError, RuntimeError), match=message):
        with new_directory(tmp_path / "out") as directory:
            write_safetensors(directory / "x", [tensor], lambda done: None)
    assert not list(tmp_path.iterdir())


# ---- the command line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: CONVERSION"),
        (["gguf", "--src", "a", "--dst", "b"], "invalid choice: 'gguf'"),
        (["gptq-to-marlin", "--src", "a"], "OUT is missing (or --dst)"),
        (["gptq-to-marlin", "--src", "a", "--dst", "b", "--dtype", "float16"], "applies to"),
        (["minicpm-to-llama", "--src", "a", "--dst", "b", "--overwrit"], "did you mean --overw"),
    ],
)
def test_wrong_flags(arguments: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    text = capsys.readouterr().err
    assert message in text and text.count("\n") == 1


def test_missing_source(tmp_path: Path, capsys: Any) -> None:
    arguments = ["--src", str(tmp_path / "nothing"), "--dst", str(tmp_path / "out")]
    assert main(["minicpm-to-llama", *arguments]) == 1
    assert "nothing' is neither a directory nor a Hugging Face repo id" in capsys.readouterr().err


def test_underscores_and_values(tmp_path: Path, source: Path, capsys: Any) -> None:
    arguments = ["gptq-to-marlin", "--src", str(source), "--dst", str(tmp_path / "out")]
    assert main([*arguments, "--plain_output", "yes"]) == 0
    assert main([*arguments, "--overwrite", "no"]) == 1
    assert main([*arguments, "--overwrite"]) == 0
    assert capsys.readouterr().out == ""
