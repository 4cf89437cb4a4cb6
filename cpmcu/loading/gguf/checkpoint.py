"""The tensors of a GGUF file under Hugging Face's names.

Tensors of 16 and 32 bits are read as they are. Tensors of linear layers and the head whose types
are in blocks.py become tensors of formats that the engine multiplies, without rounding. The `gguf`
package decodes all other quantised tensors to float32 exactly. They are then rounded to the
engine's 16 bits.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cpmcu.checks import brief
from cpmcu.loading.gguf.blocks import BLOCKS, Arrays, Form, form_of, metas, split_rows
from cpmcu.loading.gguf.header import GgufHeader, GgufTensor
from cpmcu.loading.tensors import STORAGE_DTYPES, StoredTensor, TensorMeta

logger = logging.getLogger(__name__)

_PLAIN = {0: "float32", 1: "float16", 30: "bfloat16"}  # GGML type -> dtype
_LAYER = re.compile(r"^blk\.(\d+)\.(.+)$")
TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "output.scale": "lm_head.scale",
}
PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
# The tensors of all experts of a layer, stacked.
_EXPERTS = re.compile(r"^blk\.(\d+)\.ffn_(gate|up|down)_exps\.(weight|scale)$")
# Parts of one matrix of the engine.
_MATRICES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# Tensors that the config takes up (cpmcu/loading/gguf/config.py).
_IN_CONFIG = ("rope_freqs.weight",)
_MAX_RECENT = 4  # modules kept in memory; loading interleaves the tensors of q, k and v


class GgufCheckpoint:
    """The tensors of a model.

    `rotated`: head counts of q and k whose rows llama.cpp reordered. `packs`: whether types of
    blocks.py stay packed; else they are decoded. `halves`: whether forms with halves stay packed,
    too.
    """

    always_converts = True

    def __init__(
        self,
        header: GgufHeader,
        rotated: Mapping[str, int],
        *,
        packs: bool = True,
        halves: bool = True,
    ) -> None:
        self.directory = header.path
        self._rotated = rotated
        self._sources: dict[str, GgufTensor] = {}
        for tensor in header.tensors.values():
            if tensor.name not in _IN_CONFIG:
                self._sources |= _named(tensor)
        self._factors = {  # NVFP4 has a factor in a tensor beside the weight
            module: self._sources.pop(f"{module}.scale")
            for module in [name.removesuffix(".weight") for name in self._sources]
            if f"{module}.scale" in self._sources
        }
        packed = packed_modules(self._sources, halves) if packs else {}
        self._packed: dict[str, str] = {}  # name of a tensor of a packed module -> the module
        self._forms = packed
        self._recent: dict[str, Arrays] = {}  # module -> its tensors
        tensors: dict[str, StoredTensor] = {}
        for name, tensor in self._sources.items():
            module = name.removesuffix(".weight")
            if module not in packed:
                tensors[name] = self._stored(name, tensor)
                continue
            for meta in metas(module, packed[module], *tensor.shape):
                self._packed[meta.name] = module
                tensors[meta.name] = StoredTensor(meta, tensor.path, None)
        self.tensors: Mapping[str, StoredTensor] = tensors
        self._log(header, packed)

    @property
    def has_packed(self) -> bool:
        """Does a tensor stay in its blocks?"""
        return bool(self._packed)

    def _log(self, header: GgufHeader, packed: Collection[str]) -> None:
        decoded = [
            tensor
            for name, tensor in self._sources.items()
            if tensor.type_id not in _PLAIN and name.removesuffix(".weight") not in packed
        ]
        if packed:
            kinds = Counter(BLOCKS[self._sources[m + ".weight"].type_id].name for m in packed)
            listed = ", ".join(f"{count} of {kind}" for kind, count in kinds.most_common())
            logger.info("%s: tensors kept in their blocks: %s", header.path.name, listed)
        if decoded:
            kinds = Counter(_type(tensor).name for tensor in decoded)
            listed = ", ".join(f"{count} of {kind}" for kind, count in kinds.most_common())
            logger.info("%s: tensors decoded to 16 bits: %s", header.path.name, listed)

    def _stored(self, name: str, tensor: GgufTensor) -> StoredTensor:
        dtype = _PLAIN.get(tensor.type_id)
        meta = TensorMeta(name, dtype or "float32", tensor.shape)
        if dtype is None or self._heads(name) is not None:
            return StoredTensor(meta, tensor.path, None)
        _check_end(tensor, meta.nbytes)
        return StoredTensor(meta, tensor.path, tensor.offset)

    def _heads(self, name: str) -> int | None:
        """The number of heads if the tensor's rows were reordered, else None."""
        return next((n for part, n in self._rotated.items() if f".{part}." in name), None)

    def read(self, name: str) -> npt.NDArray[Any]:
        """The tensor in its storage dtype (bfloat16 as uint16); quantised ones as float32."""
        module = self._packed.get(name)
        if module is not None:
            if name.endswith(".weight_scale_2"):
                return self._factor(module)
            return self._split(module)[name.removeprefix(f"{module}.")]
        tensor = self._sources[name]
        values = _decode(tensor)
        if name.removesuffix(".weight") in self._factors:
            values = values * self._factor(name.removesuffix(".weight"))
        return self._in_order(name, values)

    def _split(self, module: str) -> Arrays:
        """The tensors of a packed module. Each is read by itself, so the last modules are kept."""
        if module not in self._recent:
            tensor = self._sources[f"{module}.weight"]
            rows = self._in_order(f"{module}.weight", _raw(tensor, *_block_of(tensor)))
            while len(self._recent) >= _MAX_RECENT:
                self._recent.pop(next(iter(self._recent)))
            self._recent[module] = split_rows(tensor.type_id, self._forms[module], rows)
        return self._recent[module]

    def _factor(self, module: str) -> npt.NDArray[np.float32]:
        """The number [1] that multiplies a NVFP4 tensor."""
        stored = self._factors.get(module)
        found = np.ones(1, np.float32) if stored is None else _decode(stored)
        return np.ascontiguousarray(found, np.float32).reshape(-1)[:1]

    def _in_order(self, name: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Returns the rows in the order of Hugging Face's checkpoints."""
        heads = self._heads(name)
        if heads is None:
            return values
        rows = len(values)
        # llama.cpp interleaves the two halves of each head: row 2 i + j of a head was row
        # j * (rows of a head / 2) + i.
        pairs = values.reshape(heads, rows // heads // 2, 2, -1)
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _named(tensor: GgufTensor) -> dict[str, GgufTensor]:
    """Returns tensors by Hugging Face's names. Stacked experts become a tensor for each expert."""
    found = _EXPERTS.match(tensor.name)
    if found is None:
        return {hf_name(tensor.name): tensor}
    layer, part, kind = found.groups()
    prefix = f"model.layers.{layer}.mlp.experts."
    size = _num_bytes(tensor) // tensor.shape[0]
    return {
        f"{prefix}{i}.{part}_proj.{kind}": replace(
            tensor, shape=tensor.shape[1:] or (1,), offset=tensor.offset + i * size
        )
        for i in range(tensor.shape[0])
    }


def _num_bytes(tensor: GgufTensor) -> int:
    dtype = _PLAIN.get(tensor.type_id)
    if dtype is not None:
        return TensorMeta(tensor.name, dtype, tensor.shape).nbytes
    from gguf import GGML_QUANT_SIZES  # loads slowly

    values, nbytes = GGML_QUANT_SIZES[_type(tensor)]
    return int(np.prod(tensor.shape)) // values * nbytes


def _same_matrix(module: str) -> list[str]:
    """The modules that are one matrix of the engine, itself included."""
    prefix, dot, last = module.rpartition(".")
    parts = next((parts for parts in _MATRICES if last in parts), (last,))
    return [prefix + dot + part for part in parts]


def packed_modules(sources: Mapping[str, GgufTensor], halves: bool) -> dict[str, Form]:
    """Returns the linear layers that stay packed, with their forms. A matrix has one form.

    `sources`: Hugging Face's name -> tensor. `halves`: whether forms with halves stay packed.
    Embeddings are decoded, and so is a head that is tied to them.
    """
    tensors = {
        name.removesuffix(".weight"): tensor
        for name, tensor in sources.items()
        if name.endswith("_proj.weight") or name == "lm_head.weight"
    }

    def fits(tensor: GgufTensor) -> bool:
        block = BLOCKS.get(tensor.type_id)
        if block is None or len(tensor.shape) != 2:
            return False
        return tensor.shape[0] % 8 == 0 and tensor.shape[1] % block.values == 0

    forms: dict[str, Form] = {}
    for module in tensors:
        parts = [tensors[other] for other in _same_matrix(module) if other in tensors]
        form = form_of({part.type_id for part in parts}) if all(map(fits, parts)) else None
        if form is not None and (halves or not form.has_halves):
            forms[module] = form
    return forms


def hf_name(name: str) -> str:
    """Hugging Face's name of a tensor; the name itself if it is unknown."""
    if name in TOP:
        return TOP[name]
    found = _LAYER.match(name)
    if found is None:
        return name
    part, _, kind = found[2].rpartition(".")
    return f"model.layers.{found[1]}.{PARTS[part]}.{kind}" if part in PARTS else name


def _decode(tensor: GgufTensor) -> npt.NDArray[Any]:
    dtype = _PLAIN.get(tensor.type_id)
    if dtype is not None:
        _check_end(tensor, TensorMeta(tensor.name, dtype, tensor.shape).nbytes)
        return np.memmap(tensor.path, STORAGE_DTYPES[dtype], "r", tensor.offset, tensor.shape)
    from gguf import GGML_QUANT_SIZES, dequantize  # loads slowly

    kind = _type(tensor)
    raw = _raw(tensor, *GGML_QUANT_SIZES[kind], kind.name)
    try:
        values: npt.NDArray[np.float32] = dequantize(raw, kind)
    except NotImplementedError as error:
        raise ValueError(
            f"{tensor.path}: {brief(tensor.name)} has type {kind.name}, which the gguf package "
            "cannot decode; convert the file to another type"
        ) from error
    return values.reshape(tensor.shape)


def _block_of(tensor: GgufTensor) -> tuple[int, int, str]:
    block = BLOCKS[tensor.type_id]
    return block.values, block.nbytes, block.name


def _raw(tensor: GgufTensor, block: int, block_bytes: int, kind: str) -> npt.NDArray[np.uint8]:
    """Rows of blocks, [..., bytes]."""
    if tensor.shape[-1] % block:
        raise ValueError(
            f"{tensor.path}: {brief(tensor.name)} has rows of {tensor.shape[-1]} values, expected "
            f"a multiple of {block}, the block of {kind}"
        )
    row_bytes = tensor.shape[-1] // block * block_bytes
    shape = (*tensor.shape[:-1], row_bytes)
    _check_end(tensor, int(np.prod(shape)))
    return np.memmap(tensor.path, np.uint8, "r", tensor.offset, shape)


def _check_end(tensor: GgufTensor, nbytes: int) -> None:
    size = tensor.path.stat().st_size
    if tensor.offset + nbytes > size:
        raise ValueError(
            f"{tensor.path}: {brief(tensor.name)} ends at byte {tensor.offset + nbytes}, but the "
            f"file has {size}: it is not complete, download it again"
        )


def _type(tensor: GgufTensor) -> Any:
    try:
        from gguf import GGMLQuantizationType
    except ImportError as error:
        raise ImportError(
            f"{tensor.path}: its quantised tensors are read through the gguf package, which is "
            "not installed: pip install 'cpmcu[gguf]'"
        ) from error
    try:
        return GGMLQuantizationType(tensor.type_id)
    except ValueError as error:
        raise ValueError(
            f"{tensor.path}: {brief(tensor.name)} has the unknown type {tensor.type_id}; update "
            "the gguf package, or convert the file to another type"
        ) from error


def name_of(path: Path) -> str:
    """A model's name from that of its file."""
    return re.sub(r"-00001-of-\d{5}$", "", path.stem)
