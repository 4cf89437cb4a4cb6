"""Fields of configuration dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from cpmcu.checks import check_filled, integer, truth

INT_MAX = (1 << 31) - 1


def option(
    default: Any,
    help: str,
    *,
    flags: tuple[str, ...] | None = None,
    choices: tuple[str, ...] | None = None,
    metavar: str | None = None,
    brief: str | None = None,
    group: str | None = None,
    keys: Mapping[str, Mapping[str, Any] | None] | None = None,
    least: int = 0,
    most: int = INT_MAX,
    fixes_shape: bool = False,
    names_drafter: bool = False,
) -> Any:
    """A dataclass field that can become a command-line flag.

    `flags` replaces the flag derived from the field's name; an empty tuple means no flag. `brief`
    is the flag's line in `--help`. Without `brief`, `--help` only lists the flag. If `brief` is
    empty, only `--help-all` has the flag.
    `group`: title of the flag's group in the help, if it is not the dataclass's.

    For options of a drafter: `keys` are further keys of --speculative-config, each with its values
    (key's value -> field's value; None: the same values). `least`, `most`: the range of an integer.
    `fixes_shape`: if the option is given, steps do not choose shapes. `names_drafter`: `no` refuses
    the drafter that declares the option; any other value requires that drafter.
    """
    metadata = {
        "help": help,
        "flags": flags,
        "choices": choices,
        "metavar": metavar,
        "brief": brief,
        "group": group,
        "keys": keys or {},
        "least": least,
        "most": most,
        "fixes_shape": fixes_shape,
        "names_drafter": names_drafter,
    }
    return dataclasses.field(default=default, metadata=metadata)


def check_option(field: dataclasses.Field[Any], hint: Any, value: Any) -> None:
    """Raises ValueError unless the value suits a field of `option`. `hint`: its type."""
    choices = field.metadata["choices"]
    if choices is not None:
        one_of(field.name, value, choices)
    elif hint in (bool, bool | None):
        truth(field.name, value)
    elif hint in (int, int | None):
        whole(field.name, value, field.metadata["least"], field.metadata["most"])
    elif hint in (str, str | None):
        check_filled(field.name, value, "a directory, file or Hugging Face id")


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raises ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}, but must be one of {', '.join(allowed)}")


def whole(name: str, value: int, least: int, most: int = INT_MAX) -> None:
    """Raises ValueError unless `value` is an integer from `least` to `most`."""
    if integer(name, value) < least:
        raise ValueError(f"{name} is {value}, but must be at least {least}")
    if value > most:
        raise ValueError(f"{name} is {value}, but must be at most {most}")
