"""A model of step times, fitted to measured ones: the time that a step adds to a plain step.

There are three costs, none negative: of a drafted level, of a tree's level (chains have none), and
of a verified row. The first is a share of a plain step, so it grows with the number of sequences
as plain steps do: hardly on a GPU, in proportion on a CPU. The other two are multiplied by that
number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from cpmcu.engine.shapes import Shape, is_chain

FEWEST = 3  # minimum number of measured shapes that a fit needs
_SWEEPS = 40  # rounds of coordinate descent over three costs


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """The time of one shape at one number of sequences, in seconds."""

    shape: Shape
    num_seqs: int
    plain: float  # time of a plain step
    extra: float  # time beyond the plain step


def fit(points: Sequence[Measured], num_seqs: int) -> list[float] | None:
    """The three costs; None if too few shapes were measured.

    Errors are relative. Points at about `num_seqs` sequences have the largest weight.
    """
    if len({point.shape for point in points}) < FEWEST:
        return None
    matrix = [[0.0] * 3 for _ in range(3)]
    vector = [0.0] * 3
    for point in points:
        ratio = max(point.num_seqs / num_seqs, num_seqs / point.num_seqs)
        weight = 1 / (ratio * (point.plain + point.extra)) ** 2
        features = _features(point.shape, point.num_seqs, point.plain)
        for row, feature in enumerate(features):
            vector[row] += weight * feature * point.extra
            for column, other in enumerate(features):
                matrix[row][column] += weight * feature * other
    return _descend(matrix, vector)


def extra(costs: Iterable[float], shape: Shape, num_seqs: int, plain: float) -> float:
    """Seconds of a step over those of a plain step, which takes `plain`."""
    return sum(cost * feature for cost, feature in zip(costs, _features(shape, num_seqs, plain)))


def _features(shape: Shape, num_seqs: int, plain: float) -> tuple[float, float, float]:
    levels, nodes = shape
    return levels * plain, 0.0 if is_chain(shape) else levels * num_seqs, (nodes - 1) * num_seqs


def _descend(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """Least squares without negative values.

    The first value is fitted first. So it gets the time that the points cannot assign to one value.
    """
    values = [0.0] * len(vector)
    for _ in range(_SWEEPS):
        for i, row in enumerate(matrix):
            if row[i] > 0:
                rest = sum(a * x for a, x in zip(row, values)) - row[i] * values[i]
                values[i] = max(0.0, (vector[i] - rest) / row[i])
    return values
