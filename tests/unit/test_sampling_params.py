"""SamplingParams: validation, defaults, conversion to the extension's type."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

import cpmcu
from cpmcu.sampling import MAX_LOGPROBS, SamplingParams, to_engine
from tests.missing import missing


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1, but must be a finite number at least 0.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": "hot"}, "temperature is 'hot', but must be a number"),
        ({"top_p": 0.0}, r"top_p is 0.0, but must be a finite number in \(0.0, 1.0\]"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_k": -2}, "top_k is -2"),
        ({"min_p": 2}, r"min_p is 2, but must be a finite number in \[0.0, 1.0\]"),
        ({"seed": -(1 << 63) - 1}, "seed is -9223372036854775809"),
        ({"seed": 1 << 64}, "seed is 18446744073709551616"),
        ({"max_tokens": 0}, "max_tokens is 0, but must be a finite number at least 1"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0, but must be a finite number above"),
        ({"presence_penalty": 3}, "presence_penalty is 3"),
        ({"frequency_penalty": -3}, "frequency_penalty is -3"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"logprobs": 21}, "logprobs is 21, but must be at most 20"),
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21, but must be at most 20"),
        ({"n": 0}, "n is 0"),
        ({"stop_token_ids": [3, -1]}, r"stop_token_ids\[1\] is -1, but must be a finite number at"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias of token 5 is nan"),
        ({"logit_bias": {5: 1e40}}, r"5 is 1e\+40, but must be a finite number of 32 bits$"),
        ({"stop": 5}, "stop is 5, but must be a text or a list of texts"),
        ({"stop": [5]}, "stop holds 5, but must hold texts"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5, but must be a list of token ids"),
        ({"stop_token_ids": [1.5]}, r"stop_token_ids\[0\] is 1.5, but must be an integer"),
        ({"max_tokens": 2.5}, "max_tokens is 2.5, but must be an integer"),
        ({"max_tokens": True}, "max_tokens is True, but must be an integer"),
        ({"top_k": 1.5}, "top_k is 1.5, but must be an integer"),
        ({"seed": 1.5}, "seed is 1.5, but must be an integer"),
        ({"logprobs": 1.5}, "logprobs is 1.5, but must be an integer"),
        ({"prompt_logprobs": 1.5}, "prompt_logprobs is 1.5, but must be an integer"),
        ({"n": 1.5}, "n is 1.5, but must be an integer"),
        ({"n": None}, "n is None, but must be an integer"),
        ({"presence_penalty": None}, "presence_penalty is None, but must be a number"),
        ({"frequency_penalty": None}, "frequency_penalty is None, but must be a number"),
        ({"logit_bias": {1.5: 1}}, "a logit_bias token id is 1.5, but must be an integer"),
        ({"logit_bias": {1: None}}, "the logit_bias of token 1 is None, but must be a number"),
        ({"logit_bias": [1]}, r"logit_bias is \[1\], but must map token ids to numbers"),
        ({"cache_salt": 5}, "cache_salt is 5, but must be a text"),
        ({"cache_salt": "\ud800"}, "cache_salt holds half a surrogate pair"),
        ({"ignore_eos": "no"}, "ignore_eos is 'no', but must be True or False"),
        ({"skip_special_tokens": 0}, "skip_special_tokens is 0, but must be True or False"),
        ({"temperature": 10**400}, r"temperature is 10{60}\.\.\., but must be a finite number"),
        ({"temperature": 10**5000}, "temperature is a number of thousands of digits, but must be"),
        ({"temperature": 10**40}, "temperature is 10{40}, but must be a finite number at least"),
        ({"top_p": 1e-46}, "top_p is 1e-46, but must be a finite number in"),  # 0 as a float32
        ({"repetition_penalty": 1e-46}, "repetition_penalty is 1e-46, but must be a finite number"),
    ],
)
def test_one_clear_sentence(fields, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)


def test_stop_is_a_text_or_a_list():
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()


def test_none_means_no_stop():
    params = SamplingParams(stop=None, stop_token_ids=None)
    assert (params.stop_strings, params.stop_token_ids) == ((), ())
    assert params == SamplingParams()


def test_integer_types_become_int():
    params = SamplingParams(
        max_tokens=np.int64(3), stop_token_ids=np.array([4, 5]), logit_bias={np.int64(6): 1.0}
    )
    assert params == SamplingParams(max_tokens=3, stop_token_ids=(4, 5), logit_bias={6: 1.0})
    assert [type(token) for token in (*params.stop_token_ids, *params.logit_bias)] == [int] * 3


def resolved(config: dict, **fields) -> SamplingParams:
    return SamplingParams(**fields).resolve(config)


def test_defaults_come_from_generation_config():
    plain = resolved({})
    assert (plain.temperature, plain.top_p, plain.top_k, plain.min_p) == (0.0, 1.0, 0, 0.0)
    assert plain.repetition_penalty == 1.0
    config = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.05}
    found = resolved(config, top_p=0.5)
    assert (found.temperature, found.top_p, found.repetition_penalty) == (0.7, 0.5, 1.05)
    assert resolved({"do_sample": False, "temperature": 0.7}).temperature == 0.0
    assert [resolved({"top_k": k}).top_k for k in (-1, 0, 20, None)] == [0, 0, 20, 0]
    assert resolved({"top_k": -1}, top_k=5).top_k == 5
    assert resolved({"temperature": 0.7}).temperature == 0.7
    assert resolved({"do_sample": True}).temperature == 1.0
    assert resolved({"do_sample": True, "temperature": None}).temperature == 1.0
    assert resolved(config, temperature=0.0).temperature == 0.0
    with pytest.raises(ValueError, match="temperature is -1"):
        resolved({"temperature": -1})


def test_a_seed_is_drawn_if_none_is_given():
    seeds = {resolved({}).seed for _ in range(8)}
    assert len(seeds) == 8
    assert all(0 <= seed < 1 << 64 for seed in seeds)
    assert resolved({}, seed=5).seed == 5


def test_engine_form(monkeypatch):
    extension = SimpleNamespace(SamplingConfig=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "cpmcu.C", extension)
    monkeypatch.setitem(vars(cpmcu), "C", extension)
    params = resolved({}, top_k=1000, logit_bias={3: -1.5}, seed=7)
    config = to_engine(params, stream=2, vocab_size=100)
    assert (config.top_k, config.logit_bias, config.seed, config.stream) == (100, [(3, -1.5)], 7, 2)
    assert config.logprobs == -1
    with pytest.raises(ValueError, match="token 100, but the vocabulary has 100"):
        to_engine(resolved({}, logit_bias={100: 1.0}), 0, 100)


def test_the_limit_of_logprobs_equals_the_extensions():
    try:
        from cpmcu import C
    except ImportError:
        missing("the extension is missing")
    assert C.MAX_LOGPROBS == MAX_LOGPROBS
