"""Converted checkpoints yield the same tokens as the originals on the same engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cpmcu.config import SpeculativeConfig
from cpmcu.convert.gptq_to_marlin import gptq_to_marlin
from tests.engine.harness import generate, make_engine, prefill, random_ids, sampling
from tests.reference.engines import extension_or_skip
from tests.reference.tiny_checkpoints import write_tiny
from tests.reference.tiny_gptq import SIZES as SIZES_OF_HEADS
from tests.reference.tiny_gptq import write_gptq, write_gptq_eagle, write_gptq_eagle3

extension_or_skip()

VOCAB = 12
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "intermediate_size": 384,
}


@pytest.mark.parametrize(
    ("family", "group_size", "settings"),
    [
        ("llama", 128, {}),
        ("llama", -1, {"shards": 2}),
        ("qwen2", 128, {"dtype": "bfloat16"}),
        ("qwen3", 128, {"quant": {"checkpoint_format": "gptq_v2"}}),
        ("minicpm", 128, {}),
    ],
)
def test_same_tokens(
    tmp_path: Path, family: str, group_size: int, settings: dict[str, Any]
) -> None:
    write_gptq(tmp_path / "in", family, group_size=group_size, **SIZES, **settings)
    gptq_to_marlin(str(tmp_path / "in"), tmp_path / "out")
    tokens = []
    for directory in (tmp_path / "in", tmp_path / "out"):
        engine = make_engine(directory, max_num_seqs=1, num_threads=1)
        prompts = [random_ids(count, 203, seed=count) for count in (1, 13, 70)]
        tokens.append([generate(engine, ids, 24, seed=1, temperature=1.0) for ids in prompts])
    assert tokens[0] == tokens[1]
    assert (
        len({token for run in tokens[0] for token in run}) > 12
    )  # the tokens are not all the same


def accepted(target: Path, draft: Path) -> list[int]:
    """The tokens of each step with a chain of three. They depend on the draft."""
    engine = make_engine(
        target,
        max_num_seqs=1,
        num_threads=1,
        speculative_config=SpeculativeConfig(
            draft_model_path=str(draft), spec_num_iter=3, spec_topk_per_iter=1, spec_tree_size=4
        ),
    )
    ids = random_ids(9, VOCAB)
    slot = engine.add_sequence(sampling(seed=3, temperature=1.0, max_tokens=400), ids)
    prefill(engine, slot, ids, 64)
    counts: list[int] = []
    while sum(counts) < 300:
        assert engine.reserve(slot, len(ids) + 1 + sum(counts) + engine.tokens_per_step)
        engine.decode([slot])
        counts.append(len(engine.collect()[0].tokens))
    return counts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "write"), [("minicpm", write_gptq_eagle), ("llama", write_gptq_eagle3)]
)
def test_same_drafts(tmp_path: Path, family: str, write: Any) -> None:
    """Random drafts are right by chance only. So equal acceptance needs equal drafts."""
    sizes = {**SIZES_OF_HEADS, "vocab_size": VOCAB, "num_hidden_layers": 4}
    write_tiny(tmp_path / "target", family, **sizes)
    counts = []
    for seed in (0, 1):
        write(tmp_path / f"in{seed}", vocab_size=VOCAB, seed=seed)
        gptq_to_marlin(str(tmp_path / f"in{seed}"), tmp_path / f"out{seed}")
        for name in (f"in{seed}", f"out{seed}"):
            counts.append(accepted(tmp_path / "target", tmp_path / name))
    assert counts[0] == counts[1] and counts[2] == counts[3]
    assert counts[0] != counts[2] and max(counts[0]) > 1


@pytest.mark.slow
def test_shipped_pair(tmp_path: Path) -> None:
    """The shipped 4-bit model and head: the same text and the same number of drafted tokens.

    The tree shape is fixed: an adaptive shape would depend on the duration of steps.
    """
    from cpmcu import LLM, SamplingParams

    pairs = [("tiny-python-minicpm-w4", "tiny-python-eagle2-w4")]
    pairs.append((str(tmp_path / "model"), str(tmp_path / "head")))
    for source, destination in zip(*pairs):
        gptq_to_marlin(source, destination)
    params = SamplingParams(temperature=0.0, max_tokens=48)
    found = []
    for model, draft in pairs:
        speculation = {"draft_model_path": draft, "spec_auto": False}
        with LLM(model, device="cpu", max_model_len=128, speculative_config=speculation) as llm:
            choice = llm.generate("class Stack:\n", params)[0].outputs[0]
            metrics = choice.spec_decode_metrics
            assert metrics is not None
            found.append((choice.token_ids, choice.text, metrics.acceptance_histogram))
    assert found[0] == found[1]
    assert sum(found[0][2][1:]) > 3  # some of the text was drafted
