"""Code shared by block drafters: config.json and tensor names of DFlash and its kin.

| tensor | shape |
|---|---|
| `fc.weight` | [H, m H]: m hidden states of the target |
| `hidden_norm.weight`, `norm.weight` | [H] |
| `layers.i.*` | as a layer of Qwen3 |
| `mask_embedding` | [H], instead of the table's row of mask_token_id |
| `embed_tokens.weight`, `lm_head.weight` | copies of the target's; with `d2t` an own lm_head |

Names may begin with `model.`. Keys in `dflash_config` or `dspark_config` override those of the top
level. Files in the format of speculators have the keys of the layers in
`transformer_layer_config`.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cpmcu.checks import shown
from cpmcu.config import SpeculativeConfig
from cpmcu.drafters.heads import (
    EMBEDDING,
    OF_TARGET,
    check_own_head,
    check_vocabulary,
    draft_vocab_ids,
    head_fields,
    head_table,
    is_copy,
    refuse_quantised_head,
)
from cpmcu.drafters.options.blocks import BlockOptions
from cpmcu.drafters.options.trees import MAX_DRAFT_DEPTH
from cpmcu.drafters.registry import DraftFiles, DraftPlan, TargetModel, Tensors
from cpmcu.models.common import SpecFields, first_window_layer, with_attention
from cpmcu.models.names import Piece, canonical_names
from cpmcu.models.reader import ConfigReader
from cpmcu.quant.registry import plan_quant

CANDIDATES = 16  # candidates of a position, if the file does not say how many
_CAP = "final_logit_softcapping"
_NESTED = ("dflash_config", "dspark_config")  # if both have a key, the later one counts
_MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
# Target layers by their outputs, else by their inputs.
_LAYER_KEYS = (
    "target_layer_ids",
    *("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"),
)
_ALIASES = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^encoder\.fc\."), "fc."),
    (re.compile(r"^encoder\.output_norm_enc\."), "hidden_norm."),
    (re.compile(r"\.self_attn\.attention_sink_bias$"), ".self_attn.sinks"),
    (re.compile(r"^(candidate_selector\.\w+_codebook)\.weight$"), r"\1"),
    # LiLiCorr's first files number the parts of its MLPs.
    (re.compile(r"^lilicorr\.feature_mlp\.0\."), "lilicorr.feature_norm."),
    (re.compile(r"^(lilicorr\.feature_mlp)\.1\."), r"\1.up_proj."),
    (re.compile(r"^(lilicorr\.feature_mlp)\.3\."), r"\1.down_proj."),
    (re.compile(r"^(lilicorr\.layers\.\d+\.mlp)\.0\."), r"\1.up_proj."),
    (re.compile(r"^(lilicorr\.layers\.\d+\.mlp)\.2\."), r"\1.down_proj."),
)
# Heads with further parts: the prefix of their tensors -> a text that is in their architectures.
_OTHERS = {
    "xpress_head.": "XPress",
    "lilicorr.": "LiLiCorr",
    "aux_hidden_norms.": "Laguna",
    "hidden_dim_adapter.": "JetSpec with a hidden_dim_adapter",
}
# In names of architectures: block drafters whose layers are not those of Qwen3.
_OTHER_LAYERS = (
    *("Gemma4DSpark", "K3DSpark", "OmniDSpark", "LingDSpark", "Lfm2DSpark", "MuseSpark"),
    *("DSparkMiniMax", "DSparkV4", "DeepSeek"),
)


@dataclass(frozen=True, slots=True)
class BlockHead:
    """Settings that differ between the kinds of block drafters."""

    options: Mapping[str, Any]  # options of the C++ drafter
    from_anchor: bool  # the root's row predicts the first token
    topk: int  # candidates of a position
    fixed_topk: bool = False  # spec_topk_per_iter must be `topk`, or 1 for a chain
    drops_last: bool = False  # if from_anchor, the last row does not predict
    projector: str | None = None  # projector_type that config.json may have
    part: str | None = None  # prefix in _OTHERS whose tensors this kind reads
    # Tensors of many dimensions that are matrices here -> their dimensions without the last.
    matrices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    drafter: str | None = None  # name of the C++ drafter; None: the name of this drafter
    ignored: Mapping[str, str] | None = None  # tensor that is not needed -> reason


def is_block_head(tensors: Tensors) -> bool:
    """Do the tensors have the network of a block drafter?"""
    names = {short_name(name) for name in tensors}
    return "hidden_norm.weight" in names and any(name.startswith("fc.") for name in names)


def has_part(tensors: Tensors, prefix: str) -> bool:
    """Does a tensor's name begin with `prefix`?"""
    return any(short_name(name).startswith(prefix) for name in tensors)


