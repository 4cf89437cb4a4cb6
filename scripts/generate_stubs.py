"""Writes cpmcu/C.pyi from the compiled extension: signatures and docstrings of csrc/**/bind_*.cpp.

pybind11-stubgen reads the module. What it gives is then made shorter to read:
  numbers that pybind11 takes are int and float; a property with a setter is an attribute;
  all is in the order of the bindings; `ops` (kernels for tests) is Any.
A CPU build and a CUDA build give the same text.
"""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pybind11_stubgen

ROOT = Path(__file__).resolve().parents[1]
STUB = ROOT / "cpmcu" / "C.pyi"
HEADER = "# Generated from csrc/**/bind_*.cpp by `make stubs`; not to be edited.\n"
NOT_EVERYWHERE = {"trace"}  # builds with CPMCU_TRACE=1 alone have it


def main() -> None:
    STUB.write_text(stub())


def stub() -> str:
    """The text of C.pyi for the extension that is found."""
    from cpmcu import C

    text = re.sub(
        r"typing\.Supports(Int|Float)( \| typing\.SupportsIndex)?",
        lambda match: match[1].lower(),
        _stubgen(),
    )
    tree = ast.parse(text)
    tree.body = list(_module(tree.body, C))
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(doc))):
                node.value = ast.Constant(inspect.cleandoc(doc))
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", "C.pyi", "-"]
    formatted = subprocess.run(
        command, input=ast.unparse(tree), capture_output=True, text=True, check=True, cwd=ROOT
    )
    return HEADER + formatted.stdout


def _stubgen() -> str:
    with tempfile.TemporaryDirectory() as folder:
        options = ["--ignore-all-errors", "--numpy-array-use-type-var"]
        pybind11_stubgen.main(["cpmcu.C", "--output-dir", folder, *options])
        return Path(folder, "cpmcu", "C", "__init__.pyi").read_text()


def _module(body: list[ast.stmt], module: Any) -> Iterator[ast.stmt]:
    for node in _in_order(body, module):
        match node:
            case ast.ImportFrom(module=None) | ast.Assign():
                continue
            case ast.AnnAssign(target=ast.Name(id="__all__")):
                continue
            case ast.FunctionDef(name=name) if name in NOT_EVERYWHERE:
                continue
            case ast.AnnAssign():
                node.value = None  # differs between builds
            case ast.ClassDef():
                node.body = list(_members(node, getattr(module, node.name)))
        yield node
    yield from ast.parse("ops: typing.Any").body
    yield ast.Expr(ast.Constant("Kernels for tests: see csrc/kernels/bind_ops.cpp."))


def _members(node: ast.ClassDef, cls: type) -> Iterator[ast.stmt]:
    for member in _in_order(node.body, cls):
        match member:
            case ast.FunctionDef(name=name, decorator_list=[ast.Attribute(attr="setter")]):
                continue
            case ast.FunctionDef(name=name) if getattr(vars(cls).get(name), "fset", None):
                member = ast.AnnAssign(ast.Name(name), member.returns or ast.Name("Any"), None, 1)
        yield member
        match member:
            case ast.AnnAssign(target=ast.Name(id=name)) if doc := vars(cls)[name].__doc__:
                yield ast.Expr(ast.Constant(doc))


def _in_order(body: list[ast.stmt], owner: Any) -> list[ast.stmt]:
    """As the attributes of `owner` were made; what it does not have comes first."""
    places = {name: place for place, name in enumerate(vars(owner))}

    def place(node: ast.stmt) -> int:
        name = node.target.id if isinstance(node, ast.AnnAssign) else getattr(node, "name", "")
        return places.get(name, -1)

    return sorted(body, key=place)


if __name__ == "__main__":
    main()
