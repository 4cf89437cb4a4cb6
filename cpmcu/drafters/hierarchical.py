"""A small language model that an EAGLE head of its own drafts.

The draft of the target is what speculative steps of the small model emit: a chain. `model` names
the small model and `draft_model` its head, which is an ordinary draft of the small model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cpmcu.config import SpeculativeConfig, TreeShape
from cpmcu.drafters.model import DraftModel
from cpmcu.drafters.registry import DraftFiles, DraftPlan, TargetModel, Tensors, register_drafter

HEAD_SHAPE = TreeShape(depth=3, topk=4, tree_size=12)  # of the trees that the head drafts
HEAD_KINDS = ("eagle", "eagle3")
TOKENS_PER_STEP = 2  # that a step of the small model is expected to emit


@register_drafter("hierarchical")
class Hierarchical:
    """A draft model with a draft of its own."""

    has_checkpoint = True
    only_by_name = True  # its files are those of a draft model

    def matches(self, config: Mapping[str, Any], tensors: Tensors) -> bool:
        return DraftModel().matches(config, tensors)

    def plan(
        self, draft: DraftFiles | None, target: TargetModel, speculation: SpeculativeConfig
    ) -> DraftPlan:
        plan = DraftModel().plan(draft, target, speculation)
        tokens = _tokens_per_step(speculation)
        return replace(plan, chain=True, options={"tokens_per_step": tokens}, has_head=True)


def _tokens_per_step(speculation: SpeculativeConfig) -> int:
    """The fewest tokens of a step with which all passes of the draft model suffice.

    The first pass drafts one token. Raises ValueError if other tokens have no pass.
    """
    passes = speculation.num_model_steps
    if passes is None or speculation.fill is not None:
        return TOKENS_PER_STEP
    others = speculation.shape(chain=True).depth - 1
    if passes == 1 and others > 0:
        raise ValueError(
            f"num_model_steps is 1, expected 2 or more passes to draft {others + 1} tokens"
        )
    return max(1, -(-others // max(1, passes - 1)))
