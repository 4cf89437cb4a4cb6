"""gemma4 (Gemma 4): a call between tags. Keys have no quotes, texts have quotes of one token.

<|tool_call>call:NAME{city:<|"|>Paris<|"|>,days:3,when:[1,true],more:{a:null}}<tool_call|>
"""

from __future__ import annotations

from cpmcu.serving.http import strict_json
from cpmcu.serving.tool_parsers.base import MAX_NAME, Steps, ToolParser
from cpmcu.serving.tool_parsers.calls import Tools
from cpmcu.serving.tool_parsers.registry import register_tool_parser
from cpmcu.serving.tool_parsers.xml_values import to_json, types_of

_BEGIN, _END, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_MAX_DEPTH = 64  # maximum depth of values within values


@register_tool_parser("gemma4", signs=(_BEGIN, "call:"), tags=(_BEGIN, _END, _QUOTE))
class Gemma4Parser(ToolParser):
    """Parses such calls. A call is returned once it is complete."""

    first_tag = _BEGIN

    def parse(self) -> Steps[None]:
        """Parses an answer."""
        while (yield from self.content_until(_BEGIN)) is not None:
            body, end = yield from self.text_until(_END)
            try:
                name, arguments = _Reader(body, self.tools).call()
            except ValueError:
                self.content(_BEGIN + body + end)
                continue
            self.begin_call(name)
            self.arguments(arguments)
            self.end_call()


class _Reader:
    """Reads one call. All methods raise ValueError if the text is malformed."""

    def __init__(self, text: str, tools: Tools) -> None:
        self._text, self._at, self._tools = text, 0, tools

    def call(self) -> tuple[str, str]:
        """Returns the name and the JSON of the arguments."""
        name = self._until("{").strip().removeprefix("call:").strip()
        if not 0 < len(name) <= MAX_NAME:
            raise ValueError("the call has no name")
        self._at -= 1
        arguments = self._object(0, name)
        if self._text[self._at :].strip():
            raise ValueError("text follows the arguments")
        return name, arguments

    def _object(self, depth: int, function: str | None = None) -> str:
        """Reads an object and returns JSON. `function`: it holds the arguments of this function."""
        parts: list[str] = []
        self._at += 1
        while not self._closes("}", first=not parts):
            key = self._quoted() if self._sees(_QUOTE) else self._until(":", back=True).strip()
            if not self._sees(":"):
                raise ValueError("a key has no value")
            self._at += 1
            types = types_of(self._tools, function, key) if function else set()
            parts.append(f"{strict_json.write(key)}: {self._value(depth + 1, types)}")
        return "{" + ", ".join(parts) + "}"

    def _array(self, depth: int) -> str:
        parts: list[str] = []
        self._at += 1
        while not self._closes("]", first=not parts):
            parts.append(self._value(depth + 1, set()))
        return "[" + ", ".join(parts) + "]"

    def _value(self, depth: int, types: set[str]) -> str:
        if depth > _MAX_DEPTH:
            raise ValueError("values are too deep within others")
        if self._sees(_QUOTE):
            return strict_json.write(self._quoted())
        if self._sees("{"):
            return self._object(depth)
        if self._sees("["):
            return self._array(depth)
        ends = [place for sign in ",}]" if (place := self._text.find(sign, self._at)) >= 0]
        bare = self._text[self._at : min(ends, default=self._at)].strip()
        if not bare:
            raise ValueError("a value is missing")
        self._at = min(ends)
        return to_json(bare, types)

    def _closes(self, bracket: str, *, first: bool) -> bool:
        """Reads the bracket, or the comma before the next element."""
        if self._sees(bracket):
            self._at += 1
            return True
        if not first:
            if not self._sees(","):
                raise ValueError("a comma is missing")
            self._at += 1
        return False

    def _sees(self, sign: str) -> bool:
        """Skips white space. Returns whether `sign` comes next."""
        self._at += len(self._text[self._at :]) - len(self._text[self._at :].lstrip())
        return self._text.startswith(sign, self._at)

    def _quoted(self) -> str:
        self._at += len(_QUOTE)
        return self._until(_QUOTE)

    def _until(self, sign: str, *, back: bool = False) -> str:
        """Reads up to and including `sign`. With `back`, `sign` is left unread."""
        place = self._text.find(sign, self._at)
        if place < 0:
            raise ValueError(f"{sign} is missing")
        text = self._text[self._at : place]
        self._at = place + (0 if back else len(sign))
        return text
