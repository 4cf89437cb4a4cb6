"""Two ranks run gpt-oss: biased experts, sinks and windows."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.drafted import (
    CONTEXT,
    COUNT,
    PROMPTS,
    SAMPLINGS,
    TREES,
    VOCAB,
    Drive,
    Models,
)
from tests.engine.harness import random_ids
from tests.engine.test_swap_space import engine_of, runner_of, submit_and_check
from tests.reference.engines import check_ranks, extension_or_skip, load_tiny, prompt_logits
from tests.reference.tiny_checkpoints import write_tiny
from tests.reference.tiny_gpt_oss import write_mxfp4

C = extension_or_skip()

LAYERS = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, device: str) -> Models:
    if device == "cuda" and C.device_count() < 2:
        pytest.skip("one GPU")
    made = Models(
        tmp_path_factory.mktemp("ranks"), device, num_ranks=2, **LAYERS, intermediate_size=48
    )
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT}
    sizes |= {**LAYERS, "head_dim": 64, "intermediate_size": 192}  # 96 on a rank, less than 128
    made.put("mxfp4", write_mxfp4(made.root, **sizes)[1])
    return made


@pytest.mark.parametrize("family", ["gptoss", "mxfp4"])
def test_logits(models: Models, family: str) -> None:
    if models.device == "cpu":
        check_ranks(partial(models.engine, family, None), PROMPTS[5], 2e-5)
    else:
        make = partial(models.engine, family, None, dtype="float16")
        check_ranks(make, PROMPTS[5], 0.02, share=0.75)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_biases_alone(tmp_path: Path, num_ranks: int) -> None:
    """The matrices of the experts are 0, so that their outputs are the biases of `down`."""
    made = write_tiny(tmp_path, "gptoss", intermediate_size=64, num_hidden_layers=2)
    for name in made.weights:
        if name.endswith(("gate_up_proj", "down_proj")):
            made.weights[name][:] = 0
    write_tiny(tmp_path, "gptoss", weights=made.weights, intermediate_size=64, num_hidden_layers=2)
    one, two = (load_tiny(tmp_path, tensor_parallel_size=n).engine for n in (1, num_ranks))
    ids = random_ids(100, 60, seed=3)
    expected, got = prompt_logits(one, ids), prompt_logits(two, ids)
    assert np.abs(got - expected).max() < 2e-5 * np.abs(expected).max()


@pytest.mark.parametrize("tree", ["chain", "narrow"])
@pytest.mark.parametrize(
    ("family", "kind"), [("gptoss", "itself"), ("gptoss", "ngram"), ("mxfp4", "ngram")]
)
def test_speculation(models: Models, family: str, kind: str, tree: str) -> None:
    """The draft "itself" is whole on each rank, so each adds all biases of the draft."""
    drive = Drive(models.drafted(kind, family, TREES[tree]), ahead=2)
    for ids, name in zip(PROMPTS[1:6], SAMPLINGS):
        got = drive.one(ids, COUNT, **SAMPLINGS[name])
        assert got == models.plain(family, ids, COUNT, **SAMPLINGS[name])
    if kind == "itself":
        drive.one(PROMPTS[5], 61)
        assert sum(drive.emitted) / len(drive.emitted) > 2.5


def test_preemption(models: Models) -> None:
    engine, _ = engine_of(models, "gptoss", "ngram")
    runner = runner_of(engine, 100 * engine.pages.page_bytes)
    try:
        submit_and_check(runner, models, "gptoss")
    finally:
        runner.close()
