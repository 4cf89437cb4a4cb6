"""The training recipe's modules for tests: its scripts import one another by bare names."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

RECIPE = Path(__file__).parents[2] / "scripts" / "train"


@contextlib.contextmanager
def import_recipe() -> Iterator[SimpleNamespace]:
    """The modules, imported as the recipe's scripts import them and then forgotten."""
    for package in ("torch", "tokenizers", "safetensors", "transformers", "accelerate"):
        pytest.importorskip(package, reason=f"the training recipe needs {package}")
    names = [path.stem for path in RECIPE.glob("*.py")]
    saved = {name: sys.modules.pop(name, None) for name in names}
    sys.path.insert(0, str(RECIPE))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(RECIPE))
        for name, module in saved.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
