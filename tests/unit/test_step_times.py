"""Step times: measured ones, and bounds from other shapes and other numbers of sequences."""

from __future__ import annotations

import pytest
from worlds import PLAIN, SHAPES, Shape, cpu, gpu

from cpmcu.engine.step_times import StepTimes

SMALL = SHAPES[1]


def timed(*steps: tuple[Shape, int, float]) -> StepTimes:
    times = StepTimes()
    for shape, num_seqs, seconds in steps:
        times.add(shape, num_seqs, seconds)
    return times


def test_nothing_is_known_before_a_plain_step():
    times = timed((SMALL, 1, 1.0))
    assert times.plain(1) is None and not times.knows_plain(1)
    with pytest.raises(ValueError, match="plain step"):
        times.bounds(SMALL, 1)


def test_an_untried_shape_takes_up_to_a_plain_step_a_node():
    assert timed((PLAIN, 1, 2.0)).bounds(SMALL, 1) == (2.0, 4.0)


def test_slow_first_steps_do_not_count():
    times = timed(*[(PLAIN, 1, s) for s in (9.0, 4.0)])
    assert not times.knows_plain(1)
    times.add(PLAIN, 1, 1.0)
    times.add(PLAIN, 1, 1.05)
    assert times.knows_plain(1) and times.plain(1) == 1.0


def test_plain_steps_go_on_until_two_agree_but_not_for_ever():
    times = timed(*[(PLAIN, 1, 1.3**i) for i in range(7)])
    assert not times.knows_plain(1)
    times.add(PLAIN, 1, 10.0)
    assert times.knows_plain(1)


def test_a_slow_step_at_the_start_does_not_count():
    """The first two steps of a shape are slow. If the third is, too, a fourth must follow."""
    slow = [(SMALL, 1, s) for s in (3.0, 2.0, 4.0)]
    times = timed(*[(PLAIN, 1, 1.0)] * 8, *slow)
    assert not times.is_trusted(SMALL, 1)
    times.add(SMALL, 1, 1.1)
    assert times.is_trusted(SMALL, 1) and times.bounds(SMALL, 1) == (1.1, 1.1)
    times = timed(*[(PLAIN, 1, 1.0)] * 8, *slow[:2], (SMALL, 1, 1.2))
    assert times.is_trusted(SMALL, 1) and times.bounds(SMALL, 1) == (1.2, 1.2)


def test_a_shape_that_was_never_used_has_no_old_time():
    times = timed(*[(PLAIN, 1, 1.0)] * 8, *[(SMALL, 1, 1.2)] * 600)
    assert times.age(PLAIN, 1) == 600
    assert times.age(SMALL, 4) == times.age(SHAPES[2], 1) == 0


def test_spikes_do_not_count():
    times = timed(*[(PLAIN, 1, 1.0)] * 8, *[(SMALL, 1, s) for s in (50.0, 1.2, 8.0, 1.2, 1.2, 9.0)])
    low, high = times.bounds(SMALL, 1)
    assert low == high == 1.2


@pytest.mark.parametrize("seconds", [gpu(), gpu(0.1, 0.01), cpu(), cpu(0.2, 0.2)])
@pytest.mark.parametrize("num_seqs", [1, 4, 16])
def test_bounds_hold_the_true_time(seconds, num_seqs: int) -> None:
    """Bounds for every larger shape from one timed shape, and for more sequences from one."""
    for known in SHAPES[1:]:
        times = timed(*[(s, 1, seconds(s, 1)) for s in (PLAIN, known) for _ in range(8)])
        times.add(PLAIN, num_seqs, seconds(PLAIN, num_seqs))
        for shape in SHAPES[1:]:
            if shape[0] >= known[0] and shape[1] >= known[1]:
                low, high = times.bounds(shape, num_seqs)
                assert low <= seconds(shape, num_seqs) * 1.001
                assert high >= seconds(shape, num_seqs) * 0.999


def test_other_numbers_of_sequences_say_how_long_plain_steps_take():
    times = timed(*[(PLAIN, 4, 2.0)] * 8, *[(SMALL, 4, 2.5)] * 4)
    assert times.knows_plain(5) and times.plain(5) == 2.0
    low, high = times.bounds(SMALL, 8)
    assert (low, high) == (2.5, 3.0)


def test_an_old_time_is_doubted():
    times = timed(*[(PLAIN, 1, 1.0)] * 8, *[(SMALL, 1, s) for s in (1.0, 2.0, 2.0, 2.0, 2.0)])
    assert times.bounds(SMALL, 1) == (2.0, 2.0)
    for _ in range(40):
        times.add(PLAIN, 1, 1.0)
    assert times.bounds(SMALL, 1) == (1.0, 2.0)
    assert times.age(SMALL, 1) == 40
