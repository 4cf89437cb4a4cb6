"""The server on a GPU gives the tokens of `LLM`, streamed or not, alone or in a batch."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator

import pytest

from cpmcu import LLM, SamplingParams
from tests.e2e.harness import Server, start

pytestmark = pytest.mark.gpu

PROMPTS = ["def read(path):\n", "import os\n", "class Stack:\n", "for i in range(10):\n"]
MODELS = ["tiny-python-minicpm", "tiny-python-minicpm-w4"]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[Server]:
    with start("--device", "cuda", "--model", model, "--max-num-seqs", "4") as running:
        yield running


@pytest.fixture(scope="module")
def expected(model: str) -> dict[tuple[str, float], str]:
    """Texts without speculation, by prompt and temperature."""
    texts = {}
    plain = {"no_speculation": True}
    with LLM(model, device="cuda", max_num_seqs=1, speculative_config=plain) as llm:
        for prompt in PROMPTS:
            for temperature in (0.0, 0.8):
                params = SamplingParams(temperature=temperature, seed=7, max_tokens=60)
                texts[prompt, temperature] = llm.generate([prompt], params)[0].text
    return texts


@pytest.mark.parametrize("stream", [False, True])
def test_texts_are_those_of_plain_decoding(
    server: Server, model: str, expected: dict[tuple[str, float], str], stream: bool
) -> None:
    client = server.client()
    name = client.models.list().data[0].id

    def complete(case: tuple[str, float]) -> str:
        prompt, temperature = case
        answer = client.completions.create(
            model=name, prompt=prompt, temperature=temperature, seed=7, max_tokens=60, stream=stream
        )
        return "".join(c.choices[0].text for c in answer) if stream else answer.choices[0].text

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = dict(zip(expected, pool.map(complete, expected), strict=True))
    assert found == expected
    server.wait_idle()
    assert server.metric("vllm:spec_decode_num_accepted_tokens_total") > 0


def test_a_client_that_leaves_frees_its_slot(server: Server) -> None:
    client = server.client()
    name = client.models.list().data[0].id
    stream = client.completions.create(
        model=name, prompt=PROMPTS[0], max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    server.wait_idle(2)
