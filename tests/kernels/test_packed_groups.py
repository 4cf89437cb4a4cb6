"""Weight blocks with scales for small groups of k: packing, packed_dequantize, packed_gemm."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.kernels.group_weights import FLOATS, KINDS, FloatWeights, make_weights, whole
from tests.kernels.packed import random_x, scratch_of
from tests.kernels.test_experts import expert_inputs, grouped, random_logits, route
from tests.kernels.test_sorted_experts import needs_sorted_gemm, sorted_pairs
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
from tests.reference.float_groups import GROUPS, dequantise


def multiply(device: str, x: Any, weight: Any, n: int, dtype: str, out: str) -> Any:
    y, scratch = empty(device, [len(x), n], out), scratch_of(device, weight, len(x))
    ops.packed_gemm(context(device), y, put(device, x, dtype), weight, scratch=scratch)
    return y


SHAPES = sizes((8, 32), (272, 224), (104, 992), (2304, 288))


@on_devices
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_pack_and_dequantise(device: str, kind: str, n: int, k: int, parts: int) -> None:
    if n == 8 and parts == 2:
        pytest.skip("a part has 8 rows or more")
    k = whole(kind, k)
    weights = make_weights(kind, n, k, parts=parts)
    first = n // 3
    dtype = "float32" if device == "cpu" else "float16"
    out = empty(device, [n - first, k], dtype)
    ops.packed_dequantize(context(device), out, weights.put(device), first_row=first)
    assert np.array_equal(get(out), rounded(weights.values[first:], dtype))


@on_devices
@pytest.mark.parametrize("kind", FLOATS)
def test_every_code_and_scale(device: str, kind: str) -> None:
    """Multiplying every code by every scale is exact, for subnormal numbers and both zeros, too.

    Rows 2 i and 2 i + 1 have the scale i, and codes of opposite signs. If scales are powers of two,
    the first group of every row has the largest.
    """
    group, most = GROUPS[kind], 24 if kind == "mxfp4" else 22
    by_row = np.arange(127) if kind == "nvfp4" else np.arange(120, 121 + most)
    rows = -(-len(by_row) // 4) * 8
    codes = np.tile(np.arange(128), (rows, 1))
    codes[1::2] += 128
    scales = np.tile(np.resize(by_row.repeat(2), rows)[:, None], (1, 128 // group)).astype(np.uint8)
    if kind == "mxfp8":
        codes[(codes & 0x7F) == 0x7F] = 0  # NaN is never loaded
        stored = codes.astype(np.uint8)
    else:
        codes &= 15
        stored = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
    if kind != "nvfp4":
        scales[:, 0] = by_row[-1]
    layout = FloatWeights(kind, rows, 128)
    blocks = np.zeros([-(-rows // 256), 1, layout.block_bytes], np.uint8)
    weight = ops.PackedWeight(put_raw(device, blocks), n=rows, k=128, **layout.layout)
    ops.float_group_pack(
        context(device), weight, put_raw(device, stored), put_raw(device, scales),
        powers=kind != "nvfp4",
    )  # fmt: skip
    values = dequantise(kind, stored, scales)
    for dtype in ("float16", "bfloat16"):
        y = multiply(device, np.eye(128), weight, rows, dtype, "float32")
        assert np.array_equal(get(y), values.T), dtype


@on_devices
@pytest.mark.parametrize("kind", ["mxfp4", "mxfp8"])
def test_powers_far_below_the_largest_are_zero(device: str, kind: str) -> None:
    most = 24 if kind == "mxfp4" else 22
    codes = np.full((8, 16 if kind == "mxfp4" else 32), 0x22 if kind == "mxfp4" else 0x38, np.uint8)
    codes, scales = np.tile(codes, (1, 2)), np.full((8, 2), 127, np.uint8)
    scales[0, 1], scales[1, 1], scales[2] = 127 - most, 127 - most - 1, 0
    values = dequantise(kind, codes, scales)
    values[1, 32:] = values[2] = 0
    layout = FloatWeights(kind, 8, 64)
    blocks = put_raw(device, np.zeros([1, 1, layout.block_bytes], np.uint8))
    weight = ops.PackedWeight(blocks, n=8, k=64, **layout.layout)
    ops.float_group_pack(
        context(device), weight, put_raw(device, codes), put_raw(device, scales), powers=True
    )
    for dtype in ("float16", "bfloat16"):
        y = multiply(device, np.eye(64), weight, 8, dtype, "float32")
        assert np.array_equal(get(y), values.T), dtype


@on_devices_and_dtypes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("m", "n", "k"), sizes((1, 8, 32), (16, 272, 224), (33, 104, 992), (64, 2304, 288))
)
def test_gemm(device: str, dtype: str, kind: str, m: int, n: int, k: int) -> None:
    k = whole(kind, k)
    weights, x = make_weights(kind, n, k), random_x(m, k, dtype)

    def run(device: str) -> npt.NDArray[np.float64]:
        return get(multiply(device, x, weights.put(device), n, dtype, dtype))

    check(run, device, x @ weights.values.T, "gemm", dtype)


@on_devices_and_dtypes
@pytest.mark.parametrize(
    ("kind", "interleaved"),
    [(kind, False) for kind in KINDS] + [(kind, True) for kind in FLOATS],
)
@pytest.mark.parametrize(
    "shape", sizes((1, 16, 128), (17, 48, 4096), (33, 1040, 384), (300, 272, 160))
)
def test_gated_gemm(
    device: str, dtype: str, kind: str, shape: tuple[int, int, int], interleaved: bool
) -> None:
    m, n, k = *shape[:2], whole(kind, shape[2])
    settings = {"interleaved": True} if interleaved else {"parts": 2}
    weights = make_weights(kind, n, k, gated=True, **settings)
    x = random_x(m, k, dtype)

    def run(device: str) -> npt.NDArray[np.float64]:
        return get(multiply(device, x, weights.put(device), n // 2, dtype, dtype))

    check(run, device, reference.silu_mul(x @ weights.values.T), "gemm", dtype)


@on_devices_and_dtypes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), sizes((8, 32), (96, 992), (2304, 256)))
def test_rows_do_not_depend_on_the_others(
    device: str, dtype: str, kind: str, n: int, k: int
) -> None:
    k = whole(kind, k)
    weight, x = make_weights(kind, n, k).put(device), random_x(130, k, dtype)
    full = multiply(device, x, weight, n, dtype, dtype).numpy()
    for m in (1, 7, 9, 17, 33, 63, 64, 65):
        part = multiply(device, x[130 - m :], weight, n, dtype, dtype).numpy()
        assert np.array_equal(part, full[130 - m :]), f"{m} rows"


@on_devices_and_dtypes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by_expert", [False, True])
@pytest.mark.parametrize(("gated", "n", "k"), [(True, 272, 160), (False, 48, 416)])
def test_experts(
    device: str, dtype: str, kind: str, by_expert: bool, gated: bool, n: int, k: int
) -> None:
    """Rows of a decode step, and the sorted rows of a prompt."""
    if by_expert:
        needs_sorted_gemm(device)
    num_experts, top_k, width, k = 5, 2, n // 2 if gated else n, whole(kind, k)
    made = [make_weights(kind, n, k, gated=gated, seed=i) for i in range(num_experts)]
    x, _ = expert_inputs(70, 1, 8, k, dtype)
    logits = random_logits(70, num_experts)
    experts, _ = reference.route(logits, top_k, True)

    def run(device: str) -> npt.NDArray[np.float64]:
        blocks = np.stack([each.blocks(device).numpy().reshape(-1) for each in made])
        w = put_raw(device, blocks), {"n": n, "k": k, **made[0].layout}
        routing = route(device, logits, num_experts, top_k, True)
        if by_expert:
            return get(sorted_pairs(device, x, w, routing, dtype, "float32", width))
        return get(grouped(device, x, w, routing, dtype, "float32", width, pairs_per_x=top_k))

    values = np.stack([each.values for each in made])
    expected = reference.expert_gemm(x, values, experts.reshape(-1), top_k, gated)
    check(run, device, expected, "gemm", "float32")


@on_devices
@pytest.mark.parametrize("form", ["uint8", "int8", "int32", "int32 zeros"])
def test_forms_of_8_bits(device: str, form: str) -> None:
    """All codes; one scale for the matrix, or for each row and 64 k. Zero points are GPTQ's."""
    n, k = 264, 200
    q = np.resize(np.arange(256), (n, k)).astype(np.uint8)
    rng = np.random.default_rng(4)
    one = form == "int8"
    scales = rng.uniform(0.5, 1, (1, 1) if one else (n, 4)).astype(np.float16)
    wide = scales if one else scales[:, np.arange(k) // 64]
    zeros = (
        rng.integers(0, 256, (n, 4), dtype=np.uint8) if "zeros" in form else np.full((n, 4), 128)
    )
    numbers = q.astype(np.float64) - zeros[:, np.arange(k) // 64]
    values = numbers * wide.astype(np.float64)
    more: dict[str, Any] = {}
    codes: npt.NDArray[Any] = q
    if form == "int8":
        codes = (q ^ 0x80).view(np.int8)
    elif form != "uint8":
        quads = np.ascontiguousarray(q.T.reshape(k // 4, 4, n).swapaxes(1, 2))
        codes, scales = quads.view("<i4")[..., 0], np.ascontiguousarray(scales.T)
    if "zeros" in form:
        stored = np.ascontiguousarray((zeros - np.uint8(1)).T)
        more = {"zeros": put_raw(device, stored.view("<i4")), "zero_offset": 1}
    bytes_ = 35840 if more else 34816
    blocks = put_raw(device, np.full([2, 2, bytes_], 0xA5, np.uint8))
    weight = ops.PackedWeight(blocks, n=n, k=k, codes="int8", group=32, zero_points="zeros" in form)
    ops.int8_pack(
        context(device), weight, put_raw(device, codes), put_raw(device, scales), **more,
        k_per_scale=k if one else 64,
    )  # fmt: skip
    dtype = "float32" if device == "cpu" else "float16"
    out = empty(device, [n, k], dtype)
    ops.packed_dequantize(context(device), out, weight)
    assert np.array_equal(get(out), rounded(values, dtype))


@on_devices
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first_row": 4}, "rows are packed by eight"),
        ({"first_row": 16}, "are no part of a W"),
        ({"interleaved": True}, "8 interleaved rows, expected all 16 of a gated W"),
        ({"scales": np.zeros((8, 3), np.uint8)}, "scales are uint8"),
    ],
)
def test_parts_that_do_not_fit(device: str, change: dict[str, Any], message: str) -> None:
    weights = FloatWeights("mxfp4", 16, 256)
    weight, (codes, scales, _) = weights.put(device), weights.stored[0]
    settings = dict(change)
    given = put_raw(device, settings.pop("scales", scales[:8]))
    with pytest.raises(ValueError, match=message):
        ops.float_group_pack(
            context(device), weight, put_raw(device, codes[:8]), given, powers=True, **settings
        )
