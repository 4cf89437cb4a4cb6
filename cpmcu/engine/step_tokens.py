"""How many tokens the steps of an engine have, as a histogram."""

from __future__ import annotations

import bisect

EDGES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # as vLLM's


class StepTokens:
    """Counts steps by their tokens. One thread adds; others may look."""

    def __init__(self) -> None:
        self.counts = [0] * (len(EDGES) + 1)  # steps of at most so many tokens; the last: of more
        self.total = 0  # tokens of all steps

    def add(self, num_tokens: int) -> None:
        """A step had so many tokens: those of prompts that it read, and those that it gave."""
        self.counts[bisect.bisect_left(EDGES, num_tokens)] += 1
        self.total += num_tokens
