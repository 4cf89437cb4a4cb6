"""Command-line flags made from dataclass fields, so that programs cannot drift from the configs.

Every flag exists with dashes and with underscores. Booleans take an optional value
(`--cuda-graph`, `--cuda-graph no`); a field of type `Sequence[str]` is a repeatable flag.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

_TRUE = {"1", "true", "yes", "on", "y", "t"}
_FALSE = {"0", "false", "no", "off", "n", "f"}

T = TypeVar("T")


def parse_bool(text: str) -> bool:
    """Reads yes/no, true/false, on/off or 1/0. Raises ArgumentTypeError for anything else."""
    lowered = text.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise argparse.ArgumentTypeError(f"expected yes or no, found {text!r}")


class FlagParser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one sentence, and which takes underscores for dashes."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Writes one sentence to stderr and exits with status 2."""
        self.exit(2, f"{self.prog}: {message} (--help lists all flags)\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses `args`; an unknown flag is an error that names the nearest known one."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].split("=", 1)[0]
            near = difflib.get_close_matches(flag, self._option_string_actions, n=1)
            hint = f"; did you mean {near[0]}?" if near and flag.startswith("-") else ""
            kind = "unknown flag" if flag.startswith("-") else "unexpected argument"
            self.error(f"{kind} {flag!r}{hint}")
        return parsed

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """As ArgumentParser's, after `--some_flag` became `--some-flag`."""
        args = sys.argv[1:] if args is None else args
        return super().parse_known_args([self._dashed(arg) for arg in args], namespace)

    def _dashed(self, arg: str) -> str:
        if not arg.startswith("--"):
            return arg
        name, equals, value = arg.partition("=")
        dashed = name.replace("_", "-")
        return dashed + equals + value if dashed in self._option_string_actions else arg


def add_flags(
    parser: argparse.ArgumentParser,
    config: type[Any],
    title: str,
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Adds one flag for each field of the dataclass `config` whose metadata allows it.

    `defaults` are what the help shows for a program that fills in other defaults itself.
    """
    defaults = defaults or {}
    group = parser.add_argument_group(title)
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        flags = field.metadata.get("flags")
        if flags is None:
            flags = ("--" + field.name.replace("_", "-"),)
        if flags:
            group.add_argument(
                *flags, dest=field.name, **_argument(field, hints[field.name], defaults)
            )


def from_flags(config: type[T], parsed: argparse.Namespace, **overrides: Any) -> T:
    """Makes `config` from parsed flags; a flag that was not given leaves the field's default."""
    names = {field.name for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    given = {k: v for k, v in vars(parsed).items() if k in names and v is not None}
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    return config(**{**given, **overrides})


def _argument(
    field: dataclasses.Field[Any], hint: Any, defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Keyword arguments of `add_argument` for one field. The argparse default is always None."""
    kind, repeated = _scalar(hint)
    default = defaults.get(field.name, field.default)
    text = field.metadata.get("help", "")
    if field.name in defaults:
        text = text.partition(" (default: ")[0]
    if not _is_unset(default) and "(default: " not in text:
        text += f" (default: {_shown(default)})"
    arguments: dict[str, Any] = {"help": text.replace("%", "%%"), "default": None}
    if field.metadata.get("metavar"):
        arguments["metavar"] = field.metadata["metavar"]
    if kind is bool:
        return {"nargs": "?", "const": True, "type": parse_bool, "metavar": "yes|no", **arguments}
    if field.metadata.get("choices"):
        arguments["choices"] = field.metadata["choices"]
    elif "metavar" not in arguments:
        arguments["metavar"] = "N" if kind is int else "X" if kind is float else "TEXT"
    if repeated:
        arguments["action"] = "append"
    return {"type": kind, **arguments}


def _scalar(hint: Any) -> tuple[Callable[[str], Any], bool]:
    """(converter, repeatable?) of a type hint such as `int | None` or `tuple[str, ...]`."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        options = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        repeated = [arg for arg in options if typing.get_origin(arg) is not None]
        return _scalar(repeated[0] if repeated else options[0])
    if typing.get_origin(hint) is Sequence:
        return _scalar(typing.get_args(hint)[0])[0], True
    if hint not in (str, int, float, bool):
        raise TypeError(f"no flag can be made for a field of type {hint}")
    return typing.cast(Callable[[str], Any], hint), False


def _is_unset(default: Any) -> bool:
    return default is None or default is dataclasses.MISSING or default == ()


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    return str(default)
