"""Verify strategies: which drafted tokens a step accepts. Names and keys are FastDeploy's.

All but `target_match` are lossy: they change the text. `csrc/model/sampler.h` has the same names.
"""

from __future__ import annotations

from typing import Any

from cpmcu.checks import integer
from cpmcu.options import option

TARGET_MATCH = "target_match"
VERIFY_STRATEGIES = (TARGET_MATCH, "greedy", "topp")
VERIFY_WINDOW = 2  # default window of the strategy "topp"
MAX_VERIFY_WINDOW = 16  # the depth of the longest draft


def strategy_option() -> Any:
    """The field `verify_strategy` of SpeculativeConfig."""
    return option(
        TARGET_MATCH,
        "which drafted tokens are accepted. target_match: those that the model draws, so the text "
        "is that without a draft. LOSSY, they change the text for speed: greedy takes the most "
        "likely token at any temperature; topp accepts any of the 5 most likely tokens that pass "
        "top_p",
        choices=VERIFY_STRATEGIES,
        brief="greedy and topp are LOSSY: they change the text",
    )


def window_option() -> Any:
    """The field `verify_window` of SpeculativeConfig."""
    return option(
        None,
        "of topp, LOSSY: the second most likely token is accepted, whatever top_p is, if so many "
        f"drafted tokens follow it, each the most likely (default: {VERIFY_WINDOW})",
        brief="",
    )


def is_lossy(strategy: str) -> bool:
    """Does the strategy change the text?"""
    return strategy != TARGET_MATCH


def check_verification(strategy: str, window: int | None) -> None:
    """Raises ValueError for an unknown strategy, and for a window out of range or not of topp."""
    if strategy not in VERIFY_STRATEGIES:
        raise ValueError(
            f"verify_strategy is {strategy!r}, but must be one of {', '.join(VERIFY_STRATEGIES)}"
        )
    if window is None:
        return
    if strategy != "topp":
        raise ValueError(
            f"verify_window is {window}, but only verify_strategy 'topp' has one; verify_strategy "
            f"is {strategy!r}"
        )
    if not 0 <= integer("verify_window", window) <= MAX_VERIFY_WINDOW:
        raise ValueError(f"verify_window is {window}, but must be 0 to {MAX_VERIFY_WINDOW}")
