"""Converts MiniCPM checkpoints to equivalent Llama checkpoints.

MiniCPM's muP scales are multiplied into the weights:

| scale | weights |
|---|---|
| scale_emb | embedding table |
| scale_depth / sqrt(num_hidden_layers) | o_proj, down_proj |
| dim_model_base / hidden_size | lm_head |

A tied lm_head becomes a separate matrix, since scale_emb does not apply to it. Scaled weights are
computed in float32 and rounded once to the dtype of the tensor, to nearest even. The notes report
the rounding errors. Scales that are powers of two are exact.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cpmcu.convert.complete import check_complete, model_shapes
from cpmcu.convert.output import (
    Array,
    Converted,
    NewTensor,
    check_destination,
    copied,
    write_model,
)
from cpmcu.loading.checkpoint import open_checkpoint
from cpmcu.loading.hub import resolve_model
from cpmcu.loading.loader import read_config
from cpmcu.loading.progress import LoadProgress
from cpmcu.loading.tensors import FLOAT_DTYPES, Checkpoint
from cpmcu.models.common import BuildOptions, SpecFields
from cpmcu.models.names import canonical_names
from cpmcu.models.registry import find_model
from cpmcu.models.rope import rope_parameters
from cpmcu.quant.registry import describe, quantised_tensors

WEIGHTS_FILE = "model.safetensors"

_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_BRANCH = re.compile(r"\.(self_attn\.o_proj|mlp\.down_proj)\.(weight|bias)$")
_OWN_KEYS = (
    *("scale_emb", "scale_depth", "dim_model_base", "mup_denominator", "use_mup"),
    *("sparse_config", "num_experts", "auto_map"),
)
_CHUNK = 1 << 19  # elements that are scaled in one go

Float32Array = npt.NDArray[np.float32]


@dataclass(slots=True)
class _Rounding:
    """Rounding errors of the tensors with one scale."""

    what: str
    scale: float
    num_elements: int = 0
    num_changed: int = 0
    largest: float = 0.0  # largest relative error among normal numbers

    def note(self) -> str:
        """One sentence about the rounding errors."""
        share = self.num_changed / max(self.num_elements, 1)
        if not self.num_changed:
            return f"{self.what} × {self.scale:.6g}: exact"
        return (
            f"{self.what} × {self.scale:.6g}: {share:.1%} of the numbers were rounded, by at most "
            f"{100 * self.largest:.2g}%"
        )


def minicpm_to_llama(
    source: str,
    destination: str | Path,
    *,
    dtype: str = "auto",
    overwrite: bool = False,
    progress: LoadProgress | None = None,
) -> Converted:
    """Converts a directory or Hugging Face repo with a dense MiniCPM, MiniCPM4 or 4.1.

    `dtype` of the floating-point tensors: "auto" (unchanged), float16, bfloat16 or float32. Raises
    ValueError for another model, for values beyond the range of the dtype and for a forbidden
    destination. Raises FileNotFoundError for a missing source and OSError for a full disk. After an
    error, `destination` is unchanged.
    """
    if dtype != "auto" and dtype not in FLOAT_DTYPES:
        raise ValueError(f"dtype is {dtype!r}, expected auto or one of {', '.join(FLOAT_DTYPES)}")
    directory = resolve_model(source)
    target = check_destination(Path(destination), [directory], overwrite=overwrite)
    config = read_config(directory)
    checkpoint = open_checkpoint(directory)
    fields = _minicpm_fields(directory, config, checkpoint)
    llama = llama_config(config, fields)
    if dtype != "auto":
        llama["dtype" if "dtype" in llama else "torch_dtype"] = dtype
    tensors, roundings = _plan(checkpoint, fields, dtype)
    write_model(
        directory,
        target,
        WEIGHTS_FILE,
        tensors,
        llama,
        leave_out=lambda name: name.endswith("_minicpm.py"),
        progress=progress,
    )
    notes = [rounding.note() for rounding in roundings]
    if config.get("sparse_config"):
        notes.append("sparse_config is left out: a Llama's attention is dense")
    return Converted(target, tuple(notes))


def llama_config(config: Mapping[str, Any], fields: SpecFields) -> dict[str, Any]:
    """config.json of the equivalent Llama. `fields`: the MiniCPM's.

    A longrope without `factor` gets one. Its original length is written into the RoPE parameters
    and at the top level, since readers look in either place.
    """
    llama = {key: value for key, value in config.items() if key not in _OWN_KEYS}
    llama |= {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    rope = rope_parameters(config)
    if rope:
        rope = {"rope_type": rope.get("rope_type") or rope.get("type") or "default", **rope}
        rope.pop("type", None)
        if rope["rope_type"] == "longrope":
            original = (
                config.get("original_max_position_embeddings")
                or rope.get("original_max_position_embeddings")
                or fields.max_position_embeddings
            )
            rope["original_max_position_embeddings"] = original
            rope.setdefault("factor", fields.max_position_embeddings / original)
            llama["original_max_position_embeddings"] = original
        llama["rope_scaling" if config.get("rope_scaling") else "rope_parameters"] = rope
    return llama


def _minicpm_fields(
    directory: Path, config: Mapping[str, Any], checkpoint: Checkpoint
) -> SpecFields:
    """The fields of config.json. Raises ValueError unless it is a complete dense MiniCPM."""
    metas = {name: stored.meta for name, stored in checkpoint.tensors.items()}
    if config.get("quantization_config") or quantised_tensors(metas):
        found = describe(config.get("quantization_config") or {}, metas)
        raise ValueError(
            f"{directory}: is quantised with {found}, expected dense weights: convert before "
            "quantising"
        )
    if config.get("architectures") != ["MiniCPMForCausalLM"]:
        raise ValueError(
            f"{directory}: config.json has architectures {config.get('architectures')!r}, "
            "expected ['MiniCPMForCausalLM']"
        )
    options = BuildOptions(has_lm_head=_HEAD in metas)
    fields = find_model(config).build(config, options)
    shapes = {name: meta.shape for name, meta in metas.items()}
    try:
        check_complete(shapes, model_shapes(fields), fields)
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from error
    return fields


def _plan(
    checkpoint: Checkpoint, fields: SpecFields, dtype: str
) -> tuple[list[NewTensor], list[_Rounding]]:
    """The tensors of the Llama, and their rounding errors, which are filled in during writing."""
    embed = _Rounding("the embedding table", fields.embed_scale)
    branch = _Rounding("o_proj and down_proj", fields.residual_scale)
    head = _Rounding("lm_head", fields.logit_scale)
    tied = fields.tie_word_embeddings
    tensors = []
    for name in checkpoint.tensors:
        if not canonical_names(name, fields) or (tied and name == _HEAD):
            continue
        if name == _EMBED:
            tensors.append(_scaled(checkpoint, name, name, dtype, embed))
        elif name == _HEAD:
            tensors.append(_scaled(checkpoint, name, name, dtype, head))
        elif _BRANCH.search(name):
            tensors.append(_scaled(checkpoint, name, name, dtype, branch))
        elif dtype != "auto" and checkpoint.tensors[name].meta.dtype in FLOAT_DTYPES:
            tensors.append(_scaled(checkpoint, name, name, dtype, _Rounding(name, 1.0)))
        else:
            tensors.append(copied(checkpoint, name))
    if tied:
        tensors.append(_scaled(checkpoint, _EMBED, _HEAD, dtype, head))
    return tensors, [embed, branch, head]


def _scaled(
    checkpoint: Checkpoint, source: str, name: str, dtype: str, rounding: _Rounding
) -> NewTensor:
    """The tensor `source` times a scale, written as `name`."""
    meta = checkpoint.tensors[source].meta
    if meta.dtype not in FLOAT_DTYPES:
        raise ValueError(f"{source} is {meta.dtype}, expected one of {', '.join(FLOAT_DTYPES)}")
    stored_dtype = meta.dtype if dtype == "auto" else dtype

    def chunks() -> Iterator[Array]:
        flat = checkpoint.read(source).reshape(-1)
        for begin in range(0, flat.size, _CHUNK):
            values = to_float32(flat[begin : begin + _CHUNK], meta.dtype)
            stored = from_float32(values * np.float32(rounding.scale), stored_dtype)
            exact = values.astype(np.float64) * rounding.scale
            _compare(exact, to_float32(stored, stored_dtype), name, stored_dtype, rounding)
            yield stored

    return NewTensor(replace(meta, name=name, dtype=stored_dtype), chunks)


def _compare(
    exact: npt.NDArray[np.float64], stored: Float32Array, name: str, dtype: str, rounding: _Rounding
) -> None:
    """Adds the errors of one chunk. Raises ValueError for values beyond the dtype's range."""
    wrong = exact[~np.isfinite(exact)]
    if wrong.size:
        raise ValueError(f"{name} has {wrong[0]}, expected finite numbers")
    lost = ~np.isfinite(stored)
    if lost.any():
        raise ValueError(
            f"{name} has {exact[lost][0]:.6g} once {rounding.scale:.6g} is folded in, expected "
            f"numbers within the range of {dtype}: choose another --dtype"
        )
    changed = exact != stored
    rounding.num_elements += exact.size
    rounding.num_changed += int(np.count_nonzero(changed))
    smallest = {"float16": 2.0**-14}.get(dtype, 2.0**-126)
    normal = changed & (np.abs(exact) >= smallest)
    if normal.any():
        error = np.max(np.abs(stored[normal] - exact[normal]) / np.abs(exact[normal]))
        rounding.largest = max(rounding.largest, float(error))


def to_float32(stored: Array, dtype: str) -> Float32Array:
    """Stored numbers (bfloat16 as uint16) as float32; exact."""
    if dtype != "bfloat16":
        return stored.astype(np.float32)
    values: Float32Array = (stored.astype(np.uint32) << 16).view(np.float32)
    return values


def from_float32(values: Float32Array, dtype: str) -> Array:
    """float32 as stored numbers (bfloat16 as uint16), to nearest even; overflow becomes inf."""
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return np.asarray(values.astype(dtype))
    bits = values.view(np.uint32)
    rounded: Array = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
    rounded[np.isnan(values)] = 0x7FC0
    return rounded.astype(np.uint16)
