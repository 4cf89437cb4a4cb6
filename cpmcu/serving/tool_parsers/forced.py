"""Parses text that a grammar constrained to tool calls (cpmcu/serving/grammar.py)."""

from __future__ import annotations

from cpmcu.serving.tool_parsers.base import Steps
from cpmcu.serving.tool_parsers.json_call import JsonCallParser


class ForcedCalls(JsonCallParser):
    """The text is the arguments of `function`, or, if `function` is None, a JSON list of calls."""

    def __init__(self, function: str | None) -> None:
        super().__init__({})
        self._function = function

    def parse(self) -> Steps[None]:
        """Parses an answer."""
        if self._function is None:
            yield from self._list()
        elif (yield from self.peek()):  # else the answer was cut off within its reasoning
            self.begin_call(self._function)
            yield from self.json_rest(self.arguments, None)
            self.end_call()

    def _list(self) -> Steps[None]:
        gap = yield from self.space()
        if (yield from self.literal("[")):
            yield from self.json_list(gap + "[", None)
        else:
            self.content(gap)
