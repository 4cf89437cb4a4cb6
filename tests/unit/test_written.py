"""A response that is serialised in pieces equals the response serialised at once."""

import json

import pytest

from cpmcu.serving.protocol.base import ChatUsage, PromptLogprob
from cpmcu.serving.protocol.chat import ChatResponse
from cpmcu.serving.protocol.other import TokenizeResponse
from cpmcu.serving.replies import written

SCORE = PromptLogprob(logprob=-1.0, rank=None, decoded_token="a")


@pytest.mark.parametrize(
    "model",
    [
        ChatResponse(
            id="x",
            created=1,
            model="m",
            system_fingerprint="f",
            choices=[],
            usage=ChatUsage(prompt_tokens=1, completion_tokens=0, total_tokens=1),
            prompt_logprobs=[None, {"5": SCORE}, {"6": SCORE, "7": SCORE}],
        ),
        TokenizeResponse(count=20000, max_model_len=1, tokens=list(range(20000)), token_strs=None),
    ],
)
def test_written_is_what_the_model_dumps(model):
    assert json.loads(written(model).body) == json.loads(model.model_dump_json(by_alias=True))
