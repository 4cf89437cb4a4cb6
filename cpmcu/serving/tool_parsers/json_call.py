"""Parses one call that is a JSON object: {"name": NAME, "arguments": {...}}."""

from __future__ import annotations

from typing import Any

from cpmcu.serving.http import strict_json
from cpmcu.serving.tool_parsers.base import Steps, ToolParser
from cpmcu.serving.tool_parsers.calls import ToolCall

_KEYS = ("arguments", "parameters")


class JsonCallParser(ToolParser):
    """Base of the parsers whose notation has such objects."""

    bare = False  # True: an object without arguments is a call
    known_only = False  # True: an object that names no tool of the request is not a call

    def json_call(self, stop: str | None) -> Steps[str | None]:
        """Reads an object. Returns None if it is a call, else its text.

        If the name comes before an object of arguments, the arguments are passed on as they come,
        letter for letter. In any other order the call is complete before it begins. `stop` is a tag
        that ends an object with missing brackets.
        """
        self.mark()
        name = yield from self._head()
        if name is not None and self._is_tool(name):
            self.unmark()
            self.begin_call(name)
            whole = yield from self.json_rest(self.arguments, stop)
            self.end_call()
            if whole:  # further members, such as an id
                yield from self.json_rest(_drop, stop, depth=1)
            yield from self._surplus()
            return None
        self.rewind()
        pieces: list[str] = []
        if (yield from self.peek()) == "{":
            yield from self.json_rest(pieces.append, stop)
        text = "".join(pieces)
        call = self._call(text)
        if call is None:
            return text
        self.begin_call(call.name)
        self.arguments(call.arguments)
        self.end_call()
        yield from self._surplus()
        return None

    def json_list(self, opening: str, stop: str | None) -> Steps[bool]:
        """Reads objects with commas between them, and a bracket after them.

        Returns False at an object that is not a call: its text becomes content. `opening` is the
        text before the first object, and becomes content with that object.
        """
        while True:
            opening += yield from self.space()
            text = yield from self.json_call(stop)
            if text is not None:
                self.content(opening + text)
                return False
            yield from self.space()
            if not (yield from self.literal(",")):
                yield from self.literal("]")
                return True
            opening = ","

    def _head(self) -> Steps[str | None]:
        """Reads up to the first bracket of the arguments. None: the object has another order."""
        if not (yield from self.literal("{")) or (yield from self.key()) != "name":
            return None
        name = yield from self.json_string()
        yield from self.space()
        if not (yield from self.literal(",")) or (yield from self.key()) not in _KEYS:
            return None
        return name if (yield from self.peek()) == "{" else None

    def _surplus(self) -> Steps[None]:
        """Drops closing brackets that a model wrote too many."""
        while (yield from self.literal("}")):
            pass

    def key(self) -> Steps[str | None]:
        """Reads the key of a member, the colon, and white space around them."""
        yield from self.space()
        key = yield from self.json_string()
        yield from self.space()
        if not (yield from self.literal(":")):
            return None
        yield from self.space()
        return key

    def _is_tool(self, name: str) -> bool:
        return not self.known_only or not self.tools or name in self.tools

    def _call(self, text: str) -> ToolCall | None:
        """Returns the call that a whole object describes, or None."""
        try:
            value = strict_json.read(text)
        except ValueError:
            return None
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        if not self._is_tool(value["name"]):
            return None
        key = next((key for key in _KEYS if key in value), None)
        if key is None and not self.bare:
            return None
        arguments: Any = {} if key is None else value[key]
        try:
            if isinstance(arguments, str):  # a JSON string within the JSON
                arguments = strict_json.read(arguments)
            if arguments is None:
                arguments = {}
            if not isinstance(arguments, dict):
                return None
            return ToolCall(value["name"], strict_json.write(arguments))
        except ValueError:
            return None


def _drop(text: str) -> None:
    """Ignores the text of members that are not part of a call."""
