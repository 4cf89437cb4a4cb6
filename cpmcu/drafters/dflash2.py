"""DFlash2 heads: DFlash with convolutions over the rows of a block, and a selector of candidates.

| tensor | shape |
|---|---|
| `layers.i.{attention_conv,mlp_conv}.base_kernel` | [2, width, H] |
| `layers.i.{attention_conv,mlp_conv}.kernel_projection.weight` | [2 width H / group, H] |
| `candidate_selector.{predecessor,successor}_codebook` | [V, r] |
| `candidate_selector.hidden_projection.weight` | [r, H] |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpmcu.config import SpeculativeConfig
from cpmcu.drafters.blocks import CANDIDATES, BlockHead, block_config, has_part, plan_block
from cpmcu.drafters.options.trees import MAX_DRAFT_TOPK
from cpmcu.drafters.registry import DraftFiles, DraftPlan, TargetModel, Tensors, register_drafter
from cpmcu.models.reader import ConfigReader


@register_drafter("dflash2")
class DFlash2:
    """A DFlash2 head."""

    has_checkpoint = True
    also_named = ("dflash",)  # method with which vLLM runs it

    def matches(self, config: Mapping[str, Any], tensors: Tensors) -> bool:
        return has_part(tensors, "candidate_selector.")

    def plan(
        self, draft: DraftFiles | None, target: TargetModel, speculation: SpeculativeConfig
    ) -> DraftPlan:
        assert draft is not None
        reader = ConfigReader(block_config(draft.config))
        head = BlockHead(
            options={
                "rank": reader.positive_int("selector_rank", default=256),
                "conv_width": reader.positive_int("conv_kernel_size", default=2),
                "conv_group": reader.positive_int("conv_group_size", default=16),
            },
            from_anchor=reader.flag("sample_from_anchor"),
            topk=reader.positive_int("selector_top_k", default=CANDIDATES, most=MAX_DRAFT_TOPK),
            fixed_topk=True,
        )
        return plan_block(draft, target, speculation, head)
