"""With the prefix cache, every request gets the tokens of an engine without a cache."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cpmcu.engine.prefix import host
from cpmcu.engine.prefix.disk import DiskStore
from cpmcu.engine.prefix.disk_tier import DiskTier
from tests.engine.drafted import COUNT, SAMPLINGS, SOME_DRAFTS, TREES, VOCAB, Models, family_of
from tests.engine.harness import SMALL, random_ids
from tests.engine.prefix import PAGE, Job, running
from tests.reference.engines import extension_or_skip

extension_or_skip()

KINDS = ["", *SOME_DRAFTS]


def engine_of(models: Models, kind: str, **config: Any) -> tuple[str, Any]:
    """Returns (target, engine) with a draft of `kind`; "": none."""
    if not kind:
        return "llama", models.engine("llama", None, **config)
    family = family_of(kind)
    return family, models.drafted(kind, family, TREES["narrow"], **config)


@pytest.mark.parametrize("kind", KINDS)
def test_second_turn(models: Models, kind: str) -> None:
    family, engine = engine_of(models, kind)
    with running(engine) as (runner, cache):
        prompt = random_ids(150, VOCAB, seed=5)
        known = 0  # tokens of full pages that prefill has written
        for turn, name in enumerate(("greedy", "seeded", "all")):
            job = Job(prompt, COUNT, **SAMPLINGS[name])
            runner.submit(job.request)
            got = job.wait()
            assert got == models.plain(family, prompt, COUNT, **SAMPLINGS[name])
            # Prefill computes an answer when it comes back in the next prompt.
            assert job.request.cached_tokens == known
            known = len(prompt) // PAGE * PAGE
            prompt = prompt + got + random_ids(10 + turn, VOCAB, seed=turn)
        assert cache.counters.hits > 0


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 192])
def test_the_same_prompt_again(models: Models, length: int) -> None:
    _, engine = engine_of(models, "eagle_bias" if not SMALL else "minicpm_eagle")
    family = "llama" if not SMALL else "minicpm"
    with running(engine) as (runner, _):
        ids = random_ids(length, VOCAB, seed=length)
        for turn in range(3):
            job = Job(ids, 12)
            runner.submit(job.request)
            assert job.wait() == models.plain(family, ids, 12)
            assert job.request.cached_tokens == ((length - 1) // PAGE * PAGE if turn else 0)


def trees_of_prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Prompts that share prefixes of any length with each other."""
    prompts: list[list[int]] = []
    for i in range(count):
        base = rng.choice(prompts) if prompts and rng.random() < 0.8 else []
        base = base[: rng.choice([len(base), len(base), rng.randrange(len(base) + 1)])]
        base = base[:300]
        grown = base + random_ids(rng.choice([1, 5, 63, 64, 65, 100, 130]), VOCAB, seed=1000 + i)
        prompts.append(grown[:380])
    return prompts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tiers", ["device", "host", "disk"])
def test_any_prompts_in_any_order(models: Models, kind: str, tiers: str, tmp_path: Any) -> None:
    rng = random.Random(f"{kind} {tiers}")
    seqs = rng.choice([1, 2, 4]) if SMALL else rng.choice([1, 3, 8, 16])
    family, engine = engine_of(
        models, kind, max_num_seqs=seqs, chunk_length=rng.choice([32, 64, 100, 128])
    )
    options: dict[str, Any] = {}
    if tiers != "device":
        options["host_bytes"] = 6 * engine.pages.page_bytes
    if tiers == "disk":
        options["disk"] = DiskTier(DiskStore(tmp_path, "0" * 32, engine.pages.page_bytes, 1 << 30))
    names = list(SAMPLINGS)
    with running(engine, **options) as (runner, cache):
        waiting: list[tuple[Job, list[int], str]] = []
        for i, ids in enumerate(trees_of_prompts(rng, 12 if SMALL else 40)):
            name = rng.choice(names)
            job = Job(ids, 10, **SAMPLINGS[name])
            runner.submit(job.request)
            if rng.random() < 0.15:
                job.request.cancel()
                continue
            waiting.append((job, ids, name))
            while len(waiting) > rng.choice([0, 2, 2 * seqs]):
                done, prompt, sampled = waiting.pop(0)
                assert done.wait() == models.plain(family, prompt, 10, **SAMPLINGS[sampled]), i
        for done, prompt, sampled in waiting:
            assert done.wait() == models.plain(family, prompt, 10, **SAMPLINGS[sampled])
        assert cache.counters.hits > 0


