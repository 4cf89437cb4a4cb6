"""`cpmcu bench`, `python -m cpmcu.bench`: speed of loading, prefill and decoding.

The floor of a decode step is the bytes that it must move, divided by the read bandwidth measured in
the same run. The bytes that count:

| data | counted |
|---|---|
| weights | all but the embedding table and the experts that the token does not use |
| keys and values | those of the context that attention reads |
| states of gated delta nets | twice: they are read and written |

Prompts are random tokens. The time of a step is the median of several windows of steps. The windows
follow a warm-up, and steps are launched ahead in them.

If there is a draft, the model is loaded a second time, with the draft. A speculative step drafts,
verifies and accepts. Its time depends on the tree's shape, not on the accepted tokens. Tokens/s is
therefore (mean accept length) / (time of a step). Whole requests check this figure. If each step
chooses its shape (no shape is given, or --spec-auto yes), the model is loaded a third time to
measure such requests.

The prefix cache is off: each prompt is computed.

--sequences measures many sequences side by side (`cpmcu/benchmarks/sequences.py`).

--needle measures no speed. It asks for numbers in long texts, with sparse and with dense attention
(`cpmcu/benchmarks/needle.py`).

Exit status: 0; 1 for an error (one sentence; CPMCU_DEBUG=1 shows the traceback); 2 for wrong flags;
130 after Ctrl-C.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from cpmcu.benchmarks.decoding import Row, fitting_steps, plain_row
from cpmcu.benchmarks.drafters import drafters_table, run_drafters, shifted
from cpmcu.benchmarks.plot import Kernel, check_plot, read_kernels, save
from cpmcu.benchmarks.progress import BenchProgress
from cpmcu.benchmarks.report import device_facts, model_facts, report
from cpmcu.benchmarks.sequences import parse_counts, run_sequences, sequences_table
from cpmcu.benchmarks.speculation import has_draft, run_speculation, speculation_table
from cpmcu.config import EngineConfig, SpeculativeConfig, option
from cpmcu.drafters.options.trees import CHAIN_DEPTH, CHOSEN_SHAPE
from cpmcu.errors import INTERRUPTED, check_stdout, forget_interrupt, reader_left, sentence
from cpmcu.flags import FOOTER, FlagParser, add_flags, from_flags
from cpmcu.flags.engine import (
    MODEL_WORD,
    add_engine_flags,
    engine_config,
    named_model,
    without_hits,
)
from cpmcu.flags.startup import add_startup_flags, prepare
from cpmcu.shipped import shipped_model, shipped_needle_model

NEEDLE_LENGTHS = (1024, 2048, 4096)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The flags of a benchmark."""

    contexts: str | None = option(
        None,
        "context lengths in tokens, separated by commas (default: 1024; of --needle: "
        f"{','.join(map(str, NEEDLE_LENGTHS))})",
        metavar="N,N",
        brief="context lengths in tokens (default: 1024)",
    )
    decode: int = option(
        64,
        "decode steps, plain or speculative, of one timed window; fewer if the context is full",
        brief="decode steps of one timed window (default: 64)",
    )
    drafters: bool = option(
        False,
        "compare the drafters that ship for this model, and plain decoding, on prompts that copy "
        "and prompts that do not; --decode is the tokens of a request",
        brief="compare all drafters instead",
    )
    tap_shift: bool = option(
        False,
        "compare the accept lengths of a block draft that reads the hidden states of the target's "
        "layers -1, 0 and +1 from those of its files",
        brief="",
    )
    sequences: str | None = option(
        None,
        "instead, tokens/s of so many sequences side by side, through LLM.generate; --decode is "
        "the tokens of each, --contexts one length",
        metavar="N,N",
        brief="compare numbers of sequences: 1,8,32",
    )
    report: bool = option(
        False,
        "print the result as a block to paste into an issue: card, driver, code path, model, times",
        brief="print a block to paste into an issue",
    )
    json: bool = option(
        False, "print JSON instead of a table", brief="print JSON instead of a table"
    )
    plot: str | None = option(
        None,
        "also draw tokens/s by context (needs cpmcu[plot])",
        metavar="FILE.png",
        brief="also draw tokens/s by context",
    )
    kernels: str | None = option(
        None,
        "also draw each kernel's share of its roofline; FILE: output of scripts/bench/bench_*.py "
        "--json",
        metavar="FILE",
    )
    needle: bool = option(
        False,
        "instead of speed, check that sparse attention finds in long texts what dense attention "
        "finds, with a model that was trained for sparse attention (default: tiny-needle)",
        brief="check that sparse attention finds what dense attention finds",
    )
    needle_texts: int = option(2, "texts of each length for --needle")

    def __post_init__(self) -> None:
        # Each is a benchmark or an output of its own.
        kinds = ("drafters", "tap_shift", "needle", "sequences", "report", "plot")
        given = [f"--{name.replace('_', '-')}" for name in kinds if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]} are both given, expected one of them")
        for name in ("decode", "needle_texts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be at least 1")
        if self.contexts is not None and not all(
            part.strip().isdecimal() and int(part) > 0 for part in self.contexts.split(",")
        ):
            raise ValueError(
                f"contexts is {self.contexts!r}, expected lengths from 1 on, separated by commas"
            )
        if self.report and self.json:
            raise ValueError("--report is given with --json, expected one of them")
        if self.sequences is not None:
            parse_counts(self.sequences)  # raises ValueError if it is wrong
            if len(self.lengths) > 1:
                raise ValueError(f"contexts is {self.contexts!r} with --sequences, expected one")

    @property
    def lengths(self) -> list[int]:
        """Returns the context lengths that `contexts` names."""
        if self.contexts is None:
            return list(NEEDLE_LENGTHS) if self.needle else [1024]
        return [int(part) for part in self.contexts.split(",")]


