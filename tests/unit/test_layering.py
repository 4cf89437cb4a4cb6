"""Includes point one way: from engine over model, layers, linear and kernels down to core."""

from __future__ import annotations

import re
from pathlib import Path

CSRC = Path(__file__).parents[2] / "csrc"
ORDER = ["core", "kernels", "linear", "layers", "model", "spec", "engine"]


def test_no_include_points_upwards() -> None:
    wrong = []
    for source in CSRC.rglob("*"):
        if source.suffix not in (".h", ".cpp", ".cu", ".cuh"):
            continue
        folder = source.relative_to(CSRC).parts[0]
        if folder not in ORDER:
            continue  # entry.cu and bindings see everything
        for include in re.findall(r'#include "([^"]+)"', source.read_text()):
            target = include.split("/")[0]
            if target in ORDER and ORDER.index(target) > ORDER.index(folder):
                wrong.append(f"{source.relative_to(CSRC)} includes {include}")
    assert not wrong


def test_only_wrappers_of_ptx_have_inline_assembly() -> None:
    wrong = [
        str(source.relative_to(CSRC))
        for source in CSRC.rglob("*.cu*")
        if source.name not in ("ptx.cuh", "wgmma.cuh") and re.search(r"\basm\b", source.read_text())
    ]
    assert not wrong


def test_launches_go_through_launch() -> None:
    wrong = [
        str(source.relative_to(CSRC))
        for source in CSRC.rglob("*.cu")
        if "<<<" in source.read_text()
    ]
    assert not wrong


def test_every_folder_has_a_readme() -> None:
    folders = {
        source.parent for source in CSRC.rglob("*") if source.suffix in (".cpp", ".cu", ".h")
    }
    missing = [str(folder) for folder in folders if not (folder / "README.md").is_file()]
    assert not missing
