"""A conversation in the terminal, and its commands."""

from __future__ import annotations

import difflib
import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cpmcu.checks import PromptTooLongError
from cpmcu.outputs import RequestOutput
from cpmcu.sampling import SamplingParams
from cpmcu.terminal.answering import show_answer
from cpmcu.ui.display import Display
from cpmcu.ui.lines import QUOTES, message_reader, unquoted

if TYPE_CHECKING:
    from cpmcu.llm import LLM

_COMMANDS = {
    "/help": "this list",
    "/reset": "forget the conversation (also /new)",
    "/save [FILE]": "write the conversation as JSON, as the server takes it",
    "/stats": "all times and speeds of the last answer",
    "/exit": "leave (also /quit, or Ctrl-D)",
}
_KEYS = f"""\
Ctrl-C stops an answer. A message of several lines stands between {QUOTES} and {QUOTES};
with prompt_toolkit installed Alt-Enter begins a new line, too. A message that
begins with a space is never a command."""
_COMMAND = re.compile(r"/[a-z]+(?=\s|$)")


class Chat:
    """A conversation with a model that has a chat template; `opening` are its first messages."""

    def __init__(
        self,
        display: Display,
        llm: LLM,
        params: SamplingParams,
        *,
        opening: Sequence[dict[str, str]],
        stream: bool,
        full_statistics: bool,
    ) -> None:
        self._display, self._llm, self._params = display, llm, params
        self._opening, self._messages = list(opening), list(opening)
        self._stream, self._full_statistics = stream, full_statistics
        self._last: RequestOutput | None = None
        self._saved: set[Path] = set()
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/reset": self._reset,
            "/new": self._reset,
            "/save": self._save,
            "/stats": self._stats,
        }

    def run(self, first: str | None) -> None:
        """Answers `first`, if given, and then the user's messages until the end of the input.

        Raises KeyboardInterrupt for a Ctrl-C while waiting for input that is not a terminal.
        """
        names = [name.split()[0] for name in _COMMANDS]
        ask = message_reader(names)
        self._display.note("/help lists commands, Ctrl-C stops an answer, Ctrl-D leaves")
        while True:
            try:
                if first is not None:
                    message, first = first, None
                    self._display.note(f"> {message}")
                    self._answer(message)
                elif not self._take(ask()):
                    return
            except EOFError:
                if self._display.asks:  # Ctrl-D leaves the cursor behind the prompt
                    self._display.note("")
                return
            except KeyboardInterrupt:  # possibly a second Ctrl-C, just after a stopped answer
                if not self._display.asks:
                    raise
                self._display.note("Ctrl-D or /exit leaves")

    def _take(self, line: str) -> bool:
        """Answers a message or runs a command. Returns False to leave the chat."""
        command = _COMMAND.match(line)
        if command is None:
            self._answer(unquoted(line.strip()))
        elif command[0] in ("/exit", "/quit"):
            return False
        else:
            self._command(command[0], line[command.end() :].strip())
        return True

    def _command(self, name: str, argument: str) -> None:
        function = self._commands.get(name)
        if function is None:
            near = difflib.get_close_matches(name, [*self._commands, "/exit"], n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            self._display.error(f"there is no command {name}; {hint}/help lists them")
            return
        function(argument)

    def _answer(self, message: str) -> None:
        if not message.strip():
            return
        turn = {"role": "user", "content": message}
        try:
            ids = self._llm.tokenize_chat([*self._messages, turn], self._llm.max_length)
        except PromptTooLongError as error:
            self._display.error(f"{error}; /reset starts over")
            return
        except ValueError as error:  # the template refuses this turn; the conversation continues
            self._display.error(error)
            return
        if len(ids) >= self._llm.max_length:
            self._display.error(
                f"the conversation has {len(ids)} tokens, but the model holds "
                f"{self._llm.max_length}; /reset starts over"
            )
            return
        answer = show_answer(
            self._display,
            self._llm,
            ids,
            self._params,
            stream=self._stream,
            full_statistics=self._full_statistics,
        )
        if answer.result is not None:
            self._last = answer.result
        elif not answer.text:  # stopped before the first text: drop the turn
            return
        self._messages += [turn, {"role": "assistant", "content": answer.text}]

    def _help(self, argument: str) -> None:
        for name, text in _COMMANDS.items():
            self._display.note(f"  {name:<14}{text}")
        self._display.note(_KEYS)

    def _reset(self, argument: str) -> None:
        self._messages = list(self._opening)
        self._display.note("the conversation is forgotten")

    def _stats(self, argument: str) -> None:
        if self._last is None:
            self._display.note("there is no answer yet")
        else:
            self._display.summary(self._last, full=True)

    def _save(self, argument: str) -> None:
        path = Path(argument or time.strftime("chat-%Y%m%d-%H%M%S.json")).expanduser()
        conversation = {"model": self._llm.directory.name, "messages": self._messages}
        text = json.dumps(conversation, ensure_ascii=False, indent=2) + "\n"
        try:
            again = path.resolve() in self._saved  # overwrites only files of this chat
            with open(path, "w" if again else "x", encoding="utf-8", errors="replace") as file:
                file.write(text)
        except FileExistsError:
            self._display.error(f"{path} exists, expected a new file")
        except OSError as error:
            self._display.error(error)
        else:
            self._saved.add(path.resolve())
            self._display.note(f"saved {len(self._messages)} messages: {path}")
