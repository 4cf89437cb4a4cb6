"""The multi-token-prediction head of Qwen3-Next and Qwen3.5, in the target's own checkpoint.

    x = mtp.fc [norm(embedding of token t + 1) | norm(hidden state of token t)]
    hidden = mtp.norm(one gated attention layer(x)); logits = the target's lm_head of hidden

The hidden state is the target's after its final norm. For a drafted token it is the head's own. The
embedding table and lm_head are the target's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cpmcu.config import SpeculativeConfig
from cpmcu.drafters.heads import check_vocabulary
from cpmcu.drafters.registry import DraftFiles, DraftPlan, TargetModel, Tensors, register_drafter
from cpmcu.loading.progress import list_names
from cpmcu.models.common import SpecFields
from cpmcu.models.names import Piece, canonical_names
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
    *(f"layers.0.mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj")),
)


@register_drafter("mtp")
class Mtp:
    """An MTP head of one layer."""

    has_checkpoint = True
    in_target = True
    only_by_name = True  # a whole model with such a head is a draft model, too

    def matches(self, config: Mapping[str, Any], tensors: Tensors) -> bool:
        """Also matches a config that states a head without tensors, which `plan` refuses."""
        return any(name.startswith(PREFIX) for name in tensors) or bool(config.get(_NUM_LAYERS))

    def plan(
        self, draft: DraftFiles | None, target: TargetModel, speculation: SpeculativeConfig
    ) -> DraftPlan:
        assert draft is not None
        tensors = {name: meta for name, meta in draft.tensors.items() if name.startswith(PREFIX)}
        _check_tensors(tensors)
        ConfigReader(draft.config).refuse(
            "mtp_use_dedicated_embeddings", "the MTP head uses the target's embedding table"
        )
        if not target.fields.zero_centred_norms:
            raise ValueError(
                "mtp.* tensors are present, expected a target with the layers of Qwen3-Next or "
                "Qwen3.5"
            )
        check_vocabulary(draft, target)
        quant = plan_quant(draft.config, tensors) if quantised_tensors(tensors) else DENSE
        return DraftPlan(
            fields=replace(
                target.fields,
                num_hidden_layers=1,
                layers=((_attention(target), ("mlp", {})),),
                tie_word_embeddings=False,
            ),
            names=_engine_names,
            refuses_unknown=True,
            shares_head=True,
            quantises_head=target.quantised or quant is not DENSE,
            window=None,
            quant=quant,
        )


def _check_tensors(tensors: Tensors) -> None:
    """Raises ValueError unless the tensors are those of a head with one dense layer."""
    if not tensors:
        raise ValueError(
            "no tensor's name begins with mtp., expected the MTP head of Qwen3-Next or Qwen3.5 "
            "(some quantised exports drop it; draft_model_path may name another export)"
        )
    modules = {name.removeprefix(PREFIX).rpartition(".")[0] for name in tensors}
    if missing := [PREFIX + module for module in MODULES if module not in modules]:
        raise ValueError(
            f"the MTP head has no {list_names(missing)}, expected one dense layer with all its "
            "tensors"
        )
    if others := sorted(PREFIX + module for module in modules - set(MODULES)):
        raise ValueError(
            f"the MTP head has {list_names(others)}, expected the tensors of one dense layer alone"
        )


def _attention(target: TargetModel) -> tuple[str, Mapping[str, Any]]:
    """The attention block of the target's layers."""
    blocks = (block for layer in target.fields.layers for block in layer)
    return next((block for block in blocks if block[0] == "attention"), ("attention", {}))


def _engine_names(name: str, fields: SpecFields) -> Sequence[Piece]:
    if not name.startswith(PREFIX):
        return ()
    module, dot, rest = name.removeprefix(PREFIX).partition(".")
    return canonical_names(f"draft.{_NORMS.get(module, module)}{dot}{rest}", fields)
