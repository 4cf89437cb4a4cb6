"""Registry of quantisation schemes.

The scheme of a checkpoint follows from its `quantization_config` and its tensors, not from its
path. To add a scheme, add one file to this package, and its linear method to csrc/linear. Code
outside the package may also call `register_quant`.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy.typing as npt

import cpmcu.quant
from cpmcu.checks import shown
from cpmcu.loading.tensors import TensorMeta

Arrays = Mapping[str, npt.NDArray[Any]]
# Name of a tensor -> its array, in the dtype of the checkpoint.
Read = Callable[[str], npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Repack:
    """Converts some tensors of the checkpoint to tensors of the engine.

    `outputs` is known before tensors are read, so names, shapes and dtypes can be checked. Modules
    of outputs have the checkpoint's names. `run` gets the inputs by name in their storage dtypes.
    """

    inputs: tuple[str, ...]
    outputs: tuple[TensorMeta, ...]
    run: Callable[[Arrays], Arrays]


@dataclass(frozen=True, slots=True)
class LinearOptions:
    """How the files store quantised matrices: LinearOptions of csrc/core/model_spec.h."""

    layout: str = ""  # how weights are packed: a name in the engine's table of layouts
    format: str = ""  # format of the tensors in the files; empty: the layout has only one
    group_size: int = 0  # inputs (k) that share a scale; -1: a whole row; 0: the layout decides
    zero_points: bool = False
    scale_dtype: str = "float16"
    stacked: bool = False  # the files hold parts such as q, k and v as one tensor

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, as the engine takes them."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class QuantPlan:
    """Storage and linear methods of the linear layers of one checkpoint."""

    scheme: str
    linear_method: str  # name of the C++ linear method
    linear_options: LinearOptions = LinearOptions()
    # Module -> its method, instead of linear_method.
    linear_overrides: dict[str, str] = field(default_factory=dict)
    # Module -> options, of those that differ from `linear_options`.
    module_options: dict[str, LinearOptions] = field(default_factory=dict)
    # Tensors that are changed at load; all others are streamed unchanged.
    repacks: Sequence[Repack] = ()
    ignored: Mapping[str, str] = field(default_factory=dict)  # redundant tensor -> reason
    # Checks the contents of small tensors before the load; raises ValueError.
    verify: Callable[[Read], None] | None = None


DENSE = QuantPlan(scheme="dense", linear_method="dense")


class QuantScheme(Protocol):
    """Interface of a scheme; each file of this package implements it."""

    def matches(self, quant_config: Mapping[str, Any], tensors: Mapping[str, TensorMeta]) -> bool:
        """Does the checkpoint have this scheme? `quant_config` may be empty."""

    def plan(self, config: Mapping[str, Any], tensors: Mapping[str, TensorMeta]) -> QuantPlan:
        """The plan of a matching checkpoint. Raises ValueError for an unsupported variant."""


_NEXT_STEP = "name the model's 16-bit files, or its files in a format that docs/formats.md lists"
_schemes: dict[str, tuple[QuantScheme, str]] = {}


def register_quant(name: str) -> Callable[[type[QuantScheme]], type[QuantScheme]]:
    """Registers the decorated class (constructed without arguments) as the scheme `name`.

    Raises ValueError if another class is registered as `name`.
    """

    def register(scheme: type[QuantScheme]) -> type[QuantScheme]:
        source = inspect.getsourcefile(scheme) or "<unknown>"
        if name in _schemes and type(_schemes[name][0]).__qualname__ != scheme.__qualname__:
            raise ValueError(
                f"quantisation scheme {name!r} is registered twice: by {_schemes[name][1]} and "
                f"by {source}"
            )
        _schemes[name] = (scheme(), source)
        return scheme

    return register


def plan_quant(config: Mapping[str, Any], tensors: Mapping[str, TensorMeta]) -> QuantPlan:
    """Finds the scheme of a checkpoint and makes its plan.

    Raises ValueError if no scheme or several schemes match.
    """
    quant_config = quant_config_of(config)
    supported = ", ".join(registered_quants())
    matching = [n for n, (scheme, _) in _schemes.items() if scheme.matches(quant_config, tensors)]
    if len(matching) > 1:
        raise ValueError(
            f"the checkpoint fits several quantisation schemes ({', '.join(matching)}), expected "
            "exactly one"
        )
    if not matching:
        raise ValueError(
            f"the checkpoint is quantised with {describe(quant_config, tensors)}, which is not "
            f"supported, expected one of: {supported}; name the model's 16-bit files, or its "
            "files in one of these formats"
        )
    try:
        return _schemes[matching[0]][0].plan(config, tensors)
    except ValueError as error:
        if "name the model's" in str(error):
            raise
        raise ValueError(f"{error}; {_NEXT_STEP}") from error


def registered_quants() -> dict[str, str]:
    """Returns the file that registered each scheme, sorted by the scheme's name."""
    for module in pkgutil.iter_modules(cpmcu.quant.__path__, "cpmcu.quant."):
        importlib.import_module(module.name)
    return {name: _schemes[name][1] for name in sorted(_schemes)}


