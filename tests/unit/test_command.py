"""`cpmcu` and `python -m cpmcu`: verbs, help, version, positional arguments."""

from __future__ import annotations

import contextlib
import os
import pkgutil
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpmcu import __main__ as command
from cpmcu import __version__, bench, cli, server
from cpmcu.convert import __main__ as convert
from cpmcu.flags import FlagParser
from cpmcu.terminal.prompt import model_and_prompt
from tests.unit.test_cli import needs_engine
from tests.unit.test_import_time import HEAVY

ROOT = Path(__file__).parents[2]
VERBS = ("run", "chat", "serve", "bench", "convert", "plan", "env", "list", "completion")
FORMS = [
    *(("cpmcu", verb) for verb in VERBS),
    *((f"cpmcu.{name}",) for name in ("cli", "server", "bench", "convert")),
    ("cpmcu",),
]
MAINS = {
    "cpmcu": command.main,
    "cpmcu.cli": cli.main,
    "cpmcu.server": server.main,
    "cpmcu.bench": bench.main,
    "cpmcu.convert": convert.main,
}
every_form = pytest.mark.parametrize("form", FORMS, ids=" ".join)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "CPMCU_DEBUG": "", "COLUMNS": "80", **environment},
    )


@pytest.fixture
def printed(capsys, monkeypatch):
    """Runs a program in this process with a terminal width; returns its output."""

    def call(form: tuple[str, ...], *arguments: str, columns: int = 80) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        try:
            status = MAINS[form[0]]([*form[1:], *arguments])
        except SystemExit as exit_:
            status = exit_.code
        shown = capsys.readouterr()
        assert (status, shown.err) == (0, "")
        return shown.out

    with signals_kept():
        yield call


