"""The length of a pass beside decoding sequences, from times that a clock of the test gives."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace

import pytest
from fake_engine import FakeEngine
from test_prompt_passes import Turns, running
from test_runner import Job, script

from cpmcu.engine.prompt_passes import FEW_PROMPTS, FEWEST, SLOWDOWN, UNTIMED, PassTimes

FIXED, TOKEN, STEP = 1.5e-3, 25e-6, 2.4e-3  # seconds of a pass, of each of its tokens, of a step
LENGTHS = (128, 512, 256, 1024)


def timed(
    limit: float = 0.04, fixed: float = FIXED, token: float = TOKEN, step: float | None = STEP
) -> PassTimes:
    """Passes and steps of a machine were timed."""
    times = PassTimes(limit)
    for length in LENGTHS * 3:
        times.observe(length, fixed + token * length)
        if step is not None:
            times.observe_step(step)
    return times


def test_before_any_pass_was_timed():
    times = PassTimes(0.040)
    assert times.room([5000]) == UNTIMED
    times.observe_step(STEP)
    assert times.room([5000]) == UNTIMED
    assert FEWEST <= times.room([100]) < UNTIMED


@pytest.mark.parametrize(
    ("fixed", "token", "step"), [(1.5e-3, 25e-6, 2e-3), (1.5e-3, 25e-6, 9e-3), (0, 40e-6, 4e-3)]
)
def test_fixed_cost_and_step_are_a_share_of_the_time_of_the_tokens(fixed, token, step):
    times = timed(1.0, fixed, token, step)
    room = times.room([100_000])
    assert (fixed + step) / (room * token) == pytest.approx(SLOWDOWN, rel=0.25)


def test_the_passes_of_a_prompt_have_about_the_same_length():
    """A prompt of any length leaves no pass with few tokens."""
    times = timed()
    usual = times.room([100_000])
    for length in range(FEWEST, 6 * usual, 50):
        rest, taken = length, []
        while rest:
            taken.append(min(rest, times.room([rest])))
            rest -= taken[-1]
        assert max(taken) <= 1.25 * usual
        assert max(taken[:-1], default=0) - min(taken) <= FEWEST * len(taken)


def test_longer_steps_allow_longer_passes():
    """Steps are longer with more sequences, and with drafts."""
    rooms = [timed(step=step).room([100_000]) for step in (1e-3, 2e-3, 4e-3, 8e-3)]
    assert rooms == sorted(set(rooms))


def test_one_slow_step_or_pass_changes_little():
    times = timed()
    usual = times.room([100_000])
    times.observe_step(1.0)
    assert times.room([100_000]) == usual
    times.observe(512, 1.5 * (FIXED + TOKEN * 512))
    assert times.room([100_000]) == pytest.approx(usual, rel=0.25)


def test_many_prompts_make_passes_longer_up_to_the_limit():
    times = timed()
    rooms = [times.room([1024] * n) for n in range(FEW_PROMPTS, 30)]
    assert rooms[0] < rooms[-1] <= (0.04 - FIXED) / TOKEN
    assert rooms[-1] == times.room([1024] * 1000)


@pytest.mark.parametrize("limit", [0.004, 0.010, 0.040])
def test_no_pass_exceeds_the_limit(limit):
    times = timed(limit, step=0.03)
    for rests in ([5000], [300], [1000] * 50):
        room = times.room(rests)
        assert room == FEWEST or FIXED + TOKEN * room <= limit


def test_the_limit_alone_counts_before_a_step_was_timed():
    times = timed(step=None)
    room = times.room([100_000])
    assert room <= (0.04 - FIXED) / TOKEN < room + FEWEST + 1


def test_slow_passes_shorten_the_next_ones():
    times = timed()
    for _ in range(2):
        times.observe(512, 10.0)
    assert times.room([5000]) == FEWEST
    times = timed()
    times.observe(FEWEST - 1, 100.0)  # a pass of few tokens does not limit longer ones
    assert times.room([5000]) > FEWEST


def test_no_pass_is_much_longer_than_timed_ones():
    """Short passes, and passes that seem to take no time, do not change the estimate."""
    times = PassTimes(0.040)
    times.observe(100, 0.0)
    assert times.room([5000]) <= 256
    times.observe_step(STEP)
    for length in (64, 100, 64, 100):
        times.observe(length, FIXED)
    assert times.room([5000]) <= 256


def test_unequal_times_yield_a_length():
    """Any times of passes and steps, even impossible ones, yield whole tokens within bounds."""
    draw = random.Random(1)
    times = PassTimes(0.040)
    for _ in range(500):
        times.observe(draw.choice((64, 65, 100, 700, 4096)), draw.choice((0.0, 1e-9, 0.01, 9.0)))
        times.observe_step(draw.choice((0.0, 1e-9, 0.01, 9.0)))
        room = times.room([draw.randint(1, 9000) for _ in range(draw.randint(1, 9))])
        assert isinstance(room, int) and FEWEST <= room <= 2 * 4096


def test_a_machine_without_fixed_cost_reads_the_fewest_tokens():
    """On a CPU a token of a prompt takes about as long as a step."""
    times = timed(fixed=0.0, token=5e-3, step=10e-3)
    assert times.room([2000]) == FEWEST


# ---- passes of the loop


class ClockEngine(FakeEngine):
    """A FakeEngine whose steps end by a clock."""

    def __init__(self, **options) -> None:
        super().__init__(script, **options)
        self.now = 0.0
        self.seconds: list[float] = []  # time of each step in flight

    def prefill(self, items, *arguments, **options) -> None:
        super().prefill(items, *arguments, **options)
        self.seconds.append(FIXED + TOKEN * sum(len(ids) for _, ids, _ in items))

    def decode(self, slots, shape=None) -> None:
        super().decode(slots, shape)
        self.seconds.append(STEP)

    def collect_step(self):
        self.now += self.seconds.pop(0)
        return super().collect_step()


@pytest.fixture
def clocked(monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    limits = {"chunk_length": 4096, "max_model_len": 9000, "num_pages": 40_000}
    engine = ClockEngine(launch_ahead=2, max_num_seqs=16, **limits)
    clock = SimpleNamespace(perf_counter=lambda: engine.now)
    monkeypatch.setattr("cpmcu.engine.runner.time", clock)
    of = Turns(engine)
    yield of
    of.runner._stop()


def sizes(of: Turns) -> list[int]:
    return [sum(count for _, count, _ in chunks) for chunks in of.passes()]


def test_streams_pause_for_a_part_of_a_prompt(clocked: Turns):
    of = clocked
    running(of, 7)
    for i in range(4):
        before = len(of.passes())
        job = Job(1024, max_tokens=3, key=i)
        of.submit(job)
        of.finish(job)
    assert sizes(of)[before:] == [512, 512]


def test_a_request_without_a_stream_has_whole_passes(clocked: Turns):
    of = clocked
    first = Job(10, max_tokens=900, is_streamed=False)
    of.submit(first)
    of.until(lambda: len(first.request.tokens) > 3)
    job = Job(4000, max_tokens=2, key=1, is_streamed=False)
    of.submit(job)
    of.finish(job)
    assert sizes(of)[-1] == 4000
