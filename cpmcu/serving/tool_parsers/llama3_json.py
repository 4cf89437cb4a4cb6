"""llama3_json (Llama 3.1 and later): the answer is {"name": ..., "parameters": {...}}.

Several such objects have semicolons between them. <|python_tag|> may come first.
"""

from __future__ import annotations

from cpmcu.serving.http import strict_json
from cpmcu.serving.tool_parsers.base import Steps
from cpmcu.serving.tool_parsers.json_call import JsonCallParser
from cpmcu.serving.tool_parsers.registry import register_tool_parser

_LEAD = "<|python_tag|>"
_ENDS = ("<|eom_id|>", "<|eot_id|>")


@register_tool_parser("llama3_json", signs=('"parameters": dictionary',), tags=(_LEAD,))
class Llama3JsonParser(JsonCallParser):
    """Parses an answer that begins with a call. Without tags, only names of tools are calls."""

    known_only = True

    def begins(self) -> tuple[str, ...]:
        """The first member of each call: text under a grammar may also begin with a bracket."""
        return tuple(f'{{"name": {strict_json.write(name)}, ' for name in self.tools)

    def parse(self) -> Steps[None]:
        """Parses an answer."""
        self.mark()
        yield from self.space()
        yield from self.literal(_LEAD)
        yield from self.space()
        lead = self._text[self._mark or 0 : self._at]
        if (yield from self.peek()) != "{":
            self.rewind()
            return
        self.unmark()
        while True:
            text = yield from self.json_call(None)
            if text is not None:
                self.content(lead + text)
                return
            yield from self.space()
            self.mark()
            for end in _ENDS:
                if (yield from self.literal(end)):
                    self.unmark()
                    return
            yield from self.literal(";")
            yield from self.space()
            lead = self._text[self._mark or 0 : self._at]
            if (yield from self.peek()) != "{":
                self.rewind()
                return
            self.unmark()
