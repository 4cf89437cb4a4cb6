"""Qwen3-Next and Qwen3.5 with experts: logits against transformers, drafts, published files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cpmcu.config import SpeculativeConfig
from tests.engine.harness import generate, make_engine
from tests.reference.engines import engine_logits, extension_or_skip, random_ids
from tests.reference.hf_model import hf_logits
from tests.reference.tiny_checkpoints import fuse_experts, write_tiny
from tests.reference.tiny_hybrid import EXPERTS
from tests.tolerances import LOGITS_HYBRID, assert_close

extension_or_skip()

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5", {}),
    "qwen3_5, tied": ("qwen3_5", {"tie_word_embeddings": True}),
    "qwen3_next": ("qwen3_next", {"norm_topk_prob": True}),
    "qwen3_next, an MLP in some layers": ("qwen3_next", {"mlp_only_layers": [0, 3]}),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the reference needs transformers")
    family, overrides = CONFIGS[name]
    tiny = write_tiny(tmp_path, family, **{**EXPERTS, **overrides})
    ids = random_ids(203, 150)
    expected = hf_logits(tiny.config, tiny.weights, ids)
    for chunk in (150, 33):
        logits = engine_logits(tmp_path, ids, chunk_length=chunk)
        assert_close(logits, expected, LOGITS_HYBRID["float32"])


def test_fused_experts(tmp_path: Path) -> None:
    """Files of Qwen3.5 store the experts of a layer as two tensors."""
    single = write_tiny(tmp_path / "single", "qwen3_5", **EXPERTS)
    fused = fuse_experts(single.config, single.weights)
    assert "model.layers.0.mlp.experts.gate_up_proj" in fused
    write_tiny(tmp_path / "fused", "qwen3_5", weights=fused, **EXPERTS)
    ids = random_ids(203, 20)
    assert (engine_logits(tmp_path / "fused", ids) == engine_logits(tmp_path / "single", ids)).all()


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.8, "seed": 3}])
def test_the_mtp_head_has_experts_too(fields: dict[str, Any], tmp_path: Path) -> None:
    write_tiny(tmp_path, "qwen3_5", mtp_num_hidden_layers=1, vocab_size=96, **EXPERTS)
    plain = make_engine(tmp_path, speculative_config=SpeculativeConfig(no_speculation=True))
    ids = random_ids(96, 80)
    expected = generate(plain, ids, 60, **fields)
    for topk, quant in ((1, "none"), (3, "none"), (3, "w4")):
        speculation = SpeculativeConfig(
            method="mtp",
            spec_num_iter=3,
            spec_topk_per_iter=topk,
            spec_auto=False,
            draft_quant=quant,
        )
        drafted = make_engine(tmp_path, speculative_config=speculation)
        assert generate(drafted, ids, 60, **fields)[:60] == expected
