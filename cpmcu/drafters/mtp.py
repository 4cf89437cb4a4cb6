"""Multi-token prediction (MTP): modules in the target's own checkpoint or in a directory.

Qwen3-Next and Qwen3.5 have one module (other names: mtp_layouts.py):

    x = mtp.fc [norm(embedding of token t + 1) | norm(hidden state of token t)]
    hidden = mtp.norm(one gated attention layer(x)); logits = the target's lm_head of hidden

The hidden state is the target's after its final norm. The embedding table and lm_head are the
target's. A single module runs once for each drafted token; after the first one, it reads its own
hidden states. Of several modules, each drafts one token
(csrc/speculative/drafters/mtp_modules.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cpmcu.config import SpeculativeConfig
from cpmcu.drafters.heads import check_vocabulary
from cpmcu.drafters.mtp_layouts import (
    Layout,
    count_modules,
    describe,
    find_layout,
    is_chained,
    unread,
)
from cpmcu.drafters.options.mtp import MtpOptions
from cpmcu.drafters.registry import DraftFiles, DraftPlan, TargetModel, Tensors, register_drafter
from cpmcu.loading.progress import list_names
from cpmcu.models.common import SpecFields
from cpmcu.models.experts import expert_names
from cpmcu.models.names import Piece
from cpmcu.models.reader import ConfigReader
from cpmcu.quant.registry import DENSE, plan_quant, quantised_tensors

PREFIX = "mtp."
_NUM_LAYERS = "mtp_num_hidden_layers"
_NORMS = {"pre_fc_norm_embedding": "input_norm1", "pre_fc_norm_hidden": "input_norm2"}
MODULES = (
    "fc",
    *_NORMS,
    "norm",
    *(f"layers.0.{name}" for name in ("input_layernorm", "post_attention_layernorm")),
    *(f"layers.0.self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *(f"layers.0.self_attn.{part}" for part in ("q_norm", "k_norm")),
)
_EXPERTS = "layers.0.mlp.experts"
_MLP_PARTS = ("gate_proj", "up_proj", "down_proj")
DENSE_MODULES = (*MODULES, *(f"layers.0.mlp.{part}" for part in _MLP_PARTS))
EXPERT_MODULES = (
    *MODULES,
    *("layers.0.mlp.gate", _EXPERTS, "layers.0.mlp.shared_expert_gate"),
    *(f"layers.0.mlp.shared_expert.{part}" for part in _MLP_PARTS),
)


@register_drafter("mtp")
class Mtp:
    """MTP modules of one layer each."""

    has_checkpoint = True
    in_target = True
    only_by_name = True  # a whole model with such a head is a draft model, too

    def matches(self, config: Mapping[str, Any], tensors: Tensors) -> bool:
        """Matches a config of Qwen's head without tensors, too; `plan` refuses it."""
        if any(name.startswith(PREFIX) for name in tensors) or bool(config.get(_NUM_LAYERS)):
            return True
        return find_layout(config, tensors) is not None

    def plan(
        self, draft: DraftFiles | None, target: TargetModel, speculation: SpeculativeConfig
    ) -> DraftPlan:
        assert draft is not None
        if (layout := find_layout(draft.config, draft.tensors)) is not None:
            return _plan_modules(draft, target, speculation, layout)
        tensors = {name: meta for name, meta in draft.tensors.items() if name.startswith(PREFIX)}
        mlp = _check_tensors(tensors, target)
        if draft.config.get(_NUM_LAYERS) not in (None, 0, 1):
            raise ConfigReader(draft.config).fail(_NUM_LAYERS, "1, the only depth of an MTP head")
        ConfigReader(draft.config).refuse(
            "mtp_use_dedicated_embeddings", "the MTP head uses the target's embedding table"
        )
        if not target.fields.zero_centred_norms:
            raise ValueError(
                "mtp.* tensors are present, expected a target with the layers of Qwen3-Next or "
                "Qwen3.5"
            )
        check_vocabulary(draft, target)
        block = _block(target, mlp)
        if mlp == "moe" and not block[1]:
            raise ValueError("the MTP head has experts, expected a target that has experts, too")
        quant = plan_quant(draft.config, tensors) if quantised_tensors(tensors) else DENSE
        return DraftPlan(
            fields=_fields(target, block),
            names=_engine_names,
            refuses_unknown=True,
            shares_head=True,
            quantises_head=target.quantised or quant is not DENSE,
            window=None,
            quant=quant,
        )


