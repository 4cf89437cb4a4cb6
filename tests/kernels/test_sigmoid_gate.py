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


@on_devices_and_dtypes
@pytest.mark.parametrize(
    ("num_rows", "heads", "dim"), sizes((1, 1, 8), (3, 5, 64), (67, 2, 128), (64, 24, 256))
)
def test_gates_lie_between_query_heads(
    device: str, dtype: str, num_rows: int, heads: int, dim: int
) -> None:
    rng = np.random.default_rng(dim)
    x = rounded(rng.standard_normal((num_rows, heads * dim)), dtype)
    qkv = rounded(rng.standard_normal((num_rows, 2 * heads * dim + 16)) * 4, dtype)
    gate = qkv[:, : 2 * heads * dim].reshape(num_rows, heads, 2, dim)[:, :, 1]
    expected = x / (1 + np.exp(-gate.reshape(x.shape)))

    def run(device: str) -> np.ndarray:
        array = put(device, x, dtype)
        ops.sigmoid_gate(
            context(device), x=array, gates=put(device, qkv, dtype), head_dim=dim, first=dim,
            stride=2 * dim,
        )  # fmt: skip
        return get(array)

    check(run, device, expected, "exact_inputs", dtype)


@on_devices_and_dtypes
@pytest.mark.parametrize(
    ("num_rows", "heads", "dim"), sizes((1, 1, 8), (3, 5, 64), (67, 2, 128), (64, 24, 256))
)
def test_a_gate_of_a_whole_head(
    device: str, dtype: str, num_rows: int, heads: int, dim: int
) -> None:
    rng = np.random.default_rng(dim)
    x = rounded(rng.standard_normal((num_rows, heads * dim)), dtype)
    gates = rounded(rng.standard_normal((num_rows, heads)) * 4, dtype)
    expected = x / (1 + np.exp(-gates.repeat(dim, 1)))

    def run(device: str) -> np.ndarray:
        array = put(device, x, dtype)
        ops.sigmoid_gate(
            context(device), x=array, gates=put(device, gates, dtype), head_dim=dim, first=0,
            stride=1, of_heads=True,
        )  # fmt: skip
        return get(array)

    check(run, device, expected, "exact_inputs", dtype)


@on_devices
def test_gates_must_lie_within_their_row(device: str) -> None:
    x, gates = (put(device, np.ones((1, width)), "float16") for width in (16, 24))
    with pytest.raises(ValueError, match=r"gates are float16 \[1, 24\] at column 8"):
        ops.sigmoid_gate(context(device), x=x, gates=gates, head_dim=8, first=8, stride=16)
