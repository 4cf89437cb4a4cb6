"""Plots of a benchmark: tokens/s by context, and each kernel's share of its roofline."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpmcu.text.files import read_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Kernel = tuple[str, float]  # (name, share of the roofline that it reaches)

_FLOOR = "floor of plain decoding"


def check_plot(path: Path) -> None:
    """Raises ValueError if no plot can be written to `path`. Called before any measurement."""
    if path.suffix.lower() != ".png":
        raise ValueError(f"--plot is {path}, expected a file that ends in .png")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--plot is {path}, but {path.absolute().parent} is no directory")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ValueError(f"--plot is {path}, which cannot be written")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'cpmcu[plot]'")


def read_kernels(path: Path) -> list[Kernel]:
    """Reads the JSON lines of `scripts/bench/bench_*.py --json`, in order.

    Lines without "roofline" are skipped. Raises ValueError if a line is not a JSON object or no
    line has a "roofline".
    """
    kernels = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        try:
            row = json.loads(line or "{}")
            share = row.get("roofline")
        except (ValueError, AttributeError) as error:
            raise ValueError(
                f"{path}, line {number}: expected a JSON object, as scripts/bench/bench_w4.py "
                "--json prints it"
            ) from error
        if not isinstance(share, int | float):
            continue
        parts = [row.get("name"), row.get("model"), row.get("layer")]
        name = " ".join(str(part) for part in parts if part)
        kernels.append((f"{name}, M {row['m']}" if "m" in row else name, float(share)))
    if not kernels:
        raise ValueError(f'{path} has no line with a number "roofline"')
    return kernels


def draw(result: dict[str, Any], kernels: list[Kernel]) -> Figure:
    """A figure of the result of `cpmcu.bench.run`."""
    from matplotlib.figure import Figure

    height = max(4.5, 1.5 + 0.22 * len(kernels))
    figure = Figure(figsize=(13 if kernels else 7, height), layout="constrained")
    left, *right = figure.subplots(1, 2 if kernels else 1, squeeze=False)[0]
    _draw_rates(left, result)
    if kernels:
        _draw_shares(right[0], kernels)
    figure.suptitle(f"{result['model']}, {result['dtype']}, on {result['device']}")
    return figure


def save(result: dict[str, Any], kernels: list[Kernel], path: Path) -> None:
    """Writes the figure as PNG."""
    draw(result, kernels).savefig(path, dpi=150)


def _draw_rates(axes: Axes, result: dict[str, Any]) -> None:
    rows = result["rows"]
    contexts = [row["context"] for row in rows]
    floors = [1e3 / row["floor_ms"] for row in rows]
    if len(rows) == 1:  # a curve needs two points
        axes.axhline(floors[0], ls="--", color="grey", label=_FLOOR)
    else:
        axes.plot(contexts, floors, "--", color="grey", label=_FLOOR)
    rates = [1e3 / row["step_ms"] for row in rows]
    axes.plot(contexts, rates, "o-", label="plain decoding")
    if "speculation" in result:
        fixed, chosen = result["speculation"]["rows"], result["speculation"]["chosen"]
        mean = sum(row["mean_accept_length"] for row in fixed) / len(fixed)
        _draw_requests(axes, fixed, "s-", f"speculation, {mean:.2f} tokens a step")
        _draw_requests(axes, chosen, "^-", "speculation, shapes chosen in each step")
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [str(context) for context in contexts])
    axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("tokens/s, one sequence")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15))


def _draw_requests(axes: Axes, rows: list[dict[str, Any]], style: str, label: str) -> None:
    if rows:
        contexts = [row["context"] for row in rows]
        axes.plot(contexts, [row["tokens_per_s"] for row in rows], style, label=label)


def _draw_shares(axes: Axes, kernels: list[Kernel]) -> None:
    names, shares = zip(*kernels)
    places = range(len(kernels))
    axes.barh(places, [100 * share for share in shares])
    axes.set_yticks(places, names, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(100, color="grey", linestyle="--")
    axes.set_xlabel("share of the roofline, %")
