"""harmony (gpt-oss): an answer is messages in channels.

    <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>content

Channel `commentary` with a recipient, to=functions.NAME, is a call, which tool parser `harmony`
reads. Other messages are content. Format: OpenAI's harmony, as the chat template of gpt-oss writes.
"""

from __future__ import annotations

import re

from cpmcu.serving.chat.tags import held_back
from cpmcu.serving.reasoning_parsers.base import ReasoningParser
from cpmcu.serving.reasoning_parsers.registry import register_reasoning_parser

_MESSAGE, _CALL = "<|message|>", "<|call|>"
_ENDS = ("<|end|>", "<|return|>", _CALL, "<|start|>", "<|channel|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_HEADERS = ("<|start|>", "<|channel|>", "to=")  # texts with which a header begins


@register_reasoning_parser("harmony")
class HarmonyParser(ReasoningParser):
    """Splits messages by their channels. Calls stay in the content, in one notation."""

    begin = f"<|channel|>analysis{_MESSAGE}"
    end = f"<|end|><|start|>assistant<|channel|>final{_MESSAGE}"
    sign = f"<|channel|>final{_MESSAGE}"
    tags = ("<|start|>", "<|channel|>", "<|constrain|>", _MESSAGE, "<|end|>", _CALL, "<|return|>")

    def __init__(self, *, inside: bool = False) -> None:
        super().__init__(inside=inside)
        self._part = "analysis" if inside else "header"  # "analysis", "header", "content" or "call"

    @property
    def inside(self) -> bool:
        """True if the text so far ends within reasoning."""
        return self._part == "analysis"

    def push(self, text: str, *, final: bool = False) -> tuple[str, str]:
        """Returns the (reasoning, content) that `text` adds (if `final`, all)."""
        text, self._held = self._held + text, ""
        reasoning: list[str] = []
        content: list[str] = []
        while text:
            if self._part == "header":
                header, found, rest = text.partition(_MESSAGE)
                if not _may_begin_header(text):  # a text without channels
                    self._part = "content"
                elif found:
                    text = rest
                    content.append(self._begin(header))
                else:
                    content.append(text if final and "<|" not in text else "")
                    self._held = "" if final else text
                    break
                continue
            into = reasoning if self._part == "analysis" else content
            places = [(text.find(tag), tag) for tag in _ENDS if tag in text]
            if not places:
                keep = 0 if final else max(held_back(text, tag) for tag in _ENDS)
                into.append(text[: len(text) - keep])
                self._held = text[len(text) - keep :]
                break
            at, tag = min(places)
            into.append(text[:at])
            if self._part == "call":
                content.append(_CALL)
            text = text[at:] if tag in ("<|start|>", "<|channel|>") else text[at + len(tag) :]
            self._part = "header"
        return "".join(reasoning), "".join(content)

    def _begin(self, header: str) -> str:
        """Begins the message of a header; returns the content that it adds."""
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None:
            self._part = "call"
            return f"<|channel|>commentary to={recipient[1]}{_MESSAGE}"
        self._part = "analysis" if channel and channel[1] == "analysis" else "content"
        return ""


def _may_begin_header(text: str) -> bool:
    text = text.lstrip()
    return any(text.startswith(begin) or begin.startswith(text) for begin in _HEADERS)
