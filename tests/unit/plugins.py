"""Small models and C++ plugins of tests that register parts from outside the package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.missing import missing
from tests.reference.tiny_checkpoints import write_safetensors

ROOT = Path(__file__).resolve().parents[2]
VOCAB = 96


def write_model(directory: Path, config: dict[str, Any], weights: Mapping[str, Any]) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    write_safetensors(directory / "model.safetensors", weights)
    return directory


def load_plugin(name: str, folder: Path) -> None:
    """Compiles tests/plugins/<name>.cpp and loads it."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        missing("no C++ compiler was found")
    library = folder / f"{name}.so"
    source = ROOT / "tests" / "plugins" / f"{name}.cpp"
    command = [compiler, "-std=c++20", "-O1", "-fPIC", "-shared", f"-I{ROOT / 'csrc'}"]
    subprocess.run([*command, str(source), "-o", str(library)], check=True)
    from cpmcu import C

    C.load_plugin(str(library))