def describe(quant_config: Mapping[str, Any], tensors: Mapping[str, TensorMeta]) -> str:
    """Short description of the scheme for error messages."""
    if quant_config:
        method = quant_config.get("quant_method") or "an unnamed method"
        bits = quant_config.get("bits") or quant_config.get("w_bit")
        algorithm = quant_config.get("quant_algo")  # algorithm of a ModelOpt checkpoint
        detail = f"{bits} bits" if bits else algorithm
        return f"{method} ({detail})" if detail else str(method)
    example = quantised_tensors(tensors)[0]
    return f"an unnamed scheme (tensor {example} of {tensors[example].dtype})"


def quantised_tensors(tensors: Mapping[str, TensorMeta]) -> list[str]:
    """Names of the tensors that belong to quantised layers."""
    suffixes = (".qweight", ".qzeros", ".g_idx", ".weight_packed", ".weight_scale", ".absmax")
    return [
        name
        for name, meta in tensors.items()
        if name.endswith(suffixes)
        or (name.endswith("_proj.weight") and not meta.dtype.startswith(("float", "bfloat")))
        or meta.dtype.startswith("float8")
    ]


def quant_config_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """quantization_config of a config.json, or {}. Raises ValueError if it is not an object."""
    for key in ("quantization_config", "compression_config"):
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise ValueError(f"config.json: {key} is {shown(value)}, expected an object or null")
        return _by_format(value)
    mlx = config.get("quantization")
    if isinstance(mlx, dict) and "group_size" in mlx:
        return {"quant_method": "mlx", **mlx}
    return {}


def with_modelopt(config: dict[str, Any], modelopt: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with the quantisation of ModelOpt's hf_quant_config.json, unless it states one."""
    stated = modelopt.get("quantization")
    if not isinstance(stated, Mapping) or quant_config_of(config):
        return config
    return {**config, "quantization_config": {"quant_method": "modelopt", **stated}}


# Names of kernels or tools -> the format that the files have.
_FORMATS = {
    "gptq_marlin": "gptq",
    "auto_gptq": "gptq",
    "awq_marlin": "awq",
    "auto_awq": "awq",
    "gpt_oss_mxfp4": "mxfp4",
    "modelopt_fp4": "modelopt",
    "modelopt_mxfp8": "modelopt",
    "modelopt_mixed": "modelopt",
}
_AUTO_ROUND = ("auto-round", "intel/auto-round", "inc")
_PACKINGS = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq", "auto_round:fp8": "fp8"}

# AutoRound's MXFP4: the tensors are in the format of compressed-tensors.
_MXFP4 = ("auto_round:llm_compressor", "mx_fp", 4)


def _by_format(quant: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration with a format's name as `quant_method`, whatever tool or kernel it names.

    Raises ValueError for layers of AutoRound with bits of their own in another packing than GPTQ's.
    """
    method = quant.get("quant_method")
    if method not in _AUTO_ROUND:
        found = _FORMATS.get(str(method))
        return {**quant, "quant_method": found} if found else quant
    packing = str(quant.get("packing_format", "auto_round:auto_gptq"))
    if (packing, quant.get("data_type"), quant.get("bits")) == _MXFP4:
        groups = {"group_0": {"targets": ["Linear"], "format": "mxfp4-pack-quantized"}}
        return {"quant_method": "compressed-tensors", "config_groups": groups}
    found = _PACKINGS.get(packing)
    layers, bits = quant.get("extra_config"), quant.get("bits")
    rules: dict[str, Any] = {}
    for name, layer in (layers if isinstance(layers, Mapping) else {}).items():
        own = layer.get("bits", bits) if isinstance(layer, Mapping) else bits
        if isinstance(own, int) and own >= 16:
            continue  # the tensors tell
        if own != bits and found != "gptq":
            raise ValueError(
                f"quantization_config: extra_config gives {name} {shown(own)} bits, expected "
                f"{shown(bits)} as all layers, or 16"
            )
        plain = re.fullmatch(r"[\w.]+", name) is not None
        rules[f"{re.escape(name)}$" if plain else name] = layer
    if rules and found == "gptq":
        quant = {**quant, "dynamic": rules}
    return {**quant, "quant_method": found} if found else quant
