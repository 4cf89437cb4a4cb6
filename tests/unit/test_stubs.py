"""cpmcu/C.pyi says what the extension has: the same names, no more, no less."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

STUB = Path(__file__).parents[2] / "cpmcu" / "C.pyi"


def names_of(body: list[ast.stmt]) -> set[str]:
    names = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def public(value: Any) -> set[str]:
    return {name for name in vars(value) if not name.startswith("_")}


def test_the_stub_is_complete() -> None:
    from cpmcu import C

    tree = ast.parse(STUB.read_text())
    assert names_of(tree.body) == public(C)
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            written = {name for name in names_of(node.body) if not name.startswith("_")}
            assert written == public(getattr(C, node.name)), node.name
