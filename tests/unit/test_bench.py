"""python -m cpmcu.bench: its flags and errors, and a run on the shipped model."""

from __future__ import annotations

import json

import pytest

from cpmcu import bench
from cpmcu.bench import main
from tests.reference.engines import extension_or_skip


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--contexts", "abc"], "contexts is 'abc', expected lengths from 1 on"),
        (["--contexts", "64,0"], "--contexts is '64,0'"),
        (["--contexts=-5"], "--contexts is '-5'"),
        (["--decode", "0"], "--decode is 0, but must be at least 1"),
        (["--memory-limit", "2"], "--memory-limit is 2"),
        (["--kernels", "x.json"], "--kernels is given without --plot"),
        (["--plot", "x.png", "--kernels", "no/x"], "bench: no/x: No such file or directory"),
    ],
)
def test_wrong_flags(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--device", "cpu", *flags])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_no_room_for_a_context(capsys: pytest.CaptureFixture[str]) -> None:
    """The error precedes the measurement of the fitting context, with windows of 10 000 steps."""
    extension_or_skip()
    flags = ["--device", "cpu", "--max-model-len", "1024", "--contexts", "64,1000"]
    assert main([*flags, "--decode", "10000"]) == 1
    error = capsys.readouterr().err
    assert "the context has 1000 tokens, expected at most 958" in error


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (KeyboardInterrupt(), 130, "stopped\n"),
        (ImportError("the module is missing"), 1, "error: the module is missing\n"),
    ],
)
def test_exit_status(
    error: BaseException,
    status: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(bench, "run", fail)
    monkeypatch.delenv("CPMCU_DEBUG", raising=False)
    assert main(["--device", "cpu"]) == status
    assert capsys.readouterr().err == message


def test_windows_shrink_to_the_free_context(capsys: pytest.CaptureFixture[str]) -> None:
    """The defaults: the shipped model and its head, chosen shapes, 1024 tokens."""
    extension_or_skip()
    flags = ["--device", "cpu", "--max-model-len", "1120", "--contexts", "1024", "--json"]
    assert main([*flags, "--num-threads", "2"]) == 0
    result = json.loads(capsys.readouterr().out)
    (row,) = result["rows"]
    assert row["context"] == 1024 and row["step_ms"] > 0
    speculation = result["speculation"]
    assert speculation["depth"] == 4
    assert speculation["options"]["spec_tree_size"] == 24
    assert [line["context"] for line in speculation["chosen"]] == [1024]
