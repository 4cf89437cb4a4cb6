"""Sparse attention of MiniCPM4: the checkpoint's sparse_config, and the options that change it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cpmcu.checks import shown
from cpmcu.models.common import BuildOptions, SpecFields
from cpmcu.models.reader import ConfigReader
from cpmcu.sparse_options import BLOCK, MOST, SparseOptions

logger = logging.getLogger(__name__)

KIND = "sparse_attention"  # kind of the block

# The values of MiniCPM4 and MiniCPM4.1. The engine has only these sizes of compressed keys.
_FIXED: dict[str, Any] = {
    "kernel_size": 32,
    "kernel_stride": 16,
    "block_size": BLOCK,
    "use_nope": False,
}
_DEFAULTS = {"init_blocks": 1, "window_size": 2048, "topk": 64, "dense_len": 8192}
_LEAST = {"init_blocks": 0, "window_size": 2 * BLOCK, "topk": 1, "dense_len": 0}


def with_sparse_attention(
    fields: SpecFields, config: Mapping[str, Any], options: BuildOptions
) -> SpecFields:
    """The fields with sparse attention in every layer if it is enabled, else unchanged.

    Raises ValueError for a sparse_config that the engine cannot run.
    """
    stated, wanted = config.get("sparse_config"), options.sparse
    if stated is not None and not isinstance(stated, dict):
        raise ConfigReader(config).fail("sparse_config", "a mapping")
    if wanted is None or not _applies(wanted, stated):
        if stated:
            logger.info("sparse_config is ignored: dense attention is exact at every length")
        return fields
    rule = _read_rule(stated or {}, wanted)
    return replace(fields, layers=(((KIND, rule), ("mlp", {})),) * fields.num_hidden_layers)


def is_sparse(fields: SpecFields) -> bool:
    """Does any layer have sparse attention?"""
    return any(kind == KIND for layer in fields.layers for kind, _ in layer)


def check_sparse_options(options: SparseOptions, fields: SpecFields) -> None:
    """Raises ValueError if sparse attention is asked for and the built model has none."""
    if is_sparse(fields):
        return
    if options.apply_sparse:
        raise ValueError(
            "apply_sparse is yes, but the model is not of the MiniCPM family, expected no"
        )
    if options.changes:
        logger.warning("%s has no effect: attention is dense", ", ".join(options.changes))


def _applies(wanted: SparseOptions, stated: Any) -> bool:
    return bool(stated) if wanted.apply_sparse is None else wanted.apply_sparse


def _read_rule(stated: Mapping[str, Any], wanted: SparseOptions) -> dict[str, int]:
    """The parameters of the block."""
    reader = ConfigReader(stated, "config.json: sparse_config")
    for key, value in _FIXED.items():
        if stated.get(key, value) != value:
            raise reader.fail(key, f"{shown(value)}, the only one that the engine has")
    unread = sorted(stated.keys() - _FIXED.keys() - _DEFAULTS.keys())
    if unread:
        logger.info("sparse_config: %s is not read", ", ".join(unread))
    rule = {key: _number(reader, key) for key in _DEFAULTS}
    given = {
        "init_blocks": wanted.sink_window_size and wanted.sink_window_size // BLOCK,
        "window_size": wanted.block_window_size,
        "topk": wanted.sparse_topk_k,
        "dense_len": wanted.sparse_switch,
    }
    rule |= {key: value for key, value in given.items() if value is not None}
    if rule["window_size"] % BLOCK:
        raise reader.fail("window_size", f"a multiple of {BLOCK}")
    if rule["topk"] < rule["init_blocks"]:
        raise ValueError(
            f"sparse_topk_k is {rule['topk']}, but the first {rule['init_blocks'] * BLOCK} tokens "
            f"alone (sink_window_size) are {rule['init_blocks']} blocks of {BLOCK}"
        )
    return rule


def _number(reader: ConfigReader, key: str) -> int:
    value = reader.config.get(key, _DEFAULTS[key])
    if isinstance(value, bool) or not isinstance(value, int):
        raise reader.fail(key, "an integer")
    if not _LEAST[key] <= value <= MOST:
        raise reader.fail(key, f"an integer from {_LEAST[key]} to {MOST}")
    return value
