"""EAGLE-3 and 3.1 heads: inputs are auxiliary hidden states of three target layers.

EAGLE-3.1 norms the input of fc: `fc_norm.0` to `fc_norm.2` [H] norm the auxiliary hidden states one
by one, or `input_norm` [3H] norms all of them together (config.json: norm_before_fc).

The tensors are `fc.weight` [H, 3H], one layer `midlayer.*` (or `layers.0.*`) with `hidden_norm`,
and `norm`. A head with a smaller vocabulary has `lm_head` and `d2t`: target id = draft id +
d2t[draft id].
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cpmcu.checks import shown
from cpmcu.config import SpeculativeConfig
from cpmcu.drafters.heads import (
    EMBEDDING,
    WINDOW,
    check_own_head,
    check_scales,
    copies_of_target,
    draft_vocab_ids,
    head_fields,
    is_scaled,
    refuse_quantised_head,
    residual_scale,
)
from cpmcu.drafters.registry import DraftFiles, DraftPlan, TargetModel, Tensors, register_drafter
from cpmcu.models.common import SpecFields
from cpmcu.models.names import Piece, canonical_names
from cpmcu.models.reader import ConfigReader
from cpmcu.models.rope import DEFAULT_THETA
from cpmcu.quant.registry import plan_quant

logger = logging.getLogger(__name__)

_LAYER = re.compile(r"^layers\.0\.")
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@register_drafter("eagle3")
class Eagle3:
    """An EAGLE-3 head."""

    has_checkpoint = True

    def matches(self, config: Mapping[str, Any], tensors: Tensors) -> bool:
        return any(_short(name) == "midlayer.hidden_norm.weight" for name in tensors)

    def plan(
        self, draft: DraftFiles | None, target: TargetModel, speculation: SpeculativeConfig
    ) -> DraftPlan:
        assert draft is not None
        config, tensors = draft.config, draft.tensors
        refuse_quantised_head(tensors)
        check_scales(draft, target)
        names = {_short(name): name for name in tensors}
        fields = head_fields(draft, target, _unstated_rope(tensors, target))
        if fields.num_hidden_layers != 1:
            raise ValueError(
                f"config.json: num_hidden_layers is {fields.num_hidden_layers}, expected 1"
            )
        layers = _aux_hidden_layers(config, target)
        if not names.keys() & {"fc.qweight", "fc.weight_packed"}:  # the engine checks these
            if "fc.weight" not in names:
                raise ValueError("fc.weight is missing, expected the tensors of an EAGLE-3 head")
            _check_fc(tensors[names["fc.weight"]].shape, layers, target)
        vocab_ids = _vocab_ids(draft, names, target)
        own_head = "lm_head.weight" in names
        if own_head:
            check_own_head(tensors[names["lm_head.weight"]], vocab_ids, target)
        ignored = copies_of_target(draft, target, EMBEDDING, "embed_tokens.weight")
        ignored |= {
            name: "d2t holds the same mapping" for short, name in names.items() if short == "t2d"
        }
        norms = _input_norms(config, names, len(layers))
        own_scale = config.get("dim_model_base") is not None
        return DraftPlan(
            fields=replace(
                fields,
                embed_scale=target.fields.embed_scale,
                residual_scale=residual_scale(config, draft, target),
                logit_scale=target.fields.logit_scale if own_scale or not own_head else 1.0,
            ),
            names=_engine_names,
            ignored=ignored,
            refuses_unknown=True,
            shares_head=not own_head and not vocab_ids,
            window=WINDOW,
            options={
                "target_layers": layers,
                "vocab_ids": vocab_ids,
                "own_head": own_head,
                "norm_output": _flag(config, "norm_output"),
                "norm_before_residual": _flag(config, "norm_before_residual"),
                **dict.fromkeys(norms, True),
            },
            quant=plan_quant(config, tensors),
        )


def _eagle_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The object `eagle_config` of config.json; empty if there is none."""
    nested = config.get("eagle_config") or {}
    if not isinstance(nested, Mapping):
        raise ValueError(f"config.json: eagle_config is {shown(nested)}, expected an object")
    return nested