@contextlib.contextmanager
def signals_kept() -> Iterator[None]:
    """Restores signal handlers, which the server replaces."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@every_form
def test_help_fits_a_screen(form, printed):
    text = printed(form, "--help")
    lines = text.splitlines()
    assert len(lines) <= 50
    assert max(map(len, lines)) <= 80
    assert "usage: " in lines[0]
    assert printed(form, "-h") == text


@every_form
def test_help_all_names_every_flag_with_its_help(form, printed):
    brief, full = (printed(form, flag) for flag in ("--help", "--help-all"))
    assert set(re.findall(r"--[a-z][\w-]+", brief)) <= set(re.findall(r"--[a-z][\w-]+", full))
    assert max(map(len, full.splitlines())) <= 80


@pytest.mark.parametrize("form", [("cpmcu", "run"), ("cpmcu", "serve"), ("cpmcu.cli",)])
def test_help_has_groups_and_mentions_the_rest(form, printed):
    text = printed(form, "--help")
    for title in ("model and engine:", "speculative decoding:"):
        assert f"\n{title}\n" in text
    assert text.count("\n") >= 24
    assert "--chunk-length" in text and "--spec-tree-size" in text and "--help-all" in text


def test_help_in_a_narrow_terminal(printed):
    for form in (("cpmcu", "run"), ("cpmcu.server",)):
        lines = printed(form, "--help", columns=40).splitlines()
        assert max(map(len, lines)) <= 40


def test_help_and_version_import_nothing_heavy():
    program = (
        "import sys\nfrom cpmcu.__main__ import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        f"print(*({HEAVY!r} & set(sys.modules)), file=sys.stderr)"
    )
    for arguments in (["--version"], ["--help"], ["run", "--help"], ["serve", "--help"]):
        command = [sys.executable, "-c", program, *arguments]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        assert result.stdout
        assert result.stderr.strip() == ""


@every_form
def test_version(form, printed):
    assert printed(form, "--version") == f"cpmcu {__version__}\n"


def test_both_ways_to_start_the_program():
    result = run("cpmcu", "--version")
    assert (result.returncode, result.stdout) == (0, f"cpmcu {__version__}\n")
    assert run("cpmcu", "chat", "--help").stdout.startswith("usage: cpmcu chat [MODEL] [PROMPT]")


def test_the_console_command_is_this_program():
    text = (ROOT / "pyproject.toml").read_text()
    (target,) = re.findall(r'^\[project\.scripts\]\ncpmcu = "(.*)"$', text, re.MULTILINE)
    assert pkgutil.resolve_name(target) is MAINS["cpmcu"]


def test_help_of_a_verb_by_name(printed):
    cpmcu = ("cpmcu",)
    assert printed(cpmcu, "help", "serve") == printed(cpmcu, "serve", "--help")
    assert printed(cpmcu) == printed(cpmcu, "--help") == printed(cpmcu, "help")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serv"], "cpmcu: unknown verb 'serv'; did you mean serve?"),
        (["--chat"], "cpmcu: unknown verb '--chat'; did you mean chat?"),
        (["answer"], "cpmcu: unknown verb 'answer', expected one of run, chat, serve"),
        (["run", "a", "b", "c"], "cpmcu run: unexpected argument 'c'; a text of several words"),
        (["run", "m", "p", "--model", "x"], "MODEL is 'm', but --model-path is given too"),
        (["run", "p q", "--prompt-text", "x"], "PROMPT is 'p q', but --prompt-text is given too"),
        (["run", "p q", "--prompt-file", "x"], "PROMPT is 'p q', but --prompt-file is given too"),
        (["plan", "m", "--model", "x"], "MODEL is 'm', but --model-path is given too"),
        (["serve", "m", "--model", "x"], "MODEL is 'm', but --model-path is given too"),
        (["serve", "m", "n"], "cpmcu serve: unexpected argument 'n'"),
        (["serve", "--port", "70000"], "--port is 70000, but must be 0 to 65535"),
        (["bench", "--contexts", "0"], "--contexts is '0', expected lengths"),
        (["bench", "m", "--model", "x"], "MODEL is 'm', but --model-path is given too"),
        (["convert", "x"], "CONVERSION: invalid choice: 'x'"),
        (["env", "x"], "cpmcu env: unexpected argument 'x'"),
        (["completion", "csh"], "cpmcu completion: shell: invalid choice: 'csh'"),
        (["run", "--num-generat", "3"], "unknown flag '--num-generat'; did you mean --num-gen"),
    ],
)
def test_usage_errors(arguments, message, capsys):
    with signals_kept():
        try:
            status = MAINS["cpmcu"](arguments)
        except SystemExit as exit_:
            status = exit_.code
    shown = capsys.readouterr()
    assert (status, shown.out) == (2, "")
    assert message in shown.err
    assert shown.err.count("\n") == 1


def flags(parser: FlagParser) -> set[str]:
    return set(parser._option_string_actions)


def test_every_flag_is_in_both_forms():
    assert flags(cli.make_parser("run")) == flags(cli.make_parser())
    assert (
        flags(cli.make_parser("chat")) == flags(cli.make_parser("plan")) == flags(cli.make_parser())
    )
    for program, verb in ((server, "serve"), (bench, "bench"), (convert, "convert")):
        assert flags(program.make_parser(verb)) == flags(program.make_parser())


def test_a_switch_does_not_consume_the_next_argument():
    parser = cli.make_parser("run")
    parsed = parser.parse_args(["--no-speculation", "m", "--stats", "no", "--cuda_graph", "p q"])
    assert parsed.plain_words == ["m", "p q"]
    assert (parsed.no_speculation, parsed.stats, parsed.cuda_graph) == (True, False, True)
    parsed = parser.parse_args(["m", "--seed", "1", "--", "--chat"])
    assert (parsed.plain_words, parsed.seed, parsed.chat) == (["m", "--chat"], 1, None)
    assert parser.parse_args(["- a list"]).plain_words == ["- a list"]


def test_positional_arguments_that_are_models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "with-config").mkdir()
    (tmp_path / "with-config" / "config.json").write_text("{}")
    (tmp_path / "hello").mkdir()
    models = ["./x", "/x/y", "../x", "~/x", "owner/name", "tiny-python-minicpm-w4"]
    for word in [*models, "with-config", "m.gguf"]:
        assert model_and_prompt([word], None, None) == (word, None)
    for word in ("hello", "def f(n):", "a" * 5000, "x\0y", "/think hard", "and/or, say", ""):
        assert model_and_prompt([word], None, None) == (None, word)
        assert model_and_prompt(["hello", word], None, None) == ("hello", word)
        assert model_and_prompt([word], "m", None) == ("m", word)
    assert model_and_prompt(["./x"], "m", None) == ("m", "./x")
    assert model_and_prompt([], "m", "p") == ("m", "p")
    assert model_and_prompt(["./x"], None, "p") == ("./x", "p")


def test_env_and_list_are_the_same_as_flags(capsys):
    for verb in ("env", "list"):
        shown = []
        for form, argument in (("cpmcu", verb), ("cpmcu.cli", f"--{verb}")):
            assert MAINS[form]([argument]) == 0
            shown.append(capsys.readouterr().out)
        assert shown[0] == shown[1] and shown[0].count("\n") > 5


def test_ctrl_c_while_a_program_is_imported(tmp_path):
    (tmp_path / "argparse.py").write_text("raise KeyboardInterrupt")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ""), str(ROOT)])
    result = run("cpmcu", "run", PYTHONPATH=path)
    assert (result.returncode, result.stderr) == (130, "stopped\n")


@needs_engine
def test_serve_takes_a_positional_model():
    pytest.importorskip("uvicorn")
    command = [sys.executable, "-m", "cpmcu", "serve", "tiny-python-minicpm-w4"]
    process = subprocess.Popen(
        [*command, "--port", "0", "--device", "cpu"], stderr=subprocess.PIPE, text=True
    )
    try:
        log = ""
        while "ready" not in log:
            line = process.stderr.readline()
            assert line, log
            log += line
        (port,) = re.findall(r"listening on http://127\.0\.0\.1:(\d+)", log)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=60) as answer:
            assert b'"tiny-python-minicpm-w4"' in answer.read()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()


@needs_engine
def test_bench_takes_a_positional_model():
    flags = ("--device", "cpu", "--contexts", "16", "--decode", "2", "--no-speculation")
    result = run("cpmcu", "bench", "tiny-python-minicpm-w4", *flags)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("tiny-python-minicpm-w4, ")
