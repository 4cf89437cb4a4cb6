"""The command line in a real terminal: keys, Ctrl-C and Ctrl-D, colours, widths."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.python_path import python_path
from tests.unit.test_cli import needs_engine

pexpect = pytest.importorskip("pexpect")

pytestmark = needs_engine

LEAVES = "Ctrl-D leaves\r\n"
LONG = (
    "--num-generate",
    "1900",
    "--ignore-eos",
    "--num-threads",
    "1",
    "--temperature",
    "0",
    "--no-speculation",
)


class Terminal:
    """Starts `cpmcu` with the shipped model in a pseudoterminal. `state`: folder of the history."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._started: list[pexpect.spawn] = []

    def __call__(self, *arguments: str, columns: int = 80, **environment: str) -> pexpect.spawn:
        unset = ("NO_COLOR", "CPMCU_DEBUG", "COLUMNS", "LINES")
        clean = {name: value for name, value in os.environ.items() if name not in unset}
        process = pexpect.spawn(
            sys.executable,
            ["-m", "cpmcu", *arguments, "--device", "cpu"],
            env={**clean, "TERM": "xterm", "XDG_STATE_HOME": str(self._state), **environment},
            dimensions=(24, columns),
            encoding="utf-8",
            timeout=60,
            # Ctrl-C may be ignored in the test process, as in a shell's background job.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self._started.append(process)
        return process

    def chat(self, *arguments: str, **options: object) -> pexpect.spawn:
        process = self("chat", "--num-generate", "8", *arguments, **options)
        process.expect(LEAVES)
        return process

    def close(self) -> None:
        for process in self._started:
            process.close(force=True)


@pytest.fixture
def terminal(tmp_path):
    started = Terminal(tmp_path / "state")
    yield started
    started.close()


def status(process: pexpect.spawn) -> int:
    """Waits for the exit status. `process.before` has the output."""
    process.expect(pexpect.EOF)
    process.close()
    assert process.signalstatus is None
    return process.exitstatus


def ready(process: pexpect.spawn) -> None:
    """Waits until prompt_toolkit reads keys. Before that the terminal handles Ctrl-D itself."""
    pytest.importorskip("prompt_toolkit")
    process.expect_exact("\x1b[?2004h")


def test_ctrl_c_in_a_run_keeps_the_text_and_exits_130(terminal):
    process = terminal("run", "def f(n):", *LONG)
    process.expect(r"\w+\r\n.*\w+\r\n")  # some lines of code
    process.sendintr()
    assert status(process) == 130
    assert process.before.rstrip().endswith("stopped")
    assert "Traceback" not in process.before


def test_ctrl_c_in_a_run_that_does_not_stream(terminal):
    process = terminal("run", "def f(n):", *LONG, "--use-stream", "no")
    process.expect("loading.*MB/s")
    process.expect_exact("\x1b[?25h")  # the bar of the load is gone
    with pytest.raises(pexpect.TIMEOUT):
        process.expect(pexpect.EOF, timeout=0.2)
    process.sendintr()
    assert status(process) == 130
    shown = re.sub(r"\x1b\[[?\d;]*\w", "", process.before)
    assert len(shown.split("stopped")[0].split()) > 5


def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(terminal):
    process = terminal("chat", *LONG)
    process.expect(LEAVES)
    ready(process)
    process.send("hello\r")
    process.expect("(self|return|def|import|for) ")
    process.sendintr()
    process.expect("stopped\r\n")
    ready(process)
    process.send("half a message")
    process.expect("half a message")
    process.sendintr()
    process.expect("Ctrl-D or /exit leaves")
    ready(process)
    process.send("/stats\r")
    process.expect("there is no answer yet")
    ready(process)
    process.sendeof()
    assert status(process) == 0


def test_history_and_messages_of_several_lines(terminal):
    process = terminal.chat()
    ready(process)
    process.send('"""one\r')
    process.send('two"""\r')
    process.expect("finish reason length")
    ready(process)
    process.send("three\x1b\rfour\r")  # Alt-Enter
    process.expect("finish reason length")
    ready(process)
    process.send("/save conversation.json\x15/exit\r")  # Ctrl-U takes it back
    assert status(process) == 0
    history = terminal._state / "cpmcu" / "chat_history"
    assert history.stat().st_mode & 0o077 == 0
    assert "+three\n+four\n" in history.read_text()
    assert '+"""one\n+two"""\n' in history.read_text()
    process = terminal.chat()
    ready(process)
    process.send("\x1b[A\x1b[A")  # up, over /exit, to the first line of the message before
    process.expect("four")
    process.send("\r")
    process.expect("finish reason length")
    ready(process)
    process.sendeof()
    assert status(process) == 0


def test_a_home_that_cannot_be_written(terminal, tmp_path):
    (tmp_path / "file").write_text("")
    process = terminal.chat(XDG_STATE_HOME=str(tmp_path / "file"))
    ready(process)
    process.send("/exit\r")
    assert status(process) == 0


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"PYTHONPATH": ""}])
def test_plain_input(environment, terminal, tmp_path):
    """A dumb terminal, or a missing prompt_toolkit, leaves plain input."""
    if "PYTHONPATH" in environment:
        (tmp_path / "prompt_toolkit.py").write_text("raise ImportError")
        environment = {"PYTHONPATH": python_path(tmp_path)}
    process = terminal.chat(**environment)
    process.expect("> ")
    process.send('"""one\r')
    process.expect(r"\. ")
    process.send('two"""\r')
    process.expect("finish reason length")
    process.expect("> ")
    process.sendintr()
    process.expect("Ctrl-D or /exit leaves")
    process.sendeof()
    assert status(process) == 0
    if environment.get("TERM") == "dumb":
        assert "\x1b" not in process.before


def test_colours(terminal):
    flags = ("run", "def f(n):", "--num-generate", "4")
    dim = "\x1b[2m4 tokens"
    assert status(process := terminal(*flags)) == 0
    assert dim in process.before
    assert status(process := terminal(*flags, NO_COLOR="1")) == 0
    assert "\n4 tokens" in process.before
    assert not re.search(r"\x1b\[[\d;]*m", process.before)
    for plain in (terminal(*flags, TERM="dumb"), terminal(*flags, "--plain-output")):
        assert status(plain) == 0
        assert "\x1b" not in plain.before and "\n4 tokens" in plain.before


def test_a_narrow_terminal(terminal):
    process = terminal("run", "def f(n):", "--num-generate", "4", "--stats", columns=40)
    assert status(process) == 0
    shown = re.sub(r"\x1b\[[?\d;]*\w", "", process.before)
    tables = [line for line in shown.splitlines() if line.startswith(("┃", "│", "┏", "└"))]
    assert tables and max(map(len, tables)) <= 40


def test_a_typed_prompt(terminal):
    process = terminal("run", "--prompt-file", "-", "--num-generate", "4")
    process.expect("type the prompt; Ctrl-D")
    process.send("import os\r")
    process.sendeof()
    assert status(process) == 0
    assert "4 tokens" in process.before
