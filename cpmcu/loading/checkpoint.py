"""Which files of a directory are the checkpoint."""

from __future__ import annotations

from pathlib import Path

from cpmcu.loading.safetensors import open_safetensors
from cpmcu.loading.tensors import Checkpoint
from cpmcu.loading.torch_files import open_torch

# The first of these is taken. CPM.cu's converter and its loader have a name each; the others are in
# transformers' order, which leaves an index that is out of date beside a file saved as a whole.
_NAMES = (
    "model_gptq_marlin.safetensors",
    "model_gptq.safetensors",
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "pytorch_model.pt",
)
# Else the only file of the first of these that is there.
_PATTERNS = ("*.safetensors.index.json", "*.safetensors", "*.bin.index.json", "*.bin", "*.pt")
_NOT_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "freq_", "adapter_model")


def open_checkpoint(directory: Path) -> Checkpoint:
    """Reads the headers of the weights in a directory; no tensor data.

    Raises FileNotFoundError if there are none, ValueError if several files may be the weights.
    """
    path = _weights(directory)
    return open_safetensors(path) if "safetensors" in path.name else open_torch(path)


def _weights(directory: Path) -> Path:
    for name in _NAMES:
        if (directory / name).exists():
            return directory / name
    for pattern in _PATTERNS:
        found = sorted(
            path for path in directory.glob(pattern) if not path.name.startswith(_NOT_WEIGHTS)
        )
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(path.name for path in found[:8])
            raise ValueError(
                f"{directory}: has {len(found)} files that may be the weights ({names}), "
                "expected one of them, a usual name such as model.safetensors, or an index"
            )
    raise FileNotFoundError(
        f"{directory}: has no weights, expected one of: {', '.join(_NAMES[2:])}"
    )
