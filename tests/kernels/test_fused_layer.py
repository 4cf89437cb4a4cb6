"""fused_layer: each GEMM of a decoder layer, any batch, and launch after launch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from cpmcu import C
from tests.kernels import fp8_weights, group_weights
from tests.kernels.attention import Case
from tests.kernels.group_weights import KINDS, make_weights
from tests.kernels.packed import Weights, random_x, scratch_of
from tests.kernels.util import (
    Floats,
    Step,
    chain_masks,
    context,
    empty,
    for_cuda_only,
    get,
    inv_freq_of,
    on_devices,
    on_devices_and_cuda_dtypes,
    on_devices_and_dtypes,
    ops,
    put,
    rounded,
    sizes,
)
from tests.reference import ops as reference
from tests.tolerances import KERNELS, assert_close

EPS = 1e-5
# Width of attention's output, hidden size, intermediate size, width of qkv.
SHAPES = sizes(
    (16, 8, 8, 5), (200, 264, 136, 257), (128, 520, 1000, 776), (512, 1152, 2560, 1536),
    (4096, 1024, 384, 256), (264, 128, 17152, 34000),
)  # fmt: skip


# gate and up have 135 tiles of 256 rows, a few more than an H100 has SMs.
FEW_MORE_TILES = (200, 264, 17_160, 136)


@dataclass
class Dense:
    """Random 16-bit weights; `values` [N, K]."""

    k: int
    n: int
    dtype: str
    seed: int = 0
    gated: bool = False

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed + self.k * 1000 + self.n)
        self.values = rounded(rng.standard_normal((self.n, self.k)) / np.sqrt(self.k), self.dtype)

    def put(self, device: str) -> Any:
        return put(device, self.values, self.dtype)

    def gemm(self, y: Any, x: Any, weight: Any, rows: int, device: str, **given: Any) -> Any:
        """`scratch`: only for the fallback without the fused kernel."""
        if self.gated:
            given["scratch"] = empty(device, [rows, self.n], self.dtype)
        return ops.FusedGemm(y, x, weight, gated=self.gated, **given)


class FourBits(Weights):
    def gemm(self, y: Any, x: Any, weight: Any, rows: int, device: str, **given: Any) -> Any:
        return ops.FusedGemm(y, x, weight, scratch=scratch_of(device, weight, rows), **given)


@dataclass
class Others:
    """Weights of 8 bits, or with scales for small groups of k."""

    weights: fp8_weights.Weights | group_weights.Weights

    def __getattr__(self, name: str) -> Any:
        return getattr(self.weights, name)

    def gemm(self, y: Any, x: Any, weight: Any, rows: int, device: str, **given: Any) -> Any:
        return ops.FusedGemm(y, x, weight, scratch=scratch_of(device, weight, rows), **given)


@dataclass
class Gemm:
    """y [M, N] = alpha * x W^T + beta * y + bias; with `norm`, the next GEMM reads y RMS-normed."""

    weights: FourBits | Others | Dense
    alpha: float = 1
    beta: float = 0
    norm: Floats | None = None
    bias: Floats | None = None

    @property
    def width(self) -> int:
        return self.weights.n // 2 if self.weights.gated else self.weights.n

    def reference(self, x: Floats, y: Floats) -> Floats:
        product = x @ self.weights.values.T
        if self.weights.gated:
            return reference.silu_mul(product)
        product = self.alpha * product + (self.beta * y if self.beta else 0)
        return product if self.bias is None else product + self.bias


def norm_of(rows: Floats, weight: Floats) -> Floats:
    return rows / np.sqrt((rows * rows).mean(axis=1, keepdims=True) + EPS) * weight


class Layer:
    """The GEMMs o, gate and up, down, and qkv of the next layer."""

    def __init__(
        self, shape: tuple[int, ...], dtype: str, bits: int = 4, grouped: str = "", **kind: Any
    ) -> None:
        self.dtype, self.norm_offset = dtype, 0.0
        make: Callable[..., Any] = partial(FourBits, **kind)
        if bits == 16:
            make = partial(Dense, dtype=dtype)
        elif grouped or bits == 8:

            def make(k: int, n: int, **settings: Any) -> Others:
                if grouped:
                    return Others(make_weights(grouped, n, k, **settings))
                by_row = kind.get("by_row", False)
                return Others(fp8_weights.Weights(n, k, by_row, **settings))

        attention, hidden, intermediate, qkv = shape
        rng = np.random.default_rng(sum(shape))
        norms = [rounded(rng.uniform(0.5, 1.5, hidden), dtype) for _ in range(2)]
        self.gemms = [
            Gemm(make(attention, hidden, seed=1), 0.7, 1, norms[0]),
            Gemm(make(hidden, 2 * intermediate, gated=True, seed=2)),
            Gemm(make(intermediate, hidden, seed=3), 1.5, 1, norms[1]),
            Gemm(make(hidden, qkv, seed=4)),
        ]

    def put(self, device: str) -> None:
        self.device = device
        self.stored = [gemm.weights.put(device) for gemm in self.gemms]
        self.memory = empty(device, [max(1, ops.fused_layer_bytes(128))], "uint8")
        ops.fused_layer_prepare(context(device), self.memory)

    def run(
        self,
        x: Floats | Any,
        residual: Floats,
        count: int,
        rotary: Callable[[Any], Any] | None = None,
        attention: Any = None,
        following: int = 0,
    ) -> list[Floats]:
        """Runs the first `count` GEMMs and returns y of each.

        y of the first GEMM is `residual` before the launch. `rotary` makes the rotary_kv params
        from the last y. x may be the `out` of `attention`. The first `following` weights are
        announced as those of the next launch.
        """
        m, dtype, device = x.shape[0], self.dtype, self.device
        residuals = put(device, residual, dtype)
        normed = empty(device, residual.shape, dtype)
        taken = put(device, x, dtype) if isinstance(x, np.ndarray) else x
        outputs, gemms = [], []
        for i, (gemm, weight) in enumerate(zip(self.gemms[:count], self.stored)):
            y = residuals if gemm.beta else empty(device, [m, gemm.width], dtype)
            extra: dict[str, Any] = {}
            if gemm.norm is not None and i + 1 < count:
                extra = {
                    "normed": normed, "norm_eps": EPS, "norm_offset": self.norm_offset,
                    "norm_weight": put(device, gemm.norm - self.norm_offset, dtype),
                }  # fmt: skip
            if gemm.bias is not None:
                extra["bias"] = put(device, gemm.bias.reshape(1, -1), dtype)
            gemms.append(
                gemm.weights.gemm(
                    y, taken, weight, m, device, alpha=gemm.alpha, beta=gemm.beta, **extra
                )
            )
            outputs.append(y)
            taken = normed if "normed" in extra else y
        follows = None if rotary is None else rotary(outputs[-1])
        ops.fused_layer(
            context(device), gemms, self.memory, follows, attention, self.stored[:following]
        )
        return [get(y) for y in outputs]


def inputs(m: int, shape: tuple[int, ...], dtype: str) -> tuple[Floats, Floats]:
    residual = rounded(np.random.default_rng(9).standard_normal((m, shape[1])), dtype)
    return random_x(m, shape[0], dtype), residual


def check_each(layer: Layer, m: int, shape: tuple[int, ...]) -> None:
    """Launches the first GEMM, the first two, and so on, and compares the last y of each launch."""
    x, residual = inputs(m, shape, layer.dtype)
    start, residual_before = x, residual
    for count, gemm in enumerate(layer.gemms, 1):
        y = layer.run(start, residual_before, count)[-1]
        assert_close(y, gemm.reference(x, residual), KERNELS["normed_gemm"][layer.dtype])
        # The reference of the next GEMM starts from this result.
        x = y if gemm.norm is None else norm_of(y, gemm.norm)
        residual = y if gemm.beta else residual


on_bits = pytest.mark.parametrize("bits", [4, 8, 16])


@on_devices_and_cuda_dtypes
@on_bits
@pytest.mark.parametrize("m", sizes(1, 13, 32, 7, 61, 130))
@pytest.mark.parametrize("shape", SHAPES)
def test_each_gemm(device: str, dtype: str, shape: tuple[int, ...], m: int, bits: int) -> None:
    if max(shape) > 10_000:
        for_cuda_only(device, "more tiles than SMs")
    layer = Layer(shape, dtype, bits, scale_dtype="bfloat16" if dtype == "bfloat16" else "float16")
    layer.put(device)
    check_each(layer, m, shape)


@on_devices_and_dtypes
@pytest.mark.parametrize(
    "kind",
    [
        {"has_zeros": True}, {"channel_wise": True}, {"scale_dtype": "bfloat16"},
        {"bits": 8, "by_row": True},
    ],
)  # fmt: skip
def test_kinds_of_scales(device: str, dtype: str, kind: dict[str, Any]) -> None:
    shape = (264, 136, 200, 520)
    layer = Layer(shape, dtype, **kind)
    layer.put(device)
    x, residual = inputs(9, shape, dtype)
    _, act, hidden, qkv = layer.run(x, residual, 4)
    assert_close(
        qkv, norm_of(hidden, layer.gemms[2].norm) @ layer.gemms[3].weights.values.T,
        KERNELS["normed_gemm"][dtype],
    )  # fmt: skip
    attended = layer.run(x, residual, 1)[0]
    assert_close(hidden, layer.gemms[2].reference(act, attended), KERNELS["normed_gemm"][dtype])


@on_devices_and_dtypes
@pytest.mark.parametrize("kind", [kind for kind in KINDS if " by 16" not in kind])
@pytest.mark.parametrize("m", sizes(1, 13, 100))
def test_small_groups(device: str, dtype: str, kind: str, m: int) -> None:
    hidden, intermediate = (group_weights.whole(kind, k) for k in (128, 192))
    shape = (256, hidden, intermediate, 520)
    layer = Layer(shape, dtype, grouped=kind)
    layer.put(device)
    x, residual = inputs(m, shape, dtype)
    attended, act, down, qkv = layer.run(x, residual, 4)
    for i, (y, given) in enumerate(((down, act), (qkv, norm_of(down, layer.gemms[2].norm)))):
        expected = layer.gemms[2 + i].reference(given, layer.run(x, residual, 1)[0])
        assert_close(y, expected, KERNELS["normed_gemm"][dtype])
    for part, full in zip(layer.run(x[-1:], residual[-1:], 4), (attended, act, down, qkv)):
        assert np.array_equal(part[0], full[-1])


@on_devices_and_cuda_dtypes
@on_bits
@pytest.mark.parametrize("m", sizes(1, 9, 61))
def test_biases(device: str, dtype: str, bits: int, m: int) -> None:
    """A GEMM with a bias is first, in the middle or last, with or without a residual."""
    shape = (200, 264, 136, 272)
    layer = Layer(shape, dtype, bits)
    rng = np.random.default_rng(m)
    for gemm in layer.gemms:
        gemm.norm = None
        if not gemm.weights.gated:
            gemm.bias = rounded(rng.standard_normal(gemm.width), dtype)
    layer.put(device)
    check_each(layer, m, shape)


@on_devices_and_cuda_dtypes
@on_bits
def test_zero_centred_norms(device: str, dtype: str, bits: int) -> None:
    shape = (264, 136, 200, 520)
    plain, centred = Layer(shape, dtype, bits), Layer(shape, dtype, bits)
    for layer in (plain, centred):
        layer.put(device)
        for gemm in layer.gemms:
            if gemm.norm is not None:  # 1 + w and w are exact in 16 bits
                gemm.norm = rounded(np.round(gemm.norm * 64) / 64, "float16")
    centred.norm_offset = 1.0
    x, residual = inputs(5, shape, dtype)
    for one, other in zip(plain.run(x, residual, 4), centred.run(x, residual, 4)):
        assert np.array_equal(one, other)


@on_devices_and_cuda_dtypes
@on_bits
@pytest.mark.parametrize("shape", (*SHAPES[:5], FEW_MORE_TILES))
def test_rows_do_not_depend_on_the_others(
    device: str, dtype: str, shape: tuple[int, ...], bits: int
) -> None:
    if shape == FEW_MORE_TILES:
        for_cuda_only(device, "more tiles than SMs")
    layer = Layer(shape, dtype, bits)
    layer.put(device)
    x, residual = inputs(64, shape, dtype)
    full = layer.run(x, residual, 4)
    for m in sizes(1, 8, 31, 2, 9, 16, 17, 32, 33, 63):
        rows = np.arange(64 - m, 64)  # rows have other places in the batch, too
        for part, whole in zip(layer.run(x[rows], residual[rows], 4), full):
            assert np.array_equal(part, whole[rows]), f"{m} rows"
    for m in sizes(65, 100, 128, 129, 256):  # more rows than a launch has
        rows = (np.arange(m) + 63) % 64
        for part, whole in zip(layer.run(x[rows], residual[rows], 4), full):
            assert np.array_equal(part, whole[rows]), f"{m} rows"


@on_devices_and_cuda_dtypes
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", SHAPES[:5])
def test_prefetch_of_following_weights_changes_no_bit(
    device: str, dtype: str, shape: tuple[int, ...], bits: int
) -> None:
    """The kernel may prefetch them, even if its own GEMMs have fewer weight blocks."""
    layer = Layer(shape, dtype, bits)
    layer.put(device)
    x, residual = inputs(1, shape, dtype)
    for count in (1, 2, 4):
        alone = layer.run(x, residual, count)
        for following in (1, 2):
            again = layer.run(x, residual, count, following=following)
            assert all(np.array_equal(a, b) for a, b in zip(alone, again))


@on_devices_and_cuda_dtypes
@on_bits
@pytest.mark.parametrize("m", sizes(1, 13, 32, 64, 2, 7, 16, 17, 130))
@pytest.mark.parametrize(
    ("heads", "bias"),
    sizes(((4, 2, 64), True), ((7, 1, 64), False), ((16, 2, 128), False), ((3, 1, 128), True),
          ((2, 1, 256), False), ((8, 8, 256), True), ((140, 1, 128), True)),
)  # fmt: skip
def test_rotary_kv_after_the_last_gemm(
    device: str, dtype: str, heads: tuple[int, int, int], bias: bool, m: int, bits: int
) -> None:
    """qkv and the KV cache have the bits of a separate rotary_kv."""
    num_heads, num_kv, dim = heads
    width = (num_heads + 2 * num_kv) * dim
    layer = Layer((136, 264, 200, width), dtype, bits)
    layer.put(device)
    x, residual = inputs(m, (136, 264), dtype)
    counts = [count for count in (m // 3, m // 3, m - m // 3 * 2) if count]
    step = Step(lengths=[0, 63, 1000][-len(counts) :], counts=counts)
    step.positions = np.random.default_rng(m).integers(0, 100_000, m)
    biases = rounded(np.random.default_rng(1).standard_normal(width), dtype)
    cache = rounded(
        np.random.default_rng(2).standard_normal((2, step.num_pages, num_kv, 64, dim)), dtype
    )

    def run(fused: bool) -> list[Floats]:
        k, v = (put(device, part, dtype) for part in cache)

        def rotary(qkv: Any) -> Any:
            return ops.RotaryKv(
                qkv=qkv, bias=put(device, biases, dtype) if bias else None, k_cache=k, v_cache=v,
                inv_freq=put(device, inv_freq_of(dim)), attention_scaling=1.19,
                num_heads=num_heads, num_kv_heads=num_kv, head_dim=dim, tokens=step.rows(device),
            )  # fmt: skip

        if fused:
            qkv = layer.run(x, residual, 4, rotary)[-1]
        else:
            stored = put(device, layer.run(x, residual, 4)[-1], dtype)
            ops.rotary_kv(context(device), rotary(stored))
            qkv = get(stored)
        return [qkv[:, : num_heads * dim], get(k), get(v)]

    for fused, separate in zip(run(True), run(False)):
        assert np.array_equal(fused, separate)


@on_devices_and_cuda_dtypes
@on_bits
@pytest.mark.parametrize(
    ("heads", "hidden"),
    sizes(((4, 2, 64), 264), ((32, 2, 128), 1024), ((14, 2, 64), 520), ((8, 1, 256), 776),
          ((9, 1, 128), 17152)),
)  # fmt: skip
def test_attention_splits_before_the_first_gemm(
    device: str, dtype: str, heads: tuple[int, int, int], hidden: int, bits: int
) -> None:
    """All outputs have the bits of a launch whose x attention_decode has combined."""
    if hidden > 1000:
        for_cuda_only(device, "the CPU runs one GEMM after another, for any number of tiles")
        if bits == 16 and "90a" not in json.loads(C.build_info_json)["archs"]:
            pytest.skip("without the fused layer kernel, a norm has at most 16,384 columns")
    layer = Layer((heads[0] * heads[2], hidden, 72, 136), dtype, bits)
    layer.put(device)
    ctx = context(device)
    for counts, length, more in sizes(
        ([1], 1100, 0), ([3], 300, 0), ([1], 60, 500), ([1], 127, 1), ([1], 128, 0),
        ([1], 2200, 900), ([1], 4095, 0), ([1], 4096, 0), ([1, 2], 300, 0), ([32], 2200, 0),
        ([17, 16], 5000, 0), ([40, 40], 200, 0), ([1], 8191, 0), ([1], 8192, 0), ([3], 9000, 0),
        ([1], 33000, 0),
    ):  # fmt: skip
        lengths = [length, 700][: len(counts)]
        if device == "cpu" and length > 2200:
            continue  # lengths that select a path of the CUDA kernel
        for kind in ({}, {"window": 200}, {"by_position": True}):
            masks = [chain_masks(count) for count in counts] if "by_position" in kind else None
            step = Step(lengths=lengths, counts=counts, masks=masks, extra_kv=more)
            case = Case(step, *heads, dtype, **kind)
            residual = rounded(
                np.random.default_rng(9).standard_normal((sum(counts), hidden)), dtype
            )
            alone, attended = case.params(device, *case.put(device))
            ops.attention_decode(ctx, alone)
            expected = layer.run(attended, residual, 4)
            halves, out = case.params(device, *case.put(device))
            ops.attention_splits(ctx, halves)
            for y, before in zip(layer.run(out, residual, 4, attention=halves), expected):
                assert np.array_equal(y, before), (counts, length, kind)


@on_devices
@on_bits
# In the second shape the GEMMs have 64, 48, 48 and 128 active CTAs: the set of active CTAs changes.
@pytest.mark.parametrize("shape", sizes((200, 264, 136, 257), (4096, 2048, 768, 4096)))
def test_launches_do_not_affect_later_launches(
    device: str, shape: tuple[int, ...], bits: int
) -> None:
    """Launches of any number of GEMMs, rows and shapes share one memory."""
    if shape[0] > 1000:
        for_cuda_only(device, "it selects numbers of CTAs")
    shapes = [shape, (520, 1032, 264, 72)]
    layers = [Layer(s, "float16", bits) for s in shapes]
    for layer in layers:
        layer.put(device)
        layer.memory = layers[0].memory
    x_and_residual = [inputs(40, s, "float16") for s in shapes]

    def run(of: int, m: int, count: int) -> list[Floats]:
        x, residual = x_and_residual[of]
        return layers[of].run(x[:m], residual[:m], count)

    kinds = [(of, m, count) for of in (0, 1) for m in (1, 40) for count in (1, 2, 3, 4)]
    expected = {kind: run(*kind) for kind in kinds}
    rng = np.random.default_rng(3)
    for _ in sizes(*range(60)):
        kind = kinds[rng.integers(len(kinds))]
        for part, before in zip(run(*kind), expected[kind]):
            assert np.array_equal(part, before)


@pytest.mark.gpu
@on_bits
@pytest.mark.parametrize("m", [1, 9, 17, 24, 40, 57, 100])
def test_kernel_stays_within_its_memory(m: int, bits: int) -> None:
    """A GEMM with a part for every CTA does not write beyond fused_layer_bytes."""
    device = "cuda"  # the CPU does not use the memory
    shape = (1024, 4096, 64, 8)
    layer = Layer(shape, "float16", bits)
    layer.put(device)
    x, residual = inputs(m, shape, "float16")
    expected = layer.run(x, residual, 1)
    size = ops.fused_layer_bytes(m)
    memory = empty(device, [size + (1 << 20)], "uint8")
    ops.fused_layer_prepare(context(device), memory)
    prepared = memory.numpy()
    prepared[size:] = 0x5A
    memory.copy_from(prepared)
    layer.memory = memory
    for part, before in zip(layer.run(x, residual, 1), expected):
        assert np.array_equal(part, before)
    assert (memory.numpy()[size:] == 0x5A).all()


@on_devices_and_dtypes
@on_bits
def test_nan_stays_in_its_row(device: str, dtype: str, bits: int) -> None:
    shape = (264, 136, 200, 520)
    layer = Layer(shape, dtype, bits)
    layer.put(device)
    x, residual = inputs(12, shape, dtype)
    expected = layer.run(x, residual, 4)
    x[3, 7] = np.nan
    for part, before in zip(layer.run(x, residual, 4), expected):
        assert np.isnan(part[3]).all()
        others = np.arange(12) != 3
        assert np.array_equal(part[others], before[others])


@on_devices_and_dtypes
@on_bits
@pytest.mark.parametrize("size", [3e-3, 3e3])
def test_norm_of_small_and_large_rows(device: str, dtype: str, size: float, bits: int) -> None:
    """The norm is right for root mean squares far from 1."""
    shape = (264, 136, 200, 520)
    layer = Layer(shape, dtype, bits)
    layer.put(device)
    x, residual = inputs(5, shape, dtype)
    x, residual = rounded(x * size, dtype), rounded(residual * size, dtype)
    attended, act = layer.run(x, residual, 2)
    normed = norm_of(attended, layer.gemms[0].norm)
    assert_close(act, layer.gemms[1].reference(normed, residual), KERNELS["normed_gemm"][dtype])


@on_devices
def test_bad_params_are_refused(device: str) -> None:
    shape = (16, 8, 8, 5)
    layer = Layer(shape, "float16")
    layer.put(device)
    x, residual = inputs(2, shape, "float16")
    ctx = context(device)
    with pytest.raises(ValueError, match="0 gemms, expected 1 to 4"):
        ops.fused_layer(ctx, [], layer.memory)
    y, weight = put(device, residual, "float16"), layer.stored[0]
    gemm = ops.FusedGemm(y, put(device, x, "float16"), weight, normed=y, norm_weight=y)
    with pytest.raises(
        ValueError, match=r"the norm after gemm 0 has rows .* a next gemm that reads it"
    ):
        ops.fused_layer(ctx, [gemm], layer.memory)
    other = ops.FusedGemm(y, put(device, x[:1], "float16"), weight)
    with pytest.raises(ValueError, match="does not fit"):
        ops.fused_layer(ctx, [other], layer.memory)
    dense = Dense(shape[0], shape[1], "float16").put(device)
    wide = ops.FusedGemm(y, put(device, x, "float16"), dense)
    fine = ops.FusedGemm(
        y, put(device, x, "float16"), weight, scratch=scratch_of(device, weight, 2)
    )
    with pytest.raises(ValueError, match="expected the rows, the dtype and the layout"):
        ops.fused_layer(ctx, [fine, wide], layer.memory)
    narrow = ops.FusedGemm(y, put(device, x[:, :8], "float16"), dense)
    with pytest.raises(ValueError, match="does not fit"):
        ops.fused_layer(ctx, [narrow], layer.memory)
    with pytest.raises(ValueError, match="3 weights follow, expected up to 2"):
        ops.fused_layer(ctx, [fine], layer.memory, following=layer.stored[:3])
    step = Step(lengths=[0], counts=[2])
    cache = put(device, np.zeros((step.num_pages, 1, 64, 64)), "float16")
    rotary = ops.RotaryKv(
        qkv=y, k_cache=cache, v_cache=cache, inv_freq=put(device, inv_freq_of(64)), num_heads=1,
        num_kv_heads=1, head_dim=64, tokens=step.rows(device), q_norm=put(device, np.ones(64)),
    )  # fmt: skip
    with pytest.raises(ValueError, match="2 tokens with head_dim 64 does not fit after a gemm"):
        ops.fused_layer(ctx, [fine], layer.memory, rotary)
    if device == "cuda":
        with pytest.raises(ValueError, match="5 bytes of memory, expected"):
            ops.fused_layer(ctx, [fine, fine], empty(device, [5], "uint8"))
