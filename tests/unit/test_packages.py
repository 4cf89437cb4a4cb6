"""The source distribution and the wheel: what they hold, and that the wheel runs elsewhere."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import cpmcu
from tests.missing import missing

ROOT = Path(__file__).parents[2]
FOLDERS = ("cpmcu", "csrc", "docs", "examples", "scripts", "tests", "third_party")
FILES = ("setup.py", "pyproject.toml", "MANIFEST.in", "Makefile", "Dockerfile", "README.md")
FILES += ("LICENSE", "requirements-test.txt", ".clang-format", ".dockerignore")
PLUGIN = """
from cpmcu import C
C.load_plugin("./repeat_drafter.so")
print(sorted(C.registered()["drafter"]))
"""


def run(*command: object, **options: object) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def names_below(folder: Path) -> set[str]:
    made = {"__pycache__", ".hypothesis"}
    found = (path for path in folder.rglob("*") if path.is_file() and not made & {*path.parts})
    return {str(path.relative_to(folder.parent)) for path in found if ".so" not in path.suffixes}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The source distribution, made of a copy of this tree, unpacked."""
    tree, dist = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for folder in FOLDERS:
        skipped = shutil.ignore_patterns("__pycache__", "*.so", "*.so.new", ".hypothesis")
        shutil.copytree(ROOT / folder, tree / folder, ignore=skipped)
    for name in FILES:
        shutil.copy2(ROOT / name, tree)
    sdist = ("setup.py", "--quiet", "sdist", "--formats", "tar", "--dist-dir", dist)
    run(sys.executable, *sdist, cwd=tree)
    (archive,) = dist.iterdir()
    assert archive.name == f"cpmcu-{cpmcu.__version__}.tar"
    with tarfile.open(archive) as file:
        file.extractall(dist, filter="tar")
    return dist / archive.name.removesuffix(".tar")


def test_the_source_distribution_has_all_files(unpacked):
    assert all((unpacked / name).is_file() for name in FILES)
    for folder in FOLDERS:
        wanted = names_below(ROOT / folder)
        assert wanted and not wanted - names_below(unpacked / folder)


def test_metadata(unpacked):
    found = email.message_from_string((unpacked / "PKG-INFO").read_text())
    assert found["Name"] == "cpmcu" and found["Version"] == cpmcu.__version__
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Author"] and found["Summary"] and found["Keywords"]
    assert found["Description-Content-Type"] == "text/markdown"
    assert found.get_payload().startswith("# cpmcu")
    assert "Operating System :: POSIX :: Linux" in found.get_all("Classifier")


def test_a_wheel_runs_without_compilers(unpacked, tmp_path):
    """It also has the headers of plugins. Its C++ files are those of build/cpu."""
    objects = ROOT / "build" / "cpu"
    if not (objects / ".ninja_log").exists():
        missing("build/cpu is missing: CPMCU_WITH_CUDA=0 python setup.py build_ext")
    shutil.copytree(objects, unpacked / "build" / "cpu")
    local = {"CPMCU_WITH_CUDA": "0", "CPMCU_LOCAL_VERSION": "cpu"}
    build = ("setup.py", "--quiet", "bdist_wheel", "--dist-dir", tmp_path)
    run(sys.executable, *build, cwd=unpacked, env={**os.environ, **local})
    (wheel,) = tmp_path.glob(f"cpmcu-{cpmcu.__version__}+cpu-*.whl")
    assert not names_below(ROOT / "cpmcu") - set(zipfile.ZipFile(wheel).namelist())

    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    python = venv / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps")
    clean = {"PATH": str(venv / "bin"), "HOME": str(tmp_path)}
    run(*pip, wheel, env=clean)
    # Other packages come from this environment; its own cpmcu is not among them.
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    Path(site, "others.pth").write_text(sysconfig.get_path("purelib"))

    folders = "import cpmcu; print(cpmcu.__file__, cpmcu.get_include())"
    package, headers = run(python, "-c", folders, cwd=tmp_path, env=clean).split()
    assert package.startswith(site) and headers.startswith(site)
    command = (venv / "bin" / "cpmcu", "run", "def add(a, b):", "--num-generate", "20")
    assert "return" in run(*command, "--temperature", "0", cwd=tmp_path, env=clean)

    source = ROOT / "tests" / "plugins" / "repeat_drafter.cpp"
    library = ("-o", tmp_path / "repeat_drafter.so")
    run("g++", "-std=c++20", "-O0", "-fPIC", "-shared", f"-I{headers}", source, *library)
    assert "'repeat'" in run(python, "-c", PLUGIN, cwd=tmp_path, env=clean)
