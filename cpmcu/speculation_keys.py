"""Keys of --speculative-config: those of vLLM and FastDeploy, and fields of SpeculativeConfig."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any

# Key -> field of SpeculativeConfig
_KEYS = {
    "method": "method",
    "model": "draft_model_path",
    "draft_model": "head_model_path",
    "num_speculative_tokens": "spec_num_iter",
    "prompt_lookup_max": "prompt_lookup_max",
    "prompt_lookup_min": "prompt_lookup_min",
    "max_ngram_size": "prompt_lookup_max",
    "min_ngram_size": "prompt_lookup_min",
}
_STRATEGIES: dict[str, str | None] = {"default": None, "with_ngram": "ngram"}  # -> fill


def read_keys(values: Mapping[str, Any], hints: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that `values` sets. `hints`: the types of all fields.

    Raises ValueError for other keys, for a value of another type, and for a field given twice.
    """
    known = (*_KEYS, "mtp_strategy")
    unknown = [key for key in values if key not in known and key not in hints]
    if unknown:
        raise ValueError(
            f"speculative_config has {', '.join(map(repr, unknown))}, expected only "
            f"{', '.join(known)} or fields of SpeculativeConfig"
        )
    fields: dict[str, Any] = {}
    for key, value in values.items():
        name = "fill" if key == "mtp_strategy" else _KEYS.get(key, key)
        if name in fields:
            raise ValueError(f"speculative_config also sets {name} by {key}: give it once")
        fields[name] = _fill_of(value) if key == "mtp_strategy" else value
        _check_type(key, fields[name], hints[name])
    tokens = values.get("num_speculative_tokens")
    if tokens is not None:  # drafts have no branches there
        fields.setdefault("spec_topk_per_iter", 1)
        if fields["spec_topk_per_iter"] == 1:
            fields.setdefault("spec_tree_size", tokens + 1)
    return fields


def _fill_of(strategy: Any) -> str | None:
    if not isinstance(strategy, str) or strategy not in _STRATEGIES:
        raise ValueError(
            f"speculative_config: mtp_strategy is {strategy!r}, expected one of: "
            f"{', '.join(_STRATEGIES)}"
        )
    return _STRATEGIES[strategy]


def _check_type(key: str, value: Any, hint: Any) -> None:
    """Raises ValueError unless the value is None or has the type of the field."""
    (wanted,) = (kind for kind in typing.get_args(hint) or (hint,) if kind is not type(None))
    right = isinstance(value, wanted) and isinstance(value, bool) == (wanted is bool)
    if value is not None and not right:
        raise ValueError(f"speculative_config: {key} is {value!r}, expected {wanted.__name__}")
