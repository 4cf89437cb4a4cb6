"""SamplingParams, their defaults from generation_config.json, and their C++ form.

A parameter at None takes its value from the checkpoint's `generation_config.json`. If the file does
not set it, the table `_DEFAULTS` does: generation is greedy (temperature 0). `do_sample: false` in
the file means temperature 0.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cpmcu.checks import as_float32, integer, listed, number, shown, truth
from cpmcu.config import option
from cpmcu.grammar import Grammar

if TYPE_CHECKING:
    from cpmcu import C

SEED_LIMIT = 1 << 64
MAX_LOGPROBS = 20  # as in the extension

# Field -> value if neither the caller nor generation_config.json sets it.
_DEFAULTS: dict[str, Any] = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of one request. Raises ValueError for a value out of range.

    The same `seed` gives the same text, with or without speculation. If `seed` is None, each prompt
    draws a random 64-bit seed and reports it in `RequestOutput.seed`. Choice i of `n` uses random
    stream i of the seed.

    If `max_tokens` is 0, the prompt is scored (`prompt_logprobs`) and no token is generated.
    """

    temperature: float | None = option(
        None,
        "0 takes the most likely token (default: generation_config.json's, else 0)",
        flags=("--temperature", "--temp"),
        brief="0: the likeliest token; above: sample",
    )
    top_p: float | None = option(
        None,
        "sample from the smallest set of likeliest tokens with this total probability, in (0, 1]",
        brief="likeliest tokens, up to this total probability",
    )
    top_k: int | None = option(
        None,
        "sample from this many likeliest tokens; 0: all",
        brief="sample from this many likeliest tokens; 0: all",
    )
    min_p: float | None = option(
        None,
        "drop tokens with less than this share of the likeliest token's probability, in [0, 1]",
    )
    seed: int | None = option(
        None,
        "seed of sampling, 0 to 2^64-1 (default: a random one, shown at the end)",
        flags=("--random-seed", "--seed"),
        brief="the same seed gives the same text",
    )
    max_tokens: int | None = option(
        None,
        "most tokens to generate (default: until the model stops or its context is full)",
        flags=("--num-generate", "--max-tokens", "-n"),
        brief="most tokens to generate",
    )
    min_tokens: int = option(
        0, "fewest tokens to generate: until then neither end-of-sequence nor stop ends the output"
    )
    stop: str | Sequence[str] = option(
        (),
        "text that ends the output and is not part of it; repeatable",
        brief="text that ends the output; repeatable",
    )
    stop_token_ids: Sequence[int] = option((), "token id that ends the output; repeatable")
    ignore_eos: bool = option(False, "go on after the model's end-of-sequence token")
    repetition_penalty: float | None = option(
        None, "above 1: makes tokens that are in the prompt or output less likely"
    )
    presence_penalty: float = option(
        0.0, "number subtracted from the logit of each token that is in the output"
    )
    frequency_penalty: float = option(
        0.0, "number subtracted from a token's logit for each occurrence in the output"
    )
    logit_bias: Mapping[int, float] | None = option(
        None, "token id -> number added to its logit", flags=()
    )
    allowed_token_ids: Sequence[int] | None = option(
        None, "the only tokens that may be drawn (default: all)", flags=()
    )
    bad_words: Sequence[str] = option(
        (),
        "texts that the output must not have, nor behind a space, as the tokenizer splits them",
        flags=(),
    )
    logprobs: int | None = option(
        None,
        "report log-probabilities of the chosen token and of this many likeliest tokens, at most "
        f"{MAX_LOGPROBS}",
    )
    prompt_logprobs: int | None = option(
        None,
        "report log-probabilities of the prompt's tokens, and of this many likeliest tokens",
        flags=(),
    )
    cache_salt: str = option(
        "", "prompts share cached pages only with prompts of the same salt", flags=()
    )
    include_stop_str_in_output: bool = option(
        False, "the text ends with the stop text or token that ended the output", flags=()
    )
    skip_special_tokens: bool = option(True, "leave special tokens out of the text", flags=())
    grammar: Grammar | None = option(  # noqa: RUF009
        None, "grammar that the output must match", flags=()
    )
    n: int = option(1, "number of outputs per prompt", flags=("--num-outputs",), brief="")

    def __post_init__(self) -> None:
        self._normalise()
        _in_range("temperature", self.temperature, 0.0, math.inf)
        _in_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _in_range("top_k", self.top_k, 0, math.inf)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("seed", self.seed, 0, SEED_LIMIT - 1)
        _in_range("max_tokens", self.max_tokens, 0, math.inf)
        _in_range("min_tokens", self.min_tokens, 0, math.inf)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}, but must be at most max_tokens, which is "
                f"{self.max_tokens}"
            )
        _in_range("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(self, name)
            _in_range(name, wanted, 0, math.inf)
            if wanted is not None and wanted > MAX_LOGPROBS:
                raise ValueError(f"{name} is {wanted}, but must be at most {MAX_LOGPROBS}")
        _in_range("n", self.n, 1, math.inf)
        if self.max_tokens == 0 and (self.prompt_logprobs is None or self.n > 1):
            raise ValueError(
                "max_tokens is 0, but must be a finite number at least 1 unless prompt_logprobs is "
                "given and n is 1"
            )
        for text in self.stop_strings:
            if not isinstance(text, str) or not text:
                raise ValueError(
                    f"stop holds {shown(text)}, but must hold texts of at least one letter"
                )
        for i, token in enumerate(self.stop_token_ids):
            _in_range(f"stop_token_ids[{i}]", token, 0, math.inf)
        for i, token in enumerate(self.allowed_token_ids or ()):
            _in_range(f"allowed_token_ids[{i}]", token, 0, math.inf)
        for i, word in enumerate(self.bad_words):
            if not isinstance(word, str) or not word.strip():
                raise ValueError(
                    f"bad_words[{i}] is {shown(word)}, but must be a text that is not blank"
                )
        for token, bias in (self.logit_bias or {}).items():
            _in_range("a logit_bias token id", token, 0, math.inf)
            _in_range(f"the logit_bias of token {token}", bias, -math.inf, math.inf)
        _check_salt(self.cache_salt)
        truth("ignore_eos", self.ignore_eos)
        truth("skip_special_tokens", self.skip_special_tokens)
        truth("include_stop_str_in_output", self.include_stop_str_in_output)
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise ValueError(f"grammar is {shown(self.grammar)}, but must be a cpmcu.Grammar")

    def _normalise(self) -> None:
        """Converts each field to its declared type. Raises ValueError if that is impossible."""
        change = functools.partial(object.__setattr__, self)
        for name in ("top_k", "seed", "max_tokens", "logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                change(name, integer(name, getattr(self, name)))
        change("n", integer("n", self.n))
        change("min_tokens", integer("min_tokens", self.min_tokens))
        number("presence_penalty", self.presence_penalty)
        number("frequency_penalty", self.frequency_penalty)
        if not isinstance(self.stop, str):
            stop = () if self.stop is None else self.stop
            change("stop", tuple(listed("stop", stop, "a text or a list of texts")))
        ids = () if self.stop_token_ids is None else self.stop_token_ids
        ids = listed("stop_token_ids", ids, "a list of token ids")
        named = (integer(f"stop_token_ids[{i}]", token) for i, token in enumerate(ids))
        change("stop_token_ids", tuple(named))
        words = () if self.bad_words is None else self.bad_words
        change("bad_words", tuple(listed("bad_words", words, "a list of texts")))
        if self.allowed_token_ids is not None:
            ids = listed("allowed_token_ids", self.allowed_token_ids, "a list of token ids")
            if not len(ids):
                raise ValueError("allowed_token_ids is [], but must have at least one token id")
            named = (integer(f"allowed_token_ids[{i}]", token) for i, token in enumerate(ids))
            change("allowed_token_ids", tuple(dict.fromkeys(named)))
        if isinstance(self.logit_bias, Mapping):
            biases = {integer("a logit_bias token id", t): b for t, b in self.logit_bias.items()}
            for token, bias in biases.items():
                number(f"the logit_bias of token {token}", bias)
            change("logit_bias", biases)
        elif self.logit_bias is not None:
            raise ValueError(
                f"logit_bias is {shown(self.logit_bias)}, but must map token ids to numbers"
            )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def resolve(self, generation_config: Mapping[str, Any]) -> SamplingParams:
        """A copy with all defaults and a seed filled in.

        A `top_k` below 0 in `generation_config` means all tokens. Raises ValueError if another
        value of `generation_config` is out of range.
        """
        changes: dict[str, Any] = {}
        for name, default in _DEFAULTS.items():
            if getattr(self, name) is None:
                found = generation_config.get(name)
                changes[name] = default if found is None else found
        top_k = changes.get("top_k")
        if isinstance(top_k, (int, float)) and top_k < 0:  # some files have -1 for all tokens
            changes["top_k"] = 0
        if self.temperature is None and generation_config.get("do_sample") is False:
            changes["temperature"] = 0.0
        elif self.temperature is None and generation_config.get("do_sample"):
            found = generation_config.get("temperature")
            changes["temperature"] = 1.0 if found is None else found
        if self.seed is None:
            changes["seed"] = secrets.randbits(64)
        return dataclasses.replace(self, **changes)


def to_engine(
    params: SamplingParams,
    stream: int,
    vocab_size: int,
    *,
    stop_ids: Sequence[int] = (),
    banned_ids: Sequence[int] = (),
    max_tokens: int = 1 << 30,
) -> C.SamplingConfig:
    """Resolved parameters as the extension's type, for choice number `stream` of a request.

    The device ends the sequence after a token of `stop_ids` or after `max_tokens` tokens. Tokens
    of `banned_ids` are not drawn. Raises ValueError if a token id of `logit_bias` or
    `allowed_token_ids` lies outside the vocabulary.
    """
    from cpmcu import C

    for name in ("logit_bias", "allowed_token_ids"):
        for token in getattr(params, name) or ():
            if token >= vocab_size:
                raise ValueError(
                    f"{name} names token {token}, but the vocabulary has {vocab_size} tokens"
                )
    bias = dict(params.logit_bias or {}) | dict.fromkeys(banned_ids, -math.inf)
    if params.allowed_token_ids is not None:
        kept = {token: bias.get(token, 0.0) for token in params.allowed_token_ids}
        bias = dict.fromkeys(range(vocab_size), -math.inf) | kept
    return C.SamplingConfig(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=min(params.top_k or 0, vocab_size),
        min_p=params.min_p,
        seed=params.seed,
        stream=stream,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=list(bias.items()),
        logprobs=-1 if params.logprobs is None else params.logprobs,
        stop_ids=list(dict.fromkeys(token for token in stop_ids if token < vocab_size)),
        max_tokens=max_tokens,
    )


def _check_salt(value: str) -> None:
    """Raises ValueError for a `cache_salt` that no key can be made of."""
    if not isinstance(value, str):
        raise ValueError(f"cache_salt is {shown(value)}, but must be a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("cache_salt holds half a surrogate pair, but must be Unicode") from None


def _in_range(
    name: str, value: float | None, low: float, high: float, *, open_low: bool = False
) -> None:
    if value is None:
        return
    number(name, value)

    def inside(found: float) -> bool:
        return (low < found if open_low else low <= found) and found <= high

    # The engine stores numbers as float32, except integers.
    rounded = value if isinstance(low, int) else as_float32(value)
    if not inside(value) or not inside(rounded) or abs(rounded) == math.inf:
        bracket = "(" if open_low else "["
        if low == -math.inf:
            wanted = "of 32 bits"
        elif high == math.inf:
            wanted = f"{'above' if open_low else 'at least'} {low}"
        else:
            wanted = f"in {bracket}{low}, {high}]"
        raise ValueError(f"{name} is {shown(value)}, but must be a finite number {wanted}")
