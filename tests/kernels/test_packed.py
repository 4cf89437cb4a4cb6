"""Packed weights: int4_pack of each file layout, packed_quantize, _dequantize and _gemm."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cpmcu.quant import packing
from tests.kernels.packed import U8, Weights, random_x, scratch_of
from tests.kernels.util import (
    check,
    context,
    empty,
    encode,
    get,
    on_devices,
    on_devices_and_dtypes,
    ops,
    put,
    put_ints,
    put_raw,
    rounded,
    sizes,
)
from tests.reference import ops as reference
from tests.reference import packing as layouts

FORMATS = {"gptq": 0, "gptq_v2": 1, "awq": 2, "compressed": 3, "marlin": 4}
# M, N, K
SHAPES = sizes(
    (1, 1, 128), (3, 257, 200), (64, 130, 264), (2, 255, 72), (5, 97, 1000), (17, 40, 4096),
    (1, 4608, 512), (1, 256, 16384), (31, 13, 8), (16, 64, 128), (61, 300, 640), (127, 33, 264),
    (128, 264, 384), (1, 2560, 1152),
)  # fmt: skip


def multiply(
    device: str, x: npt.NDArray[Any], weight: Any, n: int, dtype: str, out: str, **scale: float
) -> Any:
    y = empty(device, [len(x), n], out)
    scratch = scratch_of(device, weight, len(x))
    ops.packed_gemm(context(device), y, put(device, x, dtype), weight, scratch=scratch, **scale)
    return y


# ---- packed_gemm


@on_devices_and_dtypes
@pytest.mark.parametrize("float_out", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_gemm(device: str, dtype: str, float_out: bool, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    scale_dtype = "bfloat16" if dtype == "bfloat16" else "float16"
    weights = Weights(k, n, scale_dtype)
    x, out = random_x(m, k, dtype), "float32" if float_out else dtype

    def run(device: str) -> npt.NDArray[np.float64]:
        return get(multiply(device, x, weights.put(device), n, dtype, out))

    check(run, device, x @ weights.values.T, "gemm", out)


@on_devices_and_dtypes
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(
    "shape",
    sizes(
        (1, 16, 128), (3, 272, 200), (17, 48, 4096), (33, 4624, 384), (64, 512, 1000), (2, 528, 8)
    ),
)
def test_gated_gemm(device: str, dtype: str, has_zeros: bool, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    weights = Weights(k, n, has_zeros=has_zeros, gated=True)
    x = random_x(m, k, dtype)

    def run(device: str) -> npt.NDArray[np.float64]:
        return get(multiply(device, x, weights.put(device), n // 2, dtype, dtype))

    check(run, device, reference.silu_mul(x @ weights.values.T), "gemm", dtype)
    one = get(multiply(device, x[-1:], weights.put(device), n // 2, dtype, dtype))
    assert np.array_equal(one[0], run(device)[-1])


@on_devices
def test_gated_weights_need_alpha_1_and_a_multiple_of_16_rows(device: str) -> None:
    weights = Weights(128, 32, gated=True)
    with pytest.raises(ValueError, match="alpha 2"):
        multiply(device, np.ones((1, 128)), weights.put(device), 16, "float16", "float16", alpha=2)
    with pytest.raises(ValueError, match="24 rows, expected a multiple of 16"):
        odd = Weights(128, 24, gated=False)
        odd_weight = ops.PackedWeight(put_raw(device, odd.blocks), n=24, k=128, gated=True)
        multiply(device, np.ones((1, 128)), odd_weight, 12, "float16", "float16")


@on_devices_and_dtypes
@pytest.mark.parametrize("scale_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("channel_wise", [False, True])
@pytest.mark.parametrize("m", sizes(1, 7, 40))
def test_kinds_of_scales(
    device: str, dtype: str, scale_dtype: str, has_zeros: bool, channel_wise: bool, m: int
) -> None:
    weights = Weights(520, 270, scale_dtype, channel_wise, has_zeros)
    x = random_x(m, 520, dtype)

    def run(device: str) -> npt.NDArray[np.float64]:
        return get(multiply(device, x, weights.put(device), 270, dtype, dtype))

    check(run, device, x @ weights.values.T, "gemm", dtype)


@on_devices_and_dtypes
@pytest.mark.parametrize(
    ("alpha", "beta"), [(0.5, 0.0), (1.0, 1.0), (-1.4, 0.25), (0.0, 2.0), (0.0, 0.0)]
)
@pytest.mark.parametrize("out", ["same", "float32"])
def test_alpha_and_beta(device: str, dtype: str, alpha: float, beta: float, out: str) -> None:
    weights, x = Weights(264, 72), random_x(19, 264, dtype)
    out = dtype if out == "same" else out
    y = rounded(np.random.default_rng(5).standard_normal((19, 72)), out)

    def run(device: str) -> npt.NDArray[np.float64]:
        # If beta is 0, y is not read, so it may hold NaN.
        result = put(device, y, out) if beta else empty(device, [19, 72], out)
        weight = weights.put(device)
        ops.packed_gemm(
            context(device),
            result,
            put(device, x, dtype),
            weight,
            alpha=alpha,
            beta=beta,
            scratch=scratch_of(device, weight, 19),
        )
        return get(result)

    check(run, device, reference.gemm(x, weights.values, alpha, beta, y), "gemm", out)


@on_devices_and_dtypes
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(("n", "k"), sizes((1, 8), (97, 1000), (256, 4096), (2304, 256)))
def test_rows_do_not_depend_on_the_others(
    device: str, dtype: str, has_zeros: bool, n: int, k: int
) -> None:
    weight, x = Weights(k, n, has_zeros=has_zeros).put(device), random_x(64, k, dtype)
    full = multiply(device, x, weight, n, dtype, "float32").numpy()
    for m in (1, 2, 3, 5, 7, 8, 9, 11, 13, 16, 17, 23, 31, 32, 33, 47, 48, 61, 63):
        begin = 64 - m  # the rows' positions in the batch change too
        part = multiply(device, x[begin:], weight, n, dtype, "float32").numpy()
        assert np.array_equal(part, full[begin:]), f"{m} rows"
    more = multiply(device, np.concatenate([x[:1], x]), weight, n, dtype, "float32").numpy()
    assert np.array_equal(more[1:], full)


@on_devices_and_dtypes
@pytest.mark.parametrize("kind", ["plain", "zeros", "gated"])
@pytest.mark.parametrize(
    "shape",
    sizes(
        (65, 16, 8), (131, 528, 384), (300, 256, 4096), (67, 272, 200), (129, 4624, 640),
        (257, 17168, 264), (1025, 320, 264), (66, 112, 136), (2100, 32, 128), (80, 1040, 1000),
    ),
)  # fmt: skip
def test_more_than_64_rows(device: str, dtype: str, kind: str, shape: tuple[int, int, int]) -> None:
    """The kernel for more than 64 rows is right and gives the bits of blocks of 64 rows."""
    m, n, k = shape
    weights = Weights(k, n, has_zeros=kind == "zeros", gated=kind == "gated")
    x, width = random_x(m, k, dtype), n // 2 if weights.gated else n
    y = rounded(np.random.default_rng(m).standard_normal((m, width)), dtype)
    scale = {} if weights.gated else {"alpha": 0.7, "beta": -0.5}

    def multiplied(device: str, begin: int, end: int) -> Any:
        weight = weights.put(device)
        # A gated y is not read, so it may hold NaN.
        rows = y[begin:end] if scale else np.full((end - begin, width), np.nan)
        result, scratch = put(device, rows, dtype), scratch_of(device, weight, end - begin)
        given = put(device, x[begin:end], dtype)
        ops.packed_gemm(context(device), result, given, weight, scratch=scratch, **scale)
        return result

    product = x @ weights.values.T
    expected = 0.7 * product - 0.5 * y if scale else reference.silu_mul(product)
    check(lambda on: get(multiplied(on, 0, m)), device, expected, "gemm", dtype)
    whole = multiplied(device, 0, m).numpy()
    for begin in range(0, m, 64):
        part = multiplied(device, begin, min(begin + 64, m)).numpy()
        assert np.array_equal(part, whole[begin : begin + 64]), f"rows from {begin}"
    # A row's bits do not depend on its position either.
    later = multiplied(device, 1, m).numpy()
    assert np.array_equal(later, whole[1:])


@on_devices_and_dtypes
@pytest.mark.parametrize("m", sizes(1, 16, 64, 7, 17))
def test_each_launch_reads_what_the_one_before_wrote(device: str, dtype: str, m: int) -> None:
    """Launches overlap in a graph: CTAs of the next start while those of one multiply.

    K is cut into 2 and into 8 slices, which have more k blocks than a CTA has stages.
    """
    widths = [256, 8192 if device == "cuda" else 512]
    weights = [Weights(widths[i], widths[1 - i]).put(device) for i in range(2)]
    scratch = [scratch_of(device, weight, m) for weight in weights]
    steps = 10
    rows = [put(device, random_x(m, widths[0], dtype), dtype)]
    rows += [empty(device, [m, widths[1 - i % 2]], dtype) for i in range(steps)]

    def step(i: int, y: Any) -> None:
        ops.packed_gemm(
            context(device), y, rows[i], weights[i % 2], alpha=0.4, scratch=scratch[i % 2]
        )

    def all_steps() -> None:
        for i in range(steps):
            step(i, rows[i + 1])

    if device == "cuda":
        context(device).graph(all_steps).replay(3)
    else:
        all_steps()
    for i in range(steps):
        alone = empty(device, [m, widths[1 - i % 2]], dtype)
        step(i, alone)
        assert np.array_equal(alone.numpy(), rows[i + 1].numpy()), f"launch {i}"
    last = get(rows[-1])
    assert np.all(np.isfinite(last)) and np.std(last) > 0


@on_devices_and_dtypes
@pytest.mark.parametrize("has_zeros", [False, True])
def test_infinities_and_nan_stay_in_their_row(device: str, dtype: str, has_zeros: bool) -> None:
    weights, x = Weights(264, 40, has_zeros=has_zeros), random_x(4, 264, dtype)
    x[1, 5], x[2, 0], x[3, 200] = np.nan, np.inf, -np.inf
    y = get(multiply(device, x, weights.put(device), 40, dtype, dtype))
    assert np.isfinite(y[0]).all() and np.isnan(y[1]).all()
    assert not np.isfinite(y[2]).any() and not np.isfinite(y[3]).any()


# ---- int4_pack


def stored(weights: Weights, name: str, q: U8, group: slice, columns: slice) -> dict[str, Any]:
    """The arrays of a checkpoint with a part of the weights."""
    scales = weights.scales if weights.channel_wise else weights.scales[group]
    zeros = weights.zeros
    if zeros is not None:
        zeros = (zeros if weights.channel_wise else zeros[group])[:, columns]
    scales = scales[:, columns]
    if name == "compressed":
        arrays = {"q": layouts.pack_compressed(q), "scales": np.ascontiguousarray(scales.T)}
        if zeros is not None:
            arrays["zeros"] = layouts.pack_compressed_zeros(zeros)
    elif name == "marlin":
        ordered = packing.marlin_scales(scales, channel_wise=weights.channel_wise)
        arrays = {"q": packing.pack_marlin(q), "scales": ordered}
    elif name == "awq":
        arrays = {"q": layouts.pack_awq(q), "scales": scales}
        if zeros is not None:
            arrays["zeros"] = layouts.pack_awq(zeros)
    else:
        arrays = {"q": packing.pack_gptq(q), "scales": scales}
        if zeros is not None:
            arrays["zeros"] = packing.pack_gptq_zeros(zeros, 2 if name == "gptq_v2" else 1)
    return arrays


def put_part(device: str, weights: Weights, arrays: dict[str, Any]) -> dict[str, Any]:
    made = {name: put_raw(device, array) for name, array in arrays.items() if name != "scales"}
    scales = np.ascontiguousarray(arrays["scales"])
    made["scales"] = ops.Array(context(device), list(scales.shape), weights.scale_dtype)
    made["scales"].copy_from(scales)
    return made


@on_devices
@pytest.mark.parametrize("channel_wise", [False, True])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(
    ("name", "k", "n"),
    [
        (name, k, n)
        for name in FORMATS
        for k, n in sizes((128, 64), (272, 320), (1040, 576), (16, 64), (2048, 1024))
    ]
    + [("gptq", 72, 8), ("awq", 136, 264), ("compressed", 200, 257), ("compressed", 13, 1)],
)
def test_pack(device: str, name: str, k: int, n: int, has_zeros: bool, channel_wise: bool) -> None:
    if name == "marlin" and (has_zeros or (channel_wise and k <= 128)):
        pytest.skip(
            "Marlin files have no zero points, and no channel-wise scales if K is at most 128"
        )
    scale_dtype = "bfloat16" if n % 128 else "float16"
    weights = Weights(k, n, scale_dtype, channel_wise, has_zeros)
    blocks, weight = weights.empty(device)
    arrays = stored(weights, name, weights.q, slice(None), slice(None))
    ops.int4_pack(context(device), weight, FORMATS[name], **put_part(device, weights, arrays))
    assert np.array_equal(blocks.numpy(), weights.blocks)


@on_devices
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_pack_in_parts(device: str, name: str, has_zeros: bool) -> None:
    """Parts of rows (q, k and v) and parts of K (EAGLE's fc)."""
    if name == "marlin" and has_zeros:
        pytest.skip("Marlin files have no zero points")
    weights = Weights(400, 64 + 192 + 320, has_zeros=has_zeros)
    blocks, weight = weights.empty(device)
    for first_row, n in ((256, 320), (0, 64), (64, 192)):
        for first_k, k in ((128, 272), (0, 128)):
            columns = slice(first_row, first_row + n)
            group = slice(first_k // 128, -(-(first_k + k) // 128))
            q = weights.q[first_k : first_k + k, columns]
            part = put_part(device, weights, stored(weights, name, q, group, columns))
            where = {"first_row": first_row, "first_k": first_k, "n": n, "k": k}
            ops.int4_pack(context(device), weight, FORMATS[name], **part, **where)
    assert np.array_equal(blocks.numpy(), weights.blocks)


@on_devices
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_pack_gated(device: str, name: str, has_zeros: bool, fused: bool) -> None:
    """Gate and up as two tensors or one; 320 rows each, so they end inside weight blocks."""
    if name == "marlin" and has_zeros:
        pytest.skip("Marlin files have no zero points")
    weights = Weights(400, 640, has_zeros=has_zeros, gated=True)
    blocks, weight = weights.empty(device)
    for first_row, n in ((0, 640),) if fused else ((320, 320), (0, 320)):
        columns = slice(first_row, first_row + n)
        arrays = stored(weights, name, weights.q[:, columns], slice(None), columns)
        part = put_part(device, weights, arrays)
        ops.int4_pack(context(device), weight, FORMATS[name], **part, first_row=first_row, n=n)
    assert np.array_equal(blocks.numpy(), weights.blocks)


@on_devices
def test_gptq_zero_points_wrap(device: str) -> None:
    """GPTQ version 1 stores z - 1, so a stored 15 means 0."""
    weights = Weights(128, 16, has_zeros=True)
    assert weights.zeros is not None
    weights.zeros[:] = np.arange(16)
    blocks, weight = weights.empty(device)
    arrays = stored(weights, "gptq", weights.q, slice(None), slice(None))
    ops.int4_pack(context(device), weight, 0, **put_part(device, weights, arrays))
    assert blocks.numpy()[0, 0, 16896:16912].tolist() == list(range(16))


# ---- packed_quantize, packed_dequantize


@on_devices_and_dtypes
@pytest.mark.parametrize("scale_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(("n", "k"), sizes((1, 128), (257, 200), (40, 1000), (300, 72)))
def test_dequantize(
    device: str, dtype: str, scale_dtype: str, has_zeros: bool, n: int, k: int
) -> None:
    weights = Weights(k, n, scale_dtype, has_zeros=has_zeros)
    weight, expected = weights.put(device), encode(weights.values, dtype)
    for first, count in ((0, n), (n // 2, n - n // 2), (n - 1, 1)):
        out = empty(device, [count, k], dtype)
        ops.packed_dequantize(context(device), out, weight, first)
        assert np.array_equal(out.numpy(), expected[first : first + count])


@on_devices_and_dtypes
@pytest.mark.parametrize("scale_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("nibble_planes", [1, 2])
@pytest.mark.parametrize(("n", "k"), sizes((1, 8), (257, 200), (64, 1024), (300, 72)))
@pytest.mark.parametrize("indexed", [False, True])
def test_quantize(
    device: str, dtype: str, scale_dtype: str, nibble_planes: int, n: int, k: int, indexed: bool
) -> None:
    rng = np.random.default_rng(n)
    x = rng.standard_normal((n + 5 if indexed else n, k)) * rng.uniform(0.01, 2, (1, k))
    x[0] = 0
    x = rounded(x, dtype)
    index = rng.permutation(len(x))[:n] if indexed else np.arange(n)
    blocks = empty(device, [-(-n // 256), nibble_planes * -(-k // 128), 16896], "uint8")
    weight = ops.PackedWeight(blocks, n=n, k=k, planes=nibble_planes, scale_dtype=scale_dtype)
    put_index = put_ints(device, index) if indexed else None
    ops.packed_quantize(context(device), weight, put(device, x, dtype), put_index)
    out = empty(device, [n, k], dtype)
    ops.packed_dequantize(context(device), out, weight)
    got, wanted = get(out), x[index]
    levels = 7 if nibble_planes == 1 else 119
    scale_error = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[scale_dtype]
    for begin in range(0, k, 128):
        part = slice(begin, begin + 128)
        largest = np.abs(wanted[:, part]).max(axis=1, keepdims=True)
        step = largest / levels
        # The bound adds half a level, the rounding of the scale and the rounding of the result.
        rounding = {"float32": 0, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
        most = step * 0.501 * (1 + scale_error) + largest * (scale_error + rounding) + 1e-6
        assert (np.abs(got[:, part] - wanted[:, part]) <= most).all()
    # The padding beyond N and K has q 8 and scale 0.
    raw = blocks.numpy()
    half = nibble_planes * -(-k // 128) // nibble_planes
    for plane in range(nibble_planes):
        q, scales, _ = layouts.unpack_blocks(
            np.ascontiguousarray(raw[:, plane * half : (plane + 1) * half]),
            128 * half,
            256 * len(raw),
            np.uint16,
        )
        assert (q[k:] == 8).all() and (q[:, n:] == 8).all() and (scales[:, n:] == 0).all()


@on_devices_and_dtypes
@pytest.mark.parametrize("nibble_planes", [1, 2])
@pytest.mark.parametrize(("n", "k"), sizes((16, 8), (272, 200), (48, 1024)))
def test_quantize_gate_and_up(device: str, dtype: str, nibble_planes: int, n: int, k: int) -> None:
    """The blocks are those of an ungated W whose rows lie in stored order."""
    x = rounded(np.random.default_rng(n).standard_normal((n, k)), dtype)
    rows = np.arange(n)
    stored = rows // 8 % 2 * (n // 2) + rows // 16 * 8 + rows % 8

    def blocks(rows: npt.NDArray[np.float64], gated: bool) -> npt.NDArray[np.uint8]:
        made = empty(device, [-(-n // 256), nibble_planes * -(-k // 128), 16896], "uint8")
        weight = ops.PackedWeight(made, n=n, k=k, planes=nibble_planes, gated=gated)
        ops.packed_quantize(context(device), weight, put(device, rows, dtype))
        return made.numpy()

    assert np.array_equal(blocks(x, True), blocks(x[stored], False))


@on_devices_and_dtypes
@pytest.mark.parametrize("shape", sizes((1, 1, 128), (5, 257, 200), (33, 40, 1000), (64, 300, 72)))
def test_eight_bit_gemm(device: str, dtype: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    x = random_x(m, k, dtype)
    w = rounded(np.random.default_rng(n).standard_normal((n, k)) / np.sqrt(k), dtype)

    def run(device: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        blocks = empty(device, [-(-n // 256), 2 * -(-k // 128), 16896], "uint8")
        weight = ops.PackedWeight(blocks, n=n, k=k, planes=2)
        ops.packed_quantize(context(device), weight, put(device, w, dtype))
        out = empty(device, [n, k], "float32" if device == "cpu" else dtype)
        ops.packed_dequantize(context(device), out, weight)
        return get(multiply(device, x, weight, n, dtype, "float32")), get(out)

    _, values = run("cpu")
    assert np.abs(values - w).max() <= np.abs(w).max() * 0.006
    check(lambda device: run(device)[0], device, x @ values.T, "gemm", "float32")


# ---- refused shapes and dtypes


@on_devices
@pytest.mark.parametrize(
    ("x_shape", "y_shape", "dtypes"),
    [
        ((2, 136), (2, 72), ("float16", "float16")),  # K differs
        ((2, 264), (2, 64), ("float16", "float16")),  # N differs
        ((2, 264), (3, 72), ("float16", "float16")),  # M differs
        ((2, 264), (2, 72), ("float16", "bfloat16")),
        ((2, 264), (2, 72), ("int32", "int32")),
    ],
)
def test_gemm_shapes_and_dtypes_must_agree(
    device: str, x_shape: Any, y_shape: Any, dtypes: Any
) -> None:
    weight = Weights(264, 72).put(device)
    x, y = (empty(device, s, d) for s, d in zip((x_shape, y_shape), dtypes))
    with pytest.raises(ValueError, match="packed_gemm"):
        ops.packed_gemm(context(device), y, x, weight, scratch=scratch_of(device, weight, 2))


@on_devices
def test_k_must_be_a_multiple_of_8(device: str) -> None:
    weight = Weights(132, 8).put(device)
    x, y = empty(device, [1, 132], "float16"), empty(device, [1, 8], "float16")
    with pytest.raises(ValueError, match="multiple of 8"):
        ops.packed_gemm(context(device), y, x, weight, scratch=scratch_of(device, weight, 1))


@on_devices
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("wrong", ["q", "scales", "zeros", "dtype", "rows", "k"])
def test_pack_shapes_must_agree(device: str, name: str, wrong: str) -> None:
    weights = Weights(384, 128)
    _, weight = weights.empty(device)
    arrays = stored(weights, name, weights.q, slice(None), slice(None))
    where = {}
    if wrong in arrays:
        arrays[wrong] = arrays[wrong][:-1]
    elif wrong == "zeros":
        arrays["zeros"] = np.zeros((3, 16), np.int32)
    elif wrong == "dtype":
        arrays["q"] = arrays["q"].astype(np.int64)
    else:
        where = {"first_row": 64} if wrong == "rows" else {"first_k": 64, "k": 320}
    with pytest.raises(ValueError, match="int4_pack"):
        ops.int4_pack(
            context(device), weight, FORMATS[name], **put_part(device, weights, arrays), **where
        )


@on_devices
def test_quantize_and_dequantize_shapes_must_agree(device: str) -> None:
    weights = Weights(256, 128)
    weight, ctx = weights.put(device), context(device)
    for shape in ([127, 256], [128, 248], [128]):
        with pytest.raises(ValueError, match="packed_quantize"):
            ops.packed_quantize(ctx, weight, empty(device, shape, "float16"))
    for shape, first in (([129, 256], 0), ([128, 256], 1), ([1, 248], 0)):
        with pytest.raises(ValueError, match="packed_dequantize"):
            ops.packed_dequantize(ctx, empty(device, shape, "float16"), weight, first)
    with pytest.raises(ValueError, match="bytes"):
        ops.PackedWeight(empty(device, [16895], "uint8"), n=1, k=128)
    with pytest.raises(ValueError, match="expected memory, a size, and 1 or 2 planes"):
        blocks = empty(device, [3 * 16896], "uint8")
        ops.packed_quantize(
            ctx,
            ops.PackedWeight(blocks, n=1, k=8, planes=3),
            empty(device, [1, 8], "float16"),
        )
