"""Many sequences side by side: `cpmcu bench --sequences 1,8,32`.

All sequences run through one `LLM.generate`. Each has its own random prompt and emits equally many
tokens. A call that emits one token of each sequence takes the time of the prompts. A whole call
takes longer by the time of the other tokens. Both times are medians of `REPEATS` calls.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import TYPE_CHECKING, Any

from cpmcu.benchmarks.progress import BenchProgress
from cpmcu.config import MOST_SEQS, EngineConfig
from cpmcu.shipped import shipped_model

if TYPE_CHECKING:
    from cpmcu.llm import LLM

REPEATS = 3
_BAR = 24  # length of the longest bar, in characters


@dataclasses.dataclass(frozen=True, slots=True)
class SequencesRow:
    """One number of sequences. The suffix of a field is its unit."""

    sequences: int
    tokens_per_s: float  # sum over all sequences, after their first tokens
    tokens_per_s_of_one: float
    prompt_tokens_per_s: float  # sum over all prompts
    tokens_per_step: float  # tokens that a step emits for one sequence; 1 without a draft


def parse_counts(text: str) -> list[int]:
    """Reads "1,8,32". Raises ValueError for other text."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= MOST_SEQS for part in parts):
        raise ValueError(
            f"sequences is {text!r}, expected numbers from 1 to {MOST_SEQS}, separated by commas"
        )
    return [int(part) for part in parts]


def run_sequences(
    config: EngineConfig, counts: list[int], context: int, decode: int, progress: BenchProgress
) -> dict[str, Any]:
    """Loads the model once and measures each number of sequences.

    Raises ValueError, before any measurement, if the KV cache is too small for the largest one.
    """
    from cpmcu.llm import LLM

    most, length = max(counts), context + 1 + decode
    config = dataclasses.replace(
        config,
        model=str(shipped_model()) if config.model is None else config.model,
        max_num_seqs=config.max_num_seqs or most,
        max_model_len=config.max_model_len or length,
    )
    with LLM(progress=progress.loading(), **dataclasses.asdict(config)) as llm:
        _check_room(llm, most, length)
        rows = []
        for count in counts:
            progress.note(f"{count} sequences: {REPEATS} calls of {decode + 1} tokens each")
            rows.append(dataclasses.asdict(_row(llm, count, context, decode, progress)))
        return {
            "model": llm.directory.name,
            "dtype": llm.spec.dtype,
            "draft": llm.draft_spec.method if llm.draft_spec else None,
            "context": context,
            "decode": decode,
            "sequences": rows,
        }


def _check_room(llm: LLM, count: int, length: int) -> None:
    if count > llm.max_num_seqs:
        raise ValueError(
            f"max_num_seqs is {llm.max_num_seqs}, expected at least {count}: raise it or lower "
            "--sequences"
        )
    load = llm.engine_load()
    page = load.page_size
    needed = count * -(-length // page) * page
    held = load.num_pages * page
    if needed > held or length > llm.max_length:
        raise ValueError(
            f"{count} sequences of {length} tokens need a KV cache of {needed}, but it holds "
            f"{held}, and {llm.max_length} tokens of a sequence: lower --sequences, --contexts or "
            "--decode"
        )


def _row(llm: LLM, count: int, context: int, decode: int, progress: BenchProgress) -> SequencesRow:
    import numpy as np  # needs numpy, which --help does without

    from cpmcu.sampling import SamplingParams

    vocab_size = int(llm.spec.vocab_size)
    draws = np.random.default_rng(count).integers(3, vocab_size, (count, context))
    prompts: list[list[int]] = draws.tolist()
    accepted = 1.0  # tokens that a step emits for one sequence

    def call(num_tokens: int) -> float:
        nonlocal accepted
        progress.check()
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        begin = time.perf_counter()
        results = llm.generate(prompts, params)
        seconds = time.perf_counter() - begin
        timings = [result.outputs[0].timings for result in results]
        steps = sum(each.decode_steps for each in timings)
        accepted = sum(each.output_tokens - 1 for each in timings) / max(steps, 1)
        return seconds

    call(1 + min(decode, 8))  # loads kernels and captures graphs
    prompt_s = statistics.median(call(1) for _ in range(REPEATS))
    whole_s = statistics.median(call(1 + decode) for _ in range(REPEATS))
    rate = count * decode / max(whole_s - prompt_s, 1e-9)
    return SequencesRow(count, rate, rate / count, count * context / prompt_s, accepted)


def sequences_table(result: dict[str, Any]) -> list[str]:
    """Markdown lines, with a bar for tokens/s of all sequences."""
    draft = result["draft"]
    lines = [
        "",
        f"contexts of {result['context']} tokens, {result['decode']} tokens after the first, "
        f"LLM.generate, {f'draft {draft}' if draft else 'no draft'}",
        "",
        "| sequences | tok/s, all | tok/s, one | prompt tok/s | tokens a step | tok/s, all |",
        "|---:|---:|---:|---:|---:|:---|",
    ]
    most = max(row["tokens_per_s"] for row in result["sequences"])
    for row in result["sequences"]:
        bar = "█" * max(1, round(_BAR * row["tokens_per_s"] / most))
        lines.append(
            f"| {row['sequences']} | {row['tokens_per_s']:.1f} | "
            f"{row['tokens_per_s_of_one']:.1f} | {row['prompt_tokens_per_s']:.0f} | "
            f"{row['tokens_per_step']:.2f} | {bar} |"
        )
    return lines
