"""Simulated engines for the chooser of shapes: step times and acceptance are known exactly.

A `World` defines the time of a step and the acceptance rate. `run` decodes with a policy and adds
up the true times. The policy sees noisy times, as from a real clock.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

Shape = tuple[int, int]  # drafted levels, nodes with the root
PLAIN: Shape = (0, 1)
SHAPES: list[Shape] = [PLAIN, (1, 2), (2, 8), (4, 8), (4, 24)]
RECOVERY = 0.6  # share of lost acceptance that is left after a drafted step


class Policy(Protocol):
    """The tested policy: cpmcu.engine.chooser.ShapeChooser, or a fixed shape."""

    def choose(self, num_seqs: int) -> Shape: ...
    def expect(self, shape: Shape, num_seqs: int, seconds: float) -> None: ...
    def observe(
        self, shape: Shape, num_seqs: int, seconds: float, emitted: Sequence[int]
    ) -> None: ...
    def forget_text(self) -> None: ...


class Fixed:
    """A chooser that always gives the same shape."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    def choose(self, num_seqs: int) -> Shape:
        return self.shape

    def expect(self, shape: Shape, num_seqs: int, seconds: float) -> None: ...

    def observe(
        self, shape: Shape, num_seqs: int, seconds: float, emitted: Sequence[int]
    ) -> None: ...

    def forget_text(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class World:
    """Times are in plain steps of one sequence."""

    seconds: Callable[[Shape, int], float]
    acceptance: Callable[[int], float]  # rate of the likeliest token, by tokens of the run
    tree_gain: float = 0.0  # how much a wide level helps: 0 as a chain
    slow_first: tuple[float, ...] = (2.0, 1.0)  # additional time of first uses of a shape
    jitter: float = 0.03  # standard deviation of a measured time, as a share of it
    spikes: float = 0.01  # steps that the clock sees last up to four times as long
    hole: float = 0.4  # acceptance rate lost right after plain steps
    launch_ahead: int = 2
    request: int = 10**9  # tokens until a sequence ends and another begins


@dataclasses.dataclass
class Outcome:
    """Time, tokens and shapes of a run."""

    seconds: float = 0.0
    tokens: int = 0  # emitted tokens of all sequences
    shapes: list[Shape] = dataclasses.field(default_factory=list)  # shape of each step

    def share(self, shape: Shape, last: int) -> float:
        return self.shapes[-last:].count(shape) / last


def gpu(level: float = 0.06, row: float = 0.005, free: int = 1) -> Callable[[Shape, int], float]:
    """Weights are read once for all rows, so more rows cost little."""

    def seconds(shape: Shape, num_seqs: int) -> float:
        rows = max(0, shape[1] * num_seqs - free)
        return 1 + level * shape[0] + row * rows

    return seconds


def cpu(row: float = 0.45, level: float = 0.8) -> Callable[[Shape, int], float]:
    """Time grows with every row, and with every row of the draft."""

    def seconds(shape: Shape, num_seqs: int) -> float:
        levels, nodes = shape
        return num_seqs * (1 + row * (nodes - 1) + level * levels)

    return seconds


def measured_cpu(shape: Shape, num_seqs: int) -> float:
    """Measured times of the shipped model on two cores: 0.42 ms a plain step."""
    table = {PLAIN: 1.0, (1, 2): 2.5, (2, 8): 7.9, (4, 8): 12.6, (4, 24): 26.0}
    return num_seqs * table[shape]


def measured_h100(shape: Shape, num_seqs: int) -> float:
    """Llama-3.1-8B with 4-bit weights: 1.90 ms plain, 2.3 a chain of 4, 2.9 a tree of 32."""
    levels, nodes = shape
    if not levels:
        return 1 + 0.002 * (num_seqs - 1)
    width = num_seqs * (1 if nodes - 1 <= levels else 8)
    milliseconds = 1.90 + 0.0185 * (nodes * num_seqs - 1) + levels * (0.085 + 0.003 * (width - 1))
    return milliseconds / 1.90


def constant(value: float) -> Callable[[int], float]:
    return lambda position: value


def switching(*values: float, every: int) -> Callable[[int], float]:
    """Acceptance of a text that alternates between easy and hard parts."""
    return lambda position: values[position // every % len(values)]


def width_exponent(world: World, shape: Shape) -> float:
    """Alternatives per level of the tree, as an exponent of the chance that all are wrong."""
    levels, nodes = shape
    return 1 + world.tree_gain * math.log2(max(1.0, (nodes - 1) / max(1, levels)))


class Engine:
    """Sequences in a world. Steps are chosen `launch_ahead` before they are observed."""

    def __init__(self, world: World, policy: Policy, seed: int, num_seqs: int = 1) -> None:
        self.world, self.policy, self.rng = world, policy, random.Random(seed)
        self.outcome = Outcome()
        self._uses: dict[tuple[Shape, int], int] = {}
        self._in_flight: deque[Shape] = deque()
        self.start(num_seqs)

    def warm_up(self, shapes: Sequence[Shape]) -> None:
        """Warm-up steps, whose sequence belongs to no request.

        Their time and tokens do not count.
        """
        for shape in shapes:
            use = self._uses[shape, 1] = self._uses.get((shape, 1), 0) + 1
            slow = self.world.slow_first[use - 1 : use]
            seconds = self.world.seconds(shape, 1) + sum(slow)
            self.policy.expect(shape, 1, seconds * math.exp(self.rng.gauss(0, self.world.jitter)))

    def start(self, num_seqs: int) -> None:
        """Replaces the sequences by new ones."""
        self.num_seqs = num_seqs
        self._holes = [0.0] * num_seqs  # share of acceptance that is missing
        self._left = [self.world.request * (i + 1) // num_seqs for i in range(num_seqs)]

    def run(self, tokens: int) -> Outcome:
        """Runs until each sequence has emitted `tokens` more tokens on average."""
        end = self.outcome.tokens + tokens * self.num_seqs
        while self.outcome.tokens < end:
            while len(self._in_flight) < self.world.launch_ahead:
                self._in_flight.append(self.policy.choose(self.num_seqs))
            self._step(self._in_flight.popleft())
        return self.outcome

    def _step(self, shape: Shape) -> None:
        world, key = self.world, (shape, self.num_seqs)
        use = self._uses[key] = self._uses.get(key, 0) + 1
        seconds = world.seconds(shape, self.num_seqs)
        if use <= len(world.slow_first):
            seconds += world.slow_first[use - 1]
        emitted = [self._emit(shape, i) for i in range(self.num_seqs)]
        self.outcome.seconds += seconds
        self.outcome.tokens += sum(emitted)
        self.outcome.shapes.append(shape)
        seen = seconds * math.exp(self.rng.gauss(0, world.jitter))
        if self.rng.random() < world.spikes:
            seen *= self.rng.uniform(1.5, 4)
        self.policy.observe(shape, self.num_seqs, seen, emitted)
        for i, count in enumerate(emitted):
            self._left[i] -= count
            if self._left[i] <= 0:
                self._left[i] = world.request
                self._holes[i] = 0.0  # a prompt is read by the draft too
                self.policy.forget_text()

    def _emit(self, shape: Shape, i: int) -> int:
        if shape == PLAIN:
            self._holes[i] = self.world.hole
            return 1
        chance = self.world.acceptance(self.outcome.tokens // self.num_seqs)
        chance = 1 - (1 - chance) ** width_exponent(self.world, shape)
        chance *= 1 - self._holes[i]
        self._holes[i] *= RECOVERY
        accepted = 0
        while accepted < shape[0] and self.rng.random() < chance:
            accepted += 1
        return 1 + accepted


def run(world: World, policy: Policy, tokens: int, *, num_seqs: int = 1, seed: int = 0) -> Outcome:
    """Decodes `tokens` tokens of each sequence."""
    return Engine(world, policy, seed, num_seqs).run(tokens)


def slowdown(
    world: World, policy: Policy, tokens: int, *, num_seqs: int = 1, seed: int = 0
) -> float:
    """Time of a run divided by the time of plain steps for the same number of tokens."""
    outcome = run(world, policy, tokens, num_seqs=num_seqs, seed=seed)
    steps = outcome.tokens / num_seqs
    plain = steps * world.seconds(PLAIN, num_seqs) + sum(world.slow_first)
    return outcome.seconds / plain


def best_fixed(
    world: World, tokens: int, *, num_seqs: int = 1, shapes: Sequence[Shape] = SHAPES
) -> tuple[Shape, float]:
    """The fastest shape if all steps use the same shape, and its seconds per token."""
    rates = {}
    for shape in shapes:
        outcome = run(world, Fixed(shape), tokens, num_seqs=num_seqs)
        rates[shape] = outcome.seconds / outcome.tokens * num_seqs
    best = min(rates, key=rates.__getitem__)
    return best, rates[best]
