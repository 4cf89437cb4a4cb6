"""Chooses how much each speculative cycle drafts: what emits the most tokens a second, as measured.

A cycle may draft up to what the engine was made for, less, or nothing (a plain step). Drafting more
emits more tokens and takes longer; which pays depends on the text, the draft, the machine and how
many sequences share the step. So every cycle is timed and its tokens are counted, the best rate
wins, and the other shapes are tried again now and then, as a bandit with a budget: what such trials
lose stays below a share of all time, so a draft that is useless costs next to nothing.

The choice changes no token: any shape emits what plain decoding would.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from cpmcu.config import num_candidates

Shape = tuple[int, int]  # tokens of the longest drafted path, nodes verified with the root

PLAIN: Shape = (0, 1)
TRIAL_BUDGET = 0.01  # of all time, that trials of worse shapes may lose
UNTIMED = 2  # first steps of a shape: a graph is captured, kernels are loaded
TIMED = 3  # steps that every shape is given before any is chosen
WINDOW = 48  # steps that a mean remembers
FADING = 0.98  # of what a mean remembers, a step in which it learns nothing
FORGETTING = 0.999  # of time and of what was lost, a step
_OUTLIER = 1.5  # more times the mean than this a step does not take by itself


def shapes_of(depth: int, topk: int, tree_size: int) -> list[Shape]:
    """The shapes worth having of trees of at most this depth, width and size; the last is that.

    A few: each is a CUDA graph, and each is tried. The deep and slim one is for text that is easy
    to guess, of which hardly anything off the likeliest path is ever accepted.
    """
    smaller = [(levels, nodes) for levels, nodes in ((1, 2), (2, 8)) if levels < depth]
    if depth > 2:
        smaller.append((depth, 2 * depth))
    drafted = [(levels, min(nodes, 1 + num_candidates(topk, levels))) for levels, nodes in smaller]
    found = {(levels, nodes) for levels, nodes in drafted if nodes < tree_size}
    return [PLAIN, *sorted(found), (depth, tree_size)]


@dataclasses.dataclass(slots=True)
class _Mean:
    """Of the last steps, the newest with the largest weight."""

    value: float = 0.0
    count: float = 0.0  # at most WINDOW
    step: int = 0  # when it was last added to

    def add(self, value: float, step: int) -> None:
        self.count = min(self.count * FADING ** (step - self.step) + 1, WINDOW)
        self.value += (value - self.value) / self.count
        self.step = step


@dataclasses.dataclass(slots=True)
class _Timing:
    """Seconds of a shape for one number of sequences."""

    seconds: _Mean = dataclasses.field(default_factory=_Mean)
    untimed: int = UNTIMED
    steps: int = 0  # that were timed
    last_used: int = 0  # step


class ShapeChooser:
    """Chooses from `shapes`, of which the last is taken while nothing is known.

    Used by one thread. Steps may be chosen before those in flight are observed.
    """

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self.shapes = list(shapes)
        self._tokens = {shape: _Mean(1.0) for shape in self.shapes}  # a sequence and step
        self._timings: dict[tuple[Shape, int], _Timing] = {}
        self._steps = 0
        self._total = self._lost = 0.0  # seconds

    def choose(self, num_seqs: int) -> Shape:
        """The shape of the next step, of so many sequences."""
        self._steps += 1
        timings = {shape: self._timing(shape, num_seqs) for shape in self.shapes}
        shape = self._next(timings, num_seqs)
        timings[shape].last_used = self._steps
        return shape

    def _next(self, timings: dict[Shape, _Timing], num_seqs: int) -> Shape:
        for shape in reversed(self.shapes):
            if timings[shape].steps < TIMED:
                return shape
        best = max(self.shapes, key=lambda shape: self._rate(shape, num_seqs))
        oldest = min(
            (shape for shape in self.shapes if shape != best),
            key=lambda shape: timings[shape].last_used,
            default=best,
        )
        allowed = TRIAL_BUDGET * self._total - self._lost
        return oldest if self._loss(oldest, best, num_seqs) <= allowed else best

    def observe(self, shape: Shape, num_seqs: int, seconds: float, emitted: Sequence[int]) -> None:
        """A step took so long and emitted so many tokens for each of its running sequences."""
        timing = self._timing(shape, num_seqs)
        for count in emitted:
            self._tokens[shape].add(count, self._steps)
        if timing.untimed > 0:
            timing.untimed -= 1
            return
        if timing.steps >= TIMED:
            seconds = min(seconds, _OUTLIER * timing.seconds.value)
        timing.seconds.add(seconds, self._steps)
        timing.steps += 1
        self._total = FORGETTING * self._total + seconds
        self._lost *= FORGETTING
        known = [s for s in self.shapes if self._timing(s, num_seqs).steps > 0]
        best = max(known, key=lambda s: self._rate(s, num_seqs))
        self._lost += self._loss(shape, best, num_seqs)

    def forget_text(self) -> None:
        """A new sequence has begun: what was accepted says less about it."""
        for mean in self._tokens.values():
            mean.count = min(mean.count, TIMED)

    def _timing(self, shape: Shape, num_seqs: int) -> _Timing:
        return self._timings.setdefault((shape, num_seqs), _Timing())

    def _rate(self, shape: Shape, num_seqs: int) -> float:
        """Tokens a second of one sequence."""
        return self._tokens[shape].value / self._timing(shape, num_seqs).seconds.value

    def _loss(self, shape: Shape, best: Shape, num_seqs: int) -> float:
        """Seconds that the best shape would have saved over one step of `shape`."""
        seconds = self._timing(shape, num_seqs).seconds.value
        return max(0.0, seconds - self._tokens[shape].value / self._rate(best, num_seqs))
