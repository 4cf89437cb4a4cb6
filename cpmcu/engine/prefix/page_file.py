"""The file of one KV page: safetensors with the tensor "page" and, at times, the tensor "state".

This module writes and reads the header itself, and transfers data directly between the disk and the
caller's buffers. The safetensors library would copy the data. It also maps files, so a disk error
would kill the process (SIGBUS) instead of raising an OSError.
"""

from __future__ import annotations

import functools
import json
import os
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from cpmcu.checks import shown

FORMAT = "cpmcu prefix page 1"
_ALIGNMENT = 4096  # bytes; the first tensor of a file begins at a multiple: whole pages are copied
_TENSORS = ("page", "state")
# Has the length of any digest and fingerprint, to compute the length of a header.
_DIGEST = "0" * 32


class BadPageFileError(ValueError):
    """A page file is damaged or holds another page."""


@dataclass(frozen=True, slots=True)
class PageName:
    """The identity of a page.

    The header holds each part, and each part is compared before the page is used.
    """

    fingerprint: str
    key: bytes
    parent: bytes
    tokens: bytes  # token ids as little-endian int32

    def metadata(self) -> dict[str, str]:
        return {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "key": self.key.hex(),
            "parent": self.parent.hex(),
            "tokens": self.tokens.hex(),
        }


def write_page(fd: int, name: PageName, page: memoryview, state: memoryview | None) -> int:
    """Writes the whole file. Returns the number of bytes. Raises OSError."""
    parts = [page] if state is None else [page, state]
    digests = [xxhash.xxh3_128_hexdigest(part) for part in parts]
    buffers = [memoryview(_header(name, [len(part) for part in parts], digests)), *parts]
    size = sum(len(buffer) for buffer in buffers)
    while buffers:
        buffers = _after(buffers, os.writev(fd, buffers))
    return size


def read_page(
    fd: int, name: PageName, page: memoryview, state: memoryview | None, state_bytes: int
) -> tuple[int, bool]:
    """Fills `page`, and `state` unless it is None.

    Returns the file's size and whether it has a state. If a state is wanted and the file has none,
    nothing is filled. Raises OSError and BadPageFileError; the contents of the buffers are then
    undefined.
    """
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise BadPageFileError("is not a regular file")
    size, plain = found.st_size, file_bytes(name, [len(page)])
    has_state = bool(state_bytes) and size == file_bytes(name, [len(page), state_bytes])
    if size != plain and not has_state:
        either = f" or {file_bytes(name, [len(page), state_bytes])}" if state_bytes else ""
        raise BadPageFileError(f"is {size} bytes long, expected {plain}{either}")
    parts = [page] if state is None else [page, state] if has_state else []
    sizes = [len(page), state_bytes] if has_state else [len(page)]
    raw = bytearray(size - sum(sizes))
    _read_ahead(fd, size)
    _fill(fd, [memoryview(raw), *parts])
    digests = [xxhash.xxh3_128_hexdigest(part) for part in parts]
    if len(digests) < len(sizes) or raw != _header(name, sizes, digests):
        _check_header(raw, name, sizes, digests)
    return size, has_state


def file_bytes(name: PageName, sizes: Sequence[int]) -> int:
    """The size of a file whose tensors have `sizes` bytes."""
    return _file_bytes(len(name.tokens), tuple(sizes))


@functools.lru_cache
def _file_bytes(token_bytes: int, sizes: tuple[int, ...]) -> int:
    name = PageName(_DIGEST, bytes(16), bytes(16), bytes(token_bytes))
    return len(_header(name, sizes, [_DIGEST] * len(sizes))) + sum(sizes)


def _tensors(sizes: Sequence[int]) -> dict[str, Any]:
    tensors, begin = {}, 0
    for tensor, size in zip(_TENSORS, sizes):
        tensors[tensor] = {"dtype": "U8", "shape": [size], "data_offsets": [begin, begin + size]}
        begin += size
    return tensors


@functools.lru_cache
def _template(sizes: tuple[int, ...]) -> str:
    """The text of a header, with a place for each value that differs between pages."""
    tensors = _tensors(sizes)
    checksums = {f"{tensor}_xxh3_128": f"%({tensor})s" for tensor in tensors}
    values = {field: f"%({field})s" for field in ("fingerprint", "key", "parent", "tokens")}
    content = {"__metadata__": {"format": FORMAT, **values, **checksums}, **tensors}
    return json.dumps(content, separators=(",", ":"))


def _header(name: PageName, sizes: Sequence[int], digests: Sequence[str]) -> bytes:
    values = {**name.metadata(), **dict(zip(_TENSORS, digests))}
    text = (_template(tuple(sizes)) % values).encode()
    padded = text + b" " * (-(8 + len(text)) % _ALIGNMENT)  # the format allows spaces at the end
    return struct.pack("<Q", len(padded)) + padded


def _check_header(
    raw: bytearray, name: PageName, sizes: Sequence[int], digests: Sequence[str]
) -> None:
    """Raises BadPageFileError unless the header describes the page `name` and its tensors.

    Spaces and the order of fields do not matter. `digests`: of the tensors that were read.
    """
    (length,) = struct.unpack_from("<Q", raw)
    if length != len(raw) - 8:
        raise BadPageFileError(f"header length is {length}, expected {len(raw) - 8}")
    try:
        content = json.loads(raw[8:].decode("utf-8"))
    except (ValueError, RecursionError):
        raise BadPageFileError("header is not JSON, expected an object") from None
    expected = _tensors(sizes)
    metadata = content.pop("__metadata__", None) if isinstance(content, dict) else None
    if not isinstance(metadata, dict) or content != expected:
        raise BadPageFileError(f"header is {shown(content)}, expected {shown(expected)}")
    for field, value in name.metadata().items():
        if metadata.get(field) == value:
            continue
        if field == "tokens":  # somebody's prompt, which is not for the log
            raise BadPageFileError("holds other tokens than those that were asked for")
        raise BadPageFileError(f"{field} is {shown(metadata.get(field))}, expected {shown(value)}")
    for tensor, digest in zip(expected, digests):
        stated = metadata.get(f"{tensor}_xxh3_128")
        if digest != stated:
            raise BadPageFileError(
                f"checksum of the {tensor} is {digest}, expected {shown(stated)}"
            )


def _fill(fd: int, buffers: list[memoryview]) -> None:
    """Reads the file from its beginning into the buffers."""
    done = 0
    while buffers:
        count = os.preadv(fd, buffers, done)
        if not count:
            raise BadPageFileError(f"ends at byte {done}, expected more")
        done += count
        buffers = _after(buffers, count)


def _after(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """Returns `buffers` without their first `count` bytes."""
    remaining = []
    for buffer in buffers:
        skipped = min(count, len(buffer))
        count -= skipped
        if skipped < len(buffer):
            remaining.append(buffer[skipped:])
    return remaining


def _read_ahead(fd: int, size: int) -> None:
    """Requests the whole file from the disk, which then reads while the first bytes are hashed."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, size, os.POSIX_FADV_WILLNEED)
