"""The tensors of a GGUF file under Hugging Face's names.

Tensors of 16 and 32 bits are read as they are. Quantised tensors are decoded to float32 by the
`gguf` package, whose numbers are exact, and then rounded to the engine's 16 bits.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cpmcu.checks import brief
from cpmcu.loading.gguf.header import GgufHeader, GgufTensor
from cpmcu.loading.tensors import STORAGE_DTYPES, StoredTensor, TensorMeta

logger = logging.getLogger(__name__)

_PLAIN = {0: "float32", 1: "float16", 30: "bfloat16"}  # type -> dtype
_LAYER = re.compile(r"^blk\.(\d+)\.(.+)$")
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PARTS = {
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
}
# Tensors that the config takes up (cpmcu/loading/gguf/config.py).
_IN_CONFIG = ("rope_freqs.weight",)


class GgufCheckpoint:
    """The tensors of a model. `rotated`: head counts of q and k whose rows llama.cpp reordered."""

    always_converts = True

    def __init__(self, header: GgufHeader, rotated: Mapping[str, int]) -> None:
        self.directory = header.path
        self._rotated = rotated
        self._sources = {
            hf_name(tensor.name): tensor
            for tensor in header.tensors.values()
            if tensor.name not in _IN_CONFIG
        }
        self.tensors: Mapping[str, StoredTensor] = {
            name: self._stored(name, tensor) for name, tensor in self._sources.items()
        }
        decoded = [tensor for tensor in self._sources.values() if tensor.type_id not in _PLAIN]
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
        tensor = self._sources[name]
        values = _decode(tensor)
        heads = self._heads(name)
        if heads is None:
            return values
        rows = tensor.shape[0]
        # llama.cpp interleaves the two halves of each head: row 2 i + j of a head was row
        # j * (rows of a head / 2) + i.
        pairs = values.reshape(heads, rows // heads // 2, 2, -1)
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(tensor.shape)


def hf_name(name: str) -> str:
    """Hugging Face's name of a tensor; the name itself if it is unknown."""
    if name in _TOP:
        return _TOP[name]
    found = _LAYER.match(name)
    if found is None:
        return name
    part, _, kind = found[2].rpartition(".")
    return f"model.layers.{found[1]}.{_PARTS[part]}.{kind}" if part in _PARTS else name


def _decode(tensor: GgufTensor) -> npt.NDArray[Any]:
    dtype = _PLAIN.get(tensor.type_id)
    if dtype is not None:
        _check_end(tensor, TensorMeta(tensor.name, dtype, tensor.shape).nbytes)
        return np.memmap(tensor.path, STORAGE_DTYPES[dtype], "r", tensor.offset, tensor.shape)
    from gguf import GGML_QUANT_SIZES, dequantize  # loads slowly

    kind = _type(tensor)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if tensor.shape[-1] % block:
        raise ValueError(
            f"{tensor.path}: {brief(tensor.name)} has rows of {tensor.shape[-1]} values, expected "
            f"a multiple of {block}, the block of {kind.name}"
        )
    row_bytes = tensor.shape[-1] // block * block_bytes
    shape = (*tensor.shape[:-1], row_bytes)
    _check_end(tensor, int(np.prod(shape)))
    raw = np.memmap(tensor.path, np.uint8, "r", tensor.offset, shape)
    try:
        values: npt.NDArray[np.float32] = dequantize(raw, kind)
    except NotImplementedError as error:
        raise ValueError(
            f"{tensor.path}: {brief(tensor.name)} has type {kind.name}, which the gguf package "
            "cannot decode; convert the file to another type"
        ) from error
    return values.reshape(tensor.shape)


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
