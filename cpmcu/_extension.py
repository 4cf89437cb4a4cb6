"""Finds the compiled module cpmcu.C.

`from . import C` would do, were it not for two wishes: tests pick a build by its folder
(CPMCU_EXTENSION_DIR=build/asan), and a missing module says what to do about it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

NAME = "cpmcu.C"


def load() -> ModuleType:
    """Imports cpmcu.C, from $CPMCU_EXTENSION_DIR when that is set, else from the package.

    Raises ImportError if it is not there or cannot be loaded.
    """
    if NAME in sys.modules:
        return sys.modules[NAME]
    chosen = os.environ.get("CPMCU_EXTENSION_DIR")
    folder = Path(chosen) if chosen else Path(__file__).parent
    # Only names this interpreter can load: C.cpython-312-… is not among them for Python 3.11.
    found = [path for suffix in EXTENSION_SUFFIXES if (path := folder / f"C{suffix}").exists()]
    if not found:
        others = ", ".join(sorted(path.name for path in folder.glob("C.*.so")))
        raise ImportError(
            f"cpmcu's compiled module C{EXTENSION_SUFFIXES[0]} is not in {folder}"
            + (f" (it has {others}, built for another Python)" if others else "")
            + "; run `pip install -e .` or `make build` in the source tree"
            + (", or unset CPMCU_EXTENSION_DIR." if chosen else "."),
            name=NAME,
        )
    import datetime  # noqa: F401  # numpy's C code imports it, and would lose a Ctrl-C meanwhile

    # Waiting OpenMP threads sleep: spinning ones starve each other on a busy machine (30 times
    # slower decoding measured on 2 loaded cores). libgomp reads this once, when it is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    spec = importlib.util.spec_from_file_location(NAME, found[0])
    assert spec is not None and spec.loader is not None  # the suffix is a known one
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[NAME]
        # pybind11 makes an ImportError of all that ends the import of numpy, Ctrl-C too.
        if isinstance(error.__cause__, KeyboardInterrupt):
            raise error.__cause__ from None
        raise
    if package := sys.modules.get(__package__ or "cpmcu"):
        package.C = module  # type: ignore[attr-defined]  # what `from cpmcu import C` looks up
    return module