def test_when_pages_run_out(models: Models) -> None:
    """Preempted sequences find their pages in the cache or compute them again."""
    engine = models.engine("llama", None, max_num_seqs=4, max_model_len=256)
    with running(engine, host_bytes=4 * engine.pages.page_bytes) as (runner, cache):
        prompts = [
            random_ids(100, VOCAB, seed=1)[:80] + random_ids(60, VOCAB, seed=i) for i in range(12)
        ]
        jobs = [Job(ids, 100) for ids in prompts]
        runner.submit(*(job.request for job in jobs))
        for job, ids in zip(jobs, prompts):
            assert job.wait() == models.plain("llama", ids, 100)
        assert cache.counters.evicted > 0


def test_a_prompt_that_is_computed_again_has_its_pages_once(models: Models) -> None:
    """Scoring computes a cached prompt again. Its cached pages are freed to make room."""
    engine = models.engine("llama", None, max_model_len=384)  # 6 pages
    ids = random_ids(190, VOCAB, seed=4)
    with running(engine) as (runner, _):
        for _ in range(2):
            job = Job(ids, 120, scores=0)  # 5 pages
            runner.submit(job.request)
            assert job.wait() == models.plain("llama", ids, 120)


def test_pages_of_another_sequence_make_room_after_its_end(models: Models) -> None:
    engine = models.engine("llama", None, max_num_seqs=2, max_model_len=384)
    ids = random_ids(190, VOCAB, seed=4)
    with running(engine) as (runner, _):
        taken = runner.call(lambda e: e.pages.take(e.num_pages - 7))
        first, second = Job(ids, 2), Job(ids, 150, scores=0)  # 3 and 6 pages
        runner.submit(first.request, second.request)
        assert first.wait() == models.plain("llama", ids, 2)
        assert second.wait() == models.plain("llama", ids, 150)
        runner.call(lambda e: e.pages.drop(taken))


def test_equal_prefixes_in_the_queue_are_computed_once(models: Models) -> None:
    engine = models.engine("llama", None, max_num_seqs=8, chunk_length=64)
    with running(engine) as (runner, cache):
        shared = random_ids(256, VOCAB, seed=3)
        prompts = [shared + random_ids(5, VOCAB, seed=i) for i in range(6)]
        jobs = [Job(ids, 8) for ids in prompts]
        runner.submit(*(job.request for job in jobs))
        for job, ids in zip(jobs, prompts):
            assert job.wait() == models.plain("llama", ids, 8)
        assert [job.request.cached_tokens for job in jobs] == [0] + [256] * 5
        assert cache.counters.hits == 5 * 256


def test_a_cancelled_sequence_lets_those_that_wait_for_its_pages_go_on(models: Models) -> None:
    engine = models.engine("llama", None, max_num_seqs=4, chunk_length=32)
    with running(engine) as (runner, _):
        shared = random_ids(400, VOCAB, seed=9)
        first, second = Job(shared, 8), Job(shared, 8)
        runner.submit(first.request, second.request)
        first.request.cancel()
        assert second.wait() == models.plain("llama", shared, 8)


def test_salts_keep_prompts_apart(models: Models) -> None:
    engine = models.engine("llama", None)
    with running(engine) as (runner, _):
        ids = random_ids(140, VOCAB, seed=2)
        found = []
        for salt in ("", "a", "b", "a", ""):
            job = Job(ids, 4, salt=salt)
            runner.submit(job.request)
            assert job.wait() == models.plain("llama", ids, 4)
            found.append(job.request.cached_tokens)
        assert found == [0, 0, 0, 128, 128]


def test_scores_of_a_prompt_are_computed(models: Models) -> None:
    engine = models.engine("llama", None)
    with running(engine) as (runner, _):
        ids = random_ids(140, VOCAB, seed=2)
        for _ in range(2):
            job = Job(ids, 4, scores=2)
            runner.submit(job.request)
            assert job.wait() == models.plain("llama", ids, 4)
            assert job.request.cached_tokens == 0
            assert all(entry is not None for entry in job.request.prompt_logprobs[1:])


def test_hash_collisions_are_no_hits(models: Models) -> None:
    """With a hash of two values almost all pages collide."""
    engine = models.engine("llama", None, max_num_seqs=2)

    def weak(data: bytes) -> bytes:
        return bytes([sum(data) % 2]) * 16

    with running(engine, hash_bytes=weak) as (runner, _):
        rng = random.Random(4)
        for ids in trees_of_prompts(rng, 20):
            job = Job(ids, 6)
            runner.submit(job.request)
            assert job.wait() == models.plain("llama", ids, 6)


def test_decoded_pages_are_published_if_asked_for(models: Models) -> None:
    for decoded in (False, True):
        engine = models.engine("llama", None)
        with running(engine, decoded=decoded) as (runner, _):
            prompt = random_ids(60, VOCAB, seed=8)
            job = Job(prompt, 80)
            runner.submit(job.request)
            answer = job.wait()
            again = Job(prompt + answer + [3], 4)
            runner.submit(again.request)
            again.wait()
            assert again.request.cached_tokens == (128 if decoded else 0)


