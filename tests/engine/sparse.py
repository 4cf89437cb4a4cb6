"""Models with sparse attention on short contexts, for engine tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.engine.drafted import SAMPLINGS, TREES, VOCAB, W4_DRAFTS, Models
from tests.engine.harness import random_ids
from tests.engine.prefix import Job, running

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
    """Returns the family of the target for a kind of draft."""
    return f"{FAMILY}_{W4_DRAFTS[kind][2]}" if kind in W4_DRAFTS else FAMILY


def check_prefix_hits(models: Models, kind: str, tier: str) -> None:
    """Prompts that share prefixes hit the cache, and their tokens are those of plain decoding.

    `kind`: the draft's, or "". `tier`: "device", or "host" for evicted pages in host memory.
    """
    config: dict[str, Any] = {"max_num_seqs": 2, "chunk_length": 100}
    engine = (
        models.drafted(kind, FAMILY, TREES["narrow"], **config)
        if kind
        else models.engine(FAMILY, None, **config)
    )
    options = {"host_bytes": 40 * engine.pages.page_bytes} if tier == "host" else {}
    shared = random_ids(400, VOCAB, seed=11)
    prompts = [shared[:cut] + random_ids(50, VOCAB, seed=cut) for cut in (400, 64, 300, 400, 350)]
    with running(engine, **options) as (runner, cache):
        for ids, name in zip(prompts, ("greedy", "seeded", "all", "greedy", "seeded")):
            job = Job(ids, 20, **SAMPLINGS[name])
            runner.submit(job.request)
            assert job.wait() == models.plain(FAMILY, ids, 20, **SAMPLINGS[name])
        assert cache.counters.hits >= 64 + 256 + 384 + 320
