"""Fields of configuration dataclasses."""

from __future__ import annotations

import dataclasses
from typing import Any


def option(
    default: Any,
    help: str,
    *,
    flags: tuple[str, ...] | None = None,
    choices: tuple[str, ...] | None = None,
    metavar: str | None = None,
    brief: str | None = None,
    group: str | None = None,
) -> Any:
    """A dataclass field that can become a command-line flag.

    `flags` replaces the flag derived from the field's name; an empty tuple means no flag. `brief`
    is the flag's line in `--help`. Without `brief`, `--help` only lists the flag. If `brief` is
    empty, only `--help-all` has the flag.
    `group`: title of the flag's group in the help, if it is not the dataclass's.
    """
    metadata = {
        "help": help,
        "flags": flags,
        "choices": choices,
        "metavar": metavar,
        "brief": brief,
        "group": group,
    }
    return dataclasses.field(default=default, metadata=metadata)
