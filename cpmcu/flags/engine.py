"""Flags shared by all programs with an engine: model, engine and speculation."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any

from cpmcu.checks import shown
from cpmcu.config import (
    EngineConfig,
    SpeculativeConfig,
    speculation_fields,
    speculation_flags,
)
from cpmcu.flags import FlagParser, add_flags, from_flags, parse_bool
from cpmcu.sparse_options import SparseOptions

MODEL_WORD = {"MODEL": "same as --model-path (default: a shipped model)"}


class _CompressLse(argparse.Action):
    """Accepts only yes, CPM.cu's default."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        if not values:
            parser.error(
                "--use-compress-lse cannot be no: scores are normalised over the coarse keys"
            )


class _ModelType(argparse.Action):
    """Accepts only auto: config.json determines the type of a model."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        if values != "auto":
            parser.error(
                f"--model-type {values} cannot be forced: only auto, which reads config.json"
            )


def add_engine_flags(
    parser: FlagParser,
    defaults: Mapping[str, Any] | None = None,
    title: str = "model and engine",
) -> None:
    """Adds the flags of EngineConfig and SpeculativeConfig. `defaults`: see `add_flags`."""
    add_flags(parser, EngineConfig, title, defaults)
    parser.hide(*(field.name for field in dataclasses.fields(SparseOptions)))  # for one family
    add_flags(parser, speculation_flags(), "speculative decoding")
    parser.add_argument(  # vLLM's spelling of --prefix-cache no
        "--no-enable-prefix-caching",
        dest="prefix_cache",
        action="store_const",
        const=False,
        help=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--use-compress-lse",
        nargs="?",
        const=True,
        type=parse_bool,
        action=_CompressLse,
        help=argparse.SUPPRESS,
    )
    parser.add_argument("--model-type", action=_ModelType, help=argparse.SUPPRESS)


def named_model(parsed: argparse.Namespace) -> str | None:
    """The model that MODEL or --model-path names. Raises ValueError if both are given."""
    words: list[str] = parsed.plain_words
    model: str | None = parsed.model
    if words and model is not None and "model" not in parsed.from_file:
        raise ValueError(
            f"MODEL is {shown(words[0])}, but --model-path is given too: give one of them"
        )
    return words[0] if words else model


def engine_config(parsed: argparse.Namespace) -> EngineConfig:
    """The engine's configuration. Raises ValueError for a value out of range."""
    return from_flags(EngineConfig, parsed, speculative_config=_speculation(parsed))


def without_hits(config: EngineConfig, parsed: argparse.Namespace) -> EngineConfig:
    """The configuration for a measurement or comparison that the prefix cache would spoil.

    Raises ValueError if the cache was asked for.
    """
    if parsed.prefix_cache:
        raise ValueError("prefix_cache is yes, but this program computes every prompt: expected no")
    return dataclasses.replace(config, prefix_cache=False)


def _speculation(parsed: argparse.Namespace) -> SpeculativeConfig:
    """Merges --speculative-config with the flags of its fields. Raises ValueError on conflict."""
    found = {name: getattr(parsed, name, None) for name in speculation_fields()}
    given = {name: value for name, value in found.items() if value is not None}
    if parsed.speculative_config is None:
        return SpeculativeConfig(**given)
    return SpeculativeConfig.from_json(parsed.speculative_config, **given)
