"""The command line as a process: output and exit status."""

from __future__ import annotations

import os
import pkgutil
import re
import subprocess
import sys
import threading

import pytest
from story import STORY, Stage
from tokenizers_for_tests import byte_level

from cpmcu import cli
from cpmcu.engine.warm_up import PROMPT
from cpmcu.shipped import shipped_model
from cpmcu.ui.progress import LoadProgressBar, PlainBar
from cpmcu.ui.tables import plain_table
from tests.missing import skip_unless
from tests.python_path import python_path


def run(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cpmcu.cli", *arguments],
        input=stdin,
        capture_output=True,
        encoding="utf-8",
        errors="surrogateescape",
        timeout=120,
        env={**os.environ, "CPMCU_DEBUG": "", **environment},
    )


def can_generate() -> bool:
    try:
        from cpmcu import C  # noqa: F401
    except ImportError:
        return False
    return shipped_model().is_dir()


needs_engine = skip_unless(can_generate(), "the extension or the shipped model is missing")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--spec_tree_size=65"], "--spec-tree-size is 65, but must be at most 64"),
        (
            ["--spec-num-iter", "4", "--spec-topk-per-iter", "30"],
            "--spec-topk-per-iter 30 x (--spec-num-iter 4 - 1) is 90",
        ),
        (["--speculative-config", '{"methud": "ngram"}'], "--speculative-config has 'methud'"),
        (["--speculative-config", "ngram"], "--speculative-config is not JSON"),
        (["--sparse-topk-k", "0"], "--sparse-topk-k is 0, but must be from 1"),
        (["--block-window-size", "8"], "--block-window-size is 8, but must be a number of tokens"),
        (["--sink-window-size", "1"], "--sink-window-size is 1, but must be a number of tokens"),
        (["--use-compress-lse", "no"], "--use-compress-lse cannot be no"),
        (["--model-type", "llama"], "--model-type llama cannot be forced"),
        (["--memory-limit", "0"], "--memory-limit is 0.0, but must be a share in (0, 1]"),
        (["--temperature", "-1"], "--temperature is -1"),
        (["--temp", "-1"], "--temp is -1"),
        (["--num_generate", "0"], "--num-generate is 0"),
        (["-n", "x"], "-n: expected an integer, found 'x'"),
        (["--max-tokens=x"], "--max-tokens: expected an integer, found 'x'"),
        (["--logprobs", "50"], "--logprobs is 50, but must be at most 20"),
        (["--stop-token-ids", "-1"], "--stop-token-ids is -1"),
        (["--system-prompt", "x", "--use-chat-template=no"], "--system-prompt needs a chat"),
        (["--full"], "--full is given without --memory-plan"),
        (["--chat", "--use-chat-template", "no"], "--chat needs a chat template"),
        (["--cuda-grap"], "did you mean --cuda-graph?"),
    ],
)
def test_usage_errors(arguments, message):
    result = run(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_errors_are_one_sentence(tmp_path):
    missing = run("--model-path", str(tmp_path / "nothing" / "here" / "at all"))
    assert missing.returncode == 1
    unreadable = run("--prompt-file", str(tmp_path / "none.txt"))
    assert unreadable.returncode == 1
    assert unreadable.stderr == f"cpmcu: {tmp_path / 'none.txt'}: No such file or directory\n"
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    coded = run("--prompt-file", str(tmp_path / "latin"))
    piped = run("--prompt-file", "-", stdin="caf\udce9", PYTHONUTF8="1")
    assert "is not UTF-8 text" in coded.stderr
    assert "the prompt from stdin is not UTF-8 text" in piped.stderr
    endless = run("--prompt-file", "/dev/zero")
    assert endless.stderr == "cpmcu: /dev/zero has more than 16 MiB, expected a shorter text\n"
    for result in (missing, unreadable, coded, piped, endless):
        assert result.stderr.count("\n") == 1
        assert "Traceback" not in result.stderr
        assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "status", "error"),
    [
        ("--list >&-", 1, "cpmcu: stdout is closed, but the output goes there\n"),
        ("bench >&-", 1, "cpmcu: stdout is closed, but the output goes there\n"),
        ("--chat <&-", 1, "cpmcu: stdin is closed, but the input comes from there\n"),
        ("--prompt-file - <&-", 1, "cpmcu: stdin is closed, but the input comes from there\n"),
        ("--list 2>&-", 0, ""),
        ("--prompt-file /nope 2>&-", 1, ""),
    ],
)
def test_closed_streams(arguments, status, error):
    program = "cpmcu" if arguments.startswith("bench") else "cpmcu.cli"
    command = f"{sys.executable} -m {program} {arguments}"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (status, error)


@pytest.mark.parametrize(
    ("prog", "flag"),
    [
        ("cpmcu", "--help-all"),
        ("cpmcu run", "--help-all"),
        ("cpmcu run", "--help"),
        ("cpmcu run", "--version"),
        ("cpmcu convert", "--help"),
    ],
)
def test_a_help_text_that_cannot_be_written(prog, flag):
    """The program says so and ends with status 1."""
    command = f"{sys.executable} -m {prog} {flag} >/dev/full"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (1, f"{prog}: No space left on device\n")


