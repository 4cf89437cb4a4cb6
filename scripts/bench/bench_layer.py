"""Times decoder layers as a step of an 8B model runs them: attention and the fused layer kernel.

A graph has all layers of a model. Each layer has its own KV cache, and there is more than 1 GB of
weights. A layer is two launches: attention_splits, then fused_layer, which combines the splits and
runs o, gate and up, down and the next layer's qkv, with the norms and rotary_kv.

Prints one line for each number of rows and KV entries. One row is plain decoding; more rows are a
tree to verify. The floor is the bytes of a layer's weights and KV entries over the read bandwidth
measured in this run.

    python scripts/bench/bench_layer.py [--bits 4,16] [--rows 1,8,32] [--contexts 1024] [--json]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import Any

import numpy as np
from bench_attention import HEAD_DIM, Shape, microseconds, normal, raw, tree_masks
from bench_w4 import COLD_BYTES, SHAPES, bytes_of, dense_weights, rows_of, weights

from cpmcu import C

ops = C.ops
HEADS = {"MiniCPM4-8B": (32, 2), "Llama-3.1-8B": (32, 8)}  # query heads, KV heads
GEMMS = ("qkv", "o", "gate_up", "down")
LAYERS = 32
ROWS = [1, 8, 16, 32, 64]
CONTEXTS = [1024, 8192]
ALPHA = 0.05  # scale of a layer's output, so that many passes stay finite


class Stack:
    """The layers of a model."""

    def __init__(self, ctx: Any, model: str, bits: int, dtype: str, layers: int) -> None:
        self.ctx, self.model, self.bits, self.dtype = ctx, model, bits, dtype
        self.shapes, self.layers = SHAPES[model], layers

        copies = min(layers, math.ceil(COLD_BYTES / self.bytes_of_layer(0)))

        def made(name: str) -> list[Any]:
            if bits == 16:
                return dense_weights(ctx, *self.shapes[name], copies, dtype)
            return weights(ctx, *self.shapes[name], copies, gated=name == "gate_up")

        self.weights = [dict(zip(GEMMS, each)) for each in zip(*(made(name) for name in GEMMS))]
        self.norm = rows_of(ctx, 1, self.shapes["o"][0], dtype)
        inv_freq = 10000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        self.inv_freq = raw(ctx, inv_freq.astype(np.float32))

    def bytes_of_layer(self, entries: int) -> float:
        gemm_bytes = sum(bytes_of(self.shapes[name], self.bits) for name in GEMMS)
        return gemm_bytes + 2 * 2 * entries * HEADS[self.model][1] * HEAD_DIM

    def pass_of(self, count: int, length: int) -> Any:
        """A function that launches all layers for `count` rows after `length` KV entries."""
        ctx, dtype, shapes = self.ctx, self.dtype, self.shapes
        hidden_size, width = shapes["o"][0], shapes["down"][1]
        memory = ops.Array(ctx, [max(1, ops.fused_layer_bytes(count))], "uint8")
        ops.fused_layer_prepare(ctx, memory)
        cache = Shape(ctx, HEADS[self.model], length + count, count, self.layers, dtype)
        masks = tree_masks(count) if count > 1 else None
        rows = [cache.rows(slot, self.layers, length, count, masks) for slot in range(self.layers)]
        hidden = normal(ctx, [count, hidden_size], dtype)
        normed, act = (ops.Array(ctx, [count, n], dtype) for n in (hidden_size, width))
        scratch = ops.Array(ctx, [count, 2 * width], dtype)
        heads = {"num_heads": cache.num_heads, "num_kv_heads": cache.num_kv_heads}
        common = {"qkv": cache.qkv, "k_cache": cache.k_cache, "v_cache": cache.v_cache}
        common |= {"head_dim": HEAD_DIM, **heads}

        def attention(layer: int) -> Any:
            return ops.Attention(
                out=cache.out,
                scale=HEAD_DIM**-0.5,
                by_position=masks is not None,
                tokens=rows[layer],
                scratch=cache.scratch,
                **common,
            )

        def rotary(layer: int) -> Any:
            return ops.RotaryKv(inv_freq=self.inv_freq, tokens=rows[layer], **common)

        def weights_of(layer: int) -> dict[str, Any]:
            return self.weights[layer % self.layers % len(self.weights)]

        def gemms(layer: int) -> list[Any]:
            of, after = weights_of(layer), weights_of(layer + 1)
            norm = {"normed": normed, "norm_weight": self.norm}
            gate = {"gated": True, "scratch": scratch} if self.bits == 16 else {}
            return [
                ops.FusedGemm(hidden, cache.out, of["o"], alpha=ALPHA, beta=1.0, **norm),
                ops.FusedGemm(act, normed, of["gate_up"], **gate),
                ops.FusedGemm(hidden, act, of["down"], alpha=ALPHA, beta=1.0, **norm),
                ops.FusedGemm(cache.qkv, normed, after["qkv"]),
            ]

        def following(layer: int) -> list[Any]:
            after = weights_of(layer + 1)
            return [after["o"], after["gate_up"]] if self.bits == 4 else []

        launches = [
            (attention(i), gemms(i), rotary((i + 1) % self.layers), following(i))
            for i in range(self.layers)
        ]

        def run() -> None:
            for attended, layer_gemms, rotated, after in launches:
                ops.attention_splits(ctx, attended)
                ops.fused_layer(
                    ctx, layer_gemms, memory, rotary=rotated, attention=attended, following=after
                )

        return run


def numbers(text: str) -> list[int]:
    """A comma list of positive integers."""
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise ValueError(text)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(SHAPES), help="default: each")
    parser.add_argument("--bits", type=numbers, default=[4, 16], help="4, 16 or both")
    parser.add_argument("--rows", type=numbers, default=ROWS, help="comma list, each 1 to 64")
    parser.add_argument(
        "--contexts", type=numbers, default=CONTEXTS, help="comma list of KV entries"
    )
    parser.add_argument("--layers", type=int, default=LAYERS, help="layers of a pass")
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"])
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args()
    if not {4, 16}.issuperset(args.bits) or max(args.rows) > 64 or args.layers < 1:
        parser.error("expected --bits of 4 and 16, --rows up to 64 and at least one layer")
    ctx = ops.Context("cuda")
    peak = C.ceilings("cuda")["read_bytes_per_second"] / 1e9
    if not args.json:
        sys.stdout.write(f"read bandwidth {peak:.0f} GB/s, {args.dtype}, {args.layers} layers\n")
    for model in [args.model] if args.model else SHAPES:
        for bits in args.bits:
            stack = Stack(ctx, model, bits, args.dtype, args.layers)
            for entries in args.contexts:
                first = math.nan
                for count in args.rows:
                    us = microseconds(ctx, stack.pass_of(count, entries), args.layers)
                    first = us if count == args.rows[0] else first
                    floor = stack.bytes_of_layer(entries) / peak / 1e3
                    result = {"us": us, "floor_us": floor, "roofline": floor / us}
                    name = {"model": model, "bits": bits, "rows": count, "entries": entries}
                    line = f"{model:13} {bits:2} bits, context {entries:6}, rows {count:2}"
                    line += f" {us:8.2f} µs | {floor / us:6.1%} of bandwidth"
                    line += f" | {us / first:.2f} times that of {args.rows[0]}"
                    sys.stdout.write((json.dumps(name | result) if args.json else line) + "\n")
                    sys.stdout.flush()


if __name__ == "__main__":
    main()
