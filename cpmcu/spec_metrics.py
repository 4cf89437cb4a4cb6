"""Acceptance of drafted tokens for each output, under vLLM's and FastDeploy's names.

A speculative step verifies a tree of depth K. It emits the j accepted tokens of the best path and
one token of the target's own, 0 <= j <= K. K tokens count as drafted in a step, whatever the size
of the tree or the length of an n-gram match. If steps choose their shapes, the chosen depth counts
instead of K. The first token comes from prefill and belongs to no speculative step.

Accepted tokens after the end of the output (a stop string, for example) count. If a grammar ends
the output, later tokens do not count, since no grammar constrained them.

A hierarchical draft is made by speculative steps of its own, the inner steps. An inner step does
not count if it emits nothing because the draft is already complete.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from cpmcu.verification import TARGET_MATCH, is_lossy


@dataclasses.dataclass(frozen=True, slots=True)
class SpecDecodeMetrics:
    """Acceptance of one output, with vLLM's names. Ratios are 0 if there was no step."""

    num_spec_tokens: int  # K: maximum number of drafted tokens on a path
    # [K + 1]: entry j is the number of steps that accepted j drafted tokens.
    acceptance_histogram: tuple[int, ...]
    # Accepted tokens of each step; None: detailed metrics are off.
    per_step_accepted: tuple[int, ...] | None = None
    drafted: int | None = None  # drafted tokens of all steps; None: K in each step
    verify_strategy: str = TARGET_MATCH
    num_inner_steps: int = 0
    num_inner_tokens: int = 0  # tokens that inner steps emitted

    @property
    def num_spec_steps(self) -> int:
        """Number of steps that verified a draft."""
        return sum(self.acceptance_histogram)

    @property
    def num_accepted_draft_tokens(self) -> int:
        """Accepted drafted tokens, without the target's own."""
        return sum(j * steps for j, steps in enumerate(self.acceptance_histogram))

    @property
    def num_draft_tokens(self) -> int:
        """Drafted tokens: K per step, or fewer if the steps chose their shapes."""
        if self.drafted is not None:
            return self.drafted
        return self.num_spec_tokens * self.num_spec_steps

    @property
    def mean_acceptance_length(self) -> float:
        """Mean of the tokens emitted per step, the target's own included."""
        steps = self.num_spec_steps
        return 1 + self.num_accepted_draft_tokens / steps if steps else 0.0

    @property
    def mean_inner_acceptance_length(self) -> float:
        """Mean of the tokens emitted per inner step, the small model's own included."""
        return self.num_inner_tokens / self.num_inner_steps if self.num_inner_steps else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted tokens / drafted tokens."""
        drafted = self.num_draft_tokens
        return self.num_accepted_draft_tokens / drafted if drafted else 0.0

    @property
    def acceptance_per_position(self) -> tuple[float, ...]:
        """[K] shares: entry i is the share of the steps that accepted drafted positions 0 to i."""
        steps = self.num_spec_steps
        return tuple(count / steps if steps else 0.0 for count in self._at_least()[1:])

    def to_dict(self) -> dict[str, Any]:
        """vLLM's fields; `per_step_accepted` only if detailed metrics are on.

        A lossy verify strategy is named. Inner steps are left out if there were none.
        """
        fields: dict[str, Any] = {
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
        if self.num_inner_steps:
            fields |= {
                "mean_inner_acceptance_length": self.mean_inner_acceptance_length,
                "num_inner_steps": self.num_inner_steps,
            }
        if is_lossy(self.verify_strategy):
            fields |= {"verify_strategy": self.verify_strategy, "lossy": True}
        return fields

    def to_fastdeploy(self) -> dict[str, Any]:
        """FastDeploy's `speculate_metrics`, which count the target's own tokens as accepted.

        `accept_ratio` is (accepted draft tokens) / (emitted tokens). The ratio of a head is
        conditional on acceptance of the preceding head.
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
        """Returns [K + 1] numbers: entry j counts the steps that accepted at least j tokens."""
        return list(itertools.accumulate(reversed(self.acceptance_histogram)))[::-1]


class AcceptanceCounter:
    """Counts the steps of one output."""

    def __init__(
        self,
        num_spec_tokens: int,
        *,
        detailed: bool = False,
        verify_strategy: str = TARGET_MATCH,
    ) -> None:
        self._histogram = [0] * (num_spec_tokens + 1)
        self._drafted = 0
        self._inner_steps = self._inner_tokens = 0
        self._verify_strategy = verify_strategy
        self._per_step: list[int] | None = [] if detailed else None

    def add(self, num_emitted: int, num_drafted: int, inner: tuple[int, int] = (0, 0)) -> None:
        """Adds a step. `num_emitted`: at least 1; `num_drafted`: longest path, 1 to K tokens.

        `inner`: inner steps, and the tokens that they emitted.
        """
        self._histogram[num_emitted - 1] += 1
        self._drafted += num_drafted
        self._inner_steps += inner[0]
        self._inner_tokens += inner[1]
        if self._per_step is not None:
            self._per_step.append(num_emitted - 1)

    def metrics(self) -> SpecDecodeMetrics:
        """The metrics of the steps added so far."""
        steps = None if self._per_step is None else tuple(self._per_step)
        counts = tuple(self._histogram)
        return SpecDecodeMetrics(
            len(counts) - 1,
            counts,
            steps,
            self._drafted,
            self._verify_strategy,
            self._inner_steps,
            self._inner_tokens,
        )
