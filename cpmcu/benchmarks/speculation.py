"""Speculative cycles beside plain steps, and beside whole requests."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from cpmcu.benchmarks.decoding import WINDOWS, Row, measure, random_prompt
from cpmcu.config import EngineConfig, SpeculativeConfig, shipped_draft, shipped_model
from cpmcu.loading.hub import resolve_model

if TYPE_CHECKING:
    from cpmcu.llm import LLM

CURVE = range(1, 7)  # mean accept lengths for which tokens/s is told


@dataclasses.dataclass(frozen=True, slots=True)
class CycleRow:
    """One line of speculative decoding at one context length."""

    context: int
    cycle_ms: float
    cycle_spread_ms: float  # slowest minus fastest window
    cycle_ratio: float  # cycle over plain step
    mean_accept_length: float  # of the request, the target's own token of each cycle included
    tokens_per_s: float  # of the request, after its first token
    expected_tokens_per_s: float  # mean accept length over cycle
    difference_percent: float  # of the two
    tokens_per_s_at_accept_length: dict[int, float]  # accept length over cycle


@dataclasses.dataclass(frozen=True, slots=True)
class ChosenRow:
    """One greedy request whose trees' shapes are chosen in each step, at one context length."""

    context: int
    mean_accept_length: float  # of the steps that drafted; 0: none did
    tokens_per_s: float  # after its first token


def stream(llm: LLM, context: int, num_tokens: int) -> tuple[float, float]:
    """Mean accept length, 0 if nothing was drafted, and tokens/s of a greedy request, streamed.

    Of fewer tokens where there is no room for `num_tokens`.
    """
    from cpmcu.sampling import SamplingParams

    num_tokens = min(num_tokens, llm.max_length - context)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    prompt = random_prompt(int(llm.spec.vocab_size), context)
    result = [chunk.result for chunk in llm.stream(prompt, params)][-1]
    assert result is not None  # the last chunk has it
    output = result.outputs[0]
    metrics = output.spec_decode_metrics
    accepted = metrics.mean_acceptance_length if metrics else 1.0
    return accepted, output.timings.decode_tokens_per_s


def cycle_row(llm: LLM, plain: Row, steps: int) -> CycleRow:
    """Cycles by themselves, and one greedy request from the prompt to its text."""
    vocab_size, context = int(llm.spec.vocab_size), plain.context
    timing = llm.call_engine(lambda engine: measure(engine, vocab_size, context, steps))
    stream(llm, context, 16)  # warms the host's side up
    accepted, measured = stream(llm, context, 1 + WINDOWS * steps)
    expected = accepted / timing.step_ms * 1e3
    return CycleRow(
        context=context,
        cycle_ms=timing.step_ms,
        cycle_spread_ms=timing.spread_ms,
        cycle_ratio=timing.step_ms / plain.step_ms,
        mean_accept_length=accepted,
        tokens_per_s=measured,
        expected_tokens_per_s=expected,
        difference_percent=100 * (measured / expected - 1),
        tokens_per_s_at_accept_length={length: length / timing.step_ms * 1e3 for length in CURVE},
    )


def chosen_row(llm: LLM, context: int, steps: int) -> ChosenRow:
    """A request after one that has shown how long each shape takes."""
    stream(llm, context, 1 + WINDOWS * steps)
    return ChosenRow(context, *stream(llm, context, 1 + WINDOWS * steps))


def has_draft(config: EngineConfig) -> bool:
    """Is there anything to speculate with?"""
    speculation = config.speculation
    if speculation.no_speculation:
        return False
    named = speculation.draft_model_path is not None or speculation.method != "auto"
    if named or speculation.use_eagle3:
        return True
    target = shipped_model() if config.model is None else resolve_model(config.model)
    return shipped_draft(target) is not None


def run_cycles(config: EngineConfig, rows: list[Row], steps: int) -> dict[str, Any]:
    """What a run with a draft adds to the result."""
    from cpmcu.llm import LLM

    def load(speculation: SpeculativeConfig) -> LLM:
        drafted = dataclasses.replace(config, speculative_config=speculation)
        return LLM(**dataclasses.asdict(drafted))

    whole, chosen = config.speculation, []
    if whole.chooses_shapes:
        with load(whole) as llm:
            chosen = [chosen_row(llm, row.context, steps) for row in rows]
            draft = llm.draft_spec
        assert draft is not None  # has_draft
        # Every cycle of the largest shape, which the times are of.
        whole = dataclasses.replace(
            whole,
            spec_auto=False,
            spec_num_iter=draft.depth,
            spec_topk_per_iter=draft.topk,
            spec_tree_size=draft.tree_size,
        )
    with load(whole) as llm:
        cycles = [cycle_row(llm, row, steps) for row in rows]
        depth = llm.call_engine(lambda engine: engine.tokens_per_step) - 1
        counters = llm.call_engine(lambda engine: engine.counters)
    given = dataclasses.asdict(whole)
    usual = dataclasses.asdict(SpeculativeConfig(spec_auto=False))
    return {
        "depth": depth,
        "options": {name: value for name, value in given.items() if value != usual[name]},
        "rows": [dataclasses.asdict(row) for row in cycles],
        "chosen": [dataclasses.asdict(row) for row in chosen],
        "counters": counters,
    }


def cycle_table(speculation: dict[str, Any]) -> list[str]:
    """The lines about speculation. T: a cycle; τ: the mean accept length."""
    given = ", ".join(f"{name} {value}" for name, value in speculation["options"].items())
    lines = [
        "",
        f"speculation, depth {speculation['depth']}: {given}",
        "",
        "| context | T, ms | ± ms | T ÷ plain step | τ | tok/s | τ ÷ T | difference |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in speculation["rows"]:
        lines.append(
            f"| {row['context']} | {row['cycle_ms']:.3f} | {row['cycle_spread_ms'] / 2:.3f} | "
            f"{row['cycle_ratio']:.2f} | {row['mean_accept_length']:.2f} | "
            f"{row['tokens_per_s']:.1f} | {row['expected_tokens_per_s']:.1f} | "
            f"{row['difference_percent']:+.1f} % |"
        )
    if speculation["chosen"]:
        lines += ["", "shapes chosen in each step:", ""]
        lines += ["| context | τ of steps that drafted | tok/s |", "|---:|---:|---:|"]
    for row in speculation["chosen"]:
        lines.append(
            f"| {row['context']} | {row['mean_accept_length']:.2f} | {row['tokens_per_s']:.1f} |"
        )
    return lines
