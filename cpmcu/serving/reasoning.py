"""Tells what a model thinks from what it answers: text between <think> and </think>."""

from __future__ import annotations

# (begin, end) pairs that chat templates of thinking models show.
_TAGS = (("<think>", "</think>"), ("<|thought_start|>", "<|thought_end|>"))


def held_back(text: str, tag: str) -> int:
    """Letters at the end of `text` that may become `tag`: the longest end that begins it."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0


def tags_of(template: str | None, parser: str) -> tuple[str, str] | None:
    """The tags of a model with this chat template; None if it does not think.

    `parser`: "think" for <think> whatever the template says, "none", or "auto".
    """
    if parser == "none":
        return None
    if parser == "think":
        return _TAGS[0]
    return next((tags for tags in _TAGS if template and tags[1] in template), None)


def is_open(prompt: str, tags: tuple[str, str], *, continues: bool = False) -> bool:
    """Does a prompt end with a begin tag, as templates write it for models that always think?

    `continues`: the answer goes on with the prompt's last message, which may have begun to think.
    """
    opened, closed = prompt.rfind(tags[0]), prompt.rfind(tags[1])
    return opened > closed and (continues or not prompt[opened + len(tags[0]) :].strip())


class ReasoningSplitter:
    """Divides a stream of text into (reasoning, content).

    Reasoning is at the beginning of an answer or nowhere; `inside`: the prompt began it (see
    `is_open`). White space around the tags belongs to them.
    """

    def __init__(self, tags: tuple[str, str], *, inside: bool = False) -> None:
        self._begin, self._end = tags
        self._state = "reasoning" if inside else "start"
        self._trim = inside  # white space at the start of a part is left out
        self._held = ""

    def push(self, text: str, *, final: bool = False) -> tuple[str, str]:
        """(reasoning, content) that `text` adds; `final` gives out what was held back."""
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
