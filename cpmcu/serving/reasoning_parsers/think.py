"""think (Qwen3 and later, MiniCPM4.1 and 5, DeepSeek-R1): <think> ... </think>."""

from __future__ import annotations

from cpmcu.serving.reasoning_parsers.base import ReasoningParser
from cpmcu.serving.reasoning_parsers.registry import register_reasoning_parser


@register_reasoning_parser("think", "qwen3", "deepseek_r1")
class ThinkParser(ReasoningParser):
    """The tags of most families. vLLM names its parser after the family."""

    begin, end = "<think>", "</think>"
