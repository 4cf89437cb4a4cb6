"""Messages that a user types: with history and editing on a terminal, line by line elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prompt_toolkit.history import History

Reader = Callable[[], str]  # a message; raises EOFError at the end, KeyboardInterrupt for Ctrl-C

QUOTES = '"""'
_PROMPT, _CONTINUATION = "> ", ". "


def message_reader(commands: Sequence[str]) -> Reader:
    """Reads messages through prompt_toolkit if it is installed and there is a full terminal.

    `commands` are completed by Tab. A message that begins with three quotes goes on to the next
    three.
    """
    terminal = sys.stdin.isatty() and sys.stderr.isatty()
    if terminal and os.environ.get("TERM", "dumb") != "dumb":
        try:
            return _toolkit_reader(commands)
        except ImportError:
            import readline  # noqa: F401  # gives input() its line editing and history
    return _plain_reader


def unquoted(text: str) -> str:
    """A message without the three quotes around it."""
    if not text.startswith(QUOTES):
        return text
    return text.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")


def _is_open(text: str) -> bool:
    """Does the message go on after this line?"""
    body = text.strip()
    return body.startswith(QUOTES) and not (len(body) >= 6 and body.endswith(QUOTES))


def _plain_reader() -> str:
    text = _line(_PROMPT)
    while _is_open(text):
        try:
            text += "\n" + _line(_CONTINUATION)
        except EOFError:  # the end of the input ends the message, too
            break
    return text


def _line(prompt: str) -> str:
    if sys.stdin.isatty() and sys.stdout.isatty():
        return input(prompt)
    if sys.stdin.isatty():  # stdout is for the answers
        sys.stderr.write(prompt)
        sys.stderr.flush()
    try:
        return input()
    except UnicodeDecodeError as error:
        raise ValueError(f"stdin is not UTF-8 text: {error}") from error


def _toolkit_reader(commands: Sequence[str]) -> Reader:
    """Enter sends; Alt-Enter begins a new line, and so does Enter between three quotes."""
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

    # Without CPR: a terminal that does not answer would get a warning in the midst of the text.
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
    """The messages of earlier chats, or of this one where no file can be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    try:
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        path = Path(state) / "cpmcu" / "chat_history"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # nobody else reads it
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return InMemoryHistory()
    return FileHistory(path)
