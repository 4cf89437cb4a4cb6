"""python -m cpmcu.bench: how fast a model loads, prefills and decodes, beside the machine's limits.

The floor of a decode step is the bytes that it has to read (weights but for the embedding table,
and the keys and values of its context) over the read bandwidth measured in the same run. Prompts
are random tokens; times are medians of windows of steps with launches ahead, after a warm-up.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from cpmcu.config import EngineConfig, option, shipped_model
from cpmcu.flags import FlagParser, add_flags, from_flags

if TYPE_CHECKING:
    from cpmcu import C

WINDOWS = 5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What is measured."""

    contexts: str = option("1024", "context lengths in tokens, separated by commas")
    decode: int = option(64, "decode steps of one timed window")
    json: bool = option(False, "print JSON instead of a table")


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One line of the result: seconds, tokens and ratios at one context length."""

    context: int
    prefill_s: float
    prefill_tokens_per_s: float
    step_ms: float
    step_spread_ms: float  # slowest minus fastest window
    floor_ms: float
    ratio: float  # step over floor


def describe_device(device: str, index: int) -> str:
    """The device in a few words, with its driver."""
    from cpmcu import C

    if device == "cpu":
        return f"{platform.machine()} CPU, {os.cpu_count()} cores"
    info = C.device_info(index)
    version = info["driver_version"]
    return f"{info['name']}, CUDA driver {version // 1000}.{version % 1000 // 10}"


def step_bytes(engine: C.Engine, spec: C.ModelSpec, context: int) -> int:
    """Bytes that a decode step has to read with `context` cached tokens."""
    rows = engine.memory_plan()
    weights = sum(row["bytes"] for row in rows if row["group"] == "weights")
    if not spec.tie_word_embeddings:
        weights -= next(row["bytes"] for row in rows if row["name"] == "model.embed_tokens")
    page_bytes = next(row["bytes"] for row in rows if row["group"] == "kv") // engine.num_pages
    from cpmcu import C

    return int(weights + context * page_bytes // C.PAGE_SIZE)


def measure(engine: C.Engine, spec: C.ModelSpec, context: int, steps: int, read_rate: float) -> Row:
    """Prefills `context` tokens and times `WINDOWS` windows of `steps` decode steps after it."""
    from cpmcu import C

    ids = np.random.default_rng(context).integers(3, spec.vocab_size, context).tolist()
    slot = engine.add_sequence(C.SamplingConfig(), ids)
    warm_up = 8
    total = context + 1 + warm_up + WINDOWS * steps
    if total > engine.max_model_len or not engine.reserve(slot, total):
        engine.release(slot)
        raise ValueError(
            f"a context of {context} and {total - context} new tokens were asked for, the engine "
            f"holds {engine.max_model_len} tokens a sequence and has {engine.num_free_pages} free "
            "pages of 64"
        )

    def prefill() -> float:
        begin = time.perf_counter()
        for at in range(0, context, engine.chunk_length):
            part = ids[at : at + engine.chunk_length]
            engine.prefill([(slot, part, at + len(part) == context)])
            engine.collect()
        return time.perf_counter() - begin

    def decode(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            engine.decode([slot])
            if engine.in_flight() > engine.launch_ahead:
                engine.collect()
        while engine.in_flight():
            engine.collect()
        return time.perf_counter() - begin

    prefill()  # chooses algorithms, loads kernels
    engine.release(slot)
    slot = engine.add_sequence(C.SamplingConfig(), ids)
    engine.reserve(slot, total)
    prefill_s = prefill()
    decode(warm_up)
    windows = [decode(steps) / steps * 1e3 for _ in range(WINDOWS)]
    engine.release(slot)
    step_ms = statistics.median(windows)
    middle = context + warm_up + WINDOWS * steps // 2
    floor_ms = step_bytes(engine, spec, middle) / read_rate * 1e3
    return Row(
        context=context,
        prefill_s=prefill_s,
        prefill_tokens_per_s=context / prefill_s,
        step_ms=step_ms,
        step_spread_ms=max(windows) - min(windows),
        floor_ms=floor_ms,
        ratio=step_ms / floor_ms,
    )


def run(config: EngineConfig, options: BenchOptions) -> dict[str, Any]:
    """Everything that one run measures, ready for JSON. Times in the units that the keys name."""
    from cpmcu import C
    from cpmcu.loading.loader import choose_device, load_model

    device = choose_device(config.device)
    ceilings = C.ceilings(device, config.device_index)
    begin = time.perf_counter()
    loaded = load_model(config.model or str(shipped_model()), config=config)
    load_s = time.perf_counter() - begin
    weights = sum(row["bytes"] for row in loaded.engine.memory_plan() if row["group"] == "weights")
    read_rate = ceilings["read_bytes_per_second"]
    contexts = [int(part) for part in options.contexts.split(",")]
    rows = [measure(loaded.engine, loaded.spec, c, options.decode, read_rate) for c in contexts]
    return {
        "model": loaded.directory.name,
        "dtype": loaded.spec.dtype,
        "device": describe_device(device, config.device_index),
        "build": json.loads(C.build_info_json),
        "cuda_graph": config.cuda_graph,
        "chunk_length": loaded.engine.chunk_length,
        "read_GB_per_s": read_rate / 1e9,
        "host_to_device_GB_per_s": ceilings["host_to_device_bytes_per_second"] / 1e9,
        "weights_GB": weights / 1e9,
        "load_s": load_s,
        "load_GB_per_s": weights / 1e9 / load_s,
        "rows": [dataclasses.asdict(row) for row in rows],
        "counters": loaded.engine.counters,
    }


def table(result: dict[str, Any]) -> str:
    """The result for people, as Markdown."""
    lines = [
        f"{result['model']}, {result['dtype']}, {result['weights_GB']:.2f} GB of weights, on "
        f"{result['device']}",
        f"read bandwidth {result['read_GB_per_s']:.0f} GB/s, host to device "
        f"{result['host_to_device_GB_per_s']:.1f} GB/s; loaded in {result['load_s']:.2f} s "
        f"({result['load_GB_per_s']:.2f} GB/s); commit {result['build'].get('commit', '?')}",
        "",
        "| context | prefill tok/s | decode tok/s | ms/step | ± ms | floor ms | ÷ floor |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        lines.append(
            f"| {row['context']} | {row['prefill_tokens_per_s']:.0f} | "
            f"{1e3 / row['step_ms']:.1f} | {row['step_ms']:.3f} | "
            f"{row['step_spread_ms'] / 2:.3f} | {row['floor_ms']:.3f} | {row['ratio']:.2f} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0, 1 for an error, 2 for wrong flags."""
    parser = FlagParser(prog="python -m cpmcu.bench", description=__doc__)
    add_flags(parser, EngineConfig, "engine")
    add_flags(parser, BenchOptions, "benchmark")
    flags = parser.parse_args(arguments)
    try:
        options = from_flags(BenchOptions, flags)
        result = run(from_flags(EngineConfig, flags), options)
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write((json.dumps(result, indent=2) if options.json else table(result)) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
