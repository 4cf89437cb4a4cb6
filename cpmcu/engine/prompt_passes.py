"""Prefill passes: how prompts share one, and how long it may take while other sequences decode.

Most of a pass goes to the prompts with the least left to read, since that gives the earliest first
tokens on average. A share goes to the prompt that came first, so short prompts cannot stop it.

A pass beside decoding sequences delays their next tokens. Short passes delay prompts: each has a
fixed cost, mostly that of reading the weights, and a decode step follows it. So a pass is as short
as it can be while fixed cost and decode step lengthen the time of its tokens by SLOWDOWN.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import combinations
from statistics import median

SHARE = 4  # the prompt that came first gets at least 1 / SHARE of a pass
FEWEST = 64  # minimum number of tokens of a pass; only the chunk length may be lower
UNTIMED = 512  # tokens of a pass beside decoding sequences, until a pass has been timed
SLOWDOWN = 0.3  # fixed cost and decode step may add this share of the time of a pass's tokens
# The other passes read a rest of at most this share of a pass, so that no short one is left.
REMAINDER = 0.25
FEW_PROMPTS = 4  # with more prompts than this, passes are longer
RECENT = 5  # recent passes that give the time of a token
FITTED = 24  # recent passes that give the fixed cost
STEPS = 5  # recent decode steps that give the time of a step
# The fixed cost shows only in two passes of which one has this many times the tokens of the other.
DIFFERENT = 1.25
FURTHEST = 2  # a pass has at most this many times the tokens of the longest timed one


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
    """Limits the time of a pass, from the times of recent passes and steps. Used by one thread.

    The text does not depend on it: chunks may have any length.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit  # maximum time of a pass, in seconds
        # (tokens, seconds) of recent passes.
        self._passes: deque[tuple[int, float]] = deque(maxlen=FITTED)
        self._steps: deque[float] = deque(maxlen=STEPS)  # seconds of recent decode steps
        self._fixed = 0.0  # fixed cost of a pass, in seconds

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Records a pass."""
        if num_tokens >= FEWEST:
            self._passes.append((num_tokens, seconds))
            self._fit()

    def observe_step(self, seconds: float) -> None:
        """Records a decode step."""
        self._steps.append(seconds)

    def room(self, rests: Sequence[int]) -> int:
        """Tokens of the next pass. `rests`: tokens left to read of each prompt.

        All passes that `rests` need get about the same length, so none is left with few tokens.
        """
        most, wanted = self._bounds()
        wanted *= max(1.0, len(rests) / FEW_PROMPTS)
        rest = sum(rests)
        passes = max(1, math.ceil(rest / wanted - REMAINDER), math.ceil(rest / most))
        return min(most, max(FEWEST, _up(math.ceil(rest / passes))))

    def _bounds(self) -> tuple[int, float]:
        """Tokens that a pass may have at most, and those that it should have."""
        if not self._passes:
            return UNTIMED, UNTIMED
        furthest = _up(FURTHEST * max(tokens for tokens, _ in self._passes))
        recent = list(self._passes)[-RECENT:]
        costs = [(seconds - self._fixed) / tokens for tokens, seconds in recent]
        # The slowest limits: a pass seems too fast if it ended before the wait began.
        most = min(furthest, _ratio(self._limit - self._fixed, max(costs)))
        most = max(FEWEST, int(most) // FEWEST * FEWEST)
        if not self._steps:
            return most, most
        delay = self._fixed + median(self._steps)
        return most, max(FEWEST, min(most, _ratio(delay, SLOWDOWN * median(costs))))

    def _fit(self) -> None:
        """Fits the fixed cost, if there are passes of different lengths."""
        slopes = [
            (long[1] - short[1]) / (long[0] - short[0])
            for short, long in combinations(sorted(self._passes), 2)
            if long[0] >= DIFFERENT * short[0]
        ]
        if slopes:
            slope = median(slopes)
            fixed = median(seconds - slope * tokens for tokens, seconds in self._passes)
            self._fixed = min(max(0.0, fixed), min(seconds for _, seconds in self._passes))


def _up(tokens: int) -> int:
    return -(-tokens // FEWEST) * FEWEST


def _ratio(seconds: float, cost: float) -> float:
    return seconds / cost if cost > 0 else math.inf