def short_name(name: str) -> str:
    """The engine's name without "draft."."""
    for pattern, text in _ALIASES:
        name = pattern.sub(text, name)
    return name


def block_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config.json, with those of nested objects at the top level."""
    layers = config.get("transformer_layer_config") or {}
    merged = {**_object(layers, "transformer_layer_config"), **config}
    for key in _NESTED:
        nested = _object(config.get(key) or {}, key)
        merged |= {name: value for name, value in nested.items() if value is not None}
    return merged


def plan_block(
    draft: DraftFiles, target: TargetModel, speculation: SpeculativeConfig, head: BlockHead
) -> DraftPlan:
    """The plan of a block drafter. Raises ValueError for one that the engine cannot run right."""
    config, tensors = block_config(draft.config), draft.tensors
    _refuse_others(config, tensors, head)
    refuse_quantised_head(tensors)
    named = {short_name(name): name for name in tensors}
    reader = ConfigReader(config)
    rows = reader.positive_int("block_size", default=16)
    positions = rows if head.from_anchor and not head.drops_last else rows - 1
    if not 2 <= rows <= MAX_DRAFT_DEPTH + 1 or positions > MAX_DRAFT_DEPTH:
        raise reader.fail("block_size", f"2 to {MAX_DRAFT_DEPTH + (not head.from_anchor)}")
    given = speculation.of(BlockOptions)
    vocab_ids = draft_vocab_ids(draft, named["d2t"], target) if "d2t" in named else []
    topk = _candidates(given, head, len(vocab_ids) or target.fields.vocab_size)
    fields = _fields(replace(draft, config=config), target, tensors, rows)
    if not vocab_ids:
        check_vocabulary(draft, target)
    own_head, ignored = _tables(draft, target, named, vocab_ids)
    return DraftPlan(
        fields=fields,
        names=functools.partial(_engine_names, head.matrices),
        ignored={**ignored, **(head.ignored or {})},
        refuses_unknown=True,
        shares_head=not own_head and not vocab_ids,
        quantises_head=target.quantised,
        window=None,
        shape=given.block(positions, topk, chooses=speculation.chooses_shapes),
        drafter=head.drafter,
        options={
            "target_layers": _target_layers(config, target, given.spec_layer_shift),
            "block_size": rows,
            "predicts_from": 0 if head.from_anchor else 1,
            "causal_layers": _causal_layers(config, fields),
            "topk": topk,
            "vocab_ids": vocab_ids,
            "own_head": own_head,
            **_mask(config, named, draft, target),
            **head.options,
        },
        quant=plan_quant(config, tensors),
    )


def _object(value: object, key: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"config.json: {key} is {shown(value)}, expected an object")
    return value


def _refuse_others(config: Mapping[str, Any], tensors: Tensors, head: BlockHead) -> None:
    """Raises ValueError for a head whose further parts the engine does not have."""
    named = str(config.get("architectures"))
    found = [
        kind
        for part, kind in _OTHERS.items()
        if part != head.part and (has_part(tensors, part) or kind in named)
    ]
    found += [f"the layers of {part}" for part in _OTHER_LAYERS if part in named]
    if config.get("projector_type") not in (None, head.projector):
        found.append(f"a projector of type {shown(config['projector_type'])}")
    if config.get("attn_output_gate"):
        found.append("attn_output_gate")
    if config.get("lilicorr_enabled") and head.part != "lilicorr.":
        found.append("LiLiCorr")
    if found:
        raise ValueError(
            f"the draft has {found[0]}, expected DFlash, JetSpec, DFlash2, DSpark, Domino or "
            "LiLiCorr without further parts: without this part the engine would draft other tokens"
        )
    reader = ConfigReader(config)
    for key in ("rope_is_neox_style", "is_neox_style"):
        if not reader.flag(key, default=True):
            raise reader.fail(key, "true (interleaved rotary pairs are not supported in a draft)")
    if reader.positive_float("attention_value_scale", default=1.0) != 1:
        raise reader.fail("attention_value_scale", "1, the only scale of values that is supported")


def _candidates(given: BlockOptions, head: BlockHead, drafted: int) -> int:
    """The candidates of a position. `drafted`: tokens of the draft's vocabulary."""
    asked = given.spec_topk_per_iter
    if asked in (None, 1):
        return head.topk if head.fixed_topk else min(head.topk, drafted)
    if head.fixed_topk and asked != head.topk:
        raise ValueError(
            f"spec_topk_per_iter is {asked}, expected {head.topk}, the candidates that this draft "
            "was trained with, or 1 for a chain"
        )
    return asked


