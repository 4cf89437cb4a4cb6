"""qwen3_coder (Qwen3-Coder, Qwen3.5 and later): an element for each parameter.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

One newline after the begin tag and one before the end tag are not part of a value.
"""

from __future__ import annotations

from cpmcu.serving.tool_parsers.base import End, Steps
from cpmcu.serving.tool_parsers.registry import register_tool_parser
from cpmcu.serving.tool_parsers.xml_call import XmlCallParser

_BEGIN, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"

# A value may contain an end tag. It ends where the text after the tag continues the call. Some
# models leave out the end tag of a parameter: the next begin tag ends its value, too.
_ENDS = (
    End(_PARAMETER_END, (_PARAMETER, _FUNCTION_END, _END)),
    End(_FUNCTION_END, (_END,), consumed=False),
    End(_PARAMETER, ("",), consumed=False),
)


@register_tool_parser("qwen3_coder", signs=(_BEGIN, _FUNCTION), tags=(_BEGIN, _END))
class Qwen3CoderParser(XmlCallParser):
    """Parses such calls. If <tool_call> is left out, only names of tools are calls."""

    first_tag = _BEGIN

    def parse(self) -> Steps[None]:
        """Parses an answer."""
        while (tag := (yield from self.content_until(_BEGIN, _FUNCTION))) is not None:
            self.mark()
            opening, wrapped = tag, tag == _BEGIN
            if wrapped:
                yield from self.space()
                if not (yield from self.literal(_FUNCTION)):
                    self.rewind()
                    self.content(opening)
                    continue
            name = yield from self.name_until(">")
            if name is None or not (wrapped or name in self.tools):
                self.rewind()
                self.content(opening)
                continue
            self.unmark()
            yield from self.call(name)
            yield from self.space()
            yield from self.literal(_END)

    def parameter_name(self) -> Steps[str | None]:
        """Reads <parameter=KEY> and a newline."""
        self.mark()
        if (yield from self.literal(_PARAMETER)):
            name = yield from self.name_until(">")
            if name is not None:
                self.unmark()
                yield from self.literal("\n")
                return name
        self.rewind()
        return None

    def parameter_value(self, types: set[str]) -> Steps[bool]:
        """Reads a value and its end tag."""
        return (yield from self.value(types, _ENDS, newline=True))

    def end_tag(self) -> Steps[bool]:
        """Reads </function>."""
        return (yield from self.literal(_FUNCTION_END))
