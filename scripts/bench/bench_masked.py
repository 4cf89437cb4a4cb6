"""Times decode steps with and without token masks.

The three kinds of step of one sequence are:

* ahead: the step is launched before the previous one ends, as without a grammar
* one by one: the same steps without launching ahead
* masked: two launches per step with a mask for every tree node, as with a grammar

The masks allow all tokens and are made before. So the difference is the engine's cost: the split of
the step, the upload, the masked sampler. llguidance's time is in `Timings.grammar_s`; it overlaps
the target's forward pass.

    python scripts/bench/bench_masked.py [--contexts 1024] [--decode 64] [--json] [engine's flags]

The default is the shipped model with its draft. The engine runs without a prefix cache.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from cpmcu.bench import describe_device
from cpmcu.benchmarks.decoding import WARM_UP, WINDOWS, random_prompt
from cpmcu.config import option
from cpmcu.flags import FlagParser, add_flags, from_flags
from cpmcu.flags.engine import add_engine_flags, engine_config, without_hits
from cpmcu.loading.loader import choose_device, load_model
from cpmcu.shipped import shipped_model


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Flags of the benchmark."""

    contexts: str = option("256", "context lengths in tokens, separated by commas")
    decode: int = option(32, "steps of one timed window")
    json: bool = option(False, "print JSON instead of lines")


def milliseconds(
    engine: Any, ids: list[int], steps: int, run: Callable[[Any, int, int], None]
) -> list[float]:
    """Returns the time of a step in each window."""
    from cpmcu import C

    total = len(ids) + 1 + (WARM_UP + WINDOWS * steps) * engine.tokens_per_step
    slot = engine.add_sequence(C.SamplingConfig(max_tokens=total), ids)
    if total > engine.max_model_len or not engine.reserve(slot, total):
        raise ValueError(f"{total} tokens do not fit; lower --contexts or --decode")
    for begin in range(0, len(ids), engine.chunk_length):
        part = ids[begin : begin + engine.chunk_length]
        engine.prefill([(slot, part, begin + len(part) == len(ids))])
        engine.collect()
    run(engine, slot, WARM_UP)
    windows = []
    for _ in range(WINDOWS):
        start = time.perf_counter()
        run(engine, slot, steps)
        windows.append((time.perf_counter() - start) / steps * 1e3)
    engine.release(slot)
    return windows


def ahead(engine: Any, slot: int, steps: int) -> None:
    for _ in range(steps):
        engine.decode([slot])
        if engine.in_flight() >= engine.launch_ahead:
            engine.collect()
    while engine.in_flight():
        engine.collect()


def one_by_one(engine: Any, slot: int, steps: int) -> None:
    for _ in range(steps):
        engine.decode([slot])
        engine.collect()


def masked(vocab_size: int) -> Callable[[Any, int, int], None]:
    masks: dict[int, Any] = {}  # number of nodes -> their masks

    def run(engine: Any, slot: int, steps: int) -> None:
        for _ in range(steps):
            ((tokens, _),) = engine.begin_masked([slot])
            nodes = len(tokens)
            if nodes not in masks:
                masks[nodes] = np.full((nodes, -(-vocab_size // 32)), 0xFFFFFFFF, np.uint32)
            engine.end_masked(list(range(nodes)), masks[nodes])
            engine.collect()

    return run


def main() -> int:
    parser = FlagParser(description=__doc__)
    add_engine_flags(parser, {"prefix_cache": False}, "engine")
    add_flags(parser, Options, "benchmark")
    flags = parser.parse_args()
    options = from_flags(Options, flags)
    config = without_hits(engine_config(flags), flags)
    loaded = load_model(config.model or str(shipped_model()), config=config)
    vocab_size = int(loaded.spec.vocab_size)
    kinds = {"ahead": ahead, "one by one": one_by_one, "masked": masked(vocab_size)}
    rows = []
    for context in (int(part) for part in options.contexts.split(",")):
        ids = random_prompt(vocab_size, context)
        for name, run in kinds.items():
            windows = milliseconds(loaded.engine, ids, options.decode, run)
            spread = max(windows) - min(windows)
            rows.append(
                {
                    "context": context,
                    "step": name,
                    "ms": statistics.median(windows),
                    "spread_ms": spread,
                }
            )
    device = describe_device(choose_device(config.device), config.device_index)
    if options.json:
        sys.stdout.write(json.dumps({"device": device, "rows": rows}, indent=2) + "\n")
        return 0
    sys.stdout.write(f"{loaded.directory.name} on {device}\n")
    for row in rows:
        sys.stdout.write(
            f"context {row['context']:6}  {row['step']:10}  {row['ms']:8.3f} ms ± "
            f"{row['spread_ms'] / 2:.3f}\n"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
