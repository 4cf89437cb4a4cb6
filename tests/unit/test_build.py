"""setup.py: which compilers it takes, when it builds CUDA, and what it shows meanwhile.

Compilers are scripts that write empty files.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest

ROOT = Path(__file__).parents[2]
PATH = os.pathsep.join([str(Path(sys.executable).parent), "/usr/bin", "/bin"])
GPU = "[ $1 = -L ] && echo 'GPU 0: NVIDIA L4' || echo 8.9"
NO_GPU = "echo 'No devices were found'; exit 6"
# Writes the object and the list of its headers that ninja expects.
COMPILES = """
case "$*" in *-dumpfullversion*) echo 13.1.0; exit;; esac
while [ $# -gt 0 ]; do if [ "$1" = -o ]; then touch "$2"; fi; shift; done
"""


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def machine(tmp_path):
    """PATH and environment of a machine with g++ 13, a CUDA toolkit and no GPU."""
    script(tmp_path / "bin" / "g++", COMPILES)
    script(tmp_path / "bin" / "nvidia-smi", NO_GPU)
    script(tmp_path / "cuda" / "bin" / "nvcc", COMPILES)
    (tmp_path / "cuda" / "lib64").mkdir()
    (tmp_path / "cuda" / "lib64" / "libcudart_static.a").touch()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CPMCU_")}
    path = f"{tmp_path / 'bin'}{os.pathsep}{PATH}"
    return {**kept, "PATH": path, "CUDA_HOME": str(tmp_path / "cuda"), "CXX": "", "MAX_JOBS": "2"}


@pytest.fixture
def tree(tmp_path):
    """A copy of what the build reads."""
    folder = tmp_path / "tree"
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    shutil.copytree(
        ROOT / "cpmcu", folder / "cpmcu", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, folder)
    return folder


def build(tree: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)


def config(environment: dict[str, str], **further: str) -> tuple[list[str], str]:
    """The architectures, and the last line, which may say why the build is for the CPU."""
    command = [sys.executable, "setup.py", "config"]
    done = subprocess.run(
        command, cwd=ROOT, env={**environment, **further}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    text, end = done.stdout[done.stdout.index("\n{\n") :].rsplit("}\n", 1)
    return json.loads(text + "}")["archs"], end.strip()


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("echo 9.4.0", "found 9.4.0 ("),
        ("[ $1 = --version ] && echo 'clang version 19.1.0' || exit 1", "clang version 19.1.0."),
    ],
)
def test_an_unfit_compiler_is_named(tree, machine, tmp_path, body, found):
    script(tmp_path / "bin" / "g++", body)
    done = build(tree, machine)
    assert done.returncode == 1
    assert done.stderr.startswith("g++ 12 or later is needed, found ") and found in done.stderr
    assert "CXX=g++-12" in done.stderr
    assert not (tree / "build").exists()


def test_a_missing_compiler_is_named(tree, machine):
    done = build(tree, {**machine, "CXX": "g++-none"})
    assert done.returncode == 1
    assert done.stderr.startswith("g++ 12 or later is needed, found no g++-none on PATH.")


def test_a_compiler_behind_another_program(tree, machine):
    done = build(tree, {**machine, "CXX": "env LANG=C g++"})
    assert done.returncode == 0, done.stderr
    assert '"cxx": "13.1.0"' in done.stdout


def test_cuda_is_built_if_asked_for_or_if_a_gpu_is_visible(machine, tmp_path):
    assert config(machine) == (
        [],
        "for the CPU: no GPU is visible; CPMCU_WITH_CUDA=1 adds CUDA",
    )
    assert config(machine, CPMCU_WITH_CUDA="1") == (["90a"], "")
    assert config(machine, CPMCU_CUDA_ARCH="90a,80") == (["80", "90a"], "")
    assert "120" in config(machine, CPMCU_CUDA_ARCH="all")[0]
    script(tmp_path / "bin" / "nvidia-smi", GPU)
    assert config(machine) == (["89"], "")
    assert config(machine, CPMCU_WITH_CUDA="0") == ([], "for the CPU: CPMCU_WITH_CUDA=0")


def test_a_pipe_gets_a_line_for_each_file(tree, machine):
    done = build(tree, machine)
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first.startswith("cpmcu: compiling the CPU engine only (no GPU is visible; ")
    assert re.search(r"about [2-8] min with -j 2$", first)
    assert len(rest) > 80
    assert any("cxx csrc/core/arena.cpp" in line for line in rest)
    assert "\r" not in done.stdout
    assert "everything is compiled" in build(tree, machine).stdout


def test_cuda_takes_longer(tree, machine):
    done = build(tree, {**machine, "CPMCU_CUDA_ARCH": "80,90a"})
    assert done.returncode == 0, done.stderr
    first = done.stdout.splitlines()[0]
    assert "the CPU engine and CUDA for sm_80 (A100), sm_90a (H100, H200): " in first
    count, unit = first.split("about ")[1].split()[:2]
    assert int(count) * {"min": 1, "hours": 60}[unit] > 30


def run_in_terminal(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    process = pexpect.spawn(
        command[0], command[1:], cwd=folder, env=environment, encoding="utf-8", timeout=200
    )
    text = process.read()
    process.close()
    assert process.exitstatus == 0, text
    return text


def test_a_terminal_shows_a_bar(tree, machine, tmp_path):
    script(tmp_path / "bin" / "g++", f"case $* in *arena.cpp*) echo A warning.;; esac\n{COMPILES}")
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    text = run_in_terminal(command, tree, machine)
    total = text.split("adds CUDA): ")[1].split()[0]
    assert f"] 1/{total} files, " in text and f"] {total}/{total} files, 0:00 left" in text
    assert "cxx csrc" not in text
    assert "A warning." in text


def test_pip_shows_it_too(tree, machine, tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    text = run_in_terminal([*command, "--wheel-dir", str(tmp_path), "."], tree, machine)
    assert "cpmcu: compiling the CPU engine only" in text
    assert " files, 0:00 left" in text
    assert "cxx csrc" not in text