def test_a_restart_finds_the_pages_on_disk(models: Models, tmp_path: Any) -> None:
    ids = random_ids(300, VOCAB, seed=6)
    for restart in range(3):
        engine = models.engine("llama", None, max_num_seqs=4)
        store = DiskStore(tmp_path, "1" * 32, engine.pages.page_bytes, 1 << 30)
        cache_options = {"host_bytes": 8 * engine.pages.page_bytes, "disk": DiskTier(store)}
        with running_kept(engine, **cache_options) as runner:
            job = Job(ids, 8)
            runner.submit(job.request)
            assert job.wait() == models.plain("llama", ids, 8)
            assert job.request.cached_tokens == (256 if restart else 0)
            counters = runner.load().prefix_cache
            assert counters.disk_hits == (256 if restart else 0)
            assert counters.host_hits == 0  # the pages went on to the device at once


def test_a_reset_stops_pages_on_their_way_to_disk(models: Models, tmp_path: Any) -> None:
    engine = models.engine("llama", None)
    store = DiskStore(tmp_path, "2" * 32, engine.pages.page_bytes, 1 << 30)
    disk = DiskTier(store)
    with running(engine, host_bytes=8 * engine.pages.page_bytes, disk=disk) as (runner, cache):
        job = Job(random_ids(300, VOCAB, seed=6), 4)
        runner.submit(job.request)
        job.wait()

        def reset(_: Any) -> None:
            while disk.tick(0, 0) or disk._writes:
                pass
            assert store.num_pages == 4
            store.remove_all()
            for entry in cache._index:
                entry.on_disk = False
                disk.wants(entry)
            assert disk.tick(5, 3)  # 3 of 5 steps have ended: copies are under way
            cache.reset()
            while disk.tick(5, 5) or disk._writes:
                pass
            assert store.num_pages == 0
            assert cache._host.num_used == 0

        runner.call(reset)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_sequence_that_runs_during_a_reset_publishes_nothing(models: Models) -> None:
    engine = models.engine("llama", None, max_num_seqs=2, chunk_length=32)
    ids = random_ids(300, VOCAB, seed=6)
    with running(engine) as (runner, cache):
        publish = cache.publish

        def reset_first(*args: Any, **options: Any) -> None:
            cache.publish = publish  # type: ignore[method-assign]
            cache.reset()
            publish(*args, **options)

        cache.publish = reset_first  # type: ignore[method-assign]
        for known in (0, 0, 256):
            job = Job(ids, 8)
            runner.submit(job.request)
            assert job.wait() == models.plain("llama", ids, 8)
            assert job.request.cached_tokens == known


def test_what_is_only_on_disk_takes_no_memory(models: Models, tmp_path: Any) -> None:
    engine = models.engine("llama", None, max_num_seqs=1, max_model_len=256)
    disk = DiskTier(DiskStore(tmp_path, "3" * 32, engine.pages.page_bytes, 1 << 30))
    with running(engine, host_bytes=2 * engine.pages.page_bytes, disk=disk) as (runner, cache):
        prompts = [random_ids(200, VOCAB, seed=i) for i in range(12)]
        for ids in prompts + prompts[:3]:
            job = Job(ids, 4)
            runner.submit(job.request)
            assert job.wait() == models.plain("llama", ids, 4)
        assert cache.counters.evicted > 0
        assert len(cache._index) <= engine.num_pages + 2


def test_reading_takes_no_host_memory_from_the_pages_before(models: Models, tmp_path: Any) -> None:
    engine = models.engine("llama", None)
    store = DiskStore(tmp_path, "4" * 32, engine.pages.page_bytes, 1 << 30)
    ids = random_ids(129, VOCAB, seed=8)
    disk = DiskTier(store)
    with running(engine, host_bytes=engine.pages.page_bytes, disk=disk) as (runner, cache):

        def look_up(_: Any) -> None:
            prefix = cache.prefix_of(ids, "")
            (key, tokens), second = prefix.keys
            first = cache._index.add(key, None, tokens)
            assert first is not None
            store.write(second[0], bytes(16), second[1], memoryview(bytes(engine.pages.page_bytes)))
            cache._index.set_block(first, cache._host.take())
            matched = cache.match(prefix, len(ids))
            assert matched == [first]
            assert not cache.must_wait(prefix, matched, len(ids))  # there is no block to read into
            assert cache.match(prefix, len(ids)) == [first]
            # A page that no waiting prompt needs loses its block. No page follows it then.
            assert disk.begin_reading([second], first) == []
            assert not first.alive and len(cache._index) == 0

        runner.call(look_up)
        for _ in range(2):
            job = Job(ids, 4)
            runner.submit(job.request)
            assert job.wait() == models.plain("llama", ids, 4)
        assert job.request.cached_tokens == 128