def test_the_reader_of_a_help_text_may_leave():
    command = f"({sys.executable} -m cpmcu run --help-all; echo status $? >&2) | head -c 20"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert result.stderr == "status 0\n"


@needs_engine
def test_a_run_with_stderr_closed():
    command = f"{sys.executable} -m cpmcu.cli --device cpu --num-generate 5 2>&-"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0
    assert result.stdout.strip()


def test_debug_shows_the_traceback(tmp_path):
    result = run("--prompt-file", str(tmp_path / "none.txt"), CPMCU_DEBUG="1")
    assert result.returncode == 1
    assert "Traceback" in result.stderr


def test_env_without_extension(tmp_path):
    result = run("--env", CPMCU_EXTENSION_DIR=str(tmp_path))
    assert result.returncode == 0
    assert "missing: cpmcu's compiled module" in result.stdout
    assert "tokenizers" in result.stdout


def test_list():
    result = run("--list")
    assert result.returncode == 0
    assert "LlamaForCausalLM" in result.stdout
    assert "llama.py" in result.stdout
    assert "eagle3.py" in result.stdout and "ngram.py" in result.stdout


def test_plain_table():
    text = plain_table(("name", "n"), [("a", 1), ("long", 200)])
    assert text == "name    n\n----  ---\na       1\nlong  200\n"


@pytest.mark.parametrize(
    "place",
    ["rich.console.Console.push_render_hook", "rich.live.Live.start", "rich.console.Console.line"],
)
def test_ctrl_c_leaves_the_cursor(place, monkeypatch, capsys):
    """Ctrl-C may come while a progress bar appears or disappears."""
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then treats stderr as a terminal
    monkeypatch.setenv("TERM", "xterm")
    owner, _, name = place.rpartition(".")
    found = getattr(pkgutil.resolve_name(owner), name)
    calls = []

    def interrupted(*arguments, **options):
        calls.append(name)
        if len(calls) > 1 or name == "start":
            found(*arguments, **options)
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(place, interrupted)
    progress = LoadProgressBar(plain=False)
    with pytest.raises(KeyboardInterrupt):
        try:
            progress.start(1000, "x")
            progress.update(1000)
        finally:
            progress.finish()
    shown = capsys.readouterr().err
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l") >= 0


@pytest.fixture
def stage(monkeypatch, tmp_path):
    return Stage(monkeypatch, tmp_path / "story")


def test_a_run(stage, capsys):
    stage.prepare()
    arguments = ["--model", "m", "--prompt-text", "the", "--num-generate", "12", "--seed", "3"]
    assert cli.main(arguments) == 0
    streamed = capsys.readouterr()
    assert streamed.out.strip() in STORY
    assert "has no chat template: the prompt is used unchanged" in streamed.err
    assert "loading story: 10.00 of 10.00 MB" in streamed.err
    *_, last = streamed.err.splitlines()
    assert re.fullmatch(
        r"12 tokens, [\d.]+ tokens/s, first after [\d.]+ s, finish reason length", last
    )
    assert cli.main([*arguments, "--use-stream", "no", "--stats"]) == 0
    whole = capsys.readouterr()
    assert whole.out == streamed.out
    assert "12 tokens, finish reason length, seed 3" in whole.err
    rows = [line.split() for line in whole.err.splitlines()]
    assert next(row for row in rows if row[:1] == ["decode"])[1] == "11"
    assert cli.main([*arguments, "--temperature", "1"]) == 0
    assert capsys.readouterr().err.endswith(", finish reason length, seed 3\n")


def test_an_explicit_chat_template_must_exist(stage, capsys):
    stage.prepare()
    assert cli.main(["--model", "m", "--prompt-text", "the", "--use-chat-template"]) == 1
    assert "has no chat template" in capsys.readouterr().err


def test_ctrl_c_stops_an_answer(stage, capsys, monkeypatch):
    stage.prepare(step_seconds=0.001)
    monkeypatch.setattr(cli.Display, "text", interrupt_after(5))
    assert cli.main(["--model", "m", "--prompt-text", "the"]) == 130
    assert "stopped" in capsys.readouterr().err
    assert stage.engines[0]() is None


@pytest.mark.parametrize("flags", [[], ["--json"], ["--use-stream", "no"]])
def test_ctrl_c_in_a_prefill_pass(flags, stage, capsys, ctrl_c):
    """The program reports the key at once, reads no further prompt tokens, and ends."""
    passes = []

    def begin(items):
        if items[0][1] == PROMPT:  # the warm-up's prompt
            return
        passes.append(items)
        if len(passes) == 1:
            threading.Timer(0.1, ctrl_c).start()  # while the main thread waits for tokens

    stage.prepare(step_seconds=0.5, launch_ahead=1, on_prefill=begin)
    prompt = "the quick brown fox jumps over the lazy dog " * 4
    assert cli.main(["--model", "m", "--prompt-text", prompt, *flags]) == 130
    shown = capsys.readouterr()
    assert "stopping after this pass\n" in shown.err and shown.err.endswith("stopped\n")
    assert shown.out.strip() == ""
    assert len(passes) < 5  # of five
    assert stage.engines[0]() is None


