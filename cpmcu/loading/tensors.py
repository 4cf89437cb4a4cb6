"""Metadata of a checkpoint's tensors, known before their bytes are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

FLOAT_DTYPES = ("float32", "float16", "bfloat16")

# dtype -> the numpy dtype that holds its bytes (numpy has no bfloat16 and no fp8)
STORAGE_DTYPES: dict[str, type[np.generic]] = {
    "bool": np.bool_,
    "uint8": np.uint8,
    "int8": np.int8,
    "float8_e4m3fn": np.uint8,
    "float8_e5m2": np.uint8,
    "float8_e8m0fnu": np.uint8,
    "uint16": np.uint16,
    "int16": np.int16,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "uint32": np.uint32,
    "int32": np.int32,
    "float32": np.float32,
    "uint64": np.uint64,
    "int64": np.int64,
    "float64": np.float64,
}
_ITEM_BYTES = {name: np.dtype(kind).itemsize for name, kind in STORAGE_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Name, dtype and shape. A dtype that is not in STORAGE_DTYPES cannot be read."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes; ValueError for a dtype that is not in STORAGE_DTYPES."""
        return self.num_elements * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor and its place in a file."""

    meta: TensorMeta
    path: Path
    offset: int | None  # bytes from the file's start; None: only `Checkpoint.read` can get it


class Checkpoint(Protocol):
    """The tensors of a model directory, in any file format."""

    directory: Path
    tensors: Mapping[str, StoredTensor]
    # The format has no tensors in the model's dtype, so a conversion is nothing to warn of.
    always_converts: bool

    def read(self, name: str) -> npt.NDArray[Any]:
        """The tensor in its storage dtype (bfloat16 as uint16)."""


def itemsize(dtype: str) -> int:
    """Bytes of one element. Raises ValueError for a dtype that is not in STORAGE_DTYPES."""
    if dtype not in _ITEM_BYTES:
        raise ValueError(f"dtype {dtype} is unknown, expected one of {', '.join(STORAGE_DTYPES)}")
    return _ITEM_BYTES[dtype]
