"""python -m cpmcu.bench: its flags and errors, and a run on the shipped model."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cpmcu import __version__, bench
from cpmcu.bench import main
from cpmcu.benchmarks import drafters
from cpmcu.benchmarks.progress import BenchProgress
from cpmcu.benchmarks.report import CLUSTERS, HOPPER, LAUNCHES, PORTABLE, code_path
from cpmcu.config import EngineConfig
from cpmcu.shipped import shipped_model
from cpmcu.ui.interrupts import announced
from tests.reference.engines import extension_or_skip
from tests.reference.tiny_blocks import write_block
from tests.reference.tiny_checkpoints import TinyCheckpoint, write_tiny
from tests.reference.tiny_modules import write_modules


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--contexts", "abc"], "contexts is 'abc', expected lengths from 1 on"),
        (["--contexts", "64,0"], "--contexts is '64,0'"),
        (["--contexts=-5"], "--contexts is '-5'"),
        (["--decode", "0"], "--decode is 0, but must be at least 1"),
        (["--memory-limit", "-2"], "--memory-limit is -2"),
        (["--kernels", "x.json"], "--kernels is given without --plot"),
        (["--drafters", "--plot", "x.png"], "--drafters and --plot are both given"),
        (["--drafters", "--needle"], "--drafters and --needle are both given"),
        (["--sequences", "1,0"], "--sequences is '1,0', expected numbers from 1 to 256"),
        (["--sequences", "8,257"], "--sequences is '8,257'"),
        (["--sequences", "8", "--contexts", "64,128"], "with --sequences, expected one"),
        (["--sequences", "8", "--report"], "--sequences and --report are both given"),
        (["--report", "--json"], "--report is given with --json"),
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
        (ImportError("the module is missing"), 1, "cpmcu: the module is missing\n"),
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


def test_ctrl_c_is_heard_of_while_the_main_thread_is_busy(ctrl_c: Callable[[], None]) -> None:
    heard = threading.Event()
    with announced(heard.set):
        with pytest.raises(KeyboardInterrupt):
            ctrl_c()
            time.sleep(60)
        assert heard.wait(60)
    assert signal.set_wakeup_fd(-1) == -1


def test_ctrl_c_in_a_pass_ends_a_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    progress = BenchProgress()
    progress.check()
    with progress.prefill(100):
        progress._interrupted()
        with pytest.raises(InterruptedError):
            progress.read(50, 100)  # as the engine's thread does
    assert capsys.readouterr().err == "stopping after this pass\n"


def test_progress_of_a_benchmark_on_a_terminal(tmp_path: Path) -> None:
    extension_or_skip()
    pexpect = pytest.importorskip("pexpect")
    flags = ["--device", "cpu", "--contexts", "64", "--decode", "2", "--chunk-length", "16"]
    process = pexpect.spawn(
        sys.executable,
        ["-m", "cpmcu.bench", *flags],
        env={**os.environ, "TERM": "xterm"},
        encoding="utf-8",
        timeout=120,
    )
    process.expect("measuring the device's bandwidth")
    process.expect("loading tiny-python-minicpm")
    process.expect(r"prefill.*64/64 tokens")
    process.expect("context 64: timing prefill and 5 windows of 2 steps")
    process.expect("speculation with a fixed shape")
    process.expect("difference")  # a column of the table
    process.expect(pexpect.EOF)
    process.close()
    assert process.exitstatus == 0


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


FEW = ["--device", "cpu", "--contexts", "64", "--decode", "4", "--num-threads", "1"]


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    """The block names machine, code, model, options, times and the draft."""
    extension_or_skip()
    assert main(["--report", *FEW, "--max-num-seqs", "3", "--max-model-len", "512"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (lines[0], lines[-1]) == ("```text", "```")
    found = {line[:14].strip(): line[14:].strip() for line in lines[1:-1]}
    assert found["cpmcu"].startswith(f"{__version__}, commit ")
    assert found["cpmcu"].endswith("built for the CPU")
    assert re.fullmatch(r"none: \S+ CPU, \d+ cores", found["card"])
    assert (found["cuda"], found["code"]) == ("not used", "the CPU back end")
    assert re.match(r"tiny-python-minicpm, dense, bfloat16, 0\.01 GB", found["model"])
    assert found["memory"].endswith("limit 0.9 of the free memory; 3 sequences, 512 tokens of one")
    step = re.match(
        r"([\d.]+) ms a step .* ([\d.]+) tokens/s, .* x the floor", found["at 64 tokens"]
    )
    assert step is not None
    assert float(step[1]) * float(step[2]) == pytest.approx(1000, rel=0.05)
    assert found["draft"].startswith("depth 4, not rounded, ")
    assert "accept length" in found["drafted at 64"] and "accept length" in found["chosen at 64"]


@pytest.mark.parametrize(
    ("flags", "rounded"),
    [
        ([], "layers rounded to w4_rtn, lm_head rounded to w4_rtn"),
        (["--draft-head-quant", "none"], "layers rounded to w4_rtn"),
    ],
)
def test_report_says_how_the_draft_was_rounded(
    capsys: pytest.CaptureFixture[str], flags: list[str], rounded: str
) -> None:
    """`auto` is shown as what it chose: with layers in 4 bits, lm_head has them, too."""
    extension_or_skip()
    command = ["--report", *FEW, "--max-model-len", "512", "--draft-quant", "w4", *flags]
    assert main(command) == 0
    draft = re.search(r"^draft +(.*)$", capsys.readouterr().out, re.MULTILINE)
    assert draft is not None and draft[1].startswith(f"depth 4, {rounded}, draft_")


def test_report_without_a_draft(capsys: pytest.CaptureFixture[str]) -> None:
    extension_or_skip()
    flags = ["--report", *FEW, "--no-speculation", "--kv-cache-dtype", "fp8_e4m3"]
    assert main([*flags, "--model-path", "tiny-python-minicpm-w4"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^model +\S+, gptq, 4 bits, groups of \d+, ", shown, re.MULTILINE)
    assert "KV cache fp8_e4m3" in shown and re.search(r"^draft +none$", shown, re.MULTILINE)


@pytest.mark.parametrize(
    ("capability", "code", "archs", "path"),
    [
        (90, 90, ["90a"], HOPPER),
        (90, 90, ["90"], CLUSTERS),
        (90, 80, ["80"], PORTABLE),
        (80, 80, ["80", "90a"], PORTABLE),
        (89, 89, ["89"], PORTABLE),
        (100, 100, ["100"], CLUSTERS),
        (120, 120, ["120"], LAUNCHES),
        (120, 80, ["80"], PORTABLE),
    ],
)
def test_code_path(capability: int, code: int, archs: list[str], path: str) -> None:
    assert code_path(capability, code, archs) == path


@pytest.mark.parametrize("draft", [True, False])
def test_sequences(capsys: pytest.CaptureFixture[str], draft: bool) -> None:
    extension_or_skip()
    plain = [] if draft else ["--no-speculation"]
    assert main(["--sequences", "3,1", *FEW, *plain, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["context"], result["decode"]) == (64, 4)
    assert (result["draft"] is None) == (not draft)
    assert [row["sequences"] for row in result["sequences"]] == [3, 1]
    for row in result["sequences"]:
        assert row["tokens_per_s"] > 0 and row["prompt_tokens_per_s"] > 0
        of_one = row["tokens_per_s_of_one"] * row["sequences"]
        assert of_one == pytest.approx(row["tokens_per_s"])
        assert 1 <= row["tokens_per_step"] <= 5 and (draft or row["tokens_per_step"] == 1)
    table = bench.table(result)
    assert table.count("\n| 3 | ") == 1 and "█" in table


def test_sequences_that_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    extension_or_skip()
    flags = ["--sequences", "8", *FEW, "--no-speculation"]
    assert main([*flags, "--max-num-seqs", "4"]) == 1
    assert "max_num_seqs is 4, expected at least 8" in capsys.readouterr().err
    assert main([*flags, "--max-model-len", "60"]) == 1
    assert "8 sequences of 69 tokens need a KV cache of 1024" in capsys.readouterr().err


def test_drafters(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each drafter of the shipped model emits the tokens of plain decoding, and reports steps."""
    extension_or_skip()
    monkeypatch.setattr(drafters, "REPEATS", 1)
    requests = {kind: found[:1] for kind, found in drafters.PROMPTS.items()}
    monkeypatch.setattr(drafters, "PROMPTS", requests)
    flags = ["--drafters", "--device", "cpu", "--max-model-len", "512", "--decode", "8", "--json"]
    assert main(flags) == 0
    result = json.loads(capsys.readouterr().out)
    rows = {(row["drafter"], row["prompts"]): row for row in result["rows"]}
    assert len(rows) == len(result["rows"])
    expected = {"none": 0, "n-gram": 5, "MTP 1": 1, "MTP 3": 3, "MTP 3 + n-gram": 5}
    expected |= dict.fromkeys(("EAGLE-2", "EAGLE-3", "small model"), 3) | {"hierarchical": 5}
    for (name, depth), kind in itertools.product(expected.items(), ("copy", "new")):
        row = rows[name, kind]
        assert row["tokens"] == 8 and row["drafted"] == depth and row["tokens_per_s"] > 0
        shares = row["acceptance_per_position"]
        assert len(shares) == depth and shares == sorted(shares, reverse=True)
        assert row["mean_accept_length"] == pytest.approx(1 + sum(shares))
        assert (row["inner_accept_length"] > 0) == (name == "hierarchical")
    inner = rows["hierarchical", "new"]["inner_accept_length"]
    assert 1 <= inner <= 5
    assert sum(rows["EAGLE-2", kind]["mean_accept_length"] for kind in ("copy", "new")) > 2
    table = bench.table(result)
    assert table.count("\n| EAGLE-3 | 3 | ") == 2 and table.count("\n| none | 0 | ") == 2
    assert table.count(" (inner ") == 2 and f" (inner {inner:.2f})" in table