def test_the_first_pass_is_shown_if_it_takes_long(stage, capsys, monkeypatch):
    monkeypatch.setattr("cpmcu.ui.progress._FIRST_PASS_SECONDS", 0.05)
    shown = []
    monkeypatch.setattr(PlainBar, "start", lambda bar: shown.append(bar._total))
    stage.prepare(step_seconds=0.4, chunk_length=150, launch_ahead=1)
    assert cli.main(["--model", "m", "--prompt-text", "the", "-n", "1"]) == 0
    assert shown[-1] == len(byte_level().encode("the").ids)
    before = len(shown)
    monkeypatch.setattr("cpmcu.ui.progress._FIRST_PASS_SECONDS", 60.0)
    assert cli.main(["--model", "m", "--prompt-text", "the", "-n", "1"]) == 0
    assert shown[before:] == [10_000_000]  # bytes of the model


def test_plan(stage, capsys):
    stage.prepare()
    assert cli.main(["--model", "m", "--memory-plan"]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[-1].split() == ["total", "1", "1.00", "100.0%"]
    assert "a sequence can have 200 tokens" in shown.err
    assert "4 sequences run at a time" in shown.err


def test_a_plan_of_another_device_needs_its_memory(stage, capsys):
    stage.prepare()
    flags = ["--model", "m", "--memory-plan", "--architecture", "sm_86"]
    assert cli.main(flags) == 1
    assert "--memory-limit is 0.9 with --architecture, expected GB" in capsys.readouterr().err
    assert cli.main([*flags, "--memory-limit", "22"]) == 0
    with pytest.raises(SystemExit, match="2"):
        cli.main(["--model", "m", "--memory-plan", "--architecture", "h100"])


def interrupt_after(pieces: int):
    """A Display.text that raises KeyboardInterrupt after `pieces` calls."""
    count = iter(range(pieces))

    def text(self: object, piece: str) -> None:
        if next(count, None) is None and piece != "\n":
            raise KeyboardInterrupt

    return text


@needs_engine
def test_the_shipped_model_completes_code():
    result = run("--device", "cpu", "--num-generate", "20", "--temperature", "0")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    assert " tokens/s, first after " in result.stderr
    again = run("--device", "cpu", "--num-generate", "20", "--temperature", "0", "--use-stream=no")
    assert again.stdout == result.stdout
    flags = ("--model", "tiny-python-minicpm", "--device", "cpu", "--num-generate", "20")
    assert run(*flags, "--temperature", "0").stdout == result.stdout


@needs_engine
@pytest.mark.parametrize("text", ["raise KeyboardInterrupt", "exec('raise KeyboardInterrupt')"])
def test_ctrl_c_while_the_extension_is_imported(text, tmp_path):
    (tmp_path / "numpy.py").write_text(text)
    result = run("--device", "cpu", PYTHONPATH=python_path(tmp_path))
    assert (result.returncode, result.stderr.splitlines()[-1]) == (130, "stopped")


@needs_engine
def test_prompt_from_stdin_and_logprobs():
    arguments = ("--prompt-file", "-", "--device", "cpu", "--num-generate", "4", "--logprobs", "2")
    result = run(*arguments, stdin="import os\n")
    assert result.returncode == 0, result.stderr
    assert "logprob" in result.stderr


@needs_engine
def test_memory_plan():
    result = run("--memory-plan", "--device", "cpu")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()[2:]
    *groups, total = [line.split() for line in lines if not line.startswith(" ")]
    sizes = [float(row[-2]) for row in groups]
    assert {"weights", "scratch", "kv", "state"} == {row[0] for row in groups}
    assert sizes == sorted(sizes, reverse=True)
    assert total[0] == "total" and abs(sum(sizes) - float(total[-2])) < 0.05
    assert len(lines) < 40
    full = run("--memory-plan", "--full", "--device", "cpu")
    names = [line.split()[0] for line in full.stdout.splitlines()]
    assert "model.layers.3.mlp.down_proj" in names and "model.layers.*.mlp.down_proj" not in names


@needs_engine
def test_a_memory_plan_reads_no_weights(monkeypatch, capsys):
    def read(*arguments: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr("cpmcu.loading.loader.load_tensors", read)
    assert cli.main(["--memory-plan", "--device", "cpu"]) == 0
    shown = capsys.readouterr()
    assert "total" in shown.out and "loading" not in shown.err


@needs_engine
def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m cpmcu.cli --device cpu --num-generate 300 --ignore-eos"
    result = subprocess.run(
        f"({command}; echo status $? >&2) | head -c 20",
        shell=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "status 0" in result.stderr
    assert "Traceback" not in result.stderr and "Exception" not in result.stderr
