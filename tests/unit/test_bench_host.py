"""scripts/bench/bench_host.py runs the engine's loop over a timetable."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.python_path import python_path
from tests.reference.engines import extension_or_skip

ROOT = Path(__file__).parents[2]
extension_or_skip()


@pytest.mark.parametrize("flags", [[], ["--stream"]])
def test_rates_lie_below_those_of_the_steps(flags: list[str]):
    """The timetable allows no higher rate. Slow machines may reach much less."""
    script = "scripts/bench/bench_host.py"
    steps = ["--steps", "3:2,20:4", "--context", "5", "--num-tokens", "60"]
    result = subprocess.run(
        [sys.executable, script, *steps, *flags],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": python_path(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr
    rows = [
        [float(cell) for cell in line.split("|")[1:-1]] for line in result.stdout.splitlines()[2:]
    ]
    assert [(row[0], row[1]) for row in rows] == [(3, 1500), (20, 5000)]
    assert all(0 < row[2] < 1.2 * row[1] for row in rows)
    assert rows[0][5] == 0 < rows[1][5]  # few sequences have no text thread
