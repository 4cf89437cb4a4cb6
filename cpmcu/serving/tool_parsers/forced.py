"""Parses text that a grammar constrained to tool calls (cpmcu/serving/request_grammar.py)."""

from __future__ import annotations

from cpmcu.serving.http import strict_json
from cpmcu.serving.tool_parsers.base import Steps
from cpmcu.serving.tool_parsers.calls import Tools
from cpmcu.serving.tool_parsers.json_call import JsonCallParser

_STARTS = '{["-0123456789tfn'  # first characters of a value in JSON


class ForcedCalls(JsonCallParser):
    """The text is the arguments of `function`, or, if `function` is None, a JSON list of calls.

    The name of a call comes before its arguments. A call whose name is known counts, even if the
    text is cut off before its arguments. `tools`: the tools that may be called.
    """

    def __init__(self, function: str | None, tools: Tools) -> None:
        super().__init__(tools)
        self._function = function

    def parse(self) -> Steps[None]:
        """Parses an answer."""
        if self._function is None:
            yield from self._list()
            return
        yield from self.space()
        start = yield from self.peek()
        if not start or start not in _STARTS:  # cut off within its reasoning or a tag of it
            self._skip_rest()
            return
        self.begin_call(self._function)
        yield from self.json_rest(self.arguments, None)
        self.end_call()

    def _list(self) -> Steps[None]:
        opening = yield from self.space()
        if not (yield from self.literal("[")):
            self.content(opening)
            return
        opening += "["
        while True:
            opening += yield from self.space()
            self.mark()
            name = yield from self._name()
            if name is None:
                self.rewind()
                self._cut_off(opening)
                return
            self.unmark()
            self.begin_call(name)
            yield from self._arguments()
            self.end_call()
            yield from self.space()
            if not (yield from self.literal(",")):
                yield from self.literal("]")
                return
            opening = ","

    def _name(self) -> Steps[str | None]:
        """Reads the beginning of a call up to the end of its name. None: there is none."""
        if not (yield from self.literal("{")) or (yield from self.key()) != "name":
            return None
        return (yield from self.json_string())

    def _arguments(self) -> Steps[None]:
        """Reads what follows the name of a call."""
        yield from self.space()
        if not (yield from self.literal(",")) or (yield from self.key()) is None:
            self._skip_rest()
        elif (yield from self.peek()) == "{":
            if (yield from self.json_rest(self.arguments, None)):
                yield from self.literal("}")
        else:  # another value than an object
            pieces: list[str] = []
            whole = yield from self.json_rest(pieces.append, None, depth=1)
            self.arguments("".join(pieces)[: -1 if whole else None])

    def _cut_off(self, opening: str) -> None:
        """Begins the first call if the text so far fits one tool only."""
        rest = self._text[self._at :]
        fitting = [
            name for name in self.tools if f'{{"name":{strict_json.write(name)}'.startswith(rest)
        ]
        if not fitting:
            self.content(opening)
            return
        if len(fitting) == 1 and not self.num_calls:
            self.begin_call(fitting[0])
        self._skip_rest()

    def _skip_rest(self) -> None:
        self._at = len(self._text)
