"""Converts GPTQ checkpoints to CPM.cu's Marlin format.

| source | output |
|---|---|
| linear layer [K -> N] | `qweight` int32 [K / 16, 2 N], `scales` [K / 128 or 1, N] |
| q, k and v | one layer `qkv_proj`, concatenated along N before packing |
| gate and up | one layer `gate_up_proj`, concatenated along N before packing |
| zero points, group indices | dropped |
| `fc` [2 H -> H] of an EAGLE head | two halves of K, packed side by side along N |
| `d2t` of EAGLE-3 | int32 |
| other tensors | copied unchanged |

`cpmcu.quant.packing` defines the order of weights and scales. Marlin implies z = 8 and groups in
order of K. Each layer is checked for this before files are written. Draft heads get CPM.cu's names.
The output is one file, model_gptq.safetensors.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cpmcu.convert.complete import check_complete, head_fields, head_shapes, model_shapes
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
from cpmcu.loading.index import read_json
from cpmcu.loading.loader import read_config
from cpmcu.loading.progress import LoadProgress
from cpmcu.loading.tensors import Checkpoint, TensorMeta
from cpmcu.models.common import BuildOptions
from cpmcu.models.reader import ConfigReader
from cpmcu.models.registry import find_model
from cpmcu.quant.gptq import check_side_tensors, size_of, stored_format
from cpmcu.quant.int4 import (
    CHANNEL_WISE,
    GROUP_SIZE,
    check_bits,
    check_finite,
    check_group_size,
    misfit,
    quantised_modules,
)
from cpmcu.quant.packing import marlin_scales, pack_marlin, unpack_gptq
from cpmcu.quant.registry import describe, quant_config_of, quantised_tensors

WEIGHTS_FILE = "model_gptq.safetensors"
CHECKPOINT_FORMAT = "gptq_marlin"

_BAND = 256  # rows of K that are unpacked in one go
_ALIGN_K, _ALIGN_N = 16, 64  # size of a Marlin tile
_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
_SINGLE = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
_LAYER = re.compile(r"^(?P<layer>.*(?:layers\.\d+|midlayer)\.)(?P<module>.+)$")
_PARTS = ("qweight", "scales", "qzeros", "g_idx")


@dataclass(frozen=True, slots=True)
class _Format:
    """What the source's quantization_config says."""

    group_size: int  # inputs that share a scale: GROUP_SIZE or CHANNEL_WISE
    zeros_version: int  # how zero points z are stored: 1: as z - 1; 2 ("gptq_v2"): as z


@dataclass(frozen=True, slots=True)
class _Linear:
    """A checked quantised layer of the source; y [N] = x [K] W."""

    module: str
    k: int
    n: int


@dataclass(frozen=True, slots=True)
class _Slice:
    """The range [first_k, first_k + num_k) of K of layers concatenated along N."""

    linears: tuple[_Linear, ...]
    first_k: int
    num_k: int

    @property
    def n(self) -> int:
        return sum(linear.n for linear in self.linears)


def gptq_to_marlin(
    source: str,
    destination: str | Path,
    *,
    overwrite: bool = False,
    progress: LoadProgress | None = None,
) -> Converted:
    """Converts a directory or Hugging Face repo with 4-bit GPTQ weights.

    `source` may be a model (Llama, Qwen, MiniCPM) or an EAGLE or EAGLE-3 head, in one file or in
    shards. Raises ValueError for a checkpoint that does not fit Marlin's layout and for a forbidden
    destination. Raises FileNotFoundError for a missing source and OSError for a full disk. After an
    error, `destination` is unchanged.
    """
    directory = resolve_model(source)
    target = check_destination(Path(destination), [directory], overwrite=overwrite)
    config = read_config(directory)
    checkpoint = open_checkpoint(directory)
    quant_config = _quant_config(directory, config, checkpoint)
    tensors = _plan(config, checkpoint, _read_format(quant_config))
    quant_config = {**quant_config, "checkpoint_format": CHECKPOINT_FORMAT}
    quant_config.pop("format", None)  # another name of checkpoint_format
    write_model(
        directory,
        target,
        WEIGHTS_FILE,
        tensors,
        {**config, "quantization_config": quant_config},
        progress=progress,
    )
    packed = sum(tensor.meta.name.endswith(".qweight") for tensor in tensors)
    rest = sum(not tensor.meta.name.endswith((".qweight", ".scales")) for tensor in tensors)
    return Converted(
        target, (f"{packed} linear layers are in Marlin's layout, {rest} tensors are unchanged",)
    )


