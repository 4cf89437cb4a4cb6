"""The launches of a pass as a table: each kind of layer once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from cpmcu.ui.tables import mebibytes

COLUMNS = ("pass", "layer", "launch", "ops", "MiB")
_SHOWN = 4  # maximum number of layers of one kind that are listed one by one

Row = tuple[str, str, str, str, str]
Launch = Mapping[str, Any]


def launch_rows(passes: Mapping[str, Sequence[Launch]]) -> list[Row]:
    """Returns rows of COLUMNS. Layers with the same launches are shown once.

    `passes`: name -> launches, from `C.Engine.launches`. A launch belongs to the layer of its first
    op. MiB counts the weights that a launch reads for one token; "-": none, or unknown.
    """
    rows = []
    for name, launches in passes.items():
        for layers, members in _kinds(launches):
            for launch in members:
                size = f"{mebibytes(launch['bytes']):.2f}" if launch["bytes"] else "-"
                rows.append((name, layers, launch["kind"], ", ".join(launch["ops"]), size))
    return rows


def _kinds(launches: Sequence[Launch]) -> list[tuple[str, list[Launch]]]:
    """Returns (layers, launches) of each kind of layer, in the order of their first layers."""
    layers: dict[int, list[Launch]] = {}
    for launch in launches:
        layers.setdefault(launch["layer"], []).append(launch)
    kinds: dict[str, list[int]] = {}
    for layer, members in layers.items():
        key = repr([(each["kind"], each["ops"], each["bytes"]) for each in members])
        kinds.setdefault(key, []).append(layer)
    return [(_layers_text(found), layers[found[0]]) for found in kinds.values()]


def _layers_text(layers: Sequence[int]) -> str:
    if layers == [-1]:
        return "start"
    first, last = layers[0], layers[-1]
    if len(layers) > 1 and last - first + 1 == len(layers):
        return f"{first}-{last}"
    if len(layers) <= _SHOWN:
        return ", ".join(map(str, layers))
    shown = ", ".join(map(str, layers[: _SHOWN - 1]))
    return f"{shown}, ... {last} ({len(layers)})"


def capability_of(name: str) -> int:
    """Reads "cpu" or "sm_90" as 0 or 90. Raises ValueError for other text."""
    if name == "cpu":
        return 0
    match = re.fullmatch(r"sm_(\d{2,3})a?", name)
    if match is None:
        raise ValueError(f"the architecture is {name!r}, expected cpu, or sm_90 and the like")
    return int(match[1])
