"""Which files of a directory are the checkpoint."""

from __future__ import annotations

from pathlib import Path

from cpmcu.loading.safetensors import open_safetensors
from cpmcu.loading.tensors import Checkpoint
from cpmcu.loading.torch_files import open_torch

# In order of preference: streamed before read through torch, an index before single files. Of
# several files the first of these names is taken; CPM.cu's converter and its loader have one each.
_CLASSES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("*.safetensors.index.json", ("model.safetensors.index.json",)),
    (
        "*.safetensors",
        ("model_gptq_marlin.safetensors", "model_gptq.safetensors", "model.safetensors"),
    ),
    ("*.bin.index.json", ("pytorch_model.bin.index.json",)),
    ("*.bin", ("pytorch_model.bin",)),
    ("*.pt", ("pytorch_model.pt",)),
)
_NOT_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "freq_", "adapter_model")


def open_checkpoint(directory: Path) -> Checkpoint:
    """Reads the headers of the weights in a directory; no tensor data.

    The first class of files that is there is taken: safetensors index, safetensors, torch index,
    .bin, .pt. Raises FileNotFoundError if there is none, ValueError if there are several.
    """
    for pattern, preferred in _CLASSES:
        found = sorted(
            path for path in directory.glob(pattern) if not path.name.startswith(_NOT_WEIGHTS)
        )
        if not found:
            continue
        named = {path.name: path for path in found}
        chosen = next((named[name] for name in preferred if name in named), None)
        if chosen is None and len(found) == 1:
            chosen = found[0]
        if chosen is None:
            names = ", ".join(path.name for path in found[:8])
            raise ValueError(
                f"{directory}: has {len(found)} files that may be the weights ({names}), "
                f"expected one of them, {' or '.join(preferred)}, or an index"
            )
        return open_safetensors(chosen) if "safetensors" in pattern else open_torch(chosen)
    raise FileNotFoundError(
        f"{directory}: has no weights, expected one of: "
        f"{', '.join(names[-1] for _, names in _CLASSES)}"
    )
