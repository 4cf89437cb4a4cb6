"""Warm-up steps before the first request leave only their times."""

from __future__ import annotations

import logging

import pytest
from fake_engine import PAGE_SIZE, FakeEngine, sampling

from cpmcu.engine.chooser import ShapeChooser
from cpmcu.engine.runner import Runner
from cpmcu.engine.shapes import PLAIN, Shape
from cpmcu.engine.warm_up import warm_up

SHAPES = [PLAIN, (1, 2), (2, 8)]


def engine_of(**options) -> FakeEngine:
    return FakeEngine(lambda key, position: 1 + position, **options)


class Timed(ShapeChooser):
    """Keeps the times that it is told."""

    def __init__(self, seconds: dict[Shape, float] | None = None) -> None:
        super().__init__(SHAPES)
        self.times: list[Shape] = []
        self.seconds = seconds

    def expect(self, shape: Shape, num_seqs: int, seconds: float) -> None:
        assert num_seqs == 1 and seconds >= 0
        self.times.append(shape)
        super().expect(shape, 1, seconds if self.seconds is None else self.seconds[shape])


def test_times_of_all_shapes():
    engine, chooser = engine_of(burst=3), Timed(dict.fromkeys(SHAPES, 1.0))
    warm_up(engine, PAGE_SIZE, chooser, sampling())
    assert chooser.times == engine.shapes
    assert [engine.shapes.count(shape) for shape in SHAPES] == [6, 3, 3]
    assert engine.most_in_flight == engine.launch_ahead


def test_a_draft_that_cannot_pay_is_not_timed():
    engine, chooser = engine_of(burst=3), Timed({PLAIN: 1.0, (1, 2): 3.0})
    warm_up(engine, PAGE_SIZE, chooser, sampling())
    assert [engine.shapes.count(shape) for shape in SHAPES] == [6, 3, 0]


def test_room_for_the_smallest_draft_only():
    engine, chooser = engine_of(burst=3, max_model_len=32), Timed(dict.fromkeys(SHAPES, 1.0))
    warm_up(engine, PAGE_SIZE, chooser, sampling())
    assert [engine.shapes.count(shape) for shape in SHAPES] == [6, 3, 0]


@pytest.mark.parametrize("chooser", [None, ShapeChooser(SHAPES)], ids=["fixed", "chosen"])
def test_slot_and_pages_are_given_back(chooser):
    engine = engine_of(burst=3)
    warm_up(engine, PAGE_SIZE, chooser, sampling())
    assert engine.slots == {} and engine.num_free_pages == engine.num_pages
    assert engine.in_flight() == 0


@pytest.mark.parametrize("options", [{"max_model_len": 8}, {"num_pages": 2}, {"chunk_length": 1}])
def test_nothing_runs_without_room(options):
    engine, chooser = engine_of(**options), Timed()
    warm_up(engine, PAGE_SIZE, chooser, sampling())
    assert engine.log == [] and chooser.times == []


def test_it_ends_where_logits_are_not_finite():
    engine, chooser = FakeEngine(lambda key, position: -1, launch_ahead=1), Timed()
    warm_up(engine, PAGE_SIZE, chooser, sampling())
    assert len(chooser.times) == 1


def test_slow_steps_end_it():
    engine, chooser = engine_of(step_seconds=0.06, launch_ahead=1), Timed()
    warm_up(engine, PAGE_SIZE, chooser, sampling())
    assert len(chooser.times) <= 1


@pytest.mark.parametrize("method", ["add_sequence", "prefill", "decode"])
def test_an_engine_that_fails_is_emptied(method, caplog):
    engine = engine_of()
    engine.fail_on[method] = RuntimeError("the device is gone")
    runner = Runner(engine, page_size=PAGE_SIZE, shapes=SHAPES)
    try:
        with caplog.at_level(logging.WARNING):
            runner.warm_up(sampling())
        assert "could not be warmed up: the device is gone" in caplog.text
        assert runner.is_open and runner.call(lambda e: e.slots) == {}
    finally:
        runner.close()
