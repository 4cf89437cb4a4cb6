"""A model whose logits become infinite after some tokens: an error, not an empty text."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from tokenizers import Tokenizer

from cpmcu import LLM, SamplingParams
from cpmcu.errors import OutputError
from cpmcu.loading.checkpoint import open_checkpoint
from tests.e2e.conftest import TEMPLATE
from tests.e2e.harness import Server, cue, start, write_scripted
from tests.reference.tiny_checkpoints import write_tiny

TEXT = "abcdefghij"
SENTENCE = "logits for token 6 of the output are not finite"  # "abcde" comes before


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script "good" ends normally.

    In "bad", the hidden state of one token is multiplied by a huge row of the head. Only that token
    is not zero in the last dimension.
    """
    scripts = {"bad": TEXT, "good": TEXT.upper()}
    directory = write_scripted(tmp_path_factory.mktemp("overflows"), scripts, TEMPLATE)
    checkpoint = open_checkpoint(directory)
    weights = {name: checkpoint.read(name).copy() for name in checkpoint.tensors}
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    embedding[:, -1] = head[:, -1] = 0
    embedding[Tokenizer.from_file(str(directory / "tokenizer.json")).token_to_id("e"), -1] = 100
    head[0, -1] = 3e38
    config = json.loads((directory / "config.json").read_text())
    write_tiny(directory, "llama", weights=weights, **config)
    return directory


def draft(directory: Path) -> dict[str, object]:
    return {"draft_model_path": str(directory), "spec_num_iter": 3, "spec_topk_per_iter": 2}


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("fields", [{}, {"presence_penalty": 0.5, "logprobs": 2}])
def test_the_output_fails_and_the_engine_goes_on(
    model: Path, drafts: bool, fields: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    options = {"speculative_config": draft(model)} if drafts else {}
    params = SamplingParams(max_tokens=20, temperature=0, **fields)
    with LLM(str(model), device="cpu", memory_limit=0.3, num_threads=1, **options) as llm:
        good = llm.generate(cue("good"), params)[0].outputs[0]
        assert good.text == TEXT.upper() and good.finish_reason == "stop"
        for _ in range(2):
            texts = []
            with pytest.raises(OutputError, match=SENTENCE), caplog.at_level(logging.ERROR):
                for chunk in llm.stream(cue("bad"), params):
                    texts.append(chunk.text)
            assert "".join(texts) == "abcde" and SENTENCE in caplog.text
            with pytest.raises(OutputError, match=SENTENCE):
                llm.generate([cue("bad"), cue("good")], params)
            assert llm.generate(cue("good"), params)[0].outputs[0].text == good.text


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    flags = ["--draft-model-path", str(model), "--spec-num-iter", "3"]
    with start("--model", str(model), "--served-model-name", "m", *flags) as running:
        yield running


def test_a_client_gets_the_sentence(server: Server) -> None:
    client = server.client()
    bad = {"model": "m", "prompt": cue("bad"), "temperature": 0, "max_tokens": 20}
    with pytest.raises(openai.InternalServerError) as error:
        client.completions.create(**bad)
    assert SENTENCE in str(error.value) and error.value.code == "output_failed"
    texts = []
    with pytest.raises(openai.APIError, match=SENTENCE):
        for chunk in client.completions.create(**bad, stream=True):
            texts.append(chunk.choices[0].text)
    assert "".join(texts) == "abcde"
    good = client.completions.create(**bad | {"prompt": cue("good")}).choices[0]
    assert (good.text, good.finish_reason) == (TEXT.upper(), "stop")
    assert SENTENCE in server.log and "Traceback" not in server.log
