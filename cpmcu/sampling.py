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

from cpmcu.checks import (
    FieldError,
    as_float32,
    integer,
    listed,
    number,
    of_field,
    shown,
    truth,
)
from cpmcu.config import option
from cpmcu.grammar import Grammar

if TYPE_CHECKING:
    from cpmcu import C

SEED_LIMIT = 1 << 64
MAX_LOGPROBS = 20  # equal to kMaxLogprobs of the extension
MAX_PATTERNS = 8
MAX_PATTERN_LENGTH = 1024

# Field -> value if neither the caller nor generation_config.json sets it.
_DEFAULTS: dict[str, Any] = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingLimit:
    """A limit on the reasoning between two tags. Raises ValueError for a value out of range.

    After `tokens` tokens of reasoning the output goes on with the tag `end`. `begun`: the prompt
    ends within the reasoning. Otherwise only an output that begins with the tag `begin` has
    reasoning.
    """

    tokens: int
    begin: str = "<think>"
    end: str = "</think>"
    begun: bool = False

    def __post_init__(self) -> None:
        _in_range("tokens", integer("tokens", self.tokens), 0, math.inf)
        truth("begun", self.begun)
        for name in ("begin", "end"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ValueError(f"{name} is {shown(getattr(self, name))}, but must be a text")


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
        "sample from this many likeliest tokens; 0 or -1: all",
        brief="sample from this many likeliest tokens; 0: all",
    )
    min_p: float | None = option(
        None,
        "drop tokens with less than this share of the likeliest token's probability, in [0, 1]",
    )
    seed: int | None = option(
        None,
        "seed of sampling, -2^63 to 2^64-1 (default, or -1: a random one, shown at the end)",
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
    stop_regex: str | Sequence[str] = option(
        (),
        "patterns (Rust's syntax): the output ends with the first match of one; a final $ is the "
        "end of a token",
        flags=(),
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
    logprob_token_ids: Sequence[int] | None = option(
        None,
        f"tokens, at most {MAX_LOGPROBS}, whose log-probabilities are reported in place of those "
        "of the likeliest",
        flags=(),
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
    thinking: ThinkingLimit | None = option(  # noqa: RUF009
        None, "limit on the tokens of reasoning (default: none)", flags=()
    )
    skip_special_tokens: bool = option(True, "leave special tokens out of the text", flags=())
    grammar: Grammar | None = option(  # noqa: RUF009
        None, "grammar that the output must match", flags=()
    )
    n: int = option(1, "number of outputs per prompt", flags=("--num-outputs",), brief="")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            with of_field(field.name):
                self._normalise(field.name)
                self._check(field.name)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise FieldError(
                f"min_tokens is {self.min_tokens}, but must be at most max_tokens, which is "
                f"{self.max_tokens}",
                field="min_tokens",
            )
        if self.max_tokens == 0 and (self.prompt_logprobs is None or self.n > 1):
            raise FieldError(
                "max_tokens is 0, but must be a finite number at least 1 unless prompt_logprobs is "
                "given and n is 1",
                field="max_tokens",
            )

    def _normalise(self, name: str) -> None:
        """Converts a field to its declared type. Raises ValueError if that is impossible."""
        change = functools.partial(object.__setattr__, self, name)
        value = getattr(self, name)
        if name in ("n", "min_tokens"):
            change(integer(name, value))
        elif name in ("top_k", "seed", "max_tokens", "logprobs", "prompt_logprobs"):
            change(None if value is None else integer(name, value))
            if name == "top_k" and self.top_k == -1:  # vLLM's value for all tokens
                change(0)
            if name == "seed" and value is not None and -(SEED_LIMIT >> 1) <= value < 0:
                change(None if value == -1 else value + SEED_LIMIT)
        elif name in ("presence_penalty", "frequency_penalty"):
            number(name, value)
        elif name in ("stop", "stop_regex"):
            texts = [value] if isinstance(value, str) else listed(name, value or (), _TEXTS)
            kept = tuple(text for text in texts if text != "")  # clients send "" for no stop text
            change(value if isinstance(value, str) and value else kept)
        elif name == "bad_words":
            change(tuple(listed(name, () if value is None else value, "a list of texts")))
        elif name == "stop_token_ids":
            change(_token_ids(name, () if value is None else value))
        elif name in ("allowed_token_ids", "logprob_token_ids") and value is not None:
            change(tuple(dict.fromkeys(_token_ids(name, value))))
        elif name == "logit_bias" and value is not None:
            change(_biases(value))

    def _check(self, name: str) -> None:
        """Raises ValueError for a value out of range."""
        value = getattr(self, name)
        if name in _RANGES:
            low, high, open_low = _RANGES[name]
            _in_range(name, value, low, high, open_low=open_low)
        if name in ("logprobs", "prompt_logprobs") and (value or 0) > MAX_LOGPROBS:
            raise ValueError(f"{name} is {value}, but must be at most {MAX_LOGPROBS}")
        if name == "stop":
            for text in self.stop_strings:
                if not isinstance(text, str):
                    raise ValueError(f"stop holds {shown(text)}, but must hold texts")
        elif name == "stop_regex":
            _check_patterns(self.stop_patterns)
        elif name == "allowed_token_ids" and value == ():
            raise ValueError("allowed_token_ids is [], but must have at least one token id")
        elif name == "logprob_token_ids" and len(value or ()) > MAX_LOGPROBS:
            raise ValueError(
                f"logprob_token_ids has {len(value)} tokens, but must have at most {MAX_LOGPROBS}"
            )
        elif name == "bad_words":
            for i, word in enumerate(value):
                if not isinstance(word, str) or not word.strip():
                    raise ValueError(
                        f"bad_words[{i}] is {shown(word)}, but must be a text that is not blank"
                    )
        elif name == "cache_salt":
            _check_salt(value)
        elif name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            truth(name, value)
        elif name == "thinking" and value is not None and not isinstance(value, ThinkingLimit):
            raise ValueError(f"thinking is {shown(value)}, but must be a ThinkingLimit")
        elif name == "grammar" and value is not None and not isinstance(value, Grammar):
            raise ValueError(f"grammar is {shown(value)}, but must be a cpmcu.Grammar")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def stop_patterns(self) -> tuple[str, ...]:
        """`stop_regex` as a tuple."""
        found = self.stop_regex
        return (found,) if isinstance(found, str) else tuple(found)

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
        if isinstance(top_k, (int, float)) and top_k < 0:  # in some files -1 means all tokens
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
    of `banned_ids` are not drawn. Raises ValueError if a token id of the parameters
    lies outside the vocabulary.
    """
    from cpmcu import C

    for name in ("logit_bias", "allowed_token_ids", "logprob_token_ids"):
        for token in getattr(params, name) or ():
            if token >= vocab_size:
                raise FieldError(
                    f"{name} names token {token}, but the vocabulary has {vocab_size} tokens",
                    field=name,
                )
    named = list(params.logprob_token_ids or ())
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
        logprobs=len(named) or (-1 if params.logprobs is None else params.logprobs),
        logprob_ids=named,
        stop_ids=list(dict.fromkeys(token for token in stop_ids if token < vocab_size)),
        max_tokens=max_tokens,
    )


# Field -> lowest value, highest, and whether the lowest is excluded.
_RANGES: dict[str, tuple[float, float, bool]] = {
    "temperature": (0.0, math.inf, False),
    "top_p": (0.0, 1.0, True),
    "top_k": (0, math.inf, False),
    "min_p": (0.0, 1.0, False),
    "seed": (0, SEED_LIMIT - 1, False),
    "max_tokens": (0, math.inf, False),
    "min_tokens": (0, math.inf, False),
    "repetition_penalty": (0.0, math.inf, True),
    "presence_penalty": (-2.0, 2.0, False),
    "frequency_penalty": (-2.0, 2.0, False),
    "logprobs": (0, math.inf, False),
    "prompt_logprobs": (0, math.inf, False),
    "n": (1, math.inf, False),
}
_TEXTS = "a text or a list of texts"


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    """The ids of a list. Raises ValueError."""
    ids = []
    for i, token in enumerate(listed(name, value, "a list of token ids")):
        ids.append(integer(f"{name}[{i}]", token))
        _in_range(f"{name}[{i}]", ids[-1], 0, math.inf)
    return tuple(ids)


def _biases(value: Any) -> dict[int, float]:
    """Returns the bias of each token id. Raises ValueError."""
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias is {shown(value)}, but must map token ids to numbers")
    biases = {integer("a logit_bias token id", token): bias for token, bias in value.items()}
    for token, bias in biases.items():
        _in_range("a logit_bias token id", token, 0, math.inf)
        number(f"the logit_bias of token {token}", bias)
        _in_range(f"the logit_bias of token {token}", bias, -math.inf, math.inf)
    return biases


def _check_patterns(patterns: Sequence[str]) -> None:
    """Raises ValueError for patterns of `stop_regex` that are no texts, too many or too long."""
    if len(patterns) > MAX_PATTERNS:
        raise ValueError(
            f"stop_regex has {len(patterns)} patterns, but must have at most {MAX_PATTERNS}"
        )
    for pattern in patterns:
        if not isinstance(pattern, str) or any("\ud800" <= each <= "\udfff" for each in pattern):
            raise ValueError(f"stop_regex holds {shown(pattern)}, but must hold Unicode texts")
        if len(pattern) > MAX_PATTERN_LENGTH:
            raise ValueError(
                f"stop_regex holds a pattern of {len(pattern)} characters, but must hold patterns "
                f"of at most {MAX_PATTERN_LENGTH}"
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
