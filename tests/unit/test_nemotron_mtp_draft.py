"""The MTP head of Nemotron 3 as a draft: its names, its specification, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.reference.tiny_checkpoints import TinyCheckpoint, write_tiny
from tests.unit.drafts import engine_names, opened, refused, spec_of

SUPER: dict[str, Any] = {
    "hybrid_override_pattern": "ME*E",
    "moe_latent_size": 32,
    "num_nextn_predict_layers": 1,
    "mtp_hybrid_override_pattern": "*E",
}
LAYER = "draft.layers.0."
NAMES = {
    *(f"draft.{name}.weight" for name in ("fc", "input_norm1", "input_norm2", "norm")),
    *(f"{LAYER}{name}_layernorm.weight" for name in ("input", "post_attention")),
    *(f"{LAYER}self_attn.{part}_proj.weight" for part in "qkvo"),
    f"{LAYER}mlp.gate.weight",
    f"{LAYER}mlp.gate.correction_bias",
    *(f"{LAYER}mlp.fc{number}_latent_proj.weight" for number in (1, 2)),
    *(
        f"{LAYER}mlp.{expert}.{part}_proj.weight"
        for expert in ("shared_expert", *(f"experts.{i}" for i in range(8)))
        for part in ("up", "down")
    ),
}


def written(folder: Path, drop: str = "", **changes: Any) -> TinyCheckpoint:
    """Writes the checkpoint without the tensors whose names begin with `drop`."""
    made = write_tiny(folder / "whole", "nemotron", **{**SUPER, **changes})
    kept = {name: w for name, w in made.weights.items() if not drop or not name.startswith(drop)}
    return write_tiny(folder / "model", "nemotron", weights=kept, **{**SUPER, **changes})


def test_the_head_drafts_by_default(tmp_path: Path) -> None:
    target = written(tmp_path)
    loaded = opened(target, None)
    assert loaded.method == "mtp" and engine_names(loaded) == NAMES
    spec = spec_of(loaded)
    ((attention, experts),) = spec.model.layers
    assert attention == target.fields().layers[2][0] and "rope_inv_freq" in attention[1]
    assert experts == target.fields().layers[1][0] and experts[1]["latent_size"] == 32
    assert spec.options == {"topk": 8, "hidden_first": False}


def test_several_modules_are_chained_as_stated(tmp_path: Path) -> None:
    target = written(tmp_path, num_nextn_predict_layers=2, chain_mtp_hidden=True)
    loaded = opened(target, None)
    assert engine_names(loaded) == {
        name.replace("draft.", f"draft.modules.{module}.") for name in NAMES for module in range(2)
    }
    spec = spec_of(loaded)
    assert (spec.method, spec.num_modules, spec.chain_hidden) == ("mtp_modules", 2, True)


@pytest.mark.parametrize(
    ("drop", "changes", "message"),
    [
        ("", {"mtp_hybrid_override_pattern": "*-"}, "mtp_hybrid_override_pattern is '*-', exp"),
        ("", {"mtp_layers_block_type": ["moe"]}, "mtp_layers_block_type is ['moe'], expected"),
        ("mtp.layers.1.final", {}, "MTP module 0 has no final_layernorm"),
        ("mtp.layers.1.mixer.gate", {}, "MTP module 0 has no mlp.gate"),
        ("mtp.layers.0.", {}, "MTP module 0 has no enorm, hnorm, eh_proj"),
        (
            "",
            {"hybrid_override_pattern": "ME-E"},
            "the MTP head has the layers of Nemotron 3, expected a target with its attention and",
        ),
    ],
)
def test_heads_that_do_not_fit(
    drop: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    assert message in refused(written(tmp_path, drop, **changes), None, method="mtp")


def test_more_modules_than_stated(tmp_path: Path) -> None:
    target = written(tmp_path)
    more = {**target.weights, "mtp.layers.3.mixer.gate.weight": np.ones((8, 64), np.float32)}
    target = write_tiny(tmp_path / "more", "nemotron", weights=more, **SUPER)
    message = refused(target, None, method="mtp")
    assert "num_nextn_predict_layers is 1, but the tensors are those of the MTP modules 0, 1" in (
        message
    )
