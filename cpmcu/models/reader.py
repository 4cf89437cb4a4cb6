"""Checked access to the keys of a config.json. Errors name the key, found and expected values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cpmcu.checks import shown

# Keys of the top level that precede those of `text_config`.
_OF_THE_WHOLE = ("architectures", "tie_word_embeddings", "quantization_config")


def language_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with the keys of its `text_config` at the top level.

    Models with vision keep the keys of their language model there. If a key is in both places, the
    one of `text_config` counts; for _OF_THE_WHOLE, the one at the top level. Raises ValueError if
    `text_config` is not an object.
    """
    text = config.get("text_config")
    if text is None:
        return dict(config)
    if not isinstance(text, dict):
        raise ConfigReader(config).fail("text_config", "an object")
    whole = {key: config[key] for key in _OF_THE_WHOLE if config.get(key) is not None}
    rest = {key: value for key, value in config.items() if key != "text_config"}
    return rest | text | whole


class ConfigReader:
    """Reads numbers and flags from a parsed config.json. All methods raise ValueError."""

    def __init__(self, config: Mapping[str, Any], where: str = "config.json") -> None:
        self.config = config
        self.where = where

    def fail(self, key: str, expected: str) -> ValueError:
        """The exception for a key with an unexpected value."""
        found = f"is {shown(self.config[key])}" if key in self.config else "is missing"
        return ValueError(f"{self.where}: {key} {found}, expected {expected}")

    def positive_int(self, key: str, default: int | None = None, most: int = 2**31 - 1) -> int:
        """An integer in [1, most]. A missing or null key gives `default`, if that is not None."""
        value = self.config.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.fail(key, "a positive integer")
        if value > most:
            raise self.fail(key, f"at most {most}")
        return value

    def positive_float(self, key: str, default: float | None = None) -> float:
        """A finite number above 0. A missing or null key gives `default`, if that is not None."""
        value = self.config.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(key, "a positive number")
        if not (math.isfinite(value) and value > 0):
            raise self.fail(key, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """A boolean. A missing or null key gives `default`."""
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return value

    def refuse(self, key: str, reason: str) -> None:
        """Raises ValueError with `reason` if the flag is set."""
        if self.flag(key):
            raise self.fail(key, f"false ({reason})")
