"""Reader of .bin and .pt checkpoints through torch, which is imported only here.

Files are opened with weights_only=True: they may hold tensors, but no code.
"""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cpmcu.loading.index import check_file, read_index
from cpmcu.loading.tensors import StoredTensor, TensorMeta

# Exceptions of torch.load for damaged files.
DAMAGED = (
    *(RuntimeError, OSError, EOFError, ValueError, LookupError, TypeError, AttributeError),
    *(AssertionError, struct.error, zipfile.BadZipFile),
)


class TorchCheckpoint:
    """The tensors of one torch file or of the shards of an index."""

    always_converts = False

    def __init__(self, directory: Path, tensors: Mapping[str, tuple[Path, Any]]) -> None:
        self.directory = directory
        self._tensors = tensors
        self.tensors: Mapping[str, StoredTensor] = {
            name: StoredTensor(_meta(name, tensor), path, None)
            for name, (path, tensor) in tensors.items()
        }

    def read(self, name: str) -> npt.NDArray[Any]:
        """The tensor in its storage dtype (bfloat16 as uint16)."""
        import torch  # slow to import

        # Drops the gradient flag of parameters and resolves a lazy negation.
        tensor = self._tensors[name][1].detach().resolve_neg().contiguous()
        meta = self.tensors[name].meta
        if meta.dtype == "bfloat16":
            return np.asarray(tensor.view(torch.int16).numpy().view(np.uint16))
        if meta.dtype.startswith("float8"):
            return np.asarray(tensor.view(torch.uint8).numpy())
        return np.asarray(tensor.numpy())


def open_torch(path: Path) -> TorchCheckpoint:
    """One `.bin` / `.pt` file, or all shards of a `*.bin.index.json`.

    Raises RuntimeError if torch is not installed, ValueError for a file that is damaged or holds
    more than tensors, FileNotFoundError for a missing shard.
    """
    if path.name.endswith(".index.json"):
        return TorchCheckpoint(path.parent, read_index(path, _load))
    return TorchCheckpoint(path.parent, _load(path))


def _load(path: Path) -> dict[str, tuple[Path, Any]]:
    check_file(path)
    try:
        import torch  # slow to import
    except ImportError as error:
        raise RuntimeError(
            f"{path}: reading this file needs torch, which is not installed; install it "
            "(pip install torch) or convert the checkpoint to safetensors"
        ) from error
    try:
        # Old files are not zip archives and cannot be memory-mapped.
        state = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path}: is damaged or holds Python objects, expected tensors only; convert the "
            "checkpoint to safetensors if you trust it"
        ) from error
    except DAMAGED as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{path}: torch cannot read it ({reason}), expected a state dict: the file is damaged"
        ) from error
    if not isinstance(state, dict):
        raise ValueError(f"{path}: holds a {type(state).__name__}, expected a state dict")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise ValueError(
                f"{path}: entry {name!r} is a {type(value).__name__}, expected a flat state dict "
                "of names and tensors"
            )
        if value.is_meta or value.layout != torch.strided:
            kind = "has no data (device meta)" if value.is_meta else f"is {value.layout}"
            raise ValueError(f"{path}: {name} {kind}, expected a dense tensor")
    return {name: (path, tensor) for name, tensor in state.items()}


def _meta(name: str, tensor: Any) -> TensorMeta:
    return TensorMeta(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