def describe_device(device: str, index: int) -> str:
    """Name of the device and version of its driver."""
    from cpmcu import C

    if device == "cpu":
        return f"{platform.machine()} CPU, {os.cpu_count()} cores"
    info = C.device_info(index)
    version = info["driver_version"]
    return f"{info['name']}, CUDA driver {version // 1000}.{version % 1000 // 10}"


def run(config: EngineConfig, options: BenchOptions, progress: BenchProgress) -> dict[str, Any]:
    """Runs the benchmark. Returns a JSON object; the suffix of a key is its unit."""
    from cpmcu import C
    from cpmcu.loading.loader import choose_device

    config = dataclasses.replace(config, prefix_cache=False)
    device = choose_device(config.device)
    result = {
        "device": describe_device(device, config.device_index),
        "build": json.loads(C.build_info_json),
        "cuda_graph": config.cuda_graph,
        "prefix_cache": config.prefix_cache,
    }
    if options.drafters:
        return result | run_drafters(config, options.decode, progress)
    if options.tap_shift:
        return result | run_drafters(config, options.decode, progress, shifted(config))
    if options.sequences is not None:
        counts, (context,) = parse_counts(options.sequences), options.lengths
        return result | run_sequences(config, counts, context, options.decode, progress)
    result |= device_facts(device, config.device_index, result["build"])
    progress.note("measuring the device's bandwidth")
    ceilings = C.ceilings(device, config.device_index)
    result |= {
        "read_GB_per_s": ceilings["read_bytes_per_second"] / 1e9,
        "host_to_device_GB_per_s": ceilings["host_to_device_bytes_per_second"] / 1e9,
    }
    rate = ceilings["read_bytes_per_second"]
    plain, rows = run_plain(config, options, rate, progress)
    result |= plain
    if has_draft(config):
        result["speculation"] = run_speculation(config, rows, options.decode, progress)
    return result


def run_plain(
    config: EngineConfig, options: BenchOptions, rate: float, progress: BenchProgress
) -> tuple[dict[str, Any], list[Row]]:
    """Loads the model without a draft, measures it and frees its memory.

    If a context leaves no room for the timed steps, raises ValueError before any measurement.
    """
    from cpmcu.loading.loader import load_model

    plain = SpeculativeConfig(no_speculation=True)
    begin = time.perf_counter()
    loaded = load_model(
        str(shipped_model()) if config.model is None else config.model,
        config=dataclasses.replace(config, speculative_config=plain),
        progress=progress.loading(),
    )
    load_s = time.perf_counter() - begin
    weights = sum(row["bytes"] for row in loaded.engine.memory_plan() if row["group"] == "weights")
    depth = config.speculation.options.get("spec_num_iter") or max(CHOSEN_SHAPE.depth, CHAIN_DEPTH)
    # Maximum number of tokens that a step emits.
    most_tokens = depth + 1 if has_draft(config) else 1
    for context in options.lengths:
        fitting_steps(loaded.engine, context, options.decode, most_tokens)
    rows = [
        plain_row(loaded.engine, loaded.spec, context, options.decode, rate, progress)
        for context in options.lengths
    ]
    result = {
        "model": loaded.directory.name,
        "dtype": loaded.spec.dtype,
        "chunk_length": loaded.engine.chunk_length,
        "weights_GB": weights / 1e9,
        **model_facts(loaded, config),
        "load_s": load_s,
        "load_GB_per_s": weights / 1e9 / load_s,
        "rows": [dataclasses.asdict(row) for row in rows],
        "counters": loaded.engine.counters,
    }
    return result, rows


