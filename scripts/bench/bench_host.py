"""Times the host's share of steps with many sequences, on a GPU that is only a timetable.

    python scripts/bench/bench_host.py [--model DIR] [--steps 64:6.66,128:12.4,256:24.1] ...

Scheduler, engine thread, text and caller are the real ones, in real time. The engine computes
nothing: a step ends when an H100 would end it, and tokens are random. So the table shows which part
of the steps' rate `LLM.generate` reaches on this host, and the CPU time of each of its threads. The
model's directory is only read for its tokenizer. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import dataclasses
import queue
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from cpmcu import LLM, C, SamplingParams
from cpmcu.engine.runner import Runner
from cpmcu.outputs import StreamChunk

PASS_MS, TOKEN_MS = 1.5, 0.029  # a prefill pass: milliseconds, and more for each token
CHUNK = 4096  # tokens of a pass


class Outputs:
    """A stand-in for C.StepOutputs, with one token for each slot."""

    def __init__(self, slots: list[int], tokens: list[int]) -> None:
        self.slots, self.tokens = slots, tokens
        self.counts = [1] * len(slots)
        self.any_finished = False

    def __getitem__(self, i: int) -> SimpleNamespace:
        token = [self.tokens[i]]
        return SimpleNamespace(
            slot=self.slots[i], tokens=token, finished=False, inner=(0, 0), logprobs=[]
        )


class TimedEngine:
    """A stand-in for C.Engine. Steps run one after another and take as long as on a GPU."""

    def __init__(self, num_seqs: int, length: int, step_ms: float, vocab_size: int) -> None:
        self.max_num_seqs, self.max_model_len = num_seqs, length
        self.num_pages = self.num_free_pages = num_seqs * (-(-length // C.PAGE_SIZE) + 1)
        self.chunk_length, self.tokens_per_step, self.launch_ahead = CHUNK, 1, 2
        self.pages = SimpleNamespace(
            windows=[0],
            page_bytes=0,
            slot_bytes=0,
            group_page_bytes=lambda group: 0,
            num_pages=lambda group: self.num_pages,
            wait_for_copies=lambda: None,
        )
        self._step_ms = step_ms
        self._free, self._end = list(range(num_seqs)), 0.0
        self._steps: deque[tuple[float, list[int]]] = deque()  # end, slots that emit
        draw = random.Random(0)
        self._tokens = [draw.randrange(3, vocab_size) for _ in range(num_seqs)]

    def add_sequence(self, *arguments: Any) -> int:
        return self._free.pop()

    def release(self, slot: int) -> None:
        self._free.append(slot)

    def reserve(self, slot: int, num_tokens: int) -> bool:
        return True

    def reserve_step(self, slots: Sequence[int]) -> int:
        return len(slots)

    def prefill(self, items: Sequence[tuple[int, list[int], bool]], **options: Any) -> None:
        num_tokens = sum(len(ids) for _, ids, _ in items)
        self._launch(PASS_MS + TOKEN_MS * num_tokens, [slot for slot, _, last in items if last])

    def decode(self, slots: list[int], shape: tuple[int, int] | None = None) -> None:
        # Fewer sequences take less time, and one takes an eighth of the time of many.
        share = 1 / 8 + 7 / 8 * len(slots) / self.max_num_seqs
        self._launch(self._step_ms * share, slots)

    def in_flight(self) -> int:
        return len(self._steps)

    def collect_step(self) -> Outputs:
        end, slots = self._steps.popleft()
        time.sleep(max(0.0, end - time.perf_counter()))
        first = self._tokens.pop(0)  # rotates the tokens, so that texts vary
        self._tokens.append(first)
        return Outputs(slots, self._tokens[: len(slots)])

    def _launch(self, milliseconds: float, slots: list[int]) -> None:
        self._end = max(self._end, time.perf_counter()) + milliseconds / 1e3
        self._steps.append((self._end, slots))


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """One number of sequences. CPU times are microseconds per step."""

    sequences: int
    alone: float  # tokens/s of the steps
    rate: float  # tokens/s of all requests
    engine: float
    text: float
    caller: float


def cpu_seconds(name: str) -> float:
    """CPU time of the thread `name`, 0 if there is none."""
    clocks = [time.pthread_getcpuclockid(t.ident) for t in threading.enumerate() if t.name == name]
    return sum(map(time.clock_gettime, clocks))


def measure(llm: LLM, num_seqs: int, step_ms: float, args: argparse.Namespace) -> Found:
    """Runs `num_seqs` requests twice: for their first tokens, and for all."""
    length = args.context + args.num_tokens + 2
    engine: Any = TimedEngine(num_seqs, length, step_ms, llm.tokenizer.vocab_size)
    runner = Runner(engine, page_size=C.PAGE_SIZE)
    names = ("cpmcu-engine", "cpmcu-text", threading.current_thread().name)

    def run(num_tokens: int) -> tuple[float, list[float]]:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        items: queue.SimpleQueue[StreamChunk | Exception] = queue.SimpleQueue()
        requests = []
        for i in range(num_seqs):
            prompt = [3 + (i + j) % 256 for j in range(args.context)]
            resolved = params.resolve({})
            requests += llm.prepare(prompt, resolved, items.put, is_streamed=args.stream)
        begin, before = time.perf_counter(), [cpu_seconds(name) for name in names]
        runner.submit(*requests)
        left = num_seqs
        while left:
            item = items.get()
            if isinstance(item, Exception):
                raise item
            left -= item.finish_reason is not None
        spent = [cpu_seconds(name) - start for name, start in zip(names, before)]
        return time.perf_counter() - begin, spent

    try:
        run(4)  # starts the threads
        first, before = run(1)
        whole, spent = run(1 + args.num_tokens)
    finally:
        runner.close()
    per_step = [1e6 * (b - a) / args.num_tokens for a, b in zip(before, spent)]
    rate = num_seqs * args.num_tokens / (whole - first)
    return Found(num_seqs, num_seqs / step_ms * 1e3, rate, *per_step)


def table(rows: Sequence[Found]) -> str:
    header = ["sequences", "steps alone, tokens/s", "requests, tokens/s", "%"]
    header += ["engine thread, µs/step", "text thread", "caller's thread"]
    lines = [header, ["---:"] * len(header)]
    for row in rows:
        cells = [f"{row.sequences}", f"{row.alone:.0f}", f"{row.rate:.0f}"]
        cells.append(f"{100 * row.rate / row.alone:.1f}")
        lines.append(cells + [f"{each:.0f}" for each in (row.engine, row.text, row.caller)])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def step_times(text: str) -> list[tuple[int, float]]:
    pairs = [part.split(":") for part in text.split(",")]
    times = [(int(count), float(ms)) for count, ms in pairs]
    if min(count for count, _ in times) < 1 or min(ms for _, ms in times) <= 0:
        raise ValueError(text)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench_host.py", description=__doc__.splitlines()[0])
    parser.add_argument("--model", metavar="DIR", help="directory with a tokenizer")
    parser.add_argument(
        "--steps",
        type=step_times,
        default=[(64, 6.66), (128, 12.4), (256, 24.1)],
        metavar="N:MS,...",
        help="numbers of sequences, and milliseconds of a step (default: Llama-3.1-8B in 4 bits)",
    )
    parser.add_argument("--context", type=int, default=64, help="tokens of a prompt (64)")
    parser.add_argument("--num-tokens", type=int, default=256, help="tokens after the first (256)")
    parser.add_argument("--stream", action="store_true", help="a chunk for each token")
    args = parser.parse_args()
    with LLM(args.model, device="cpu", num_threads=1, max_num_seqs=1) as llm:
        if llm.max_length < args.context + args.num_tokens + 2:
            parser.error(f"the model holds {llm.max_length} tokens of a sequence")
        rows = [measure(llm, count, ms, args) for count, ms in args.steps]
    sys.stdout.write(table(rows))


if __name__ == "__main__":
    main()
