"""compressed-tensors: integers of 4 or 8 bits, and floats. Each group of modules has a format.

* pack-quantized: `weight_packed` int32 [N, K / 8] (8 bits: [N, K / 4]), `weight_scale` [N, G],
  `weight_shape`, maybe `weight_zero_point` int32 [N / 8, G] (8 bits: [N / 4, G])
* int-quantized: `weight` int8 [N, K], `weight_scale` [N, 1] or one for the matrix
* float-quantized: cpmcu/quant/fp8.py
* nvfp4-pack-quantized, mxfp4-pack-quantized, mxfp8-quantized: cpmcu/quant/float_groups.py
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cpmcu.checks import shown
from cpmcu.loading.tensors import TensorMeta
from cpmcu.quant.float_groups import E8M0, FloatFormat, float_group_part
from cpmcu.quant.fp8 import E4M3, fp8_part
from cpmcu.quant.int4 import (
    CHANNEL_WISE,
    GROUP_SIZES,
    Format,
    check_bits,
    check_group_size,
    int4_part,
    quantised_modules,
)
from cpmcu.quant.int8 import Int8Format, int8_part
from cpmcu.quant.parts import Part, plan_parts
from cpmcu.quant.registry import QuantPlan, quant_config_of, register_quant

logger = logging.getLogger(__name__)

_PACKED, _PLAIN, _FP8 = "pack-quantized", "int-quantized", "float-quantized"
_GROUPS = {
    "nvfp4-pack-quantized": FloatFormat.NVFP4,
    "mxfp4-pack-quantized": FloatFormat.MXFP4,
    "mxfp8-quantized": FloatFormat.MXFP8,
}
_NAMES = {form: name for name, form in _GROUPS.items()}
_FORMATS = (_PACKED, _PLAIN, _FP8, *_GROUPS)
_NOT_USED = (".weight_shape", ".input_scale", ".input_zero_point", ".output_scale")
_OTHER_FORMATS = {
    "dense": "16-bit weights",
    "naive-quantized": "8 bits",
    "marlin-24": "4-bit integers with 2:4 sparsity",
    "mxfp6-pack-quantized": "MXFP6",
    "mixed-precision": "several formats, but a group does not say which",
}
_IN_ORDER = (None, False, "weight", "static")  # values of actorder that keep groups in order of K


@dataclass(frozen=True, slots=True)
class _Form:
    """How modules are stored: the format, and the settings of integer weights."""

    format: str
    bits: int = 8
    group_size: int = CHANNEL_WISE
    zero_points: bool = False


@register_quant("compressed-tensors")
class CompressedTensors:
    """Integer or float weights, each module after its group; activations stay in 16 bits."""

    def matches(self, quant_config: Mapping[str, Any], tensors: Mapping[str, TensorMeta]) -> bool:
        return quant_config.get("quant_method") == "compressed-tensors"

    def plan(self, config: Mapping[str, Any], tensors: Mapping[str, TensorMeta]) -> QuantPlan:
        quant = quant_config_of(config)
        groups = _object(quant, "config_groups")
        stated = [group for group in groups.values() if isinstance(group, Mapping)]
        if not stated:
            raise ValueError(
                f"quantization_config: config_groups is {shown(groups)}, expected a group of layers"
            )
        forms = [(group, _form(group, quant)) for group in stated]
        if quant.get("kv_cache_scheme"):
            logger.info("kv_cache_scheme is not used: --kv-cache-dtype chooses the dtype")
        _refuse_transforms(quant)
        sparsity = _object(quant, "sparsity_config").get("format", "dense")
        if sparsity != "dense":
            raise ValueError(f"quantization_config: sparsity is {shown(sparsity)}, expected none")
        if any(name.endswith(".weight_g_idx") for name in tensors):
            raise ValueError("a weight_g_idx (actorder) is present, expected groups in order of K")
        modules: dict[_Form, list[str]] = {}
        for suffix in (".weight_packed", ".weight"):
            for module in quantised_modules(tensors, suffix):
                name = _stored_format(module, suffix, tensors)
                if name is not None:
                    modules.setdefault(_form_of(module, name, forms), []).append(module)
        if not modules:
            packed = all("pack" in form.format for _, form in forms)
            raise ValueError(
                "quantization_config says compressed-tensors, but no tensor ends in "
                f"{'.weight_packed' if packed else '.weight'} with quantised weights"
            )
        parts = [_part(form, tensors, its) for form, its in modules.items()]
        return plan_parts("compressed-tensors", tensors, parts)


def _stored_format(module: str, suffix: str, tensors: Mapping[str, TensorMeta]) -> str | None:
    """The format that a module's tensors have; None: it is not quantised."""
    dtype = tensors[module + suffix].dtype
    if suffix == ".weight_packed":
        if dtype != "uint8":
            return _PACKED
        is_nvfp4 = module + ".weight_global_scale" in tensors
        return _NAMES[FloatFormat.NVFP4 if is_nvfp4 else FloatFormat.MXFP4]
    scale = tensors.get(module + ".weight_scale")
    if dtype == E4M3:
        powers = scale is not None and scale.dtype in E8M0
        return _NAMES[FloatFormat.MXFP8] if powers else _FP8
    return _PLAIN if dtype == "int8" else None


