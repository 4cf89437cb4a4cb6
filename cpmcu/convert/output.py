"""Writes a model directory atomically, with streamed weights.

The directory is written under a hidden name beside the destination, flushed to disk and renamed.
If the program fails or is interrupted, the destination is unchanged. The recipes of scripts/ use
the same functions.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cpmcu.loading.index import check_file
from cpmcu.loading.progress import LoadProgress
from cpmcu.loading.safetensors import DTYPE_CODES
from cpmcu.loading.tensors import STORAGE_DTYPES, Checkpoint, TensorMeta, itemsize

logger = logging.getLogger(__name__)

Array = npt.NDArray[Any]

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".ckpt")
_REWRITTEN = ("config.json", "quantize_config.json")
_SUBFOLDERS = ("additional_chat_templates",)
_COPY_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor to write. `chunks` yields its elements in order, in the storage dtype."""

    meta: TensorMeta
    chunks: Callable[[], Iterator[Array]]


@dataclass(frozen=True, slots=True)
class Converted:
    """Result of a conversion: the directory, and sentences for the user."""

    directory: Path
    notes: tuple[str, ...]


def copied(checkpoint: Checkpoint, source: str, name: str | None = None) -> NewTensor:
    """An unchanged copy of the checkpoint's tensor `source`, optionally with another name."""
    meta = checkpoint.tensors[source].meta

    def chunks() -> Iterator[Array]:
        flat = checkpoint.read(source).reshape(-1)
        step = _COPY_BYTES // flat.itemsize
        for begin in range(0, flat.size, step):
            yield flat[begin : begin + step]

    return NewTensor(TensorMeta(name or source, meta.dtype, meta.shape), chunks)


