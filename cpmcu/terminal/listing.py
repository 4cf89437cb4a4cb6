"""Lists registered models, quantisation schemes, drafters, parsers, C++ parts, and their files."""

from __future__ import annotations

import importlib
import importlib.util

# Kind, module of its registry, and the function that returns name -> file.
_REGISTRIES = (
    ("model", "cpmcu.models.registry", "registered_models"),
    ("quantisation", "cpmcu.quant.registry", "registered_quants"),
    ("drafter", "cpmcu.drafters.registry", "registered_drafters"),
    ("tool parser", "cpmcu.serving.tool_parsers.registry", "registered_tool_parsers"),
    (
        "reasoning parser",
        "cpmcu.serving.reasoning_parsers.registry",
        "registered_reasoning_parsers",
    ),
)


def registered() -> list[tuple[str, str, str]]:
    """Returns (kind, name, file) rows. C++ rows are left out if the extension is missing."""
    rows = []
    for kind, module, function in _REGISTRIES:
        package = module.rpartition(".")[0]
        if importlib.util.find_spec(package) is None:  # the package is not installed
            continue
        entries = getattr(importlib.import_module(module), function)()
        rows += [(kind, name, file) for name, file in entries.items()]
    try:
        from cpmcu import C
    except ImportError:
        return rows
    parts: dict[str, dict[str, str]] = dict(C.registered())
    for kind, entries in parts.items():
        rows += [(f"C++ {kind}", name, file) for name, file in entries.items()]
    return rows
