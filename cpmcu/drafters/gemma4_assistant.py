"""Gemma 4's assistants: small networks without keys of their own, which read the target's cache.

| tensor | shape |
|---|---|
| `pre_projection.weight` | [h, 2 H]: embedding and hidden state of the target |
| `model.layers.i.*` | a layer of Gemma 4 without k_proj and v_proj |
| `model.norm.weight` | [h] |
| `model.embed_tokens.weight` or `lm_head.weight` | [V, h]: the output head |
| `post_projection.weight` | [H, h]: the hidden state of the next token |
| `masked_embedding.*` | not read: the engine computes the logits of all tokens |

A layer attends to the keys and values of the target's last layer that is of its kind and stores
keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cpmcu.checks import shown
from cpmcu.config import SpeculativeConfig
from cpmcu.drafters.heads import check_vocabulary, refuse_quantised_head
from cpmcu.drafters.registry import DraftFiles, DraftPlan, TargetModel, Tensors, register_drafter
from cpmcu.models.common import BuildOptions, SpecFields, layer_kinds
from cpmcu.models.gemma4 import FULL_INTERVAL, KINDS, build_gemma4, gemma4_names, stored_layers
from cpmcu.models.names import Piece
from cpmcu.models.reader import ConfigReader
from cpmcu.quant.registry import plan_quant

_HEAD, _TABLE = "lm_head.weight", "model.embed_tokens.weight"
_MASKED = "masked_embedding."
# Parameters of an attention block that are those of the target's layer.
_SHARED = ("head_dim", "num_key_value_heads", "window", "rope_inv_freq", "rope_attention_scaling")


@register_drafter("gemma4_assistant")
class Gemma4Assistant:
    """An assistant of a Gemma 4 model."""

    has_checkpoint = True

    def matches(self, config: Mapping[str, Any], tensors: Tensors) -> bool:
        return any(name.startswith("pre_projection.") for name in tensors)

    def plan(
        self, draft: DraftFiles | None, target: TargetModel, speculation: SpeculativeConfig
    ) -> DraftPlan:
        assert draft is not None
        reader = ConfigReader(draft.config)
        if not str(target.config.get("model_type")).startswith("gemma4"):
            raise ValueError(
                f"the draft is an assistant of Gemma 4, but the target's model_type is "
                f"{shown(target.config.get('model_type'))}, expected a Gemma 4 model"
            )
        width = reader.positive_int("backbone_hidden_size", default=1536)
        if width != target.fields.hidden_size:
            raise reader.fail(
                "backbone_hidden_size", f"{target.fields.hidden_size}, the target's hidden_size"
            )
        check_vocabulary(draft, target)
        refuse_quantised_head(draft.tensors)
        ignored = {
            name: "the logits of all tokens are computed"
            for name in draft.tensors
            if name.startswith(_MASKED)
        }
        if _HEAD in draft.tensors and _TABLE in draft.tensors:
            ignored[_TABLE] = "lm_head is stored, too"
        return DraftPlan(
            fields=_fields(draft, target),
            names=_engine_names,
            ignored=ignored,
            refuses_unknown=True,
            window=None,
            options={"own_head": True},
            quant=plan_quant(draft.config, draft.tensors),
        )


def _fields(draft: DraftFiles, target: TargetModel) -> SpecFields:
    """The fields of the assistant's layers, each with the target's layer whose keys it reads."""
    config = {
        **draft.config,
        "num_kv_shared_layers": 0,  # no layer shares keys of an own layer
        "hidden_size_per_layer_input": draft.config.get("hidden_size_per_layer_input") or 0,
    }
    reader = ConfigReader(config)
    for key in ("enable_moe_block", "use_double_wide_mlp"):
        reader.refuse(key, "an assistant has one MLP a layer")
    if config["hidden_size_per_layer_input"]:
        raise reader.fail("hidden_size_per_layer_input", "0, as assistants have")
    fields = build_gemma4(
        config, BuildOptions(device=target.device, max_model_len=target.max_model_len)
    )
    kinds = layer_kinds(reader, fields.num_hidden_layers, FULL_INTERVAL)
    kinds[-1] = KINDS[1]
    stored = stored_layers(target.config, target.fields.num_hidden_layers)
    layers = []
    for i, kind in enumerate(kinds):
        if kind not in stored:
            raise ValueError(
                f"the assistant has a layer of {kind}, expected only kinds of layers that the "
                "target has"
            )
        mine, theirs = _attention(fields, i), _attention(target.fields, stored[kind])
        for key in ("head_dim", "num_key_value_heads"):
            if mine[key] != theirs[key]:
                raise ValueError(
                    f"config.json: {key} of {kind} is {mine[key]}, expected {theirs[key]}, as in "
                    f"layer {stored[kind]} of the target"
                )
        params = {key: value for key, value in mine.items() if key not in _SHARED}
        params |= {key: theirs[key] for key in _SHARED if key in theirs}
        (name, _), *rest = fields.layers[i]
        layers.append(((name, params | {"kv_layer": stored[kind]}), *rest))
    return replace(fields, layers=tuple(layers), vocab_size=target.fields.vocab_size)


def _attention(fields: SpecFields, layer: int) -> dict[str, Any]:
    """The parameters of a layer's attention, those of the whole model included."""
    own = dict(fields.layers[layer])["attention"]
    return {
        "head_dim": fields.head_dim,
        "num_key_value_heads": fields.num_key_value_heads,
        "rope_inv_freq": fields.rope_inv_freq,
        "rope_attention_scaling": fields.rope_attention_scaling,
        **own,
    }


def _engine_names(name: str, fields: SpecFields) -> Sequence[Piece]:
    if name.startswith(_MASKED):
        return ()
    if name in (_HEAD, _TABLE):
        return (Piece("draft." + _HEAD),)
    return [
        replace(piece, name="draft." + piece.name.removeprefix("model."))
        for piece in gemma4_names(name, fields)
    ]