def _plan_modules(
    draft: DraftFiles, target: TargetModel, speculation: SpeculativeConfig, layout: Layout
) -> DraftPlan:
    """The plan of modules with other names than Qwen's."""
    check_vocabulary(draft, target)
    num_modules = count_modules(draft, layout)
    if speculation.of(MtpOptions).enable_multi_layers_mtp is False:
        num_modules = 1
    several = num_modules > 1
    tensors = {n: meta for n, meta in draft.tensors.items() if layout.split(n) is not None}
    quant = plan_quant(draft.config, tensors) if quantised_tensors(tensors) else DENSE
    fields = _fields(target, _block(target, "moe") if layout.has_experts else ("mlp", {}))
    if layout.has_experts and not all(params for (_, params) in fields.layers[0]):
        raise ValueError(
            "the MTP head has the layers of Nemotron 3, expected a target with its attention and "
            "experts"
        )
    inner = ConfigReader(draft.config).positive_int("intermediate_size", fields.intermediate_size)
    return DraftPlan(
        fields=replace(fields, intermediate_size=inner),
        names=layout.names(num_modules),
        ignored=unread(draft, layout, num_modules),
        refuses_unknown=True,
        shares_head=True,
        quantises_head=target.quantised or quant is not DENSE,
        window=None,
        drafter="mtp_modules" if several else None,
        options={
            "hidden_first": layout.hidden_first,
            **({"num_modules": num_modules, "chain_hidden": is_chained(draft)} if several else {}),
        },
        longest=num_modules if several else None,
        quant=quant,
    )


def _fields(target: TargetModel, block: tuple[str, Mapping[str, Any]]) -> SpecFields:
    """The fields of a module's layer, whose second block is `block`."""
    return replace(
        target.fields,
        num_hidden_layers=1,
        layers=((_block(target, "attention"), block),),
        tie_word_embeddings=False,
    )


def _check_tensors(tensors: Tensors, target: TargetModel) -> str:
    """The kind of the head's second block, "mlp" or "moe".

    Raises ValueError unless the tensors are those of a head with one layer.
    """
    if not tensors:
        raise ValueError(
            f"no tensor's name begins with {describe(target)}, expected the MTP head "
            "(some quantised exports drop it; draft_model_path may name another export)"
        )
    modules = {_module_of(name) for name in tensors}
    wanted = EXPERT_MODULES if _EXPERTS in modules else DENSE_MODULES
    if missing := [PREFIX + module for module in wanted if module not in modules]:
        raise ValueError(
            f"the MTP head has no {list_names(missing)}, expected one layer with all its tensors"
        )
    if others := sorted(PREFIX + module for module in modules - set(wanted)):
        raise ValueError(
            f"the MTP head has {list_names(others)}, expected the tensors of one layer alone"
        )
    return "moe" if _EXPERTS in modules else "mlp"


def _module_of(name: str) -> str:
    """The module of a tensor; all experts are one module."""
    rest = name.removeprefix(PREFIX)
    return _EXPERTS if rest.startswith(_EXPERTS + ".") else rest.rpartition(".")[0]


def _block(target: TargetModel, kind: str) -> tuple[str, Mapping[str, Any]]:
    """The first block of this kind in the target's layers."""
    blocks = (block for layer in target.fields.layers for block in layer)
    return next((block for block in blocks if block[0] == kind), (kind, {}))


def _engine_names(name: str, fields: SpecFields) -> Sequence[Piece]:
    if not name.startswith(PREFIX):
        return ()
    module, dot, rest = name.removeprefix(PREFIX).partition(".")
    return expert_names(f"draft.{_NORMS.get(module, module)}{dot}{rest}", fields)
