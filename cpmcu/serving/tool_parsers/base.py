"""Base of tool parsers: reads a text that arrives in pieces, and collects content and calls.

A parser is a generator. It calls the methods below with `yield from`. If the text so far does not
decide a method's result, the method waits for more text. A parser is therefore written as if it had
the whole text, and its result does not depend on how the text is divided.
"""

from __future__ import annotations

import abc
import dataclasses
import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import ClassVar, TypeVar

from cpmcu.serving.chat.tags import held_back
from cpmcu.serving.http import strict_json
from cpmcu.serving.tool_parsers.calls import CallDelta, Found, ToolCall, Tools, new_id

T = TypeVar("T")
Steps = Generator[None, None, T]  # yields where it needs more text

MAX_NAME = 256  # maximum number of characters of a name of a function or parameter
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_IN_STRING = re.compile(r"(?:[^\"\\]+|\\.)*", re.DOTALL)


@dataclasses.dataclass(frozen=True, slots=True)
class End:
    """A tag that ends a value if one of `followers` comes next, perhaps after white space."""

    tag: str
    followers: tuple[str, ...]
    consumed: bool = True  # False: the next method reads the tag


class ToolParser(abc.ABC):
    """Extracts calls from the text of one answer. `tools`: the tools of the request.

    Text that is not a call is content, unchanged, but white space after a call is removed.
    """

    first_tag: ClassVar[str] = ""  # the tag with which a call begins; empty: calls have no such tag

    def __init__(self, tools: Tools) -> None:
        self.tools = tools
        self.num_calls = 0  # number of calls that have begun
        self._text = ""  # text that is still needed
        self._at = 0  # place in `_text` where the next method reads
        self._mark: int | None = None  # place in `_text` from which the text is kept; None: nowhere
        self._final = False
        self._running = self._run()
        self._content: list[str] = []
        self._deltas: list[CallDelta] = []
        self._calls: list[ToolCall] = []
        # (name, id, pieces of the arguments) of the open call.
        self._open: tuple[str, str, list[str]] | None = None
        self._after_call = False  # True: only white space followed the last call

    @abc.abstractmethod
    def parse(self) -> Steps[None]:
        """Parses an answer. The text after its return is content."""

    def begins(self) -> tuple[str, ...]:
        """The texts with which a call begins. Without any, a request's grammar excludes calls."""
        return (self.first_tag,) if self.first_tag else ()

    @property
    def ends_with_call(self) -> bool:
        """True if at most white space followed the last call."""
        return self._after_call

    def push(self, text: str, *, final: bool = False) -> Found:
        """Returns what `text` adds. If `final`, the text held back is returned too."""
        used = self._at if self._mark is None else self._mark
        self._text = self._text[used:] + text
        self._at -= used
        self._mark = None if self._mark is None else 0
        self._final = final
        next(self._running, None)
        found = Found("".join(self._content), _merged(self._deltas), tuple(self._calls))
        self._content, self._deltas, self._calls = [], [], []
        return found

    def _run(self) -> Steps[None]:
        yield from self.parse()
        self.end_call()
        while True:
            self.content(self._text[self._at :])
            self._at = len(self._text)
            if not (yield from self.more()):
                return

    # ---- results

    def content(self, text: str) -> None:
        """Adds text that is not part of a call."""
        if self._after_call:
            text = text.lstrip()
        if text:
            self._after_call = False
            self._content.append(text)

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """Begins a call."""
        call_id = call_id or self.new_id()
        self._deltas.append(CallDelta(self.num_calls, "", call_id, name))
        self._open = (name, call_id, [])
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Adds to the arguments of the open call."""
        if text and self._open is not None:
            self._open[2].append(text)
            self._deltas.append(CallDelta(self.num_calls - 1, text))

    def end_call(self) -> None:
        """Ends the open call, if any."""
        if self._open is not None:
            name, call_id, arguments = self._open
            self._calls.append(ToolCall(name, "".join(arguments), call_id))
            self._open, self._after_call = None, True

    def new_id(self) -> str:
        """Returns the id of a new call."""
        return new_id()

    # ---- reading

    def more(self) -> Steps[bool]:
        """Waits for more text. False: there is none."""
        if self._final:
            return False
        yield
        return True

    def mark(self) -> None:
        """Marks the place to which `rewind` returns."""
        self._mark = self._at

    def rewind(self) -> None:
        """Returns to the mark and removes it."""
        if self._mark is not None:
            self._at, self._mark = self._mark, None

    def unmark(self) -> None:
        """Removes the mark."""
        self._mark = None

    def peek(self) -> Steps[str]:
        """Returns the next character but does not consume it; "" at the end."""
        while self._at == len(self._text):
            if not (yield from self.more()):
                return ""
        return self._text[self._at]

    def space(self) -> Steps[str]:
        """Reads white space."""
        found = ""
        while (yield from self.peek()).isspace():
            found += self._text[self._at]
            self._at += 1
        return found

    def literal(self, text: str) -> Steps[bool]:
        """Reads `text` if it comes next."""
        while True:
            have = self._text[self._at : self._at + len(text)]
            if have == text:
                self._at += len(text)
                return True
            if not text.startswith(have) or not (yield from self.more()):
                return False

    def name_until(self, end: str) -> Steps[str | None]:
        """Reads a name up to the character `end`, and `end`. None: no name is there."""
        while True:
            head = self._text[self._at : self._at + MAX_NAME + 1]
            name, found, _ = head.partition(end)
            if "\n" in name or "<" in name or (found and not name):
                return None
            if found:
                self._at += len(name) + 1
                return name
            if len(head) > MAX_NAME or not (yield from self.more()):
                return None

    def json_string(self) -> Steps[str | None]:
        """Reads a short JSON string. None: none is there."""
        while True:
            head = self._text[self._at : self._at + MAX_NAME]
            if match := _STRING.match(head):
                self._at += match.end()
                try:
                    return str(strict_json.read(match[0]))
                except ValueError:
                    return None
            if head[:1] not in ("", '"') or len(head) == MAX_NAME:
                return None
            if not (yield from self.more()):
                return None

    def json_rest(
        self, into: Callable[[str], None], stop: str | None, *, depth: int = 0
    ) -> Steps[bool]:
        """Passes JSON to `into`, up to the bracket that closes the outermost one.

        `depth`: brackets that are open already. Returns False if the text ends first, or at `stop`
        outside a string. `stop` is left for the next method.
        """
        plain = re.compile(f'[^"{{}}\\[\\]{re.escape(stop[0]) if stop else ""}]*')
        in_string = False
        while True:
            text, at = self._text, self._at
            while at < len(text):
                if in_string:
                    at = _end_of(_IN_STRING, text, at)
                    if at == len(text) or text[at] == "\\":  # half an escape
                        break
                    in_string, at = False, at + 1
                    continue
                at = _end_of(plain, text, at)
                sign = text[at : at + 1]
                if stop is not None and sign == stop[0]:
                    have = text[at : at + len(stop)]
                    if have == stop:
                        into(text[self._at : at])
                        self._at = at
                        return False
                    if stop.startswith(have) and not self._final:
                        break
                in_string = sign == '"'
                depth += (sign in ("{", "[")) - (sign in ("}", "]"))
                at += len(sign)
                if sign in ("}", "]") and depth <= 0:
                    into(text[self._at : at])
                    self._at = at
                    return True
            at = len(text) if self._final else at
            into(text[self._at : at])
            self._at = at
            if not (yield from self.more()):
                return False

    def content_until(self, *tags: str) -> Steps[str | None]:
        """Reads content up to the first of `tags`. Returns the tag; None at the end."""
        while True:
            places = [(self._text.find(tag, self._at), tag) for tag in tags]
            place, tag = min((p for p in places if p[0] >= 0), default=(-1, ""))
            if tag:
                self.content(self._text[self._at : place])
                self._at = place + len(tag)
                return tag
            rest = self._text[self._at :]
            keep = 0 if self._final else max(held_back(rest, tag) for tag in tags)
            self.content(rest[: len(rest) - keep])
            self._at = len(self._text) - keep
            if not (yield from self.more()):
                return None

    def text_until(self, end: str) -> Steps[tuple[str, str]]:
        """Reads up to the tag `end`. Returns (text, tag); without a tag the answer ended."""
        pieces: list[str] = []
        while True:
            rest = self._text[self._at :]
            before, tag, _ = rest.partition(end)
            keep = 0 if tag or self._final else held_back(rest, end)
            pieces.append(before[: len(before) - keep])
            self._at += len(before) - keep + len(tag)
            if tag or not (yield from self.more()):
                return "".join(pieces), tag

    def value_until(
        self, ends: Sequence[End], into: Callable[[str], None], *, newline: bool = False
    ) -> Steps[bool]:
        """Reads a value up to one of `ends` into `into`. False: the text ended.

        `newline`: a newline before the end tag is not part of the value.
        """

        def pass_on(place: int, *, ends_here: bool) -> None:
            """Gives `into` the text up to `place`, without a newline that may precede the tag."""
            held = newline and place > self._at and self._text[place - 1] == "\n"
            into(self._text[self._at : place - held])
            self._at = place if ends_here else place - held

        while True:
            places = [(self._text.find(end.tag, self._at), end) for end in ends]
            place, end = min((p for p in places if p[0] >= 0), default=(-1, None), key=_place)
            if end is None:
                if self._final:
                    into(self._text[self._at :])
                    self._at = len(self._text)
                    return False
                rest = self._text[self._at :]
                keep = max(held_back(rest, end.tag) for end in ends)
                pass_on(len(self._text) - keep, ends_here=False)
                yield
                continue
            after = place + len(end.tag)
            decided = self._follows(end.followers, after)
            if decided:
                pass_on(place, ends_here=True)
                self._at = after if end.consumed else place
                return True
            if decided is None:
                pass_on(place, ends_here=False)
                yield
                continue
            into(self._text[self._at : after])
            self._at = after

    def _follows(self, followers: Sequence[str], at: int) -> bool | None:
        """True if one of `followers` or the end comes next after white space; None: not known."""
        while at < len(self._text) and self._text[at].isspace():
            at += 1
        if at == len(self._text):
            return True if self._final else None
        if any(self._text.startswith(follower, at) for follower in followers):
            return True
        rest = self._text[at : at + max(map(len, followers))]
        if not self._final and any(follower.startswith(rest) for follower in followers):
            return None
        return False


def quoted(text: str) -> str:
    """Returns the letters of `text` as they stand between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return at if match is None else match.end()


def _place(found: tuple[int, End | None]) -> int:
    return found[0]


def _merged(deltas: Sequence[CallDelta]) -> tuple[CallDelta, ...]:
    """Joins neighbouring deltas of the same call."""
    merged: list[CallDelta] = []
    for delta in deltas:
        if merged and merged[-1].index == delta.index:
            joined = merged[-1].arguments + delta.arguments
            merged[-1] = dataclasses.replace(merged[-1], arguments=joined)
        else:
            merged.append(delta)
    return tuple(merged)
