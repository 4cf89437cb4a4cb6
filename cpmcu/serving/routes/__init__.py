"""The endpoints. Every module here has a `router`; paths in its `PUBLIC` need no API key."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType


def modules() -> Iterator[ModuleType]:
    """Yields the modules of this package in order of name."""
    for info in sorted(pkgutil.iter_modules(__path__), key=lambda info: info.name):
        yield importlib.import_module(f"{__name__}.{info.name}")
