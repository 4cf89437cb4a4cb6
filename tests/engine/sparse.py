"""Models with sparse attention on short contexts, for engine tests."""

from __future__ import annotations

from pathlib import Path

from tests.engine.drafted import W4_DRAFTS, Models

FAMILY = "minicpm"

# Attention is sparse from token 300 on. It has at most 4 blocks, so a token there misses some.
CONFIG = {
    "kernel_size": 32,
    "kernel_stride": 16,
    "block_size": 64,
    "init_blocks": 1,
    "window_size": 128,
    "topk": 2,
    "dense_len": 300,
    "use_nope": False,
}


def sparse_models(root: Path, device: str, kind: type[Models] = Models) -> Models:
    """Targets with a sparse_config.

    Large queries attend to few tokens, so that a wrong choice of blocks changes the output.
    """
    return kind(root, device, query_scale=4.0, sparse_config=CONFIG)


def family_of(kind: str) -> str:
    """The target of a kind of draft."""
    return f"{FAMILY}_{W4_DRAFTS[kind][2]}" if kind in W4_DRAFTS else FAMILY
