"""Sequences that moved to the swap space go on with the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cpmcu.engine.prefix.base import PageCache
from cpmcu.engine.runner import Runner
from tests.engine.drafted import SAMPLINGS, SOME_DRAFTS, TREES, VOCAB, Models, family_of
from tests.engine.harness import SMALL, random_ids
from tests.engine.prefix import PAGE, Job, running
from tests.reference.engines import extension_or_skip

extension_or_skip()

COUNT = 150
LENGTHS = [50, 30, 61, 1]
ROOM = 2 * (max(LENGTHS) + COUNT) // PAGE  # pages: enough for two sequences, not for four
CASES = [("llama", ""), ("qwen3_5", ""), ("qwen3_5", "mtp")]
CASES += [(family_of(kind), kind) for kind in SOME_DRAFTS]


def engine_of(models: Models, family: str, kind: str) -> tuple[Any, list[int]]:
    """An engine, and its pages but ROOM, which are taken."""
    config: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 320}
    engine = (
        models.drafted(kind, family, TREES["narrow"], **config)
        if kind
        else models.engine(family, None, **config)
    )
    return engine, engine.pages.take(engine.num_pages - ROOM)


def runner_of(engine: Any, swap_bytes: int) -> Runner:
    """A runner without a prefix cache."""
    return Runner(engine, page_size=PAGE, cache=PageCache(engine, PAGE, swap_bytes=swap_bytes))


def jobs_of(seed: int = 0) -> list[tuple[Job, list[int], str]]:
    found = []
    for i, (length, name) in enumerate(zip(LENGTHS, SAMPLINGS, strict=True)):
        ids = random_ids(length, VOCAB, seed=40 + i + seed)
        found.append((Job(ids, COUNT, **SAMPLINGS[name]), ids, name))
    return found


def submit_and_check(runner: Runner, models: Models, family: str) -> None:
    jobs = jobs_of()
    before = runner.load().preemptions
    runner.submit(*(job.request for job, _, _ in jobs))
    for job, ids, name in jobs:
        assert job.wait() == models.plain(family, ids, COUNT, **SAMPLINGS[name])
    counts = [job.request.num_preemptions for job, _, _ in jobs]
    assert runner.load().preemptions - before == sum(counts)
    assert runner.load().preemptions > 0
    assert runner.load().waiting == 0


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_nothing_is_computed_again(models: Models, family: str, kind: str) -> None:
    engine, _ = engine_of(models, family, kind)
    runner = runner_of(engine, 100 * engine.pages.page_bytes)
    try:
        submit_and_check(runner, models, family)
        # Prompts were read once, and each output token was emitted once.
        assert runner.load().step_tokens.total == sum(LENGTHS) + COUNT * len(LENGTHS)
        assert runner.call(lambda e: e.num_free_pages) == ROOM
    finally:
        runner.close()


@pytest.mark.parametrize("decoded", [False, True])
def test_with_a_prefix_cache(models: Models, decoded: bool) -> None:
    """With `decoded`, the pages of a sequence are published when it is swapped."""
    engine, taken = engine_of(models, "llama", "minicpm_eagle" if SMALL else "eagle_bias")
    swap_bytes = 100 * engine.pages.page_bytes
    with running(engine, swap_bytes, host_bytes=3 * engine.pages.page_bytes, decoded=decoded) as (
        runner,
        _,
    ):
        for _ in range(2):  # the second time, prompts are cached
            submit_and_check(runner, models, "llama")
        runner.call(lambda e: e.pages.drop(taken))


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 4])
def test_a_full_swap_space(models: Models, num_blocks: int) -> None:
    """Sequences that do not fit are computed again."""
    engine, _ = engine_of(models, "llama", "")
    if models.device == "cuda":
        pytest.skip("on a GPU, last bits of what is computed again may differ")
    runner = runner_of(engine, num_blocks * engine.pages.page_bytes)
    try:
        submit_and_check(runner, models, "llama")
        assert runner.call(lambda e: e.num_free_pages) == ROOM
    finally:
        runner.close()


def on_preemption(runner: Runner, job: Job, act: Callable[[], object]) -> None:
    """Once a sequence is preempted, the next token of `job` calls `act` on the engine thread."""
    before = runner.load().preemptions
    job.before_item = lambda: act() if runner.load().preemptions > before else None


def test_cancelled_while_swapped(models: Models) -> None:
    engine, _ = engine_of(models, "llama", "")
    runner = runner_of(engine, 100 * engine.pages.page_bytes)
    try:
        for seed in range(3):
            jobs = jobs_of(seed)
            newest = jobs[-1][0]  # is swapped first
            on_preemption(runner, jobs[0][0], newest.request.cancel)
            runner.submit(*(job.request for job, _, _ in jobs))
            newest.wait()
            assert newest.request.finish.reason == "abort"
            for job, ids, name in jobs[:-1]:
                assert job.wait() == models.plain("llama", ids, COUNT, **SAMPLINGS[name])
            assert runner.call(lambda e: e.num_free_pages) == ROOM
    finally:
        runner.close()


def test_closed_while_swapped(models: Models) -> None:
    engine, _ = engine_of(models, "llama", "")
    runner = runner_of(engine, 100 * engine.pages.page_bytes)
    jobs = jobs_of()
    on_preemption(runner, jobs[0][0], runner.close)
    runner.submit(*(job.request for job, _, _ in jobs))
    for job, _, _ in jobs:
        job.wait()
    assert jobs[-1][0].request.finish.reason == "abort"
    runner.close()
