"""Times and acceptance of a request, as one line or as tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cpmcu.outputs import RequestOutput
from cpmcu.ui.tables import text_bar
from cpmcu.verification import is_lossy

if TYPE_CHECKING:
    from cpmcu.spec_metrics import SpecDecodeMetrics


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """A table and the line below it."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    closing: str


def summary_line(result: RequestOutput, *, sampled: bool) -> str:
    """Returns length, speed and acceptance; the seed if `sampled`; an early end's finish reason."""
    timings, output = result.timings, result.outputs[0]
    count = len(output.token_ids)
    parts = [f"{count} token{'s' * (count != 1)}"]
    if timings.cached_tokens:
        parts.append(f"{timings.cached_tokens:,} of {timings.prompt_tokens:,} prompt tokens cached")
    if timings.decode_tokens_per_s:
        parts.append(f"{timings.decode_tokens_per_s:.1f} tokens/s")
    parts.append(f"first after {timings.time_to_first_token_s:.3f} s")
    metrics = output.spec_decode_metrics
    if metrics is not None and metrics.num_spec_steps:
        lossy = f" (lossy: {metrics.verify_strategy})" if is_lossy(metrics.verify_strategy) else ""
        parts.append(f"accept length {metrics.mean_acceptance_length:.2f}{lossy}")
    if output.finish_reason != "stop":
        parts.append(f"finish reason {output.finish_reason}")
    if sampled:
        parts.append(f"seed {result.seed}")
    return ", ".join(parts)


def summary_sections(result: RequestOutput) -> list[Section]:
    """Returns a table of lengths, times and speeds, and one of acceptance."""
    timings, output = result.timings, result.outputs[0]
    decoded = max(0, timings.output_tokens - 1)
    rows = [
        ("prefill", timings.computed_tokens, timings.prefill_s, timings.prompt_tokens_per_s),
        ("decode", decoded, timings.decode_s, timings.decode_tokens_per_s),
    ]
    cells = [
        (name, str(tokens), f"{seconds:.3f}", f"{rate:.1f}") for name, tokens, seconds, rate in rows
    ]
    closing = (
        f"{len(output.token_ids)} tokens, finish reason {output.finish_reason}, seed {result.seed}"
    )
    if timings.cached_tokens:
        closing += f", {timings.cached_tokens:,} of {timings.prompt_tokens:,} prompt tokens cached"
    sections = [Section(("", "tokens", "seconds", "tokens/s"), cells, closing)]
    metrics = output.spec_decode_metrics
    if metrics is not None and metrics.num_spec_steps:
        sections.append(_acceptance(metrics))
    return sections


def _acceptance(metrics: SpecDecodeMetrics) -> Section:
    """Returns the histogram of accepted draft tokens per step."""
    steps, counts = metrics.num_spec_steps, metrics.acceptance_histogram
    rows = []
    for accepted, count in enumerate(counts):
        position = f"{metrics.acceptance_per_position[accepted - 1]:.1%}" if accepted else ""
        bar = text_bar(count / max(counts))
        rows.append((str(accepted), str(count), f"{count / steps:.1%}", position, bar))
    closing = (
        f"mean accept length {metrics.mean_acceptance_length:.2f}: "
        f"{metrics.num_accepted_draft_tokens} drafted tokens accepted in {steps} steps of up to "
        f"{metrics.num_spec_tokens}"
    )
    if metrics.num_inner_steps:
        closing += f", inner accept length {metrics.mean_inner_acceptance_length:.2f}"
    if is_lossy(metrics.verify_strategy):
        closing += f", lossy: verify strategy {metrics.verify_strategy}"
    return Section(("accepted", "steps", "share", "or more", ""), rows, closing)
