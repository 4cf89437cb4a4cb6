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
from tests.reference.tiny_fp8 import write_fp8
from tests.reference.tiny_w4 import SIZES, quantise, write_w4

LAUNCHES = Path(__file__).with_name("launches")
CUTS = [("sm_90", "decode"), ("sm_80", "decode"), ("sm_90", "prefill")]

# Name -> family, changes of its config. Each has a kind of layer that no other has.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("llama", {"head_dim": 64}),
    "packed": ("llama", SIZES),
    "packed_fp8": ("llama", SIZES),
    "qk_norm": ("qwen3", {"head_dim": 64}),
    "experts": ("qwen3moe", {"head_dim": 64}),
    "shared_expert": ("qwen2moe", {"head_dim": 64}),
    "delta_nets": ("qwen3_5", {"num_hidden_layers": 8}),
    "sparse": ("minicpm", {"head_dim": 64, "sparse_config": CONFIG}),
    "output_norms": (
        "gemma4",
        {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "no_input_norms": ("olmo2", {}),
    "gates": ("muse", {"layer_types": ["sliding_attention", "full_attention"]}),
    "mamba": ("nemotron", {"num_hidden_layers": 8}),
    "latent_experts": (
        "nemotron",
        {"hybrid_override_pattern": "E*", "moe_latent_size": 32, "n_group": 4, "topk_group": 2},
    ),
    "ungated_shared_expert": ("granitehybrid", {"layer_types": ["mamba", "attention"]}),
    "sinks": ("gptoss", {"layer_types": ["sliding_attention", "full_attention"]}),
}


def engine_of(name: str, folder: Path) -> Any:
    family, changes = MODELS[name]
    made = write_tiny(folder, family, **{"num_hidden_layers": 2, **changes})
    if name == "packed":
        write_w4(made.directory, made.config, quantise(made.weights), "gptq")
    if name == "packed_fp8":
        write_fp8(made.directory, made.config, made.weights, "qwen")
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
    """The launches are those that launches/<name>.txt lists."""
    expected = (LAUNCHES / f"{name}.txt").read_text()
    assert text_of(engine_of(name, tmp_path / name)) == expected


def launches_of(engine: Any, architecture: str) -> dict[str, int]:
    """Returns the bytes of each launch of layer 0 in a decode pass, by its ops."""
    found = engine.launches(capability=capability_of(architecture))
    return {", ".join(row["ops"]): row["bytes"] for row in found if row["layer"] == 0}


def test_the_bytes_of_a_launch_are_those_of_its_weights(tmp_path: Path) -> None:
    engine = engine_of("dense", tmp_path)
    qkv, o, gate_up, down, norm = (4 * n for n in (512 * 64, 64 * 256, 192 * 64, 64 * 96, 64))
    assert launches_of(engine, "sm_80") == {
        "input_layernorm": norm,
        "self_attn.qkv_proj": qkv,
        "self_attn.rotary_kv": 0,
        "self_attn.attention": 0,
        "self_attn.o_proj, sum": o,
        "post_attention_layernorm": norm,
        "mlp.gate_up_proj": gate_up,
        "mlp.down_proj, sum": down,
    }
    fused = list(launches_of(engine, "sm_90").values())
    assert fused == [norm, qkv, 0, o + norm + gate_up + down + norm + qkv]


def test_only_the_chosen_experts_are_read(tmp_path: Path) -> None:
    found = launches_of(engine_of("experts", tmp_path), "sm_90")
    assert found["mlp.experts"] == 2 * 3 * 40 * 64 * 4  # 2 of 6; gate, up and down
    assert found["post_attention_layernorm, mlp.gate"] == 4 * 64 + 4 * 6 * 64


def test_packed_weights_are_whole_blocks(tmp_path: Path) -> None:
    found = launches_of(engine_of("packed", tmp_path), "cpu")
    block = 256 * 128 // 2 + 256 * 2
    blocks_of_qkv = 2 * 2  # weight blocks of 512 rows and 256 inputs
    assert block * blocks_of_qkv <= found["self_attn.qkv_proj"] < 1.05 * block * blocks_of_qkv


def test_the_table_shows_each_kind_of_layer_once() -> None:
    def launch(layer: int, ops: list[str], size: int) -> dict[str, Any]:
        return {"layer": layer, "kind": "linear", "ops": ops, "bytes": size}

    def layers(numbers: list[int], name: str) -> list[dict[str, Any]]:
        return [launch(number, [name, "sum"], 3 << 20) for number in numbers]

    launches = [
        launch(-1, ["embed"], 0),
        *layers([0, 2, 4, 6, 8, 10], "even"),
        *layers([1, 3], "odd"),
        *layers([20, 21, 22], "last"),
        *layers([30], "one"),
    ]
    assert launch_rows({"decode": launches}) == [
        ("decode", "start", "linear", "embed", "-"),
        ("decode", "0, 2, 4, ... 10 (6)", "linear", "even, sum", "3.00"),
        ("decode", "1, 3", "linear", "odd, sum", "3.00"),
        ("decode", "20-22", "linear", "last, sum", "3.00"),
        ("decode", "30", "linear", "one, sum", "3.00"),
    ]


@pytest.mark.parametrize(
    ("name", "capability"), [("cpu", 0), ("sm_80", 80), ("sm_90a", 90), ("sm_120", 120)]
)
def test_names_of_architectures(name: str, capability: int) -> None:
    assert capability_of(name) == capability


@pytest.mark.parametrize("name", ["", "90", "sm_9", "hopper", "sm_90b"])
def test_other_names_of_architectures_are_errors(name: str) -> None:
    with pytest.raises(ValueError, match="expected cpu, or sm_90 and the like"):
        capability_of(name)
