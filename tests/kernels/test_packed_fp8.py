"""FP8 weight blocks: code8_pack, packed_dequantize, packed_gemm, experts."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.kernels.fp8_weights import Weights
from tests.kernels.packed import random_x, scratch_of
from tests.kernels.util import (
    check,
    context,
    empty,
    get,
    on_devices,
    on_devices_and_dtypes,
    ops,
    put,
    put_raw,
    rounded,
    sizes,
)
from tests.reference import ops as reference


def multiply(device: str, x: Any, weight: Any, n: int, dtype: str, out: str) -> Any:
    y, scratch = empty(device, [len(x), n], out), scratch_of(device, weight, len(x))
    ops.packed_gemm(context(device), y, put(device, x, dtype), weight, scratch=scratch)
    return y


SHAPES = sizes((8, 8), (1, 16), (272, 200), (97, 1000), (4624, 384), (256, 4096), (2304, 264))


@on_devices
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_pack_and_dequantise(device: str, n: int, k: int, by_row: bool) -> None:
    weights = Weights(n, k, by_row)
    weight = weights.put(device)
    first = n // 3
    out = empty(device, [n - first, k], "float16")
    ops.packed_dequantize(context(device), out, weight, first_row=first)
    assert np.array_equal(get(out), rounded(weights.values[first:], "float16"))


@on_devices
def test_every_code(device: str) -> None:
    """Subnormal codes and both zeros too; 0x7f and 0xff are NaN and never loaded."""
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128).repeat(4, 0)
    codes[(codes & 0x7F) == 0x7F] = 0
    values = torch.from_numpy(codes).view(torch.float8_e4m3fn).double().numpy()
    blocks = put_raw(device, np.zeros((1, 1, 32768 + 128), np.uint8))
    weight = ops.PackedWeight(blocks, n=8, k=128, codes="e4m3", scale_rows=8)
    scales = put(device, np.ones((1, 1)))
    ops.code8_pack(context(device), weight, put_raw(device, codes), scales, rows_per_scale=128)
    for dtype in ("float16", "bfloat16"):
        y = multiply(device, np.eye(128), weight, 8, dtype, "float32")
        assert np.array_equal(get(y), values.T), dtype


@on_devices_and_dtypes
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("m", sizes(1, 7, 16, 33, 64))
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_gemm(device: str, dtype: str, m: int, n: int, k: int, by_row: bool) -> None:
    weights, x = Weights(n, k, by_row), random_x(m, k, dtype)

    def run(device: str) -> npt.NDArray[np.float64]:
        return get(multiply(device, x, weights.put(device), n, dtype, dtype))

    check(run, device, x @ weights.values.T, "gemm", dtype)


@on_devices_and_dtypes
@pytest.mark.parametrize(
    "shape", sizes((1, 16, 128), (17, 48, 4096), (33, 4624, 384), (64, 512, 1000), (300, 272, 136))
)
def test_gated_gemm(device: str, dtype: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    weights, x = Weights(n, k, gated=True), random_x(m, k, dtype)

    def run(device: str) -> npt.NDArray[np.float64]:
        return get(multiply(device, x, weights.put(device), n // 2, dtype, dtype))

    check(run, device, reference.silu_mul(x @ weights.values.T), "gemm", dtype)


@on_devices_and_dtypes
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize(("n", "k"), sizes((8, 8), (96, 1000), (256, 4096), (2304, 256)))
def test_rows_do_not_depend_on_the_others(
    device: str, dtype: str, n: int, k: int, by_row: bool
) -> None:
    weight, x = Weights(n, k, by_row).put(device), random_x(300, k, dtype)
    full = multiply(device, x, weight, n, dtype, dtype).numpy()
    for m in (1, 2, 7, 8, 9, 16, 17, 31, 33, 47, 63, 64, 65, 130):
        part = multiply(device, x[300 - m :], weight, n, dtype, dtype).numpy()
        assert np.array_equal(part, full[300 - m :]), f"{m} rows"


@on_devices
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows_per_scale": 4}, "a scale for 4 rows"),
        ({"k_per_scale": 64}, "and 64 k"),
        ({"first_row": 4}, "from row 4 of a W that has one for 8 rows"),
        ({"first_row": 16}, "are no part of an 8-bit W"),
    ],
)
def test_parts_that_do_not_fit(device: str, change: dict[str, int], message: str) -> None:
    weights = Weights(16, 256)
    weight, (codes, scales) = weights.put(device), weights.parts[0]
    codes = codes[:8]
    settings = {"rows_per_scale": 128, "k_per_scale": 128, **change}
    with pytest.raises(ValueError, match=message):
        ops.code8_pack(
            context(device), weight, put_raw(device, codes), put(device, scales), **settings
        )
