from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.util import (
    context,
    empty,
    on_devices,
    on_devices_and_dtypes,
    ops,
    put,
    put_ints,
    sizes,
)


@on_devices_and_dtypes
@pytest.mark.parametrize(
    ("num_out", "num_in", "width"), sizes((1, 1, 8), (5, 3, 136), (64, 300, 4096))
)
def test_gather_rows(device: str, dtype: str, num_out: int, num_in: int, width: int) -> None:
    rng = np.random.default_rng(0)
    x = put(device, rng.standard_normal((num_in, width)), dtype)
    index = rng.integers(num_in, size=num_out)
    out = empty(device, [num_out, width], dtype)
    ops.gather_rows(context(device), out, x, put_ints(device, index))
    assert np.array_equal(out.numpy(), x.numpy()[index])


@on_devices_and_dtypes
def test_skipped_rows_and_output_index(device: str, dtype: str) -> None:
    x = put(device, np.arange(7 * 16).reshape(7, 16), dtype)
    content = put(device, np.full((6, 24), -1.0), dtype).numpy()
    out = put(device, np.full((6, 24), -1.0), dtype)
    ops.gather_rows(
        context(device), out, x, put_ints(device, [3, -1, 0, 6]),
        out_index=put_ints(device, [5, 0, 1, 2]), num_rows=4, out_width=16,
    )  # fmt: skip
    content[[5, 1, 2], :16] = x.numpy()[[3, 0, 6]]
    assert np.array_equal(out.numpy(), content)


@on_devices_and_dtypes
def test_without_an_index(device: str, dtype: str) -> None:
    x = put(device, np.arange(7 * 16).reshape(7, 16), dtype)
    out = empty(device, [5, 16], dtype)
    ops.gather_rows(context(device), out, x, None)
    assert np.array_equal(out.numpy(), x.numpy()[:5])


@on_devices
def test_widths_must_agree(device: str) -> None:
    x, index = put(device, np.ones((2, 16)), "float16"), put_ints(device, [0])
    with pytest.raises(ValueError, match="16"):
        ops.gather_rows(context(device), empty(device, [1, 8], "float16"), x, index)