def _plan(config: Mapping[str, Any], checkpoint: Checkpoint, quant: _Format) -> list[NewTensor]:
    """The tensors of the converted checkpoint. Reads all scales, zero points and group indices.

    Raises ValueError for the first layer that does not fit and for missing tensors.
    """
    names = _names(checkpoint)
    metas = {name: stored.meta for name, stored in checkpoint.tensors.items()}
    modules = quantised_modules(metas, ".qweight")
    if experts := [module for module in modules if ".experts." in module]:
        raise ValueError(
            f"{checkpoint.directory}: {experts[0]} is of an expert, expected a dense model (a "
            "mixture of experts is loaded as it is)"
        )
    linears = {module: _check_linear(checkpoint, module, quant) for module in modules}
    used = {f"{module}.{part}" for module in modules for part in _PARTS}
    tensors: list[NewTensor] = []
    done: set[str] = set()
    for module in modules:
        if module not in done:
            name, slices = _slices(checkpoint, module, linears, quant)
            done |= {linear.module for part in slices for linear in part.linears}
            tensors += _pack(checkpoint, names(name), slices, quant)
    for name in checkpoint.tensors:
        if name not in used:
            is_offsets = names(name) == "d2t"
            tensors.append(_d2t(checkpoint, name) if is_offsets else _copy(checkpoint, name, names))
    _check_unique(tensors)
    _check_complete(config, checkpoint, names, linears)
    return tensors


def _check_complete(
    config: Mapping[str, Any],
    checkpoint: Checkpoint,
    names: _Names,
    linears: Mapping[str, _Linear],
) -> None:
    """Raises ValueError if a tensor of the model or head is missing or has a wrong shape."""
    found: dict[str, tuple[int, ...]] = {
        names(name): stored.meta.shape for name, stored in checkpoint.tensors.items()
    }
    found |= {names(f"{module}.weight"): (one.n, one.k) for module, one in linears.items()}
    if not names.is_head:
        fields = find_model(config).build(
            config, BuildOptions(has_lm_head="lm_head.weight" in found)
        )
        check_complete(found, model_shapes(fields), fields)
        return
    layer = "midlayer." if names.is_eagle3 else "layers.0."
    rows = found.get(f"{layer}self_attn.q_proj.weight", ())[:1]
    fields = head_fields(config, *(rows or (None,)))
    check_complete(found, head_shapes(fields, is_eagle3=names.is_eagle3), fields)


# ---- reading the source


def _quant_config(
    directory: Path, config: Mapping[str, Any], checkpoint: Checkpoint
) -> dict[str, Any]:
    """quantization_config of config.json, or quantize_config.json of older programs."""
    found = quant_config_of(config)
    beside = directory / "quantize_config.json"
    if not found and beside.is_file():
        found = {"quant_method": "gptq", **read_json(beside)}
    metas = {name: stored.meta for name, stored in checkpoint.tensors.items()}
    if not found:
        what = f"quantised with {describe({}, metas)}" if quantised_tensors(metas) else "dense"
        raise ValueError(
            f"{directory}: has no quantization_config and is {what}, expected 4-bit GPTQ weights"
        )
    method = found.get("quant_method", "gptq")
    if method != "gptq":
        raise ValueError(
            f"{directory}: is quantised with {describe(found, metas)}, expected GPTQ (4 bits)"
        )
    return {"quant_method": method, **found}


def _read_format(quant_config: Mapping[str, Any]) -> _Format:
    reader = ConfigReader(quant_config, "quantization_config")
    stored = stored_format(quant_config)
    if stored == CHECKPOINT_FORMAT or quant_config.get("is_marlin_format"):
        raise ValueError("quantization_config: the weights are in Marlin's layout already")
    if stored not in ("gptq", "gptq_v2"):
        raise reader.fail("checkpoint_format", "'gptq' or 'gptq_v2'")
    check_bits(quant_config.get("bits"), 4)
    if not reader.flag("sym", default=True):
        raise reader.fail("sym", "true: Marlin's layout has no zero points")
    reader.refuse("desc_act", "Marlin's layout has no order of activations")
    group_size = check_group_size(quant_config.get("group_size"), (GROUP_SIZE,))
    dynamic = quant_config.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise reader.fail("dynamic", "rules for single layers")
    others = [rule for rule in dynamic if not str(rule).startswith("-:")]
    if others:
        raise ValueError(
            f"quantization_config: dynamic has the rule {others[0]!r}, expected the same bits and "
            "group_size in all quantised layers"
        )
    return _Format(group_size, 2 if stored == "gptq_v2" else 1)


