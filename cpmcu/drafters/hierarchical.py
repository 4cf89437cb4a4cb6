"""A small language model that an EAGLE head of its own drafts.

The target's draft is a chain: the tokens that speculative steps of the small model emit. `model`
names the small model and `draft_model` its head, which is an ordinary draft of the small model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cpmcu.config import SpeculativeConfig
from cpmcu.drafters.finding import find_draft
from cpmcu.drafters.model import DraftModel
from cpmcu.drafters.options.fill import FillOptions
from cpmcu.drafters.options.hierarchical import HierarchicalOptions
from cpmcu.drafters.options.trees import TreeShape
from cpmcu.drafters.registry import DraftFiles, DraftPlan, TargetModel, Tensors, register_drafter
from cpmcu.shipped import shipped_draft

HEAD_SHAPE = TreeShape(depth=3, topk=4, tree_size=12)  # shape of the trees that the head drafts
HEAD_KINDS = ("eagle", "eagle3")
HEAD_SCOPE = "draft.head."  # begins the engine's names of the head's tensors
TOKENS_PER_STEP = 2  # tokens that a step of the small model is expected to emit


@register_drafter("hierarchical")
class Hierarchical:
    """A draft model with a draft of its own."""

    has_checkpoint = True
    only_by_name = True  # its files are those of a draft model
    needs = (
        "a draft model and its head, expected draft_model_path (model) and head_model_path "
        "(draft_model)"
    )

    def matches(self, config: Mapping[str, Any], tensors: Tensors) -> bool:
        return DraftModel().matches(config, tensors)

    def plan(
        self, draft: DraftFiles | None, target: TargetModel, speculation: SpeculativeConfig
    ) -> DraftPlan:
        assert draft is not None
        plan = DraftModel().plan(draft, target, speculation)
        tokens = _tokens_per_step(speculation)
        head = _head_of(draft, plan, target, speculation)
        return replace(plan, chain=True, options={"tokens_per_step": tokens}, parts=(head,))


def _head_of(
    model: DraftFiles, plan: DraftPlan, target: TargetModel, speculation: SpeculativeConfig
) -> tuple[str, DraftPlan]:
    """The head that drafts for a draft model: the configured one, else its shipped one."""
    assert plan.fields is not None
    path = speculation.of(HierarchicalOptions).head_model_path
    if path is None and (found := shipped_draft(model.directory)) is not None:
        path = str(found)
    if path is None:
        raise ValueError(
            "no head is given for the draft model, expected head_model_path (draft_model), an "
            "EAGLE head of this model"
        )
    own = SpeculativeConfig(
        draft_model_path=path,
        spec_num_iter=HEAD_SHAPE.depth,
        spec_topk_per_iter=HEAD_SHAPE.topk,
        spec_tree_size=HEAD_SHAPE.tree_size,
    )
    stored = plan.quant.linear_overrides.get("lm_head", plan.quant.linear_method)
    of_head = TargetModel(
        model.config,
        plan.fields,
        target.device,
        target.max_model_len,
        target.eos_ids,
        quantised=plan.quant.linear_method != "dense",
        quantised_head=stored != "dense",
        checkpoint=model.checkpoint,
    )
    head = find_draft(own, model.directory, of_head)
    assert head is not None
    if head.method not in HEAD_KINDS:
        raise ValueError(
            f"the draft of the draft model, {path}, is of kind {head.method}, expected one of: "
            f"{', '.join(HEAD_KINDS)}"
        )
    return head.method, replace(head.plan, scope=HEAD_SCOPE)


def _tokens_per_step(speculation: SpeculativeConfig) -> int:
    """The tokens that each inner step must draft so that the chain is complete.

    `num_model_steps` gives the passes of the draft model. The first pass drafts one token. Raises
    ValueError if no pass is left for the other tokens.
    """
    given = speculation.of(HierarchicalOptions)
    passes = given.num_model_steps
    if passes is None or speculation.of(FillOptions).fill is not None:
        return TOKENS_PER_STEP
    others = given.chain(given.chain_depth).depth - 1
    if passes == 1 and others > 0:
        raise ValueError(
            f"num_model_steps is 1, expected 2 or more passes to draft {others + 1} tokens"
        )
    return max(1, -(-others // max(1, passes - 1)))
