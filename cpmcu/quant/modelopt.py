"""ModelOpt: FP8, NVFP4, MXFP4 and MXFP8, one for all layers or one for each.

The algorithm is `quant_algo` of config.json or hf_quant_config.json. MiniMax's files of MXFP8 have
the same tensors. The form of a module follows from its tensors: `weight` is e4m3, or uint8 with two
codes of 4 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpmcu.checks import shown
from cpmcu.loading.tensors import TensorMeta
from cpmcu.quant.float_groups import E8M0, FloatFormat, float_group_part
from cpmcu.quant.fp8 import E4M3, fp8_part, modules_of
from cpmcu.quant.parts import Part, plan_parts
from cpmcu.quant.registry import QuantPlan, quant_config_of, register_quant

_ALGORITHMS = (
    "fp8", "fp8_per_channel_per_token", "fp8_pb_wo", "fp8_block_scales", "nvfp4", "w4a16_nvfp4",
    "nvfp4_four_over_six", "w4a8_nvfp4_fp8", "mxfp4", "mxfp8", "mixed_precision",
)  # fmt: skip
_FP8 = "FP8"


@register_quant("modelopt")
class ModelOpt:
    """Floats of 4 and 8 bits; activations stay in 16 bits."""

    def matches(self, quant_config: Mapping[str, Any], tensors: Mapping[str, TensorMeta]) -> bool:
        method = quant_config.get("quant_method")
        algorithm = str(quant_config.get("quant_algo")).lower()
        return method == "mxfp8" or (method == "modelopt" and algorithm in _ALGORITHMS)

    def plan(self, config: Mapping[str, Any], tensors: Mapping[str, TensorMeta]) -> QuantPlan:
        smoothed = next((name for name in tensors if name.endswith(".pre_quant_scale")), None)
        if smoothed is not None:
            raise ValueError(
                f"{smoothed} scales activations (AWQ or SVD of ModelOpt), expected none; name the "
                "model's 16-bit files, or its files in NVFP4 or FP8"
            )
        modules: dict[FloatFormat | str, list[str]] = {}
        for dtype in (E4M3, "uint8"):
            for module in modules_of(tensors, dtype):
                modules.setdefault(_form(module, tensors), []).append(module)
        if not modules:
            quant = quant_config_of(config)
            stated = shown(quant.get("quant_algo") or quant.get("quant_method"))
            raise ValueError(f"quantization_config says {stated}, but no weight is {E4M3} or uint8")
        parts = [_part(form, tensors, its) for form, its in modules.items()]
        return plan_parts("modelopt", tensors, parts)


def _form(module: str, tensors: Mapping[str, TensorMeta]) -> FloatFormat | str:
    """The form of a module. Raises ValueError for scales of another kind."""
    weight, scale = tensors[module + ".weight"], tensors.get(module + ".weight_scale")
    powers = scale is not None and scale.dtype in E8M0
    if weight.dtype == E4M3:
        return FloatFormat.MXFP8 if powers else _FP8
    if powers:
        return FloatFormat.MXFP4_MODELOPT
    if scale is not None and scale.dtype == E4M3:
        return FloatFormat.NVFP4_MODELOPT
    found = f"{scale.dtype} {list(scale.shape)}" if scale is not None else "missing"
    raise ValueError(
        f"{module}.weight is uint8 and its weight_scale is {found}, expected {E4M3} [N, K / 16] "
        "(NVFP4) or uint8 [N, K / 32] (MXFP4)"
    )


def _part(form: FloatFormat | str, tensors: Mapping[str, TensorMeta], its: list[str]) -> Part:
    if isinstance(form, FloatFormat):
        return float_group_part(form, tensors, its)
    return fp8_part(tensors, its)
