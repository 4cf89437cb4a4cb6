"""Directories to search for libcublasLt, besides those of the system's dynamic loader."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Folders of the PyPI wheels for CUDA 13 and CUDA 12.
_WHEEL_FOLDERS = ("nvidia/cu13/lib", "nvidia/cublas/lib")


def cublas_paths() -> list[str]:
    """Existing directories in order: CPMCU_CUBLAS_HOME, CUDA_HOME, wheels of this Python."""
    candidates: list[Path] = []
    for variable in ("CPMCU_CUBLAS_HOME", "CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            folders = ("", "lib", "lib64") if variable == "CPMCU_CUBLAS_HOME" else ("lib64",)
            candidates += [Path(home) / folder for folder in folders]
    for entry in sys.path:
        candidates += [Path(entry) / folder for folder in _WHEEL_FOLDERS if entry]
    found = [str(path) for path in candidates if path.is_dir()]
    return list(dict.fromkeys(found))
