"""LiLiCorr heads: a small transformer over all candidates of a DFlash block scores their pairs.

| tensor `lilicorr.` | shape |
|---|---|
| `token_proj`, if N is not H; `pass_hidden_proj`, `context_proj` | [N, H], bias |
| `feature_norm`; `feature_mlp.{up_proj, down_proj}` | [5], bias; [N, 5], [N, N], biases |
| `slot_embedding`, `rank_embedding` | [1, 1, S, 1, N], [1, 1, 1, K, N]: S rows predict |
| `relative_slot_bias`, `same_slot_bias` | [heads, 2 S + 1], [heads] |
| `layers.i.{attn_norm, mlp_norm}.weight` | [N] |
| `layers.i.attn.in_proj_{weight, bias}`, `.out_proj` | [3N, N], [3N]; [N, N], bias |
| `layers.i.mlp.{up_proj, down_proj}` | [I, N], [N, I], biases |
| `output_norm.weight`, `anchor_norm.weight` | [N] |
| `factor_input_proj`; `out_head`, `in_head`, `anchor_out_head` | [N, 3N], bias; [F, N], biases |

The first files number the parts of MLPs: `feature_mlp.{0, 1, 3}`, `layers.i.mlp.{0, 2}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpmcu.config import SpeculativeConfig
from cpmcu.drafters.blocks import BlockHead, block_config, has_part, plan_block, short_name
from cpmcu.drafters.registry import DraftFiles, DraftPlan, TargetModel, Tensors, register_drafter
from cpmcu.models.reader import ConfigReader

MAX_CANDIDATES = 16
# Ends of names of tensors that are not quantised.
_PLAIN = (".weight", ".bias", "_proj_weight", "_proj_bias", "_embedding", "_slot_bias")


@register_drafter("lilicorr")
class LiLiCorr:
    """A LiLiCorr head."""

    has_checkpoint = True
    also_named = ("dflash",)  # its backbone is DFlash

    def matches(self, config: Mapping[str, Any], tensors: Tensors) -> bool:
        return has_part(tensors, "lilicorr.")

    def plan(
        self, draft: DraftFiles | None, target: TargetModel, speculation: SpeculativeConfig
    ) -> DraftPlan:
        assert draft is not None
        config = block_config(draft.config)
        reader = ConfigReader(config)
        _refuse(config, draft.tensors, reader)
        topk = reader.positive_int("lilicorr_candidate_topk", most=MAX_CANDIDATES)
        if topk & (topk - 1):
            raise reader.fail("lilicorr_candidate_topk", f"a power of two up to {MAX_CANDIDATES}")
        rows = reader.positive_int("block_size", default=16)
        head = BlockHead(
            options={**_transformer(reader, target.fields.hidden_size), **_convolution(reader)},
            from_anchor=False,
            topk=topk,
            fixed_topk=True,
            projector="lilicorr",
            part="lilicorr.",
            matrices={
                "lilicorr.slot_embedding": (1, 1, rows - 1, 1),
                "lilicorr.rank_embedding": (1, 1, 1, topk),
            },
        )
        return plan_block(draft, target, speculation, head)


def _refuse(config: Mapping[str, Any], tensors: Tensors, reader: ConfigReader) -> None:
    """Raises ValueError for a head that was trained for other rows, or is stored otherwise."""
    if not reader.flag("lilicorr_enabled", default=True):
        raise reader.fail("lilicorr_enabled", "true, as the tensors of a LiLiCorr head are present")
    if reader.flag("sample_from_anchor"):
        raise reader.fail(
            "sample_from_anchor", "false: the root's row of LiLiCorr predicts nothing"
        )
    if has_part(tensors, "d2t"):
        raise ValueError(
            "d2t is present, expected a LiLiCorr head of the target's whole vocabulary"
        )
    for name, meta in tensors.items():
        is_plain = name.endswith(_PLAIN) and meta.dtype in ("float32", "float16", "bfloat16")
        if short_name(name).startswith("lilicorr.") and not is_plain:
            raise ValueError(
                f"{name} is of a quantised matrix, expected the matrices of a LiLiCorr head in 16 "
                "or 32 bits: only the layers before it may be quantised"
            )


def _transformer(reader: ConfigReader, hidden_size: int) -> dict[str, Any]:
    """The options of the transformer. No key has a default: no tensor shows a wrong scale."""
    size = reader.config.get("lilicorr_hidden_size")
    if type(size) is not int or size < 0:
        raise reader.fail("lilicorr_hidden_size", "a number of values; 0: hidden_size")
    size = size or hidden_size
    return {
        "head_size": size,
        "head_layers": reader.positive_int("lilicorr_num_layers"),
        "head_heads": reader.positive_int("lilicorr_num_heads"),
        "head_inner": int(size * reader.positive_float("lilicorr_mlp_ratio")),
        "num_factors": reader.positive_int("lilicorr_factor_dim"),
        "vector_eps": reader.positive_float("lilicorr_vector_eps"),
        "factor_scale": reader.positive_float("lilicorr_logit_scale"),
    }


def _convolution(reader: ConfigReader) -> dict[str, Any]:
    """The options of DFlash2's convolutions; none without a width."""
    if not reader.config.get("conv_kernel_size"):
        return {}
    return {
        "conv_width": reader.positive_int("conv_kernel_size"),
        "conv_group": reader.positive_int("conv_group_size"),
    }