def test_layers_of_a_block_draft(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drafts that read other layers emit the same tokens. Models without these layers are left
    out."""
    extension_or_skip()
    monkeypatch.setattr(drafters, "REPEATS", 1)
    requests = {kind: found[:1] for kind, found in drafters.PROMPTS.items()}
    monkeypatch.setattr(drafters, "PROMPTS", requests)
    config = json.loads((shipped_model() / "config.json").read_text())
    target = TinyCheckpoint(shipped_model(), config, {})
    write_block(tmp_path / "draft", "dflash", target, dflash_config={"target_layer_ids": [0, 2]})
    flags = ["--tap-shift", "--device", "cpu", "--max-model-len", "512", "--decode", "8", "--json"]
    assert main([*flags, "--draft-model-path", str(tmp_path / "draft")]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["drafter"] for row in rows} == {"none", "layers -1", "layers +0"}
    assert "layers +1 is left out" in caplog.text
    assert all(row["mean_accept_length"] >= 1 for row in rows)
    assert main(["--tap-shift", "--device", "cpu"]) == 1
    assert "without --draft-model-path" in capsys.readouterr().err


def test_drafters_refuse_a_named_draft(capsys: pytest.CaptureFixture[str]) -> None:
    extension_or_skip()
    assert main(["--drafters", "--device", "cpu", "--spec-method", "ngram"]) == 1
    assert "a flag of speculation is given, too" in capsys.readouterr().err


def test_a_model_without_shipped_drafts(tmp_path: Path) -> None:
    """Such a model is compared with look-up, and with MTP modules in its own files."""
    write_tiny(tmp_path / "plain", "llama")
    found = drafters.available(EngineConfig(model=str(tmp_path / "plain")))
    assert list(found) == ["none", "n-gram"]
    write_modules(tmp_path / "mtp", "deepseek", 3)
    found = drafters.available(EngineConfig(model=str(tmp_path / "mtp")))
    assert list(found) == ["none", "n-gram", "MTP 1", "MTP 3", "MTP 3 + n-gram"]
