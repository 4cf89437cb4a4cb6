"""Checks that speculation changes no token: 20 prompts with 1000 new tokens each, at true shapes.

    python scripts/check_exactness.py --model DIR --draft-model-path DIR [flags of cpmcu.cli]

Generates with and without the draft: greedy and sampled, several sequences at a time and one alone,
with CUDA graphs and (for some prompts) without. If a token differs, prints the first difference of
each text and exits with status 1.

Sparse attention needs long prompts: --prompts 3 --shortest 9000 --longest 40000 --eager-share 3.

The prefix cache is off, so each run computes every prompt.
"""

from __future__ import annotations

import dataclasses
import sys
import time

import numpy as np

from cpmcu import LLM, SamplingParams
from cpmcu.config import EngineConfig, SpeculativeConfig, option
from cpmcu.flags import FlagParser, add_flags, from_flags
from cpmcu.flags.engine import add_engine_flags, engine_config, without_hits


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Flags: the amount of text."""

    prompts: int = option(20, "number of prompts of random tokens")
    shortest: int = option(1, "tokens of the shortest prompt")
    longest: int = option(300, "tokens of the longest prompt, at least 2")
    tokens: int = option(1000, "new tokens of each prompt")
    eager_share: int = option(4, "one prompt in this many runs without CUDA graphs too")

    def __post_init__(self) -> None:
        if self.longest < 2:
            raise ValueError(f"--longest is {self.longest}, expected 2 or more")
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(f"--shortest is {self.shortest}, expected 1 to {self.longest}")
        for name in ("prompts", "tokens", "eager_share"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be at least 1")


def prompts_of(options: Options, vocab_size: int) -> list[list[int]]:
    """Prompts of random tokens, the longest one first."""
    count, shortest, longest = options.prompts, options.shortest, options.longest
    rng = np.random.default_rng(0)
    low = [n for n in (1, 63, 64, 65, 127, 129) if n <= longest] if shortest == 1 else [shortest]
    between = rng.integers(min(max(2, shortest), longest - 1), longest, count)
    lengths = [longest, *low, *between.tolist()][:count]
    return [rng.integers(3, vocab_size, n).tolist() for n in lengths]


def generate(config: EngineConfig, options: Options, share: int = 1) -> dict[str, list[list[int]]]:
    """Returns the tokens for each kind of sampling, for the first `1 / share` of the prompts."""
    texts = {}
    with LLM(**dataclasses.asdict(config)) as llm:
        prompts = prompts_of(options, llm.spec.vocab_size)
        prompts = prompts[: -(-options.prompts // share)]
        for name, fields in (
            ("greedy", {"temperature": 0.0}),
            ("sampled", {"temperature": 0.8, "top_p": 0.95, "seed": 7}),
        ):
            params = SamplingParams(max_tokens=options.tokens, ignore_eos=True, **fields)
            begin = time.perf_counter()
            outputs = [result.outputs[0] for result in llm.generate(prompts, params)]
            seconds = time.perf_counter() - begin
            texts[name] = [list(output.token_ids) for output in outputs]
            alone = llm.generate(prompts[:1], params)[0].outputs[0]
            texts[name + ", alone"] = [list(alone.token_ids)]
            count = sum(map(len, texts[name]))
            sys.stdout.write(f"  {name}: {count} tokens, {count / seconds:.0f} tokens/s\n")
    return texts


def first_difference(a: list[int], b: list[int]) -> int | None:
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def main() -> int:
    """Returns the exit status."""
    parser = FlagParser(prog="python scripts/check_exactness.py", description=__doc__)
    add_engine_flags(parser, {"prefix_cache": False})
    add_flags(parser, Options, "comparison")
    flags = parser.parse_args()
    try:
        options = from_flags(Options, flags)
        drafted = without_hits(engine_config(flags), flags)
    except ValueError as error:
        parser.error(str(error))
    none = SpeculativeConfig(no_speculation=True)
    sys.stdout.write("without speculation\n")
    expected = generate(dataclasses.replace(drafted, speculative_config=none), options)
    differences = compared = 0
    for graph in (True, False):
        sys.stdout.write(f"with speculation, CUDA graphs {'on' if graph else 'off'}\n")
        share = 1 if graph else options.eager_share
        found = generate(dataclasses.replace(drafted, cuda_graph=graph), options, share)
        for name, texts in found.items():
            for i, text in enumerate(texts):
                compared += len(text)
                at = first_difference(expected[name][i], text)
                if at is not None:
                    differences += 1
                    sys.stdout.write(f"  {name}, prompt {i}: differs at token {at}\n")
    sys.stdout.write(f"{compared} tokens compared, {differences} texts differ\n")
    return 1 if differences else 0


if __name__ == "__main__":
    raise SystemExit(main())
