"""Reader of safetensors files and of their index.

A file has three parts: the header's length (8 bytes, little-endian), the header, and the tensors'
bytes without gaps. The header is JSON: name -> dtype, shape, byte range from the header's end. This
module reads the header; the engine streams the bytes. Errors name the file, the value found and the
value expected.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cpmcu.checks import brief, one_line, shown
from cpmcu.loading.index import DuplicateNameError, check_file, read_index, unique_names
from cpmcu.loading.tensors import STORAGE_DTYPES, StoredTensor, TensorMeta

MAX_HEADER_BYTES = 100_000_000  # limit of the format
_SMALL = 4 << 20  # bytes; smaller tensors share one mapping of their file, which is faster

_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
}
DTYPE_CODES = {dtype: code for code, dtype in _DTYPES.items()}  # dtype -> its name in a header


class SafetensorsCheckpoint:
    """The tensors of one safetensors file or of the shards of an index."""

    always_converts = False

    def __init__(self, directory: Path, tensors: Mapping[str, StoredTensor]) -> None:
        self.directory = directory
        self.tensors = tensors
        self._mapped: dict[Path, npt.NDArray[np.uint8]] = {}

    def read(self, name: str) -> npt.NDArray[Any]:
        """The tensor in its storage dtype (bfloat16 as uint16), mapped from the file."""
        stored = self.tensors[name]
        dtype = STORAGE_DTYPES[stored.meta.dtype]
        if stored.meta.num_elements == 0:
            return np.empty(stored.meta.shape, dtype)
        begin, size = stored.offset or 0, stored.meta.nbytes
        if size > _SMALL:  # a separate mapping, so that its pages can be freed
            return np.memmap(stored.path, dtype, "r", begin, stored.meta.shape)
        if stored.path not in self._mapped:
            self._mapped[stored.path] = np.asarray(np.memmap(stored.path, np.uint8, "r"))
        raw = self._mapped[stored.path][begin : begin + size]
        return raw.view(dtype).reshape(stored.meta.shape)


def open_safetensors(path: Path) -> SafetensorsCheckpoint:
    """One file, or all shards of a `*.safetensors.index.json`.

    Raises ValueError for a damaged file or index, FileNotFoundError for a missing shard.
    """
    if path.name.endswith(".index.json"):
        return SafetensorsCheckpoint(path.parent, read_index(path, read_header))
    return SafetensorsCheckpoint(path.parent, read_header(path))


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file in byte order, checked against the file's size.

    Raises ValueError if the file is truncated or inconsistent.
    """
    check_file(path)
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise ValueError(
                f"{path}: is {file_bytes} bytes long, expected at least 8 (a safetensors file "
                "starts with the length of its header)"
            )
        (header_bytes,) = struct.unpack("<Q", prefix)
        if header_bytes > MAX_HEADER_BYTES:
            raise ValueError(
                f"{path}: header length is {header_bytes} bytes, expected at most "
                f"{MAX_HEADER_BYTES}: not a safetensors file, or damaged"
            )
        if header_bytes > file_bytes - 8:
            raise ValueError(
                f"{path}: header length is {header_bytes} bytes but {file_bytes - 8} bytes "
                "follow, expected the whole header: the file is truncated"
            )
        raw = file.read(header_bytes)
    data_start = 8 + header_bytes
    tensors = [
        _parse_entry(path, name, entry, data_start)
        for name, entry in _parse_json(path, raw)
        if name != "__metadata__"
    ]
    tensors.sort(key=lambda stored: (stored.offset or 0, stored.meta.nbytes))
    _check_layout(path, tensors, data_start, file_bytes)
    return {stored.meta.name: stored for stored in tensors}


def _parse_json(path: Path, raw: bytes) -> Sequence[tuple[str, Any]]:
    unique = unique_names(f"{path}: header")
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except DuplicateNameError:
        raise
    except (ValueError, RecursionError) as error:  # also for numbers of thousands of digits
        raise ValueError(
            f"{path}: header is not JSON ({one_line(error)}), expected an object"
        ) from error
    if not isinstance(header, dict):
        raise ValueError(f"{path}: header is a JSON {type(header).__name__}, expected an object")
    return list(header.items())


def _parse_entry(path: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    if not isinstance(entry, dict):
        raise ValueError(f"{path}: header of {brief(name)} is {shown(entry)}, expected an object")
    code: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not isinstance(code, str) or code not in _DTYPES:
        raise ValueError(
            f"{path}: dtype of {brief(name)} is {shown(code)}, expected one of {', '.join(_DTYPES)}"
        )
    if not _is_int_list(shape):
        raise ValueError(
            f"{path}: shape of {brief(name)} is {shown(shape)}, expected integers from 0 up"
        )
    if not _is_int_list(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(
            f"{path}: data_offsets of {brief(name)} is {shown(offsets)}, expected [begin, end] "
            "with 0 <= begin <= end"
        )
    meta = TensorMeta(name, _DTYPES[code], tuple(shape))
    if offsets[1] - offsets[0] != meta.nbytes:
        raise ValueError(
            f"{path}: {brief(name)} takes {offsets[1] - offsets[0]} bytes, expected {meta.nbytes} "
            f"for {meta.dtype} of shape {shown(shape)}"
        )
    return StoredTensor(meta, path, data_start + offsets[0])


def _check_layout(
    path: Path, tensors: Sequence[StoredTensor], data_start: int, file_bytes: int
) -> None:
    end, before = data_start, "the header"
    for stored in tensors:
        begin, name = stored.offset or 0, stored.meta.name
        if begin != end:
            what = "overlaps" if begin < end else "leaves a hole after"
            raise ValueError(
                f"{path}: {brief(name)} {what} {brief(before)}: it begins at data byte "
                f"{begin - data_start}, expected {end - data_start}"
            )
        end, before = begin + stored.meta.nbytes, name
        if end > file_bytes:
            raise ValueError(
                f"{path}: {brief(name)} ends at byte {end} but the file has {file_bytes} bytes, "
                "expected all tensors inside: the file is truncated"
            )
    if end != file_bytes:
        raise ValueError(
            f"{path}: the file has {file_bytes} bytes, expected {end} by its header: "
            f"{file_bytes - end} bytes belong to no tensor"
        )


def _is_int_list(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**63 for item in value
    )
