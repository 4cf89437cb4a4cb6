"""Options of drafters: one dataclass for each drafter, in a file of its own.

A field made by `option` becomes a flag and a key of --speculative-config. A field that several
drafters have is declared once, in a base of their dataclasses. These files import no drafter and
not numpy, so `--help` starts fast.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import typing
from collections.abc import Callable, Mapping
from inspect import get_annotations
from typing import Any, NamedTuple, TypeVar


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterOptions:
    """Base of the options of a drafter.

    `__post_init__` raises ValueError for values that do not go together. The range of each single
    value is checked before (`check_option`).
    """

    @classmethod
    def complete(cls, keys: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """Adds fields that follow from the keys of --speculative-config."""

    def check(self, method: str, kind: type[DrafterOptions]) -> None:
        """For an addition to drafts: raises ValueError if it does not suit the drafter `method`.

        `kind`: the options of that drafter, if its name is known.
        """


class OptionField(NamedTuple):
    """An option of drafters."""

    field: dataclasses.Field[Any]
    hint: Any  # type annotation of the field
    owner: type[DrafterOptions]  # the class that declares the field


T = TypeVar("T", bound=type[DrafterOptions])
_kinds: dict[str, type[DrafterOptions]] = {}
_additions: set[str] = set()
_aliases: dict[str, str] = {}
_fallback: list[type[DrafterOptions]] = [DrafterOptions]


def register_options(name: str, *aliases: str, addition: bool = False) -> Callable[[T], T]:
    """Registers the decorated dataclass as the options of the drafter `name`.

    `aliases`: other names of the drafter, such as vLLM's. `addition`: it adds to the drafts of any
    drafter, which then has these options, too. Raises ValueError if another option has the name of
    one of its fields.
    """

    def register(kind: T) -> T:
        known, bases = option_fields(), {base.__qualname__ for base in kind.__mro__}
        for field in dataclasses.fields(kind):
            other = known.get(field.name)
            if other is not None and other.owner.__qualname__ not in bases:
                raise ValueError(
                    f"the option {field.name!r} of drafter {name!r} is one of "
                    f"{other.owner.__name__}, too: expected another name, or that class as a base"
                )
        _kinds[name] = kind
        _aliases.update(dict.fromkeys(aliases, name))
        if addition:
            _additions.add(name)
        return kind

    return register


def fallback_options(kind: T) -> T:
    """Makes the decorated dataclass the options of drafters without own ones."""
    _fallback[0] = kind
    return kind


def registered_options() -> dict[str, type[DrafterOptions]]:
    """Returns the options of each drafter, by the drafter's name."""
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        importlib.import_module(module.name)
    return dict(_kinds)


def name_of(method: str) -> str:
    """The registered name of a drafter that a user names."""
    registered_options()
    return _aliases.get(method, method)


def options_of(method: str) -> type[DrafterOptions]:
    """The options of a drafter; those of trees if it has no own, or its name is not known."""
    return registered_options().get(name_of(method), _fallback[0])


def additions() -> list[type[DrafterOptions]]:
    """The options of all additions to the drafts of any drafter."""
    return [kind for name, kind in registered_options().items() if name in _additions]


def drafter_of(kind: type[DrafterOptions]) -> str:
    """The drafter with exactly these options."""
    return next(name for name, its in _kinds.items() if its is kind)


def option_fields() -> dict[str, OptionField]:
    """Returns all registered options by name."""
    found: dict[str, OptionField] = {}
    for kind in list(_kinds.values()):
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            declaring = (c for c in reversed(kind.__mro__) if field.name in get_annotations(c))
            found[field.name] = OptionField(field, hints[field.name], next(declaring))
    return found


def all_options() -> dict[str, OptionField]:
    """Returns all options by name, of drafters in the package and of those from outside."""
    registered_options()
    return option_fields()
