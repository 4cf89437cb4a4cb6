"""Splits the text of a choice into reasoning, content and tool calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from cpmcu.outputs import CompletionOutput, Timings
from cpmcu.serving.reasoning_parsers.base import ReasoningParser
from cpmcu.serving.tool_parsers.base import ToolParser
from cpmcu.serving.tool_parsers.calls import CallDelta, ToolCall
from cpmcu.spec_metrics import SpecDecodeMetrics


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """The reasoning, content and calls that one piece of text adds to an answer.

    `deltas` has the parts of calls as they come, `calls` the calls that this piece completes. A
    stream passes on `deltas`, a whole response `calls`.
    """

    reasoning: str
    content: str
    calls: Sequence[ToolCall] = ()
    deltas: Sequence[CallDelta] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls or self.deltas)


class AnswerParser:
    """Splits the text of one choice, which arrives in pieces of any size.

    Some models call a tool without ending their reasoning. If an answer ends within its reasoning,
    right after a call, the call counts too. This needs a notation whose calls have a first tag.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        calls: ToolParser | None,
        *,
        only_one_call: bool = False,
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._only_one = only_one_call
        self._num_complete = 0
        self._thoughts: list[str] = []

    def push(self, text: str, *, final: bool = False) -> Part:
        """Returns the part that `text` adds. If `final`, the text held back is returned too."""
        thought, content = "", text
        if self._reasoning is not None:
            thought, content = self._reasoning.push(text, final=final)
        if self._calls is None:
            return Part(thought, content)
        self._thoughts.append(thought)
        inside = self._reasoning is not None and self._reasoning.inside
        if final and inside and self._calls.first_tag:
            found = self._calls.push("".join(self._thoughts), final=True)
            if not self._calls.ends_with_call:
                self._calls = None
                return Part(thought, "")
            found = dataclasses.replace(found, content="")
        else:
            found = self._calls.push(content, final=final)
        calls, deltas = found.calls, found.deltas
        if self._only_one:
            calls = calls[: max(0, 1 - self._num_complete)]
            deltas = [delta for delta in deltas if delta.index == 0]
        self._num_complete += len(calls)
        return Part(thought, found.content, calls, deltas)

    @property
    def may_think(self) -> bool:
        """True if the answer may have reasoning."""
        return self._reasoning is not None

    @property
    def has_calls(self) -> bool:
        """True if a tool call was parsed."""
        return self._calls is not None and self._calls.num_calls > 0


def metrics_of(outputs: Sequence[CompletionOutput]) -> dict[str, Any]:
    """`metrics` of a response: acceptance of all choices, timings of the first choice."""
    timings = outputs[0].timings
    found: dict[str, Any] = _latencies(timings) | {"timings": timings_of(timings)}
    specs = [output.spec_decode_metrics for output in outputs]
    counted = [spec for spec in specs if spec is not None]
    if counted:
        spec = _sum(counted)
        found["speculative_decoding"] = spec.to_dict()
        found["speculate_metrics"] = spec.to_fastdeploy()
        found["timings"]["draft_n"] = spec.num_draft_tokens
        found["timings"]["draft_n_accepted"] = spec.num_accepted_draft_tokens
    return found


def timings_of(timings: Timings) -> dict[str, Any]:
    """Times of a choice with llama.cpp's names."""
    return {
        "queue_ms": 1e3 * timings.queue_s,
        "cache_n": timings.cached_tokens,
        "prompt_n": timings.computed_tokens,
        "prompt_ms": 1e3 * timings.prefill_s,
        "prompt_per_token_ms": 1e3 * timings.prefill_s / max(1, timings.computed_tokens),
        "prompt_per_second": timings.prompt_tokens_per_s,
        "predicted_n": timings.output_tokens,
        "predicted_ms": 1e3 * timings.decode_s,
        "predicted_per_token_ms": 1e3 * timings.decode_s / max(1, timings.output_tokens - 1),
        "predicted_per_second": timings.decode_tokens_per_s,
    }


def _latencies(timings: Timings) -> dict[str, float]:
    """Times of a choice with vLLM's names. Only `queue_time_ms` includes time in the queue.

    `mean_itl_ms` is present only if there was a second token.
    """
    later = timings.output_tokens - 1
    total = timings.prefill_s + timings.decode_s
    found = {
        "time_to_first_token_ms": 1e3 * timings.prefill_s,
        "generation_time_ms": 1e3 * timings.decode_s,
        "queue_time_ms": 1e3 * timings.queue_s,
        "tokens_per_second": timings.output_tokens / total if total > 0 else 0.0,
    }
    return found | ({"mean_itl_ms": 1e3 * timings.decode_s / later} if later > 0 else {})


def _sum(specs: Sequence[SpecDecodeMetrics]) -> SpecDecodeMetrics:
    histogram = tuple(map(sum, zip(*(spec.acceptance_histogram for spec in specs))))
    steps = specs[0].per_step_accepted if len(specs) == 1 else None
    drafted = sum(spec.num_draft_tokens for spec in specs)
    return dataclasses.replace(
        specs[0],
        acceptance_histogram=histogram,
        per_step_accepted=steps,
        drafted=drafted,
        num_inner_steps=sum(spec.num_inner_steps for spec in specs),
        num_inner_tokens=sum(spec.num_inner_tokens for spec in specs),
    )
