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
@pytest.mark.parametrize(
    ("num_rows", "width", "vocab_size", "scale"),
    sizes((1, 8, 1, 1.0), (7, 72, 11, 12.0), (65, 1024, 257, 0.5), (130, 2048, 1000, 1.0)),
)
def test_embedding(
    device: str, dtype: str, num_rows: int, width: int, vocab_size: int, scale: float
) -> None:
    rng = np.random.default_rng(0)
    table = rounded(rng.standard_normal((vocab_size, width)), dtype)
    ids = rng.integers(vocab_size, size=num_rows)

    def run(device: str) -> np.ndarray:
        out = empty(device, [num_rows, width], dtype)
        ops.embedding(context(device), out, put(device, table, dtype), put_ints(device, ids), scale)
        return get(out)

    check(run, device, reference.embedding(table, ids, scale), "exact_inputs", dtype)


@on_devices
def test_ids_outside_the_vocabulary_read_row_0(device: str) -> None:
    table = np.arange(5.0)[:, None] * np.ones(16)
    out = empty(device, [5, 16], "float16")
    ids = put_ints(device, [-1, 5, 2**31 - 1, -(2**31), 4])
    ops.embedding(context(device), out, put(device, table, "float16"), ids)
    assert get(out)[:, 0].tolist() == [0, 0, 0, 0, 4]


@on_devices
def test_dtypes_must_agree(device: str) -> None:
    table, ids = put(device, np.ones((2, 8)), "bfloat16"), put_ints(device, [0])
    with pytest.raises(ValueError, match="bfloat16"):
        ops.embedding(context(device), empty(device, [1, 8], "float16"), table, ids)


@on_devices_and_dtypes
def test_output_into_the_first_columns_of_a_wider_matrix(device: str, dtype: str) -> None:
    table, ids = put(device, np.arange(5 * 16).reshape(5, 16), dtype), put_ints(device, [4, 0, 2])
    out, narrow = put(device, np.full((3, 40), -1.0), dtype), empty(device, [3, 16], dtype)
    ops.embedding(context(device), out, table, ids, 0.5, out_width=16)
    ops.embedding(context(device), narrow, table, ids, 0.5)
    assert np.array_equal(out.numpy()[:, :16], narrow.numpy())
    assert (get(out)[:, 16:] == -1).all()
