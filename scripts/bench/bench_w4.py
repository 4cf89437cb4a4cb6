"""Times packed_gemm and fused_layer on the GPU at the shapes of 8B models.

There is a line for each row count.

First come single GEMMs, with lm_head in 16 bits. Then come the GEMMs of a layer with their norms:
o, gate and up, down, and the next qkv. They run as separate launches and as one, in 4 and 16 bits.

Launches are replayed as one graph. Each launch reads another copy of the weights (more than 1 GB in
all), so no weights are in L2. The roofline is the read bandwidth measured in this run. If torch is
installed, its cuBLAS is timed on the same GEMMs in float16. Each number of rows then gets the
geometric mean of a layer's ratios. The 4-bit GEMMs are also timed with the rows of a prompt,
in TFLOP/s.

    python scripts/bench/bench_w4.py [--bits 4] [--dtype float16] [--json]

--bits 8 times FP8 weights with a scale for 128 x 128 numbers in place of 4 bits.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from cpmcu import C
from cpmcu.quant.packing import pack_blocks

ops = C.ops
SHAPES = {  # model -> layer -> (N, K)
    "MiniCPM4-8B": {
        "qkv": (4608, 4096), "o": (4096, 4096), "gate_up": (32768, 4096), "down": (4096, 16384),
    },
    "Llama-3.1-8B": {
        "qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336),
    },
}  # fmt: skip
HEADS = {"MiniCPM4-8B": (73448, 4096), "Llama-3.1-8B": (128256, 4096)}
ROWS = [1, 8, 16, 32, 64]
PROMPT_ROWS = [128, 256, 512, 1024, 2048]
COLD_BYTES = 1200 << 20
MAX_LAUNCHES = 128  # in one graph at most
RUNS = 9


def microseconds(replay: Callable[[], float], launches: int) -> float:
    """Median time of one launch. replay() returns the milliseconds of all launches."""
    replay()
    return float(np.median([replay() for _ in range(RUNS)])) * 1e3 / launches


def weights(ctx: Any, n: int, k: int, copies: int, bits: int, gated: bool = False) -> list[Any]:
    """Random weights of 4 bits, or FP8, one after another in memory."""
    rng = np.random.default_rng(n + k)
    if bits == 8:
        return fp8_weights(ctx, n, k, copies, gated, rng)
    rows = min(n, 256)  # repeated along N; no kernel depends on the values
    q = rng.integers(0, 16, (k, rows), np.uint8)
    scales = rng.uniform(0.005, 0.02, (k // 128, rows)).astype(np.float16)
    block = pack_blocks(q, scales)
    blocks = np.ascontiguousarray(np.tile(block, (-(-n // 256), *[1] * (block.ndim - 1))))
    made = []
    for _ in range(copies):
        array = ops.Array(ctx, [blocks.nbytes], "uint8")
        array.copy_from(blocks.reshape(-1).view(np.uint8))
        made.append(ops.PackedWeight(array, n=n, k=k, scale_dtype="float16", gated=gated))
    return made


def fp8_weights(
    ctx: Any, n: int, k: int, copies: int, gated: bool, rng: np.random.Generator
) -> list[Any]:
    """Random e4m3 weights up to 2; a block has 32 scales for 8 rows each."""
    blocks, made = -(-n // 256) * -(-k // 128), []
    packed = np.zeros((blocks, 32768 + 128), np.uint8)
    codes = rng.integers(0, 256, 32768, np.uint8) & 0xBF
    packed[:, :32768] = codes
    packed[:, 32768:] = np.full(32, 0.02, np.float32).view(np.uint8)
    for _ in range(copies):
        array = ops.Array(ctx, [packed.nbytes], "uint8")
        array.copy_from(packed.reshape(-1))
        layout = {"codes": "e4m3", "scale_rows": 8, "gated": gated}
        made.append(ops.PackedWeight(array, n=n, k=k, **layout))
    return made


def dense_weights(ctx: Any, n: int, k: int, copies: int, dtype: str) -> list[Any]:
    """Random 16-bit weights, one after another in memory."""
    return [rows_of(ctx, n, k, dtype, 1 / math.sqrt(k)) for _ in range(copies)]


def rows_of(ctx: Any, m: int, k: int, dtype: str, scale: float = 1) -> Any:
    """Random [m, k]; the first 256 rows repeat. No kernel depends on the values."""
    array = ops.Array(ctx, [m, k], dtype)
    values = np.random.default_rng(m).standard_normal((min(m, 256), k)).astype(np.float32) * scale
    values = np.resize(values, (m, k))
    bits = values.astype(np.float16) if dtype == "float16" else values.view(np.uint32) >> 16
    array.copy_from(bits if dtype == "float16" else bits.astype(np.uint16))
    return array


def time_gemm(
    ctx: Any, n: int, k: int, dtype: str, bits: int, row_counts: list[int]
) -> dict[int, float]:
    """Microseconds by rows."""
    copies = min(MAX_LAUNCHES, -(-COLD_BYTES // (n * k * bits // 8)))
    dense = bits == 16
    each = dense_weights(ctx, n, k, copies, dtype) if dense else weights(ctx, n, k, copies, bits)
    gemm = ops.skinny_gemm if dense else ops.packed_gemm
    times = {}
    for m in row_counts:
        x, y = rows_of(ctx, m, k, dtype), ops.Array(ctx, [m, n], dtype)

        def body(x: Any = x, y: Any = y) -> None:
            for weight in each:
                gemm(ctx, y, x, weight)

        body()  # raises errors here, not inside a capture
        ctx.synchronize()
        graph = ctx.graph(body)
        times[m] = microseconds(lambda graph=graph: graph.replay(1), copies)
    return times


class Layer:
    """o, norm, gate and up, down, norm and the next qkv for m rows, in 4 or 16 bits."""

    def __init__(
        self, ctx: Any, m: int, layers: dict[str, tuple[int, int]], dtype: str, bits: int
    ) -> None:
        (qkv, hidden), (_, width) = layers["qkv"], layers["down"]
        self.ctx, self.bits = ctx, bits
        self.x, self.residual = (
            rows_of(ctx, m, layers["o"][1], dtype),
            rows_of(ctx, m, hidden, dtype),
        )
        self.norm = rows_of(ctx, 1, hidden, dtype)
        self.memory = ops.Array(ctx, [max(1, ops.fused_layer_bytes(m))], "uint8")
        ops.fused_layer_prepare(ctx, self.memory)
        self.normed, self.act, self.qkv, self.gate_up = (
            ops.Array(ctx, [m, n], dtype) for n in (hidden, width, qkv, 2 * width)
        )

    def fused(self, o: Any, gate_up: Any, down: Any, qkv: Any) -> None:
        norm = {"normed": self.normed, "norm_weight": self.norm}
        gate = {"gated": True, "scratch": self.gate_up} if self.bits == 16 else {}
        gemms = [
            ops.FusedGemm(self.residual, self.x, o, beta=0.5, **norm),
            ops.FusedGemm(self.act, self.normed, gate_up, **gate),
            ops.FusedGemm(self.residual, self.act, down, beta=0.5, **norm),
            ops.FusedGemm(self.qkv, self.normed, qkv),
        ]
        ops.fused_layer(self.ctx, gemms, self.memory)

    def separate(self, o: Any, gate_up: Any, down: Any, qkv: Any) -> None:
        gemm = ops.skinny_gemm if self.bits == 16 else ops.packed_gemm
        gemm(self.ctx, self.residual, self.x, o, beta=0.5)
        ops.rms_norm(self.ctx, self.normed, self.residual, self.norm, 1e-5)
        if self.bits == 16:
            gemm(self.ctx, self.gate_up, self.normed, gate_up)
            ops.silu_mul(self.ctx, self.act, self.gate_up)
        else:
            gemm(self.ctx, self.act, self.normed, gate_up)
        gemm(self.ctx, self.residual, self.act, down, beta=0.5)
        ops.rms_norm(self.ctx, self.normed, self.residual, self.norm, 1e-5)
        gemm(self.ctx, self.qkv, self.normed, qkv)


def bytes_of(shape: tuple[int, int], bits: int) -> float:
    """Bytes of a matrix [N, K], with scales."""
    n, k = shape
    scales = {4: 2 / 64, 8: 128 / 32768, 16: 0}[bits]
    return n * k * bits / 8 * (1 + scales)


def time_layer(
    ctx: Any, layers: dict[str, tuple[int, int]], dtype: str, bits: int
) -> dict[int, tuple[float, float]]:
    """Microseconds by rows, as one launch and as separate launches."""
    copies = math.ceil(COLD_BYTES / sum(bytes_of(shape, bits) for shape in layers.values()))
    names = ("o", "gate_up", "down", "qkv")
    if bits == 16:
        sets = [dense_weights(ctx, *layers[name], copies, dtype) for name in names]
    else:
        sets = [
            weights(ctx, *layers[name], copies, bits, gated=name == "gate_up") for name in names
        ]
    times = {}
    for m in ROWS:
        layer = Layer(ctx, m, layers, dtype, bits)

        def time(run: Callable[..., None]) -> float:
            def body() -> None:
                for each in zip(*sets):
                    run(*each)

            body()
            ctx.synchronize()
            graph = ctx.graph(body)
            return microseconds(lambda: graph.replay(1), copies)

        times[m] = time(layer.fused), time(layer.separate)
    return times


def time_cublas(n: int, k: int, row_counts: list[int]) -> dict[int, float]:
    """Returns µs of torch's float16 GEMM by number of rows; {} without torch or a GPU."""
    try:
        import torch
    except ImportError:
        return {}
    if not torch.cuda.is_available():
        return {}
    copies = min(MAX_LAUNCHES, -(-COLD_BYTES // (2 * n * k)))
    each = [torch.randn(n, k, dtype=torch.float16, device="cuda") for _ in range(copies)]
    times = {}
    for m in row_counts:
        x = torch.randn(m, k, dtype=torch.float16, device="cuda")
        y = torch.empty(m, n, dtype=torch.float16, device="cuda")
        for weight in each[:2]:
            torch.mm(x, weight.t(), out=y)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for weight in each:
                torch.mm(x, weight.t(), out=y)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def replay(graph: Any = graph, begin: Any = begin, end: Any = end) -> float:
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            return float(begin.elapsed_time(end))

        times[m] = microseconds(replay, copies)
    del each
    torch.cuda.empty_cache()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"])
    parser.add_argument("--bits", type=int, default=4, choices=[4, 8])
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args()
    ctx = ops.Context("cuda")
    peak = C.ceilings("cuda")["read_bytes_per_second"] / 1e9
    if not args.json:
        sys.stdout.write(f"read bandwidth {peak:.0f} GB/s, x {args.dtype}\n")
    for model, layers in SHAPES.items():
        ratios: dict[int, list[float]] = {m: [] for m in ROWS + PROMPT_ROWS}
        growth = []
        gemms = [(layer, shape, args.bits) for layer, shape in layers.items()]
        for layer, (n, k), bits in [*gemms, ("lm_head", HEADS[model], 16)]:
            row_counts = ROWS + PROMPT_ROWS if bits != 16 else ROWS
            ours = time_gemm(ctx, n, k, args.dtype, bits, row_counts)
            cublas = time_cublas(n, k, row_counts)
            if bits != 16:
                growth.append(ours[64] / ours[1])
            num_bytes = bytes_of((n, k), bits)
            for m, us in ours.items():
                result = {"us": us, "gbps": num_bytes / us / 1e3}
                line = f"{model:13} {layer:8} M {m:4} {us:8.2f} µs"
                if m in ROWS:
                    result["roofline"] = result["gbps"] / peak
                    line += f" | {result['gbps']:5.0f} GB/s"
                    line += f" | {result['roofline']:6.1%} of bandwidth"
                else:
                    result["tflops"] = 2 * m * n * k / us / 1e6
                    line += f" | {result['tflops']:5.0f} TFLOP/s"
                if m in cublas:
                    result["cublas_us"] = cublas[m]
                    if bits != 16:
                        ratios[m].append(cublas[m] / us)
                    line += f" | {cublas[m] / us:5.2f} x cuBLAS float16 ({cublas[m]:.1f} µs)"
                name = {"model": model, "layer": layer, "m": m, "dtype": args.dtype}
                sys.stdout.write((json.dumps(name | result) if args.json else line) + "\n")
                sys.stdout.flush()
        for bits in (args.bits, 16):
            times = time_layer(ctx, layers, args.dtype, bits)
            num_bytes = sum(bytes_of(shape, bits) for shape in layers.values())
            for m, (us, separate) in times.items():
                result = {
                    "us": us,
                    "gbps": num_bytes / us / 1e3,
                    "separate_us": separate,
                    "apart_us": separate,
                }
                result["roofline"] = result["gbps"] / peak
                name = {"model": model, "layer": f"fused {bits}", "m": m, "dtype": args.dtype}
                line = f"{model:13} {name['layer']:8} M {m:4} {us:8.2f} µs"
                line += f" | {result['gbps']:5.0f} GB/s | {result['roofline']:6.1%} of bandwidth"
                line += f" | {separate:.2f} µs as separate launches"
                sys.stdout.write((json.dumps(name | result) if args.json else line) + "\n")
        if args.json:
            continue
        for m, values in ratios.items():
            if values:
                mean = math.exp(sum(map(math.log, values)) / len(values))
                sys.stdout.write(f"{model:13} geometric mean at M {m}: {mean:.2f} x cuBLAS\n")
        spread = ", ".join(f"{value:.2f}" for value in growth)
        sys.stdout.write(f"{model:13} M 64 over M 1 ({', '.join(layers)}): {spread}\n")


if __name__ == "__main__":
    main()
