"""Times of steps by shape and number of sequences: measured, or bounded by measured times.

A step that drafts takes the time of a plain step and an *extra* time. For an untried shape, two
bounds limit the extra time: on a GPU it grows with the drafted levels, on a CPU with levels and
nodes.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable

from cpmcu.engine.shapes import PLAIN, Shape
from cpmcu.engine.step_costs import Measured, extra, fit

RECENT = 12  # steps of a shape whose times are remembered
# Steps until a time counts: a graph is captured, kernels are loaded, caches are cold. One more, if
# the last of them was slow.
TRUSTED = 3
# Plain steps before the first draft: the number, and its maximum.
FIRST_PLAIN, MOST_FIRST_PLAIN = 4, 8
AGREEING = 1.15  # two times of a new shape agree if slower ÷ faster is at most this
DOUBTED = 8  # with fewer timed plain steps, the lower bound is the fastest of them times DOUBT
DOUBT = 0.6
# Age of a time, in steps, from which it is doubted, and from which it hardly counts.
OLD, STALE = 32, 2000
FIT_LOW, FIT_HIGH = 0.75, 1.15  # bounds of fitted extra times
REFIT = 64  # steps between two fits
LEAST_EXTRA = 0.15  # smallest extra time that predicts others, in plain steps


@dataclasses.dataclass(slots=True)
class _Times:
    recent: deque[float] = dataclasses.field(default_factory=lambda: deque(maxlen=RECENT))
    least: float = 0.0
    typical: float = 0.0
    last: int = 0  # number of the step that was added last
    plain: float = 0.0  # time of a plain step when this shape was last timed, in seconds
    trusted: bool = False

    def add(self, seconds: float, step: int, *, plain: bool) -> None:
        # The first steps of a shape become faster. If the last one is slow, another process ran.
        steps, slow = len(self.recent) + 1, seconds > AGREEING * self.least
        self.trusted |= steps > TRUSTED or (steps == TRUSTED and not slow)
        self.recent.append(seconds)
        self.last = step
        self.least = min(self.recent)
        # Other processes can only slow a step down. For the plain step the fastest time counts: if
        # plain steps seemed slower, a useless draft would look good.
        early = plain or steps <= TRUSTED + 1
        self.typical = self.least if early else sorted(self.recent)[len(self.recent) // 4]


class StepTimes:
    """Seconds of steps.

    Without any measurement, a step is assumed to take one plain step per node.
    """

    def __init__(self) -> None:
        self._by_seqs: dict[int, dict[Shape, _Times]] = {}
        self._steps = 0
        # Number of sequences -> (points, step, costs).
        self._fits: dict[int, tuple[int, int, list[float] | None]] = {}

    def add(self, shape: Shape, num_seqs: int, seconds: float) -> None:
        """Records the time of one step."""
        self._steps += 1
        times = self._by_seqs.setdefault(num_seqs, {}).setdefault(shape, _Times())
        times.add(seconds, self._steps, plain=shape == PLAIN)
        times.plain = self.plain(num_seqs) or 0.0

    def is_trusted(self, shape: Shape, num_seqs: int) -> bool:
        """Was the shape tried often enough?"""
        times = self._find(shape, num_seqs)
        return times is not None and times.trusted

    def age(self, shape: Shape, num_seqs: int) -> int:
        """Steps since the shape was last tried; 0 if it never was."""
        times = self._find(shape, num_seqs)
        return self._steps - times.last if times else 0

    def knows_plain(self, num_seqs: int) -> bool:
        """Has a plain step been timed, with this or another number of sequences?"""
        times = self._find(PLAIN, num_seqs)
        if times is None:
            return self.plain(num_seqs) is not None
        if len(times.recent) < FIRST_PLAIN:
            return False
        fastest, second = sorted(times.recent)[:2]
        return second <= AGREEING * fastest or len(times.recent) >= MOST_FIRST_PLAIN

    def plain(self, num_seqs: int) -> float | None:
        """Seconds of a plain step; None if no plain step has been timed."""
        times = self._find(PLAIN, num_seqs)
        if times is None:
            timed = [n for n, known in self._by_seqs.items() if PLAIN in known]
            nearest = self._nearest(num_seqs, timed)
            times = None if nearest is None else self._by_seqs[nearest][PLAIN]
        return None if times is None else times.typical

    def bounds(self, shape: Shape, num_seqs: int) -> tuple[float, float]:
        """Lower bound and expected value of the seconds of a step.

        Raises ValueError before the first plain step.
        """
        plain = self.plain(num_seqs)
        if plain is None:
            raise ValueError("no plain step was timed yet")
        own = self._find(shape, num_seqs)
        if own is None:
            return (plain, plain) if shape == PLAIN else self._predict(shape, num_seqs, plain)
        age = self._steps - own.last
        if shape == PLAIN:
            return (DOUBT if len(own.recent) < DOUBTED else 1) * own.least, own.typical
        if own.trusted and age <= STALE:
            if age <= OLD:
                return own.typical, own.typical
            # If plain steps became slower since (another process, a longer text), this shape did,
            # too.
            slower = max(1.0, plain / own.plain) if own.plain else 1.0
            return own.least * slower, own.typical * slower
        low, high = self._predict(shape, num_seqs, plain)
        if age > STALE:
            return min(low, own.typical), own.typical
        typical = max(plain, own.typical)  # slow because it is new, or slower than predicted
        return min(low, typical), min(typical, (typical + 3 * high) / 4)

    def _find(self, shape: Shape, num_seqs: int) -> _Times | None:
        return self._by_seqs.get(num_seqs, {}).get(shape)

    def _nearest(self, num_seqs: int, known: Iterable[int]) -> int | None:
        return min(known, key=lambda n: max(n / num_seqs, num_seqs / n), default=None)

    def _predict(self, shape: Shape, num_seqs: int, plain: float) -> tuple[float, float]:
        """Lower bound and expected value, from other shapes.

        Between two timed shapes the expected value is interpolated. Else both come from the largest
        timed shape within this one, or if there is none, from the smallest beyond it.
        """
        costs = self._costs(num_seqs)
        if costs is not None:
            more = extra(costs, shape, num_seqs, plain)
            return plain + FIT_LOW * more, plain + FIT_HIGH * more
        drafted = {
            n: [other for other in known if other != PLAIN and (other, n) != (shape, num_seqs)]
            for n, known in self._by_seqs.items()
            if PLAIN in known
        }
        nearest = self._nearest(num_seqs, [n for n, others in drafted.items() if others])
        if nearest is None:
            return plain, plain * shape[1]
        trusted = [s for s in drafted[nearest] if self.is_trusted(s, nearest)]
        others = sorted(trusted or drafted[nearest], key=lambda other: other[::-1])
        within = [s for s in others if s[0] <= shape[0] and s[1] <= shape[1]]
        other = within[-1] if within else others[0]
        known = self._by_seqs[nearest]
        measured = max(0.0, known[other].typical - known[PLAIN].typical)
        levels, nodes = shape[0] / other[0], (shape[1] - 1) / max(1, other[1] - 1)
        seqs = num_seqs / nearest
        low = plain + measured * min(levels, nodes) * min(1, seqs)
        beyond = [s for s in others if s[0] >= shape[0] and s[1] >= shape[1]]
        if within and beyond and seqs <= 1:
            top = beyond[0]
            share = (_size(shape) - _size(other)) / max(_size(top) - _size(other), 1)
            more = max(0.0, known[top].typical - known[other].typical)
            return low, plain + measured + share * more
        most = max(measured, LEAST_EXTRA * plain) * max(1, levels + nodes - 1) * max(1, seqs)
        return low, plain + most

    def _costs(self, num_seqs: int) -> list[float] | None:
        """Costs fitted to all trusted times; None if there are too few."""
        points = [
            Measured(shape, n, known[PLAIN].typical, times.typical - known[PLAIN].typical)
            for n, known in self._by_seqs.items()
            if PLAIN in known
            for shape, times in known.items()
            if shape != PLAIN and times.trusted
        ]
        found = self._fits.get(num_seqs)
        if found is None or found[0] != len(points) or self._steps > found[1] + REFIT:
            found = self._fits[num_seqs] = (len(points), self._steps, fit(points, num_seqs))
        return found[2]


def _size(shape: Shape) -> int:
    """A measure of a step's time: passes of the draft and rows of the target."""
    return 4 * shape[0] + shape[1]
