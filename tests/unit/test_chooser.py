"""The chooser of shapes on simulated engines, whose step times and acceptance are known."""

from __future__ import annotations

import dataclasses
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import (
    PLAIN,
    SHAPES,
    Engine,
    Shape,
    World,
    best_fixed,
    constant,
    cpu,
    gpu,
    measured_cpu,
    measured_h100,
    run,
    slowdown,
    switching,
)

from cpmcu.engine.chooser import ShapeChooser

SMALL, MIDDLE, SLIM, WHOLE = SHAPES[1:]
ALLOWED = 1.05  # maximum time, as a multiple of plain decoding's
CPU = World(measured_cpu, constant(0.8), 0.5, (1.0, 0.3), 0.1, 0.1, launch_ahead=1)
CHEAP_CPU = dataclasses.replace(CPU, seconds=cpu(0.2, 0.2))
NOISY_CPU = dataclasses.replace(CPU, jitter=0.2, spikes=0.2)
GPU = World(gpu(0.1, 0.01), constant(0.8))
FLAT_GPU = dataclasses.replace(GPU, seconds=gpu())
WORLDS = {"cpu": CPU, "noisy cpu": NOISY_CPU, "gpu": GPU, "flat gpu": FLAT_GPU}


def shapes_of(depth: int, topk: int, tree_size: int) -> list[Shape]:
    from cpmcu import C

    return [PLAIN, *C.beam_shapes(depth=depth, topk=topk, tree_size=tree_size)]


def chooser() -> ShapeChooser:
    return ShapeChooser(SHAPES)


def accepting(world: World, rate: float) -> World:
    return dataclasses.replace(world, acceptance=constant(rate))


# ---- never much slower than without a draft


@pytest.mark.parametrize("num_seqs", [1, 4, 16])
@pytest.mark.parametrize("rate", [0.02, 0.4, 0.8])
@pytest.mark.parametrize(
    "world", [CPU, NOISY_CPU, GPU, FLAT_GPU], ids=["cpu", "noisy", "gpu", "flat"]
)
def test_the_first_tokens_of_a_process(world: World, rate: float, num_seqs: int) -> None:
    world = accepting(world, rate)
    for seed in range(8):
        assert slowdown(world, chooser(), 100, num_seqs=num_seqs, seed=seed) <= ALLOWED


@settings(max_examples=40, deadline=None)
@given(
    rate=st.floats(0, 1),
    tree_gain=st.floats(0, 1),
    extra=st.floats(0.02, 3),
    growth=st.floats(1, 2),
    slow_first=st.tuples(st.floats(0, 2), st.floats(0, 1)),
    seed=st.integers(0, 10**6),
    num_seqs=st.sampled_from([1, 3, 16]),
)
def test_any_world(rate, tree_gain, extra, growth, slow_first, seed, num_seqs) -> None:
    """The smallest draft adds the time of `extra` plain steps; larger drafts add more."""

    def seconds(shape: Shape, seqs: int) -> float:
        drafted = extra * growth ** (SHAPES.index(shape) - 1) if shape != PLAIN else 0.0
        return seqs**0.3 * (1 + drafted)

    world = World(seconds, constant(rate), tree_gain, slow_first)
    engine = Engine(world, chooser(), seed, num_seqs)
    first = engine.run(100)
    # The first use of a shape is slow, and no measurement predicts it. At most two shapes are
    # charged.
    allowance = 0.05 * 100 * world.seconds(PLAIN, num_seqs) + 2 * sum(slow_first)
    assert first.seconds <= first.tokens / num_seqs * world.seconds(PLAIN, num_seqs) + allowance


@pytest.mark.parametrize("world", [CPU, GPU], ids=["cpu", "gpu"])
def test_a_useless_draft_costs_next_to_nothing_later(world: World) -> None:
    engine = Engine(accepting(world, 0.0), chooser(), 1)
    engine.run(200)
    begin, tokens = engine.outcome.seconds, engine.outcome.tokens
    engine.run(4000)
    assert engine.outcome.seconds - begin <= 1.02 * (engine.outcome.tokens - tokens)


