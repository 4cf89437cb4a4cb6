"""Keys of --speculative-config: vLLM's, FastDeploy's, and the fields of SpeculativeConfig."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from cpmcu.drafters.options import registered_options

Fields = Mapping[str, tuple[dataclasses.Field[Any], Any]]  # name of a field -> (field, type)


def read_keys(values: Mapping[str, Any], known: Fields) -> dict[str, Any]:
    """The fields that `values` sets. `known`: all fields; their metadata names further keys.

    `options` may be a mapping of some fields, as in `dataclasses.asdict` of SpeculativeConfig.
    Raises ValueError for other keys, for a value of another type, and for a field given twice.
    """
    options = values.get("options", {})
    if not isinstance(options, Mapping):
        raise ValueError(f"speculative_config: options is {options!r}, expected an object")
    values = {**{key: value for key, value in values.items() if key != "options"}, **options}
    aliases = {
        key: (name, meant)
        for name, (field, _) in known.items()
        for key, meant in (field.metadata.get("keys") or {}).items()
    }
    unknown = [key for key in values if key not in aliases and key not in known]
    if unknown:
        raise ValueError(
            f"speculative_config has {', '.join(map(repr, unknown))}, expected only method, "
            f"{', '.join(aliases)} or fields of SpeculativeConfig"
        )
    fields: dict[str, Any] = {}
    for key, value in values.items():
        name, meant = aliases.get(key, (key, None))
        if name in fields:
            raise ValueError(f"speculative_config also sets {name} by {key}: give it once")
        fields[name] = value if meant is None else _meaning(key, value, meant)
        _check_type(key, fields[name], known[name][1])
    for kind in registered_options().values():
        kind.complete(values, fields)
    return fields


def _meaning(key: str, value: Any, meant: Mapping[str, Any]) -> Any:
    if not isinstance(value, str) or value not in meant:
        raise ValueError(
            f"speculative_config: {key} is {value!r}, expected one of: {', '.join(meant)}"
        )
    return meant[value]


def _check_type(key: str, value: Any, hint: Any) -> None:
    """Raises ValueError unless the value is None or has the type of the field."""
    (wanted,) = (kind for kind in typing.get_args(hint) or (hint,) if kind is not type(None))
    right = isinstance(value, wanted) and isinstance(value, bool) == (wanted is bool)
    if value is not None and not right:
        raise ValueError(f"speculative_config: {key} is {value!r}, expected {wanted.__name__}")
