"""What a decoder layer waits for: when blocks of its kernels begin, have waited, and are done.

    CPMCU_TRACE=1 python setup.py build_ext --inplace
    python scripts/trace_layer.py --model DIR [--context 1024] [--draft-model-path DRAFT ...]

Takes the flags of the engine and of speculation, as `python -m cpmcu.cli` does; with a draft the
layers are those of the target that verify. Prints microseconds after the last block was done with
the layer before: the first block, the median and the last, each the median of the layers looked at.
On Hopper, where a layer's products are one kernel (docs/kernels/fused_layer.md).
"""

from __future__ import annotations

import dataclasses
import sys
from collections import defaultdict

import numpy as np
import numpy.typing as npt

from cpmcu import LLM, C, SamplingParams
from cpmcu.config import option
from cpmcu.engine_flags import add_engine_flags, engine_config
from cpmcu.flags import FlagParser, add_flags, from_flags

Stamps = npt.NDArray[np.int64]

# In the order in which a layer passes them: file, place, and what has happened.
PLACES = (
    ("rotary_kv", 0, "rotary begins"),
    ("rotary_kv", 1, "rotary has waited"),
    ("rotary_kv", 2, "rotary is done"),
    ("attention", 0, "attention begins"),
    ("attention", 1, "attention has waited"),
    ("attention", 2, "its queries are there"),
    ("attention", 3, "attention is done"),
    ("chain", 0, "chain begins"),
    ("chain", 1, "has waited, and combined"),
    *(
        ("chain", 3 * gemm + at, f"{what} {name}")
        for gemm, name in enumerate(("o", "gate_up", "down", "qkv"))
        for at, what in ((2, "x is there:"), (3, "multiplied:"), (4, "done:"))
    ),
)
STAMPS = 16  # of a launch; TraceRing::kStamps
LAST = 13  # the place where a chain of four products is done
LONGEST = 500_000  # nanoseconds of a layer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is traced."""

    context: int = option(1024, "tokens before the traced ones")


def launches(rings: npt.NDArray[np.uint64]) -> list[Stamps]:
    """[launches, places] of each block that took part, in order."""
    blocks = []
    for ring in rings.astype(np.int64):
        stamps = ring[1:].reshape(-1, STAMPS)
        count = int(ring[0])
        if count > 0:
            blocks.append(stamps[np.arange(max(0, count - len(stamps)), count) % len(stamps)])
    return blocks


def by_layer(files: dict[str, npt.NDArray[np.uint64]]) -> dict[str, list[tuple[float, ...]]]:
    """For each place (first, median, last) block of every layer that can be told."""
    chains = launches(files["chain"])
    # All blocks take part in all launches, so the last ones are the same; one may be under way.
    kept = min(map(len, chains))
    chain = np.stack([block[len(block) - kept :] for block in chains])  # [blocks, launches, places]
    nothing = np.zeros((0, STAMPS), np.int64)
    others = {
        name: np.concatenate([nothing, *launches(files[name])])
        for name in ("rotary_kv", "attention")
    }
    found = defaultdict(list)
    for before, now in zip(range(kept - 1), range(1, kept)):
        begin = chain[:, before, LAST].max()
        end = chain[:, now, LAST].max()
        # Block 0 has a part in every product: chains of fewer are not what lies between layers.
        if min(chain[0, [before, now], LAST]) == 0 or not 0 < end - begin < LONGEST:
            continue
        for file, place, what in PLACES:
            if file == "chain":
                stamps = chain[:, now, place]
            else:
                launch = others[file]
                stamps = launch[(launch[:, 1] > begin) & (launch[:, 1] < end), place]
            stamps = stamps[stamps > 0]
            if len(stamps) > 0:
                after = (stamps - begin) / 1000
                found[what].append((after.min(), float(np.median(after)), after.max()))
    return found


def main() -> int:
    """Returns the exit status."""
    parser = FlagParser(prog="python scripts/trace_layer.py", description=__doc__)
    add_engine_flags(parser)
    add_flags(parser, Options, "trace")
    flags = parser.parse_args()
    if not hasattr(C, "trace"):
        parser.error("this build stamps no clock; expected one by CPMCU_TRACE=1 for a GPU")
    try:
        options, config = from_flags(Options, flags), engine_config(flags)
    except ValueError as error:
        parser.error(str(error))
    with LLM(**dataclasses.asdict(config)) as llm:
        prompt = np.random.default_rng(0).integers(3, llm.spec.vocab_size, options.context)
        params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
        llm.generate([prompt.tolist()], params)
        files = C.trace()
    layers = by_layer(files) if "chain" in files and launches(files["chain"]) else {}
    if not layers:
        sys.stdout.write("no layer was found whose products are one kernel\n")
        return 1
    sys.stdout.write(f"{'µs':<28}{'first':>8}{'median':>8}{'last':>8}\n")
    for what, found in layers.items():
        columns = "".join(f"{value:8.1f}" for value in np.median(np.array(found), axis=0))
        sys.stdout.write(f"{what:<28}{columns}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
