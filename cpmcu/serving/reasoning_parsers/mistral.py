"""mistral (Magistral and later): [THINK] ... [/THINK]."""

from __future__ import annotations

from cpmcu.serving.reasoning_parsers.base import ReasoningParser
from cpmcu.serving.reasoning_parsers.registry import register_reasoning_parser


@register_reasoning_parser("mistral")
class MistralParser(ReasoningParser):
    """The tags of Mistral's control tokens."""

    begin, end = "[THINK]", "[/THINK]"
