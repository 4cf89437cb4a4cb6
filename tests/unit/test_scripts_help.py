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


def test_the_server_names_a_missing_package_before_it_loads():
    """The only message is one sentence. A model given up while it loads would add another."""
    for package in ("fastapi", "prometheus_client"):
        code = "import sys; sys.modules[sys.argv[1]] = None; from cpmcu.server import main; "
        code += "sys.exit(main(['--port', '0']))"
        done = subprocess.run(
            [sys.executable, "-c", code, package],
            env={**os.environ, "PYTHONPATH": python_path(ROOT), "CPMCU_DEBUG": ""},
            capture_output=True,
            text=True,
            timeout=60,
        )
        name = package.replace("_", "-")
        sentence = f"the server needs the package '{name}': pip install 'cpmcu[server]'\n"
        assert (done.returncode, done.stderr) == (1, f"cpmcu.server: {sentence}")


EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*.py")) if path.stem[:4] != "ray_"]


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.name)
def test_help_of_an_example(script: Path, tmp_path: Path):
    """Each example prints its help, without the packages that it needs to run."""
    (tmp_path / "openai.py").write_text("raise ModuleNotFoundError(name='openai')")
    done = subprocess.run(
        [sys.executable, script, "--help"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{python_path(ROOT)}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    if script.stem != "sentences":
        assert len(done.stdout.split()) > 5
