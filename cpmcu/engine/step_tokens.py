"""Histogram of the tokens per engine step."""

from __future__ import annotations

import bisect

# Upper ends of the buckets, as in vLLM.
EDGES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class StepTokens:
    """Counts steps by their tokens. One thread adds, any thread may read."""

    def __init__(self) -> None:
        # Number of steps in each bucket; the last bucket has no upper end.
        self.counts = [0] * (len(EDGES) + 1)
        self.total = 0  # tokens of all steps

    def add(self, num_tokens: int) -> None:
        """Adds a step. `num_tokens`: prompt tokens that it read plus tokens that it emitted."""
        self.counts[bisect.bisect_left(EDGES, num_tokens)] += 1
        self.total += num_tokens
