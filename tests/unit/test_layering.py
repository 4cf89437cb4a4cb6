"""Dependencies point one way: from engine over model, layers, linear and kernels down to core."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
ORDER = ["core", "kernels", "linear", "state", "pass", "layers", "model", "speculative", "engine"]
SUFFIXES = (".h", ".cpp", ".cu", ".cuh")

TYPE = r"\b(?:class|struct|enum class|enum|union)\s+(?:alignas\([^()]*\)\s*)?(\w+)"
DEFINED = re.compile(TYPE + r"\s*(?:final\s*)?(?::(?!:)[^;{}]*)?\{")
# Names a type of another file. A parameter may do so: `void flush(class Queue& queue)`.
NAMED = re.compile(TYPE + r"\s*[;&*]")


def code_of(csrc: Path) -> Iterator[tuple[Path, str, str]]:
    """Yields (path, folder, text without comments) of each file in a folder that has a layer."""
    for source in sorted(csrc.rglob("*")):
        if source.suffix not in SUFFIXES:
            continue
        path = source.relative_to(csrc)
        if path.parts[0] in ORDER:  # entry.cu sees everything
            yield path, path.parts[0], re.sub(r"//[^\n]*", "", source.read_text())


def includes_upwards(csrc: Path) -> list[str]:
    return [
        f"{path} includes {include}"
        for path, folder, text in code_of(csrc)
        for include in re.findall(r'#include "([^"]+)"', text)
        if include.split("/")[0] in ORDER[ORDER.index(folder) + 1 :]
    ]


def types_named_upwards(csrc: Path) -> list[str]:
    """Declarations of types that only a layer further up defines."""
    lowest: dict[str, int] = {}
    for _, folder, text in code_of(csrc):
        for name in DEFINED.findall(text):
            lowest[name] = min(lowest.get(name, len(ORDER)), ORDER.index(folder))
    return [
        f"{path} declares {name} of {ORDER[lowest[name]]}"
        for path, folder, text in code_of(csrc)
        for name in NAMED.findall(text)
        if lowest.get(name, 0) > ORDER.index(folder)
    ]


def launches_past_launch(csrc: Path) -> list[str]:
    return [
        str(path)
        for path, _, text in code_of(csrc)
        if "<<<" in text or ("cudaLaunchKernel" in text and path != Path("core/launch.h"))
    ]


def test_no_include_points_upwards() -> None:
    assert not includes_upwards(CSRC)


def test_no_declaration_names_a_type_further_up() -> None:
    assert not types_named_upwards(CSRC)


def test_launches_go_through_launch() -> None:
    assert not launches_past_launch(CSRC)


@pytest.mark.parametrize(
    ("path", "text", "found"),
    [
        (
            "core/a.h",
            "class Queue;\nvoid flush(Queue& queue);\n",
            "core/a.h declares Queue of linear",
        ),
        (
            "kernels/a.cuh",
            "void flush(struct Queue* queue);\n",
            "kernels/a.cuh declares Queue of linear",
        ),
        ("linear/a.h", "class Queue;\n", None),
        ("layers/a.h", "class Queue;\n", None),
        ("core/a.h", "class Elsewhere;  // class Queue;\n", None),
    ],
)
def test_a_declaration_of_a_type_further_up_is_found(
    tmp_path: Path, path: str, text: str, found: str | None
) -> None:
    for name, code in (("linear/queue.h", "class Queue final : public Base {};\n"), (path, text)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(code)
    assert types_named_upwards(tmp_path) == ([found] if found else [])


@pytest.mark.parametrize("name", ["a.cu", "a.cuh", "a.h", "a.cpp"])
@pytest.mark.parametrize(
    "code", ["kernel<<<1, 32>>>();\n", "cudaLaunchKernelEx(&config, kernel);\n"]
)
def test_a_launch_by_hand_is_found(tmp_path: Path, name: str, code: str) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / name).write_text(code)
    assert launches_past_launch(tmp_path) == [f"kernels/{name}"]


def test_only_wrappers_of_ptx_have_inline_assembly() -> None:
    wrong = [
        str(path)
        for path, _, text in code_of(CSRC)
        if path.suffix in (".cu", ".cuh")
        and path.name not in ("ptx.cuh", "wgmma.cuh")
        and re.search(r"\basm\b", text)
    ]
    assert not wrong


def test_every_folder_has_a_readme() -> None:
    folders = {source.parent for source in CSRC.rglob("*") if source.suffix in SUFFIXES}
    missing = [str(folder) for folder in folders if not (folder / "README.md").is_file()]
    assert not missing
