"""Quantises the linear layers of a model to 4 or 8 bits: a checkpoint of GPTQ, NVFP4 or MXFP4.

| method | how a weight is rounded |
|---|---|
| rtn | to nearest, with the scale of least squared error for each group |
| rtn to NVFP4, MXFP4 | to nearest, by the rules of cpmcu/convert/float_rounding.py |
| gptq | so that the outputs change least on a calibration text (cpmcu/convert/rounding.py) |

Embedding, lm_head, norms, biases, routers and vision towers are unchanged. With gptq the layers are
quantised in forward order, each with the inputs that the quantised layers before it produce.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cpmcu.convert.dense_layers import DenseLayers, Layer, check_dense
from cpmcu.convert.float_rounding import FloatQuantized, check_size, round_floats
from cpmcu.convert.minicpm_to_llama import WEIGHTS_FILE, from_float32, to_float32
from cpmcu.convert.output import (
    Converted,
    NewTensor,
    check_destination,
    check_space,
    copied,
    write_model,
)
from cpmcu.convert.quantize_options import DAMPING, QuantizeOptions
from cpmcu.convert.rounding import Quantized, best_scales, gptq, round_to_nearest
from cpmcu.errors import about
from cpmcu.loading.hub import resolve_model
from cpmcu.loading.index import check_file
from cpmcu.loading.loader import read_config
from cpmcu.loading.model_files import ModelFiles, is_gguf, model_files, model_name
from cpmcu.loading.progress import LoadProgress
from cpmcu.loading.tensors import FLOAT_DTYPES, Checkpoint, TensorMeta
from cpmcu.models.common import BuildOptions, SpecFields
from cpmcu.models.registry import find_model
from cpmcu.quant.parts import stack_of
from cpmcu.quant.registry import describe, quant_config_of, quantised_tensors
from cpmcu.tokenizer import Tokenizer

WINDOW = 512  # tokens of one calibration text
BATCH = 4  # calibration texts that run at a time

Rounded = Quantized | FloatQuantized

_TAKEN = re.compile(
    r"(^|\.)(qkv_proj|q_proj|k_proj|v_proj|o_proj|gate_up_proj|gate_proj|up_proj|down_proj|"
    r"in_proj_qkvz|in_proj_qkv|in_proj_z|out_proj|input_linear|output_linear)$"
)


@dataclass(frozen=True, slots=True)
class _Source:
    """A model to quantise."""

    path: Path
    files: ModelFiles
    config: dict[str, Any]
    checkpoint: Checkpoint
    fields: SpecFields
    modules: dict[str, tuple[str, ...]]  # module -> the engine tensors whose rows come from it

    def weight(self, module: str) -> Tensor:
        """float32 [N, K]. Raises ValueError for numbers that are not finite."""
        name = f"{module}.weight"
        stored = self.checkpoint.read(name)
        found = torch.from_numpy(to_float32(stored, self.checkpoint.tensors[name].meta.dtype))
        if not found.isfinite().all():
            raise ValueError(f"{name} holds numbers that are not finite: the file is damaged")
        return found


def quantize(
    source: str,
    destination: str | Path,
    options: QuantizeOptions,
    *,
    overwrite: bool = False,
    working: LoadProgress | None = None,
    writing: LoadProgress | None = None,
) -> Converted:
    """Quantises a directory, a Hugging Face repo or a GGUF file.

    `working` and `writing` show the progress of the two steps. Raises ValueError for a model that
    is quantised already, for matrices that the format cannot store and for a forbidden
    destination. Raises FileNotFoundError for a missing file and OSError for a full disk. After an
    error, `destination` is unchanged.
    """
    path = resolve_model(source)
    target = check_destination(Path(destination), [path], overwrite=overwrite)
    with about(path):
        model = _open(path, options)
    check_space(target.parent, _least_bytes(model, options))  # rounding may take hours
    if options.method == "gptq":
        with about(path):
            check_dense(model.fields)
        ids = read_text(path, options.calibration or Path(), options.calibration_tokens)
        done: Mapping[str, Rounded] = _by_gptq(model, ids, options, working)
    elif options.format != "gptq":
        with about(path):
            for module, size in _sizes(model).items():
                check_size(module, *size, options.format)
        done = _to_floats(model, options, working)
    else:
        done = _to_nearest(model, options, working)
    write_model(
        path,
        target,
        WEIGHTS_FILE,
        _tensors(model, done),
        {**model.config, "quantization_config": _config(model, options)},
        extra=_gguf_files(model.files) if is_gguf(path) else {},
        progress=writing,
    )
    return Converted(target, tuple(_notes(model, options)))


def _config(model: _Source, options: QuantizeOptions) -> dict[str, Any]:
    """quantization_config of the output."""
    if options.format == "gptq":
        return options.to_hf()
    tensors = model.checkpoint.tensors
    kept = [
        name.removesuffix(".weight")
        for name, stored in tensors.items()
        if name.endswith(".weight") and len(stored.meta.shape) == 2 and "embed_tokens" not in name
    ]
    return options.floats_to_hf([module for module in kept if module not in model.modules])


def _notes(model: _Source, options: QuantizeOptions) -> list[str]:
    form = f"{options.bits} bits" if options.format == "gptq" else options.format.upper()
    notes = [f"{len(model.modules)} linear layers have {form}, the other tensors are as they were"]
    if options.format != "gptq":
        return notes
    odd = next((m for m, (_, k) in _sizes(model).items() if k % options.group(k)), None)
    if odd is not None:
        notes.append(
            f"the last group of {odd} is shorter than {options.group_size}: cpmcu runs that, some "
            "other programs do not (--group-size -1 suits them)"
        )
    return notes


# ---- reading the source


def _open(path: Path, options: QuantizeOptions) -> _Source:
    files = model_files(path).decoded()
    config, checkpoint = read_config(path), files.checkpoint()
    if is_gguf(path):
        config.pop("quantization_config", None)  # the tensors are decoded
    metas = {name: stored.meta for name, stored in checkpoint.tensors.items()}
    quant = quant_config_of(config)
    if quant or quantised_tensors(metas):
        raise ValueError(
            f"the model is quantised with {describe(quant, metas)} already, expected weights of "
            "16 or 32 bits"
        )
    family = find_model(config)
    build = BuildOptions(has_lm_head="lm_head.weight" in metas)
    fields = family.build(config, build)
    modules = {}
    for name, meta in metas.items():
        module = name.removesuffix(".weight")
        if len(meta.shape) == 3 and (".experts." in name or _TAKEN.search(module)):
            raise ValueError(
                f"{name} has shape {list(meta.shape)}: experts are stored together, expected "
                "one matrix for each expert"
            )
        parts = tuple(piece.name for piece in family.names(name, fields))
        if module == name or not parts or not _TAKEN.search(module):
            continue
        if not parts[0].startswith("model.layers.") or meta.dtype not in FLOAT_DTYPES:
            continue
        modules[module] = parts
    if not modules:
        raise ValueError("no linear layer was found, expected tensors such as q_proj.weight")
    return _Source(path, files, config, checkpoint, fields, modules)


def _sizes(model: _Source) -> dict[str, tuple[int, int]]:
    """Returns the size (N, K) of each module."""
    tensors = model.checkpoint.tensors
    shapes = {module: tensors[f"{module}.weight"].meta.shape for module in model.modules}
    return {module: (shape[0], shape[1]) for module, shape in shapes.items()}


def _least_bytes(model: _Source, options: QuantizeOptions) -> int:
    """Bytes of the output's weights without scales."""
    metas = {name: stored.meta for name, stored in model.checkpoint.tensors.items()}
    kept = sum(m.nbytes for name, m in metas.items() if name[:-7] not in model.modules)
    bits = options.bits if options.format == "gptq" else 4
    return kept + sum(n * k for n, k in _sizes(model).values()) * bits // 8


