"""DFlash and JetSpec heads: one pass over a block of mask tokens drafts all positions.

A JetSpec head has the tensors of a DFlash head; its blocks are causal (`causal_head`). The
candidates of a position have one score each, whatever comes before them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpmcu.config import SpeculativeConfig
from cpmcu.drafters.blocks import (
    CANDIDATES,
    BlockHead,
    block_config,
    has_part,
    is_block_head,
    plan_block,
)
from cpmcu.drafters.registry import DraftFiles, DraftPlan, TargetModel, Tensors, register_drafter
from cpmcu.models.reader import ConfigReader


@register_drafter("dflash")
class DFlash:
    """A DFlash or JetSpec head."""

    has_checkpoint = True

    def matches(self, config: Mapping[str, Any], tensors: Tensors) -> bool:
        others = ("candidate_selector.", "markov_head.", "prefix_gru.", "lilicorr.")
        named = "DSpark" in str(config.get("architectures"))
        return (
            is_block_head(tensors) and not named and not any(has_part(tensors, p) for p in others)
        )

    def plan(
        self, draft: DraftFiles | None, target: TargetModel, speculation: SpeculativeConfig
    ) -> DraftPlan:
        assert draft is not None
        reader = ConfigReader(block_config(draft.config))
        head = BlockHead(
            options={},
            from_anchor=reader.flag("sample_from_anchor"),
            topk=min(CANDIDATES, target.fields.vocab_size),
        )
        return plan_block(draft, target, speculation, head)