def test_no_host_memory_is_taken_ahead_while_a_disk_is_read(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = models.engine("llama", None)
    monkeypatch.setattr(host, "SEGMENT_BYTES", 2 * engine.pages.page_bytes)
    memory = host.HostMemory(engine, engine.pages.page_bytes)
    tier = memory.tier(40 * engine.pages.page_bytes, "a test")
    memory._in_threads = True  # as on a GPU
    tier.is_calm = True
    blocks = [tier.take()]  # if no block is free, the tier grows at once
    while memory._grower is not None:
        memory._grower.join()
        tier.grow()
    while memory._free:
        blocks.append(tier.take())
        assert memory._grower is None
    assert len(blocks) == 2 * host.SEGMENTS_AHEAD
    blocks.append(tier.take())
    assert len(set(blocks)) == 2 * host.SEGMENTS_AHEAD + 1 and -1 not in blocks
    memory.close()


@pytest.mark.parametrize("in_threads", [False, True])
@pytest.mark.parametrize(("limit", "segment"), [(1, 4), (5, 8), (7, 3), (40, 16)])
def test_host_memory_stays_within_its_limit(
    models: Models, monkeypatch: pytest.MonkeyPatch, limit: int, segment: int, in_threads: bool
) -> None:
    """The last segment is smaller if the limit is not a multiple of a segment."""
    engine = models.engine("llama", None)
    monkeypatch.setattr(host, "SEGMENT_BYTES", segment * engine.pages.page_bytes)
    limit_bytes = limit * engine.pages.page_bytes + engine.pages.page_bytes // 2
    memory = host.HostMemory(engine, engine.pages.page_bytes)
    tier = memory.tier(limit_bytes, "a test")
    memory._in_threads = in_threads  # as on a GPU
    for _ in range(2):
        blocks = []
        while (block := tier.take()) >= 0:
            blocks.append(block)
            tier.view(block)[:] = bytes([block]) * engine.pages.page_bytes
            assert memory.num_bytes <= limit_bytes
        assert sorted(blocks) == list(range(limit))
        assert memory.num_bytes == limit * engine.pages.page_bytes
        for block in blocks:
            assert bytes(tier.view(block)) == bytes([block]) * engine.pages.page_bytes
            tier.give(block)
    memory.close()
    assert memory.num_bytes == 0


def test_tiers_share_memory_and_keep_their_limits(models: Models) -> None:
    engine = models.engine("llama", None)
    memory = host.HostMemory(engine, engine.pages.page_bytes)
    first = memory.tier(2 * engine.pages.page_bytes, "one")
    second = memory.tier(3 * engine.pages.page_bytes, "another")
    taken = [first.take() for _ in range(3)]
    assert taken[2] == -1 and not first.has_room and second.has_room
    others = [second.take() for _ in range(4)]
    assert others[3] == -1 and (first.num_used, second.num_used) == (2, 3)
    assert sorted(taken[:2] + others[:3]) == list(range(5))
    first.give(taken[0])
    assert second.take() == -1  # the block is free, but the tier is full
    second.give(others[0])
    assert second.take() in (taken[0], others[0])
    memory.close()


@pytest.mark.parametrize("in_threads", [False, True])
def test_host_memory_of_many_prompts(
    models: Models, monkeypatch: pytest.MonkeyPatch, in_threads: bool
) -> None:
    """However many pages leave the device, they take no more host memory than allowed."""
    engine = models.engine("llama", None, max_num_seqs=4, max_model_len=256)
    monkeypatch.setattr(host, "SEGMENT_BYTES", 4 * engine.pages.page_bytes)
    host_bytes = 22 * engine.pages.page_bytes
    with running(engine, host_bytes=host_bytes) as (runner, cache):
        cache._memories[0]._in_threads = in_threads
        shared = random_ids(70, VOCAB, seed=1)
        jobs = [Job(shared + random_ids(140, VOCAB, seed=2 + i), 4) for i in range(64)]
        runner.submit(*(job.request for job in jobs))
        for job in jobs:
            assert job.wait() == models.plain("llama", job.request.prompt, 4)
            assert cache._memories[0].num_bytes <= host_bytes
        assert cache.counters.evicted > 22
        assert cache._memories[0].num_bytes == host_bytes  # all of it is used


def running_kept(engine: Any, **options: Any) -> Any:
    """Like `running`, but the pages on disk stay there."""
    import contextlib

    from cpmcu.engine.prefix.cache import PrefixCache
    from cpmcu.engine.runner import Runner

    return contextlib.closing(
        Runner(engine, page_size=PAGE, cache=PrefixCache(engine, PAGE, **options))
    )
