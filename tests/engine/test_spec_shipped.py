"""The shipped drafts over the shipped model: the same tokens as without, and worth their while."""

from __future__ import annotations

import pytest

from cpmcu.config import SpeculativeConfig
from cpmcu.tokenizer import Tokenizer
from tests.engine.harness import DEVICES, SHIPPED, generate, make_engine, sampling

ASSETS = SHIPPED.parent
DRAFTS = {
    "eagle2": {"draft_model_path": str(ASSETS / "tiny-python-eagle2")},
    "eagle2, 1024 tokens": {
        "draft_model_path": str(ASSETS / "tiny-python-eagle2"),
        "frspec_vocab_size": 1024,
    },
    "eagle3": {"draft_model_path": str(ASSETS / "tiny-python-eagle3")},
    "model": {"draft_model_path": str(ASSETS / "tiny-python-draft")},
    "ngram": {"method": "ngram"},
}
TREE = {"spec_num_iter": 4, "spec_topk_per_iter": 6, "spec_tree_size": 16}
CHAIN = {"spec_num_iter": 4, "spec_topk_per_iter": 1, "spec_tree_size": 5}
PROMPTS = [
    "def fibonacci(n):\n",
    "import os\n\ndef ",
    "class Stack:\n    def __init__(self):\n",
    '"""Read a configuration file."""\n\nimport json\n',
    "for name in sorted(os.listdir(path)):\n    ",
    "def test_",
    "try:\n    import zlib\nexcept ImportError:\n",
    "    def close(self):\n        ",
    "x = {",
    "# 文字列 🙂\n",
]
SAMPLINGS = [{}, {"temperature": 0.7, "top_p": 0.9, "seed": 5, "repetition_penalty": 1.15}]
TOKENS = 120


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def engine_with(device: str, graph: bool = True, **draft: object):
    speculation = SpeculativeConfig(**draft) if draft else SpeculativeConfig(no_speculation=True)
    return make_engine(
        SHIPPED,
        device,
        max_num_seqs=2,
        max_model_len=1024,
        chunk_length=32,
        cuda_graph=graph,
        speculative_config=speculation,
    )


@pytest.fixture(scope="module")
def plain(device: str):
    return engine_with(device)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_directory(SHIPPED)
    return [tokenizer.encode(text, add_special_tokens=True) for text in PROMPTS]


@pytest.mark.parametrize("name", DRAFTS)
def test_same_tokens_and_some_accepted(
    name: str, device: str, plain, prompts: list[list[int]]
) -> None:
    tree = {} if name == "ngram" else TREE
    engine = engine_with(device, **DRAFTS[name], **tree)
    cycles = emitted = 0
    for fields in SAMPLINGS:
        for ids in prompts:
            expected = generate(plain, ids, TOKENS, **fields)
            before = engine.counters["steps"]
            tokens = generate(engine, ids, TOKENS, **fields)[:TOKENS]
            cycles += engine.counters["steps"] - before
            emitted += len(tokens)
            assert tokens == expected
    assert emitted / cycles > (1.05 if name == "ngram" else 1.8)


@pytest.mark.parametrize("graph", [True, False])
def test_a_cycle_neither_allocates_nor_waits(graph: bool, device: str, prompts) -> None:
    """Beyond the host's look at mapped memory: no allocation, no synchronisation of the device."""
    engine = engine_with(device, graph, **DRAFTS["eagle2"], **CHAIN)
    generate(engine, prompts[0], 20)  # graphs are captured, algorithms chosen
    slot = engine.add_sequence(sampling(temperature=0.7, seed=1), prompts[0])
    assert engine.reserve(slot, 900)
    engine.prefill([(slot, prompts[0], True)])
    engine.collect()
    before = engine.counters
    for _ in range(50):
        engine.decode([slot])
        if engine.in_flight() >= 2:
            engine.collect()
    while engine.in_flight():
        engine.collect()
    after = engine.counters
    assert after["steps"] == before["steps"] + 50
    for counter in ("allocations", "synchronizations", "graph_captures"):
        assert after[counter] == before[counter], counter