def _fields(draft: DraftFiles, target: TargetModel, tensors: Tensors, rows: int) -> SpecFields:
    config = dict(draft.config)
    reader = ConfigReader(config)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config.get("rope_theta") is None and not (isinstance(rope, dict) and "rope_theta" in rope):
        raise reader.fail("rope_theta", "the base of the draft's own rotary embedding")
    # The published heads rotate whole heads, also for targets that rotate a part.
    config.pop("partial_rotary_factor", None)
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(config.get(key), dict):
            config[key] = {k: v for k, v in config[key].items() if k != "partial_rotary_factor"}
    fields = head_fields(replace(draft, config=config), target)
    stated = config.get("num_target_layers")
    if stated not in (None, target.fields.num_hidden_layers):
        raise reader.fail(
            "num_target_layers", f"{target.fields.num_hidden_layers}, the layers of the target"
        )
    width = reader.positive_int("target_hidden_size", default=target.fields.hidden_size)
    if width != target.fields.hidden_size:
        raise reader.fail(
            "target_hidden_size", f"{target.fields.hidden_size}, the hidden_size of the target"
        )
    biased = any(name.endswith("self_attn.o_proj.bias") for name in tensors)
    sinks = any(name.endswith("self_attn.attention_sink_bias") for name in tensors)
    length = target.max_model_len or target.fields.max_position_embeddings
    params = []
    for window in _windows(config, fields.num_hidden_layers):
        if 0 < window < rows:
            raise ValueError(
                f"config.json: a sliding window of {window} is smaller than block_size {rows}, "
                "expected a window that holds a block"
            )
        params.append(
            {"o_bias": biased, "sinks": sinks} | ({"window": window} if 0 < window < length else {})
        )
    scale = reader.positive_float("logit_scale", default=1.0)
    return replace(
        with_attention(fields, params),
        zero_centred_norms=reader.flag("use_gemma_norm"),
        embed_scale=reader.positive_float("input_embedding_scale", default=1.0),
        logit_scale=reader.positive_float("output_multiplier", default=scale),
        logit_softcap=reader.positive_float(_CAP) if config.get(_CAP) else 0.0,
    )


def _kinds(config: Mapping[str, Any], num_layers: int) -> list[str] | None:
    kinds, reader = config.get("layer_types"), ConfigReader(config)
    if kinds is None:
        if not reader.flag("use_sliding_window") or config.get("sliding_window") is None:
            return None
        first = first_window_layer(config)
        return ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - set(known):
        raise reader.fail("layer_types", f"{num_layers} of full_attention or sliding_attention")
    return kinds


def _windows(config: Mapping[str, Any], num_layers: int) -> list[int]:
    """The window of each layer in tokens; 0: none."""
    reader = ConfigReader(config)
    kinds = _kinds(config, num_layers) or ["full_attention"] * num_layers
    if "sliding_attention" not in kinds:
        if not reader.flag("use_swa"):
            return [0] * num_layers
        kinds = ["sliding_attention"] * num_layers
    of_swa = config.get("swa_window_size") is not None
    window = reader.positive_int("swa_window_size" if of_swa else "sliding_window")
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


