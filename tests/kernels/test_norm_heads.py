"""norm_heads, norm_add and gated_norm: norms of groups of columns, and of a block's output."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.util import (
    check,
    context,
    get,
    on_devices,
    on_devices_and_dtypes,
    ops,
    put,
    rounded,
    sizes,
)

EPS = 0.01


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


@on_devices_and_dtypes
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(
    ("num_rows", "first", "groups", "width"),
    sizes((1, 0, 1, 8), (7, 64, 3, 64), (67, 8, 2, 512), (3, 256, 1, 5120)),
)
def test_norms_groups_of_columns(
    device: str, dtype: str, weighted: bool, num_rows: int, first: int, groups: int, width: int
) -> None:
    rng = np.random.default_rng(width)
    x = rounded(rng.standard_normal((num_rows, first + groups * width + 8)) * 3, dtype)
    weight = rounded(rng.uniform(0.5, 1.5, width), dtype)
    expected = x.copy()
    part = x[:, first : first + groups * width].reshape(num_rows, groups, width)
    by = weight + 1 if weighted else np.ones(width)
    expected[:, first : first + groups * width] = normed(part, by).reshape(num_rows, -1)

    def run(device: str) -> np.ndarray:
        array = put(device, x, dtype)
        given = {"weight": put(device, weight, dtype)} if weighted else {}
        ops.norm_heads(
            context(device), x=array, first=first, num_groups=groups, width=width, eps=EPS,
            weight_offset=1.0, **given,
        )  # fmt: skip
        return get(array)

    check(run, device, expected, "exact_inputs", dtype)


@on_devices_and_dtypes
@pytest.mark.parametrize(
    ("num_rows", "first", "groups", "width"),
    sizes((1, 0, 1, 8), (7, 64, 3, 64), (67, 8, 8, 512), (3, 256, 1, 5120)),
)
def test_norms_gated_groups(
    device: str, dtype: str, num_rows: int, first: int, groups: int, width: int
) -> None:
    rng = np.random.default_rng(width)
    columns = groups * width
    x = rounded(rng.standard_normal((num_rows, columns)) * 3, dtype)
    gate = rounded(rng.standard_normal((num_rows, first + columns + 8)) * 3, dtype)
    weight = rounded(rng.uniform(0.5, 1.5, columns), dtype)
    z = gate[:, first : first + columns]
    values = (x * z / (1 + np.exp(-z))).reshape(num_rows, groups, width)
    expected = normed(values, weight.reshape(groups, width)).reshape(num_rows, columns)

    def run(device: str) -> np.ndarray:
        array = put(device, x, dtype)
        ops.gated_norm(
            context(device), out=array, x=array, gate=put(device, gate, dtype), first_gate=first,
            weight=put(device, weight, dtype), num_groups=groups, eps=EPS,
        )  # fmt: skip
        return get(array)

    check(run, device, expected, "exact_inputs", dtype)


@on_devices
def test_a_gate_must_have_the_columns_of_x(device: str) -> None:
    x = put(device, np.ones((1, 16)), "float16")
    with pytest.raises(ValueError, match=r"gate \[1, 16\] from column 8 on; expected"):
        ops.gated_norm(context(device), out=x, x=x, gate=x, first_gate=8, weight=x)


@on_devices
def test_groups_must_lie_within_their_row(device: str) -> None:
    x = put(device, np.ones((1, 24)), "float16")
    with pytest.raises(ValueError, match=r"2 groups of 16 from column 0 on do not fit x \[1, 24\]"):
        ops.norm_heads(context(device), x=x, num_groups=2, width=16)


@on_devices_and_dtypes
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize(("num_rows", "width"), sizes((1, 8), (3, 136), (67, 4096), (2, 6656)))
def test_norm_add(device: str, dtype: str, scaled: bool, num_rows: int, width: int) -> None:
    rng = np.random.default_rng(width)
    hidden, x = (rounded(rng.standard_normal((num_rows, width)) * 3, dtype) for _ in range(2))
    weight = rounded(rng.uniform(0.5, 1.5, width), dtype)
    scale = rounded([0.7 if scaled else 1.0], dtype)
    expected = (hidden + normed(x, weight)) * scale * 0.5

    def run(device: str) -> np.ndarray:
        array = put(device, hidden, dtype)
        given = {"scale": put(device, scale, dtype)} if scaled else {}
        ops.norm_add(
            context(device), hidden=array, x=put(device, x, dtype),
            weight=put(device, weight, dtype), eps=EPS, factor=0.5, **given,
        )  # fmt: skip
        return get(array)

    check(run, device, expected, "exact_inputs", dtype)


@on_devices
def test_norm_add_wants_one_width(device: str) -> None:
    hidden, x = (put(device, np.ones((1, width)), "float16") for width in (16, 24))
    with pytest.raises(ValueError, match="expected one dtype and width"):
        ops.norm_add(context(device), hidden=hidden, x=x, weight=x)
