from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.util import (
    check,
    context,
    empty,
    get,
    on_devices,
    on_devices_and_dtypes,
    ops,
    put,
    rounded,
    sizes,
)
from tests.reference import ops as reference


@on_devices_and_dtypes
@pytest.mark.parametrize(
    ("num_rows", "width"), sizes((1, 8), (3, 136), (67, 1000), (64, 8960), (2, 16384))
)
@pytest.mark.parametrize("interleaved", [False, True])
def test_silu_mul(device: str, dtype: str, num_rows: int, width: int, interleaved: bool) -> None:
    x = rounded(np.random.default_rng(width).standard_normal((num_rows, 2 * width)) * 4, dtype)
    x[0, :4] = [0, -60, 60, -200]  # exp(200) overflows float32

    stored = x
    if interleaved:
        stored = x.reshape(num_rows, 2, width // 8, 8).swapaxes(1, 2).reshape(x.shape)

    def run(device: str) -> np.ndarray:
        out = empty(device, [num_rows, width], dtype)
        ops.silu_mul(context(device), out, put(device, stored, dtype), interleaved=interleaved)
        return get(out)

    check(run, device, reference.silu_mul(x), "exact_inputs", dtype)


@on_devices
def test_x_must_have_twice_the_columns(device: str) -> None:
    x = put(device, np.ones((1, 24)), "float16")
    with pytest.raises(ValueError, match="24"):
        ops.silu_mul(context(device), empty(device, [1, 8], "float16"), x)
