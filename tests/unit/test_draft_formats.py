"""Recognition of all draft formats, and the engine's names of their tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpmcu.drafters import registry
from cpmcu.drafters.registry import DraftPlan, register_drafter, registered_drafters
from tests.reference.tiny_checkpoints import TinyCheckpoint, write_tiny
from tests.reference.tiny_drafts import KINDS, write_draft
from tests.unit.drafts import NAMES, engine_names, opened, spec_of

METHODS = {
    "eagle": "eagle",
    "eagle_bias": "eagle",
    "minicpm_eagle": "eagle",
    "minicpm_eagle_hf": "eagle",
    "eagle3": "eagle3",
    "eagle3_shared": "eagle3",
    "model": "model",
    "itself": "model",
    "noisy": "model",
    "dflash": "dflash",
    "jetspec": "dflash",
    "dflash2": "dflash2",
    "dspark": "dspark",
    "domino": "domino",
    "lilicorr": "lilicorr",
    "dspark_gated": "dspark",
    "dspark_rnn": "dspark",
}


@pytest.mark.parametrize("kind", KINDS)
def test_recognised(target: TinyCheckpoint, tmp_path: Path, kind: str) -> None:
    loaded = opened(target, write_draft(tmp_path / "d", kind, target).directory)
    assert loaded.method == METHODS[kind]
    if kind in NAMES:
        assert engine_names(loaded) == NAMES[kind]


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "minicpm_eagle_hf", "model"])
def test_torch_files(target: TinyCheckpoint, tmp_path: Path, kind: str) -> None:
    torch = pytest.importorskip("torch", reason="writing .bin files needs torch")
    draft = write_draft(tmp_path / "d", kind, target)
    (draft.directory / "model.safetensors").unlink()
    state = {name: torch.from_numpy(np.array(array)) for name, array in draft.weights.items()}
    torch.save(state, draft.directory / "pytorch_model.bin")
    assert engine_names(opened(target, draft.directory)) == NAMES[kind]


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_copies_of_the_target(
    tmp_path: Path, stored: str, tied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The target's tables are used. A difference beyond rounding is logged."""
    target = write_tiny(
        *(tmp_path / "t", "llama"), dtype=stored, num_hidden_layers=3, tie_word_embeddings=tied
    )
    table = target.weights["model.embed_tokens.weight"]
    head = target.weights.get("lm_head.weight", table)

    def told(kind: str, dtype: str, extra: dict[str, Any]) -> bool:
        caplog.clear()
        draft = write_draft(tmp_path / "d", kind, target, dtype=dtype, extra=extra)
        loaded = opened(target, draft.directory)
        assert not spec_of(loaded).own_head and not extra.keys() & set(engine_names(loaded))
        return f"{next(iter(extra))} of the draft differs" in caplog.text

    for dtype in ("float32", "float16", "bfloat16"):
        assert not told("eagle", dtype, {"lm_head.weight": head})
        assert not told("eagle3_shared", dtype, {"model.embed_tokens.weight": table})
        assert told("eagle", dtype, {"lm_head.weight": 1.05 * head})
        for kind in ("eagle", "eagle3_shared"):
            assert told(kind, dtype, {"embed_tokens.weight": 1.05 * table})


def test_eagle3_layer_names(target: TinyCheckpoint, tmp_path: Path) -> None:
    """Some trainers call the layer `model.layers.0`."""
    draft = write_draft(tmp_path / "d", "eagle3", target)
    renamed = {
        name.replace("midlayer.", "model.layers.0."): array for name, array in draft.weights.items()
    }
    other = write_draft(tmp_path / "o", "eagle3", target, drop=tuple(draft.weights), extra=renamed)
    assert engine_names(opened(target, other.directory)) == NAMES["eagle3"]


def test_a_fused_head_is_split(target: TinyCheckpoint, tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "d", "eagle", target)
    parts = [f"layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    fused = np.concatenate([draft.weights[part] for part in parts])
    extra = {"layers.0.self_attn.qkv_proj.weight": fused}
    other = write_draft(tmp_path / "o", "eagle", target, drop=tuple(parts), extra=extra)
    assert engine_names(opened(target, other.directory)) == NAMES["eagle"]


def test_registry() -> None:
    files = registered_drafters()
    assert {"eagle", "eagle3", "model", "ngram"} <= set(files)
    assert files["eagle3"].endswith("cpmcu/drafters/eagle3.py")


def test_a_drafter_from_outside(
    target: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_drafters", dict(registry._drafters))

    @register_drafter("toy")
    class Toy:
        has_checkpoint = True

        def matches(self, config: Any, tensors: Any) -> bool:
            return config.get("architectures") == ["ToyDraft"]

        def plan(self, draft: Any, target: Any, speculation: Any) -> DraftPlan:
            return DraftPlan(options={"input_norms": True}, chain=True)

    directory = tmp_path / "toy"
    draft = write_draft(directory, "eagle", target, architectures=["ToyDraft"], drop=("fc.weight",))
    (directory / "config.json").write_text(json.dumps(draft.config))
    loaded = opened(target, directory)
    assert loaded.method == "toy" and loaded.shape.tree_size == 5
    assert registered_drafters()["toy"] == __file__
    with pytest.raises(ValueError, match="drafter 'toy' is registered twice"):

        @register_drafter("toy")
        class Other(Toy):
            pass
