"""The specification of a draft model that a head of its own drafts, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cpmcu.config import SpeculativeConfig
from cpmcu.drafters.options.hierarchical import HierarchicalOptions
from cpmcu.loading.tensors import TensorMeta
from tests.reference.tiny_checkpoints import TinyCheckpoint
from tests.reference.tiny_drafts import write_draft
from tests.unit.drafts import engine_names, opened, refused, spec_of


@pytest.fixture
def model(target: TinyCheckpoint, tmp_path: Path) -> TinyCheckpoint:
    return write_draft(tmp_path / "model", "model", target)


def hierarchical(head: Path | None, **options: Any) -> dict[str, Any]:
    return {"method": "hierarchical", "head_model_path": head and str(head), **options}


def test_spec(target: TinyCheckpoint, model: TinyCheckpoint, tmp_path: Path) -> None:
    head = write_draft(tmp_path / "head", "eagle", model).directory
    loaded = opened(target, model.directory, **hierarchical(head))
    spec = spec_of(loaded)
    assert (spec.method, spec.scope) == ("hierarchical", "draft.")
    assert (spec.depth, spec.tree_size, spec.tokens_per_step) == (7, 8, 2)
    (part,) = spec.parts
    assert (part.method, part.scope, part.depth) == ("eagle", "draft.head.", 3)
    assert part.options["topk"] == 4
    assert part.model.num_hidden_layers == 1
    (own,) = loaded.parts
    assert loaded.with_files == [loaded, own]
    names = {name.replace("draft.", "draft.head.") for name in engine_names(own)}
    assert all(own.owns(name) and not loaded.owns(name) for name in names)
    assert all(loaded.owns(name) for name in engine_names(loaded))
    metas = {name: TensorMeta(name, "float32", ()) for name in names}
    with pytest.raises(ValueError, match=r"draft\.head\.\S+ has shape"):
        own.plan_load(metas, list(metas))


@pytest.mark.parametrize(("passes", "tokens"), [(7, 1), (4, 2), (2, 6)])
def test_passes(
    target: TinyCheckpoint, model: TinyCheckpoint, tmp_path: Path, passes: int, tokens: int
) -> None:
    head = write_draft(tmp_path / "head", "eagle", model).directory
    options = hierarchical(head, num_model_steps=passes, spec_num_iter=7)
    assert spec_of(opened(target, model.directory, **options)).tokens_per_step == tokens


def test_json() -> None:
    read = SpeculativeConfig.from_json(
        '{"method": "hierarchical", "model": "D", "draft_model": "H", "num_speculative_tokens": 5}'
    )
    options = read.of(HierarchicalOptions)
    assert (read.draft_model_path, options.head_model_path) == ("D", "H")
    assert options.chain(options.chain_depth).depth == 5


def test_refusals(target: TinyCheckpoint, model: TinyCheckpoint, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="spec_topk_per_iter is 8, but a chain of 7 tokens has 1"):
        SpeculativeConfig(method="hierarchical", spec_topk_per_iter=8)
    message = "head_model_path is set, but method is 'eagle', expected 'hierarchical'"
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig(head_model_path="x", method="eagle")
    said = refused(target, model.directory, **hierarchical(None))
    assert said.startswith(str(model.directory)) and "no head is given for the draft model" in said
    assert "is of kind model, expected one of: eagle" in refused(
        target, model.directory, **hierarchical(model.directory)
    )
    head = write_draft(tmp_path / "head", "eagle", model).directory
    passes = hierarchical(head, num_model_steps=1)
    assert "expected 2 or more passes" in refused(target, model.directory, **passes)
    assert "needs a draft model and its head" in refused(target, None, **hierarchical(None))
    assert "the draft is eagle, expected hierarchical" in refused(
        target, head, **hierarchical(head)
    )
