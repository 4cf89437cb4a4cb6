"""Compares the shapes that the engine chooses with fixed shapes, on whole requests.

    python scripts/bench/bench_chooser.py [--model DIR --drafts DIR,DIR] [--sequences 1,4,16]

Without --model it takes a shipped model and its draft. `python -m scripts.synthetic --acceptance P`
writes pairs of known acceptance. With --draft-only it writes one more draft of the same target.

All runs decode the same greedy text. A step counts while all sequences run. Each draft and number
of sequences has one line: tokens/s of the chooser and of each fixed shape. Rates are counted after
the first --first tokens of a sequence. The chooser has a rate of the first tokens, too. A share is
the chooser's rate divided by that of the best fixed shape. The engine is new for each draft, so its
first runs with the chooser learn the draft, too. Fixed shapes run last.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from cpmcu import LLM, SamplingParams
from cpmcu.engine.chooser import ShapeChooser
from cpmcu.engine.shapes import PLAIN, Shape
from cpmcu.shipped import shipped_model

PROMPT = 64  # tokens


class Recorder(ShapeChooser):
    """Records steps with `num_seqs` sequences. If `shape` is None, `chooser` chooses it."""

    def __init__(self, chooser: ShapeChooser, num_seqs: int, shape: Shape | None = None) -> None:
        super().__init__(chooser.shapes)
        self.chooser, self.shape, self.wanted = chooser, shape, num_seqs
        self.steps: list[tuple[Shape, float, int]] = []  # shape, seconds, tokens

    def may_pay(self, num_seqs: int, shape: Shape | None = None) -> bool:
        return self.shape is not None or self.chooser.may_pay(num_seqs, shape)

    def choose(self, num_seqs: int) -> Shape:
        return self.chooser.choose(num_seqs) if self.shape is None else self.shape

    def observe(self, shape: Shape, num_seqs: int, seconds: float, emitted: Sequence[int]) -> None:
        if self.shape is None:
            self.chooser.observe(shape, num_seqs, seconds, emitted)
        if num_seqs == self.wanted and len(emitted) == num_seqs:
            self.steps.append((shape, seconds, sum(emitted)))

    def forget_text(self) -> None:
        if self.shape is None:
            self.chooser.forget_text()

    def rate(self, begin: int, end: int) -> float:
        """Tokens/s between `begin` and `end` tokens of a sequence, on average."""
        seconds, tokens, at = 0.0, 0, 0.0
        for _, took, emitted in self.steps:
            if begin <= at < end:
                seconds, tokens = seconds + took, tokens + emitted
            at += emitted / self.wanted
        return tokens / seconds if seconds else float("nan")

    def shapes_of(self, begin: int) -> str:
        """The shapes after `begin` tokens, with their shares of the steps."""
        counts: Counter[Shape] = Counter()
        at = 0.0
        for shape, _, emitted in self.steps:
            if at >= begin:
                counts[shape] += 1
            at += emitted / self.wanted
        total = max(1, counts.total())
        return " ".join(f"{name(s)}:{100 * n / total:.0f}%" for s, n in counts.most_common(4))


def name(shape: Shape) -> str:
    return f"{shape[0]}/{shape[1]}"


class Bench:
    """One engine with a draft."""

    def __init__(self, args: argparse.Namespace, draft: str | None) -> None:
        options: dict[str, Any] = {} if draft is None else {"draft_model_path": draft}
        self.llm = LLM(
            args.model,
            device=args.device,
            max_num_seqs=max(args.sequences),
            max_model_len=args.max_model_len,
            prefix_cache=False,
            speculative_config={**options, "spec_auto": True},
        )
        self.runner = self.llm._runner  # its chooser is replaced between requests
        chooser = self.runner._chooser
        assert chooser is not None
        self.chooser = chooser
        self.vocab = int(self.llm.spec.vocab_size)

    def run(self, num_seqs: int, tokens: int, shape: Shape | None, seed: int = 0) -> Recorder:
        recorder = Recorder(self.chooser, num_seqs, shape)
        rng = random.Random(1000 * seed + num_seqs)
        prompts = [rng.choices(range(3, self.vocab), k=PROMPT) for _ in range(num_seqs)]
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        self.runner._chooser = recorder
        self.llm.generate(prompts, params)
        self.runner._chooser = self.chooser
        return recorder


def shape_of(text: str) -> Shape:
    levels, _, nodes = text.partition("/")
    return int(levels), int(nodes)


def measure(bench: Bench, args: argparse.Namespace, draft: str, num_seqs: int) -> dict[str, Any]:
    """Tokens/s of the chooser and of fixed shapes with this number of sequences."""
    length = max(args.first + 32, args.tokens // (1 if num_seqs == 1 else 2))
    chosen = bench.run(num_seqs, length, None)
    end = 0.9 * length  # beyond, some sequences may have ended
    rates = {}
    for shape in args.shapes or bench.chooser.shapes:
        if shape in bench.chooser.shapes:
            bench.run(num_seqs, 16, shape, seed=1)  # captures graphs
            rates[shape] = bench.run(num_seqs, length, shape).rate(args.first, end)
    best = max(rates, key=rates.__getitem__)
    later = chosen.rate(args.first, end)
    return {
        "draft": draft,
        "sequences": num_seqs,
        "fixed": {name(shape): rate for shape, rate in rates.items()},
        "best": name(best),
        "first": chosen.rate(0, args.first),
        "later": later,
        "share_first": chosen.rate(0, args.first) / rates[best],
        "share": later / rates[best],
        "share_of_plain": later / rates[PLAIN] if PLAIN in rates else None,
        "shapes": chosen.shapes_of(args.first),
    }


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=str(shipped_model()))
    parser.add_argument("--drafts", help="folders, separated by commas")
    parser.add_argument("--sequences", default="1,4,16", help="numbers, separated by commas")
    parser.add_argument("--shapes", help="levels/nodes,…; default: all that the engine offers")
    parser.add_argument("--tokens", type=int, default=400, help="of one sequence; half of several")
    parser.add_argument("--first", type=int, default=100, help="tokens of the first part")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    return parser


def main() -> None:
    args = make_parser().parse_args()
    args.sequences = [int(text) for text in args.sequences.split(",")]
    args.shapes = args.shapes and [shape_of(text) for text in args.shapes.split(",")]
    for draft in args.drafts.split(",") if args.drafts else [None]:
        begin = time.perf_counter()
        bench = Bench(args, draft)
        for num_seqs in args.sequences:
            row = measure(bench, args, draft or "shipped", num_seqs)
            if args.json:
                line = json.dumps(row)
            else:
                fixed = " ".join(f"{key} {rate:.0f}" for key, rate in row["fixed"].items())
                line = (
                    f"{row['draft'].rsplit('/', 1)[-1]:12} x{num_seqs:<3} chosen, first "
                    f"{row['first']:7.0f} ({row['share_first']:.2f}), later {row['later']:7.0f} "
                    f"({row['share']:.3f} of {row['best']})  [{row['shapes']}]  fixed: {fixed}"
                )
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
        bench.llm.close()
        if not args.json:
            sys.stdout.write(f"  {time.perf_counter() - begin:.1f} s\n")


if __name__ == "__main__":
    main()
