"""How much of what was drafted was accepted: counted for each output, in two vocabularies.

A step of a sequence verifies a tree of drafts, K tokens deep, and emits the j accepted ones of its
best path and one token of the target's own: 0 <= j <= K. The drafted path, not the tree, is what
counts as drafted: K tokens a step, whatever the tree's size (also of an n-gram look-up that found
less). The first token, which the prompt gives, belongs to no step. Tokens that a step emitted
beyond the end of the output (a stop string, say) were accepted, and are counted here; but not those
beyond the end of a grammar, which nothing constrained.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class SpecDecodeMetrics:
    """Acceptance of one output, with vLLM's names. Ratios are 0 where there was no step."""

    num_spec_tokens: int  # K: tokens of the longest drafted path
    acceptance_histogram: tuple[int, ...]  # [K + 1]: steps that accepted exactly j tokens
    per_step_accepted: tuple[int, ...] | None = None  # if detailed metrics were asked for
    drafted: int | None = None  # tokens, where steps chose to draft fewer than K; None: K each

    @property
    def num_spec_steps(self) -> int:
        """Steps that verified a draft."""
        return sum(self.acceptance_histogram)

    @property
    def num_accepted_draft_tokens(self) -> int:
        """Accepted tokens; the target's own are not among them."""
        return sum(j * steps for j, steps in enumerate(self.acceptance_histogram))

    @property
    def num_draft_tokens(self) -> int:
        """Drafted tokens: K a step, or what the steps chose."""
        if self.drafted is not None:
            return self.drafted
        return self.num_spec_tokens * self.num_spec_steps

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted a step, the target's own included."""
        steps = self.num_spec_steps
        return 1 + self.num_accepted_draft_tokens / steps if steps else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted of drafted tokens."""
        drafted = self.num_draft_tokens
        return self.num_accepted_draft_tokens / drafted if drafted else 0.0

    @property
    def acceptance_per_position(self) -> tuple[float, ...]:
        """[K]: share of the steps that accepted position i (and so all before it)."""
        steps = self.num_spec_steps
        return tuple(count / steps if steps else 0.0 for count in self._at_least()[1:])

    def to_dict(self) -> dict[str, Any]:
        """vLLM's fields; `per_step_accepted` only if it was asked for."""
        fields = {
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "acceptance_histogram": list(self.acceptance_histogram),
            "num_spec_steps": self.num_spec_steps,
            "num_accepted_draft_tokens": self.num_accepted_draft_tokens,
            "num_draft_tokens": self.num_draft_tokens,
            "num_spec_tokens": self.num_spec_tokens,
        }
        if self.per_step_accepted is not None:
            fields["per_step_accepted"] = list(self.per_step_accepted)
        return fields

    def to_fastdeploy(self) -> dict[str, Any]:
        """FastDeploy's `speculate_metrics`, which counts the target's own tokens as accepted.

        `accept_ratio` is the share of emitted tokens that were drafted; the ratio of a head is
        conditional on the head before it.
        """
        steps = self.num_spec_steps
        heads = self._at_least()
        emitted = sum(heads)
        return {
            "accepted_tokens": emitted,
            "rejected_tokens": steps + self.num_draft_tokens - emitted,
            "accept_ratio": 1 - steps / emitted if emitted else 0.0,
            "average_accept_length": emitted / steps if steps else 0.0,
            "accepted_tokens_per_head": heads,
            "accept_ratio_per_head": [
                after / before if before else 0.0 for before, after in itertools.pairwise(heads)
            ],
        }

    def _at_least(self) -> list[int]:
        """[K + 1]: steps that accepted at least j tokens."""
        return list(itertools.accumulate(reversed(self.acceptance_histogram)))[::-1]


class AcceptanceCounter:
    """Counts the steps of one output."""

    def __init__(self, num_spec_tokens: int, *, detailed: bool = False) -> None:
        self._histogram = [0] * (num_spec_tokens + 1)
        self._drafted = 0
        self._per_step: list[int] | None = [] if detailed else None

    def add(self, num_emitted: int, num_drafted: int) -> None:
        """A step that drafted a path of 1 to K tokens emitted so many, at least 1."""
        self._histogram[num_emitted - 1] += 1
        self._drafted += num_drafted
        if self._per_step is not None:
            self._per_step.append(num_emitted - 1)

    def metrics(self) -> SpecDecodeMetrics:
        """What was counted so far."""
        steps = None if self._per_step is None else tuple(self._per_step)
        counts = tuple(self._histogram)
        return SpecDecodeMetrics(len(counts) - 1, counts, steps, self._drafted)
