"""hermes (Hermes, Qwen2.5, Qwen3, Qwen3-Next): JSON in tags.

<tool_call>{"name": ..., "arguments": {...}}</tool_call>
"""

from __future__ import annotations

from cpmcu.serving.tool_parsers.base import Steps
from cpmcu.serving.tool_parsers.json_call import JsonCallParser
from cpmcu.serving.tool_parsers.registry import register_tool_parser

_BEGIN, _END = "<tool_call>", "</tool_call>"


@register_tool_parser("hermes", signs=(_BEGIN,), tags=(_BEGIN, _END))
class HermesParser(JsonCallParser):
    """Parses JSON calls between tags, usually one in each pair of tags."""

    bare = True
    first_tag = _BEGIN

    def parse(self) -> Steps[None]:
        """Parses an answer."""
        while (yield from self.content_until(_BEGIN)) is not None:
            opening = _BEGIN
            while True:
                gap = yield from self.space()
                if (yield from self.literal(_END)):
                    self.content("" if not opening else opening + gap + _END)
                    break
                if (yield from self.literal("[")):  # several calls between two tags
                    if not (yield from self.json_list(f"{opening}{gap}[", _END)):
                        break
                    opening = ""
                    continue
                if (yield from self.peek()) != "{":
                    self.content(opening + gap)
                    break
                text = yield from self.json_call(_END)
                if text is not None:
                    self.content(opening + gap + text)
                    break
                opening = ""
