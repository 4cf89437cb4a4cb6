"""The launches of a layer of experts: each has the bits of the ops that it replaces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.group_weights import FloatWeights
from tests.kernels.test_experts import (
    check_sorted,
    expert_inputs,
    grouped,
    random_logits,
    route,
    w4_experts,
)
from tests.kernels.util import (
    GPU,
    context,
    empty,
    for_cuda_only,
    get,
    on_devices_and_dtypes,
    ops,
    put,
    put_raw,
    rounded,
    sizes,
)

# tokens, experts, top_k, further rows of W, H
ROUTERS = sizes(
    (1, 128, 8, 0, 2048), (8, 128, 8, 1, 2048), (1, 8, 2, 0, 8), (3, 17, 3, 1, 136),
    (7, 512, 10, 1, 264), (9, 61, 5, 0, 520), (64, 128, 8, 1, 1032), (5, 1024, 32, 0, 72),
    (2, 16, 4, 0, 4096), (2, 16, 4, 0, 4104), (70, 24, 3, 1, 72),
)  # fmt: skip


@on_devices_and_dtypes
@pytest.mark.parametrize(("has_norm", "has_bias"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k", "further", "width"), ROUTERS)
def test_router_has_the_bits_of_its_parts(
    device: str,
    dtype: str,
    has_norm: bool,
    has_bias: bool,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    further: int,
    width: int,
) -> None:
    """The launch equals rms_norm, skinny_gemm, a sum and moe_route. A second launch works, too."""
    rng = np.random.default_rng(width + num_tokens)
    further = 0 if has_bias else further
    ctx, rows = context(device), num_experts + further
    given = rounded(rng.standard_normal((num_tokens, width)), dtype)
    w = put(device, rounded(rng.standard_normal((rows, width)) / np.sqrt(width), dtype), dtype)
    norm_weight = put(device, rounded(rng.standard_normal(width), dtype), dtype)
    bias = put(device, rounded(rng.standard_normal((1, num_experts)), dtype), dtype)
    extra = {"bias": bias} if has_bias else {}
    memory = put_raw(device, np.zeros(ops.moe_router_bytes(num_tokens, rows), np.uint8))
    for tokens in (num_tokens, num_tokens // 2 + 1):
        part = put(device, given[:tokens], dtype)
        expected_x = put(device, given[:tokens], dtype)
        if has_norm:
            ops.rms_norm(ctx, expected_x, part, norm_weight, eps=1e-5, weight_offset=1.0)
        expected = empty(device, [tokens, rows])
        ops.skinny_gemm(ctx, expected, expected_x, w)
        if has_bias:
            expected = put(device, expected.numpy() + get(bias).astype(np.float32))
        plain = ops.Routing(ctx, num_tokens=tokens, num_experts=num_experts, top_k=top_k)
        ops.moe_route(ctx, plain, expected, renormalise=True)
        hidden, x = put(device, given[:tokens], dtype), put(device, given[:tokens], dtype)
        norm = {}
        if has_norm:
            x = empty(device, [tokens, width], dtype)
            norm = {
                "norm_x": hidden, "norm_weight": norm_weight, "norm_eps": 1e-5, "norm_offset": 1.0
            }  # fmt: skip
        logits = empty(device, [tokens, rows])
        routing = ops.Routing(ctx, num_tokens=tokens, num_experts=num_experts, top_k=top_k)
        extra |= norm
        ops.moe_router(ctx, logits, x, w, routing, memory=memory, renormalise=True, **extra)
        assert np.array_equal(x.numpy(), expected_x.numpy())
        assert np.array_equal(logits.numpy(), expected.numpy())
        assert np.array_equal(routing.weights.numpy(), plain.weights.numpy())
        check_sorted(routing, plain.experts.numpy().astype(np.int64), num_experts)


@on_devices_and_dtypes
@pytest.mark.parametrize(("num_tokens", "width"), sizes((1, 2048), (5, 72), (64, 520), (2, 8200)))
def test_combine_and_norm(device: str, dtype: str, num_tokens: int, width: int) -> None:
    """The norm in the launch has the bits of rms_norm after it."""
    rng = np.random.default_rng(width)
    top_k, ctx = 3, context(device)
    hidden = rounded(rng.standard_normal((num_tokens, width)), dtype)
    weight = put(device, rounded(rng.standard_normal(width), dtype), dtype)
    y = put(device, rng.standard_normal((num_tokens * top_k, width)), "float32")
    routing = route(device, random_logits(num_tokens, 12), 12, top_k, True)
    separate, expected = put(device, hidden, dtype), empty(device, [num_tokens, width], dtype)
    ops.moe_combine(ctx, separate, y, routing)
    ops.rms_norm(ctx, expected, separate, weight, eps=1e-5, weight_offset=1.0)
    fused, normed = put(device, hidden, dtype), empty(device, [num_tokens, width], dtype)
    ops.moe_combine(
        ctx, fused, y, routing, normed=normed, norm_weight=weight, norm_eps=1e-5, norm_offset=1.0
    )
    assert np.array_equal(fused.numpy(), separate.numpy())
    assert np.array_equal(normed.numpy(), expected.numpy())


def mxfp4_experts(device: str, num_experts: int, n: int, k: int) -> tuple[Any, dict[str, Any]]:
    """The blocks [E, bytes] and the other arguments of packed_expert_gemm."""
    made = [FloatWeights("mxfp4", n, k, seed=seed) for seed in range(num_experts)]
    blocks = np.stack([each.blocks(device).numpy().reshape(-1) for each in made])
    return put_raw(device, blocks), {"n": n, "k": k, **made[0].layout}


@on_devices_and_dtypes
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "width", "k"),
    sizes((1, 40, 352), (7, 168, 96), (9, 40, 2880), (70, 40, 1120), (9, 4224, 160)),
)
def test_swiglu_has_the_bits_of_its_parts(
    device: str, dtype: str, is_packed: bool, num_tokens: int, width: int, k: int
) -> None:
    """For gpt-oss, dense or MXFP4, the launch equals a GEMM of experts, then gated_activation.

    The bits of a token's pairs do not depend on the other tokens.
    """
    if width == 4224:
        for_cuda_only(device, "tiles enough that a warp computes all splits of its tile")
    num_experts, top_k, n = 6, 3, 2 * width
    x, dense = expert_inputs(num_tokens, num_experts, n, k, dtype)
    rng = np.random.default_rng(k)
    bias = put(device, rounded(rng.standard_normal((num_experts, n)), dtype), dtype)
    w = put(device, dense, dtype)
    if is_packed:
        w = mxfp4_experts(device, num_experts, n, k)
    logits = random_logits(num_tokens, num_experts)
    routing = route(device, logits, num_experts, top_k, True)
    both = grouped(device, x, w, routing, dtype, dtype, n, pairs_per_x=top_k)
    expected = empty(device, [num_tokens * top_k, width], dtype)
    ops.gated_activation(
        context(device), out=expected, x=both, kind="clamped_swiglu", alpha=1.5, limit=3.0,
        alternates=True, bias=bias, index=routing.experts,
    )  # fmt: skip
    swiglu = {"bias": bias, "swiglu_alpha": 1.5, "swiglu_limit": 3.0}
    y = grouped(device, x, w, routing, dtype, dtype, width, pairs_per_x=top_k, **swiglu)
    assert np.array_equal(y.numpy(), expected.numpy())
    alone = route(device, logits[-1:], num_experts, top_k, True)
    last = grouped(device, x[-1:], w, alone, dtype, dtype, width, pairs_per_x=top_k, **swiglu)
    assert np.array_equal(last.numpy(), expected.numpy()[-top_k:])


@on_devices_and_dtypes
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 7, 70])
def test_bias_of_down_has_the_bits_of_the_sum(
    device: str, dtype: str, is_packed: bool, num_tokens: int
) -> None:
    """The bias of down is added by its GEMM in decode steps, by moe_combine in prompts."""
    num_experts, top_k, n, k = 6, 3, 72, 352
    pairs, dense = expert_inputs(num_tokens * top_k, num_experts, n, k, dtype)
    rng = np.random.default_rng(num_tokens)
    bias = put(device, rounded(rng.standard_normal((num_experts, n)), dtype), dtype)
    w = put(device, dense, dtype)
    if is_packed:
        w = mxfp4_experts(device, num_experts, n, k)
    routing = route(device, random_logits(num_tokens, num_experts), num_experts, top_k, True)
    hidden = rounded(rng.standard_normal((num_tokens, n)), dtype)

    def combined(of_gemm: dict[str, Any], of_sum: dict[str, Any]) -> Any:
        y = grouped(device, pairs, w, routing, dtype, "float32", n, **of_gemm)
        result = put(device, hidden, dtype)
        ops.moe_combine(context(device), result, y, routing, **of_sum)
        return result.numpy()

    assert np.array_equal(combined({"bias": bias}, {}), combined({}, {"bias": bias}))
    assert not np.array_equal(combined({"bias": bias}, {}), combined({}, {}))


@GPU
@pytest.mark.parametrize("num_tokens", [1, 2, 8, 33, 64])
def test_early_weights_change_nothing(num_tokens: int) -> None:
    """The launches of a layer in a graph, for other rows of x: down reads the routing early."""
    device, dtype, num_experts, top_k, hidden, width = "cuda", "bfloat16", 64, 6, 512, 384
    rng, ctx = np.random.default_rng(num_tokens), context(device)
    _, (up_blocks, up) = w4_experts(device, num_experts, 2 * width, hidden, gated=True)
    _, (down_blocks, down) = w4_experts(device, num_experts, hidden, width)
    router = put(device, rng.standard_normal((num_experts, hidden)), dtype)
    weight = put(device, rng.standard_normal(hidden), dtype)
    memory = put_raw(device, np.zeros(ops.moe_router_bytes(num_tokens, num_experts), np.uint8))
    stream, x = (empty(device, [num_tokens, hidden], dtype) for _ in range(2))
    logits = empty(device, [num_tokens, num_experts])
    act = empty(device, [num_tokens * top_k, width], dtype)
    out = empty(device, [num_tokens * top_k, hidden])
    routing = ops.Routing(ctx, num_tokens=num_tokens, num_experts=num_experts, top_k=top_k)

    def layer(early: bool) -> None:
        norm = {"norm_x": stream, "norm_weight": weight}
        ops.moe_router(ctx, logits, x, router, routing, memory=memory, **norm)
        ops.packed_expert_gemm(ctx, act, x, up_blocks, routing, pairs_per_x=top_k, **up)
        ops.packed_expert_gemm(
            ctx, out, act, down_blocks, routing, routing_is_complete=early, **down
        )
        ops.moe_combine(ctx, stream, out, routing, scale=0.1)

    def layers() -> None:
        for _ in range(6):
            layer(True)

    graph = ctx.graph(layers)
    for _ in range(5):
        values = rounded(rng.standard_normal((num_tokens, hidden)), dtype)
        stream.copy_from(put(device, values, dtype).numpy())
        for _ in range(6):
            layer(False)
            ctx.synchronize()
        expected = stream.numpy().copy()
        stream.copy_from(put(device, values, dtype).numpy())
        graph.replay()
        assert np.array_equal(stream.numpy(), expected)
