"""Traces the kernels of a decoder layer.

The trace has the times at which the CTAs of the layer's kernels start, finish pdl_wait and end.

    CPMCU_TRACE=1 python setup.py build_ext --inplace
    python scripts/trace_layer.py --model DIR [--context 1024] [--draft-model-path DRAFT ...]

Takes the flags of the engine and of speculation, as `python -m cpmcu.cli` does. With a draft, the
traced layers are the target's in verification. Prints microseconds after the last CTA of the
previous layer is done, for the first, the median and the last CTA. Each number is the median over
layers. Needs Hopper, where a layer's GEMMs are one kernel (docs/kernels/fused_layer.md).
"""

from __future__ import annotations

import dataclasses
import sys
from collections import defaultdict

import numpy as np
import numpy.typing as npt

from cpmcu import LLM, C, SamplingParams
from cpmcu.config import option
from cpmcu.flags import FlagParser, add_flags, from_flags
from cpmcu.flags.engine import add_engine_flags, engine_config

Stamps = npt.NDArray[np.int64]

# In the order of a layer: file, place, event.
PLACES = (
    ("rotary_kv", 0, "rotary begins"),
    ("rotary_kv", 1, "rotary has waited"),
    ("rotary_kv", 2, "rotary is done"),
    ("attention", 0, "attention begins"),
    ("attention", 1, "attention has waited"),
    ("attention", 2, "queries have arrived"),
    ("attention", 3, "attention is done"),
    ("fused_layer", 0, "fused layer begins"),
    ("fused_layer", 1, "splits are combined"),
    *(
        ("fused_layer", 3 * gemm + at, f"{event} {name}")
        for gemm, name in enumerate(("o", "gate_up", "down", "qkv"))
        for at, event in ((2, "x has arrived:"), (3, "main loop done:"), (4, "epilogue done:"))
    ),
)
STAMPS = 16  # stamps of a launch, TraceRing::kStamps
LAST = 13  # the place where a launch of four GEMMs is done
LONGEST = 500_000  # nanoseconds; longer layers are ignored


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the trace."""

    context: int = option(1024, "tokens before the traced ones")


def launches(rings: npt.NDArray[np.uint64]) -> list[Stamps]:
    """For each CTA with stamps, in order: [launches, places]."""
    ctas = []
    for ring in rings.astype(np.int64):
        stamps = ring[1:].reshape(-1, STAMPS)
        count = int(ring[0])
        if count > 0:
            ctas.append(stamps[np.arange(max(0, count - len(stamps)), count) % len(stamps)])
    return ctas


def by_layer(files: dict[str, npt.NDArray[np.uint64]]) -> dict[str, list[tuple[float, ...]]]:
    """For each place, (first, median, last) CTA of every layer that is found."""
    ctas = launches(files["fused_layer"])
    # All CTAs are in all launches, so the last ones match; one launch may be in flight.
    num_launches = min(map(len, ctas))
    # [CTAs, launches, places]
    fused = np.stack([cta[len(cta) - num_launches :] for cta in ctas])
    nothing = np.zeros((0, STAMPS), np.int64)
    others = {
        name: np.concatenate([nothing, *launches(files[name])])
        for name in ("rotary_kv", "attention")
    }
    found = defaultdict(list)
    for before, now in zip(range(num_launches - 1), range(1, num_launches)):
        begin = fused[:, before, LAST].max()
        end = fused[:, now, LAST].max()
        # CTA 0 has a part in every GEMM. Launches of fewer GEMMs are not layers.
        if min(fused[0, [before, now], LAST]) == 0 or not 0 < end - begin < LONGEST:
            continue
        for file, place, event in PLACES:
            if file == "fused_layer":
                stamps = fused[:, now, place]
            else:
                launch = others[file]
                stamps = launch[(launch[:, 1] > begin) & (launch[:, 1] < end), place]
            stamps = stamps[stamps > 0]
            if len(stamps) > 0:
                after = (stamps - begin) / 1000
                found[event].append((after.min(), float(np.median(after)), after.max()))
    return found


def main() -> int:
    """Returns the exit status."""
    parser = FlagParser(prog="python scripts/trace_layer.py", description=__doc__)
    add_engine_flags(parser)
    add_flags(parser, Options, "trace")
    flags = parser.parse_args()
    if not hasattr(C, "trace"):
        parser.error("this build has no trace; expected a GPU build with CPMCU_TRACE=1")
    try:
        options, config = from_flags(Options, flags), engine_config(flags)
    except ValueError as error:
        parser.error(str(error))
    with LLM(**dataclasses.asdict(config)) as llm:
        prompt = np.random.default_rng(0).integers(3, llm.spec.vocab_size, options.context)
        params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
        llm.generate([prompt.tolist()], params)
        files = C.trace()
    layers = by_layer(files) if "fused_layer" in files and launches(files["fused_layer"]) else {}
    if not layers:
        sys.stdout.write("no layer was found whose GEMMs are one kernel\n")
        return 1
    sys.stdout.write(f"{'µs':<28}{'first':>8}{'median':>8}{'last':>8}\n")
    for event, found in layers.items():
        columns = "".join(f"{value:8.1f}" for value in np.median(np.array(found), axis=0))
        sys.stdout.write(f"{event:<28}{columns}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