@pytest.mark.parametrize("num_seqs", [1, 4, 16])
def test_short_requests_come_and_go(num_seqs: int) -> None:
    """A new request makes earlier acceptance count less, also while the chooser tries shapes."""
    world = dataclasses.replace(CPU, request=20)
    for seed in range(4):
        engine = Engine(world, chooser(), seed, num_seqs)
        outcome = engine.run(500)
        plain = outcome.tokens / num_seqs * world.seconds(PLAIN, num_seqs)
        assert outcome.seconds <= 1.03 * plain + sum(world.slow_first)


@pytest.mark.parametrize("num_seqs", [1, 4])
def test_no_hundred_tokens_are_slow_on_a_cpu(num_seqs: int) -> None:
    for seed in range(4):
        engine = Engine(CPU, chooser(), seed, num_seqs)
        for _ in range(12):
            begin, tokens = engine.outcome.seconds, engine.outcome.tokens
            engine.run(100)
            plain = (engine.outcome.tokens - tokens) / num_seqs * CPU.seconds(PLAIN, num_seqs)
            first_plain = sum(CPU.slow_first) if begin == 0 else 0.0
            assert engine.outcome.seconds - begin <= ALLOWED * plain + first_plain


# ---- with the step times of a warm-up


WARM_UP = [PLAIN] * 3 + [SMALL] * 3 + [PLAIN] * 3


def warmed(world: World, seed: int) -> Engine:
    engine = Engine(world, chooser(), seed)
    engine.warm_up(WARM_UP)
    return engine


def warm_slowdown(world: World, tokens: int, seed: int) -> float:
    outcome = warmed(world, seed).run(tokens)
    return outcome.seconds / (outcome.tokens * world.seconds(PLAIN, 1))


@pytest.mark.parametrize("first", [1.0, 9.0])
@pytest.mark.parametrize("rate", [0.02, 0.8, 1.0])
def test_no_draft_is_tried_where_none_can_pay(rate: float, first: float) -> None:
    """No draft is tried, however slow a first use is.

    The smallest draft takes 2.9 plain steps and emits two tokens.
    """
    world = dataclasses.replace(
        accepting(CPU, rate),
        seconds=lambda shape, seqs: measured_cpu(shape, seqs) + 0.4 * (shape != PLAIN),
        slow_first=(first, 0.3),
    )
    for seed in range(8):
        engine = warmed(world, seed)
        assert not engine.policy.may_pay(1)
        assert set(engine.run(100).shapes) == {PLAIN}


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
@pytest.mark.parametrize("rate", [0.0, 0.4, 0.8])
def test_the_first_tokens_after_a_warm_up(world: World, rate: float) -> None:
    for seed in range(8):
        assert warm_slowdown(accepting(world, rate), 100, seed) <= ALLOWED


def test_without_a_warm_up_any_draft_may_pay() -> None:
    choice = chooser()
    assert choice.may_pay(1)
    choice.expect(PLAIN, 1, 1.0)
    assert choice.may_pay(1)


@pytest.mark.parametrize("world", [GPU, FLAT_GPU], ids=["gpu", "flat"])
def test_the_first_request_gains_sooner_after_a_warm_up(world: World) -> None:
    assert all(warmed(world, seed).policy.may_pay(1) for seed in range(8))
    cold = statistics.median(slowdown(world, chooser(), 100, seed=seed) for seed in range(20))
    assert statistics.median(warm_slowdown(world, 100, seed) for seed in range(20)) < cold


# ---- and fast where drafting pays


@pytest.mark.parametrize("num_seqs", [1, 4, 16])
@pytest.mark.parametrize(
    "world",
    [GPU, FLAT_GPU, dataclasses.replace(FLAT_GPU, tree_gain=0.7), CHEAP_CPU],
    ids=["chain", "flat", "tree", "cheap"],
)
def test_close_to_the_best_fixed_shape(world: World, num_seqs: int) -> None:
    _, best = best_fixed(world, 1000, num_seqs=num_seqs)
    shares = []
    for seed in range(3):
        outcome = run(world, chooser(), 2500, num_seqs=num_seqs, seed=seed)
        shares.append(best * outcome.tokens / num_seqs / outcome.seconds)
    assert statistics.median(shares) > 0.85


