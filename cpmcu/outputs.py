"""What a request gives back: whole results and the pieces of a stream."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from cpmcu.spec_metrics import SpecDecodeMetrics

FinishReason = Literal["stop", "length", "abort"]


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural, of the model's raw distribution) at one output position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request; `completion_tokens` sums over all choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # of the prompt, found in the prefix cache

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Timings:
    """Where one choice's time went, in seconds on the host's clock."""

    queue_s: float  # from arrival until its prompt started
    prefill_s: float  # from there to the first token
    decode_s: float  # from the first token to the last
    prompt_tokens: int
    output_tokens: int
    decode_steps: int  # engine steps after prefill that gave tokens to this choice
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    grammar_s: float = 0.0  # finding the tokens that its grammar allows, mostly beside the device

    @property
    def time_to_first_token_s(self) -> float:
        """Seconds from arrival to the first token."""
        return self.queue_s + self.prefill_s

    @property
    def computed_tokens(self) -> int:
        """Tokens of the prompt that were not cached."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def prompt_tokens_per_s(self) -> float:
        """Prefill speed, of what was computed; 0 if nothing was measured."""
        return self.computed_tokens / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Speed of the tokens after the first; 0 if there were none."""
        tokens = self.output_tokens - 1
        return tokens / self.decode_s if tokens > 0 and self.decode_s > 0 else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice. `token_ids` includes the token that ended it; `text` stops before it."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None  # the stop token id or stop string that matched; None for eos
    logprobs: list[TokenLogprobs] | None
    timings: Timings
    spec_decode_metrics: SpecDecodeMetrics | None = None  # with a drafter


@dataclasses.dataclass(frozen=True, slots=True)
class RequestOutput:
    """The result for one prompt: `n` choices, and the seed that reproduces them."""

    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    seed: int
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # None at position 0: no context

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.outputs[0].text

    @property
    def timings(self) -> Timings:
        """Timings of the first choice."""
        return self.outputs[0].timings

    @property
    def usage(self) -> Usage:
        """Token counts; the prompt counts once, whatever `n`."""
        completion = sum(len(output.token_ids) for output in self.outputs)
        cached = self.outputs[0].timings.cached_tokens
        return Usage(len(self.prompt_token_ids), completion, cached)


@dataclasses.dataclass(frozen=True, slots=True)
class StreamChunk:
    """What one engine step added to one choice.

    `text` may lag behind `token_ids`: half characters, and what may become a stop string, are
    held back. The pieces of a choice joined are its text.
    """

    index: int  # which choice
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None  # set on the choice's last chunk
    stop_reason: int | str | None = None
    result: RequestOutput | None = None  # on the very last chunk of a stream
