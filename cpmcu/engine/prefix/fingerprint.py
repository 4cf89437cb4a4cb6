"""The fingerprint of model, build and device that KV pages belong to; it names their folder.

Pages are valid for one model only, because other weights give other keys and values for the same
tokens. Weights of 16 GB cannot be read at every start, so their contents are sampled. The
sample of a weight file is its name, size, header and 64 blocks of 4 KB at even distances. In
safetensors files it also has one block from the middle of every tensor. Training moves nearly all
values of the tensors that it trains, so the blocks of these tensors differ in a fine-tune.

The fingerprint misses an edit of single values or rows between the blocks. After such an edit,
remove the folder of the cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_VERSION = b"cpmcu model fingerprint 1"
_CONFIGS = ("config.json", "quantize_config.json", "hf_quant_config.json")
_WEIGHTS = (".safetensors", ".npy", ".bin", ".pt", ".pth")
_BLOCKS = 64
_BLOCK_BYTES = 4096
_MAX_HEADER_BYTES = 16 << 20


def model_fingerprint(paths: Sequence[Path], parts: Mapping[str, object]) -> str:
    """32 hex digits for the contents of checkpoint directories (target, draft) and for `parts`.

    `parts` are the other properties that determine a page's bytes (dtype, device, build,
    quantisation, rope), as JSON values. The place of a directory does not matter. A path may be a
    single file, too. Raises OSError for a file that cannot be read and TypeError for a part that is
    no JSON value.
    """
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    fields = [_VERSION, text.encode(), b"%d" % len(paths)]
    for path in paths:
        files = [path] if path.is_file() else sorted(_files_of(path))
        fields.append(b"%d" % len(files))
        for file in files:
            fields += [file.name.encode("utf-8", "surrogateescape"), _digest_of(file)]
    return _digest(fields).hex()


def _files_of(directory: Path) -> Iterator[Path]:
    for file in directory.iterdir():
        if (file.name in _CONFIGS or file.suffix in _WEIGHTS) and file.is_file():
            yield file


def _digest(fields: Sequence[bytes]) -> bytes:
    """Hashes the fields and their lengths, so different lists of fields give different digests."""
    digest = hashlib.blake2b(digest_size=16)
    for field in fields:
        digest.update(struct.pack("<Q", len(field)))
        digest.update(field)
    return digest.digest()


def _digest_of(path: Path) -> bytes:
    with path.open("rb", buffering=0) as file:
        fd = file.fileno()
        size = os.fstat(fd).st_size
        if path.name in _CONFIGS:
            return _digest([_read(fd, 0, size)])
        header, middles = b"", list[int]()
        if path.suffix == ".safetensors":
            header, middles = _safetensors_header(fd, size)
        last = max(size - _BLOCK_BYTES, 0)
        offsets = {last * block // (_BLOCKS - 1) for block in range(_BLOCKS)}
        offsets.update(max(min(middle, last), 0) for middle in middles)
        if hasattr(os, "posix_fadvise"):  # so that the disk has all requests at once
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            for offset in sorted(offsets):
                os.posix_fadvise(fd, offset, _BLOCK_BYTES, os.POSIX_FADV_WILLNEED)
        blocks = [_read(fd, offset, _BLOCK_BYTES) for offset in sorted(offsets)]
    return _digest([b"%d" % size, header, *blocks])


def _read(fd: int, offset: int, size: int) -> bytes:
    parts = []
    while size and (part := os.pread(fd, size, offset)):
        parts.append(part)
        offset, size = offset + len(part), size - len(part)
    return b"".join(parts)


def _safetensors_header(fd: int, size: int) -> tuple[bytes, list[int]]:
    """The header, and the file offset of the middle of each tensor.

    A damaged file gives fewer of both.
    """
    prefix = _read(fd, 0, 8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
    raw = _read(fd, 8, min(length, size, _MAX_HEADER_BYTES))
    try:
        content: Any = json.loads(raw)
        ranges = [entry["data_offsets"] for name, entry in content.items() if name[:2] != "__"]
        return prefix + raw, [8 + length + (begin + end) // 2 for begin, end in ranges]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return prefix + raw, []
