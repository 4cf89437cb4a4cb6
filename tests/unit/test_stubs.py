"""cpmcu/C.pyi and limits.py equal the output of scripts/generate_stubs.py."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.reference.engines import extension_or_skip

ROOT = Path(__file__).parents[2]
STUB = ROOT / "cpmcu" / "C.pyi"

extension_or_skip()
pytest.importorskip("pybind11_stubgen")
pytest.importorskip("pybind11", minversion="3.1")  # older ones write other signatures


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generator", ROOT / "scripts/generate_stubs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_files_are_up_to_date(generator: ModuleType) -> None:
    for path, text in generator.texts().items():
        lines = path.read_text().splitlines(), text.splitlines()
        changes = "\n".join(difflib.unified_diff(*lines, path.name, "new", lineterm="", n=1))
        assert not changes, f"run `make stubs` after a build:\n{changes}"


def test_every_function_has_types_and_a_docstring() -> None:
    """Every argument has a name, every value a type, every method a docstring."""
    found = 0
    for node in ast.walk(ast.parse(STUB.read_text())):
        if not isinstance(node, ast.FunctionDef):
            continue
        found += 1
        is_property = any(
            isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list
        )
        assert node.returns is not None, node.name
        for arg in node.args.args:
            assert not re.fullmatch(r"arg\d+", arg.arg), node.name
            assert arg.arg == "self" or arg.annotation is not None, node.name
        assert is_property or node.name == "__init__" or ast.get_docstring(node), node.name
    assert found > 50
