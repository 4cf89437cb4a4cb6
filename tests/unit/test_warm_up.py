"""Warm-up steps before the first request leave only their times."""

from __future__ import annotations

import logging

import pytest
from fake_engine import PAGE_SIZE, FakeEngine, sampling

from cpmcu.engine.runner import Runner
from cpmcu.engine.shapes import PLAIN
from cpmcu.engine.warm_up import warm_up

SHAPES = [PLAIN, (1, 2), (2, 8)]


def engine_of(**options) -> FakeEngine:
    return FakeEngine(lambda key, position: 1 + position, **options)


def test_times_of_plain_steps_and_of_the_smallest_draft():
    engine = engine_of(burst=3)
    times = warm_up(engine, PAGE_SIZE, SHAPES, sampling())
    assert [shape for shape, _ in times] == engine.shapes
    assert [engine.shapes.count(shape) for shape in SHAPES] == [6, 3, 0]
    assert all(seconds >= 0 for _, seconds in times)
    assert engine.most_in_flight == engine.launch_ahead


@pytest.mark.parametrize("shapes", [[], SHAPES], ids=["fixed", "chosen"])
def test_slot_and_pages_are_given_back(shapes):
    engine = engine_of(burst=3)
    warm_up(engine, PAGE_SIZE, shapes, sampling())
    assert engine.slots == {} and engine.num_free_pages == engine.num_pages
    assert engine.in_flight() == 0


@pytest.mark.parametrize("options", [{"max_model_len": 8}, {"num_pages": 2}, {"chunk_length": 1}])
def test_nothing_runs_without_room(options):
    engine = engine_of(**options)
    assert warm_up(engine, PAGE_SIZE, SHAPES, sampling()) == []
    assert engine.log == []


def test_it_ends_where_logits_are_not_finite():
    engine = FakeEngine(lambda key, position: -1, launch_ahead=1)
    assert len(warm_up(engine, PAGE_SIZE, SHAPES, sampling())) == 1


def test_slow_steps_end_it():
    engine = engine_of(step_seconds=0.06, launch_ahead=1)
    assert len(warm_up(engine, PAGE_SIZE, SHAPES, sampling())) <= 1


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
