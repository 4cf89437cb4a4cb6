"""Rotary position embedding: inverse frequencies and the scale of cos and sin.

Position p rotates pair j of a head by p * inv_freq[j] radians. cos and sin are multiplied by
attention_scaling. The float32 operations have the order and the defaults of `transformers`, so both
give the same angles at far positions.

NOTE: longrope has two lists of factors, for short and for long sequences. The list is chosen once
per engine from the maximum length of a sequence, not from the current length. Cached keys and new
queries must be rotated with the same list. If the maximum length is at most
original_max_position_embeddings, the engine uses the short list.

NOTE: M-RoPE (`mrope_section`, Qwen's models with vision) gives each section of the frequencies its
own position: time, height or width. All three are equal for text, so it is plain RoPE here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cpmcu.checks import brief, shown
from cpmcu.models.reader import ConfigReader

DEFAULT_THETA = 10000.0
# An inverse frequency so small that RoPE changes nothing: cos is 1, and sin vanishes in a sum.
NO_ROTATION = 1e-30
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Rope:
    """kind: as in the config; inv_freq: float32 [rotary_dim / 2] in radians per token."""

    kind: str
    inv_freq: Float32Array
    attention_scaling: float = 1.0


@dataclass(frozen=True, slots=True)
class _Request:
    """Inputs of a kind of RoPE; lengths in tokens."""

    params: ConfigReader  # the rope_scaling / rope_parameters dict
    pos_freqs: Float32Array  # theta^(2j / rotary_dim), [rotary_dim / 2]
    theta: float
    rotary_dim: int  # elements of a head that are rotated
    max_positions: int
    original_length: int
    max_length: int


def rope_from_config(config: Mapping[str, Any], head_dim: int, max_length: int) -> Rope:
    """Reads `rope_theta` with `rope_scaling`, or `rope_parameters`, of a config.json.

    `partial_rotary_factor` is the share of a head's elements, from the first on, that is rotated.
    `max_length`: maximum length of a sequence in tokens (for longrope). Raises ValueError for an
    unsupported kind, a missing key or a value out of range.
    """
    top = ConfigReader(config)
    params = ConfigReader(rope_parameters(config), f"{top.where}: {_key(config)}")
    rotary_dim = _rotary_dim(top, params, head_dim)
    kind = params.config.get("rope_type") or params.config.get("type") or "default"
    if kind == "dynamic":
        raise ValueError(
            f"{params.where}: rope_type 'dynamic' changes with the current length, which makes "
            "cached keys inconsistent; it is not supported, expected one of: " + _supported()
        )
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(
            f"{params.where}: rope_type {shown(kind)} is not supported, expected one of: "
            f"{_supported()}"
        )
    if kind == "proportional":
        rotary_dim = head_dim
    theta = params.positive_float(
        "rope_theta", default=top.positive_float("rope_theta", default=DEFAULT_THETA)
    )
    if theta <= 1:
        raise ValueError(f"{params.where}: rope_theta is {theta}, expected more than 1")
    max_positions = top.positive_int("max_position_embeddings", default=max_length)
    original_length = top.positive_int(
        "original_max_position_embeddings",
        default=params.positive_int("original_max_position_embeddings", default=max_positions),
    )
    if original_length < 2:
        raise ValueError(
            f"{params.where}: original_max_position_embeddings is {original_length}, expected 2 "
            "or more tokens"
        )
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    with np.errstate(all="ignore"):  # the results are checked below
        pos_freqs = np.power(np.float32(theta), exponents, dtype=np.float32)
        request = _Request(
            params, pos_freqs, theta, rotary_dim, max_positions, original_length, max_length
        )
        inv_freq, attention_scaling = _KINDS[kind](request)
        inv_freq = inv_freq.astype(np.float32)
    wrong = inv_freq[~(np.isfinite(inv_freq) & (inv_freq > 0))]
    if wrong.size:
        raise ValueError(
            f"{params.where}: rope_theta {theta} and the factors give the inverse frequency "
            f"{wrong[0]}, expected finite numbers above 0"
        )
    return Rope(kind, inv_freq, float(attention_scaling))


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The `rope_scaling` or `rope_parameters` of a config.json; empty if it has neither.

    Raises ValueError if the parameters differ between layers.
    """
    key = _key(config)
    top = ConfigReader(config)
    params = config.get(key) or {}
    if not isinstance(params, dict):
        raise top.fail(key, "an object or null")
    if any(isinstance(value, dict) for value in params.values()):
        raise ValueError(
            f"{top.where}: {key} differs between layer types ({brief(', '.join(sorted(params)))}), "
            "expected one set of RoPE parameters for all layers"
        )
    return params


def rope_by_kind(
    config: Mapping[str, Any], kinds: Sequence[str], unscaled: str = ""
) -> dict[str, dict[str, Any]]:
    """Kind of layer -> the config with the RoPE parameters of this kind of layer.

    `rope_parameters` may have an object for each of `kinds`. If it has one set of parameters, all
    kinds get that set. A kind whose name begins with `unscaled` then gets only its `rope_theta`.
    Raises ValueError if a kind is missing.
    """
    key = _key(config)
    params = config.get(key) or {}
    top = ConfigReader(config)
    if not isinstance(params, dict):
        raise top.fail(key, "an object or null")
    if any(isinstance(value, dict) for value in params.values()):
        if missing := [kind for kind in kinds if not isinstance(params.get(kind), dict)]:
            raise top.fail(key, f"an object for each of {' and '.join(kinds)}, also {missing[0]}")
        return {kind: {**config, key: params[kind]} for kind in kinds}
    theta = {name: params[name] for name in ("rope_theta",) if name in params}
    scaled = {kind: not (unscaled and kind.startswith(unscaled)) for kind in kinds}
    return {kind: {**config, key: params if scaled[kind] else theta} for kind in kinds}


