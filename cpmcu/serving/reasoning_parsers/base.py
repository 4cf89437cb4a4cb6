"""Base of reasoning parsers: separates the text between two tags from content."""

from __future__ import annotations

from typing import ClassVar

from cpmcu.serving.chat.tags import held_back


class ReasoningParser:
    """Splits the text of one answer into (reasoning, content).

    Reasoning is recognised only at the beginning of an answer. `inside`: the prompt ends within
    reasoning (see `is_open`). White space around the tags is removed. A model may repeat the
    begin tag; the repeated ones are removed, too.
    """

    begin: ClassVar[str]
    end: ClassVar[str]
    # If the chat template contains it, "auto" chooses this parser. Empty: the end tag is the sign.
    sign: ClassVar[str] = ""
    tags: ClassVar[tuple[str, ...]] = ()  # further tags that may be special tokens

    def __init__(self, *, inside: bool = False) -> None:
        self._state = "reasoning" if inside else "start"
        self._trim = inside  # True: remove white space at the start of the next part
        self._held = ""

    @property
    def inside(self) -> bool:
        """True if the text so far ends within reasoning."""
        return self._state == "reasoning"

    @classmethod
    def is_open(cls, prompt: str, *, continues: bool = False) -> bool:
        """True if the prompt ends within reasoning: no end tag and no text follows the begin tag.

        If `continues`, the answer continues the last message, so text may follow the begin tag.
        """
        opened, closed = prompt.rfind(cls.begin), prompt.rfind(cls.end)
        return opened > closed and (continues or not prompt[opened + len(cls.begin) :].strip())

    def push(self, text: str, *, final: bool = False) -> tuple[str, str]:
        """Returns the (reasoning, content) that `text` adds (if `final`, all)."""
        if self._state == "content":
            return "", self._content(text)
        text = self._held + text
        self._held = ""
        if self._state == "start":
            stripped = text.lstrip()
            if stripped.startswith(self.begin):
                self._state, self._trim = "reasoning", True
                text = stripped[len(self.begin) :]
            elif self.begin.startswith(stripped) and not final:
                self._held = text
                return "", ""
            else:
                self._state = "content"
                return "", text
        return self._reasoning(text, final)

    def _reasoning(self, text: str, final: bool) -> tuple[str, str]:
        if self._trim:
            text = text.lstrip()
            while text.startswith(self.begin):
                text = text[len(self.begin) :].lstrip()
            if self.begin.startswith(text) and not final:  # the start of another one, or nothing
                self._held = text
                return "", ""
            self._trim = False
        thought, tag, answer = text.partition(self.end)
        if tag:
            self._state, self._trim = "content", True
            return thought.rstrip(), self._content(answer)
        if final:
            return text.rstrip(), ""
        keep = held_back(text, self.end)
        keep += len(text[: len(text) - keep]) - len(text[: len(text) - keep].rstrip())
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], ""

    def _content(self, text: str) -> str:
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        return text
