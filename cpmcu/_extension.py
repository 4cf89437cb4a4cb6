"""Loads the compiled module cpmcu.C.

Compared with `from . import C`: tests can choose a build (CPMCU_EXTENSION_DIR=build/asan), and the
error for a missing module says how to build it.
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
    """Imports cpmcu.C from $CPMCU_EXTENSION_DIR if that is set, else from the package.

    Raises ImportError if the module is missing or cannot be loaded.
    """
    if NAME in sys.modules:
        return sys.modules[NAME]
    chosen = os.environ.get("CPMCU_EXTENSION_DIR")
    folder = Path(chosen) if chosen else Path(__file__).parent
    # Only files for this interpreter: Python 3.11 does not load C.cpython-312-*.so.
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
    import datetime  # noqa: F401  # else numpy's C code imports it and swallows a Ctrl-C

    # Waiting OpenMP threads sleep. Spinning threads starve each other on a busy machine: decoding
    # was 30 times slower on 2 busy cores. libgomp reads the variable when it is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    spec = importlib.util.spec_from_file_location(NAME, found[0])
    assert spec is not None and spec.loader is not None  # the suffix is known, so a loader exists
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[NAME]
        # pybind11 turns every exception during the import of numpy into ImportError, Ctrl-C too.
        if isinstance(error.__cause__, KeyboardInterrupt):
            raise error.__cause__ from None
        raise
    if package := sys.modules.get(__package__ or "cpmcu"):
        package.C = module  # type: ignore[attr-defined]  # for `from cpmcu import C`
    return module
