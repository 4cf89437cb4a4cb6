"""Times the tokens of streams while prompts arrive, on a GPU that is only a timetable.

    python scripts/bench/bench_arrivals.py [--model DIR] [--rates 2,5,10,20] [--clients 8,32] ...

As in `bench_host.py`, scheduler, engine thread, text and caller are the real ones, in real time. A
step ends when an H100 would end it. Requests either arrive at a rate, at random times (Poisson), or
each of some clients sends the next one when its last one has ended. All are streamed. Prints a
Markdown table: the time between two chunks of a stream, the time to the first chunk, and tokens a
second. The first seconds are not counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import heapq
import itertools
import queue
import random
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from bench_host import TimedEngine, step_times

from cpmcu import LLM, C, SamplingParams
from cpmcu.engine.runner import Runner
from cpmcu.outputs import StreamChunk

STEPS = [(1, 1.95), (8, 2.4), (32, 3.8), (64, 5.2), (128, 9.7), (256, 18.0)]


class ArrivalsEngine(TimedEngine):
    """A TimedEngine whose steps follow a table: times between two entries are interpolated."""

    def __init__(
        self, steps: Sequence[tuple[int, float]], length: int, pass_ms: float, token_ms: float
    ) -> None:
        super().__init__(steps[-1][0], length, steps[-1][1], 256)
        self._table, self._pass_ms, self._token_ms = steps, pass_ms, token_ms
        self.passes = self.steps = 0

    def prefill(self, items: Sequence[tuple[int, list[int], bool]], **options: Any) -> None:
        num_tokens = sum(len(ids) for _, ids, _ in items)
        self.passes += 1
        milliseconds = self._pass_ms + self._token_ms * num_tokens
        self._launch(milliseconds, [slot for slot, _, last in items if last])

    def decode(self, slots: list[int], shape: tuple[int, int] | None = None) -> None:
        self.steps += 1
        self._launch(self.step_ms(len(slots)), slots)

    def step_ms(self, num_seqs: int) -> float:
        """Milliseconds of a decode step."""
        pairs = itertools.pairwise(self._table)
        (low, before), (high, after) = next(pair for pair in pairs if num_seqs <= pair[1][0])
        return before + (after - before) * max(0, num_seqs - low) / (high - low)


@dataclasses.dataclass(slots=True)
class Stream:
    """One request: when it was due, and when its chunks came."""

    due: float
    times: list[float] = dataclasses.field(default_factory=list)
    tokens: list[int] = dataclasses.field(default_factory=list)  # number in each chunk


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """One load. Times are milliseconds."""

    load: str
    gaps: list[float]  # times between chunks, in ascending order
    firsts: list[float]  # times to the first chunk, in ascending order
    rate: float  # tokens a second
    passes: float  # number per decode step


def poisson(rate: float, seconds: float, draw: random.Random) -> Iterator[float]:
    """Times of arrivals."""
    when = draw.expovariate(rate)
    while when < seconds:
        yield when
        when += draw.expovariate(rate)


def measure(llm: LLM, load: str, args: argparse.Namespace) -> Found:
    """`load`: "N/s" means N requests a second, "N" means N clients."""
    most = max(args.outputs)
    engine: Any = ArrivalsEngine(args.steps, args.prompt + most + 2, args.pass_ms, args.token_ms)
    runner = Runner(engine, page_size=C.PAGE_SIZE, prefill_seconds=args.max_prefill_ms / 1e3)
    draw = random.Random(load)
    prompt = [3 + i % 250 for i in range(args.prompt)]
    whole, is_open = args.skip + args.seconds, load.endswith("/s")
    if is_open:
        due = list(poisson(float(load[:-2]), whole, draw))
    else:  # the clients begin one after the other
        due = [args.skip / 2 * i / int(load) for i in range(int(load))]
    items: queue.SimpleQueue[tuple[Stream, StreamChunk | Exception]] = queue.SimpleQueue()
    streams: list[Stream] = []
    begin, running = time.perf_counter(), 0

    def submit(stream: Stream) -> None:
        count = draw.randint(*args.outputs)
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        put = functools.partial(_put, items, stream)
        runner.submit(*llm.prepare(prompt, params.resolve({}), put))
        streams.append(stream)

    try:
        while due or running:
            now = time.perf_counter() - begin
            while due and due[0] <= now:
                submit(Stream(begin + heapq.heappop(due)))
                running += 1
            try:
                stream, item = items.get(timeout=due[0] - now if due else None)
            except queue.Empty:
                continue
            when = time.perf_counter()
            if isinstance(item, Exception):
                raise item
            if item.token_ids:
                stream.times.append(when)
                stream.tokens.append(len(item.token_ids))
            if item.finish_reason is not None:
                running -= 1
                if not is_open and when - begin < whole:
                    heapq.heappush(due, when - begin)
    finally:
        runner.close()
    return summary(load, streams, begin + args.skip, begin + whole, engine)


def _put(items: queue.SimpleQueue[Any], stream: Stream, chunk: StreamChunk | Exception) -> None:
    items.put((stream, chunk))


def summary(load: str, streams: list[Stream], begin: float, end: float, engine: Any) -> Found:
    """Counts what came from `begin` to `end`, and the first chunks of requests due then."""
    gaps = [
        1e3 * (after - before)
        for stream in streams
        for before, after in itertools.pairwise(stream.times)
        if begin <= after < end
    ]
    firsts = [1e3 * (s.times[0] - s.due) for s in streams if begin <= s.due < end]
    chunks = [pair for stream in streams for pair in zip(stream.times, stream.tokens)]
    count = sum(tokens for when, tokens in chunks if begin <= when < end)
    passes = engine.passes / engine.steps
    return Found(load, sorted(gaps), sorted(firsts), count / (end - begin), passes)


def quantile(values: Sequence[float], share: float) -> float:
    """Returns the quantile of the values; 0 if there are none."""
    return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def table(rows: Sequence[Found]) -> str:
    header = ["load", "between tokens, ms: mean", "median", "p99", "max", "p99 / median"]
    header += ["first token, ms: median", "p99", "tokens/s", "passes per step"]
    lines = [header, ["---:"] * len(header)]
    for row in rows:
        median, p99 = quantile(row.gaps, 0.5), quantile(row.gaps, 0.99)
        mean = sum(row.gaps) / max(1, len(row.gaps))
        firsts = [quantile(row.firsts, share) for share in (0.5, 0.99)]
        cells = [f"{each:.2f}" for each in (mean, median, p99, quantile(row.gaps, 1), p99 / median)]
        cells += [f"{each:.0f}" for each in (*firsts, row.rate)]
        lines.append([row.load, *cells, f"{row.passes:.2f}"])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def whole_numbers(text: str) -> list[int]:
    """Parses numbers above 0, with commas between."""
    numbers = [int(part) for part in text.split(",") if part]
    if any(number < 1 for number in numbers):
        raise ValueError(text)
    return numbers


def span(text: str) -> tuple[int, int]:
    """Parses the least and the most tokens of an output."""
    least, most = whole_numbers(text)
    return least, most


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench_arrivals.py", description=__doc__.splitlines()[0])
    parser.add_argument("--model", metavar="DIR", help="directory with a tokenizer")
    parser.add_argument(
        "--steps",
        type=step_times,
        default=STEPS,
        metavar="N:MS,...",
        help="milliseconds of a step with N sequences, in ascending order of N "
        "(default: Llama-3.1-8B in 4 bits)",
    )
    parser.add_argument("--pass-ms", type=float, default=1.5, help="of any prefill pass (1.5)")
    parser.add_argument("--token-ms", type=float, default=0.025, help="of its tokens (0.025)")
    parser.add_argument("--rates", type=whole_numbers, default=[2, 5, 10, 20], help="requests/s")
    parser.add_argument("--clients", type=whole_numbers, default=[8, 32, 128], metavar="N,...")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt (1024)")
    parser.add_argument("--outputs", type=span, default=(100, 300), metavar="LEAST,MOST")
    parser.add_argument("--max-prefill-ms", type=float, default=40.0, help="as of the server (40)")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each load (15)")
    parser.add_argument("--skip", type=float, default=3.0, help="seconds before (3)")
    args = parser.parse_args()
    args.steps.sort()
    if len(args.steps) < 2:
        parser.error("--steps has one number of sequences, but needs two or more")
    loads = [f"{rate}/s" for rate in args.rates] + [f"{count}" for count in args.clients]
    with LLM(args.model, device="cpu", num_threads=1, max_num_seqs=1) as llm:
        if llm.max_length < args.prompt + max(args.outputs) + 2:
            parser.error(f"the model holds {llm.max_length} tokens of a sequence")
        rows = [measure(llm, load, args) for load in loads]
    sys.stdout.write(table(rows))


if __name__ == "__main__":
    main()
