"""Reads the user's messages: with history and editing on a terminal, else line by line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpmcu.text.files import MOST_BYTES

if TYPE_CHECKING:
    from prompt_toolkit.history import History

Reader = Callable[
    [], str
]  # returns a message; raises EOFError at the end, KeyboardInterrupt for Ctrl-C

QUOTES = '"""'
_PROMPT, _CONTINUATION = "> ", ". "


def message_reader(commands: Sequence[str]) -> Reader:
    """Returns a reader of messages: prompt_toolkit's if it is installed and the terminal is full.

    Tab completes `commands`. A message that begins with three quotes extends to the next three.
    """
    terminal = sys.stdin.isatty() and sys.stderr.isatty()
    if terminal and os.environ.get("TERM", "dumb") != "dumb":
        try:
            return _toolkit_reader(commands)
        except ImportError:
            import readline  # noqa: F401  # adds line editing and history to input()
    return _plain_reader


def unquoted(text: str) -> str:
    """Returns a message without the three quotes around it."""
    if not text.startswith(QUOTES):
        return text
    return text.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")


def _is_open(text: str) -> bool:
    """True if the message continues on the next line."""
    body = text.strip()
    return body.startswith(QUOTES) and not (len(body) >= 6 and body.endswith(QUOTES))


def _plain_reader() -> str:
    text = _line(_PROMPT)
    while _is_open(text):
        try:
            text += "\n" + _line(_CONTINUATION)
        except EOFError:  # the end of the input also ends the message
            break
    return text


def _line(prompt: str) -> str:
    if sys.stdin.isatty() and sys.stdout.isatty():
        return input(prompt)
    if sys.stdin.isatty():  # stdout has only the answers
        sys.stderr.write(prompt)
        sys.stderr.flush()
    try:
        line = sys.stdin.readline(MOST_BYTES + 1)
    except UnicodeDecodeError as error:
        raise ValueError(f"stdin is not UTF-8 text: {error}") from error
    if not line:
        raise EOFError
    if len(line) > MOST_BYTES:
        raise ValueError(f"a line of stdin has more than {MOST_BYTES >> 20} MiB")
    return line.removesuffix("\n")


def _toolkit_reader(commands: Sequence[str]) -> Reader:
    """Enter sends. Alt-Enter, or Enter between three quotes, begins a new line."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output.vt100 import Vt100_Output

    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: Any) -> None:
        if _is_open(event.current_buffer.text):
            event.current_buffer.newline()
        else:
            event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.newline()

    # With CPR, prompt_toolkit would print a warning if the terminal does not answer.
    output = Vt100_Output.from_pty(sys.stderr, os.environ.get("TERM"))
    output.enable_cpr = False
    session: PromptSession[str] = PromptSession(
        _PROMPT,
        output=output,
        history=_history(),
        key_bindings=bindings,
        multiline=True,
        prompt_continuation=_CONTINUATION,
        completer=WordCompleter(list(commands), sentence=True),
        complete_while_typing=False,
    )
    return session.prompt


def _history() -> History:
    """Returns the stored messages of earlier chats; if no file can be written, a new history."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    try:
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        path = Path(state) / "cpmcu" / "chat_history"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # readable by the user only
    except (OSError, RuntimeError):  # RuntimeError: no home directory
        return InMemoryHistory()
    return FileHistory(path)