def check_destination(
    destination: Path,
    sources: Iterable[Path],
    *,
    overwrite: bool,
    flag: str = "--overwrite",
    holds: str = "config.json",
) -> Path:
    """The absolute path of the directory to write. Raises ValueError if it must not be written.

    Raises PermissionError if the directory above it cannot be written, as on a read-only disk.
    An existing directory is replaced only if it holds the file `holds`, which identifies the output
    of an earlier run.
    """
    destination = destination.expanduser().resolve()
    for source in sources:
        _check_apart(source.expanduser().resolve(), destination)
    if os.path.ismount(destination):
        raise ValueError(
            f"{destination} is a mount point, which cannot be replaced, expected a directory in it"
        )
    there = next(path for path in (destination, *destination.parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"{there} is a file, expected a directory or nothing yet")
    above = there.parent if there == destination else there  # where the output gets its name
    if not os.access(above, os.W_OK | os.X_OK):
        raise PermissionError(f"{above} cannot be written, expected a directory that can")
    if there != destination or not any(destination.iterdir()):
        return destination
    if not overwrite:
        raise ValueError(
            f"{destination} is not empty, expected a new directory ({flag} replaces what a run "
            "before has written)"
        )
    if not (destination / holds).is_file():
        raise ValueError(
            f"{destination} holds files but no {holds}, expected what a run before has written"
        )
    return destination


def _check_apart(source: Path, destination: Path) -> None:
    if source.is_relative_to(destination):
        raise ValueError(
            f"{destination} is or holds the source {source}, expected another directory"
        )
    if destination.is_relative_to(source):
        raise ValueError(
            f"{destination} is inside the source {source}, expected a directory outside it"
        )


def write_model(
    source: Path,
    destination: Path,
    weights_file: str,
    tensors: Sequence[NewTensor],
    config: Mapping[str, Any],
    *,
    leave_out: Callable[[str], bool] = lambda name: False,
    extra: Mapping[str, str] | None = None,
    progress: LoadProgress | None = None,
) -> None:
    """Writes weights, config.json, and the source's small files except those `leave_out` selects.

    `extra`: name -> text of further files.

    `destination` comes from `check_destination`; an existing directory is replaced. If the disk has
    not enough space, raises OSError before writing.
    """
    tensors = sorted(tensors, key=lambda tensor: -itemsize(tensor.meta.dtype))  # for alignment
    others = [path for path in small_files(source) if not leave_out(path.name)]
    total_bytes = sum(tensor.meta.nbytes for tensor in tensors)
    with new_directory(destination, total_bytes) as directory:
        for path in others:
            copy = directory / path.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        for name, content in {**(extra or {}), "config.json": text}.items():
            (directory / name).write_text(content, encoding="utf-8")
        try:
            if progress is not None:
                progress.start(total_bytes, source.resolve().name)
            update = (lambda done: None) if progress is None else progress.update
            write_safetensors(directory / weights_file, tensors, update)
        finally:
            if progress is not None:
                progress.finish()


def small_files(source: Path) -> list[Path]:
    """Files besides the weights: tokenizer, templates, licences, FR-Spec indices.

    Raises FileNotFoundError for a dangling link, ValueError if a path is not a regular file.
    """
    folders = [source, *(source / name for name in _SUBFOLDERS)]
    files = [path for folder in folders if folder.is_dir() for path in sorted(folder.iterdir())]
    small = [
        path
        for path in files
        if not path.is_dir()
        and not path.name.startswith(".")
        and path.name not in _REWRITTEN
        and not path.name.endswith(".index.json")
        and (path.name.startswith("freq_") or not path.name.endswith(_WEIGHTS))
    ]
    for path in small:
        check_file(path)
    return small


def check_space(directory: Path, num_bytes: int) -> None:
    """Raises OSError if fewer than `num_bytes` are free for a directory, even a new one."""
    there = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < num_bytes:
        raise OSError(
            f"{there} has {free / 1e6:.1f} MB free, expected at least {num_bytes / 1e6:.1f} MB"
        )


@contextlib.contextmanager
def new_directory(destination: Path, num_bytes: int = 0) -> Iterator[Path]:
    """A temporary directory that replaces `destination` if the context ends without an error.

    A link to a directory stays a link. Raises OSError if fewer than `num_bytes` are free.
    """
    destination = destination.expanduser().resolve()
    parent = destination.parent
    parent.mkdir(parents=True, exist_ok=True)
    check_space(parent, num_bytes)
    temporary = parent / f".{destination.name}.{secrets.token_hex(4)}.incomplete"
    temporary.mkdir()
    try:
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            _flush(path)
        _take_place(temporary, destination)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _flush(path: Path) -> None:
    """Flushes a file to disk, or a directory if the file system supports it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def _take_place(new: Path, destination: Path) -> None:
    """Renames `new` to `destination`. Errors after the rename are only logged."""
    old = new.with_suffix(".replaced")
    try:
        if destination.exists():
            destination.rename(old)
        new.rename(destination)
    except BaseException:
        if new.exists():
            if old.exists():
                old.rename(destination)
            raise
    try:
        _flush(destination.parent)
        if old.exists():
            shutil.rmtree(old)
    except (OSError, KeyboardInterrupt) as error:
        reason = str(error) or "interrupted"
        logger.warning(
            "%s is written; what it replaced is left in %s (%s)", destination, old, reason
        )


def write_safetensors(
    path: Path, tensors: Sequence[NewTensor], update: Callable[[int], None]
) -> None:
    """Writes one file in chunks. `update` gets the number of bytes written so far."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        meta = tensor.meta
        begin, end = end, end + meta.nbytes
        code = DTYPE_CODES[meta.dtype]
        header[meta.name] = {"dtype": code, "shape": meta.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    done = 0
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            before, dtype = done, np.dtype(STORAGE_DTYPES[tensor.meta.dtype])
            for chunk in tensor.chunks():
                if chunk.dtype != dtype:
                    raise TypeError(f"{tensor.meta.name}: made {chunk.dtype}, planned {dtype}")
                file.write(np.ascontiguousarray(chunk).data)
                done += chunk.nbytes
                update(done)
            if done - before != tensor.meta.nbytes:
                raise RuntimeError(
                    f"{tensor.meta.name}: made {done - before} bytes, planned {tensor.meta.nbytes}"
                )
