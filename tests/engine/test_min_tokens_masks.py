"""min_tokens through LLM: no output ends earlier, and no drafter changes a token."""

from __future__ import annotations

from typing import Any

import pytest

from cpmcu import Grammar, SamplingParams
from tests.engine.harness import DEVICES
from tests.engine.test_structured_output import DRAFTS, PROMPTS, SAMPLINGS, load, shown

pytestmark = pytest.mark.slow

EOS = 2
# Without min_tokens the model would usually draw the end token first.
EAGER = {"logit_bias": {EOS: 20.0}, "max_tokens": 40, "ignore_eos": False}
CASES = [
    (PROMPTS[i % 3], SamplingParams(**{**fields, **EAGER, **more}))
    for i, fields in enumerate(SAMPLINGS.values())
    for more in (
        {"min_tokens": 1},
        {"min_tokens": 13},
        {"min_tokens": 40},
        {"min_tokens": 17, "grammar": Grammar.regex("[a-z ]+")},
        {"min_tokens": 17, "grammar": Grammar.choice(["yes", "no"])},
        {"min_tokens": 11, "stop_token_ids": [203, 282], "stop": ["e"]},
        {"max_tokens": 20, "logit_bias": None},  # steps of this one are launched ahead
    )
]


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def expected(device: str) -> list[Any]:
    """The output of each case when it runs alone, without speculation."""
    with load(device, {"no_speculation": True}) as llm:
        return [shown(llm.generate(prompt, params)) for prompt, params in CASES]


def test_no_end_before_min_tokens(expected: list[Any]) -> None:
    for (_, params), ((tokens, text, reason, _, _),) in zip(CASES, expected):
        if params.grammar == Grammar.choice(["yes", "no"]):
            assert text in ("yes", "no") and reason == "stop"
            continue
        assert len(tokens) >= params.min_tokens
        assert not {EOS, *params.stop_token_ids} & set(tokens[: params.min_tokens])
        if params.logit_bias and not params.stop and params.min_tokens < 40:
            assert (len(tokens), tokens[-1], reason) == (params.min_tokens + 1, EOS, "stop")


@pytest.mark.parametrize("kind", DRAFTS)
def test_speculation_changes_no_token(device: str, expected: list[Any], kind: str) -> None:
    prompts, params = zip(*CASES)
    with load(device, DRAFTS[kind]) as llm:
        outputs = llm.generate(prompts, params)
        for case, output, wanted in zip(CASES, outputs, expected):
            assert shown([output]) == wanted, case
