"""EAGLE and EAGLE-2 heads of Llama-like targets, and MiniCPM4's heads in both naming schemes.

| kind | tensors |
|---|---|
| original | `fc.weight` [H, 2H] of [embedding, hidden], optional `fc.bias`, `layers.0.*` |
| MiniCPM4 | also `input_norm1`, `input_norm2`, `layers.0.input_layernorm` |
| MiniCPM4, second naming | `model.fc`, `model.input_norm1`, `model.eagle_layers.N` |
| smaller vocabulary | also `d2t` as in EAGLE-3, and `lm_head.weight` [Vd, H] |

The embedding table and lm_head are the target's. Checkpoints in the second naming hold copies of
both, and a final norm that is not applied.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cpmcu.config import SpeculativeConfig
from cpmcu.drafters.heads import (
    EMBEDDING,
    OF_TARGET,
    WINDOW,
    check_own_head,
    check_scales,
    check_vocabulary,
    copies_of_target,
    draft_vocab_ids,
    head_fields,
    head_table,
    refuse_quantised_head,
    residual_scale,
)
from cpmcu.drafters.registry import DraftFiles, DraftPlan, TargetModel, Tensors, register_drafter
from cpmcu.models.common import SpecFields
from cpmcu.models.names import Piece, canonical_names
from cpmcu.quant.registry import plan_quant

ROTATION = "rms_norm_rotation.weight"
_LAYERS = re.compile(r"^eagle_layers\.")


@register_drafter("eagle")
class Eagle:
    """An EAGLE-1/2 head."""

    has_checkpoint = True

    def matches(self, config: Mapping[str, Any], tensors: Tensors) -> bool:
        names = {_short(name) for name in tensors}
        has_fc = bool(names & {"fc.weight", "fc.qweight", "fc.weight_packed"})
        return has_fc and not any(name.endswith("hidden_norm.weight") for name in names)

    def plan(
        self, draft: DraftFiles | None, target: TargetModel, speculation: SpeculativeConfig
    ) -> DraftPlan:
        assert draft is not None
        refuse_quantised_head(draft.tensors)
        _refuse_rotated(draft.tensors)
        check_vocabulary(draft, target)
        check_scales(draft, target)
        fields = head_fields(draft, target)
        names = {_short(name): name for name in draft.tensors}
        norms = {"input_norm1.weight", "input_norm2.weight"} & names.keys()
        if len(norms) == 1:
            raise ValueError(
                f"{norms.pop()} is present alone, expected input_norm1 and input_norm2"
            )
        ignored = copies_of_target(draft, target, EMBEDDING, "embed_tokens.weight")
        vocab_ids = draft_vocab_ids(draft, names["d2t"], target) if "d2t" in names else []
        head = names.get("lm_head.weight")
        own_head = bool(vocab_ids) and head is not None
        if head is not None and vocab_ids:
            check_own_head(draft.tensors[head], vocab_ids, target)
        elif head is not None and "token_id_remap" in names:  # a subset of the target's rows
            ignored[head] = OF_TARGET
        else:
            ignored |= copies_of_target(draft, target, head_table(target), "lm_head.weight")
        for name in draft.tensors:
            if _short(name) == "norm.weight":
                ignored[name] = "heads of this kind do not apply it"
            elif _short(name) == "token_id_remap":
                ignored[name] = "--frspec-path selects the drafted tokens"
            elif _short(name) == "t2d":
                ignored[name] = "d2t holds the same mapping"
        return DraftPlan(
            fields=replace(
                fields,
                embed_scale=target.fields.embed_scale if norms else 1.0,
                residual_scale=residual_scale(target.config, draft, target),
                logit_scale=target.fields.logit_scale,
            ),
            names=_engine_names,
            ignored=ignored,
            refuses_unknown=True,
            shares_head=not vocab_ids,
            window=WINDOW,
            options={
                "input_norms": bool(norms),
                "attention_norm": "layers.0.input_layernorm.weight" in names,
                "fc_bias": "fc.bias" in names,
                "vocab_ids": vocab_ids,
                "own_head": own_head,
            },
            quant=plan_quant(draft.config, draft.tensors),
        )


def _refuse_rotated(tensors: Tensors) -> None:
    """Refuses a head of a model whose weights were rotated before quantisation (CPM.cu's `rot`)."""
    if found := [name for name in tensors if _short(name) == ROTATION]:
        raise ValueError(
            f"{found[0]} is present: the head reads hidden states of a model with rotated weights, "
            "expected a head of a model without rotation"
        )


def _short(name: str) -> str:
    """The name in CPM.cu's naming scheme."""
    return _LAYERS.sub("layers.", name.removeprefix("model."))


def _engine_names(name: str, fields: SpecFields) -> Sequence[Piece]:
    short = _short(name)
    return () if short == "d2t" else canonical_names("draft." + short, fields)
