from __future__ import annotations

from typing import Any

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

SKINNY_SHAPES = sizes(
    (1, 1, 8), (2, 33, 264), (9, 20000, 72), (3, 7, 24), (5, 97, 1000), (17, 128, 4096),
    (64, 520, 1024), (1, 4096, 2560), (1, 73448, 64), (4, 256, 256), (13, 1, 16384),
    (1, 17003, 136), (27, 18944, 200), (64, 34001, 328), (3, 17000, 1032),
)  # fmt: skip
LARGE_SHAPES = sizes(
    (65, 16, 64), (1, 8, 8), (100, 264, 1000), (257, 130, 520), (512, 1024, 256), (1030, 1048, 136),
    (2, 4104, 72), (2100, 24, 40),
)  # fmt: skip


def inputs(m: int, n: int, k: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(m * 1000 + n)
    x = rounded(rng.standard_normal((m, k)), dtype)
    return x, rounded(rng.standard_normal((n, k)) / np.sqrt(k), dtype)


def multiply(op: Any, device: str, x: np.ndarray, w: np.ndarray, dtype: str, out: str) -> Any:
    y = empty(device, [len(x), len(w)], out)
    op(context(device), y, put(device, x, dtype), put(device, w, dtype))
    return y


@on_devices_and_dtypes
@pytest.mark.parametrize("float_out", [False, True])
@pytest.mark.parametrize(
    ("name", "shape"),
    [("skinny_gemm", shape) for shape in SKINNY_SHAPES]
    + [("large_gemm", shape) for shape in LARGE_SHAPES],
)
def test_gemm(
    device: str, dtype: str, float_out: bool, name: str, shape: tuple[int, int, int]
) -> None:
    x, w = inputs(*shape, dtype)
    out = "float32" if float_out else dtype

    def run(device: str) -> np.ndarray:
        return get(multiply(getattr(ops, name), device, x, w, dtype, out))

    check(run, device, x @ w.T, "gemm", out)


@on_devices_and_dtypes
@pytest.mark.parametrize("name", ["skinny_gemm", "large_gemm"])
@pytest.mark.parametrize(
    ("alpha", "beta"), [(0.5, 0.0), (1.0, 1.0), (-1.4, 0.25), (0.0, 2.0), (0.0, 0.0)]
)
@pytest.mark.parametrize("out", ["same", "float32"])
def test_alpha_and_beta(
    device: str, dtype: str, name: str, alpha: float, beta: float, out: str
) -> None:
    x, w = inputs(19, 72, 264, dtype)
    out = dtype if out == "same" else out
    y = rounded(np.random.default_rng(5).standard_normal((19, 72)), out)

    def run(device: str) -> np.ndarray:
        # If beta is 0, y is not read, so it may hold NaN.
        result = put(device, y, out) if beta else empty(device, [19, 72], out)
        x_array, w_array = put(device, x, dtype), put(device, w, dtype)
        getattr(ops, name)(context(device), result, x_array, w_array, alpha=alpha, beta=beta)
        return get(result)

    check(run, device, reference.gemm(x, w, alpha, beta, y), "gemm", out)


@on_devices_and_dtypes
@pytest.mark.parametrize("name", ["skinny_gemm", "large_gemm"])
@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize(("m", "n"), sizes((1, 72), (19, 72), (130, 72), (67, 17001)))
def test_y_as_columns_of_wider_rows(
    device: str, dtype: str, name: str, beta: float, m: int, n: int
) -> None:
    x, w = inputs(m, n, 264, dtype)
    y = rounded(np.random.default_rng(5).standard_normal((m, n + 48)), dtype)

    def run(device: str) -> np.ndarray:
        result = put(device, y, dtype)
        x_array, w_array = put(device, x, dtype), put(device, w, dtype)
        getattr(ops, name)(context(device), result, x_array, w_array, beta=beta, y_width=n)
        assert np.array_equal(get(result)[:, n:], y[:, n:])
        return get(result)[:, :n]

    check(run, device, reference.gemm(x, w, 1, beta, y[:, :n]), "gemm", dtype)


@on_devices_and_dtypes
@pytest.mark.parametrize(
    ("n", "k"), sizes((1, 8), (97, 1000), (128, 4096), (520, 256), (17003, 264))
)
def test_skinny_rows_do_not_depend_on_the_others(device: str, dtype: str, n: int, k: int) -> None:
    x, w = inputs(133, n, k, dtype)
    full = multiply(ops.skinny_gemm, device, x, w, dtype, "float32").numpy()
    for m in (1, 2, 3, 5, 7, 8, 9, 11, 13, 16, 17, 23, 31, 32, 33, 47, 48, 61, 63, 65, 128):
        begin = 133 - m  # the rows' positions in the batch change too
        part = multiply(ops.skinny_gemm, device, x[begin:], w, dtype, "float32").numpy()
        assert np.array_equal(part, full[begin:]), f"{m} rows"


@on_devices_and_dtypes
@pytest.mark.parametrize(
    ("m", "n", "k"), sizes((300, 264, 1024), (700, 1032, 520), (1100, 4104, 72), (300, 135, 264))
)
def test_large_rows_do_not_depend_on_the_others(
    device: str, dtype: str, m: int, n: int, k: int
) -> None:
    x, w = inputs(m, n, k, dtype)
    full = multiply(ops.large_gemm, device, x, w, dtype, dtype).numpy()
    for begin, end in [(0, 65), (7, 140), (100, 229), (299, 300), (5, 64), (3, 260), (1, m)]:
        part = multiply(ops.large_gemm, device, x[begin:end], w, dtype, dtype).numpy()
        assert np.array_equal(part, full[begin:end]), f"rows {begin} to {end}"


@on_devices_and_dtypes
@pytest.mark.parametrize(
    ("m", "width", "k"),
    sizes(
        (1, 8, 8), (70, 40, 264), (300, 264, 1000), (65, 24, 64), (513, 1032, 136), (260, 2056, 72),
    ),
)  # fmt: skip
def test_gated_gemm(device: str, dtype: str, m: int, width: int, k: int) -> None:
    x, w = inputs(m, 2 * width, k, dtype)

    def multiplied(device: str, begin: int, end: int) -> Any:
        out, scratch = (empty(device, [end - begin, n], dtype) for n in (width, 2 * width))
        rows, weight = put(device, x[begin:end], dtype), put(device, w, dtype)
        ops.gated_gemm(context(device), out, rows, weight, scratch)
        return out

    # The two-kernel path rounds gate and up before SiLU and the multiplication.
    expected = reference.silu_mul(x @ w.T)
    check(lambda on: get(multiplied(on, 0, m)), device, expected, "normed_gemm", dtype)
    whole = multiplied(device, 0, m).numpy()
    for begin, end in [(0, 1), (m // 3, m), (m // 2, m // 2 + 1)]:
        part = multiplied(device, begin, end).numpy()
        assert np.array_equal(part, whole[begin:end]), f"rows {begin} to {end}"


@on_devices_and_dtypes
@pytest.mark.parametrize(
    ("m", "n", "k"),
    sizes((1, 1, 8), (1, 64, 4096), (5, 33, 264), (13, 96, 5120), (32, 97, 1000), (64, 64, 2560),
          (70, 24, 136)),
)  # fmt: skip
def test_normed_gemm(device: str, dtype: str, m: int, n: int, k: int) -> None:
    x, w = inputs(m, n, k, dtype)
    x[0] *= 0.0625  # small, so that eps matters
    x = rounded(x * 3, dtype)
    weight = rounded(np.random.default_rng(k).standard_normal(k) / 4, dtype)

    def normed(device: str, begin: int = 0) -> Any:
        y = empty(device, [m - begin, n], dtype)
        rows, matrix = put(device, x[begin:], dtype), put(device, w, dtype)
        norm = put(device, weight, dtype)
        ops.normed_gemm(context(device), y, rows, matrix, norm, norm_eps=1e-3, norm_offset=1)
        return y

    expected = reference.rms_norm(x, 1 + weight, 1e-3) @ w.T
    check(lambda on: get(normed(on)), device, expected, "normed_gemm", dtype)
    whole = normed(device).numpy()
    for begin in {0, m // 3, m // 2, m - 1}:
        assert np.array_equal(normed(device, begin).numpy(), whole[begin:]), f"from row {begin}"


@on_devices
@pytest.mark.parametrize("shape", [(2, 16), (3, 12), (2, 12, 1)])
def test_gated_shapes_must_agree(device: str, shape: tuple[int, ...]) -> None:
    x, w = (put(device, np.ones(shape), "float16") for shape in ((2, 16), (24, 16)))
    scratch = empty(device, [2, 24], "float16")
    with pytest.raises(ValueError, match="gated_gemm: out is"):
        ops.gated_gemm(context(device), empty(device, list(shape), "float16"), x, w, scratch)


@on_devices_and_dtypes
def test_infinities_and_nan_stay_in_their_row(device: str, dtype: str) -> None:
    x, w = inputs(3, 40, 64, dtype)
    x[1, 5], x[2, 0] = np.nan, np.inf
    y = get(multiply(ops.skinny_gemm, device, x, w, dtype, dtype))
    assert np.isfinite(y[0]).all() and np.isnan(y[1]).all() and np.isinf(y[2]).all()


def test_subnormal_float16_weights_are_not_flushed() -> None:
    x, w = np.full((1, 16), 1024.0), np.full((1, 16), 2.0**-24)
    y = get(multiply(ops.skinny_gemm, "cpu", x, w, "float16", "float32"))
    assert y.item() == 2.0**-10


@on_devices
@pytest.mark.parametrize("name", ["skinny_gemm", "large_gemm"])
@pytest.mark.parametrize(
    ("x_shape", "w_shape", "y_shape", "dtypes"),
    [
        ((2, 16), (3, 24), (2, 3), ("float16",) * 3),  # K differs
        ((2, 16), (3, 16), (2, 4), ("float16",) * 3),  # N differs
        ((2, 12), (3, 12), (2, 3), ("float16",) * 3),  # K is not a multiple of 8
        ((2, 16), (3, 16), (2, 3), ("float16", "bfloat16", "float16")),
        ((2, 16), (3, 16), (2, 3), ("float16", "float16", "bfloat16")),
    ],
)
def test_shapes_and_dtypes_must_agree(
    device: str, name: str, x_shape: Any, w_shape: Any, y_shape: Any, dtypes: Any
) -> None:
    x, w, y = (empty(device, s, d) for s, d in zip((x_shape, w_shape, y_shape), dtypes))
    with pytest.raises(ValueError):
        getattr(ops, name)(context(device), y, x, w)
