"""gemma4 (Gemma 4): <|channel>thought ... <channel|>."""

from __future__ import annotations

from cpmcu.serving.reasoning_parsers.base import ReasoningParser
from cpmcu.serving.reasoning_parsers.registry import register_reasoning_parser


@register_reasoning_parser("gemma4")
class Gemma4Parser(ReasoningParser):
    """Parses the channel of reasoning."""

    begin, end = "<|channel>thought", "<channel|>"
    tags = ("<|channel>",)
