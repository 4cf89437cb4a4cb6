"""Separates reasoning (text between <think> and </think>) from content."""

from __future__ import annotations

# (begin, end) tags in the chat templates of reasoning models.
_TAGS = (("<think>", "</think>"), ("<|thought_start|>", "<|thought_end|>"))


def held_back(text: str, tag: str) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of `tag`."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0


def tags_of(template: str | None, parser: str) -> tuple[str, str] | None:
    """Returns the reasoning tags of a model with this chat template, or None.

    `parser`: "auto" searches the template, "think" is <think> for any template, "none" is None.
    """
    if parser == "none":
        return None
    if parser == "think":
        return _TAGS[0]
    return next((tags for tags in _TAGS if template and tags[1] in template), None)


def is_open(prompt: str, tags: tuple[str, str], *, continues: bool = False) -> bool:
    """True if the prompt ends within reasoning: no end tag and no text follows the begin tag.

    If `continues`, the answer continues the last message, so text may follow the begin tag.
    """
    opened, closed = prompt.rfind(tags[0]), prompt.rfind(tags[1])
    return opened > closed and (continues or not prompt[opened + len(tags[0]) :].strip())


class ReasoningSplitter:
    """Splits a stream of text into (reasoning, content).

    Reasoning is recognised only at the beginning of an answer. `inside`: the prompt ends within
    reasoning (see `is_open`). White space around the tags is removed.
    """

    def __init__(self, tags: tuple[str, str], *, inside: bool = False) -> None:
        self._begin, self._end = tags
        self._state = "reasoning" if inside else "start"
        self._trim = inside  # remove white space at the start of the next part
        self._held = ""

    def push(self, text: str, *, final: bool = False) -> tuple[str, str]:
        """Returns the (reasoning, content) that `text` adds (if `final`, all)."""
        if self._state == "content":
            return "", self._content(text)
        text = self._held + text
        self._held = ""
        if self._state == "start":
            stripped = text.lstrip()
            if stripped.startswith(self._begin):
                self._state, self._trim = "reasoning", True
                text = stripped[len(self._begin) :]
            elif self._begin.startswith(stripped) and not final:
                self._held = text
                return "", ""
            else:
                self._state = "content"
                return "", text
        return self._reasoning(text, final)

    def _reasoning(self, text: str, final: bool) -> tuple[str, str]:
        if self._trim:
            text = text.lstrip()
            self._trim = not text and not final
        thought, tag, answer = text.partition(self._end)
        if tag:
            self._state, self._trim = "content", True
            return thought.rstrip(), self._content(answer)
        if final:
            return text.rstrip(), ""
        keep = held_back(text, self._end)
        keep += len(text[: len(text) - keep]) - len(text[: len(text) - keep].rstrip())
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], ""

    def _content(self, text: str) -> str:
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        return text
