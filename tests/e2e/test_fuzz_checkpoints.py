"""Runs some recipes of scripts/fuzz_checkpoints.py, and checks that it detects failures."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.e2e.harness import ROOT
from tests.python_path import python_path

RECIPES = 200


@pytest.fixture(scope="module")
def fuzzer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz", ROOT / "scripts" / "fuzz_checkpoints.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_recipes() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/fuzz_checkpoints.py", "--count", str(RECIPES), "--jobs", "2"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": python_path(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = {kind: int(count) for count, kind in re.findall(r"^ +(\d+) (\w+)$", done.stdout, re.M)}
    assert sum(found.values()) == RECIPES
    assert found["works"] > 10 and found["ValueError"] > 100 and found["ChatTemplateError"] > 10


def test_a_recipe_is_always_the_same(fuzzer: ModuleType, tmp_path: Path) -> None:
    bases = fuzzer.recipes.write_bases(tmp_path / "bases")
    for number in range(40):
        made = []
        for copy in ("a", "b"):
            directory = tmp_path / f"{number}-{copy}"
            said = fuzzer.recipes.damage(number, bases, directory)
            files = {path.relative_to(directory): path for path in directory.rglob("*")}
            made.append((said, {n: p.read_bytes() for n, p in files.items() if p.is_file()}))
        assert made[0] == made[1]


@pytest.mark.parametrize(
    ("error", "wrong"),
    [
        (ValueError("{directory}/config.json: is empty"), ""),
        (MemoryError("the model needs 1 TB"), ""),
        (KeyError("config.json"), "not a type of refusal"),
        (UnicodeDecodeError("utf-8", b"", 0, 1, "config.json"), "not a type of refusal"),
        (ValueError("config.json: is\nempty"), "not one line"),
        (ValueError(""), "not one line"),
        (ValueError("config.json: " + "x" * 3000), "characters"),
        (ValueError("something is empty"), "names no file"),
    ],
)
def test_failures_are_detected(
    fuzzer: ModuleType, tmp_path: Path, error: Exception, wrong: str
) -> None:
    found = fuzzer.fault(error, tmp_path)
    assert wrong in found and bool(found) == bool(wrong)
