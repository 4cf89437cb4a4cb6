"""Compares speculative steps with plain steps and with whole requests.

The JSON keys say `cycle` for a speculative step, so that older results can be compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cpmcu.benchmarks.decoding import WINDOWS, Row, measure, random_prompt
from cpmcu.benchmarks.progress import BenchProgress
from cpmcu.config import EngineConfig, SpeculativeConfig
from cpmcu.loading.hub import resolve_model
from cpmcu.shipped import shipped_model

if TYPE_CHECKING:
    from cpmcu import C
    from cpmcu.llm import LLM

CURVE = range(1, 7)  # mean accept lengths for which tokens/s is reported


@dataclasses.dataclass(frozen=True, slots=True)
class SpeculativeRow:
    """Speculative decoding at one context length, with a fixed tree shape."""

    context: int
    cycle_ms: float  # time of one speculative step
    cycle_spread_ms: float  # slowest minus fastest window of timed steps
    cycle_ratio: float  # time of a speculative step / time of a plain step
    mean_accept_length: float  # tokens that a step of the request emits, the target's own included
    tokens_per_s: float  # rate of the request, after its first token
    expected_tokens_per_s: float  # mean accept length / time of a step
    difference_percent: float  # (tokens_per_s - expected_tokens_per_s) / expected_tokens_per_s
    # Accept length -> tokens a second: accept length / time of a step.
    tokens_per_s_at_accept_length: dict[int, float]


@dataclasses.dataclass(frozen=True, slots=True)
class ChosenRow:
    """One greedy request at one context length; each step chooses its tree's shape."""

    context: int
    mean_accept_length: float  # over the steps that drafted; 0 if no step drafted
    tokens_per_s: float  # rate of the request, after its first token


def stream(llm: LLM, context: int, num_tokens: int) -> tuple[float, float]:
    """Streams a greedy request of up to `num_tokens` tokens, as far as the context allows.

    Returns (mean accept length, tokens/s). The length is 0 if no step drafted.
    """
    from cpmcu.sampling import SamplingParams

    num_tokens = min(num_tokens, llm.max_length - context)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    prompt = random_prompt(int(llm.spec.vocab_size), context)
    result = [chunk.result for chunk in llm.stream(prompt, params)][-1]
    assert result is not None  # the last chunk holds the result
    output = result.outputs[0]
    metrics = output.spec_decode_metrics
    accepted = metrics.mean_acceptance_length if metrics else 1.0
    return accepted, output.timings.decode_tokens_per_s


def speculative_row(llm: LLM, plain: Row, steps: int, progress: BenchProgress) -> SpeculativeRow:
    """Measures speculative steps alone, then one whole greedy request."""
    vocab_size, context = int(llm.spec.vocab_size), plain.context
    timing = llm.call_engine(lambda engine: measure(engine, vocab_size, context, steps, progress))
    stream(llm, context, 16)  # warm-up of the host side
    accepted, measured = stream(llm, context, 1 + WINDOWS * steps)
    expected = accepted / timing.step_ms * 1e3
    return SpeculativeRow(
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
    """Measures the second of two requests. In the first, the engine times each shape."""
    stream(llm, context, 1 + WINDOWS * steps)
    return ChosenRow(context, *stream(llm, context, 1 + WINDOWS * steps))


def has_draft(config: EngineConfig) -> bool:
    """Does the configuration have a drafter?"""
    speculation = config.speculation
    if speculation.no_speculation:
        return False
    named = speculation.draft_model_path is not None or speculation.method != "auto"
    if named or any(speculation.drafters_by_option().values()):
        return True
    target = shipped_model() if config.model is None else resolve_model(config.model)
    from cpmcu.drafters.finding import drafts_by_default  # imports numpy: not for --help

    return drafts_by_default(target)


def run_speculation(
    config: EngineConfig, rows: list[Row], steps: int, progress: BenchProgress
) -> dict[str, Any]:
    """Measures speculative decoding. Returns the "speculation" object of the result."""
    from cpmcu.llm import LLM

    def load(speculation: SpeculativeConfig) -> LLM:
        drafted = dataclasses.replace(config, speculative_config=speculation)
        return LLM(progress=progress.loading(), **dataclasses.asdict(drafted))

    whole, chosen = config.speculation, []
    if whole.chooses_shapes:
        with load(whole) as llm:
            progress.note("speculation whose steps choose their shapes: two requests a context")
            chosen = [chosen_row(llm, row.context, steps) for row in rows]
            draft = llm.draft_spec
        assert draft is not None  # has_draft is true
        # The timed steps all have the largest shape.
        whole = whole.but(
            spec_auto=False,
            spec_num_iter=draft.depth,
            spec_topk_per_iter=_width(draft),
            spec_tree_size=draft.tree_size,
        )
    with load(whole) as llm:
        progress.note("speculation with a fixed shape")
        fixed = [speculative_row(llm, row, steps, progress) for row in rows]
        assert llm.draft_spec is not None
        depth, rounded = llm.draft_spec.depth, _rounded(llm.draft_spec)
        counters = llm.call_engine(lambda engine: engine.counters)
    given = dataclasses.asdict(whole)
    given |= given.pop("options")
    usual = dataclasses.asdict(SpeculativeConfig(spec_auto=False))
    return {
        "depth": depth,
        "rounded": rounded,
        "options": {name: value for name, value in given.items() if value != usual.get(name)},
        "rows": [dataclasses.asdict(row) for row in fixed],
        "chosen": [dataclasses.asdict(row) for row in chosen],
        "counters": counters,
    }


def _rounded(draft: C.DrafterSpec) -> dict[str, str]:
    """The parts of a draft that were rounded when it was loaded -> format; {}: none.

    draft_quant and draft_head_quant choose, and their default depends on the model.
    """
    found = {}
    for spec in (draft, *draft.parts):
        if spec.model is None:
            continue
        head = spec.scope + "lm_head"
        methods = {"layers": spec.model.linear_method, **spec.model.linear_overrides}
        for name in ("layers", head):
            if methods.get(name, "").endswith("_rtn"):
                part = name.removeprefix(spec.scope)
                found[f"{spec.method} {part}" if draft.parts else part] = methods[name]
    return found


def rounding(speculation: Mapping[str, Any]) -> str:
    """How the draft was rounded, for a reader."""
    parts = [f"{part} rounded to {name}" for part, name in speculation["rounded"].items()]
    return ", ".join(parts) or "not rounded"


def _width(draft: C.DrafterSpec) -> int | None:
    """Nodes of a level of the drafted trees; None: the drafts are chains."""
    widths = [spec.options.get("topk") for spec in (draft, *draft.parts)]
    return next((width for width in widths if isinstance(width, int)), None)


def speculation_table(speculation: dict[str, Any]) -> list[str]:
    """Markdown lines. T: time of a speculative step; τ: mean accept length."""
    given = ", ".join(f"{name} {value}" for name, value in speculation["options"].items())
    lines = [
        "",
        f"speculation, depth {speculation['depth']}, {rounding(speculation)}: {given}",
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