@pytest.mark.parametrize("num_seqs", [1, 4, 16])
@pytest.mark.parametrize("rate", [0.3, 0.5, 0.8, 0.9])
@pytest.mark.parametrize("tree_gain", [0.0, 0.5], ids=["chain-like", "tree-like"])
def test_close_to_the_best_shape_of_a_measured_gpu(
    tree_gain: float, rate: float, num_seqs: int
) -> None:
    """It chooses among all shapes of the engine, soon after a warm-up that timed each."""
    world = World(measured_h100, constant(rate), tree_gain)
    shapes = shapes_of(4, 8, 32)
    _, best = best_fixed(world, 2000, num_seqs=num_seqs, shapes=shapes)
    shares = []
    for seed in range(3):
        engine = Engine(world, ShapeChooser(shapes), seed, num_seqs)
        engine.warm_up([PLAIN] * 3 + [s for s in shapes[1:] for _ in range(3)] + [PLAIN] * 3)
        engine.run(300)
        begin, tokens = engine.outcome.seconds, engine.outcome.tokens
        engine.run(900)
        seconds = engine.outcome.seconds - begin
        shares.append(best * (engine.outcome.tokens - tokens) / num_seqs / seconds)
    # Where drafting gains little, some runs stay with plain steps for long.
    assert statistics.median(shares) > (0.94 if rate >= 0.8 else 0.93 if rate >= 0.5 else 0.85), (
        shares
    )


@pytest.mark.parametrize("num_seqs", [1, 4, 16])
def test_a_useless_draft_of_a_measured_gpu(num_seqs: int) -> None:
    world = World(measured_h100, constant(0.0))
    costs = []
    for seed in range(3):
        engine = Engine(world, ShapeChooser(shapes_of(4, 8, 32)), seed, num_seqs)
        engine.run(200)
        begin, tokens = engine.outcome.seconds, engine.outcome.tokens
        engine.run(1000)
        plain = (engine.outcome.tokens - tokens) / num_seqs * world.seconds(PLAIN, num_seqs)
        costs.append((engine.outcome.seconds - begin) / plain)
    assert statistics.median(costs) <= 1.01, costs


def test_the_first_request_already_gains() -> None:
    seconds = [slowdown(FLAT_GPU, chooser(), 100, seed=seed) for seed in range(20)]
    assert statistics.median(seconds) < 0.85
    seconds = [slowdown(FLAT_GPU, chooser(), 300, seed=seed) for seed in range(10)]
    assert statistics.median(seconds) < 0.65


def test_another_conversation_begins_with_what_is_known() -> None:
    """100 tokens of the tenth request take hardly longer than with the best fixed shape."""
    world = dataclasses.replace(GPU, request=100)
    _, best = best_fixed(world, 1000)
    shares = []
    for seed in range(8):
        engine = Engine(world, chooser(), seed)
        engine.run(900)
        begin, tokens = engine.outcome.seconds, engine.outcome.tokens
        engine.run(100)
        shares.append(best * (engine.outcome.tokens - tokens) / (engine.outcome.seconds - begin))
    assert statistics.median(shares) > 0.85


def test_another_number_of_sequences_begins_with_what_is_known() -> None:
    known = Engine(FLAT_GPU, chooser(), 1)
    known.run(1500)
    known.start(2)
    begin, tokens = known.outcome.seconds, known.outcome.tokens
    known.run(60)
    new = run(FLAT_GPU, chooser(), 60, num_seqs=2)
    rate = (known.outcome.seconds - begin) / (known.outcome.tokens - tokens)
    assert rate < 0.8 * new.seconds / new.tokens


def test_the_text_changes_and_so_does_the_choice() -> None:
    world = dataclasses.replace(GPU, acceptance=switching(0.9, 0.02, every=600))
    engine = Engine(world, chooser(), 3)
    engine.run(590)
    assert engine.outcome.share(PLAIN, 60) < 0.2
    engine.run(550)
    assert engine.outcome.share(PLAIN, 300) > 0.9
    engine.run(650)
    assert engine.outcome.share(PLAIN, 60) < 0.2


