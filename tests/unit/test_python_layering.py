"""Imports of the package point one way: from programs over server, engine and loading to values."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Layers, the lowest first. A module belongs to the longest prefix of its name in this list. It may
# import modules of its own layer and of layers listed before. Imports for type checkers count as
# well.
ORDER = [
    "C __version__ _extension checks errors exiting flags.help options spec_metrics shipped "
    "terminal terminal.environment text verification",
    "config drafters.options flags grammar outputs sparse_options speculation_keys",
    # Files of a checkpoint: names, shapes and bytes of tensors.
    "loading.checkpoint loading.gguf loading.hub loading.index loading.model_files "
    "loading.progress loading.safetensors loading.tensors loading.torch_files",
    "flags.engine flags.startup sampling terminal.listing terminal.options terminal.prompt "
    "terminal.result_json text.template_sandbox text.token_length text.token_text tokenizer ui",
    "chat_template",
    "models",
    "quant",
    "drafters",
    "engine",
    "loading",
    "convert",
    "llm engine.prefix.make",
    "batch benchmarks serving terminal.answering terminal.chat",
    "bench cli server",
    "__main__ terminal.completion",
]
LINES = {name: line for line, names in enumerate(ORDER) for name in names.split()}


def modules() -> dict[str, Path]:
    """Returns the file of each module below cpmcu by name; of a package, its __init__.py."""
    found = {}
    for path in (ROOT / "cpmcu").rglob("*.py"):
        parts = path.relative_to(ROOT / "cpmcu").with_suffix("").parts
        if name := ".".join(parts).removesuffix("__init__").rstrip("."):
            found[name] = path
    return found


def line_of(name: str) -> int | None:
    """Returns the place of a module in ORDER."""
    parts = name.split(".")
    prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((LINES[prefix] for prefix in prefixes if prefix in LINES), None)


def imported(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules of cpmcu that a file imports anywhere, in functions too."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            head, _, rest = name.partition(".")
            if head != "cpmcu" or not rest:
                continue
            parts = rest.split(".")
            prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
            yield next((p for p in prefixes if p in known), parts[0])


def test_every_module_has_its_place() -> None:
    assert not [name for name in modules() if line_of(name) is None]


def test_no_import_points_upwards() -> None:
    known = modules()
    wrong = []
    for name, path in known.items():
        for target in imported(path, known):
            line = line_of(target)
            assert line is not None, f"{name} imports {target}, which has no place in ORDER"
            if line > (line_of(name) or 0):
                wrong.append(f"{name} imports {target}")
    assert not wrong


def test_no_circle_of_imports() -> None:
    known = modules()
    imports = {
        name: set(imported(path, known)) & known.keys() - {name} for name, path in known.items()
    }
    while free := [name for name, needed in imports.items() if not needed & imports.keys()]:
        for name in free:
            del imports[name]
    # A module that is left imports another one that is left: they form a circle or lead to one.
    assert not {name: sorted(needed & imports.keys()) for name, needed in imports.items()}


def test_few_modules_lie_loose() -> None:
    assert len(list((ROOT / "cpmcu").glob("*.py"))) <= 21  # with __init__.py
