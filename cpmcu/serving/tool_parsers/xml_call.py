"""Parses one call in an XML notation, and writes its arguments as JSON as they come."""

from __future__ import annotations

from collections.abc import Sequence

from cpmcu.serving.http import strict_json
from cpmcu.serving.tool_parsers.base import End, Steps, ToolParser, quoted
from cpmcu.serving.tool_parsers.xml_values import to_json, types_of


class XmlCallParser(ToolParser):
    """Base of the parsers whose notation has an element for each parameter."""

    def call(self, function: str) -> Steps[None]:
        """Reads the parameters of `function` and its end tag."""
        self.begin_call(function)
        num_parameters = 0
        while True:
            yield from self.space()
            name = yield from self.parameter_name()
            if name is None:
                break
            self.arguments(f"{', ' if num_parameters else '{'}{strict_json.write(name)}: ")
            num_parameters += 1
            if not (yield from self.parameter_value(types_of(self.tools, function, name))):
                break  # the arguments stay incomplete, like the output
        whole = yield from self.end_tag()
        if whole or (yield from self.peek()):  # a call that ends with other text is complete
            self.arguments("}" if num_parameters else "{}")
        self.end_call()

    def parameter_name(self) -> Steps[str | None]:
        """Reads the begin tag of a parameter. None: none comes next, and nothing was read."""
        raise NotImplementedError

    def parameter_value(self, types: set[str]) -> Steps[bool]:
        """Reads a value and its end tag. False: the text ended before."""
        raise NotImplementedError

    def end_tag(self) -> Steps[bool]:
        """Reads the end tag of a call, if it comes next."""
        raise NotImplementedError

    def value(self, types: set[str], ends: Sequence[End], *, newline: bool = False) -> Steps[bool]:
        """Reads a value up to one of `ends`, and writes it. A string is passed on as it comes."""
        if types == {"string"}:
            self.arguments('"')
            whole = yield from self.value_until(
                ends, lambda text: self.arguments(quoted(text)), newline=newline
            )
            self.arguments('"' if whole else "")
            return whole
        pieces: list[str] = []
        whole = yield from self.value_until(ends, pieces.append, newline=newline)
        if whole:
            self.arguments(to_json("".join(pieces), types))
        else:
            self.arguments("".join(pieces))
        return whole
