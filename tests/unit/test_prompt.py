"""Sources of the prompt: flags, a file, and piped input."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cpmcu.terminal.prompt import read_prompts
from tests.unit.test_cli import needs_engine, run

PROGRAM = """
import sys
from cpmcu.terminal.prompt import read_prompts
file, text = (a or None for a in sys.argv[1:3])
note = lambda text: print(text, file=sys.stderr)
print(repr([*read_prompts(file, [text] if text else [], note, append_piped=True), None][0]))
"""


def prompt(
    stdin: object, *, file: str = "", text: str = ""
) -> tuple[str | None, subprocess.CompletedProcess[str]]:
    """The result of `read_prompts` for a file, a text and stdin."""
    given = {"input": stdin} if isinstance(stdin, str) else {"stdin": stdin}
    command = [sys.executable, "-c", PROGRAM, file, text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, **given)
    return (None if done.returncode else eval(done.stdout)), done


def test_piped_input_is_the_prompt_or_is_appended(tmp_path):
    path = tmp_path / "question"
    path.write_text("Explain:\n")
    assert prompt("import os\n")[0] == "import os"
    assert prompt("\n    x = 1\n", text="def f():")[0] == "def f():\n\n\n    x = 1"
    assert prompt("return a + ")[0] == "return a + "
    assert prompt("  x\n\n", file="-")[0] == "  x\n"
    assert prompt("\n", text="p")[0] == "p"
    assert prompt("import os\n", file=str(path))[0] == "Explain:\n\nimport os"
    assert prompt("import os\n", file=str(path), text="lost")[0] == "Explain:\n\nimport os"
    assert prompt("import os\n", file="-", text="lost")[0] == "import os"
    with open(path) as file:
        assert prompt(file, text="Now.")[0] == "Now.\n\nExplain:"


def test_nothing_is_piped():
    assert prompt("", text="p")[0] == "p"
    assert prompt("")[0] is None
    assert prompt(subprocess.DEVNULL, text="p")[0] == "p"
    closed = [sys.executable, "-c", PROGRAM, "", "p"]
    command = ["bash", "-c", 'exec "$@" <&-', "bash", *closed]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "'p'\n"


@pytest.mark.parametrize("file", ["-", ""])
def test_waiting_for_a_silent_pipe_is_reported(file):
    reader, writer = os.pipe()
    command = [sys.executable, "-c", PROGRAM, file, ""]
    process = subprocess.Popen(
        command, stdin=reader, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    os.close(reader)
    assert process.stderr.readline().startswith("waiting for the prompt from stdin")
    os.write(writer, b"at last\n")
    os.close(writer)
    assert process.communicate(timeout=60)[0] == "'at last'\n"


def test_waiting_for_a_pipe_without_a_writer_is_reported(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = [sys.executable, "-c", PROGRAM, str(pipe), ""]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr.readline() == f"waiting for the prompt from {pipe}\n"
    pipe.write_text("at last\n")
    assert process.communicate(timeout=60)[0] == "'at last'\n"


def test_errors(tmp_path):
    (tmp_path / "empty").write_text(" \n")
    for file, what in ((str(tmp_path / "empty"), str(tmp_path / "empty")), ("-", "from stdin")):
        done = prompt(" \n", file=file)[1]
        assert f"{what} is empty, but must have some text" in done.stderr
    with pytest.raises(OSError, match="none"):
        read_prompts(str(tmp_path / "none"), [], print, append_piped=False)


@needs_engine
def test_piped_input_reaches_the_model():
    flags = ("--device", "cpu", "--num-generate", "30", "--temperature", "0")
    text = 'class Stack:\n    """A stack."""\n\n    def push(self, item):'
    piped = run(*flags, stdin=text)
    assert piped.returncode == 0, piped.stderr
    assert piped.stdout == run(*flags, "--prompt-text", text).stdout
    begin, end = text.split("\n\n", 1)
    assert piped.stdout == run(*flags, "--prompt-text", begin, stdin=end).stdout
    assert piped.stdout != run(*flags).stdout
