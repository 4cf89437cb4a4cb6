"""Results of requests: whole outputs and the chunks of a stream."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from cpmcu.spec_metrics import SpecDecodeMetrics

FinishReason = Literal["stop", "length", "abort"]


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position.

    Natural logarithms of the model's distribution before penalties, temperature and truncation.
    Results of `LLM` have texts. The text of a special token is its name. A part of a character
    becomes U+FFFD.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first
    text: str = ""  # text of the token token_id
    top_texts: tuple[str, ...] = ()  # texts of the tokens in `top`


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request. `completion_tokens` is the sum over all choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # tokens of the prompt that were found in the prefix cache

    @property
    def total_tokens(self) -> int:
        """Prompt tokens plus completion tokens."""
        return self.prompt_tokens + self.completion_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Timings:
    """Times of one choice in seconds on the host's clock."""

    queue_s: float  # seconds from arrival to the start of prefill
    prefill_s: float  # seconds from the start of prefill to the first token
    decode_s: float  # seconds from the first token to the last
    prompt_tokens: int
    output_tokens: int
    decode_steps: int  # engine steps after prefill that emitted tokens of this choice
    cached_tokens: int = 0  # tokens of the prompt that were found in the prefix cache
    preemptions: int = 0  # times this output gave up its slot because pages ran out
    grammar_s: float = 0.0  # seconds of computing grammar masks; they mostly overlap device work

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
        """Computed prompt tokens per second of prefill; 0 if no time was measured."""
        return self.computed_tokens / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens per second after the first token; 0 if there is at most one token."""
        tokens = self.output_tokens - 1
        return tokens / self.decode_s if tokens > 0 and self.decode_s > 0 else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice of a request.

    `token_ids` includes the token that ended the output; `text` does not include its text.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None  # the matching stop token id or stop string; None for eos
    logprobs: list[TokenLogprobs] | None  # one entry per token; None if not requested
    timings: Timings
    spec_decode_metrics: SpecDecodeMetrics | None = None  # None without a drafter


@dataclasses.dataclass(frozen=True, slots=True)
class RequestOutput:
    """The result of one prompt: `n` choices and the seed that reproduces them."""

    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    seed: int
    # One entry per prompt token, the first is None. None if not requested.
    prompt_logprobs: list[TokenLogprobs | None] | None = None

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
        """Token counts. The prompt counts once for all `n` choices."""
        completion = sum(len(output.token_ids) for output in self.outputs)
        cached = self.outputs[0].timings.cached_tokens
        return Usage(len(self.prompt_token_ids), completion, cached)


@dataclasses.dataclass(frozen=True, slots=True)
class StreamChunk:
    """Tokens and text that one engine step added to one choice.

    `text` may lag behind `token_ids`: an incomplete character and a possible beginning of a stop
    string are held back. The texts of a choice's chunks, joined, are its whole text.
    """

    index: int  # number of the choice
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None  # set only in the last chunk of the choice
    stop_reason: int | str | None = None
    result: RequestOutput | None = None  # set only in the last chunk of the stream
