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
    put_ints,
    rounded,
    sizes,
)
from tests.reference import ops as reference


@on_devices_and_dtypes
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
@pytest.mark.parametrize(
    ("num_rows", "width"), sizes((1, 8), (3, 136), (5, 1000), (64, 4096), (131, 1536), (2, 16384))
)
def test_rms_norm(device: str, dtype: str, num_rows: int, width: int, eps: float) -> None:
    rng = np.random.default_rng(width)
    x = rounded(rng.standard_normal((num_rows, width)) * 3, dtype)
    x[0] *= 0.0625  # small, so that eps matters
    weight = rounded(rng.standard_normal(width), dtype)

    def run(device: str) -> np.ndarray:
        out = empty(device, [num_rows, width], dtype)
        ops.rms_norm(
            context(device), out, put(device, x, dtype), put(device, weight, dtype), eps=eps
        )
        return get(out)

    check(run, device, reference.rms_norm(x, weight, eps), "exact_inputs", dtype)


@on_devices_and_dtypes
def test_zero_centred_weights(device: str, dtype: str) -> None:
    rng = np.random.default_rng(4)
    x = rounded(rng.standard_normal((3, 136)), dtype)
    weight = rounded(rng.standard_normal(136) / 16, dtype)

    def run(device: str) -> np.ndarray:
        out = empty(device, [3, 136], dtype)
        arrays = put(device, x, dtype), put(device, weight, dtype)
        ops.rms_norm(context(device), out, *arrays, eps=1e-6, weight_offset=1)
        return get(out)

    check(run, device, reference.rms_norm(x, 1 + weight, 1e-6), "exact_inputs", dtype)


@on_devices_and_dtypes
def test_a_row_of_zeros_stays_zero(device: str, dtype: str) -> None:
    out = empty(device, [1, 64], dtype)
    zeros, weight = put(device, np.zeros((1, 64)), dtype), put(device, np.ones(64), dtype)
    ops.rms_norm(context(device), out, zeros, weight, eps=1e-5)
    assert not get(out).any()


@on_devices
def test_a_row_does_not_depend_on_the_others(device: str) -> None:
    x = np.random.default_rng(1).standard_normal((37, 2304))
    weight = put(device, np.ones(2304), "bfloat16")
    together = empty(device, [37, 2304], "bfloat16")
    ops.rms_norm(context(device), together, put(device, x, "bfloat16"), weight)
    for row in (0, 17, 36):
        alone = empty(device, [1, 2304], "bfloat16")
        ops.rms_norm(context(device), alone, put(device, x[row : row + 1], "bfloat16"), weight)
        assert np.array_equal(alone.numpy()[0], together.numpy()[row])


@on_devices
def test_dtypes_must_agree(device: str) -> None:
    x, weight = put(device, np.ones((1, 8)), "float16"), put(device, np.ones(8), "bfloat16")
    with pytest.raises(ValueError, match="bfloat16"):
        ops.rms_norm(context(device), empty(device, [1, 8], "float16"), x, weight)


@on_devices_and_dtypes
def test_output_into_the_first_columns_of_a_wider_matrix(device: str, dtype: str) -> None:
    x = put(device, np.random.default_rng(2).standard_normal((5, 1000)), dtype)
    weight = put(device, np.ones(1000), dtype)
    out, narrow = put(device, np.full((5, 2000), -1.0), dtype), empty(device, [5, 1000], dtype)
    ops.rms_norm(context(device), out, x, weight, out_width=1000)
    ops.rms_norm(context(device), narrow, x, weight)
    assert np.array_equal(out.numpy()[:, :1000], narrow.numpy())
    assert (get(out)[:, 1000:] == -1).all()


@on_devices_and_dtypes
def test_indexed_rows(device: str, dtype: str) -> None:
    x = put(device, np.random.default_rng(3).standard_normal((5, 1000)), dtype)
    weight = put(device, np.ones(1000), dtype)
    chosen, all_rows = empty(device, [7, 1000], dtype), empty(device, [5, 1000], dtype)
    index = [4, 0, 0, 3, 1, 4, 2]
    ops.rms_norm(context(device), chosen, x, weight, index=put_ints(device, index))
    ops.rms_norm(context(device), all_rows, x, weight)
    assert np.array_equal(chosen.numpy(), all_rows.numpy()[index])
