"""The prefix cache of models with per-slot state: a prefix ends at a checkpoint."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from cpmcu.engine.prefix.cache import FEWEST_STATES
from cpmcu.engine.prefix.disk import DiskStore
from cpmcu.engine.prefix.disk_tier import DiskTier
from tests.engine.harness import generate, make_engine, random_ids
from tests.engine.prefix import PAGE, Job, running
from tests.reference.engines import extension_or_skip
from tests.reference.tiny_checkpoints import write_tiny

extension_or_skip()

VOCAB = 96


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3_5")
    write_tiny(directory, "qwen3_5", vocab_size=VOCAB)
    return directory


@pytest.fixture(scope="module")
def plain(model: Path) -> Any:
    return make_engine(model)


def run(runner: Any, prompt: list[int], count: int = 8) -> tuple[list[int], int]:
    """The answer to a prompt and the number of its cached tokens."""
    job = Job(prompt, count)
    runner.submit(job.request)
    answer = job.wait()[:count]
    assert job.request.cached_tokens is not None
    return answer, job.request.cached_tokens


def test_a_second_turn_begins_at_the_last_full_page(model: Path, plain: Any) -> None:
    with running(make_engine(model, chunk_length=128)) as (runner, _):
        prompt, known = random_ids(300, VOCAB), 0
        for turn in range(3):
            answer, cached = run(runner, prompt)
            assert answer == generate(plain, prompt, 8)[:8]
            assert cached == known
            known = (len(prompt) - 1) // PAGE * PAGE
            prompt = prompt + answer + random_ids(70, VOCAB, seed=turn)


def test_prompts_that_branch_leave_a_checkpoint_there(model: Path, plain: Any) -> None:
    """The second prompt computes the shared beginning again, the third does not."""
    shared = random_ids(3 * PAGE + 10, VOCAB, seed=1)
    with running(make_engine(model, chunk_length=1024)) as (runner, _):
        for number, expected in enumerate((0, 0, 3 * PAGE)):
            prompt = shared + random_ids(2 * PAGE, VOCAB, seed=10 + number)
            answer, cached = run(runner, prompt)
            assert answer == generate(plain, prompt, 8)[:8]
            assert cached == expected


def test_ends_of_prompts_outlive_the_checkpoints_within(model: Path) -> None:
    with running(make_engine(model, chunk_length=64, max_model_len=2000)) as (runner, cache):
        prompts = [random_ids(5 * PAGE + 1, VOCAB, seed=seed) for seed in range(FEWEST_STATES - 1)]
        for prompt in prompts:
            run(runner, prompt)
        for prompt in prompts:
            assert run(runner, prompt)[1] == 5 * PAGE
        states = [entry.state for entry in cache._index if entry.state >= 0]
        assert len(set(states)) == len(states) <= FEWEST_STATES


@pytest.mark.parametrize("tiers", ["device", "host", "disk"])
@pytest.mark.parametrize("seqs", [1, 5])
def test_any_prompts_in_any_order(
    model: Path, plain: Any, tiers: str, seqs: int, tmp_path: Path
) -> None:
    rng = random.Random(f"{tiers} {seqs}")
    engine = make_engine(
        model, max_num_seqs=seqs, chunk_length=rng.choice([32, 64, 100, 128]), max_model_len=500
    )
    options: dict[str, Any] = {}
    if tiers != "device":
        options["host_bytes"] = 12 * engine.pages.page_bytes + 4 * engine.pages.slot_bytes
    if tiers == "disk":
        options["disk"] = DiskTier(
            DiskStore(
                tmp_path,
                "3" * 32,
                engine.pages.page_bytes,
                1 << 30,
                state_bytes=engine.pages.slot_bytes,
            )
        )
    prompts: list[list[int]] = []
    with running(engine, **options) as (runner, cache):
        for wave in range(5):
            jobs = []
            for _ in range(4):
                base = rng.choice(prompts) if prompts else []
                base = base[: rng.choice([len(base), rng.randrange(len(base) + 1)])][:250]
                grown = rng.choice([1, 5, 64, 65, 130])
                prompts.append(base + random_ids(grown, VOCAB, seed=rng.randrange(10**6)))
                jobs.append(Job(prompts[-1], 20, seed=wave, temperature=wave % 2 * 0.8))
                runner.submit(jobs[-1].request)
            for job in jobs:
                fields = {"seed": wave, "temperature": wave % 2 * 0.8}
                assert job.wait() == generate(plain, job.request.prompt, 20, **fields)[:20]
        assert cache.counters.hits > 0
