"""Reader of a GGUF file's header, versions 2 and 3, little-endian.

The file is: magic, version, number of tensors, number of metadata entries, the entries (name,
type, value), one record for each tensor (name, dimensions, type, offset), padding, tensor data.
Source: the format's specification in the ggml repository, docs/gguf.md.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpmcu.checks import brief, shown
from cpmcu.loading.index import check_file

_MAGIC = b"GGUF"
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_MAX_ITEMS = 1 << 28  # maximum number of items of an array; larger counts mean a damaged file
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor's record: `shape` has the slowest dimension first, `offset` is in the file."""

    name: str
    type_id: int  # number of the type in llama.cpp's GGMLQuantizationType
    shape: tuple[int, ...]
    path: Path
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata of the first file and the tensors of all files of a model."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


class _Cursor:
    """Reads values at a moving position; struct.error or IndexError beyond the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def scalar(self, code: str) -> Any:
        form = struct.Struct("<" + code)
        (value,) = form.unpack_from(self.data, self.at)
        self.at += form.size
        return value

    def text(self) -> str:
        length = self.scalar("Q")
        if length > len(self.data) - self.at:
            raise IndexError("a text is longer than the file")
        found = self.data[self.at : self.at + length]
        self.at += length
        return found.decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array(self.scalar("I"), self.scalar("Q"))
        if kind not in _SCALARS:
            raise ValueError(f"a value has type {kind}, expected 0 to 12")
        return self.scalar(_SCALARS[kind])

    def _array(self, kind: int, count: int) -> list[Any]:
        if count > _MAX_ITEMS:
            raise ValueError(f"an array has {count} items, expected at most {_MAX_ITEMS}")
        if kind not in _SCALARS:
            return [self.value(kind) for _ in range(count)]
        form = struct.Struct(f"<{count}{_SCALARS[kind]}")
        values = list(form.unpack_from(self.data, self.at))
        self.at += form.size
        return values


def read_header(path: Path) -> GgufHeader:
    """The header of a file, and the tensors of its other parts if the model is split.

    Raises FileNotFoundError for a missing file or part, ValueError for a damaged one.
    """
    metadata, tensors = _read(path)
    parts = metadata.get("split.count", 1)
    if isinstance(parts, int) and parts > 1:
        for part in _parts(path, parts):
            tensors |= _read(part)[1] if part != path else {}
    return GgufHeader(path, metadata, tensors)


def is_later_part(path: Path) -> bool:
    """Is the file a part of a split model, but not its first?"""
    found = _SHARD.search(path.name)
    return found is not None and int(found[1]) > 1


def _parts(path: Path, count: int) -> list[Path]:
    found = _SHARD.search(path.name)
    if found is None or int(found[1]) != 1:
        raise ValueError(
            f"{path}: is part of {count} files, expected the first one, named "
            f"NAME-00001-of-{count:05}.gguf"
        )
    stem = path.name[: found.start()]
    parts = [path.with_name(f"{stem}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise FileNotFoundError(
            f"{path}: {len(missing)} of {count} parts are missing: {', '.join(missing[:8])}, "
            f"expected them in {path.parent}"
        )
    return parts


def _read(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    check_file(path)
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise ValueError(f"{path}: is not a GGUF file, expected it to begin with 'GGUF'")
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, _Cursor(data))
        except (struct.error, IndexError, OverflowError) as error:
            raise ValueError(
                f"{path}: ends within its header, expected a complete GGUF file ({error})"
            ) from error


def _parse(path: Path, cursor: _Cursor) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    cursor.at = 4
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise ValueError(f"{path}: has GGUF version {shown(version)}, expected 2 or 3")
    num_tensors, num_entries = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.scalar("I"))
    records = [_record(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(
            f"{path}: general.alignment is {shown(alignment)}, expected a positive integer"
        )
    begin = -(-cursor.at // alignment) * alignment
    tensors = {}
    for name, type_id, shape, offset in records:
        if begin + offset > len(cursor.data):
            raise ValueError(
                f"{path}: {brief(name)} begins after the end of the file, expected a complete file"
            )
        tensors[name] = GgufTensor(name, type_id, shape, path, begin + offset)
    return metadata, tensors


def _record(cursor: _Cursor) -> tuple[str, int, tuple[int, ...], int]:
    name, num_dims = cursor.text(), cursor.scalar("I")
    if num_dims > _MAX_DIMS:
        raise ValueError(f"{brief(name)} has {num_dims} dimensions, expected at most {_MAX_DIMS}")
    dims = [cursor.scalar("Q") for _ in range(num_dims)]
    type_id = cursor.scalar("I")
    return name, type_id, tuple(reversed(dims)), cursor.scalar("Q")
