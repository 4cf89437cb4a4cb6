"""Prompts of all lengths share passes with one another and take turns with decode steps."""

from __future__ import annotations

import random

import pytest

from cpmcu.engine.runner import Runner
from tests.engine.drafted import SAMPLINGS, VOCAB, Models
from tests.engine.harness import SMALL, random_ids
from tests.engine.prefix import PAGE, Job
from tests.reference.engines import extension_or_skip

extension_or_skip()


@pytest.mark.parametrize("kind", [None, "noisy"])
@pytest.mark.parametrize("seconds", [1e-9, 1e9])
def test_each_yields_the_tokens_that_it_yields_alone(
    models: Models, kind: str | None, seconds: float
) -> None:
    """Passes have 64 tokens beside decoding sequences, or the whole chunk length."""
    rng = random.Random(f"{kind} {seconds}")
    config = {"max_num_seqs": 12, "chunk_length": 150}
    tree = {"spec_num_iter": 2, "spec_topk_per_iter": 2, "spec_tree_size": 4}
    engine = (
        models.engine("llama", None, **config)
        if kind is None
        else models.drafted(kind, "llama", tree, **config)
    )
    names = list(SAMPLINGS)
    runner = Runner(engine, page_size=PAGE, prefill_seconds=seconds)
    try:
        found = []
        for i in range(8 if SMALL else 24):
            length = rng.choice([1, 2, 5, 30, 63, 65, 130, 250, 400])
            ids, name = random_ids(length, VOCAB, seed=i), rng.choice(names)
            job = Job(ids, rng.randrange(2, 30), **SAMPLINGS[name])
            found.append((job, ids, name))
            runner.submit(job.request)
            if rng.random() < 0.4:  # later requests come while this one runs
                job.items.get(timeout=60)
        for job, ids, name in found:
            if not job.request.done:
                job.wait()
            tokens = job.request.tokens
            assert tokens == models.plain("llama", ids, len(tokens), **SAMPLINGS[name])
            assert len(tokens) == job.request.max_tokens
    finally:
        runner.close()