def table(result: dict[str, Any]) -> str:
    """The result as a Markdown table."""
    if "tokens_per_request" in result or "sequences" in result:
        title = f"{result['model']}, {result['dtype']}, on {result['device']}, commit "
        lines = sequences_table(result) if "sequences" in result else drafters_table(result)
        return "\n".join([title + result["build"].get("commit", "?"), *lines])
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
    if "speculation" in result:
        lines += speculation_table(result["speculation"])
    return "\n".join(lines)


def _config(options: BenchOptions, flags: Any) -> EngineConfig:
    """The engine's configuration. Raises ValueError for flags that do not go with the benchmark."""
    config = engine_config(flags)
    if not options.needle:
        return without_hits(config, flags)
    if config.model is None:
        config = dataclasses.replace(config, model=str(shipped_needle_model()))
    if config.apply_sparse is not None:
        raise ValueError("apply_sparse is given with --needle, which compares yes with no")
    return config


def _kernels(options: BenchOptions) -> list[Kernel]:
    """The kernels of --kernels. Raises ValueError if --plot or --kernels cannot be used."""
    if options.plot is not None:
        check_plot(Path(options.plot))
    if options.kernels is None:
        return []
    if options.plot is None:
        raise ValueError("--kernels is given without --plot, expected both")
    return read_kernels(Path(options.kernels))


def _print(text: str) -> None:
    """Writes to stdout; a closed pipe is not an error."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        reader_left()


def _prog(verb: str | None) -> str:
    return f"cpmcu {verb}" if verb else "python -m cpmcu.bench"


def make_parser(verb: str | None = None) -> FlagParser:
    """The parser of all flags."""
    parser = FlagParser(
        prog=_prog(verb),
        usage=None if verb else "python -m cpmcu.bench [flags]",
        words=MODEL_WORD if verb else None,
        description="Measures loading, prefill and decoding, and compares a decode step with the "
        "time to read its bytes at the device's bandwidth. With a draft, also measures "
        "speculative decoding. The prefix cache is off.",
        epilog=FOOTER,
    )
    add_flags(parser, BenchOptions, "benchmark")
    add_engine_flags(parser, {"prefix_cache": False}, "engine")
    add_startup_flags(parser, "engine")
    return parser


def main(arguments: list[str] | None = None, verb: str | None = None) -> int:
    """Runs a benchmark; returns the exit status. `verb`: set by `cpmcu bench`."""
    file = prepare(arguments, _prog(verb))
    parser = make_parser(verb)
    flags = parser.parse_args(arguments, file=file)
    try:
        flags.model = named_model(flags)
        options = from_flags(BenchOptions, flags)
        config = _config(options, flags)
        kernels = _kernels(options)
    except (ValueError, OSError) as error:
        parser.error(parser.named(sentence(error)))
    try:
        check_stdout()
        progress = BenchProgress()
        if options.needle:
            from cpmcu.benchmarks import needle  # needs numpy

            lengths, num_texts = options.lengths, options.needle_texts
            result = needle.run_needle(config, lengths, num_texts, progress)
            text = needle.needle_table(result)
        else:
            with progress.watched():
                result = run(config, options, progress)
            text = report(result) if options.report else table(result)
        _print((json.dumps(result, indent=2) if options.json else text) + "\n")
        if options.plot is not None:
            save(result, kernels, Path(options.plot))
    except KeyboardInterrupt:
        forget_interrupt()
        sys.stderr.write("stopped\n")
        return INTERRUPTED
    except Exception as error:
        if os.environ.get("CPMCU_DEBUG"):
            raise
        sys.stderr.write(f"cpmcu: {sentence(error)}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
