"""Prompts take turns in passes. Delays are counted in passes, on an engine without a thread."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace

import pytest
from fake_engine import PAGE_SIZE, FakeEngine
from test_runner import Job, script

from cpmcu.engine.prefix.base import PageCache
from cpmcu.engine.prompt_passes import UNTIMED, divide
from cpmcu.engine.runner import Runner

CHUNK = 8


class Turns:
    """A runner whose turns the test takes."""

    def __init__(self, engine: FakeEngine, **options) -> None:
        self.engine = engine
        self.runner = Runner(engine, page_size=PAGE_SIZE, **options)

    def submit(self, *jobs: Job) -> None:
        self.runner.submit(*(job.request for job in jobs))

    def turn(self) -> None:
        assert self.runner._wait_for_work()
        self.runner._turn()

    def until(self, done) -> None:
        for _ in range(1000):
            if done():
                return
            self.turn()
        raise AssertionError("not done after 1000 turns")

    def finish(self, *jobs: Job) -> None:
        self.until(lambda: all(job.request.done for job in jobs))
        for job in jobs:
            assert job.wait().token_ids == job.expected(len(job.request.tokens))

    def passes(self) -> list[list[tuple[int, int, bool]]]:
        """Returns (slot, number of tokens, is last) of the chunks of each prefill pass."""
        return [detail for method, detail in self.engine.log if method == "prefill"]

    def kinds(self) -> str:
        """Returns "P" for each launched prefill step and "D" for each decode step."""
        names = {"prefill": "P", "decode": "D"}
        return "".join(names[method] for method, _ in self.engine.log if method in names)


@pytest.fixture
def turns(monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    made: list[Turns] = []

    def make(launch_ahead: int = 2, max_num_seqs: int = 16, **options) -> Turns:
        settings = {"chunk_length": CHUNK, "max_model_len": 4000, "num_pages": 4000}
        settings |= options.pop("engine", {})
        engine = FakeEngine(
            script, launch_ahead=launch_ahead, max_num_seqs=max_num_seqs, **settings
        )
        made.append(Turns(engine, **options))
        return made[-1]

    yield make
    for each in made:
        each.runner._stop()


def running(turns: Turns, key: int) -> Job:
    """A sequence that decodes."""
    job = Job(max_tokens=900, key=key)
    turns.submit(job)
    turns.until(lambda: len(job.request.tokens) > 3)
    return job


# ---- divide


@pytest.mark.parametrize(
    ("rests", "room", "expected"),
    [
        ([], 8, []),
        ([5], 8, [5]),
        ([50], 8, [8]),
        ([2, 2, 2, 2], 8, [2, 2, 2, 2]),  # several short prompts in one pass
        ([50, 3], 8, [5, 3]),
        ([50, 30], 8, [2, 6]),  # the shortest first, a quarter for the oldest
        ([50, 30, 4], 8, [2, 2, 4]),
        ([50, 6, 6], 8, [2, 6, 0]),  # if two are equal, the one that came first
        ([1, 50], 8, [1, 7]),
        ([50, 50], 1, [1, 0]),
    ],
)
def test_shares_of_a_pass(rests, room, expected):
    assert divide(rests, room) == expected


def test_shares_in_whole_pages():
    assert divide([500, 300], 128, 64) == [64, 64]
    assert divide([500, 300], 64, 64) == [64, 0]
    assert divide([500, 30], 128, 64) == [98, 30]
    assert divide([10, 300], 128, 64) == [10, 118]


def test_a_pass_is_never_empty_nor_too_long():
    for rests in itertools.product([1, 3, 9, 70], repeat=3):
        for room, unit in ((1, 1), (7, 1), (64, 64), (100, 64), (500, 64)):
            taken = divide(rests, room, unit)
            assert sum(taken) == min(room, sum(rests)) and taken[0] > 0
            assert all(0 <= part <= rest for part, rest in zip(taken, rests))


# ---- delays


@pytest.mark.parametrize("launch_ahead", [1, 2])
@pytest.mark.parametrize("decodes", [False, True])
@pytest.mark.parametrize("num_long", [1, 3])
@pytest.mark.parametrize("when", range(5))
def test_a_long_prompt_delays_a_first_token_by_two_passes(
    turns, launch_ahead, decodes, num_long, when
):
    """A short prompt is in the third pass at the latest, passes in flight included."""
    of = turns(launch_ahead)
    if decodes:
        running(of, 7)
    longs = [Job(200 + 50 * i, max_tokens=2, key=i) for i in range(num_long)]
    of.submit(*longs)
    for _ in range(3 + when):
        of.turn()
    short = Job(CHUNK // 2, max_tokens=2, key=9)
    in_flight = sum(step.chunks is not None for step in of.runner._in_flight)
    before = len(of.passes()) - in_flight
    of.submit(short)
    of.until(lambda: short.request.tokens)
    (slot,) = [s.slot for s in of.runner._scheduler.active if s.request is short.request]
    first = next(
        i for i, chunks in enumerate(of.passes()[before:]) if (slot, CHUNK // 2, True) in chunks
    )
    assert first <= 2
    assert not any(job.request.tokens for job in longs)
    of.finish(short, *longs)


def test_short_prompts_do_not_stop_a_long_one(turns):
    """A new prompt of a whole pass comes with each pass."""
    of = turns()
    long = Job(15 * CHUNK, max_tokens=2)
    of.submit(long)
    shorts: list[Job] = []
    while not long.request.tokens:
        shorts.append(Job(CHUNK, max_tokens=1, key=len(shorts)))
        of.submit(shorts[-1])
        of.turn()
        assert len(shorts) < 4 * 15 + 3
    assert sum(bool(job.request.tokens) for job in shorts) > len(shorts) / 2
    of.finish(long, *shorts)


def test_several_short_prompts_share_a_pass(turns):
    of = turns()
    jobs = [Job(2, max_tokens=3, key=i) for i in range(6)]
    of.submit(*jobs)
    of.finish(*jobs)
    assert [len(chunks) for chunks in of.passes()] == [4, 2]


def test_of_two_long_prompts_the_shorter_is_read_first(turns):
    of = turns()
    jobs = [Job(10 * CHUNK, max_tokens=1), Job(5 * CHUNK, max_tokens=1, key=1)]
    of.submit(*jobs)
    of.until(lambda: jobs[1].request.tokens)
    assert not jobs[0].request.tokens
    assert of.passes()[0] == [(0, 2, False), (1, 6, False)]
    of.finish(*jobs)


@pytest.mark.parametrize("launch_ahead", [1, 2])
def test_decode_steps_lie_between_the_passes_of_a_long_prompt(turns, launch_ahead):
    of = turns(launch_ahead)
    beside = running(of, 7)
    long = Job(20 * CHUNK, max_tokens=2)
    of.submit(long)
    begin = len(of.kinds())
    of.until(lambda: long.request.tokens)
    kinds = of.kinds()[begin:]
    assert kinds.count("P") == 20 and "PP" not in kinds
    assert not beside.request.done


@pytest.mark.parametrize("scored", ["long", "short"])
def test_prompts_with_scores_take_turns_with_others(turns, scored):
    of = turns()
    options = {"prompt_logprobs": 0}
    long = Job(100, max_tokens=1, **(options if scored == "long" else {}))
    of.submit(long)
    of.turn()
    short = Job(6, max_tokens=1, key=1, **(options if scored == "short" else {}))
    of.submit(short)
    begin = len(of.passes())
    of.until(lambda: short.request.tokens)
    assert len(of.passes()) - begin <= 4  # a scored prompt takes two: its last token is not scored
    assert not long.request.tokens
    of.finish(long, short)


# ---- passes beside decoding sequences


def test_a_pass_is_short_only_beside_decoding_sequences(turns, monkeypatch):
    of = turns(engine={"chunk_length": 1000})
    long = Job(3000, max_tokens=900)
    of.submit(long)
    of.until(lambda: long.request.tokens)
    assert [chunks[0][1] for chunks in of.passes()] == [1000, 1000, 1000]
    monkeypatch.setattr(of.runner._scheduler.pass_times, "room", lambda rests: 128)
    other = Job(500, max_tokens=2, key=1)
    of.submit(other)
    of.until(lambda: other.request.tokens)
    assert [chunks[0][1] for chunks in of.passes()[3:]] == [128, 128, 128, 116]
    of.finish(other)
    long.request.cancel()


def test_passes_are_timed(turns):
    of = turns(prefill_seconds=1.0, engine={"chunk_length": 100})
    assert of.runner._scheduler.pass_times.room([4000]) == UNTIMED
    job = Job(100, max_tokens=1)
    of.submit(job)
    of.finish(job)
    assert of.runner._scheduler.pass_times.room([4000]) != UNTIMED


# ---- admission


class Waits(PageCache):
    """A cache without pages, whose waiting prompts the test chooses."""

    def __init__(self) -> None:
        super().__init__(FakeEngine(script), PAGE_SIZE)
        self.waiting: set[int] = set()  # lengths of the waiting prompts

    def prefix_of(self, tokens, salt):
        return SimpleNamespace(length=len(tokens))

    def must_wait(self, prefix, matched, num_tokens):
        return prefix.length in self.waiting


def test_a_prompt_that_waits_for_a_prefix_lets_others_pass(turns):
    cache = Waits()
    of = turns(cache=cache)
    cache.waiting = {5}
    jobs = [Job(4, max_tokens=2), Job(5, max_tokens=2, key=1), Job(6, max_tokens=2, key=2)]
    of.submit(*jobs)
    of.finish(jobs[0], jobs[2])
    assert not jobs[1].request.tokens
    cache.waiting = set()
    of.finish(jobs[1])


def test_a_prompt_that_waits_for_pages_lets_none_pass(turns):
    """If others passed it, short prompts could keep a long one waiting for ever."""
    of = turns(engine={"num_pages": 30})
    beside = Job(40, max_tokens=50)
    of.submit(beside)
    of.until(lambda: len(beside.request.tokens) > 1)
    jobs = [Job(100, max_tokens=2, key=1), Job(3, max_tokens=2, key=2)]
    of.submit(*jobs)
    of.finish(beside)
    assert not jobs[1].request.tokens
    of.finish(*jobs)
