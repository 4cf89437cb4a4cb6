"""The source distribution and the wheel: what they hold, and that the wheel runs elsewhere."""

from __future__ import annotations

import email
import os
import re
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
SYSTEM_LIBRARIES = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6", "libgomp.so.1"}
ABOUT = """
import json
import cpmcu
from cpmcu import C
archs = json.loads(C.build_info_json)["archs"]
print(cpmcu.__file__, cpmcu.get_include(), C.__file__, C.device_count(), sep="\\n")
print(",".join(archs))
"""
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


@pytest.fixture(scope="module")
def cpu_wheel(unpacked, tmp_path_factory):
    """A wheel of the source distribution. Its C++ files are those of build/cpu."""
    return make_wheel(unpacked, tmp_path_factory.mktemp("cpu"), "cpu", {"CPMCU_WITH_CUDA": "0"})


@pytest.fixture(scope="module")
def cuda_wheel(unpacked, tmp_path_factory):
    """The wheel $CPMCU_TEST_WHEEL, or one made of the build for $CPMCU_TEST_WHEEL_ARCHS."""
    if path := os.environ.get("CPMCU_TEST_WHEEL"):
        return Path(path).resolve()
    archs = os.environ.get("CPMCU_TEST_WHEEL_ARCHS")
    if not archs:
        pytest.skip("neither CPMCU_TEST_WHEEL nor CPMCU_TEST_WHEEL_ARCHS is set")
    tag = "-".join(["cuda", *archs.split(",")])
    return make_wheel(unpacked, tmp_path_factory.mktemp("cuda"), tag, {"CPMCU_CUDA_ARCH": archs})


def make_wheel(tree: Path, dist: Path, tag: str, wanted: dict[str, str]) -> Path:
    objects = ROOT / "build" / tag
    if not (objects / ".ninja_log").exists():
        flags = " ".join(f"{name}={value}" for name, value in wanted.items())
        missing(f"build/{tag} is missing: {flags} python setup.py build_ext")
    shutil.copytree(objects, tree / "build" / tag)
    build = ("setup.py", "--quiet", "bdist_wheel", "--dist-dir", dist)
    local = {**wanted, "CPMCU_LOCAL_VERSION": tag.replace("-", ".")}
    run(sys.executable, *build, cwd=tree, env={**os.environ, **local})
    (wheel,) = dist.glob(f"cpmcu-{cpmcu.__version__}+{tag.replace('-', '.')}-*.whl")
    return wheel


@pytest.mark.parametrize("kind", ["cpu_wheel", "cuda_wheel"])
def test_a_wheel_runs_without_compilers(request, kind, tmp_path):
    """A wheel has the headers of plugins. If there is a GPU, the CUDA wheel also runs on it."""
    wheel = request.getfixturevalue(kind)
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

    package, headers, module, devices, archs = run(
        python, "-c", ABOUT, cwd=tmp_path, env=clean
    ).splitlines()
    assert all(path.startswith(site) for path in (package, headers, module))
    assert (archs != "") == (kind == "cuda_wheel")
    assert not needed_libraries(module) - SYSTEM_LIBRARIES
    for device in ("cpu", "cuda")[: 2 if int(devices) else 1]:
        command = (venv / "bin" / "cpmcu", "run", "def add(a, b):", "--num-generate", "20")
        options = ("--temperature", "0", "--device", device)
        assert "return" in run(*command, *options, cwd=tmp_path, env=clean)

    source = ROOT / "tests" / "plugins" / "repeat_drafter.cpp"
    library = ("-o", tmp_path / "repeat_drafter.so")
    run("g++", "-std=c++20", "-O0", "-fPIC", "-shared", f"-I{headers}", source, *library)
    assert "'repeat'" in run(python, "-c", PLUGIN, cwd=tmp_path, env=clean)


def needed_libraries(module: str) -> set[str]:
    """The libraries without which a module cannot be loaded. CUDA's are linked into it."""
    names = re.findall(r"\(NEEDED\).*\[(.+)\]", run("readelf", "--dynamic", "--wide", module))
    assert "libc.so.6" in names
    return {name for name in names if not name.startswith("ld-linux")}