def read_text(model: Path, text: Path, most: int) -> list[int]:
    """Token ids of the beginning of a UTF-8 text file, at most `most`.

    Raises FileNotFoundError for a missing file, ValueError for a directory, a device and bytes that
    are not UTF-8.
    """
    check_file(text)
    try:
        with text.open(encoding="utf-8") as file:
            content = file.read(32 * most)
    except UnicodeDecodeError as error:
        raise ValueError(f"{text} is not UTF-8, expected a text: {error}") from error
    ids = Tokenizer.from_directory(model).encode(content)[:most]
    if len(ids) < 2:
        raise ValueError(f"{text}: has {len(ids)} tokens, expected a text of at least 2")
    return ids


# ---- rounding


def _to_nearest(
    model: _Source, options: QuantizeOptions, progress: LoadProgress | None
) -> dict[str, Quantized]:
    sizes = _sizes(model)
    done: dict[str, Quantized] = {}
    with _Steps(progress, sizes, model.path) as steps:
        for module, (_, k) in sizes.items():
            weight = model.weight(module).to(options.device)
            group = options.group(k)
            scales = best_scales(weight, group, step=0.5, bits=options.bits)
            done[module] = round_to_nearest(weight, group, scales, options.bits)
            steps.done(module)
    return done


def _to_floats(
    model: _Source, options: QuantizeOptions, progress: LoadProgress | None
) -> dict[str, FloatQuantized]:
    """Rounds to nearest. In NVFP4, matrices that engines fuse (q, k and v) share the scale g."""
    sizes = _sizes(model)
    largest: dict[str, float] = {}
    if options.format == "nvfp4":
        for module in sizes:
            peak = float(model.weight(module).abs().max())
            largest[stack_of(module)] = max(peak, largest.get(stack_of(module), 0.0))
    done: dict[str, FloatQuantized] = {}
    with _Steps(progress, sizes, model.path) as steps:
        for module in sizes:
            weight = model.weight(module).to(options.device)
            peak = largest.get(stack_of(module), 0.0)
            done[module] = round_floats(weight, options.format, peak)
            steps.done(module)
    return done


