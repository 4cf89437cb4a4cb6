"""Which shape of draft is chosen: simulated steps, of which times and acceptance are known."""

from __future__ import annotations

import itertools
import random

import pytest

from cpmcu.engine.shapes import PLAIN, TRIAL_BUDGET, Shape, ShapeChooser, shapes_of

SHAPES: list[Shape] = [PLAIN, (1, 2), (2, 8), (4, 24)]
SMALL, MIDDLE, WHOLE = SHAPES[1:]
SLIM = (4, 8)


class Machine:
    """Steps of known duration that accept drafted tokens with a given probability each."""

    def __init__(self, seconds: dict[Shape, float], acceptance: float, seed: int = 0) -> None:
        self.seconds, self.acceptance = seconds, acceptance
        self.rng = random.Random(seed)
        self.chooser = ShapeChooser(list(seconds))
        self.time = 0.0
        self.tokens = 0
        self.used: list[Shape] = []

    def run(self, steps: int, num_seqs: int = 1) -> Machine:
        for _ in range(steps):
            shape = self.chooser.choose(num_seqs)
            emitted = []
            for _ in range(num_seqs):
                accepted = 0
                while accepted < shape[0] and self.rng.random() < self.acceptance:
                    accepted += 1
                emitted.append(1 + accepted)
            seconds = self.seconds[shape] * num_seqs ** (0.5 if shape != PLAIN else 0.1)
            seconds *= self.rng.uniform(0.95, 1.05)
            self.chooser.observe(shape, num_seqs, seconds, emitted)
            self.time += seconds
            self.tokens += sum(emitted)
            self.used.append(shape)
        return self

    def share(self, shape: Shape, last: int) -> float:
        return self.used[-last:].count(shape) / last


GPU = {PLAIN: 1.0, SMALL: 1.2, MIDDLE: 1.4, WHOLE: 1.9}
STEEP = {PLAIN: 1.0, SMALL: 1.1, MIDDLE: 1.8, WHOLE: 2.6}
CPU = {PLAIN: 1.0, SMALL: 2.5, MIDDLE: 8.0, WHOLE: 25.0}


def test_shapes():
    assert shapes_of(4, 8, 24) == [(0, 1), (1, 2), (2, 8), (4, 8), (4, 24)]
    assert shapes_of(2, 10, 12) == [(0, 1), (1, 2), (2, 12)]
    assert shapes_of(4, 1, 5) == [(0, 1), (1, 2), (2, 3), (4, 5)]
    assert shapes_of(1, 1, 2) == [(0, 1), (1, 2)]
    assert shapes_of(16, 4, 64)[-1] == (16, 64)
    assert shapes_of(6, 1, 4) == [(0, 1), (1, 2), (2, 3), (6, 4)]
    assert shapes_of(4, 2, 15) == [(0, 1), (1, 2), (2, 7), (4, 8), (4, 15)]


def test_the_engine_takes_every_shape() -> None:
    """As Engine::check_shape asks: within the largest, and no more nodes than are drafted."""
    for depth, topk in itertools.product(range(1, 17), range(1, 33)):
        for tree_size in range(2, min(64, 1 + topk + (depth - 1) * topk**2) + 1):
            shapes = shapes_of(depth, topk, tree_size)
            assert len(set(shapes)) == len(shapes) and shapes[-1] == (depth, tree_size)
            for levels, nodes in shapes[1:]:
                assert 1 <= levels <= depth and 2 <= nodes <= tree_size
                assert nodes <= 1 + topk + (levels - 1) * topk**2


def test_the_whole_draft_comes_first():
    assert ShapeChooser(SHAPES).choose(1) == WHOLE


@pytest.mark.parametrize(
    ("seconds", "acceptance", "best"),
    [
        (GPU, 0.97, WHOLE),
        (GPU, 0.0, PLAIN),
        (STEEP, 0.6, SMALL),
        (CPU, 0.9, PLAIN),
        ({**GPU, SLIM: 1.6}, 0.9, SLIM),
    ],
)
def test_the_best_shape_wins(seconds: dict[Shape, float], acceptance: float, best: Shape) -> None:
    machine = Machine(seconds, acceptance).run(1000)
    assert machine.share(best, 800) > 0.85


@pytest.mark.parametrize("seconds", [GPU, CPU])
def test_a_useless_draft_costs_next_to_nothing(seconds: dict[Shape, float]) -> None:
    machine = Machine(seconds, 0.0).run(200)
    begin, tokens = machine.time, machine.tokens
    machine.run(5000)
    plain = (machine.tokens - tokens) * seconds[PLAIN]
    assert machine.time - begin < plain * (1 + TRIAL_BUDGET + 0.005)


def test_text_changes_and_so_does_the_choice():
    machine = Machine(GPU, 0.0).run(500)
    assert machine.share(PLAIN, 200) > 0.9
    machine.acceptance = 0.95
    machine.run(3000)
    assert machine.share(WHOLE, 200) > 0.9
    machine.acceptance = 0.0
    machine.run(300)
    assert machine.share(PLAIN, 150) > 0.9


def test_the_number_of_sequences_matters():
    """Verifying trees of many sequences costs more than plain steps of as many."""
    machine = Machine(GPU, 0.97).run(500)
    assert machine.share(WHOLE, 300) > 0.85
    machine.run(500, num_seqs=30)
    assert machine.share(PLAIN, 300) > 0.85
    machine.run(100)
    assert machine.share(WHOLE, 50) > 0.85


def test_one_slow_step_does_not_decide():
    machine = Machine(GPU, 0.97).run(300)
    machine.chooser.observe(WHOLE, 1, 500.0, [5])
    machine.run(60)
    assert machine.share(WHOLE, 30) > 0.85


def test_first_steps_are_not_timed():
    """They capture graphs: here they take a thousand times as long."""
    machine = Machine(GPU, 0.97)
    for shape in SHAPES:
        for _ in range(2):
            machine.chooser.observe(shape, 1, 1000.0, [1 + shape[0]])
    machine.run(200)
    assert machine.share(WHOLE, 100) > 0.85


def test_steps_that_emit_nothing():
    """All sequences had ended on the device."""
    chooser = ShapeChooser(SHAPES)
    for _ in range(100):
        chooser.observe(chooser.choose(2), 2, 1.0, [])


def test_a_single_shape():
    chooser = ShapeChooser([PLAIN])
    for _ in range(20):
        assert chooser.choose(1) == PLAIN
        chooser.observe(PLAIN, 1, 1.0, [1])


def test_a_new_sequence_is_learnt_quickly():
    machine = Machine(GPU, 0.97).run(500)
    machine.acceptance = 0.0
    machine.chooser.forget_text()
    machine.run(40)
    assert machine.share(PLAIN, 15) > 0.85
