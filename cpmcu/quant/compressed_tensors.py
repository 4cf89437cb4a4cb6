"""compressed-tensors: 4-bit integer weights ("pack-quantized"), and FP8 ("float-quantized").

With 4 bits, each linear layer has `weight_packed` int32 [N, K / 8], `weight_scale` [N, G],
`weight_shape`, and optionally `weight_zero_point` int32 [N / 8, G].
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from cpmcu.checks import shown
from cpmcu.loading.tensors import TensorMeta
from cpmcu.quant.fp8 import plan_fp8
from cpmcu.quant.int4 import (
    CHANNEL_WISE,
    Format,
    check_bits,
    check_group_size,
    check_present,
    plan_int4,
    quantised_modules,
)
from cpmcu.quant.registry import QuantPlan, quant_config_of, register_quant

logger = logging.getLogger(__name__)

_FORMAT, _FP8 = "pack-quantized", "float-quantized"
_OTHER_FORMATS = {
    "dense": "16-bit weights",
    "int-quantized": "W8A8: 8-bit integers for weights and activations",
    "naive-quantized": "8 bits",
    "marlin-24": "4-bit integers with 2:4 sparsity",
    "nvfp4-pack-quantized": "NVFP4",
    "mxfp4-pack-quantized": "MXFP4",
    "mxfp8-quantized": "MXFP8",
    "mixed-precision": "several formats",
}
_IN_ORDER = (None, False, "weight", "static")  # values of actorder that keep groups in order of K


@register_quant("compressed-tensors")
class CompressedTensors:
    """4-bit or FP8 weights; activations stay in 16 bits."""

    def matches(self, quant_config: Mapping[str, Any], tensors: Mapping[str, TensorMeta]) -> bool:
        return quant_config.get("quant_method") == "compressed-tensors"

    def plan(self, config: Mapping[str, Any], tensors: Mapping[str, TensorMeta]) -> QuantPlan:
        quant = quant_config_of(config)
        groups = _object(quant, "config_groups")
        schemes = [group for group in groups.values() if isinstance(group, Mapping)]
        if schemes and all(_format(group, quant) == _FP8 for group in schemes):
            _refuse_transforms(quant)
            return plan_fp8("compressed-tensors", tensors)
        if not schemes:
            raise ValueError(
                f"quantization_config: config_groups is {shown(groups)}, expected a group of layers"
            )
        for scheme in schemes:
            _check_format(_format(scheme, quant))
            _check_group(scheme)
        check_present("compressed-tensors", tensors, ".weight_packed")
        if quant.get("kv_cache_scheme"):
            logger.info("kv_cache_scheme is not used: --kv-cache-dtype chooses the dtype")
        _refuse_transforms(quant)
        sparsity = _object(quant, "sparsity_config").get("format", "dense")
        if sparsity != "dense":
            raise ValueError(f"quantization_config: sparsity is {shown(sparsity)}, expected none")
        first = schemes[0]["weights"]
        keys = ("strategy", "group_size", "symmetric")
        for scheme in schemes[1:]:
            if any(scheme["weights"].get(key) != first.get(key) for key in keys):
                raise ValueError(
                    "quantization_config: config_groups differ in their weights, expected one "
                    "scheme for all layers"
                )
        if any(name.endswith(".weight_g_idx") for name in tensors):
            raise ValueError("a weight_g_idx (actorder) is present, expected groups in order of K")
        channel = first.get("strategy") == "channel"
        return plan_int4(
            "compressed-tensors",
            Format.COMPRESSED,
            tensors,
            group_size=CHANNEL_WISE if channel else check_group_size(first.get("group_size")),
            zero_points=first.get("symmetric", True) is False,
            ignored={
                module + ".weight_shape": "the model implies the shape"
                for module in quantised_modules(tensors, ".weight_shape")
            },
        )


def _format(scheme: Mapping[str, Any], quant: Mapping[str, Any]) -> Any:
    """The format of a group of layers."""
    return scheme.get("format") or quant.get("format")


def _check_format(stated: Any) -> None:
    """Raises ValueError for another format than 4-bit integers."""
    if stated != _FORMAT:
        what = _OTHER_FORMATS.get(str(stated))
        raise ValueError(
            f"quantization_config: format is {shown(stated)}{f' ({what})' if what else ''}, "
            f"expected {_FORMAT!r} or, for all layers, {_FP8!r}; name the model's 16-bit files, or "
            "its files in one of these formats"
        )


def _object(parent: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object at `key`; empty for null. Raises ValueError for other types."""
    value = parent.get(key) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"quantization_config: {key} is {shown(value)}, expected an object")
    return value


def _refuse_transforms(quant: Mapping[str, Any]) -> None:
    """Raises ValueError for transforms of activations. Stored weights include their transforms."""
    transforms = _object(quant, "transform_config")
    for group in _object(transforms, "config_groups").values():
        places = group.get("apply") if isinstance(group, Mapping) else None
        for place in places if isinstance(places, list) else [{}]:
            at = place.get("location") if isinstance(place, Mapping) else None
            if at not in ("weight_input", "weight_output"):
                raise ValueError(
                    f"quantization_config: transform_config has the location {shown(at)}, expected "
                    "'weight_input' or 'weight_output' (activations are not transformed)"
                )


def _check_group(scheme: Mapping[str, Any]) -> None:
    """Raises ValueError unless exactly the weights are quantised, as 4-bit integers."""
    weights = _object(scheme, "weights")
    check_bits(weights.get("num_bits"))
    if weights.get("type", "int") != "int":
        raise ValueError(
            f"quantization_config: the weights are {shown(weights['type'])}, expected 'int'"
        )
    if weights.get("strategy") not in ("group", "channel"):
        raise ValueError(
            f"quantization_config: strategy is {shown(weights.get('strategy'))}, expected "
            "'group' or 'channel'"
        )
    if weights.get("actorder") not in _IN_ORDER:
        raise ValueError(
            f"quantization_config: actorder is {shown(weights['actorder'])} (groups follow the "
            "order of activations), expected null, 'weight' or 'static'"
        )
    for key in ("input_activations", "output_activations"):
        if scheme.get(key):
            raise ValueError(
                f"quantization_config: {key} is present, expected weights alone to be quantised"
            )
