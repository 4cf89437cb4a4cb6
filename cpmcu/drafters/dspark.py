"""DSpark heads: DFlash whose root row predicts, too, and a low-rank bigram (the Markov head).

| tensor | shape |
|---|---|
| `markov_head.markov_w1.weight` | [V, r] |
| `markov_head.markov_w2.weight` | [drafted tokens, r] |
| `markov_head.gate_proj.{weight,bias}` | [r, H + r], [r]: of a gated Markov head |
| `markov_head.joint_proj.{weight,bias}` | [3r, 2r + H], [3r]: of an rnn Markov head |
| `confidence_head.proj.{weight,bias}` | not read: the engine measures how much is accepted |

A head of rank 0 is DeepSpec's DFlash, whose root row predicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpmcu.checks import shown
from cpmcu.config import SpeculativeConfig
from cpmcu.drafters.blocks import BlockHead, block_config, has_part, is_block_head, plan_block
from cpmcu.drafters.options.trees import MAX_DRAFT_TOPK
from cpmcu.drafters.registry import DraftFiles, DraftPlan, TargetModel, Tensors, register_drafter
from cpmcu.models.reader import ConfigReader

_W1, _W2 = (f"markov_head.markov_w{i}.weight" for i in (1, 2))
_KINDS = ["vanilla", "gated", "rnn"]


@register_drafter("dspark")
class DSpark:
    """A DSpark head with a vanilla, gated or rnn Markov head, or without one."""

    has_checkpoint = True
    also_named = ("dflash",)  # heads of rank 0 are published as DFlash

    def matches(self, config: Mapping[str, Any], tensors: Tensors) -> bool:
        named = "DSpark" in str(config.get("architectures"))
        return has_part(tensors, "markov_head.") or (named and is_block_head(tensors))

    def plan(
        self, draft: DraftFiles | None, target: TargetModel, speculation: SpeculativeConfig
    ) -> DraftPlan:
        assert draft is not None
        config = block_config(draft.config)
        reader = ConfigReader(config)
        kind = config.get("markov_head_type", "vanilla")
        rank = _rank(draft, reader)
        if rank and kind not in _KINDS:
            raise ValueError(
                f"config.json: markov_head_type is {shown(kind)}, expected one of {shown(_KINDS)}: "
                "other Markov heads are not supported"
            )
        if rank and config.get("final_logit_softcapping"):
            raise reader.fail(
                "final_logit_softcapping", "no cap, as the Markov head adds to logits before a cap"
            )
        if rank and reader.positive_float("logit_scale", default=1.0) != 1:
            raise reader.fail("logit_scale", "1, as it would scale the Markov head's bigram, too")
        of_speculators = "transformer_layer_config" in config
        separate = reader.flag("dspark_bonus_anchor", default=of_speculators)
        confidence = "the engine measures how many tokens are accepted"
        head = BlockHead(
            options=_markov_options(draft, rank, kind) if rank else {},
            from_anchor=reader.flag("sample_from_anchor", default=not separate),
            topk=min(MAX_DRAFT_TOPK, _drafted(draft, target)),
            drafter=None if rank else "dflash",
            ignored={name: confidence for name in draft.tensors if "confidence_head." in name},
        )
        return plan_block(draft, target, speculation, head)


def _find(draft: DraftFiles, tensor: str) -> tuple[int, ...] | None:
    """The shape of a tensor; None if it is missing."""
    tensors = draft.tensors
    return next((meta.shape for name, meta in tensors.items() if name.endswith(tensor)), None)


def _rank(draft: DraftFiles, reader: ConfigReader) -> int:
    """The rank of the Markov head, which is that of its tensors; 0: none."""
    shape = _find(draft, _W1)
    stated = reader.config.get("markov_rank")
    found = shape[-1] if shape else 0
    if stated is not None and stated != found:
        raise reader.fail("markov_rank", f"{found}, the columns of {_W1}")
    return found


def _drafted(draft: DraftFiles, target: TargetModel) -> int:
    shape = _find(draft, "d2t")
    return shape[0] if shape else target.fields.vocab_size


def _markov_options(draft: DraftFiles, rank: int, kind: str) -> dict[str, Any]:
    successors = _find(draft, _W2)
    if successors is None:
        raise ValueError(f"{_W2} is missing, expected both tensors of the Markov head")
    options = {"rank": rank, "successors": successors[0]}
    return options | ({} if kind == "vanilla" else {kind: True})
