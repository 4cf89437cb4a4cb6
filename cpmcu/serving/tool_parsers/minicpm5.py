"""minicpm5 (MiniCPM5): an XML element for each call and each parameter.

    <function name="NAME"><param name="KEY">VALUE</param></function>

A value that has <, & or a newline stands in <![CDATA[...]]>. Other values than texts are written as
Python writes them.
"""

from __future__ import annotations

from xml.sax.saxutils import unescape

from cpmcu.serving.tool_parsers.base import End, Steps
from cpmcu.serving.tool_parsers.registry import register_tool_parser
from cpmcu.serving.tool_parsers.xml_call import XmlCallParser
from cpmcu.serving.tool_parsers.xml_values import to_json

_FUNCTION, _FUNCTION_END = "<function", "</function>"
_PARAMETER, _PARAMETER_END = "<param", "</param>"
_CDATA, _CDATA_END = "<![CDATA[", "]]>"
_NEXT = (_PARAMETER, _FUNCTION_END)
_ENDS = (End(_PARAMETER_END, _NEXT),)
_CDATA_ENDS = (End(_CDATA_END + _PARAMETER_END, _NEXT),)
_ENTITIES = {"&quot;": '"', "&apos;": "'"}


@register_tool_parser(
    "minicpm5",
    signs=(f"{_FUNCTION} name=", f"{_PARAMETER} name="),
    tags=(_FUNCTION, _FUNCTION_END, _PARAMETER, _PARAMETER_END),
)
class MiniCpm5Parser(XmlCallParser):
    """Parses such calls."""

    first_tag = _FUNCTION

    def parse(self) -> Steps[None]:
        """Parses an answer."""
        while (yield from self.content_until(_FUNCTION)) is not None:
            self.mark()
            name = yield from self._attribute()
            if name is None:
                self.rewind()
                self.content(_FUNCTION)
            else:
                self.unmark()
                yield from self.call(name)

    def parameter_name(self) -> Steps[str | None]:
        """Reads <param name="KEY">."""
        self.mark()
        name = None
        if (yield from self.literal(_PARAMETER)):
            name = yield from self._attribute()
        if name is None:
            self.rewind()
        self.unmark()
        return name

    def parameter_value(self, types: set[str]) -> Steps[bool]:
        """Reads a value, in CDATA or not, and its end tag."""
        if (yield from self.literal(_CDATA)):
            return (yield from self.value(types, _CDATA_ENDS))
        pieces: list[str] = []
        whole = yield from self.value_until(_ENDS, pieces.append)
        text = unescape("".join(pieces), _ENTITIES)
        self.arguments(to_json(text, types) if whole else text)
        return whole

    def end_tag(self) -> Steps[bool]:
        """Reads </function>."""
        return (yield from self.literal(_FUNCTION_END))

    def _attribute(self) -> Steps[str | None]:
        """Reads ` name="NAME">`. None: something else comes next."""
        yield from self.space()
        if not (yield from self.literal("name=")):
            return None
        quote = yield from self.peek()
        if quote not in ("'", '"') or not (yield from self.literal(quote)):
            return None
        name = yield from self.name_until(quote)
        yield from self.space()
        return name if (yield from self.literal(">")) else None
