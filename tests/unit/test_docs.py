"""The documents are correct: links, paths and flags exist, and their programs run."""

from __future__ import annotations

import argparse
import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cpmcu.bench import make_parser as bench_parser
from cpmcu.cli import VERBS, make_parser
from cpmcu.convert.__main__ import make_parser as convert_parser
from cpmcu.server import make_parser as make_server_parser
from cpmcu.terminal.completion import make_parser as completion_parser
from scripts.synthetic.__main__ import make_parser as synthetic_parser
from tests.missing import missing
from tests.python_path import python_path

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_PATH = re.compile(r"[\w.*-]+(/[\w.*-]+)*/?")


def blocks(document: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return [body for found, body in _FENCE.findall(document.read_text()) if found == language]


def spans(document: Path) -> list[str]:
    """The texts in single backticks outside fenced blocks."""
    return _SPAN.findall(_FENCE.sub("", document.read_text()))


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_document
def test_code_spans_end_on_their_line(document: Path) -> None:
    lines = _FENCE.sub("", document.read_text()).splitlines()
    assert not [line for line in lines if line.count("`") % 2]


@every_document
def test_links_lead_somewhere(document: Path) -> None:
    broken = []
    for link in _LINK.findall(_FENCE.sub("", document.read_text())):
        if re.match(r"\w+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name) if name else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@every_document
def test_paths_exist(document: Path) -> None:
    named = [s for s in spans(document) if "/" in s and _PATH.fullmatch(s)]
    assert not [path for path in named if not any(ROOT.glob(path.rstrip("/")))]


def test_every_folder_of_csrc_is_explained() -> None:
    folders = [path for path in (ROOT / "csrc").rglob("*") if path.is_dir()]
    assert folders
    assert not [str(path) for path in folders if not (path / "README.md").exists()]


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    """The flags that the help lists."""
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    return {flag for action in shown for flag in action.option_strings}


PARSERS = {
    "cpmcu.cli": make_parser,
    "cpmcu.bench": bench_parser,
    "cpmcu.convert": convert_parser,
    "cpmcu.server": make_server_parser,
    "scripts.synthetic": synthetic_parser,
    "cpmcu completion": completion_parser,
    "cpmcu bench": functools.partial(bench_parser, "bench"),
    "cpmcu convert": functools.partial(convert_parser, "convert"),
    "cpmcu serve": functools.partial(make_server_parser, "serve"),
    **{f"cpmcu {verb}": functools.partial(make_parser, verb) for verb in VERBS},
}


def commands(document: Path) -> list[list[str]]:
    """Program and words of each cpmcu command in backticks or in a shell block."""
    lines = [line for body in blocks(document, "bash") for line in body.splitlines()]
    found = []
    for text in [*lines, *spans(document)]:
        text = text.rpartition("| ")[2]  # the last command of a pipe
        if re.match(r"python -m (cpmcu|scripts)\.", text):
            found.append(_words(text)[2:])
        elif re.match(r"cpmcu [a-z]", text):
            program, verb, *words = _words(text)
            found.append([f"{program} {verb}", *words])
    return found


def _words(text: str) -> list[str]:
    """The words of a command, without redirections and other shell syntax."""
    words = shlex.split(text, comments=True)
    return words[: next((i for i, word in enumerate(words) if word in "<>"), None)]


@every_document
def test_commands_are_accepted(document: Path) -> None:
    for program, *arguments in commands(document):
        assert program in PARSERS
        parser = PARSERS[program]()
        parser.parse_args(arguments)  # exits, and says why, if it does not like them
        given = {word.partition("=")[0] for word in arguments if word.startswith("--")}
        assert given <= flags_of(parser)


@every_document
def test_flags_exist(document: Path) -> None:
    known = {flag for parser in PARSERS.values() for flag in flags_of(parser())}
    named = {word for span in spans(document) for word in span.split() if word.startswith("--")}
    assert named <= known


def run_python(document: Path, folder: Path) -> str:
    """Runs the Python blocks of a document as one program in `folder`; returns its output.

    Blocks that need a server are tested in tests/e2e.
    """
    program = folder / f"{document.stem}.py"
    bodies = [body for body in blocks(document, "python") if "import OpenAI" not in body]
    program.write_text("\n\n".join(bodies))
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, program.name],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["README.md", "docs/start.md", "docs/adding_model.md", "docs/converting.md"]
)
def test_programs_run(name: str, tmp_path: Path) -> None:
    assert run_python(ROOT / name, tmp_path).strip()


def test_the_grammar_example_runs(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    lines = run_python(ROOT / "docs" / "structured_output.md", tmp_path).splitlines()
    assert [line.split()[0] for line in lines] == [
        "json_schema", "json_schema", "regex", "choice", "lark", "composed",
    ]  # fmt: skip


def test_the_parser_example_runs(tmp_path: Path) -> None:
    printed = run_python(ROOT / "docs" / "adding_parser.md", tmp_path).splitlines()
    assert printed[1].startswith("'add' 'Now\\n' []")
    assert "'name': 'add', 'arguments': '{\"a\"'" in printed[2]
    assert printed[-1] == "'' 'Done.' []"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plugin", "printed"),
    [
        ("adding_quant", "int8_rows", "largest error"),
        ("adding_drafter", "repeat_drafter", "mean accept length"),
        ("adding_block", None, "with and without a draft"),
    ],
)
def test_plugin_example_runs(name: str, plugin: str | None, printed: str, tmp_path: Path) -> None:
    document = ROOT / "docs" / f"{name}.md"
    if shutil.which("g++") is None:
        missing("no C++ compiler was found")
    if plugin is not None:  # else the document compiles a file of tests/plugins
        (tmp_path / f"{plugin}.cpp").write_text(blocks(document, "cpp")[0])
    for folder in ("csrc", "tests"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    for command in blocks(document, "bash"):
        subprocess.run(shlex.split(command), cwd=tmp_path, check=True)
    assert printed in run_python(document, tmp_path)


@pytest.mark.parametrize("name", ["adding_drafter", "adding_block"])
def test_examples_are_the_tested_ones(name: str) -> None:
    plugins = [path.read_text() for path in (ROOT / "tests" / "plugins").glob("*.cpp")]
    shown = blocks(ROOT / "docs" / f"{name}.md", "cpp")
    assert shown
    assert all(any(source in plugin for plugin in plugins) for source in shown)
