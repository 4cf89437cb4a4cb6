"""Domino heads: DFlash whose logits a recurrent network corrects, token by token.

| tensor | shape |
|---|---|
| `prefix_gru.weight_{ih,hh}_l0` | [3G, H], [3G, G]: a GRU over drafted tokens |
| `embed_proj.0.weight` | [P, H + G] |
| `embed_proj.2.weight` | [V, P] |

The correction depends on all tokens of a path.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpmcu.config import SpeculativeConfig
from cpmcu.drafters.blocks import BlockHead, block_config, has_part, plan_block
from cpmcu.drafters.options.trees import MAX_DRAFT_TOPK
from cpmcu.drafters.registry import DraftFiles, DraftPlan, TargetModel, Tensors, register_drafter
from cpmcu.models.reader import ConfigReader

_GRU, _PROJECTION = "prefix_gru.weight_hh_l0", "embed_proj.0.weight"


@register_drafter("domino")
class Domino:
    """A Domino head."""

    has_checkpoint = True
    also_named = ("dflash",)  # its config.json has DFlash's architecture

    def matches(self, config: Mapping[str, Any], tensors: Tensors) -> bool:
        return has_part(tensors, "prefix_gru.")

    def plan(
        self, draft: DraftFiles | None, target: TargetModel, speculation: SpeculativeConfig
    ) -> DraftPlan:
        assert draft is not None
        config = block_config(draft.config)
        reader = ConfigReader(config)
        _refuse(config, draft.tensors, reader)
        head = BlockHead(
            options={
                "state_size": _size(draft, reader, "gru_hidden_dim", _GRU, 1),
                "projection_size": _size(draft, reader, "emb_dim", _PROJECTION, 0),
            },
            from_anchor=reader.flag("shift_label"),
            topk=min(MAX_DRAFT_TOPK, target.fields.vocab_size),
            drops_last=True,
            projector="domino",
        )
        return plan_block(draft, target, speculation, head)


def _refuse(config: Mapping[str, Any], tensors: Tensors, reader: ConfigReader) -> None:
    """Raises ValueError for keys whose meaning for the correction is not known."""
    if config.get("shift_label") is None:
        raise reader.fail("shift_label", "true or false: does the first row predict?")
    if config.get("pure_draft_prefix_len") != 1:
        raise reader.fail("pure_draft_prefix_len", "1, the tokens that are not corrected")
    if config.get("final_logit_softcapping"):
        raise reader.fail("final_logit_softcapping", "no cap, as the correction adds to logits")
    for key in ("input_embedding_scale", "output_multiplier", "logit_scale"):
        if reader.positive_float(key, default=1.0) != 1:
            raise reader.fail(key, "1 in a Domino head")
    if has_part(tensors, "d2t"):
        raise ValueError("d2t is present, expected a Domino head of the target's whole vocabulary")


def _size(draft: DraftFiles, reader: ConfigReader, key: str, tensor: str, dim: int) -> int:
    """A dimension of a tensor, which the config may state, too."""
    shapes = [meta.shape for name, meta in draft.tensors.items() if name.endswith(tensor)]
    if not shapes:
        raise ValueError(f"{tensor} is missing, expected all tensors of the Domino head")
    size = shapes[0][dim]
    if reader.config.get(key) not in (None, size):
        raise reader.fail(key, f"{size}, a dimension of {tensor}")
    return size
