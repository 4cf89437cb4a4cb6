"""Sums over ranks within fused layers. The CPU runs such a launch op by op, GPUs run the kernel.

GPUs of Hopper cut launches this way. Engines on the CPU do it if they are told to (`cut_for`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.engine.drafted import PROMPTS, SAMPLINGS, TREES, VOCAB, Drive, Models
from tests.engine.harness import generate, random_ids
from tests.reference.engines import extension_or_skip
from tests.reference.tiny_hybrid import HYBRIDS

C = extension_or_skip()

SUM = "sum over ranks"
FORMS = ["llama", "llama_gptq", "llama_fp8", "qwen3", "minicpm_gptq"]
FAMILIES = [*FORMS, "qwen3moe", "qwen2moe", "muse", *HYBRIDS]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, device: str) -> Models:
    if device == "cuda" and C.device_count() < 2:
        pytest.skip("one GPU")
    sizes = {"intermediate_size": 256, "moe_intermediate_size": 256}
    sizes["shared_expert_intermediate_size"] = 64
    return Models(tmp_path_factory.mktemp("fused_ranks"), device, num_ranks=2, **sizes)


def fused(engine: Any) -> Any:
    engine.cut_for(90)
    return engine


def launches(engine: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = engine.launches(capability=90)
    return rows


def test_a_layer_is_one_launch(models: Models) -> None:
    """It spans attention to attention. A sum after a single linear op has its own launch."""
    engine = models.engine("llama", None)
    rows = [row["ops"] for row in launches(engine) if row["layer"] == 0]
    layer = ["combine splits", "self_attn.o_proj", SUM, "post_attention_layernorm"]
    layer += ["mlp.gate_up_proj", "mlp.down_proj", SUM, "next input_layernorm"]
    layer += ["next self_attn.qkv_proj", "next self_attn.rotary_kv"]
    assert rows[-1] == layer
    rows = [row["ops"] for row in launches(models.engine("qwen3moe", None)) if row["layer"] == 0]
    assert [SUM, "post_attention_layernorm"] in rows


@pytest.mark.parametrize("family", FAMILIES)
def test_sums_in_fused_layers_change_no_token(models: Models, family: str) -> None:
    if models.device == "cuda":
        pytest.skip("fused layers add in another order than single launches")
    ids = random_ids(70, VOCAB)
    engine = models.engine(family, None)
    expected = generate(engine, ids, 30)
    assert generate(fused(engine), ids, 30) == expected


@pytest.mark.parametrize("family", FORMS)
def test_logits(models: Models, family: str) -> None:
    """Steps of one token and of several give the tokens of one launch for each op."""
    apart, joined = (models.engine(family, None, max_num_seqs=3) for _ in range(2))
    apart.cut_for(0)
    fused(joined)
    for count in (1, 3):
        expected, got = (step_logprobs(engine, count) for engine in (apart, joined))
        assert np.abs(got - expected).max() < 0.05


def step_logprobs(engine: Any, count: int) -> np.ndarray:
    """Log-probabilities of the first tokens of `count` equal sequences that decode together."""
    config = C.SamplingConfig(max_tokens=30, logprobs=3)
    slots = []
    for _ in range(count):
        slot = engine.add_sequence(config, PROMPTS[3])
        assert engine.reserve(slot, len(PROMPTS[3]) + 40)
        engine.prefill([(slot, PROMPTS[3], True)])
        engine.collect()
        slots.append(slot)
    engine.decode(slots)
    values = [output.logprobs[0] for output in engine.collect()]
    for slot in slots:
        engine.release(slot)
    return np.array(values)


@pytest.mark.parametrize("family", FORMS)
@pytest.mark.parametrize("kind", ["ngram", "eagle_bias"])
def test_speculation(models: Models, kind: str, family: str) -> None:
    """Drafts give trees of many rows, and launches follow each other."""
    if kind == "eagle_bias" and family != "llama":
        pytest.skip("a draft for llama")
    plain = fused(models.engine(family, None))
    tree = TREES["chain" if kind == "ngram" else "narrow"]
    drive = Drive(fused(models.drafted(kind, family, tree)), ahead=2)
    for ids, name in zip(PROMPTS[1:4], SAMPLINGS):
        got = drive.one(ids, 40, **SAMPLINGS[name])
        assert got == Drive(plain).one(ids, 40, **SAMPLINGS[name]), (len(ids), name)


def test_a_silent_rank_ends_with_a_sentence(models: Models) -> None:
    engine = fused(models.engine("llama", None))
    drive = Drive(engine)
    slot, _ = drive.start(PROMPTS[3], max_tokens=99)
    assert engine.reserve(slot, 200)
    engine.silence(1)
    with pytest.raises(RuntimeError, match=r"got no answer from .* within 4 s: the step is lost"):
        engine.decode([slot])
        engine.collect()
