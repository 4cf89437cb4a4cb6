"""mistral: calls after [TOOL_CALLS], in the notation of the tokenizer's version.

* up to version 10: [TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}, ...]
* from version 11 on: [TOOL_CALLS]NAME[ARGS]{...} for each call, perhaps [CALL_ID]ID before [ARGS]
"""

from __future__ import annotations

import re
import secrets
import string

from cpmcu.serving.tool_parsers.base import MAX_NAME, Steps
from cpmcu.serving.tool_parsers.json_call import JsonCallParser
from cpmcu.serving.tool_parsers.registry import register_tool_parser

_BEGIN, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_WORD = re.compile(r"[\w.:/-]+")
_ID_LENGTH = 9  # letters and digits of an id; the templates refuse other ids


@register_tool_parser("mistral", signs=(_BEGIN,), tags=(_BEGIN, _ID, _ARGUMENTS))
class MistralParser(JsonCallParser):
    """Parses both notations."""

    bare = True
    first_tag = _BEGIN

    def new_id(self) -> str:
        """Returns an id that Mistral's templates accept."""
        signs = string.ascii_letters + string.digits
        return "".join(secrets.choice(signs) for _ in range(_ID_LENGTH))

    def parse(self) -> Steps[None]:
        """Parses an answer."""
        while (yield from self.content_until(_BEGIN)) is not None:
            gap = yield from self.space()
            if (yield from self.literal("[")):
                yield from self.json_list(f"{_BEGIN}{gap}[", _BEGIN)
            elif (yield from self.peek()) == "{":
                text = yield from self.json_call(_BEGIN)
                self.content("" if text is None else _BEGIN + gap + text)
            else:
                yield from self._named_call(_BEGIN + gap)

    def _named_call(self, opening: str) -> Steps[None]:
        """Parses a call whose name comes before its arguments."""
        self.mark()
        name = yield from self._word()
        call_id = None
        if (yield from self.literal(_ID)):
            call_id = yield from self._word()
        yield from self.literal(_ARGUMENTS)
        yield from self.space()
        if not name or (yield from self.peek()) != "{":
            self.rewind()
            self.content(opening)
            return
        self.unmark()
        self.begin_call(name, call_id)
        yield from self.json_rest(self.arguments, _BEGIN)
        self.end_call()

    def _word(self) -> Steps[str | None]:
        """Reads a name or an id. None: there is none, or it has no end."""
        while True:
            head = self._text[self._at : self._at + MAX_NAME]
            match = _WORD.match(head)
            if match is not None and match.end() < len(head):
                self._at += match.end()
                return match[0]
            if (head and match is None) or len(head) == MAX_NAME:
                return None
            if not (yield from self.more()):
                return None
