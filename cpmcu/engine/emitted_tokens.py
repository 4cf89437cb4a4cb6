"""Tokens that a step of each shape emits: the expected number, and an optimistic estimate."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from cpmcu.engine.shapes import Shape

WINDOW = 32  # samples that a mean remembers
FADING = 0.99  # factor on the weight of earlier samples, per step
PRIOR = 2.0  # samples that the acceptance of all shapes counts as, beside a shape's own
HOPE = 2.0  # samples, all accepted, that hope adds


@dataclasses.dataclass(slots=True)
class _Mean:
    value: float = 1.0
    count: float = 0.0  # at most WINDOW
    step: int = 0  # when it was last added to

    def faded(self, step: int) -> float:
        return self.count * FADING ** (step - self.step)

    def add(self, value: float, step: int) -> None:
        self.count = min(self.faded(step) + 1, WINDOW)
        self.value += (value - self.value) / self.count
        self.step = step


class EmittedTokens:
    """Emitted tokens per sequence and step, by shape.

    All shapes share one acceptance rate as a prior.
    """

    def __init__(self) -> None:
        self._means: dict[Shape, _Mean] = {}
        self._accepted = self._rejected = 0.0  # drafted tokens of all shapes
        self._steps = 0

    def add(self, shape: Shape, emitted: Sequence[int]) -> None:
        """Records the number of tokens that a step emitted for each of its sequences."""
        self._steps += 1
        self._accepted *= FADING
        self._rejected *= FADING
        if shape[0]:
            self._learn(shape, emitted)

    def expected(self, shape: Shape) -> float:
        """Tokens that a step of this shape is expected to emit."""
        drafted = self._accepted + self._rejected
        rate = self._accepted / drafted if drafted else 0.0
        return self._mixed(shape, _run_length(rate, shape[0]), PRIOR)

    def hoped(self, shape: Shape) -> float:
        """An optimistic number of tokens of a step: higher for shapes with fewer samples."""
        rate = (self._accepted + HOPE) / (self._accepted + self._rejected + HOPE)
        if shape[1] - 1 > shape[0]:  # a tree has several tries at a level
            rate = 1 - (1 - rate) ** 2
        return self._mixed(shape, _run_length(rate, shape[0]), HOPE)

    def forget(self, samples: float, kept: Sequence[tuple[Shape, Sequence[int]]] = ()) -> None:
        """Limits the weight of earlier steps to `samples` samples.

        Then adds the steps in `kept`.
        """
        for mean in self._means.values():
            mean.count, mean.step = min(mean.faded(self._steps), samples), self._steps
        drafted = self._accepted + self._rejected
        if drafted > samples:
            self._accepted *= samples / drafted
            self._rejected *= samples / drafted
        for shape, emitted in kept:
            self._learn(shape, emitted)

    def _learn(self, shape: Shape, emitted: Sequence[int]) -> None:
        mean = self._means.setdefault(shape, _Mean())
        for count in emitted:
            mean.add(count, self._steps)
            self._accepted += count - 1
            self._rejected += count <= shape[0]

    def _mixed(self, shape: Shape, value: float, samples: float) -> float:
        mean = self._means.get(shape)
        if mean is None:
            return value
        count = mean.faded(self._steps)
        return (mean.value * count + value * samples) / (count + samples)


def _run_length(rate: float, depth: int) -> float:
    """Expected tokens of a step with `depth` drafted tokens, each accepted at this rate."""
    return sum(rate**i for i in range(depth + 1))