def _key(config: Mapping[str, Any]) -> str:
    return "rope_scaling" if config.get("rope_scaling") else "rope_parameters"


def _rotary_dim(top: ConfigReader, params: ConfigReader, head_dim: int) -> int:
    """Elements of a head that are rotated."""
    key = "partial_rotary_factor"
    reader = params if params.config.get(key) is not None else top
    rotary_dim = int(head_dim * reader.positive_float(key, default=1.0))
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise reader.fail(key, f"an even number, 2 to head_dim={head_dim}, of rotated elements")
    return rotary_dim


def _default(request: _Request) -> tuple[Float32Array, float]:
    return np.float32(1) / request.pos_freqs, 1.0


def _proportional(request: _Request) -> tuple[Float32Array, float]:
    # pos_freqs covers the whole head. The pairs beyond the share are not rotated.
    share = request.params.positive_float("partial_rotary_factor", default=1.0)
    factor = np.float32(request.params.positive_float("factor", default=1.0))
    inv_freq = np.float32(1) / request.pos_freqs / factor
    inv_freq[int(share * request.rotary_dim // 2) :] = NO_ROTATION
    return inv_freq, 1.0


def _linear(request: _Request) -> tuple[Float32Array, float]:
    factor = np.float32(request.params.positive_float("factor"))
    return np.float32(1) / request.pos_freqs / factor, 1.0


def _llama3(request: _Request) -> tuple[Float32Array, float]:
    params = request.params
    factor = np.float32(params.positive_float("factor"))
    low = params.positive_float("low_freq_factor")
    high = params.positive_float("high_freq_factor")
    if high <= low:
        raise params.fail("high_freq_factor", f"more than low_freq_factor={low}")
    inv_freq = np.float32(1) / request.pos_freqs
    wavelength = np.float32(2 * math.pi) / inv_freq  # in tokens
    smooth = (np.float32(request.original_length) / wavelength - np.float32(low)) / np.float32(
        high - low
    )
    blended = (np.float32(1) - smooth) * inv_freq / factor + smooth * inv_freq
    scaled = np.where(wavelength > request.original_length / low, inv_freq / factor, blended)
    return np.where(wavelength < request.original_length / high, inv_freq, scaled), 1.0


def _yarn(request: _Request) -> tuple[Float32Array, float]:
    params, rotary_dim = request.params, request.rotary_dim
    factor = params.positive_float(
        "factor", default=request.max_positions / request.original_length
    )
    fast = params.positive_float("beta_fast", default=32.0)
    slow = params.positive_float("beta_slow", default=1.0)
    if fast <= slow:
        raise ValueError(
            f"{params.where}: beta_fast is {fast}, expected more than beta_slow={slow}"
        )

    def pair_with_rotations(times: float) -> float:
        # Index of the pair that completes `times` rotations within the original length.
        length = request.original_length / (times * 2 * math.pi)
        return rotary_dim * math.log(length) / (2 * math.log(request.theta))

    first, last = pair_with_rotations(fast), pair_with_rotations(slow)
    if params.flag("truncate", default="truncate" not in params.config):  # null means false
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    if first == last:
        last += 0.001
    pairs = np.arange(rotary_dim // 2, dtype=np.float32)
    ramp = np.clip((pairs - np.float32(first)) / np.float32(last - first), 0, 1)
    keep = np.float32(1) - ramp  # 1: the trained frequency, 0: the interpolated one
    interpolated = np.float32(1) / (np.float32(factor) * request.pos_freqs)
    extrapolated = np.float32(1) / request.pos_freqs
    inv_freq = interpolated * (np.float32(1) - keep) + extrapolated * keep
    return inv_freq, _yarn_attention_scaling(params, factor)


def _yarn_attention_scaling(params: ConfigReader, factor: float) -> float:
    if params.config.get("attention_factor") is not None:
        return params.positive_float("attention_factor")

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if params.config.get("mscale") and params.config.get("mscale_all_dim"):
        above = mscale(params.positive_float("mscale"))
        return above / mscale(params.positive_float("mscale_all_dim"))
    return mscale(1.0)


def _longrope(request: _Request) -> tuple[Float32Array, float]:
    params, original = request.params, request.original_length
    short = _factors(params, "short_factor", request.rotary_dim)
    long = _factors(params, "long_factor", request.rotary_dim)
    factors = long if request.max_length > original else short
    inv_freq = np.float32(1) / (factors * request.pos_freqs)
    if params.config.get("attention_factor") is not None:
        return inv_freq, params.positive_float("attention_factor")
    factor = params.positive_float("factor", default=request.max_positions / original)
    if factor <= 1:
        return inv_freq, 1.0
    return inv_freq, math.sqrt(1 + math.log(factor) / math.log(original))


def _factors(params: ConfigReader, key: str, rotary_dim: int) -> Float32Array:
    values = params.config.get(key)
    expected = f"a list of rotary_dim / 2 = {rotary_dim // 2} positive numbers"
    if not isinstance(values, list):
        raise params.fail(key, expected)
    if len(values) != rotary_dim // 2:
        raise ValueError(f"{params.where}: {key} has {len(values)} entries, expected {expected}")
    for value in values:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and math.isfinite(value) and value > 0):
            raise ValueError(f"{params.where}: {key} contains {shown(value)}, expected {expected}")
    return np.asarray(values, dtype=np.float32)


_KINDS: dict[str, Callable[[_Request], tuple[Float32Array, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}


def _supported() -> str:
    return ", ".join(_KINDS)
