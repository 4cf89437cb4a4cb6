"""Selects the files of a directory that are the checkpoint."""

from __future__ import annotations

from pathlib import Path

from cpmcu.loading.safetensors import open_safetensors
from cpmcu.loading.tensors import Checkpoint
from cpmcu.loading.torch_files import open_torch

# Formats that can be streamed precede those that torch reads. In each format, the first existing
# name is taken, else the only file of the first matching pattern. The first two names are those of
# CPM.cu's loader and converter. The others have transformers' order: a whole file precedes an
# index, which may be outdated.
_STREAMED = (
    (
        "model_gptq_marlin.safetensors",
        "model_gptq.safetensors",
        "model.safetensors",
        "model.safetensors.index.json",
    ),
    ("*.safetensors.index.json", "*.safetensors"),
)
_BY_TORCH = (
    ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model.pt"),
    ("*.bin.index.json", "*.bin", "*.pt"),
)
_NOT_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "freq_", "adapter")


def open_checkpoint(directory: Path) -> Checkpoint:
    """Reads the headers of the weights in a directory, without tensor data.

    Raises FileNotFoundError if there are no weights, ValueError if the choice is ambiguous.
    """
    path = _weights(directory)
    return open_safetensors(path) if "safetensors" in path.name else open_torch(path)


def has_safetensors(directory: Path) -> bool:
    """Does the directory hold safetensors weights?"""
    return bool(_matching(directory, "*.safetensors"))


def _weights(directory: Path) -> Path:
    for names, patterns in (_STREAMED, _BY_TORCH):
        for name in names:
            if (directory / name).exists():
                return directory / name
        for pattern in patterns:
            found = _matching(directory, pattern)
            if len(found) == 1:
                return found[0]
            if found:
                shown = ", ".join(path.name for path in found[:8])
                raise ValueError(
                    f"{directory}: has {len(found)} files that may be the weights ({shown}), "
                    "expected one of them, a usual name such as model.safetensors, or an index"
                )
    state = (
        "is a file, expected a directory with"
        if directory.is_file()
        else "has no weights, expected"
    )
    raise FileNotFoundError(
        f"{directory}: {state} one of: {', '.join([*_STREAMED[0][2:], *_BY_TORCH[0]])}"
    )


def _matching(directory: Path, pattern: str) -> list[Path]:
    return sorted(
        path for path in directory.glob(pattern) if not path.name.startswith(_NOT_WEIGHTS)
    )
