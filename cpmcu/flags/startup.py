"""--plugin and --config, which take effect before the other flags are parsed.

A plugin may register models, drafters with flags of their own, schemes and parsers. A file of
flags gives those that the command line does not.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cpmcu.checks import listed, one_line, shown
from cpmcu.errors import sentence
from cpmcu.flags import FileFlags, FlagParser, add_flags
from cpmcu.options import option
from cpmcu.text.files import read_text

_SUFFIXES = (".yaml", ".yml", ".json")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StartupOptions:
    """Flags of every program with an engine."""

    config: str | None = option(
        None,
        "YAML or JSON file of flags, such as {max-model-len: 4096}; flags of the command line win",
        metavar="FILE",
    )
    plugin: Sequence[str] = option(
        (),
        "Python file, module or C++ plugin (.so) that registers models, drafters, schemes or "
        "parsers; repeatable",
        metavar="FILE",
    )


def add_startup_flags(parser: FlagParser, title: str = "model and engine") -> None:
    """Adds the flags of StartupOptions."""
    add_flags(parser, StartupOptions, title)


def prepare(arguments: Sequence[str] | None, prog: str) -> FileFlags | None:
    """Reads the file of --config and imports the plugins.

    Plugins of the command line replace those of the file. Returns the flags of the file. For an
    error, writes a sentence and exits: with status 2 for a wrong file, 1 for a plugin that cannot
    be imported.
    """
    found = _scan(sys.argv[1:] if arguments is None else arguments)
    try:
        file = None if found.config is None else read_file(found.config)
        plugins = [] if file is None else _plugins(file)
    except (OSError, ValueError, ImportError) as error:
        _exit(2, f"{prog}: {sentence(error)}")
    for name in found.plugin or plugins:
        try:
            import_plugin(name)
        except Exception as error:
            if os.environ.get("CPMCU_DEBUG"):
                raise
            _exit(1, f"{prog}: the plugin {name} cannot be imported: {sentence(error)}")
    return file


def read_file(name: str) -> FileFlags:
    """Reads a file of flags.

    Raises OSError for an unreadable file, ValueError for one that is no mapping, ImportError if a
    YAML file needs the missing package.
    """
    path = Path(name)
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"--config is {name}, expected a file with {', '.join(_SUFFIXES)}")
    try:
        text = read_text(path, "it")
        values = json.loads(text) if path.suffix == ".json" else _yaml(name, text)
    except ValueError as error:
        raise ValueError(f"{name} cannot be read: {one_line(error)}") from error
    if values is None:  # an empty YAML file
        values = {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ValueError(f"{name} is {shown(values)}, expected a mapping of flags to values")
    return FileFlags(name, {key.replace("_", "-"): value for key, value in values.items()})


def import_plugin(name: str) -> None:
    """Imports a Python file or a module, or loads a C++ plugin.

    A Python file may import files beside it. Raises FileNotFoundError, ValueError for
    a file of another kind, and the plugin's exceptions.
    """
    path = Path(name)
    if path.suffix == ".so":
        from cpmcu import C

        C.load_plugin(str(path.resolve()))
        return
    if path.suffix != ".py":
        if path.is_file() or "/" in name:
            raise ValueError("expected a file that ends in .py or .so, or the name of a module")
        _search(Path.cwd())
        if getattr(importlib.import_module(name), "__file__", "") is None:
            raise ValueError("it is a folder without __init__.py, expected a file or a module")
        return
    if not path.is_file():
        raise FileNotFoundError("there is no such file")
    module_name = f"cpmcu_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    _search(path.resolve().parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)


def _scan(arguments: Sequence[str]) -> argparse.Namespace:
    """The values of --config and --plugin. The real parser reports wrong flags."""
    arguments = list(arguments)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config")
    parser.add_argument("--plugin", action="append")
    try:
        return parser.parse_known_args(arguments[:end])[0]
    except argparse.ArgumentError:  # a value is missing
        return argparse.Namespace(config=None, plugin=None)


def _plugins(file: FileFlags) -> list[str]:
    given = file.values.get("plugin") or []
    plugins = [given] if isinstance(given, str) else listed("plugin", given, "a file or a list")
    if not all(isinstance(name, str) for name in plugins):
        raise ValueError(f"{file.name}: plugin is {shown(given)}, expected a file or a list")
    return plugins


def _yaml(name: str, text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ImportError(
            f"{name} needs the package PyYAML: pip install 'cpmcu[yaml]', or write it as JSON"
        ) from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _search(folder: Path) -> None:
    """Lets imports find modules of a folder, after all others."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _exit(status: int, text: str) -> Any:
    if sys.stderr is not None:
        sys.stderr.write(f"{text}\n")
    raise SystemExit(status)