def _causal_layers(config: Mapping[str, Any], fields: SpecFields) -> list[int]:
    """Layers in which a row of a block sees no later rows."""
    num_layers = fields.num_hidden_layers
    reader = ConfigReader(config)
    for key in ("is_causal", "causal", "causal_head"):
        if config.get(key) is not None:
            return list(range(num_layers)) if reader.flag(key) else []
    kinds = _kinds(config, num_layers) or []
    if "transformer_layer_config" in config and reader.flag("sliding_window_non_causal", True):
        return []
    return [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]


def _target_layers(config: Mapping[str, Any], target: TargetModel, more: int) -> list[int]:
    """The target layers whose inputs are read: the input of layer l + 1 is the output of l.

    `more`: spec_layer_shift.
    """
    num_layers = target.fields.num_hidden_layers
    key = next((key for key in _LAYER_KEYS if config.get(key) is not None), _LAYER_KEYS[0])
    shift, ids = int(key == _LAYER_KEYS[0]), config.get(key)
    expected = f"layers of the target, {-shift} to {num_layers - 1 - shift}, in the order of fc"
    if not isinstance(ids, list) or not ids:
        raise ConfigReader(config).fail(key, expected)
    layers = [layer + shift if type(layer) is int else -1 for layer in ids]
    if not all(0 <= layer < num_layers for layer in layers):
        last = num_layers in layers
        raise ConfigReader(config).fail(
            key, expected + (" (the output of the last layer cannot be read)" if last else "")
        )
    layers = [layer + more for layer in layers]
    if not all(0 <= layer < num_layers for layer in layers):
        raise ValueError(
            f"spec_layer_shift is {more}, but then the draft reads the inputs of layers "
            f"{shown(layers)}, expected layers of the target, 0 to {num_layers - 1}"
        )
    return layers


def _mask(
    config: Mapping[str, Any], named: Mapping[str, str], draft: DraftFiles, target: TargetModel
) -> dict[str, Any]:
    if (draft.directory / "mask_embedding.pt").exists() and "mask_embedding" not in named:
        raise ValueError(
            "mask_embedding.pt is present, expected its embedding as the tensor mask_embedding of "
            "model.safetensors"
        )
    own = "mask_embedding" in named
    key = next((key for key in _MASK_KEYS if config.get(key) is not None), _MASK_KEYS[0])
    rows = target.fields.vocab_size
    mask = config.get(key, 0 if own else None)
    if type(mask) is not int or not (own or 0 <= mask < rows):
        raise ConfigReader(config).fail(
            key, f"a row of the target's embedding table, 0 to {rows - 1}"
        )
    return {"mask_id": mask if mask < rows else 0, "mask_embedding": own}


def _tables(
    draft: DraftFiles, target: TargetModel, named: Mapping[str, str], vocab_ids: Sequence[int]
) -> tuple[bool, dict[str, str]]:
    """Returns (does the draft have an own lm_head?, the reason by tensor that is not read).

    Raises ValueError if the embedding table is not a copy of the target's.
    """
    ignored = {named["t2d"]: "d2t holds the same mapping"} if "t2d" in named else {}
    if (table := named.get("embed_tokens.weight")) is not None:
        if not is_copy(draft, table, target, EMBEDDING):
            raise ValueError(
                f"{table} differs from the target's, expected a copy: a draft with an embedding "
                "table of its own is not supported"
            )
        ignored[table] = OF_TARGET
    head = named.get("lm_head.weight")
    if head is None:
        if vocab_ids:
            raise ValueError("d2t is present, expected lm_head.weight of the draft, too")
        return False, ignored
    check_own_head(draft.tensors[head], vocab_ids, target)
    if vocab_ids or not is_copy(draft, head, target, head_table(target)):
        return True, ignored
    return False, ignored | {head: OF_TARGET}


def _engine_names(
    matrices: Mapping[str, tuple[int, ...]], name: str, fields: SpecFields
) -> Sequence[Piece]:
    short = short_name(name)
    if short in ("d2t", "t2d") or short.startswith("confidence_head."):
        return ()
    if leading := matrices.get(short):
        return (Piece("draft." + short, 0, math.prod(leading), leading=leading),)
    return canonical_names("draft." + short, fields)
