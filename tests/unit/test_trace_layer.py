"""scripts/trace_layer.py reads stamps as csrc/core/trace.cuh leaves them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("cpmcu.C")

SCRIPT = Path(__file__).parents[2] / "scripts" / "trace_layer.py"
PERIOD = 50_000  # nanoseconds of a layer
LAYERS = 32


def rings(
    blocks: int, launches: int, stamps: Callable[[int, int], Sequence[int]]
) -> npt.NDArray[np.uint64]:
    """The trace rings of CTAs whose timestamps are stamps(block, launch)."""
    all_rings = np.zeros((512, 1 + 64 * 16), np.uint64)
    for block in range(blocks):
        all_rings[block, 0] = launches
        for launch in range(launches):
            row = stamps(block, launch)
            at = 1 + launch % 64 * 16
            all_rings[block, at : at + 16] = [*row, *[0] * (16 - len(row))]
    return all_rings


def fused_layer(block: int, launch: int) -> list[int]:
    """Timestamps of a fused layer launch that ends 50 us after the previous one.

    The last launch of a pass has three GEMMs.
    """
    begin = 10**9 + launch * PERIOD
    passed = [begin + 3000 * place + 8 * block for place in range(14)]
    if launch % LAYERS == LAYERS - 1:
        passed[11:] = [0, 0, 0]
    if block > 125:  # this CTA has no part in qkv
        passed[11:] = [0, 0, 0]
    return passed


def attention(block: int, launch: int) -> list[int]:
    begin = 10**9 + launch * PERIOD - 8000
    return [begin + block, begin + 1000, begin + 2000, begin + 5000]


def test_fused_layer_launches_delimit_layers() -> None:
    spec = importlib.util.spec_from_file_location("trace_layer", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script  # dataclasses look their module up
    spec.loader.exec_module(script)
    found = script.by_layer(
        {
            "fused_layer": rings(132, 100, fused_layer),
            "attention": rings(18, 100, attention),
            "rotary_kv": rings(0, 0, attention),
        }
    )
    assert "rotary begins" not in found
    # The previous layer is done 39 us, plus an offset for each block, after its launch.
    done = 39_000 + 125 * 8
    first, median, last = np.median(np.array(found["attention is done"]), axis=0)
    assert first == median == last == (PERIOD - 8000 + 5000 - done) / 1000
    expected = [(PERIOD + 6000 + 8 * block - done) / 1000 for block in (0, 65.5, 131)]
    layers = np.array(found["x has arrived: o"])
    assert np.allclose(np.median(layers, axis=0), expected)
    # Of 63 pairs of launches, those with a launch of three GEMMs are left out.
    assert len(layers) == 63 - 2 * 2


def test_a_build_without_stamps_is_refused() -> None:
    run = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
    if run.returncode != 2:
        pytest.skip("this build stamps the clock")
    assert "has no trace" in run.stderr
