"""Layers with a window give pages back, and no token changes: prompts, trees, hits, preemption."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpmcu.benchmarks.decoding import step_bytes
from cpmcu.config import EngineConfig
from cpmcu.engine.prefix.base import PageCache
from cpmcu.engine.runner import Runner
from cpmcu.loading.page_cache import make_page_cache
from tests.engine.drafted import SAMPLINGS, TREES, VOCAB, Drive, Models
from tests.engine.harness import SMALL, random_ids
from tests.engine.prefix import PAGE, Job, num_free, running
from tests.engine.test_prefix_cache import trees_of_prompts
from tests.reference.engines import extension_or_skip, load_tiny, prompt_logits
from tests.reference.hf_model import hf_logits
from tests.reference.tiny_checkpoints import write_tiny
from tests.tolerances import LOGITS, assert_close

extension_or_skip()

FAMILY = "ministral"
WINDOWS = [70] if SMALL else [1, 33, 64, 130]
KINDS = ["", "itself"] if SMALL else ["", "itself", "eagle_bias", "eagle3", "ngram"]


def layers(window: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": 4,
        "sliding_window": window,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }


def models_of(root: Path, device: str, window: int) -> Models:
    return Models(root, device, **layers(window))


def engine_of(models: Models, kind: str, **config: Any) -> Any:
    if kind:
        return models.drafted(kind, FAMILY, TREES["narrow"], **config)
    return models.engine(FAMILY, None, **config)


def free_pages(engine: Any) -> None:
    """Overwrites all free pages: on a CPU with NaN, on a GPU with large numbers.

    CUDA kernels multiply invisible entries of a page by 0, which would not remove NaN.
    """
    from cpmcu import C

    for group in range(1, len(engine.pages.windows)):
        pages = engine.pages.take(engine.pages.num_pages(group), group)
        block = C.HostBlocks(engine, engine.pages.group_page_bytes(group), 1, 1)
        block.grow()
        byte = 0xFF if engine.launch_ahead == 1 else 0x4F
        block.view(0)[:] = bytes([byte]) * len(block.view(0))
        engine.pages.load(pages, block, [0] * len(pages), group)
        engine.pages.wait_for_copies()
        engine.pages.drop(pages, group)


class Overwriting(Drive):
    """Overwrites free pages before each step, and watches how many pages the sequence has."""

    def __init__(self, engine: Any, ahead: int) -> None:
        super().__init__(engine, ahead, shapes=lambda: self.look(), skips=lambda: bool(self.look()))
        self.most = 0

    def look(self) -> None:
        free_pages(self.engine)
        self.most = max(self.most, len(self.engine.pages.of_slot(0, 1)))


@contextmanager
def few_window_pages(engine: Any, count: int) -> Iterator[None]:
    """The engine has at most `count` pages for layers with a window."""
    taken = engine.pages.take(max(num_free(engine, 1) - count, 0), 1)
    assert num_free(engine, 1) <= count
    yield
    engine.pages.drop(taken, 1)


def needed(window: int, step: int) -> int:
    """The number of pages that a sequence needs if steps in flight write up to `step` tokens."""
    return -(-(window + step) // PAGE) + 1


@pytest.mark.parametrize("window", WINDOWS)
def test_logits(window: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the reference needs transformers")
    tiny = write_tiny(tmp_path, FAMILY, **layers(window))
    ids = random_ids(400, tiny.config["vocab_size"], seed=2)
    expected = hf_logits(tiny.config, tiny.weights, ids)
    for chunk in (1, 7, 64, 100):
        engine = load_tiny(tmp_path, chunk_length=chunk).engine
        assert engine.pages.windows == [0, window]
        with few_window_pages(engine, needed(window, chunk)):
            assert_close(prompt_logits(engine, ids), expected, LOGITS["float32"])


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_long_sequence_has_few_pages(kind: str, window: int, device: str, tmp_path: Path) -> None:
    models = models_of(tmp_path, device, window)
    engine = engine_of(models, kind, chunk_length=32)
    prompt, count, ahead = random_ids(150, VOCAB), 250, 2
    step = max(32, (ahead + 1) * engine.tokens_per_step + 16)
    for name in ("greedy", "all"):
        drive = Overwriting(engine, ahead)
        with few_window_pages(engine, needed(window, step) + 1):
            tokens = drive.one(prompt, count, **SAMPLINGS[name])
        assert tokens == models.plain(FAMILY, prompt, count, **SAMPLINGS[name])
        assert 0 < drive.most <= needed(window, step)
    if device == "cpu" and not kind:
        greedy = models.plain(FAMILY, prompt, count)
        target = models.target(FAMILY)
        logits = hf_logits(target.config, target.weights, prompt + greedy[:-1])
        assert (np.argmax(logits[len(prompt) - 1 :], -1) == greedy).mean() > 0.99  # near ties


def test_memory_for_a_long_context(tmp_path: Path) -> None:
    """Layers with a window need as much memory for any context."""
    context, window, chunk = 1 << 20, 100, 256

    def mebibytes(family: str, **config: Any) -> int:
        """Size of the KV cache. The message tells it that says what does not fit."""
        made = write_tiny(tmp_path / family, family, max_position_embeddings=context, **config)
        with pytest.raises(MemoryError, match="the model does not fit") as caught:
            load_tiny(made.directory, max_model_len=context, chunk_length=chunk, memory_limit=1e-9)
        found = re.search(rf"(\d+) MiB of KV cache for {context} tokens", str(caught.value))
        assert found
        return int(found[1])

    full = mebibytes("llama", num_hidden_layers=2)
    row = 2 * 2 * 2 * 16 * 4  # bytes: layers, k and v, heads, D, float32
    assert full * 2**20 == row * context
    assert full <= mebibytes(FAMILY, **layers(window)) <= full + 1


def test_step_bytes(tmp_path: Path) -> None:
    """A decode step reads the window of a layer with one, and the whole context of others."""
    write_tiny(tmp_path, FAMILY, **layers(100))
    loaded = load_tiny(tmp_path)
    row = 2 * 2 * 2 * 16 * 4  # bytes: layers, k and v, heads, D, float32
    weights = step_bytes(loaded.engine, loaded.spec, 0)
    for context in (10, 100, 101, 300):
        found = step_bytes(loaded.engine, loaded.spec, context) - weights
        assert found == row * (context + min(context, 100))


def test_fp8_kv_cache(device: str, tmp_path: Path) -> None:
    models = models_of(tmp_path, device, 70)
    prompt, ahead, step = random_ids(150, VOCAB), 2, 32
    found = []
    for few in (False, True):
        engine = engine_of(models, "", chunk_length=32, kv_cache_dtype="fp8_e4m3")
        drive = Overwriting(engine, ahead) if few else Drive(engine, ahead)
        with few_window_pages(engine, needed(70, step) + 1 if few else 1000):
            found.append(drive.one(prompt, 200, **SAMPLINGS["seeded"]))
    assert found[0] == found[1]


def test_the_disk_is_off(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    write_tiny(tmp_path / "model", FAMILY, **layers(33))
    loaded = load_tiny(tmp_path / "model")
    config = EngineConfig(
        model=str(tmp_path / "model"), device="cpu", prefix_cache_dir=str(tmp_path / "cache")
    )
    make_page_cache(loaded, config).close()
    assert [record.message for record in caplog.records] == [
        "the prefix cache keeps nothing on disk: the model has layers with a window, whose pages "
        "are not written to files"
    ]
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_side_by_side(kind: str, device: str, tmp_path: Path) -> None:
    """Pages that one sequence gives back are used by others."""
    window = 70
    models = models_of(tmp_path, device, window)
    engine = engine_of(models, kind, chunk_length=64, max_num_seqs=4)
    runner = Runner(engine, page_size=PAGE, cache=PageCache(engine, PAGE))
    # Two sequences fit, so prompts wait for each other and sequences are preempted.
    few = few_window_pages(engine, 2 * needed(window, 64 + 32))
    prompts = [random_ids(length, VOCAB, seed=length) for length in (200, 90, 1, 333, 64, 129)]
    runner.call(lambda _: few.__enter__())
    try:
        jobs = [Job(ids, 80, **SAMPLINGS["seeded"]) for ids in prompts]
        runner.submit(*(job.request for job in jobs))
        for job, ids in zip(jobs, prompts, strict=True):
            found = job.wait()
            if device == "cpu" or not job.request.num_preemptions:  # else last bits may differ
                assert found == models.plain(FAMILY, ids, 80, **SAMPLINGS["seeded"])
        assert engine.num_free_pages == engine.num_pages
        runner.call(lambda _: few.__exit__(None, None, None))
    finally:
        runner.close()


@pytest.mark.parametrize("kind", KINDS)
def test_preempted_sequences_go_on(kind: str, device: str, tmp_path: Path) -> None:
    window, count, lengths = 70, 150, (50, 30, 61, 1)
    models = models_of(tmp_path, device, window)
    engine = engine_of(models, kind, max_num_seqs=4, max_model_len=320)
    swap_bytes = 100 * (engine.pages.page_bytes + engine.pages.group_page_bytes(1))
    cache = PageCache(engine, PAGE, swap_bytes=swap_bytes)
    runner = Runner(engine, page_size=PAGE, cache=cache)
    few = few_window_pages(engine, 2 * needed(window, 40))
    runner.call(lambda _: few.__enter__())
    try:
        prompts = [random_ids(length, VOCAB, seed=length) for length in lengths]
        jobs = [Job(ids, count, **SAMPLINGS["seeded"]) for ids in prompts]
        runner.submit(*(job.request for job in jobs))
        for job, ids in zip(jobs, prompts, strict=True):
            assert job.wait() == models.plain(FAMILY, ids, count, **SAMPLINGS["seeded"])
        load = runner.load()
        assert load.preemptions > 0
        # Prompts were read once, and each output token was emitted once.
        assert load.step_tokens.total == sum(lengths) + count * len(lengths)
        assert runner.call(lambda e: e.num_free_pages) == engine.num_pages
        assert all(tier.num_used == 0 for tier in cache.swaps)
        runner.call(lambda _: few.__exit__(None, None, None))
    finally:
        runner.close()


@pytest.mark.parametrize("window", WINDOWS)
def test_hits(window: int, device: str, tmp_path: Path) -> None:
    models = models_of(tmp_path, device, window)
    engine = engine_of(models, "", chunk_length=100, max_num_seqs=2)
    shared = random_ids(300, VOCAB, seed=1)
    with running(engine) as (runner, _):
        for turn, length in enumerate((300, 300, 256, 257, 192, 70)):
            ids = shared[:length] + random_ids(turn % 2 * 40, VOCAB, seed=10 + turn)
            job = Job(ids, 20, **SAMPLINGS["seeded"])
            runner.submit(job.request)
            assert job.wait() == models.plain(FAMILY, ids, 20, **SAMPLINGS["seeded"])
            most = min(length, len(ids) - 1) // PAGE * PAGE
            assert job.request.cached_tokens == (most if turn else 0)


@pytest.mark.parametrize("decoded", [False, True])
def test_a_hit_is_shortened_to_where_pages_are(decoded: bool, device: str, tmp_path: Path) -> None:
    """Other prompts take the pages of the layers with a window. The others stay."""
    window = 130  # 3 pages before a hit's end
    models = models_of(tmp_path, device, window)
    engine = engine_of(models, "", chunk_length=64, max_num_seqs=8)
    first = random_ids(470, VOCAB, seed=1)
    with running(engine, decoded=decoded) as (runner, cache):
        few = few_window_pages(engine, needed(window, 64) + 1)
        runner.call(lambda _: few.__enter__())

        def run(ids: list[int]) -> int:
            job = Job(ids, 4)
            runner.submit(job.request)
            assert job.wait() == models.plain(FAMILY, ids, 4)
            return int(job.request.cached_tokens)

        assert run(first) == 0
        assert run(first) == 448  # the last window of a prompt is kept longest
        assert len(runner.call(lambda _: cache.window_pages(1))) < len(first) // PAGE
        assert run(first[:100] + random_ids(5, VOCAB)) == 0  # the first windows are gone
        for seed in range(2, 5):
            run(random_ids(470, VOCAB, seed=seed))
        assert run(first) == 0
        assert run(first) == 448
        runner.call(lambda _: few.__exit__(None, None, None))


@pytest.mark.parametrize("host_pages", [0, 2, 1000])
def test_evicted_windows_move_to_the_host(host_pages: int, device: str, tmp_path: Path) -> None:
    """A hit restores them: no token changes. Without enough host memory there is no hit."""
    window = 130  # 3 pages before a hit's end
    models = models_of(tmp_path, device, window)
    engine = engine_of(models, "", chunk_length=64, max_num_seqs=8)
    pages = engine.pages
    sizes = [pages.group_page_bytes(i) * pages.num_pages(i) for i in range(2)]
    host_bytes = -(-host_pages * pages.group_page_bytes(1) * sum(sizes) // sizes[1])
    prompts = [random_ids(470, VOCAB, seed=seed) for seed in range(1, 5)]
    sampling = SAMPLINGS["seeded"]
    with running(engine, host_bytes=host_bytes) as (runner, cache):
        few = few_window_pages(engine, needed(window, 64) + 1)
        runner.call(lambda _: few.__enter__())

        def run(*many: list[int]) -> list[int]:
            jobs = [Job(ids, 20, **sampling) for ids in many]
            runner.submit(*(job.request for job in jobs))
            for job, ids in zip(jobs, many, strict=True):
                assert job.wait() == models.plain(FAMILY, ids, 20, **sampling)
            return [job.request.cached_tokens for job in jobs]

        for ids in prompts:
            assert run(ids) == [0]
        before = cache.snapshot().host_hits
        first = 448 if host_pages == 1000 else 0
        assert run(prompts[0]) == [first]
        assert cache.snapshot().host_hits - before == (3 * PAGE if first else 0)
        assert run(prompts[0] + random_ids(20, VOCAB, seed=9)) == [448]
        if first:
            assert run(*prompts) == [448] * 4  # side by side, with pages for one
            assert run(*(ids[:320] + random_ids(20, VOCAB, seed=8) for ids in prompts)) == [0] * 4
        runner.call(lambda _: cache.reset())
        assert all(host.num_used == 0 for host in cache._hosts)
        runner.call(lambda _: few.__exit__(None, None, None))


def test_published_answers(device: str, tmp_path: Path) -> None:
    """A second turn goes on behind the answer, though another prompt has taken pages."""
    window = 70
    models = models_of(tmp_path, device, window)
    engine = engine_of(models, "", chunk_length=64)
    prompt = random_ids(200, VOCAB, seed=1)
    with running(engine, decoded=True) as (runner, _):
        few = few_window_pages(engine, needed(window, 64) + 1)
        runner.call(lambda _: few.__enter__())
        for cached in (0, 256):
            other = Job(random_ids(70, VOCAB, seed=2 + cached), 4)
            runner.submit(other.request)
            other.wait()
            job = Job(prompt, 80)
            runner.submit(job.request)
            found = job.wait()
            if device == "cpu":  # on a GPU, decoding and prefill round differently
                assert found == models.plain(FAMILY, prompt, 80)
            assert job.request.cached_tokens == cached
            prompt = prompt + found
        runner.call(lambda _: few.__exit__(None, None, None))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tier", ["device", "host"])
def test_any_prompts_in_any_order(tier: str, kind: str, device: str, tmp_path: Path) -> None:
    rng = random.Random(f"{kind} {tier}")
    seqs, window = rng.choice([1, 3, 8]), rng.choice([33, 64, 130])
    models = models_of(tmp_path, device, window)
    chunk = rng.choice([32, 64, 100, 128])
    engine = engine_of(models, kind, max_num_seqs=seqs, chunk_length=chunk)
    host_bytes = 12 * engine.pages.page_bytes if tier == "host" else 0
    with running(engine, host_bytes=host_bytes, decoded=False) as (runner, cache):
        few = few_window_pages(engine, seqs * needed(window, 32) + needed(0, chunk) + 8)
        runner.call(lambda _: few.__enter__())
        waiting: list[tuple[Job, list[int], str]] = []

        def check() -> None:
            job, ids, name = waiting.pop(0)
            found = job.wait()
            if device == "cpu" or not job.request.num_preemptions:
                assert found == models.plain(FAMILY, ids, 10, **SAMPLINGS[name])

        for ids in trees_of_prompts(rng, 12 if SMALL else 30):
            name = rng.choice(list(SAMPLINGS))
            job = Job(ids, 10, **SAMPLINGS[name])
            runner.submit(job.request)
            if rng.random() < 0.15:
                job.request.cancel()
                continue
            waiting.append((job, ids, name))
            while len(waiting) > rng.choice([0, 2, 2 * seqs]):
                check()
        while waiting:
            check()
        assert cache.counters.hits > 0
        runner.call(lambda _: few.__exit__(None, None, None))
