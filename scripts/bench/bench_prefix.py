"""Times the second turn of a conversation whose first turn lies in the prefix cache.

    python scripts/bench/bench_prefix.py --model DIR [--draft DIR] [--contexts 8192,30000]

The floor is a prefill chunk of the same new tokens behind a context that is in place. Each row of
the table has the time to the first token, from the call to the first chunk, as a median:

    device, host, disk   the place of the context; beside it the time of the bus or the disk alone
    without a cache      the whole prompt is computed

Two more results follow, each with and without the cache: the time of a prompt that misses, and with
a draft the accepted tokens per step of a second turn.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cpmcu import LLM, SamplingParams, SpeculativeConfig

PAGE = 64
NEW = 128


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


class Bench:
    """A model, and prompts of random tokens."""

    def __init__(self, args: argparse.Namespace, **options: Any) -> None:
        speculation = SpeculativeConfig(no_speculation=True)
        if args.draft is not None:  # one tree, so that steps are alike
            speculation = SpeculativeConfig(
                draft_model_path=args.draft,
                spec_num_iter=4,
                spec_topk_per_iter=8,
                spec_tree_size=32,
            )
        self.options = {
            "device": args.device,
            "max_num_seqs": 1,
            "max_model_len": max(args.contexts) // PAGE * PAGE + 1024,
            "speculative_config": speculation,
            **options,
        }
        self.llm = LLM(args.model, **self.options)
        self.vocab = self.llm.spec.vocab_size

    def prompt(self, length: int, seed: int) -> list[int]:
        return random.Random(seed).choices(range(3, self.vocab), k=length)

    def first_token(self, ids: Sequence[int], expected: int | None = None, count: int = 1) -> float:
        """Seconds to the first token. `expected`: tokens that must come from the cache."""
        begin = time.perf_counter()
        first, result = 0.0, None
        for chunk in self.llm.stream(ids, SamplingParams(max_tokens=count, ignore_eos=True)):
            first = first or time.perf_counter() - begin
            result = chunk.result
        assert result is not None
        found = result.timings.cached_tokens
        if expected is not None and found != expected:
            state = self.llm.engine_load().prefix_cache
            raise SystemExit(f"{found} tokens came from the cache, expected {expected}: {state}")
        return first

    def floor(self, length: int, repeats: int) -> float:
        """Seconds of a chunk of NEW tokens after `length` tokens whose pages are on the device."""

        def measure(engine: Any) -> float:
            from cpmcu import C

            times = []
            ids = self.prompt(length, 1)
            slot = engine.add_sequence(C.SamplingConfig(max_tokens=8), ids)
            engine.reserve(slot, length + NEW * repeats)
            for begin in range(0, length, engine.chunk_length):
                engine.prefill([(slot, ids[begin : begin + engine.chunk_length], False)])
                engine.collect()
            for i in range(repeats):
                new = self.prompt(NEW, 100 + i)
                begin_time = time.perf_counter()
                engine.prefill([(slot, new, True)])
                engine.collect()
                times.append(time.perf_counter() - begin_time)
            engine.release(slot)
            return statistics.median(times)

        return self.llm.call_engine(measure)

    def bus_rate(self, num_pages: int) -> float:
        """Bytes a second from pinned host memory to pages."""

        def measure(engine: Any) -> float:
            from cpmcu import C

            blocks = C.HostBlocks(engine, engine.pages.page_bytes, num_pages, num_pages)
            blocks.grow()
            slot = engine.add_sequence(C.SamplingConfig(max_tokens=1), [1])
            engine.reserve(slot, num_pages * PAGE)
            pages = engine.pages.of_slot(slot)[:num_pages]
            best = 0.0
            for _ in range(5):
                engine.pages.wait_for_copies()
                begin = time.perf_counter()
                engine.pages.load(pages, blocks, list(range(num_pages)))
                engine.pages.wait_for_copies()
                best = max(
                    best, num_pages * engine.pages.page_bytes / (time.perf_counter() - begin)
                )
            engine.release(slot)
            return best

        self.llm.reset_prefix_cache()
        return self.llm.call_engine(measure)

    def page_bytes(self) -> int:
        return int(self.llm.call_engine(lambda engine: engine.pages.page_bytes))


def disk_rate(directory: Path) -> float:
    """Bytes per second of eight threads that read the cache's files without checks."""
    files = sorted(directory.rglob("*.safetensors"))

    def read(path: Path) -> int:
        with open(path, "rb", buffering=0) as file:
            return len(file.read())

    begin = time.perf_counter()
    with ThreadPoolExecutor(8) as pool:
        total = sum(pool.map(read, files))
    return total / (time.perf_counter() - begin)


def median(function: Callable[[int], float], repeats: int) -> float:
    return statistics.median(function(i) for i in range(repeats))