def _form_of(
    module: str, format_name: str, forms: Sequence[tuple[Mapping[str, Any], _Form]]
) -> _Form:
    """The form of a module whose tensors have this format.

    A group that names the module comes before regular expressions ("re:"), and these before
    classes of modules, such as Linear. Raises ValueError if no group has the module.
    """
    fitting = [(group, form) for group, form in forms if form.format == format_name]
    for matches in (_is_named, _is_matched, _is_class):
        for group, form in fitting:
            targets = group.get("targets")
            for target in targets if isinstance(targets, list) else []:
                if matches(str(target), module):
                    return form
    raise ValueError(
        f"{module} is {format_name}, but no group of config_groups with this format has it among "
        "its targets"
    )


def _is_named(target: str, module: str) -> bool:
    return target == module


def _is_matched(target: str, module: str) -> bool:
    if not target.startswith("re:"):
        return False
    try:
        return re.match(target[3:], module) is not None
    except re.error as error:
        raise ValueError(
            f"quantization_config: the target {shown(target)} is no regular expression: {error}"
        ) from error


def _is_class(target: str, module: str) -> bool:
    return not target.startswith("re:") and target.isidentifier() and target[:1].isupper()


def _part(form: _Form, tensors: Mapping[str, TensorMeta], modules: Sequence[str]) -> Part:
    if form.format == _FP8:
        return fp8_part(tensors, modules)
    if form.format in _GROUPS:
        return float_group_part(_GROUPS[form.format], tensors, modules)
    names = [module + suffix for module in modules for suffix in _NOT_USED]
    ignored = {name: reason for name in names if (reason := _reason(name, tensors))}
    if form.bits == 4:
        return int4_part(
            Format.COMPRESSED,
            tensors,
            modules,
            group_size=form.group_size,
            zero_points=form.zero_points,
            ignored=ignored,
        )
    packed = Int8Format.COMPRESSED if form.format == _PACKED else Int8Format.PLAIN
    return int8_part(
        packed,
        tensors,
        modules,
        group_size=form.group_size,
        zero_points=form.zero_points,
        ignored=ignored,
    )


def _reason(name: str, tensors: Mapping[str, TensorMeta]) -> str:
    """Why a tensor is not used; empty if there is no such tensor."""
    if name not in tensors:
        return ""
    is_shape = name.endswith("_shape")
    return "the model implies the shape" if is_shape else "activations are not quantised"


def _form(group: Mapping[str, Any], quant: Mapping[str, Any]) -> _Form:
    """The form of a group. Raises ValueError for one that is not supported."""
    stated = _format(group, quant)
    _check_format(stated)
    if stated == _FP8 or stated in _GROUPS:
        return _Form(stated)
    weights = _object(group, "weights")
    bits = check_bits(weights.get("num_bits"), *((4, 8) if stated == _PACKED else (8,)))
    _check_group(group, activations=stated == _PLAIN)
    by_group = weights.get("strategy") == "group"
    zero_points = weights.get("symmetric", True) is False
    if stated == _PLAIN and zero_points:
        raise ValueError(
            f"quantization_config: symmetric is false, expected true of {_PLAIN}; name the model's "
            f"16-bit files, or its files with 8 bits in {_PACKED}"
        )
    if not by_group:
        return _Form(stated, bits, CHANNEL_WISE, zero_points)
    group_size = check_group_size(weights.get("group_size"), GROUP_SIZES[bits])
    return _Form(stated, bits, group_size, zero_points)


def _format(scheme: Mapping[str, Any], quant: Mapping[str, Any]) -> Any:
    """The format of a group of layers."""
    return scheme.get("format") or quant.get("format")


def _check_format(stated: Any) -> None:
    """Raises ValueError for a format that is not read."""
    if stated not in _FORMATS:
        what = _OTHER_FORMATS.get(str(stated))
        raise ValueError(
            f"quantization_config: format is {shown(stated)}{f' ({what})' if what else ''}, "
            f"expected one of: {', '.join(_FORMATS)}; name the model's 16-bit files, or its files "
            "in one of these formats"
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


def _check_group(group: Mapping[str, Any], *, activations: bool) -> None:
    """Raises ValueError for weights that are no integers, or groups that are not in order.

    `activations`: may they be quantised in the file? They are not here.
    """
    weights = _object(group, "weights")
    if weights.get("type", "int") != "int":
        raise ValueError(
            f"quantization_config: the weights are {shown(weights['type'])}, expected 'int'"
        )
    known = ("group", "channel", "tensor") if activations else ("group", "channel")
    if weights.get("strategy") not in known:
        raise ValueError(
            f"quantization_config: strategy is {shown(weights.get('strategy'))}, expected "
            f"{' or '.join(map(repr, known))}"
        )
    if weights.get("actorder") not in _IN_ORDER:
        raise ValueError(
            f"quantization_config: actorder is {shown(weights['actorder'])} (groups follow the "
            "order of activations), expected null, 'weight' or 'static'"
        )
    for key in ("input_activations", "output_activations"):
        if group.get(key) and not activations:
            raise ValueError(
                f"quantization_config: {key} is present, expected weights alone to be quantised"
            )
