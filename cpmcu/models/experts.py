"""Code shared by families with a mixture of experts: layers of config.json, tensor names.

A layer with experts has the block "moe" (csrc/layers/moe.cpp) instead of "mlp". The engine names
the tensors of each expert apart: `mlp.experts.7.gate_proj.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cpmcu.checks import shown
from cpmcu.models.common import SpecFields
from cpmcu.models.names import Piece, canonical_names
from cpmcu.models.reader import ConfigReader

_EXPERTS = re.compile(r"^(?P<experts>.*\blayers\.(?P<layer>\d+)\.mlp\.experts\.)(?P<rest>.+)$")


def read_experts(reader: ConfigReader) -> dict[str, Any]:
    """The parameters of a moe block without a shared expert. Raises ValueError for wrong keys."""
    # transformers 5 writes num_experts as num_local_experts.
    keys = ("num_experts", "n_routed_experts")
    key = next((key for key in keys if key in reader.config), "num_local_experts")
    num_experts = reader.positive_int(key)
    top_k = reader.positive_int("num_experts_per_tok")
    if top_k > num_experts:
        raise reader.fail("num_experts_per_tok", f"at most {key}={num_experts}")
    width = reader.positive_int("moe_intermediate_size")
    if width % 8:
        raise reader.fail("moe_intermediate_size", "a multiple of 8")
    return {
        "num_experts": num_experts,
        "top_k": top_k,
        "intermediate_size": width,
        "norm_topk_prob": reader.flag("norm_topk_prob"),
    }


def expert_layers(reader: ConfigReader, num_layers: int) -> list[int]:
    """The layers with experts: each `decoder_sparse_step`-th, except `mlp_only_layers`."""
    step = reader.positive_int("decoder_sparse_step", default=1)
    dense = reader.config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise reader.fail("mlp_only_layers", "a list of layer numbers")
    return [layer for layer in range(num_layers) if (layer + 1) % step == 0 and layer not in dense]


def with_experts(
    fields: SpecFields, layers: Collection[int], params: Mapping[str, Any]
) -> SpecFields:
    """The fields with a moe block instead of the MLP in these layers."""
    blocks = fields.layers or ((("attention", {}), ("mlp", {})),) * fields.num_hidden_layers
    changed = tuple(
        tuple(("moe", params) if kind == "mlp" and i in layers else (kind, own) for kind, own in of)
        for i, of in enumerate(blocks)
    )
    return replace(fields, layers=changed)


def with_shared_expert(
    fields: SpecFields, reader: ConfigReader, layers: Collection[int]
) -> SpecFields:
    """The fields with experts, one of them shared by all tokens, in these layers.

    Raises ValueError for wrong keys of config.json.
    """
    if not layers:
        return fields
    params = read_experts(reader)
    width = reader.positive_int("shared_expert_intermediate_size")
    if width % 8:
        raise reader.fail("shared_expert_intermediate_size", "a multiple of 8")
    return with_experts(fields, layers, params | {"shared_intermediate_size": width})


def expert_names(name: str, fields: SpecFields) -> Sequence[Piece]:
    """Splits tensors of all experts into tensors of each; other names: `canonical_names`.

    | checkpoint | engine |
    |---|---|
    | gate_up_proj [E, 2 I, H] | gate_proj and up_proj of each expert |
    | down_proj [E, H, I] | down_proj of each expert |
    | NAME_blocks, NAME_scales (MXFP4) | NAME.blocks and NAME.scales of each expert |

    Raises ValueError for an expert that config.json does not have.
    """
    found = _EXPERTS.match(name)
    params = _params_of(int(found["layer"]), fields) if found else None
    if found is None or params is None:
        return canonical_names(name, fields)
    num_experts, width = params["num_experts"], params["intermediate_size"]
    index, dot, _ = found["rest"].partition(".")
    if dot and index.isdecimal():
        if int(index) >= num_experts:
            raise ValueError(
                f"{shown(name)} is of expert {index}, but config.json has {num_experts} experts, "
                f"expected 0 to {num_experts - 1}"
            )
        return (Piece(name),)
    stacks = {
        "gate_up_proj": (("gate_proj", width), ("up_proj", width)),
        "down_proj": (("down_proj", params.get("latent_size", fields.hidden_size)),),
    }
    module, _, kind = found["rest"].rpartition("_")
    if module in stacks and kind in ("blocks", "scales"):  # MXFP4 of gpt-oss
        rows = sum(num_rows for _, num_rows in stacks[module])
        return [
            Piece(f"{found['experts']}{i}.{module}.{kind}", i * rows, rows, (num_experts, rows))
            for i in range(num_experts)
        ]
    stack = stacks.get(found["rest"].removesuffix(".weight"))
    if stack is None:
        return (Piece(name),)
    rows = sum(num_rows for _, num_rows in stack)
    pieces, first_row = [], 0
    for expert in range(num_experts):
        for part, num_rows in stack:
            own = f"{found['experts']}{expert}.{part}.weight"
            pieces.append(Piece(own, first_row, num_rows, leading=(num_experts, rows)))
            first_row += num_rows
    return pieces


def _params_of(layer: int, fields: SpecFields) -> Mapping[str, Any] | None:
    if layer >= len(fields.layers):
        return None
    kinds = ("moe", "mlp_and_experts")
    return next((params for kind, params in fields.layers[layer] if kind in kinds), None)
