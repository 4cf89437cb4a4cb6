"""The launches of a pass for each kind of layer and architecture, and their table.

The cut needs no GPU: the architecture is an argument.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cpmcu.ui.launches import capability_of, launch_rows
from tests.engine.harness import make_engine
from tests.engine.sparse import CONFIG
from tests.reference.tiny_checkpoints import write_tiny
from tests.reference.tiny_w4 import SIZES, quantise, write_w4

LAUNCHES = Path(__file__).with_name("launches")
CUTS = [("sm_90", "decode"), ("sm_80", "decode"), ("sm_90", "prefill")]

# Name -> family, changes of its config. Each has a kind of layer that no other has.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("llama", {"head_dim": 64}),
    "packed": ("llama", SIZES),
    "qk_norm": ("qwen3", {"head_dim": 64}),
    "experts": ("qwen3moe", {}),
    "shared_expert": ("qwen2moe", {"head_dim": 64}),
    "delta_nets": ("qwen3_5", {"num_hidden_layers": 8}),
    "sparse": ("minicpm", {"head_dim": 64, "sparse_config": CONFIG}),
    "output_norms": (
        "gemma4",
        {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "no_input_norms": ("olmo2", {}),
    "gates": ("muse", {"layer_types": ["sliding_attention", "full_attention"]}),
    "sinks": ("gptoss", {"layer_types": ["sliding_attention", "full_attention"]}),
}


def engine_of(name: str, folder: Path) -> Any:
    family, changes = MODELS[name]
    made = write_tiny(folder, family, **{"num_hidden_layers": 2, **changes})
    if name == "packed":
        write_w4(made.directory, made.config, quantise(made.weights), "gptq")
    return make_engine(made.directory)


def text_of(engine: Any) -> str:
    """All cuts, one line a launch."""
    lines = []
    for architecture, phase in CUTS:
        launches = engine.launches(
            prefill=phase == "prefill", capability=capability_of(architecture)
        )
        for _, layers, kind, ops, _ in launch_rows({phase: launches}):
            lines.append(f"{architecture} {phase} | {layers} | {kind} | {ops}\n")
    return "".join(lines)


@pytest.mark.parametrize("name", MODELS)
def test_the_launches_of_each_kind_of_layer(name: str, tmp_path: Path) -> None:
    """They are those of launches/<name>.txt."""
    expected = (LAUNCHES / f"{name}.txt").read_text()
    assert text_of(engine_of(name, tmp_path / name)) == expected
