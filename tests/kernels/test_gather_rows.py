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


@on_devices
def test_widths_must_agree(device: str) -> None:
    x, index = put(device, np.ones((2, 16)), "float16"), put_ints(device, [0])
    with pytest.raises(ValueError, match="16"):
        ops.gather_rows(context(device), empty(device, [1, 8], "float16"), x, index)
