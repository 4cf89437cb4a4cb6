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
    put_ints,
    rounded,
    sizes,
)


@on_devices_and_dtypes
@pytest.mark.parametrize(
    ("num_rows", "heads", "dim"), sizes((1, 1, 8), (7, 3, 64), (67, 24, 128), (5, 32, 256))
)
def test_queries_grow_beyond_the_length(
    device: str, dtype: str, num_rows: int, heads: int, dim: int
) -> None:
    rng = np.random.default_rng(dim)
    qkv = rounded(rng.standard_normal((num_rows, (heads + 2) * dim)), dtype)
    positions = rng.integers(0, 50, num_rows)
    positions[0] = 10
    times = np.float32(1 + 0.25 * np.log(1 + positions // 10))
    expected = qkv.copy()
    expected[:, : heads * dim] *= times[:, None]

    def run(device: str) -> np.ndarray:
        array = put(device, qkv, dtype)
        ops.scale_queries(
            context(device), qkv=array, num_heads=heads, num_kv_heads=1, head_dim=dim, beta=0.25,
            length=10, positions=put_ints(device, positions),
        )  # fmt: skip
        below = positions < 10
        assert np.array_equal(get(array)[below], qkv[below])
        return get(array)

    check(run, device, expected, "exact_inputs", dtype)


@on_devices
def test_length_must_be_positive(device: str) -> None:
    qkv = put(device, np.ones((1, 24)), "float16")
    with pytest.raises(ValueError, match="length is 0, expected at least 1"):
        ops.scale_queries(
            context(device), qkv=qkv, num_heads=1, num_kv_heads=1, head_dim=8, beta=1.0, length=0,
            positions=put_ints(device, [0]),
        )  # fmt: skip