@torch.no_grad()
def _by_gptq(
    model: _Source, ids: Sequence[int], options: QuantizeOptions, progress: LoadProgress | None
) -> dict[str, Quantized]:
    device = torch.device(options.device)
    layers = DenseLayers(model.checkpoint, find_model(model.config).names, model.fields, device)
    batches = layers.embed(_windows(ids))
    by_layer: dict[int, list[str]] = {}
    for module, parts in model.modules.items():
        by_layer.setdefault(int(parts[0].split(".")[2]), []).append(module)
    done: dict[str, Quantized] = {}
    with _Steps(progress, _sizes(model), model.path) as steps:
        for index in range(model.fields.num_hidden_layers):
            layer, modules = layers.layer(index), by_layer.get(index, [])

            def stage(leaves: tuple[str, ...], inputs: list[Tensor]) -> None:
                taken = [m for m in modules if _leaf(model.modules[m][0]) in leaves]  # noqa: B023
                gram = _gram(inputs) if taken else None
                for module in taken:
                    assert gram is not None
                    weight = model.weight(module).to(device)
                    group = options.group(weight.shape[1])
                    made = gptq(weight, gram, group, DAMPING, bits=options.bits)
                    _replace(layer, model.modules[module], made.dequantize())  # noqa: B023
                    done[module] = made
                    steps.done(module)

            layer.run(batches, stage)
    return done


def _windows(ids: Sequence[int]) -> list[Tensor]:
    """The text as batches [B, T] of windows, without an incomplete last window."""
    tokens = torch.tensor(ids)
    length = min(WINDOW, len(ids))
    windows = tokens[: len(ids) // length * length].reshape(-1, length)
    return list(torch.split(windows, BATCH))


def _gram(inputs: list[Tensor]) -> Tensor:
    """X^T X [K, K] of all rows of the inputs, float64."""
    size = inputs[0].shape[-1]
    gram = torch.zeros(size, size, dtype=torch.float64, device=inputs[0].device)
    for x in inputs:
        rows = x.flatten(0, -2)
        gram += (rows.T @ rows).double()
    return gram


def _leaf(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]


def _replace(layer: Layer, parts: Sequence[str], weight: Tensor) -> None:
    """Puts the rows of a rounded matrix into the layer."""
    row = 0
    for part in parts:
        leaf = part.split(".", 3)[3]
        rows = len(layer.weights[leaf])
        layer.weights[leaf] = weight[row : row + rows]
        row += rows


class _Steps:
    """Shows the progress of quantising as bytes of weights in 16 bits."""

    def __init__(
        self, progress: LoadProgress | None, sizes: Mapping[str, tuple[int, int]], path: Path
    ) -> None:
        self._progress, self._name = progress, model_name(path)
        self._bytes = {module: 2 * n * k for module, (n, k) in sizes.items()}
        self._done = 0

    def __enter__(self) -> _Steps:
        if self._progress is not None:
            self._progress.start(sum(self._bytes.values()), self._name)
        return self

    def done(self, module: str) -> None:
        self._done += self._bytes[module]
        if self._progress is not None:
            self._progress.update(self._done)

    def __exit__(self, *error: object) -> None:
        if self._progress is not None:
            self._progress.finish()


# ---- making the output


def _tensors(model: _Source, done: Mapping[str, Rounded]) -> list[NewTensor]:
    tensors: list[NewTensor] = []
    for name in model.checkpoint.tensors:
        module = name.removesuffix(".weight")
        if name == module or module not in done:
            tensors.append(_kept(model, name))
            continue
        for suffix, tensor in done[module].tensors().items():
            is_e4m3 = tensor.dtype == torch.float8_e4m3fn
            array = (tensor.view(torch.uint8) if is_e4m3 else tensor).numpy()
            dtype = "float8_e4m3fn" if is_e4m3 else array.dtype.name
            meta = TensorMeta(f"{module}.{suffix}", dtype, array.shape)
            tensors.append(NewTensor(meta, lambda array=array: iter([array])))  # type: ignore[misc]
    return tensors


def _kept(model: _Source, name: str) -> NewTensor:
    """An unchanged tensor. As in the engine, one of a GGUF file gets the dtype of the config."""
    meta = model.checkpoint.tensors[name].meta
    if not is_gguf(model.path) or meta.dtype != "float32":
        return copied(model.checkpoint, name)
    dtype = str(model.config["torch_dtype"])

    def chunks() -> Any:
        yield from_float32(np.ascontiguousarray(model.checkpoint.read(name)), dtype)

    return NewTensor(TensorMeta(name, dtype, meta.shape), chunks)


def _gguf_files(files: ModelFiles) -> dict[str, str]:
    """The small files of a GGUF model, by Hugging Face's names."""
    assert files.build_tokenizer is not None
    made = {"tokenizer.json": files.build_tokenizer().to_str(pretty=True)}
    config = files.json("tokenizer_config.json")
    templates = config.get("chat_template")
    if isinstance(templates, dict):
        named = [{"name": name, "template": text} for name, text in templates.items()]
        config["chat_template"] = templates["default"] if [*templates] == ["default"] else named
    made["tokenizer_config.json"] = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    if generation := files.json("generation_config.json"):
        made["generation_config.json"] = json.dumps(generation, indent=2) + "\n"
    return made
