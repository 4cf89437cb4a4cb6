"""scripts/bench/bench_arrivals.py times streams over a timetable while prompts arrive."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.python_path import python_path
from tests.reference.engines import extension_or_skip

ROOT = Path(__file__).parents[2]
extension_or_skip()


def test_tokens_follow_the_timetable():
    """The timetable allows no shorter steps and passes. Slow machines may take much longer."""
    script = "scripts/bench/bench_arrivals.py"
    flags = ["--rates", "20", "--clients", "3", "--seconds", "1.5", "--skip", "0.3"]
    flags += ["--steps", "1:2,8:4", "--prompt", "64", "--outputs", "5,10"]
    result = subprocess.run(
        [sys.executable, script, *flags],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": python_path(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr
    rows = [line.strip("| ").split(" | ") for line in result.stdout.splitlines()[2:]]
    assert [row[0] for row in rows] == ["20/s", "3"]
    for row in rows:
        mean, median, p99, most, ratio, first, *_, rate, passes = map(float, row[1:])
        assert mean >= 1.9 and median <= p99 <= most and ratio >= 1
        assert first >= 3  # a pass of 64 tokens takes 3.1 ms
        assert 0 < rate < 1000 and 0 < passes <= 1