def _check_linear(checkpoint: Checkpoint, module: str, quant: _Format) -> _Linear:
    """Checks the layer's tensors against Marlin's layout and returns its size."""
    metas = {
        part: checkpoint.tensors[f"{module}.{part}"].meta
        for part in _PARTS
        if f"{module}.{part}" in checkpoint.tensors
    }
    shape = metas["qweight"].shape
    k, n = size_of(metas["qweight"])
    per_channel = quant.group_size == CHANNEL_WISE
    step = k if per_channel else quant.group_size
    if k % step or k % _ALIGN_K or not shape[0]:
        factor = _ALIGN_K if per_channel else GROUP_SIZE
        raise ValueError(f"{module} has {k} inputs, expected a multiple of {factor}")
    if per_channel and k <= GROUP_SIZE:
        raise ValueError(
            f"{module} has {k} inputs with group_size {CHANNEL_WISE}, expected more than "
            f"{GROUP_SIZE}: the order of its scales could not be told"
        )
    groups = k // step
    if "scales" not in metas:
        raise ValueError(f"{module} has a qweight and no scales, expected both")
    scales = metas["scales"]
    if scales.shape != (groups, n) or scales.dtype not in ("float16", "bfloat16"):
        converted = scales.shape[1:] == (n // 2,)
        hint = "; has it been converted already?" if converted else ""
        raise misfit(scales, f"float16 or bfloat16 [{groups}, {n}] beside {list(shape)}", hint)
    check_finite(scales, checkpoint.read)
    sides = metas.get("g_idx"), metas.get("qzeros")
    check_side_tensors(*sides, checkpoint.read, (k, n), quant.group_size, quant.zeros_version)
    return _Linear(module, k, n)


# ---- making the output


class _Names:
    """Maps tensor names to the output's. Only names of draft heads change, to CPM.cu's."""

    def __init__(self, *, is_eagle: bool, is_eagle3: bool) -> None:
        self.is_head = is_eagle or is_eagle3
        self.is_eagle3 = is_eagle3
        self._pattern = re.compile(r"^layers\.0\." if is_eagle3 else r"^eagle_layers\.")
        self._layers = "midlayer." if is_eagle3 else "layers."

    def __call__(self, name: str) -> str:
        if not self.is_head:
            return name
        return self._pattern.sub(self._layers, name.removeprefix("model."))


def _names(checkpoint: Checkpoint) -> _Names:
    short = {name.removeprefix("model.") for name in checkpoint.tensors}
    is_eagle3 = any(name.endswith("hidden_norm.weight") for name in short)
    return _Names(is_eagle=bool(short & {"fc.weight", "fc.qweight"}), is_eagle3=is_eagle3)


def _slices(
    checkpoint: Checkpoint, module: str, linears: Mapping[str, _Linear], quant: _Format
) -> tuple[str, list[_Slice]]:
    """Returns (output module that contains `module`, its slices in order of N)."""
    linear = linears[module]
    if module.removeprefix("model.") == "fc":
        return module, _fc_slices(checkpoint, linear, quant)
    found = _LAYER.match(module)
    if found is None:
        hint = ": CPM.cu's files have a dense head" if module == "lm_head" else ""
        raise ValueError(f"{module} is quantised, expected only layers' projections{hint}")
    if found["module"] in _SINGLE:
        return module, [_whole([linear])]
    for fused, parts in _FUSED.items():
        if found["module"] in parts:
            names = [found["layer"] + part for part in parts]
            dense = [name for name in names if name not in linears]
            if dense:
                raise ValueError(
                    f"{module} is quantised and {dense[0]} is not, expected the same of "
                    f"{', '.join(parts)}, which become one layer"
                )
            return found["layer"] + fused, [_whole([linears[name] for name in names])]
    raise ValueError(
        f"{module} is quantised, expected only "
        f"{', '.join([*_SINGLE, *(part for parts in _FUSED.values() for part in parts)])}"
    )


def _whole(linears: Sequence[_Linear]) -> _Slice:
    k = linears[0].k
    for linear in linears:
        if linear.k != k:
            raise ValueError(
                f"{linear.module} has {linear.k} inputs, expected {k} as {linears[0].module}"
            )
    return _Slice(tuple(linears), 0, k)


def _fc_slices(checkpoint: Checkpoint, fc: _Linear, quant: _Format) -> list[_Slice]:
    """Two halves of K for EAGLE (embedding, hidden state), one slice for EAGLE-3."""
    if fc.k == 3 * fc.n:
        return [_whole([fc])]
    if fc.k != 2 * fc.n:
        raise ValueError(f"{fc.module} is [{fc.k} -> {fc.n}], expected 2 or 3 times as many inputs")
    if quant.group_size == CHANNEL_WISE or fc.n % quant.group_size:
        raise ValueError(
            f"{fc.module} is [{fc.k} -> {fc.n}] with group_size {quant.group_size}, expected "
            f"groups of {GROUP_SIZE} that fill each half of its inputs"
        )
    return [_Slice((fc,), half * fc.n, fc.n) for half in (0, 1)]


def _pack(
    checkpoint: Checkpoint, module: str, slices: Sequence[_Slice], quant: _Format
) -> Iterator[NewTensor]:
    """Returns qweight and scales of one layer for the output."""
    k, n = slices[0].num_k, sum(part.n for part in slices)
    if slices[0].n % _ALIGN_N:
        raise ValueError(f"{module} has {slices[0].n} outputs, expected a multiple of {_ALIGN_N}")
    per_channel = quant.group_size == CHANNEL_WISE

    def read(linear: _Linear, part: str) -> Array:
        return checkpoint.read(f"{linear.module}.{part}")

    def weight_chunks() -> Iterator[Array]:
        for begin in range(0, k, _BAND):
            end = min(begin + _BAND, k)
            columns = []
            for part in slices:
                rows = slice((part.first_k + begin) // 8, (part.first_k + end) // 8)
                qs = [unpack_gptq(read(linear, "qweight")[rows]) for linear in part.linears]
                columns.append(pack_marlin(np.concatenate(qs, axis=1)))
            yield np.concatenate(columns, axis=1)

    def scale_chunks() -> Iterator[Array]:
        columns = []
        for part in slices:
            begin, end = (part.first_k, part.first_k + part.num_k)
            rows = slice(None) if per_channel else slice(begin // GROUP_SIZE, end // GROUP_SIZE)
            scales = [read(linear, "scales")[rows] for linear in part.linears]
            whole = np.concatenate(scales, axis=1)
            columns.append(marlin_scales(whole, channel_wise=per_channel))
        yield np.concatenate(columns, axis=1)

    dtypes = [
        checkpoint.tensors[f"{linear.module}.scales"].meta.dtype
        for part in slices
        for linear in part.linears
    ]
    if len(set(dtypes)) > 1:
        raise ValueError(f"the scales of {module} are {' and '.join(dtypes)}, expected one dtype")
    groups = 1 if per_channel else k // GROUP_SIZE
    yield NewTensor(TensorMeta(f"{module}.qweight", "int32", (k // 16, 2 * n)), weight_chunks)
    yield NewTensor(TensorMeta(f"{module}.scales", dtypes[0], (groups, n)), scale_chunks)


def _copy(checkpoint: Checkpoint, name: str, names: _Names) -> NewTensor:
    leaf = name.rpartition(".")[2]
    if leaf in _PARTS:
        raise ValueError(f"{name} is present without a qweight, expected both")
    return copied(checkpoint, name, names(name))


def _d2t(checkpoint: Checkpoint, name: str) -> NewTensor:
    """Offsets from draft to target ids, as int32 like CPM.cu's."""
    offsets = checkpoint.read(name)
    if offsets.dtype.kind != "i" or np.any(offsets != offsets.astype(np.int32)):
        raise ValueError(f"{name} is {offsets.dtype}, expected integers of 32 bits")
    meta = TensorMeta("d2t", "int32", checkpoint.tensors[name].meta.shape)
    return NewTensor(meta, lambda: iter([offsets.astype(np.int32)]))


def _check_unique(tensors: Sequence[NewTensor]) -> None:
    counts = Counter(tensor.meta.name for tensor in tensors)
    name, count = counts.most_common(1)[0]
    if count > 1:
        raise ValueError(f"{name} comes from {count} tensors of the source, expected one")
