"""Versions, build and devices of this installation, for a bug report."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from cpmcu import __version__
from cpmcu.errors import sentence

_PACKAGES = (
    "numpy",
    "tokenizers",
    "jinja2",
    "safetensors",
    "xxhash",
    "huggingface_hub",
    "rich",
    "transformers",
    "torch",
    "nvidia-cublas",
)
_VARIABLES = (
    "CPMCU_EXTENSION_DIR",
    "CPMCU_DEBUG",
    "CPMCU_CUBLAS_HOME",
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDA_VISIBLE_DEVICES",
    "HF_HUB_OFFLINE",
    "HF_HOME",
    "LD_LIBRARY_PATH",
    "OMP_WAIT_POLICY",
)
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def environment() -> list[tuple[str, str]]:
    """Returns (subject, value) rows. Needs neither a GPU nor the compiled extension."""
    return [
        ("cpmcu", f"{__version__}, in {Path(__file__).parent}"),
        ("python", f"{platform.python_version()}, {sys.executable}"),
        ("platform", f"{platform.platform()}, {os.cpu_count()} cores"),
        *_extension_rows(),
        ("driver", _driver()),
        *((name, _version(name)) for name in _PACKAGES),
        *((name, os.environ[name]) for name in _VARIABLES if name in os.environ),
    ]


def _extension_rows() -> Iterator[tuple[str, str]]:
    try:
        from cpmcu import C
    except ImportError as error:
        yield "extension", f"missing: {sentence(error)}"
        return
    yield "extension", str(getattr(C, "__file__", "built in"))
    for name, value in json.loads(C.build_info_json).items():
        yield f"built: {name}", str(value) or "-"
    count = C.device_count()
    yield "devices", str(count) if count else "none (no GPU or no driver, or a build without CUDA)"
    for index in range(count):
        info = C.device_info(index)
        yield f"device {index}", ", ".join(f"{key} {value}" for key, value in info.items())


def _driver() -> str:
    try:
        return _DRIVER_FILE.read_text().splitlines()[0]
    except (OSError, IndexError):
        return "no NVIDIA driver found"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
