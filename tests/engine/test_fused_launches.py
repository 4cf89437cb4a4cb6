"""The launches that are cut for Hopper change no token: the CPU runs them op by op."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.drafted import TREES, VOCAB, Drive, Models
from tests.engine.harness import generate, random_ids
from tests.engine.sparse import CONFIG
from tests.reference.tiny_hybrid import HYBRIDS

FAMILIES = ["llama", "llama_awq", "qwen3", "minicpm_marlin", "qwen3moe", "qwen2moe", "muse"]


def fused(engine: Any) -> Any:
    engine.cut_for(90)
    assert any(row["kind"] == "fused layer" for row in engine.launches(capability=90))
    return engine


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("fused"), "cpu")


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_fused_launches_change_no_token(models: Models, family: str) -> None:
    ids = random_ids(70, VOCAB)
    engine = models.engine(family, None)
    expected = generate(engine, ids, 30)
    assert generate(fused(engine), ids, 30) == expected


@pytest.mark.parametrize("family", ["llama", "qwen3moe"])
def test_a_draft_reads_the_hidden_states_of_fused_launches(models: Models, family: str) -> None:
    """With fused launches, steps accept as many tokens as with single ones."""
    ids = random_ids(70, VOCAB)
    engine = models.drafted("eagle3", family, TREES["narrow"])
    plain, cut = Drive(engine), Drive(engine)
    expected = plain.one(ids, 40)
    fused(engine)
    assert cut.one(ids, 40) == expected
    assert cut.emitted == plain.emitted


def test_sparse_attention_combines_its_own_splits(tmp_path: Path) -> None:
    models = Models(tmp_path, "cpu", query_scale=4.0, sparse_config=CONFIG)
    engine = models.engine("minicpm", None)
    ids = random_ids(400, VOCAB)
    expected = generate(engine, ids, 20)
    assert generate(fused(engine), ids, 20) == expected


CUT: dict[str, dict[str, Any]] = {
    "olmo2": {},
    "granitehybrid": {
        "num_hidden_layers": 4,
        "intermediate_size": 48,
        "shared_intermediate_size": 64,
    },
    "gemma4": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 16,
    },
}


@pytest.mark.parametrize("family", CUT)
def test_fused_launches_of_two_ranks(tmp_path: Path, family: str) -> None:
    """Ops that a rank runs as a whole stand between sums over ranks."""
    engine = Models(tmp_path, "cpu", num_ranks=2, **CUT[family]).engine(family, None)
    ids = random_ids(70, VOCAB)
    expected = generate(engine, ids, 30)
    assert generate(fused(engine), ids, 30) == expected