def test_every_easy_text_is_taken_up() -> None:
    """Costs of earlier texts do not keep the chooser from drafting an easy text."""
    rates = []
    for seed in range(16):
        world = dataclasses.replace(GPU, acceptance=switching(0.9, 0.02, every=600))
        engine = Engine(world, chooser(), seed)
        for text in range(8):
            begin, tokens = engine.outcome.seconds, engine.outcome.tokens
            engine.run(600 * (text + 1) - tokens)
            if text % 2 == 0:
                took = engine.outcome.seconds - begin
                rates.append((engine.outcome.tokens - tokens) / took)
    assert min(rates) > 1.2 and statistics.median(rates) > 2.2


def test_other_shapes_are_not_tried_without_a_promise_when_sequences_join() -> None:
    """Steps of one sequence have shown the best shape. A first use of another captures a graph."""
    world = World(measured_h100, constant(0.8))
    shapes = shapes_of(4, 8, 32)
    _, best = best_fixed(world, 2000, num_seqs=4, shapes=shapes)
    shares = []
    for seed in range(5):
        engine = Engine(world, ShapeChooser(shapes), seed)
        engine.run(2000)
        engine.start(4)
        engine.run(60)
        begin, tokens = engine.outcome.seconds, engine.outcome.tokens
        engine.run(400)
        shares.append(
            best * (engine.outcome.tokens - tokens) / 4 / (engine.outcome.seconds - begin)
        )
    assert statistics.median(shares) > 0.95, shares


def test_a_draft_that_fails_is_given_up_at_once() -> None:
    """A draft that fails is given up within the first 100 tokens that are hard to guess."""
    lost = []
    for seed in range(10):
        world = dataclasses.replace(GPU, acceptance=switching(0.9, 0.02, every=600))
        engine = Engine(world, chooser(), seed)
        engine.run(600)
        begin, tokens = engine.outcome.seconds, engine.outcome.tokens
        engine.run(100)
        lost.append((engine.outcome.seconds - begin) / (engine.outcome.tokens - tokens))
    assert statistics.median(lost) <= 1.08


def test_the_machine_becomes_busy() -> None:
    """Other processes slow all steps down equally, so the choice must not change for long."""
    speed = [1.0]
    world = dataclasses.replace(FLAT_GPU, seconds=lambda s, n: speed[0] * gpu()(s, n))
    engine = Engine(world, chooser(), 5)
    engine.run(1000)
    speed[0] = 2.5
    engine.run(600)
    assert engine.outcome.share(PLAIN, 60) < 0.2


# ---- odd callers


def test_plain_steps_come_first_and_the_smallest_draft_next() -> None:
    shapes = run(FLAT_GPU, chooser(), 12).shapes
    assert shapes[:4] == [PLAIN] * 4
    assert next(shape for shape in shapes if shape != PLAIN) == SMALL


def test_steps_that_emit_nothing() -> None:
    """A step emits nothing if all its sequences have ended on the device."""
    choice = chooser()
    for _ in range(100):
        choice.observe(choice.choose(2), 2, 1.0, [])


def test_a_single_shape() -> None:
    choice = ShapeChooser([PLAIN])
    for _ in range(700):
        assert choice.choose(1) == PLAIN
        choice.observe(PLAIN, 1, 1.0, [1])


def test_a_tree_of_its_root_alone() -> None:
    chosen = ShapeChooser(shapes_of(4, 8, 1))
    for num_seqs in (1, 2):
        for _ in range(20):
            shape = chosen.choose(num_seqs)
            chosen.observe(shape, num_seqs, 1.0 + shape[0], [1] * num_seqs)
            chosen.may_pay(num_seqs)


def test_steps_that_are_never_observed() -> None:
    """If an engine step fails, the chooser drops the steps in flight."""
    engine = Engine(GPU, chooser(), 1)
    engine.run(400)
    for _ in range(7):
        engine.policy.choose(1)
    engine.run(400)
    assert engine.outcome.share(PLAIN, 60) < 0.2


def test_numbers_of_sequences_that_change_with_every_step() -> None:
    rng, choice, emitted, seconds = random.Random(1), chooser(), 0, 0.0
    for _ in range(3000):
        num_seqs = rng.randint(1, 12)
        shape = choice.choose(num_seqs)
        took = measured_cpu(shape, num_seqs)
        choice.observe(shape, num_seqs, took, [1 + (shape[0] > 0)] * num_seqs)
        seconds += took / num_seqs
        emitted += 1 + (shape[0] > 0)
    assert seconds <= 1.05 * emitted
