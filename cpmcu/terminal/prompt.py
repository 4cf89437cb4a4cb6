"""Reads the prompt of a run: an argument, a flag, a file, piped input, or a default.

Piped input is appended to the given prompt. If no prompt is given, it is the prompt.
"""

from __future__ import annotations

import os
import re
import select
import stat
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from cpmcu.checks import shown
from cpmcu.shipped import packaged_model, shipped
from cpmcu.text.files import read_text

DEFAULT_PROMPT = "Who are you"
SHIPPED_PROMPT = '''import os


def walk_files(root):
    """Yield the path of every file below a directory."""
'''

_PATH = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)+")  # a path, or the id of a repository
_WEIGHT_FILES = (".gguf", ".safetensors", ".bin", ".pt")
_PATIENCE_SECONDS = 1.0

Note = Callable[[str], None]


def names_model(word: str) -> bool:
    """Is this argument a model, not a prompt?

    A path, a repository id and the name of a weights file are models by their form. Names of a
    shipped model, of an installed package with a model, and of a directory with config.json or a
    GGUF file are models, too.
    """
    if not re.search(r"\s", word):
        looks = word.startswith(("/", "./", "../", "~")) or word.endswith(("/", *_WEIGHT_FILES))
        if looks or _PATH.fullmatch(word):
            return True
    try:
        if shipped(word) is not None or packaged_model(word) is not None:
            return True
        return (Path(word) / "config.json").is_file() or any(Path(word).glob("*.gguf"))
    except (OSError, ValueError):  # not a valid path
        return False


def model_and_prompt(
    words: list[str], model: str | None, text: str | None, file: str | None = None
) -> tuple[str | None, str | None]:
    """Model and prompt from `[MODEL] [PROMPT]` and from the corresponding flags.

    A single word is the prompt unless it names a model. Raises ValueError if the model or the
    prompt is given twice.
    """
    words = list(words)
    if model is not None and len(words) == 2:
        raise ValueError(
            f"MODEL is {shown(words[0])}, but --model-path is given too: give one of them"
        )
    if words and model is None and (len(words) == 2 or names_model(words[0])):
        model = words.pop(0)
    for flag, given in (("--prompt-text", text), ("--prompt-file", file)):
        if words and given is not None:
            raise ValueError(f"PROMPT is {shown(words[0])}, but {flag} is given too: give one")
    return model, words[0] if words else text


def read_prompts(
    file: str | None, texts: Sequence[str], note: Note, *, append_piped: bool
) -> list[str]:
    """The given prompts, each with piped input appended; [] if there is neither.

    `file` overrides `texts`. One newline at the end of a file or of piped input is left out.

    Raises OSError for an unreadable file and for `file` "-" without stdin. Raises ValueError for an
    empty file, for a text that is too long, and for one that is not UTF-8.
    """
    if file == "-":
        return [_filled(_read_stdin(note), "the prompt from stdin")]
    given = list(texts) if file is None else [_read_file(file, note)]
    piped = _read_stdin(note) if append_piped and is_piped() else ""
    if not piped.strip():
        return given
    return [f"{text}\n\n{piped}" if text.strip() else piped for text in given or [""]]


def is_piped() -> bool:
    """Is stdin a pipe, a socket or a file?"""
    if sys.stdin is None:
        return False
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISREG(mode)


def _read_stdin(note: Note) -> str:
    if sys.stdin is None:
        raise OSError("stdin is closed, but the input comes from there")
    if sys.stdin.isatty():
        note("type the prompt; Ctrl-D in an empty line ends it")
    elif not select.select([0], [], [], _PATIENCE_SECONDS)[0]:
        note("waiting for the prompt from stdin (</dev/null: nothing comes from there)")
    return read_text(0, "the prompt from stdin").removesuffix("\n")


def _read_file(file: str, note: Note) -> str:
    """Tells the user if it takes long, as that of a pipe without a writer."""
    patience = threading.Timer(_PATIENCE_SECONDS, note, [f"waiting for the prompt from {file}"])
    patience.daemon = True
    patience.start()
    try:
        return _filled(read_text(file).removesuffix("\n"), file)
    finally:
        patience.cancel()


def _filled(text: str, name: str) -> str:
    if not text.strip():
        raise ValueError(f"{name} is empty, but must have some text")
    return text
