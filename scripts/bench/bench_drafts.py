"""Times what drafters add to a speculative step, by steps of a whole model.

    python scripts/bench/bench_drafts.py --model DIR --draft EAGLE_DIR --modules MTP_DIR

The files come from `python -m scripts.synthetic`: a pair of known acceptance (--acceptance), and
MTP modules for it (--preset llama3.1-8b-mtp3). A table without its files is left out.

    modules   a chain from N modules, against a chain from N passes of the first one
    fill      the same tree with and without n-gram fill
    verify    the same chain with `target_match` and with `topp`
    copying   a request that repeats --copied tokens of its prompt, with fill and without

Times are medians of windows of steps, in milliseconds.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from cpmcu import LLM, SamplingParams
from cpmcu.benchmarks.decoding import Timing, measure

CHAIN = {"spec_num_iter": 4, "spec_topk_per_iter": 1, "spec_tree_size": 5}
TREE = {"spec_num_iter": 4, "spec_topk_per_iter": 8, "spec_tree_size": 32}


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args

    def load(self, room: int, **speculation: Any) -> LLM:
        return LLM(
            self.args.model,
            device=self.args.device,
            max_num_seqs=1,
            max_model_len=room,
            prefix_cache=False,
            speculative_config={"spec_auto": False, **speculation},
        )

    def step(self, **speculation: Any) -> Timing:
        context, steps = self.args.context, self.args.steps
        with self.load(2 * context + 100 * steps, **speculation) as llm:
            vocab = int(llm.spec.vocab_size)
            return llm.call_engine(lambda engine: measure(engine, vocab, context, steps))

    def copying(self, **speculation: Any) -> tuple[float, float]:
        """Tokens/s and mean accept length of a request that repeats its prompt."""
        args = self.args
        params = SamplingParams(temperature=0, max_tokens=args.copied, ignore_eos=True)
        with self.load(4 * args.copied, **speculation) as llm:
            first = [5]
            text = llm.generate(first, params)[0].outputs[0].token_ids
            prompt = [*first, *text, *first]
            output = llm.generate(prompt, params)[0].outputs[0]
            if list(output.token_ids) != list(text):
                raise SystemExit("the model does not repeat its text, expected a synthetic pair")
            metrics = output.spec_decode_metrics
            assert metrics is not None
            return output.timings.decode_tokens_per_s, metrics.mean_acceptance_length


def report(name: str, timing: Timing, base: Timing | None = None) -> None:
    line = f"{name:44} {timing.step_ms:8.3f} ± {timing.spread_ms / 2:.3f} ms"
    if base is not None:
        more = timing.step_ms - base.step_ms
        line += f"  x {timing.step_ms / base.step_ms:.3f}  {1e3 * more:+.1f} µs"
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def modules(bench: Bench, path: str) -> None:
    chain = {"method": "mtp", "model": path, "num_speculative_tokens": 3}
    once = bench.step(**{**chain, "num_speculative_tokens": 1}, enable_multi_layers_mtp=False)
    one = bench.step(**chain, enable_multi_layers_mtp=False)
    report("MTP, 1 pass of one module", once)
    report("MTP, 3 passes of one module", one, once)
    report("MTP, 3 modules", bench.step(**chain, enable_multi_layers_mtp=True), one)


def fill(bench: Bench, path: str) -> None:
    for name, shape in (("chain of 4", CHAIN), ("tree of 32", TREE)):
        base = bench.step(draft_model_path=path, **shape)
        report(f"EAGLE, {name}", base)
        filled = bench.step(draft_model_path=path, **shape, fill="ngram", num_model_steps=4)
        report(f"EAGLE, {name}, n-gram fill", filled, base)


def verify(bench: Bench, path: str) -> None:
    for name, shape in (("chain of 4", CHAIN), ("tree of 32", TREE)):
        base = bench.step(draft_model_path=path, **shape)
        loose = bench.step(draft_model_path=path, **shape, verify_strategy="topp")
        report(f"EAGLE, {name}, topp", loose, base)
        draws = int(shape["spec_tree_size"])
        each = 1e3 * (loose.step_ms - base.step_ms) / draws
        sys.stdout.write(f"{'  a draw':44} {each:+.2f} µs\n")


def copying(bench: Bench, path: str) -> None:
    alone, length = bench.copying(draft_model_path=path, **CHAIN)
    sys.stdout.write(f"copying, EAGLE chain of 4: {alone:.0f} tokens/s, {length:.2f} a step\n")
    longest = bench.args.longest
    filled, length = bench.copying(
        method="eagle",
        model=path,
        fill="ngram",
        num_model_steps=4,
        num_speculative_tokens=longest,
    )
    sys.stdout.write(
        f"copying, with n-gram fill, paths of {longest}: {filled:.0f} tokens/s, {length:.2f} a "
        f"step, x {filled / alone:.2f}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft", help="an EAGLE head")
    parser.add_argument("--modules", help="a folder of MTP modules")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=64, help="of a window")
    parser.add_argument("--copied", type=int, default=10000, help="tokens; 0: no copying")
    parser.add_argument("--longest", type=int, default=15, help="tokens of a path with fill")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    bench = Bench(args)
    if args.modules:
        modules(bench, args.modules)
    if args.draft:
        fill(bench, args.draft)
        verify(bench, args.draft)
        if args.copied:
            copying(bench, args.draft)


if __name__ == "__main__":
    main()
