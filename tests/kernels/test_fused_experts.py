"""`fused_experts` has the bits of the ops that it replaces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.packed import Weights
from tests.kernels.test_experts import W4_VARIANTS
from tests.kernels.util import (
    GPU,
    context,
    empty,
    on_devices_and_dtypes,
    ops,
    put,
    put_raw,
    rounded,
    sizes,
)

# tokens, experts, top_k, H, I
LAYERS = sizes(
    (1, 128, 8, 2048, 768), (8, 128, 8, 2048, 768), (1, 8, 2, 128, 8), (3, 17, 3, 256, 136),
    (5, 256, 8, 2048, 512), (2, 250, 10, 4096, 128), (8, 4, 4, 96, 40), (7, 5, 1, 1056, 272),
    (9, 6, 2, 128, 64), (4, 9, 2, 136, 64),
)  # fmt: skip


def packed_experts(device: str, num_experts: int, n: int, k: int, **variant: Any) -> Any:
    """[E, bytes]. The blocks of an expert are those of another one in another order."""
    made = Weights(k=k, n=n, seed=n + k, **variant)
    blocks = made.blocks.reshape(made.blocks.shape[0] * made.blocks.shape[1], -1)
    return put_raw(
        device,
        np.stack([np.roll(blocks, expert, axis=0).reshape(-1) for expert in range(num_experts)]),
    )


class Layer:
    """A layer of experts with random weights, and the arrays of a step."""

    def __init__(
        self, device: str, dtype: str, shape: tuple[int, int, int, int, int], variant: str
    ) -> None:
        tokens, experts, top_k, hidden, width = shape
        rng = np.random.default_rng(hidden + tokens)
        self.device, self.dtype, self.shape, self.ctx = device, dtype, shape, context(device)
        options = W4_VARIANTS[variant]
        self.up = packed_experts(device, experts, 2 * width, hidden, gated=True, **options)
        self.down = packed_experts(device, experts, hidden, width, **options)
        self.form = {
            "zero_points": options.get("has_zeros", False),
            "scale_dtype": options.get("scale_dtype", "float16"),
        }
        self.router = put(device, rng.standard_normal((experts, hidden)) / hidden**0.5, dtype)
        self.weight, self.next_weight = (
            put(device, rng.standard_normal(hidden), dtype) for _ in range(2)
        )
        self.memory = put_raw(
            device, np.zeros(ops.fused_experts_bytes(experts, top_k, width, hidden), np.uint8)
        )
        self.router_memory = put_raw(
            device, np.zeros(ops.moe_router_bytes(tokens, experts), np.uint8)
        )

    def arrays(self, tokens: int) -> dict[str, Any]:
        _, experts, top_k, hidden, width = self.shape
        return {
            "x": empty(self.device, [tokens, hidden], self.dtype),
            "logits": empty(self.device, [tokens, experts]),
            "routing": ops.Routing(
                self.ctx, num_tokens=tokens, num_experts=experts, top_k=top_k
            ),
            "act": empty(self.device, [tokens * top_k, width], self.dtype),
            "y": empty(self.device, [tokens * top_k, hidden]),
        }

    def fused(self, stream: Any, normed: Any, arrays: dict[str, Any]) -> None:
        norms = {} if normed is None else {"normed": normed, "next_weight": self.next_weight}
        ops.fused_experts(
            self.ctx, stream, w=self.router, gate_up=self.up, down=self.down, **arrays,
            memory=self.memory, router_memory=self.router_memory, norm_weight=self.weight,
            eps=1e-5, offset=1.0, scale=0.5, **norms, **self.form,
        )  # fmt: skip

    def separate(self, stream: Any, normed: Any, arrays: dict[str, Any]) -> None:
        _, _, top_k, hidden, width = self.shape
        a, ctx = arrays, self.ctx
        ops.rms_norm(ctx, a["x"], stream, self.weight, eps=1e-5, weight_offset=1.0)
        ops.moe_router(
            ctx, a["logits"], a["x"], self.router, a["routing"], memory=self.router_memory,
            renormalise=True,
        )  # fmt: skip
        ops.packed_expert_gemm(
            ctx, a["act"], a["x"], self.up, a["routing"], pairs_per_x=top_k, n=2 * width,
            k=hidden, gated=True, **self.form,
        )  # fmt: skip
        ops.packed_expert_gemm(
            ctx, a["y"], a["act"], self.down, a["routing"], n=hidden, k=width, **self.form
        )
        ops.moe_combine(ctx, stream, a["y"], a["routing"], scale=0.5)
        if normed is not None:
            ops.rms_norm(ctx, normed, stream, self.next_weight, eps=1e-5, weight_offset=1.0)


@on_devices_and_dtypes
@pytest.mark.parametrize("variant", W4_VARIANTS)
@pytest.mark.parametrize("shape", LAYERS)
def test_fused_experts(
    device: str, dtype: str, variant: str, shape: tuple[int, int, int, int, int]
) -> None:
    """Several launches, with fewer tokens too: the memory is ready for the next one."""
    layer = Layer(device, dtype, shape, variant)
    hidden = shape[3]
    rng = np.random.default_rng(sum(shape))
    for has_norm, tokens in [(True, shape[0]), (True, shape[0] // 2 + 1), (False, shape[0])]:
        values = rounded(rng.standard_normal((tokens, hidden)), dtype)
        streams = [put(device, values, dtype) for _ in range(2)]
        normed = [empty(device, [tokens, hidden], dtype) if has_norm else None for _ in range(2)]
        layer.separate(streams[0], normed[0], layer.arrays(tokens))
        layer.fused(streams[1], normed[1], layer.arrays(tokens))
        assert not np.array_equal(streams[0].numpy(), put(device, values, dtype).numpy())
        assert np.array_equal(streams[1].numpy(), streams[0].numpy())
        if has_norm:
            assert np.array_equal(normed[1].numpy(), normed[0].numpy())


@GPU
@pytest.mark.parametrize("tokens", [1, 2, 5, 8])
def test_launches_that_follow_one_another(tokens: int) -> None:
    """In a graph, a launch begins before the one before it ends."""
    shape = (tokens, 128, 8, 2048, 768)
    layer = Layer("cuda", "bfloat16", shape, "plain")
    stream = empty("cuda", [tokens, 2048], "bfloat16")
    normed, arrays = empty("cuda", [tokens, 2048], "bfloat16"), layer.arrays(tokens)
    rng = np.random.default_rng(tokens)

    def layers() -> None:
        for _ in range(6):
            layer.fused(stream, normed, arrays)

    graph = layer.ctx.graph(layers)
    for _ in range(20):
        values = put("cuda", rounded(rng.standard_normal((tokens, 2048)), "bfloat16"), "bfloat16")
        expected, expected_normed = (empty("cuda", [tokens, 2048], "bfloat16") for _ in range(2))
        expected.copy_from(values.numpy())
        for _ in range(6):
            layer.separate(expected, expected_normed, arrays)
        stream.copy_from(values.numpy())
        graph.replay()
        assert np.array_equal(stream.numpy(), expected.numpy())
        assert np.array_equal(normed.numpy(), expected_normed.numpy())
