"""Times a mixture of experts with 4-bit weights on the GPU, 1 to 64 tokens: one line per shape.

Every launch has the weights of another layer, so the L2 cache is cold, as within a model. Routing
is by a random router, nearly uniform.

| part | ops |
|---|---|
| router | norm (up to 8 tokens in the launch), scores and routing |
| gate_up | gate and up of the chosen experts |
| down | down of the chosen experts, without early weights |
| combine | the weighted sum and the next norm |
| block | the four launches in a row, down with early weights |
| warm ... | the same for one layer again and again: with one token, L2 holds its weights |

The difference of block and warm block is the most that a correct prefetch of all experts into L2
can gain. The share of the roofline is the time of the chosen experts' bytes (of the router's for
its part) at the read bandwidth of this run. A share of `combine` would say nothing: it reads no
weights.

    python scripts/bench/bench_experts.py [--experts 128] [--top-k 8] [--width 768]
        [--tokens 1 2 4] [--json]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import numpy as np
from bench_attention import COLD_BYTES, microseconds, normal, open_device, raw

from cpmcu import C

ops = C.ops
DTYPE = "bfloat16"
TOKENS = [1, 2, 4, 8, 16, 32, 64]
BLOCK_BYTES = 16384 + 512
PARTS = ["router", "gate_up", "down", "combine", "block", "warm gate_up", "warm down", "warm block"]


def blocks(n: int, k: int) -> int:
    """Returns the number of weight blocks of an expert's matrix [n, k]."""
    return -(-n // 256) * -(-k // 128)


def weight_bytes(n: int, k: int) -> float:
    """Bytes of q and scales that an expert's matrix needs."""
    return n * k / 2 + n * k / 64


class Layer:
    """The weights, the routing and the buffers of one layer."""

    def __init__(self, ctx: Any, shape: argparse.Namespace, tokens: int, weights: Any) -> None:
        self.ctx, self.shape, self.tokens = ctx, shape, tokens
        self.gate_up_w, self.down_w, self.router_w, self.norm_weight, self.hidden = weights
        hidden, pairs = shape.hidden, tokens * shape.top_k
        self.routing = ops.Routing(
            ctx, num_tokens=tokens, num_experts=shape.experts, top_k=shape.top_k
        )
        self.x = ops.Array(ctx, [tokens, hidden], DTYPE)
        self.logits = ops.Array(ctx, [tokens, shape.experts], "float32")
        self.act = ops.Array(ctx, [pairs, shape.width], DTYPE)
        self.out = ops.Array(ctx, [pairs, hidden], "float32")
        self.normed = ops.Array(ctx, [tokens, hidden], DTYPE)
        self.memory = raw(ctx, np.zeros(ops.moe_router_bytes(tokens, shape.experts), np.uint8))

    def router(self) -> None:
        ops.moe_router(
            self.ctx, self.logits, self.x, self.router_w, self.routing, memory=self.memory,
            renormalise=True, norm_x=self.hidden, norm_weight=self.norm_weight,
        )  # fmt: skip

    def gate_up(self) -> None:
        ops.packed_expert_gemm(
            self.ctx, self.act, self.x, self.gate_up_w, self.routing, n=2 * self.shape.width,
            pairs_per_x=self.shape.top_k, k=self.shape.hidden, scale_dtype=DTYPE, gated=True,
        )  # fmt: skip

    def down(self, early: bool = False) -> None:
        ops.packed_expert_gemm(
            self.ctx, self.out, self.act, self.down_w, self.routing, n=self.shape.hidden,
            k=self.shape.width, scale_dtype=DTYPE, routing_is_complete=early,
        )  # fmt: skip

    def combine(self) -> None:
        ops.moe_combine(
            self.ctx, self.hidden, self.out, self.routing, scale=0.0, normed=self.normed,
            norm_weight=self.norm_weight,
        )  # fmt: skip

    def block(self) -> None:
        self.router()
        self.gate_up()
        self.down(early=True)
        self.combine()

    def active_experts(self) -> int:
        return int(self.routing.num_active.numpy().item())


def expert_blocks(experts: int, n: int, k: int) -> Any:
    """Blocks of random q and equal scales, for all experts; one block is repeated."""
    block = np.random.default_rng(0).integers(0, 256, BLOCK_BYTES).astype(np.uint8)
    block[16384:] = np.frombuffer(b"\x00\x3c" * 256, np.uint8)  # 2^-7 in bfloat16
    return np.resize(block, (experts, blocks(n, k) * BLOCK_BYTES))


class Bench:
    """Layers with as many weights as are needed for a cold cache."""

    def __init__(self, ctx: Any, shape: argparse.Namespace) -> None:
        self.ctx, self.shape = ctx, shape
        gate_up, down = (2 * shape.width, shape.hidden), (shape.hidden, shape.width)
        self.expert_bytes = [weight_bytes(*gate_up), weight_bytes(*down)]
        self.router_bytes = 2 * shape.experts * shape.hidden
        count = int(COLD_BYTES / (shape.top_k * min(self.expert_bytes))) + 1
        rng = np.random.default_rng(1)
        values = [expert_blocks(shape.experts, *size) for size in (gate_up, down)]
        self.weights = [
            (
                raw(ctx, values[0]),
                raw(ctx, values[1]),
                self.bfloat16(rng.standard_normal((shape.experts, shape.hidden))),
                normal(ctx, [shape.hidden], DTYPE),
            )
            for _ in range(min(count, shape.layers))
        ]
        self.rng = rng

    def bfloat16(self, values: Any) -> Any:
        bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        array = ops.Array(self.ctx, list(bits.shape), DTYPE)
        array.copy_from(bits)
        return array

    def times(self, tokens: int) -> tuple[dict[str, float], float]:
        """Microseconds of each part, and the mean number of experts with pairs."""
        hidden = self.shape.hidden
        layers = [
            Layer(
                self.ctx, self.shape, tokens,
                (*weights, self.bfloat16(self.rng.standard_normal((tokens, hidden)))),
            )
            for weights in self.weights
        ]  # fmt: skip
        times: dict[str, float] = {}
        for part in PARTS:
            warm, name = part.startswith("warm "), part.removeprefix("warm ")

            def body(name: str = name, warm: bool = warm) -> None:
                for layer in layers:
                    run: Callable[[], None] = getattr(layers[0] if warm else layer, name)
                    run()

            times[part] = microseconds(self.ctx, body, len(layers))
        return times, float(np.mean([layer.active_experts() for layer in layers]))

    def floors(self, active: float, bandwidth: float) -> dict[str, float]:
        """Microseconds of reading each part's weights."""
        gate_up, down = (active * each for each in self.expert_bytes)
        parts = {"router": float(self.router_bytes), "gate_up": gate_up, "down": down}
        parts["block"] = sum(parts.values())
        return {part: size / bandwidth / 1e3 for part, size in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--width", type=int, default=768, help="of an expert")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--layers", type=int, default=48, help="at most, for a cold cache")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    args = parser.parse_args()
    ctx, bandwidth = open_device(DTYPE)
    bench = Bench(ctx, args)
    for tokens in args.tokens:
        times, active = bench.times(tokens)
        floors = bench.floors(active, bandwidth)
        for part, time in times.items():
            share = floors[part] / time if part in floors else None
            line = {"tokens": tokens, "experts": active, "part": part, "us": time}
            if share is not None:
                line["roofline"] = share
            if args.json:
                print(json.dumps(line))
                continue
            text = "" if share is None else f"{share:6.0%}"
            print(f"{tokens:3} tokens {active:6.1f} experts  {part:12} {time:8.2f} us {text}")


if __name__ == "__main__":
    main()
