"""Tests that need a missing package are skipped; with CPMCU_REQUIRE_ALL=1 they fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.python_path import python_path

ROOT = Path(__file__).parents[2]
MODULE = "import pytest\npytest.importorskip('no_such_package')\ndef test(): pass\n"
TESTS = """
import pytest
from tests.missing import missing, skip_unless

def test_package(): pytest.importorskip("no_such_package", reason="needs no_such_package")
def test_program(): missing("no-such-program was not found")
@skip_unless(None, "no model")
def test_mark(): raise FileNotFoundError("no model")
def test_found(): assert pytest.importorskip("json")
@pytest.mark.gpu
def test_gpu(): raise AssertionError
"""


def outcome(folder: Path, value: str) -> str:
    """The summary of a run of both modules."""
    (folder / "test_module.py").write_text(MODULE)
    (folder / "test_tests.py").write_text(TESTS)
    environment = {"PYTHONPATH": python_path(ROOT), "CPMCU_REQUIRE_ALL": value}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # plugins take seconds to load
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), str(folder)]
    command += ["--continue-on-collection-errors"]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True
    )
    return done.stdout


def test_they_are_skipped(tmp_path):
    assert "1 passed, 5 skipped" in outcome(tmp_path, "")


def test_they_fail_if_all_is_required(tmp_path):
    text = outcome(tmp_path, "1")
    assert "3 failed, 1 passed, 1 skipped" in text and "1 error in" in text
    assert "CPMCU_REQUIRE_ALL=1, but needs no_such_package" in text
    assert "CPMCU_REQUIRE_ALL=1, but no-such-program was not found" in text