def _flag(config: Mapping[str, Any], key: str) -> bool:
    """A boolean of config.json or of its eagle_config; false if neither has the key."""
    nested = ConfigReader(_eagle_config(config), "config.json: eagle_config")
    return ConfigReader(config).flag(key, default=nested.flag(key))


def _input_norms(config: Mapping[str, Any], names: Mapping[str, str], num_layers: int) -> list[str]:
    """The kinds of norms of fc's input: "fc_norm", "norm_before_fc", or none.

    Raises ValueError if config.json states a kind whose tensors are missing, or tensors of both
    kinds are there. `use_aux_norm` is an older name of fc_norm.
    """
    kinds = {
        "fc_norm": [f"fc_norm.{i}.weight" for i in range(num_layers)],
        "norm_before_fc": ["input_norm.weight"],
    }
    stated = {kind: _flag(config, kind) for kind in kinds}
    stated["fc_norm"] |= _flag(config, "use_aux_norm")
    found = []
    for kind, tensors in kinds.items():
        missing = [name for name in tensors if name not in names]
        if stated[kind] and missing:
            raise ValueError(f"config.json: {kind} is true, expected the tensor {missing[0]}, too")
        if not missing:
            found.append(kind)
    if len(found) > 1:
        raise ValueError("fc_norm and input_norm are present, expected norms of one kind before fc")
    return found


def _unstated_rope(tensors: Tensors, target: TargetModel) -> Mapping[str, Any] | None:
    """The RoPE of a head without RoPE keys: the default of the training code.

    None (the target's RoPE) for MiniCPM's heads in CPM.cu's naming, as in CPM.cu.
    """
    of_cpmcu = any(name.startswith("midlayer.") for name in tensors)
    if of_cpmcu and is_scaled(target.config):
        return None
    return {"rope_theta": DEFAULT_THETA}


def _aux_hidden_layers(config: Mapping[str, Any], target: TargetModel) -> list[int]:
    """The target layers whose inputs are the auxiliary hidden states."""
    num_layers = target.fields.num_hidden_layers
    nested = _eagle_config(config).get(_LAYER_IDS)
    stated = config.get(_LAYER_IDS) or nested
    default = [2, num_layers // 2, num_layers - 3]
    layers = stated or default
    if not isinstance(layers, list) or not all(
        type(layer) is int and 0 <= layer < num_layers for layer in layers
    ):
        kind = "config.json" if stated else "the default"
        raise ValueError(
            f"{kind}: {_LAYER_IDS} is {shown(layers)}, expected layers of the target, 0 to "
            f"{num_layers - 1}"
        )
    # In eagle_config, some trainers write the default layers by their outputs: each id is one less.
    if stated is nested and layers == [layer - 1 for layer in default]:
        logger.info(
            "eagle_config: %s is %s, taken as outputs of layers: inputs of %s",
            _LAYER_IDS,
            layers,
            default,
        )
        return default
    return layers


def _check_fc(shape: tuple[int, ...], layers: list[int], target: TargetModel) -> None:
    expected = len(layers) * target.fields.hidden_size
    if shape[1:] != (expected,):
        raise ValueError(
            f"fc.weight has shape {list(shape)}, expected {expected} columns: {len(layers)} "
            f"auxiliary hidden states of the target's hidden_size {target.fields.hidden_size}"
        )


def _vocab_ids(draft: DraftFiles, names: Mapping[str, str], target: TargetModel) -> list[int]:
    """Returns the target id of each draft id; empty if the ids are the same."""
    vocab_size = target.fields.vocab_size
    if "d2t" not in names:
        stated = draft.config.get("draft_vocab_size") or draft.config.get("vocab_size")
        if stated not in (None, vocab_size):
            raise ValueError(
                f"config.json: the draft's vocabulary is {stated}, expected {vocab_size}, the "
                "target's, of a head without d2t"
            )
        return []
    return draft_vocab_ids(draft, names["d2t"], target)


def _short(name: str) -> str:
    return _LAYER.sub("midlayer.", name.removeprefix("model."))


def _engine_names(name: str, fields: SpecFields) -> Sequence[Piece]:
    short = _short(name)
    return () if short == "d2t" else canonical_names("draft." + short, fields)