def second_turns(args: argparse.Namespace) -> None:
    folder = Path(tempfile.mkdtemp(prefix="cpmcu-prefix-", dir=args.disk))
    header = ["context", "floor", "device", "x floor", "host", "floor + 1.2 bus", "disk"]
    header += ["1.5 x bytes / disk rate", "without a cache"]
    print("| " + " | ".join(header) + " |\n|" + " --- |" * len(header))
    try:
        for context in args.contexts:
            length = context // PAGE * PAGE
            cells = second_turn(args, length, folder)
            print("| " + " | ".join([f"{length:,}", *cells]) + " |", flush=True)
    finally:
        shutil.rmtree(folder)


def second_turn(args: argparse.Namespace, length: int, folder: Path) -> list[str]:
    def turn(i: int) -> list[int]:
        return shared + bench.prompt(NEW, 1000 + i)

    bench = Bench(args, prefix_cache_host_gb=args.host_gb)
    shared = bench.prompt(length, 7)
    floor = bench.floor(length, args.repeats)
    bench.first_token(shared + [5])
    bench.first_token(turn(-1), length)
    device = median(lambda i: bench.first_token(turn(i), length), args.repeats)
    longest = max(args.contexts) // PAGE * PAGE

    def from_host(i: int) -> float:
        for j in range(2):  # other prompts take all pages
            bench.first_token(bench.prompt(longest, 50 + 2 * i + j))
        time.sleep(1)  # as between two turns: the oldest pages are copied to host memory
        return bench.first_token(turn(100 + i), length)

    for i in range(3):  # host memory is taken while these run
        from_host(-3 + i)
    host = median(from_host, min(3, args.repeats))
    num_bytes = length // PAGE * bench.page_bytes()
    bus = num_bytes / bench.bus_rate(min(256, length // PAGE))
    bench.llm.close()

    options = {"prefix_cache_dir": str(folder), "prefix_cache_host_gb": args.host_gb}
    bench = Bench(args, **options)
    bench.first_token(shared + [5])
    bench.llm.close()  # what is not on disk yet is written
    rate = disk_rate(folder)
    bench = Bench(args, **options)
    time.sleep(1)  # a thread takes host memory while a server starts
    disk = bench.first_token(turn(200), length)
    bench.llm.close()
    bench = Bench(args, prefix_cache=False)
    bench.first_token(turn(300))
    without = median(lambda i: bench.first_token(turn(301 + i), 0), min(3, args.repeats))
    bench.llm.close()
    times = [floor, device, device / floor, host, floor + 1.2 * bus, disk]
    times += [1.5 * num_bytes / rate, without]
    cells = [f"{1e3 * value:.2f} ms" for value in times]
    cells[2] = f"{device / floor:.2f}"
    return cells


def misses(args: argparse.Namespace) -> None:
    """Times prompts of new tokens, alternately with and without the cache."""
    length = min(8192, max(args.contexts))
    with_cache, without = Bench(args, memory_limit=0.3), Bench(args, prefix_cache=False)
    times: dict[bool, list[float]] = {True: [], False: []}
    for i in range(2 + 2 * args.repeats):
        for cached, bench in ((True, with_cache), (False, without)):
            seconds = bench.first_token(bench.prompt(length, 5000 + i))
            if i >= 2:
                times[cached].append(seconds)
    with_cache.llm.close()
    without.llm.close()
    a, b = (statistics.median(times[cached]) for cached in (True, False))
    print(f"a miss of {length:,} tokens: {1e3 * a:.2f} ms with the cache, {1e3 * b:.2f} ms without")


def acceptance(args: argparse.Namespace) -> None:
    """Tokens per decode step of a second turn, with and without the cache."""
    for cached in (True, False):
        bench = Bench(args, prefix_cache=cached, memory_limit=0.3)
        params = SamplingParams(max_tokens=512, ignore_eos=True)
        tokens = steps = 0
        for i in range(3):
            ids = bench.prompt(1000 + 60 * i, 900 + i)
            first = bench.llm.generate([ids], params)[0]
            ids = ids + first.outputs[0].token_ids + bench.prompt(30, 950 + i)
            bench.llm.generate([ids], params)
            found = bench.llm.generate([ids], params)[0].timings
            tokens, steps = tokens + found.output_tokens - 1, steps + found.decode_steps
        bench.llm.close()
        name = "with the cache" if cached else "without"
        print(f"accepted tokens a step of a second turn, {name}: {tokens / steps:.3f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--draft", default=None, help="folder of a draft")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--contexts", type=numbers, default=[8192, 30000], help="comma list")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--host-gb", type=float, default=8.0, help="host memory of the cache")
    parser.add_argument("--disk", default=None, help="folder for the disk tier (default: /tmp)")
    args = parser.parse_args()
    if args.draft is not None:
        acceptance(args)
        return 0
    second_turns(args)
    misses(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
