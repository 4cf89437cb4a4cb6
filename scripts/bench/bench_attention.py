"""Times attention_decode and attention_prefill on the GPU: one line per shape.

Decode is limited by memory. Every launch reads another sequence's cache, so the L2 cache is cold,
as between the layers of a model. A CUDA graph has as many launches as a model has layers, so the
cost of a graph launch is paid once a step. The roofline is the read bandwidth of this run on 1 GiB
(the higher of skinny_gemm and silu_mul). Prefill is timed in TFLOP/s over the unmasked entries.

Decode is timed for one token, for a chain of 32 tokens, and for the verification of a tree of 32
tokens (by_position). The outputs of the tree must be bit-identical to plain decoding.

With --fp8, the cache has e4m3 codes and their scales. With --rotary, rotary_kv with norms of q and
k runs before each decode attention: as a launch of its own (apart), or as part of it (together).
With --one-token, only decode of one token is timed.

    python scripts/bench/bench_attention.py [--fp8] [--rotary apart] [--one-token]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cpmcu import C

ops = C.ops
PAGE = 64
HEAD_DIM = 128
LAYOUTS = [(32, 8), (32, 4), (32, 2)]  # query heads, KV heads
DECODE_CELLS = [1024, 1100, 8192, 32768, 131072]
DECODE_ROWS = [(1, False), (32, False), (32, True)]  # number of rows, and whether they are a tree
PROMPTS = [2048, 8192, 32768]
CHUNK = 2048
COLD_BYTES = 256 << 20  # bytes read between two reads of a cache; larger than L2
MAX_COPIES = 64
LAUNCHES = 32  # the least in one graph


def raw(ctx: Any, values: Any, pinned: bool = False) -> Any:
    """Copies integers or C structs (as bytes) to the device."""
    source = np.ascontiguousarray(values)
    if source.dtype.fields:
        source = source.view(np.uint8).reshape(*source.shape, source.dtype.itemsize)
    array = ops.Array(ctx, list(source.shape), source.dtype.name, pinned)
    array.copy_from(source)
    return array


def put(ctx: Any, values: Any) -> Any:
    return raw(ctx, np.asarray(values, np.int32))


def tree_masks(count: int) -> list[int]:
    """Returns the ancestor masks of a random tree."""
    rng = np.random.default_rng(0)
    masks = [1]
    for node in range(1, count):
        masks.append(masks[max(0, node - 1 - int(rng.integers(12)))] | 1 << node)
    return masks


def normal(ctx: Any, shape: list[int], dtype: str) -> Any:
    """Returns normally distributed numbers. One block of them is repeated."""
    size = int(np.prod(shape))
    block = np.random.default_rng(0).standard_normal(min(size, 1 << 20)).astype(np.float32)
    if dtype == "bfloat16":
        block = (block.view(np.uint32) >> 16).astype(np.uint16)
    else:
        block = block.astype(dtype)
    array = ops.Array(ctx, shape, dtype)
    array.copy_from(np.resize(block, shape))
    return array


def microseconds(ctx: Any, body: Callable[[], None], launches: int = 1) -> float:
    """Returns the time of one of the `launches` in body(): the best of five graph runs."""
    body()  # an error is raised here, not within a capture
    ctx.synchronize()
    graph = ctx.graph(body)
    once = graph.replay(2) / 2
    times = max(1, int(20 / max(once, 1e-3)))  # about 20 ms
    return float(min(graph.replay(times) / times for _ in range(5)) * 1e3 / launches)


def read_bandwidth(ctx: Any, dtype: str) -> float:
    """Returns the read bandwidth in GB/s."""
    n, k = 65536, 8192
    w = normal(ctx, [n, k], dtype)
    x, y = normal(ctx, [1, k], dtype), ops.Array(ctx, [1, n], dtype)
    weights = n * k * 2 / microseconds(ctx, lambda: ops.skinny_gemm(ctx, y, x, w))
    half = ops.Array(ctx, [n, k // 2], dtype)
    copied = n * k * 3 / microseconds(ctx, lambda: ops.silu_mul(ctx, half, w))
    return max(weights, copied) / 1e3


def caches(ctx: Any, shape: list[int], dtype: str, fp8: bool) -> dict[str, Any]:
    """Keys and values [pages, Hkv, 64, D], and the scales of an fp8 cache."""
    names = ["k_cache", "v_cache"]
    if not fp8:
        return {name: normal(ctx, shape, dtype) for name in names}
    block = np.random.default_rng(0).integers(0, 0x7E, 1 << 20, np.uint8)
    codes = np.resize(block, shape)
    scales = np.full([*shape[:3], 1], 0.01, np.float32)
    return {name: raw(ctx, codes) for name in names} | {
        name: raw(ctx, scales) for name in ("k_scales", "v_scales")
    }


class Shape:
    """Sequences of `entries` KV entries, `rows` of them of this step. No page is shared."""

    def __init__(
        self,
        ctx: Any,
        heads: tuple[int, int],
        entries: int,
        rows: int,
        copies: int,
        dtype: str,
        fp8: bool,
        rotary: str = "",
    ) -> None:
        self.ctx, (self.num_heads, self.num_kv_heads) = ctx, heads
        pages = -(-entries // PAGE)
        table = np.random.default_rng(0).permutation(copies * pages).reshape(copies, pages)
        self.page_table = put(ctx, table)
        cache = [copies * pages, self.num_kv_heads, PAGE, HEAD_DIM]
        self.caches = caches(ctx, cache, dtype, fp8)
        columns = (self.num_heads + 2 * self.num_kv_heads) * HEAD_DIM
        self.qkv = normal(ctx, [rows, columns], dtype)
        self.rotary = rotary
        self.norm = normal(ctx, [HEAD_DIM], dtype)
        self.inv_freq = raw(ctx, 1e4 ** -np.linspace(0, 1, HEAD_DIM // 2, dtype=np.float32))
        self.out = ops.Array(ctx, [rows, self.num_heads * HEAD_DIM], dtype)
        floats = ops.attention_scratch_floats(
            num_tokens=rows,
            num_heads=self.num_heads,
            head_dim=HEAD_DIM,
            max_kv=1 << (entries - 1).bit_length(),
        )
        if rows > PAGE:
            floats = ops.fp8_prefill_floats(self.num_kv_heads, HEAD_DIM, entries) if fp8 else 1
        self.scratch = ops.Array(ctx, [floats], "float32")

    def rows(
        self, slot: int, copies: int, length: int, count: int, masks: list[int] | None = None
    ) -> Any:
        ctx = self.ctx
        depths = range(count) if masks is None else [mask.bit_count() - 1 for mask in masks]
        return ops.StepTokens(
            num_tokens=count,
            num_seqs=1,
            max_seq_tokens=count,
            max_kv=1 << (length + count - 1).bit_length(),  # as for the graphs of an engine
            positions=put(ctx, [length + depth for depth in depths]),
            token_seqs=put(ctx, np.zeros(count)),
            seq_slots=put(ctx, [slot]),
            seq_token_begin=put(ctx, [0, count]),
            slot_lengths=put(ctx, np.full(copies, length)),
            page_table=self.page_table,
            ancestor_masks=None if masks is None else raw(ctx, np.array(masks, np.uint64)),
        )

    def run(self, op: Callable[..., None], rows: Any, by_position: bool = False) -> None:
        more = {}
        if self.rotary:
            rotary = ops.RotaryKv(
                qkv=self.qkv,
                q_norm=self.norm,
                k_norm=self.norm,
                inv_freq=self.inv_freq,
                **self.caches,
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=HEAD_DIM,
                tokens=rows,
            )
            if self.rotary == "apart":
                ops.rotary_kv(self.ctx, rotary)
            else:
                more["rotary"] = rotary
        attention = ops.Attention(
            out=self.out,
            qkv=self.qkv,
            **self.caches,
            scale=HEAD_DIM**-0.5,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=HEAD_DIM,
            by_position=by_position,
            tokens=rows,
            scratch=self.scratch,
            **more,
        )
        op(self.ctx, attention)


def decode(
    ctx: Any,
    heads: tuple[int, int],
    entries: int,
    rows: int,
    dtype: str,
    tree: bool,
    fp8: bool,
    rotary: str = "",
) -> dict[str, float]:
    kv_bytes = 2 * entries * heads[1] * (HEAD_DIM + 4 if fp8 else 2 * HEAD_DIM)
    copies = max(1, min(MAX_COPIES, -(-COLD_BYTES // kv_bytes)))
    launches = max(LAUNCHES, copies)
    shape = Shape(ctx, heads, entries, rows, copies, dtype, fp8, rotary)
    masks = tree_masks(rows) if tree else None
    steps = [shape.rows(slot, copies, entries - rows, rows, masks) for slot in range(copies)]

    def body() -> None:
        for i in range(launches):
            shape.run(ops.attention_decode, steps[i % copies], tree)

    us = microseconds(ctx, body, launches)
    flops = 4.0 * rows * entries * heads[0] * HEAD_DIM
    return {"us": us, "gbps": kv_bytes / us / 1e3, "tflops": flops / us / 1e6}


def prefill(
    ctx: Any, heads: tuple[int, int], prompt: int, dtype: str, fp8: bool
) -> dict[str, float]:
    shape = Shape(ctx, heads, prompt, CHUNK, 1, dtype, fp8)
    # Lengths are in device memory: each chunk has its own tokens; q is the same for all chunks.
    chunks = [shape.rows(0, 1, begin, CHUNK) for begin in range(0, prompt, CHUNK)]

    def body() -> None:
        for chunk in chunks:
            shape.run(ops.attention_prefill, chunk)

    us = microseconds(ctx, body)
    flops = 4.0 * prompt * (prompt + 1) / 2 * heads[0] * HEAD_DIM
    return {"us": us, "tflops": flops / us / 1e6}


def open_device(dtype: str) -> tuple[Any, float]:
    """The context of the GPU and its read bandwidth in GB/s, which is also printed.

    Exits if there is no GPU.
    """
    if not C.device_count():
        sys.exit(f"{Path(sys.argv[0]).name}: no CUDA device was found, expected one")
    ctx = ops.Context("cuda")
    bandwidth = read_bandwidth(ctx, dtype)
    print(f"{C.device_info(0)['name']}: {bandwidth:.0f} GB/s", file=sys.stderr)
    return ctx, bandwidth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16", choices=["float16", "bfloat16"])
    parser.add_argument("--fp8", action="store_true", help="an fp8 cache")
    parser.add_argument("--rotary", default="", choices=["", "apart", "together"])
    parser.add_argument("--one-token", action="store_true", help="only decode of one token")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args()
    ctx = ops.Context("cuda")
    peak = read_bandwidth(ctx, args.dtype)

    def report(name: str, result: dict[str, float]) -> None:
        if "gbps" in result:
            result["roofline"] = result["gbps"] / peak
        if args.json:
            line = json.dumps({"name": name, "dtype": args.dtype, "read_gbps": peak} | result)
        else:
            line = f"{name:44} {result['us']:10.2f} µs"
            if "gbps" in result:
                line += f" | {result['gbps']:7.0f} GB/s | {result['roofline']:6.1%} of roofline"
            line += f" | {result['tflops']:6.1f} TFLOP/s"
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    if not args.json:
        sys.stdout.write(f"read bandwidth {peak:.0f} GB/s, {args.dtype}, D {HEAD_DIM}\n")
    for heads in LAYOUTS:
        label = f"Hq {heads[0]} Hkv {heads[1]}"
        for rows, tree in DECODE_ROWS[: 1 if args.one_token else None]:
            for entries in DECODE_CELLS:
                result = decode(ctx, heads, entries, rows, args.dtype, tree, args.fp8, args.rotary)
                report(
                    f"decode {label} entries {entries} {'tree' if tree else 'rows'} {rows}", result
                )
        for prompt in [] if args.one_token else PROMPTS:
            result = prefill(ctx, heads, prompt, args.dtype, args.fp8)
            report(f"prefill {label} prompt {prompt} chunk {CHUNK}", result)


if __name__ == "__main__":
    main()
