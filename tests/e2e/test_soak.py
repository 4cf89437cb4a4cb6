"""A soak test of a few seconds: the program starts, checks and ends."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.e2e.harness import ROOT
from tests.python_path import python_path

SMALL = ["--model-path", "tiny-python-minicpm", "--device", "cpu", "--num-threads", "1"]
SMALL += ["--max-model-len", "320", "--max-num-seqs", "4"]


@pytest.mark.slow
@pytest.mark.parametrize("prefixes", ["0", "6", "agents"])
def test_soak(prefixes):
    command = [sys.executable, "scripts/soak.py", "--clients", "6", "--duration", "2"]
    command += ["--agents"] if prefixes == "agents" else ["--shared-prefixes", prefixes]
    done = subprocess.run(
        [*command, "--max-growth-mib", "200", *SMALL],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": python_path(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = dict(line.strip("| ").split(" | ") for line in done.stdout.splitlines())
    assert int(rows["answered to the end"]) > 0
    assert int(rows["left by the client"]) > 0
    zero = ("num_requests_running at the end", "wrong answers", "warnings and errors in the log")
    assert [rows[name] for name in zero] == ["0", "0", "0"]
    if prefixes == "6":
        assert rows["pages cached after a reset at the end"] == "0"
        assert rows["texts that differ after a reset at the end"] == "0"
