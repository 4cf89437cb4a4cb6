"""Prompt look-up: drafts the continuation of an earlier occurrence of the last tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpmcu.config import SpeculativeConfig
from cpmcu.drafters.options.ngram import NgramOptions
from cpmcu.drafters.registry import DraftFiles, DraftPlan, TargetModel, Tensors, register_drafter


@register_drafter("ngram")
class Ngram:
    """n-gram look-up in the prompt and the output. It has no checkpoint."""

    has_checkpoint = False

    def matches(self, config: Mapping[str, Any], tensors: Tensors) -> bool:
        return False

    def plan(
        self, draft: DraftFiles | None, target: TargetModel, speculation: SpeculativeConfig
    ) -> DraftPlan:
        shortest, longest = speculation.of(NgramOptions).ngram_range
        return DraftPlan(chain=True, options={"min_ngram": shortest, "max_ngram": longest})
