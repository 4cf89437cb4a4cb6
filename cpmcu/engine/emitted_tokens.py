"""Tokens that a step of each shape emits: the expected number, and an optimistic estimate.

A level of a draft is *reached* if all levels above it were accepted. Each level has its own rate:
how often it is accepted if it is reached. Chains of all depths share their rates. A tree has rates
of its own, and those of the chain as a prior, since it holds the likeliest chain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from cpmcu.engine.shapes import PLAIN, Shape, is_chain

WINDOW = 96  # maximum number of samples that a rate counts
FADING = 0.995  # weight of earlier samples after each further step
HOPE_FADING = 0.985  # the same for the estimate `hoped`, for each step since the last sample
PRIOR = 1.5  # weight of a rate's prior, in samples
RECOVERED = 2  # first drafted steps after plain ones, which weigh less: the draft lacks tokens
AFTER_PLAIN = 0.25  # weight of the second of these steps; its square is the weight of the first
HOPE = 2.0  # samples, all accepted, that the estimate `hoped` adds

_CHAIN: Shape = PLAIN  # key of the rates that chains of all depths share


@dataclasses.dataclass(slots=True)
class _Rate:
    accepted: float = 0.0
    reached: float = 0.0  # samples, at most WINDOW
    step: int = 0  # number of the step that was added last

    def fade(self, step: int, most: float = WINDOW) -> None:
        kept = FADING ** (step - self.step)
        if self.reached * kept > most:
            kept = most / self.reached
        self.accepted, self.reached, self.step = self.accepted * kept, self.reached * kept, step

    def mixed(self, prior: float, samples: float, step: int, fading: float = FADING) -> float:
        kept = fading ** (step - self.step)
        return (self.accepted * kept + prior * samples) / (self.reached * kept + samples)


class EmittedTokens:
    """Emitted tokens per sequence and step, by shape."""

    def __init__(self) -> None:
        # Shape of a tree, or _CHAIN -> rates of its levels.
        self._levels: dict[Shape, list[_Rate]] = {}
        self._pooled = _Rate()  # the rate over all shapes and levels
        self._steps = 0
        self._drafted = RECOVERED  # number of steps in a row that drafted

    def add(self, shape: Shape, emitted: Sequence[int]) -> None:
        """Records the number of tokens that a step emitted for each of its sequences."""
        self._steps += 1
        if shape[0]:
            self._learn(shape, emitted, AFTER_PLAIN ** max(0, RECOVERED - self._drafted))
            self._drafted += 1
        else:
            self._drafted = 0

    def expected(self, shape: Shape) -> float:
        """Tokens that a step of this shape is expected to emit."""
        pooled = self._pooled.mixed(0.0, 1e-9, self._steps)
        return _tokens(self._rates(shape, pooled, PRIOR, FADING, tries=1))

    def hoped(self, shape: Shape) -> float:
        """An optimistic number of tokens of a step: higher for shapes with fewer samples."""
        pooled = self._pooled.mixed(1.0, HOPE, self._steps, HOPE_FADING)
        return _tokens(self._rates(shape, pooled, HOPE, HOPE_FADING, tries=2))

    def forget(self, samples: float, kept: Sequence[tuple[Shape, Sequence[int]]] = ()) -> None:
        """Limits the weight of earlier steps to `samples` samples.

        Then adds the steps in `kept`.
        """
        for rate in (self._pooled, *(rate for rates in self._levels.values() for rate in rates)):
            rate.fade(self._steps, samples)
        for shape, emitted in kept:
            self._learn(shape, emitted, 1.0)

    def _learn(self, shape: Shape, emitted: Sequence[int], weight: float) -> None:
        rates = self._levels.setdefault(_CHAIN if is_chain(shape) else shape, [])
        rates.extend(_Rate() for _ in range(shape[0] - len(rates)))
        for count in emitted:
            for level in range(min(count, shape[0])):
                for rate in (rates[level], self._pooled):
                    rate.fade(self._steps, WINDOW - weight)
                    rate.reached += weight
                    rate.accepted += weight * (level < count - 1)

    def _rates(
        self, shape: Shape, pooled: float, samples: float, fading: float, tries: int
    ) -> list[float]:
        """The rate of each level.

        The estimate of a tree's level begins so: each of `tries` tokens has the chain's rate.
        """
        rates = []
        above = pooled
        for level in range(shape[0]):
            above = self._rate(_CHAIN, level).mixed(above, samples, self._steps, fading)
            rates.append(above)
        if is_chain(shape):
            return rates
        wide = [1 - (1 - rate) ** tries for rate in rates]
        return [
            self._rate(shape, level).mixed(prior, samples, self._steps, fading)
            for level, prior in enumerate(wide)
        ]

    def _rate(self, shape: Shape, level: int) -> _Rate:
        rates = self._levels.get(shape, [])
        return rates[level] if level < len(rates) else _Rate()


def _tokens(rates: Sequence[float]) -> float:
    """Expected tokens of a step whose levels are accepted at these rates, if they are reached."""
    tokens = reached = 1.0
    for rate in rates:
        reached *= rate
        tokens += reached
    return tokens
