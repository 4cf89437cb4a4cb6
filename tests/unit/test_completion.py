"""`cpmcu completion`: the scripts know every flag, and bash completes with its script."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from cpmcu import __main__ as command
from cpmcu import cli, server
from cpmcu.terminal.completion import SHELLS, flags_of
from tests.unit.test_import_time import HEAVY


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert command.main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", SHELLS)
def test_every_verb_and_flag_is_in_the_script(shell: str, capsys) -> None:
    text = script(shell, capsys)
    for verb in command._VERBS:
        assert verb in text
    for parser in (cli.make_parser("run"), server.make_parser("serve")):
        names = [name for flag in flags_of(parser) for name in flag.names]
        assert len(names) > 50
        for name in names:
            assert (f"-l {name[2:]} " if shell == "fish" and name[:2] == "--" else name) in text


def test_the_table() -> None:
    flags = {flag.names[0]: flag for flag in flags_of(cli.make_parser("run"))}
    assert flags["--device"].choices == ("auto", "cpu", "cuda")
    assert flags["--batch"].takes_file and flags["--model-path"].takes_file
    assert flags["--top-k"].takes_value and not flags["--top-k"].takes_file
    assert not flags["--stats"].takes_value
    assert "--use-compress-lse" not in flags


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["r"], "run"),
        (["run", "--dev"], "--device --device-index"),
        (["run", "--device", ""], "auto cpu cuda"),
        (["serve", "--device", "=", "c"], "cpu cuda"),
        (["serve", "--device", "="], "auto cpu cuda"),
        (["run", "--top-k", ""], ""),
        (["bench", "--num-gen"], ""),
        (["run", "--stats", "--sys"], "--system-prompt"),
        (["plan", "a_fi"], "a_file"),
        (["run", "--batch", "a_"], "a_file"),
        (["completion", "f"], "fish"),
    ],
)
def test_bash(words: list[str], expected: str, tmp_path, capsys) -> None:
    assert shutil.which("bash")
    (tmp_path / "a_file").write_text("")
    (tmp_path / "script").write_text(script("bash", capsys))
    code = 'compopt() { :; }; . ./script; COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)); _cpmcu; '
    code += 'echo "${COMPREPLY[@]}"'
    done = subprocess.run(
        ["bash", "-c", code, "bash", "cpmcu", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout.strip(), done.stderr) == (expected, "")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells_can_read_theirs(shell: str, tmp_path, capsys) -> None:
    text = script(shell, capsys)
    if shutil.which(shell):
        (tmp_path / "script").write_text(text)
        subprocess.run([shell, "-n", str(tmp_path / "script")], check=True, timeout=60)


def test_it_loads_nothing_heavy() -> None:
    program = (
        "import sys\nfrom cpmcu.__main__ import main\nmain(['completion', 'zsh'])\n"
        f"print(*({HEAVY!r} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (0, "")
