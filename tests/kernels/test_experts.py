"""The ops of the mixture of experts: routing, grouped GEMMs, the weighted sum."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.kernels.packed import Weights
from tests.kernels.util import (
    GPU,
    check,
    context,
    empty,
    for_cuda_only,
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
from tests.tolerances import KERNELS, assert_close

Floats = npt.NDArray[np.float64]

# tokens, experts, top_k
ROUTINGS = sizes(
    (1, 8, 2), (1, 128, 8), (3, 1, 1), (7, 5, 5), (64, 128, 8), (13, 61, 3), (64, 512, 10),
    (33, 1024, 32), (300, 128, 8), (1000, 7, 2),
)  # fmt: skip


def route(device: str, logits: Floats, num_experts: int, top_k: int, renormalise: bool) -> Any:
    routing = ops.Routing(
        context(device), num_tokens=len(logits), num_experts=num_experts, top_k=top_k
    )
    ops.moe_route(context(device), routing, put(device, logits, "float32"), renormalise=renormalise)
    return routing


def random_logits(num_tokens: int, columns: int) -> Floats:
    rng = np.random.default_rng(num_tokens * 1000 + columns)
    return rounded(rng.standard_normal((num_tokens, columns)), "float32")


@on_devices
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), ROUTINGS)
def test_route(
    device: str, renormalise: bool, num_tokens: int, num_experts: int, top_k: int
) -> None:
    logits = random_logits(num_tokens, num_experts)
    routing = route(device, logits, num_experts, top_k, renormalise)
    experts, weights = reference.route(logits, top_k, renormalise)
    assert np.array_equal(routing.experts.numpy().reshape(-1, top_k), experts)
    got = get(routing.weights).reshape(-1, top_k)
    assert_close(got, weights, KERNELS["exact_inputs"]["float32"])
    check_sorted(routing, experts, num_experts)


def check_sorted(routing: Any, experts: npt.NDArray[np.int64], num_experts: int) -> None:
    flat = experts.reshape(-1)
    assert np.array_equal(routing.pairs.numpy(), np.argsort(flat, kind="stable"))
    counts = np.bincount(flat, minlength=num_experts)
    assert np.array_equal(routing.offsets.numpy(), np.concatenate([[0], np.cumsum(counts)]))
    active = np.flatnonzero(counts)
    spans = np.zeros((min(num_experts, len(flat)), 3), np.int64)
    spans[: len(active), 0] = active
    spans[: len(active), 1] = (np.cumsum(counts) - counts)[active]
    spans[: len(active), 2] = counts[active]
    got = routing.spans.numpy().reshape(-1, 4)[: len(spans), :3]
    assert np.array_equal(got[:, 2], spans[:, 2])
    assert np.array_equal(got[: len(active)], spans[: len(active)])
    assert routing.num_active.numpy().item() == len(active)
    assert np.array_equal(routing.active.numpy()[: len(active)], active)


@on_devices
@pytest.mark.parametrize("values", [1, 2, 3])
def test_ties_go_to_the_lower_expert(device: str, values: int) -> None:
    logits = np.random.default_rng(values).integers(0, values, (40, 61)).astype(np.float64)
    routing = route(device, logits, 61, 7, True)
    experts, _ = reference.route(logits, 7, True)
    assert np.array_equal(routing.experts.numpy().reshape(-1, 7), experts)
    check_sorted(routing, experts, 61)


@on_devices
def test_logits_have_further_columns(device: str) -> None:
    logits = random_logits(9, 20)
    routing = route(device, logits, 17, 3, False)
    experts, weights = reference.route(logits[:, :17], 3, False)
    assert np.array_equal(routing.experts.numpy().reshape(-1, 3), experts)
    assert_close(get(routing.weights).reshape(-1, 3), weights, KERNELS["exact_inputs"]["float32"])


@on_devices
def test_not_finite_logits_choose_valid_experts(device: str) -> None:
    logits = random_logits(5, 9)
    logits[0] = np.nan
    logits[1, 4] = np.nan
    logits[2] = -np.inf
    logits[3, 6] = np.inf
    experts = route(device, logits, 9, 4, True).experts.numpy().reshape(-1, 4)
    assert experts[0].tolist() == experts[2].tolist() == [0, 1, 2, 3]
    assert 4 not in experts[1] and experts[3, 0] == 6
    assert all(len(set(row)) == 4 for row in experts.tolist())
    alone = route(device, logits[4:], 9, 4, True)
    assert np.array_equal(alone.experts.numpy(), experts[4])


@on_devices
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), ROUTINGS[3:8])
def test_a_token_is_routed_alone(
    device: str, num_tokens: int, num_experts: int, top_k: int
) -> None:
    logits = random_logits(num_tokens, num_experts)
    whole = route(device, logits, num_experts, top_k, False)
    for begin, end in [(0, 1), (num_tokens // 2, num_tokens)]:
        part = route(device, logits[begin:end], num_experts, top_k, False)
        rows = slice(begin * top_k, end * top_k)
        assert np.array_equal(part.experts.numpy(), whole.experts.numpy()[rows])
        assert np.array_equal(part.weights.numpy(), whole.weights.numpy()[rows])


@on_devices
@pytest.mark.parametrize(("num_experts", "top_k"), [(4, 0), (4, 5), (1025, 2), (64, 33), (20, 3)])
def test_routers_are_checked(device: str, num_experts: int, top_k: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        route(device, random_logits(2, 4), num_experts, top_k, True)


# ---- grouped GEMMs

# tokens, experts, top_k, N, K
GEMMS = sizes(
    (1, 4, 2, 16, 8), (3, 8, 3, 48, 40), (64, 16, 4, 144, 264), (5, 3, 3, 272, 128),
    (130, 7, 2, 32, 72), (17, 128, 8, 64, 136), (200, 2, 1, 528, 520),
)  # fmt: skip


def expert_inputs(
    num_tokens: int, num_experts: int, n: int, k: int, dtype: str
) -> tuple[Floats, Floats]:
    rng = np.random.default_rng(num_tokens * 100 + n)
    x = rounded(rng.standard_normal((num_tokens, k)), dtype)
    w = rounded(rng.standard_normal((num_experts, n, k)) / np.sqrt(k), dtype)
    return x, w


def grouped(
    device: str, x: Floats, w: Any, routing: Any, dtype: str, out: str, width: int, **options: Any
) -> Any:
    """`w`: an Array [E, N, K], or (blocks, options of packed_expert_gemm)."""
    y = empty(device, [len(x) * options.get("pairs_per_x", 1), width], out)
    rows = put(device, x, dtype)
    if isinstance(w, tuple):
        options.pop("gated", None)
        ops.packed_expert_gemm(context(device), y, rows, w[0], routing, **w[1], **options)
    else:
        ops.expert_gemm(context(device), y, rows, w, routing, **options)
    return y


@on_devices_and_dtypes
@pytest.mark.parametrize("float_out", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k", "n", "k"), GEMMS)
def test_expert_gemm(
    device: str,
    dtype: str,
    float_out: bool,
    gated: bool,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    n: int,
    k: int,
) -> None:
    x, w = expert_inputs(num_tokens, num_experts, n, k, dtype)
    logits = random_logits(num_tokens, num_experts)
    experts, _ = reference.route(logits, top_k, True)
    out = "float32" if float_out else dtype
    width = n // 2 if gated else n

    def run(device: str) -> Floats:
        routing = route(device, logits, num_experts, top_k, True)
        options = {"pairs_per_x": top_k, "gated": gated}
        return get(grouped(device, x, put(device, w, dtype), routing, dtype, out, width, **options))

    expected = reference.expert_gemm(x, w, experts.reshape(-1), top_k, gated)
    check(run, device, expected, "normed_gemm" if gated else "gemm", out)


@on_devices_and_dtypes
def test_rows_of_pairs(device: str, dtype: str) -> None:
    """Each pair has a row of its own, as the input of the down projection."""
    x, w = expert_inputs(30, 6, 40, 24, dtype)
    logits = random_logits(10, 6)
    experts, _ = reference.route(logits, 3, True)

    def run(device: str) -> Floats:
        routing = route(device, logits, 6, 3, True)
        return get(grouped(device, x, put(device, w, dtype), routing, dtype, "float32", 40))

    check(
        run, device, reference.expert_gemm(x, w, experts.reshape(-1), 1, False), "gemm", "float32"
    )


@on_devices_and_dtypes
@pytest.mark.parametrize("gated", [False, True])
def test_a_pair_does_not_depend_on_the_others(device: str, dtype: str, gated: bool) -> None:
    """The result of a token and one of its experts has the same bits in any batch.

    The batches have one token, a few, or many. Some tokens choose the same experts.
    """
    num_experts, top_k, n, k = 9, 3, 64, 264
    x, w = expert_inputs(200, num_experts, n, k, dtype)
    weights = put(device, w, dtype)
    logits = random_logits(200, num_experts)
    logits[100:] = logits[100]  # half of the tokens have the same experts

    def pairs_of(begin: int, end: int) -> Any:
        routing = route(device, logits[begin:end], num_experts, top_k, True)
        options = {"pairs_per_x": top_k, "gated": gated}
        width = n // 2 if gated else n
        return grouped(
            device, x[begin:end], weights, routing, dtype, dtype, width, **options
        ).numpy()

    whole = pairs_of(0, 200)
    for begin, end in [(0, 1), (5, 7), (90, 154), (100, 200), (199, 200), (3, 200)]:
        part = pairs_of(begin, end)
        assert np.array_equal(part, whole[top_k * begin : top_k * end]), f"rows {begin} to {end}"


# ---- 4 bits


def w4_experts(
    device: str, num_experts: int, n: int, k: int, copies: int = 1, **variant: Any
) -> tuple[Floats, tuple[Any, dict[str, Any]]]:
    """Returns dequantised weights [E, N, K], and the arguments of `grouped`.

    `grouped` gets each expert `copies` times.
    """
    made = [Weights(k=k, n=n, seed=expert, **variant) for expert in range(num_experts)]
    blocks = np.stack([each.blocks.reshape(-1) for each in made] * copies)
    pad = np.zeros((len(blocks), 256), np.uint8)  # experts may be further apart
    options = {
        "n": n,
        "k": k,
        "zero_points": made[0].has_zeros,
        "scale_dtype": made[0].scale_dtype,
        "gated": made[0].gated,
    }
    array = put_raw(device, np.concatenate([blocks, pad], axis=1))
    return np.stack([each.values for each in made]), (array, options)


W4_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "zeros": {"has_zeros": True},
    "bfloat16 scales": {"scale_dtype": "bfloat16"},
    "channel-wise": {"channel_wise": True, "has_zeros": True},
}


@on_devices_and_dtypes
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("variant", W4_VARIANTS)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "n", "k"),
    sizes((1, 4, 2, 256, 128), (3, 5, 3, 48, 200), (70, 6, 2, 272, 392), (64, 20, 4, 528, 256)),
)
def test_w4_expert_gemm(
    device: str,
    dtype: str,
    gated: bool,
    variant: str,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    n: int,
    k: int,
) -> None:
    x, _ = expert_inputs(num_tokens, 1, 8, k, dtype)
    logits = random_logits(num_tokens, num_experts)
    experts, _ = reference.route(logits, top_k, True)
    width = n // 2 if gated else n
    values, _ = w4_experts("cpu", num_experts, n, k, gated=gated, **W4_VARIANTS[variant])

    def run(device: str) -> Floats:
        _, w = w4_experts(device, num_experts, n, k, gated=gated, **W4_VARIANTS[variant])
        routing = route(device, logits, num_experts, top_k, True)
        y = grouped(device, x, w, routing, dtype, "float32", width, pairs_per_x=top_k)
        return get(y)

    expected = reference.expert_gemm(x, values, experts.reshape(-1), top_k, gated)
    check(run, device, expected, "gemm", "float32")


@on_devices_and_dtypes
@pytest.mark.parametrize(("copies", "gated"), [(1, False), (20, False), (20, True)])
@pytest.mark.parametrize("k", sizes(264, 1000, 2048, 4736))
def test_a_w4_pair_does_not_depend_on_the_others(
    device: str, dtype: str, k: int, copies: int, gated: bool
) -> None:
    """One, two and more k blocks for each warp, which fit its stages or do not.

    With 100 experts and many tokens, a warp of a GPU with up to 132 SMs computes whole tiles. One
    expert has more than 8 pairs.
    """
    if copies > 1:
        for_cuda_only(device, "tiles enough that a warp computes all splits of its tile")
    num_experts, top_k, n = 5 * copies, 2, 272
    _, w = w4_experts(device, 5, n, k, copies=copies, gated=gated)
    width = n // 2 if gated else n
    x, _ = expert_inputs(100, 1, 8, k, dtype)
    logits = random_logits(100, num_experts)
    logits[:, 1] += 3

    def pairs_of(begin: int, end: int) -> Any:
        routing = route(device, logits[begin:end], num_experts, top_k, True)
        return grouped(
            device, x[begin:end], w, routing, dtype, dtype, width, pairs_per_x=top_k
        ).numpy()

    whole = pairs_of(0, 100)
    for begin, end in [(0, 1), (5, 7), (30, 94), (99, 100), (3, 100)]:
        part = pairs_of(begin, end)
        assert np.array_equal(part, whole[top_k * begin : top_k * end]), f"rows {begin} to {end}"


# ---- the sum over experts


@on_devices_and_dtypes
@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "width"), sizes((1, 1, 8), (5, 8, 72), (64, 10, 264), (300, 2, 40))
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_combine(
    device: str,
    dtype: str,
    has_shared: bool,
    has_bias: bool,
    num_tokens: int,
    top_k: int,
    width: int,
) -> None:
    rng = np.random.default_rng(width)
    bias = rounded(rng.standard_normal((12, width)), dtype)
    hidden = rounded(rng.standard_normal((num_tokens, width)), dtype)
    y = rounded(rng.standard_normal((num_tokens * top_k, width)), "float32")
    shared = rounded(rng.standard_normal((num_tokens, width)), "float32")
    logits = random_logits(num_tokens, 13)
    experts, weights = reference.route(logits[:, :12], top_k, True)

    def combined(device: str, begin: int, end: int) -> Any:
        routing = route(device, logits[begin:end], 12, top_k, True)
        result = put(device, hidden[begin:end], dtype)
        extra = {"bias": put(device, bias, dtype)} if has_bias else {}
        if has_shared:
            extra["shared"] = put(device, shared[begin:end])
            extra["shared_gate"] = put(device, logits[begin:end])
            extra["gate_column"] = 12
        rows = put(device, y[begin * top_k : end * top_k])
        ops.moe_combine(context(device), result, rows, routing, scale=0.5, **extra)
        return result

    parts = y.reshape(num_tokens, top_k, width) + (bias[experts] if has_bias else 0)
    total = np.einsum("tk,tkd->td", weights, parts)
    if has_shared:
        total += shared / (1 + np.exp(-logits[:, 12:]))
    check(
        lambda on: get(combined(on, 0, num_tokens)),
        device,
        hidden + 0.5 * total,
        "exact_inputs",
        dtype,
    )
    last = combined(device, num_tokens - 1, num_tokens).numpy()
    assert np.array_equal(last, combined(device, 0, num_tokens).numpy()[-1:])


@GPU
@pytest.mark.parametrize("num_tokens", [1, 5, 64])
def test_a_graph_follows_the_router(num_tokens: int) -> None:
    """A captured graph is replayed with other logits: the experts are chosen on the device."""
    device, num_experts, top_k, n, k = "cuda", 16, 3, 64, 72
    x, w = expert_inputs(num_tokens, num_experts, n, k, "bfloat16")
    rows, weights = put(device, x, "bfloat16"), put(device, w, "bfloat16")
    logits = put(device, random_logits(num_tokens, num_experts))
    routing = ops.Routing(
        context(device), num_tokens=num_tokens, num_experts=num_experts, top_k=top_k
    )
    y = empty(device, [num_tokens * top_k, n])
    hidden = empty(device, [num_tokens, n], "bfloat16")

    def body() -> None:
        ops.moe_route(context(device), routing, logits, renormalise=True)
        ops.expert_gemm(context(device), y, rows, weights, routing, pairs_per_x=top_k)
        ops.moe_combine(context(device), hidden, y, routing)

    graph = context(device).graph(body)
    for seed in range(3):
        scores = np.random.default_rng(seed).standard_normal((num_tokens, num_experts))
        logits.copy_from(scores.astype(np.float32))
        hidden.copy_from(np.zeros((num_tokens, n), np.uint16))
        graph.replay()
        experts, share = reference.route(scores.astype(np.float32).astype(float), top_k, True)
        pairs = reference.expert_gemm(x, w, experts.reshape(-1), top_k, False)
        expected = np.einsum("tk,tkn->tn", share, pairs.reshape(num_tokens, top_k, n))
        assert_close(get(hidden), expected, KERNELS["gemm"]["bfloat16"])


@on_devices
def test_shapes_must_agree(device: str) -> None:
    routing = route(device, random_logits(2, 4), 4, 2, True)
    x, w = put(device, np.ones((2, 16)), "float16"), put(device, np.ones((4, 16, 16)), "float16")
    for rows, per_x, weight in [
        ((4, 16), 1, w),  # x has a row for each token
        ((4, 24), 2, w),
        ((4, 16), 2, put(device, np.ones((3, 16, 16)), "float16")),
        ((4, 16), 2, put(device, np.ones((4, 16, 16)), "bfloat16")),
    ]:
        with pytest.raises(ValueError, match="expert_gemm"):
            y = empty(device, rows, "float16")
            ops.expert_gemm(context(device), y, x, weight, routing, pairs_per_x=per_x)
    with pytest.raises(ValueError, match="moe_combine"):
        ops.moe_combine(context(device), x, empty(device, [2, 16]), routing)
