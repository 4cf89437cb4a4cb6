"""harmony (gpt-oss): a message to a function, in channel `commentary`.

    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

The reasoning parser `harmony` leaves such messages in the content.
"""

from __future__ import annotations

from cpmcu.serving.tool_parsers.base import MAX_NAME, Steps, ToolParser
from cpmcu.serving.tool_parsers.registry import register_tool_parser

_BEGIN, _MESSAGE, _CALL = "<|channel|>commentary to=", "<|message|>", "<|call|>"


@register_tool_parser(
    "harmony",
    signs=("<|channel|>", "<|constrain|>", _MESSAGE, _CALL),
    tags=("<|channel|>", "<|constrain|>", _MESSAGE, _CALL),
)
class HarmonyParser(ToolParser):
    """Parses messages to functions."""

    def parse(self) -> Steps[None]:
        """Parses an answer."""
        while (yield from self.content_until(_BEGIN)) is not None:
            recipient = yield from self._recipient()
            if recipient is None:
                self.content(_BEGIN)
                continue
            self.begin_call(recipient.removeprefix("functions."))
            yield from self.space()
            if (yield from self.peek()) == "{":
                yield from self.json_rest(self.arguments, _CALL)
            yield from self.space()
            yield from self.literal(_CALL)
            self.end_call()

    def _recipient(self) -> Steps[str | None]:
        """Reads the rest of a header. None: it has no end."""
        while True:
            head = self._text[self._at : self._at + MAX_NAME]
            header, found, _ = head.partition(_MESSAGE)
            if found:
                self._at += len(header) + len(_MESSAGE)
                return header.partition("<")[0].split()[0] if header.split() else None
            if len(head) == MAX_NAME or not (yield from self.more()):
                return None
