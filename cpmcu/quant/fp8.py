"""FP8 weights (e4m3) with their scales, from any tool: w = e4m3 * scale, activations in 16 bits.

Each linear layer has `weight` float8_e4m3fn [N, K], and `weight_scale_inv` or `weight_scale`: one
for 128 x 128 numbers, for a row, or for the matrix. Their shape tells which. `weight_scale_inv`
multiplies too; its name is historic. Scales of activations (`input_scale`) are not used.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from cpmcu.checks import shown
from cpmcu.loading.tensors import TensorMeta
from cpmcu.quant.parts import Part, plan_parts
from cpmcu.quant.registry import LinearOptions, QuantPlan, quant_config_of, register_quant

logger = logging.getLogger(__name__)

E4M3 = "float8_e4m3fn"
BLOCK = 128
_INVERSE, _PLAIN = ".weight_scale_inv", ".weight_scale"
_NOT_USED = (".input_scale", ".output_scale")


@register_quant("fp8")
class Fp8:
    """FP8 of Qwen, DeepSeek and AutoRound; compressed-tensors and ModelOpt have their own files."""

    def matches(self, quant_config: Mapping[str, Any], tensors: Mapping[str, TensorMeta]) -> bool:
        return quant_config.get("quant_method") == "fp8"

    def plan(self, config: Mapping[str, Any], tensors: Mapping[str, TensorMeta]) -> QuantPlan:
        quant = quant_config_of(config)
        stated = quant.get("weight_block_size")
        if stated is not None and stated != [BLOCK, BLOCK]:
            raise ValueError(
                f"quantization_config: weight_block_size is {shown(stated)}, expected "
                f"[{BLOCK}, {BLOCK}] or null"
            )
        return plan_fp8(str(quant["quant_method"]), tensors)


def plan_fp8(scheme: str, tensors: Mapping[str, TensorMeta]) -> QuantPlan:
    """The plan of a checkpoint whose quantised layers all have one kind of FP8 scales.

    Raises ValueError if no weight is FP8, one has no scale, or scales are of different kinds.
    """
    modules = modules_of(tensors, E4M3)
    if not modules:
        raise ValueError(f"quantization_config says {scheme}, but no weight is {E4M3}")
    return plan_parts(scheme, tensors, [fp8_part(tensors, modules)])


def modules_of(tensors: Mapping[str, TensorMeta], dtype: str) -> list[str]:
    """The modules whose `weight` has this dtype."""
    return [
        name.removesuffix(".weight")
        for name, meta in tensors.items()
        if name.endswith(".weight") and meta.dtype == dtype
    ]


def fp8_part(tensors: Mapping[str, TensorMeta], modules: Sequence[str]) -> Part:
    """The modules with FP8 weights. Raises ValueError unless all have one kind of scales."""
    inverse = any(module + _INVERSE in tensors for module in modules)
    suffix = _INVERSE if inverse else _PLAIN
    # Kind of scales -> the first module that they do not fit.
    kinds = dict.fromkeys(("inverse",) if inverse else ("tensor", "channel", "block"), "")
    for module in modules:
        if module + suffix not in tensors:
            raise ValueError(
                f"{module}.weight is {E4M3} and has no {suffix[1:]}, expected a scale for each "
                "FP8 weight"
            )
        fitting = _kinds(tensors[module + ".weight"], tensors[module + suffix])
        for kind in kinds:
            if kind not in fitting and not kinds[kind]:
                kinds[kind] = module
    fits = [kind for kind, misfit in kinds.items() if not misfit]
    if not fits:
        module = next(iter(kinds.values()))
        found = list(tensors[module + suffix].shape)
        shape = list(tensors[module + ".weight"].shape)
        raise ValueError(
            f"{module}{suffix} has shape {found} for a weight {shape}, expected scales of one "
            f"kind in the whole file: for {BLOCK} x {BLOCK} numbers, a row, or a matrix"
        )
    unused = [module + suffix for module in modules for suffix in _NOT_USED]
    logger.info("FP8 weights are multiplied with activations of 16 bits")
    return Part(
        modules,
        LinearOptions(layout="fp8", format=fits[0]),
        f"FP8 with scales for a {fits[0]}" if fits[0] in ("tensor", "channel") else "FP8 in blocks",
        ignored={n: "activations are not quantised" for n in unused if n in tensors},
    )


def _kinds(weight: TensorMeta, scale: TensorMeta) -> set[str]:
    """The kinds of scales that fit the shapes; dimensions of 1 do not count."""
    if len(weight.shape) != 2:
        return set()
    n, k = weight.shape
    found = [size for size in scale.shape if size != 1]
    blocks = [size for size in (math.ceil(n / BLOCK), math.ceil(k / BLOCK)) if size != 1]
    kinds = {"tensor"} if not found else set()
    if math.prod(found) == n and len(found) <= 1:
        kinds.add("channel")
    if found == blocks:
        kinds |= {"block", "inverse"}
    return kinds
