"""block_conv against its definition in float64."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.util import check, context, get, on_devices_and_dtypes, ops, put, rounded, sizes


@on_devices_and_dtypes
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(
    ("num_seqs", "num_rows", "columns", "width", "group"),
    sizes(
        (1, 1, 8, 1, 8),
        (3, 4, 64, 2, 16),
        (2, 8, 72, 3, 1),
        (1, 17, 2048, 2, 16),
        (5, 7, 40, 5, 8),
    ),
)
def test_each_block_by_itself(
    device: str,
    dtype: str,
    num_seqs: int,
    num_rows: int,
    columns: int,
    width: int,
    group: int,
    adds: bool,
) -> None:
    rng = np.random.default_rng([num_rows, columns, width])
    num_all, groups, first = num_seqs * num_rows, columns // group, 8 if adds else 0
    x = rounded(rng.standard_normal((num_all, columns)), dtype)
    base = rounded(rng.standard_normal((width, columns)), dtype)
    delta = rounded(rng.standard_normal((num_all, first + width * groups + 3)) * 0.5, dtype)
    before = rounded(rng.standard_normal((num_all, columns)), dtype)
    expected = before.copy() if adds else np.zeros_like(x)
    for row in range(num_all):
        for t in range(min(width, row % num_rows + 1)):
            of_row = delta[row, first + t * groups : first + (t + 1) * groups].repeat(group)
            expected[row] += (base[t] + of_row) * x[row - t]

    def run(device: str) -> np.ndarray:
        out = put(device, before, dtype)
        ops.block_conv(
            context(device), out=out, x=put(device, x, dtype), base=put(device, base, dtype),
            delta=put(device, delta, dtype), first=first, group=group, num_rows=num_rows, adds=adds,
        )  # fmt: skip
        return get(out)

    check(run, device, expected, "exact_inputs", dtype)


def test_refusals() -> None:
    cpu = context("cpu")
    x, base, delta = (put("cpu", np.ones(shape)) for shape in ((6, 8), (2, 8), (6, 4)))
    fields = {"x": x, "base": base, "delta": delta, "group": 4, "num_rows": 3}
    with pytest.raises(ValueError, match="out is x, expected another buffer"):
        ops.block_conv(cpu, out=x, **fields)
    with pytest.raises(ValueError, match="groups of 4 from column 1 on, expected a divisor of 8"):
        ops.block_conv(cpu, out=put("cpu", np.ones((6, 8))), **{**fields, "first": 1})
    with pytest.raises(ValueError, match="6 rows in blocks of 4"):
        ops.block_conv(cpu, out=put("cpu", np.ones((6, 8))), **{**fields, "num_rows": 4})
