"""thought (MiniCPM3): <|thought_start|> ... <|thought_end|>."""

from __future__ import annotations

from cpmcu.serving.reasoning_parsers.base import ReasoningParser
from cpmcu.serving.reasoning_parsers.registry import register_reasoning_parser


@register_reasoning_parser("thought")
class ThoughtParser(ReasoningParser):
    """The tags of MiniCPM3's thoughts before tool calls."""

    begin, end = "<|thought_start|>", "<|thought_end|>"
