"""The shipped 4-bit model and 4-bit draft: perplexity, text with and without speculation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpmcu import LLM, SamplingParams
from tests.engine.harness import DEVICES, SHIPPED
from tests.reference.engines import extension_or_skip, prompt_logits

extension_or_skip()
pytestmark = pytest.mark.slow  # sanitizer runs cover 4 bits in test_w4.py and test_spec_exact.py

NAME = "tiny-python-minicpm-w4"
DRAFT = "tiny-python-eagle2-w4"
TEXTS = ("harness.py", "test_spec_llm.py", "test_bad_checkpoints.py")  # files beside this one
PROMPTS = ["import os\n\n\ndef walk(path):\n", "class Stack:\n    def __init__(self", "for i in "]
PARAMS = {
    "greedy": SamplingParams(max_tokens=80, temperature=0.0, repetition_penalty=1.0),
    "sampled": SamplingParams(max_tokens=80, temperature=0.8, top_p=0.95, seed=5),
}


def load(model: str | None, device: str, **options: Any) -> LLM:
    settings: dict[str, Any] = {"memory_limit": 0.2, "max_num_seqs": 4, "max_model_len": 1024}
    if device == "cpu":
        settings["num_threads"] = 2
    return LLM(model, device=device, **settings, **options)


def loss(llm: LLM, texts: list[list[int]]) -> float:
    """Mean nats per token of texts of token ids."""
    total = 0.0
    for ids in texts:
        logits = llm.call_engine(lambda engine, ids=ids: prompt_logits(engine, ids)[:-1])
        logits = logits.astype(np.float64)
        norm = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1)
        total += float((norm - logits[np.arange(len(ids) - 1), ids[1:]]).sum())
    return total / sum(len(ids) - 1 for ids in texts)


@pytest.mark.parametrize("device", DEVICES)
def test_perplexity_is_near_the_originals(device: str) -> None:
    """It is at most 4 % higher, on texts that neither model was trained on."""
    plain = {"no_speculation": True}
    with load(str(SHIPPED), device, speculative_config=plain) as original:
        paths = [Path(__file__).with_name(name) for name in TEXTS]
        texts = [original.tokenize(path.read_text())[:400] for path in paths]
        before = loss(original, texts)
        size = weight_bytes(original)
    with load(NAME, device, speculative_config=plain) as quantised:
        after = loss(quantised, texts)
        assert weight_bytes(quantised) < 0.6 * size
    assert 0 < abs(after - before) < np.log(1.04), (before, after)


def weight_bytes(llm: LLM) -> int:
    return sum(int(row["bytes"]) for row in llm.memory_plan() if row["group"] == "weights")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_the_draft_changes_no_text(device: str, params: SamplingParams) -> None:
    """The draft is the default draft of the shipped model.

    The tree shape is fixed: an adaptive shape would depend on the duration of steps.
    """
    with load(NAME, device, speculative_config={"no_speculation": True}) as plain:
        expected = [output.outputs[0].token_ids for output in plain.generate(PROMPTS, params)]
    with load(NAME, device, speculative_config={"spec_auto": False}) as drafted:
        outputs = [output.outputs[0] for output in drafted.generate(PROMPTS, params)]
    assert [output.token_ids for output in outputs] == expected
    assert all(output.spec_decode_metrics is not None for output in outputs)
    steps = sum(output.spec_decode_metrics.num_spec_steps for output in outputs)
    assert sum(len(tokens) for tokens in expected) / steps > 1.8
