"""Prefill passes: how prompts share one, and how long it may take while other sequences decode.

Most of a pass goes to the prompts with the least left to read, since that gives the earliest first
tokens on average. A share goes to the prompt that came first, so short prompts cannot stop it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

SHARE = 4  # the prompt that came first gets at least 1 / SHARE of a pass
FEWEST = 64  # tokens of a pass that nothing but the chunk length may lower
UNTIMED = 512  # tokens of a pass beside decoding sequences, before any pass was timed
RECENT = 3  # passes that are remembered


def divide(rests: Sequence[int], room: int, unit: int = 1) -> list[int]:
    """Tokens of each prompt in a pass of at most `room` tokens.

    `rests`: tokens left to read, in order of arrival. The first prompt gets its share in whole
    `unit`s, at least one.
    """
    taken = [0] * len(rests)
    if not rests:
        return taken
    taken[0] = min(rests[0], room, max(unit, room // SHARE // unit * unit))
    left = room - taken[0]
    for i in sorted(range(len(rests)), key=rests.__getitem__):
        more = min(rests[i] - taken[i], left)
        taken[i] += more
        left -= more
    return taken


class PassTimes:
    """Limits the time of a pass, from the times of recent ones. Used by one thread.

    The text does not depend on it: chunks may have any length.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit  # seconds
        self._recent: deque[float] = deque(maxlen=RECENT)  # seconds a token

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Records a pass. Passes of few tokens say nothing about longer ones."""
        if num_tokens >= FEWEST:
            self._recent.append(seconds / num_tokens)

    def room(self) -> int:
        """Tokens of a pass that takes about the limit."""
        if not self._recent:
            return UNTIMED
        slowest = max(self._recent)  # a pass seems too fast if it ended before the wait began
        tokens = int(self._limit / slowest) if slowest > 0 else UNTIMED
        return max(FEWEST, tokens // FEWEST * FEWEST)
