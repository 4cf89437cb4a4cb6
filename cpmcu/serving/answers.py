"""Splits the text of a choice into reasoning, content and tool calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from cpmcu.outputs import CompletionOutput
from cpmcu.serving import strict_json
from cpmcu.serving.reasoning import ReasoningSplitter
from cpmcu.serving.tools import ToolCall
from cpmcu.spec_metrics import SpecDecodeMetrics


class CallParser(Protocol):
    """Extracts tool calls from a stream of text."""

    num_calls: int

    def push(self, text: str, *, final: bool = False) -> tuple[str, list[ToolCall]]:
        """Parses the next piece of text; returns the (content, calls) that it completes."""


class ForcedCalls:
    """Parses text that a grammar constrained to tool calls.

    The text is the arguments of `function`, or, if `function` is None, a JSON list of calls.
    """

    def __init__(self, function: str | None) -> None:
        self._function = function
        self._pieces: list[str] = []
        self.num_calls = 0

    def push(self, text: str, *, final: bool = False) -> tuple[str, list[ToolCall]]:
        """Returns the calls once the text is complete. Text cut off within a call is content."""
        self._pieces.append(text)
        if not final:
            return "", []
        whole = "".join(self._pieces)
        if not whole:  # the answer was cut off within its reasoning
            return "", []
        if self._function is not None:
            calls = [ToolCall(self._function, whole)]
        else:
            try:
                calls = [
                    ToolCall(call["name"], strict_json.write(call["parameters"]))
                    for call in strict_json.read(whole)
                ]
            except (ValueError, TypeError, KeyError):
                return whole, []
        self.num_calls = len(calls)
        return "", calls


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """The reasoning, content and calls that one piece of text adds to an answer."""

    reasoning: str
    content: str
    calls: Sequence[ToolCall]

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class AnswerParser:
    """Splits the text of one choice, which arrives in pieces of any size."""

    def __init__(
        self,
        splitter: ReasoningSplitter | None,
        calls: CallParser | None,
        *,
        only_one_call: bool = False,
    ) -> None:
        self._splitter = splitter
        self._calls = calls
        self._only_one = only_one_call

    def push(self, text: str, *, final: bool = False) -> Part:
        """Returns the part that `text` adds. If `final`, the text held back is returned too."""
        thought, content = "", text
        if self._splitter is not None:
            thought, content = self._splitter.push(text, final=final)
        if self._calls is None:
            return Part(thought, content, ())
        before = self._calls.num_calls
        content, calls = self._calls.push(content, final=final)
        if self._only_one:
            calls = calls[: max(0, 1 - before)]
        return Part(thought, content, calls)

    @property
    def has_calls(self) -> bool:
        """True if a tool call was parsed."""
        return self._calls is not None and self._calls.num_calls > 0


def metrics_of(outputs: Sequence[CompletionOutput]) -> dict[str, Any]:
    """`metrics` of a response: acceptance of all choices, timings of the first choice."""
    timings = outputs[0].timings
    found: dict[str, Any] = {
        # Names of llama.cpp.
        "timings": {
            "queue_ms": 1e3 * timings.queue_s,
            "cache_n": timings.cached_tokens,
            "prompt_n": timings.computed_tokens,
            "prompt_ms": 1e3 * timings.prefill_s,
            "prompt_per_second": timings.prompt_tokens_per_s,
            "predicted_n": timings.output_tokens,
            "predicted_ms": 1e3 * timings.decode_s,
            "predicted_per_second": timings.decode_tokens_per_s,
        }
    }
    specs = [output.spec_decode_metrics for output in outputs]
    counted = [spec for spec in specs if spec is not None]
    if counted:
        spec = _sum(counted)
        found["speculative_decoding"] = spec.to_dict()
        found["speculate_metrics"] = spec.to_fastdeploy()
        found["timings"]["draft_n"] = spec.num_draft_tokens
        found["timings"]["draft_n_accepted"] = spec.num_accepted_draft_tokens
    return found


def _sum(specs: Sequence[SpecDecodeMetrics]) -> SpecDecodeMetrics:
    histogram = tuple(map(sum, zip(*(spec.acceptance_histogram for spec in specs))))
    steps = specs[0].per_step_accepted if len(specs) == 1 else None
    drafted = sum(spec.num_draft_tokens for spec in specs)
    return SpecDecodeMetrics(specs[0].num_spec_tokens, histogram, steps, drafted)
