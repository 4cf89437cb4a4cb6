"""The messages of scripts if a required package is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.python_path import python_path

ROOT = Path(__file__).parents[2]
MISSING = ("httpx", "uvicorn", "fastapi", "torch", "matplotlib")


def run_without_packages(script: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Runs a script with the import of MISSING blocked."""
    code = "import runpy, sys; sys.modules.update(dict.fromkeys(sys.argv[1].split(',')));"
    code += "sys.argv = sys.argv[2:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    return subprocess.run(
        [sys.executable, "-c", code, ",".join(MISSING), script, *flags],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": python_path(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("script", ["scripts/soak.py", "scripts/bench/bench_server.py"])
def test_help_needs_no_package(script: str):
    done = run_without_packages(script, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: {Path(script).name}")


def test_a_missing_package_is_named():
    done = run_without_packages("scripts/soak.py", "--duration", "1")
    assert done.returncode == 2
    assert "the clients need the package 'httpx': pip install 'cpmcu[dev]'" in done.stderr
    assert "Traceback" not in done.stderr
