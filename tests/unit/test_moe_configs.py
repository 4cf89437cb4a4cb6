"""config.json and tensor names of families with a mixture of experts."""

from __future__ import annotations

from typing import Any

import pytest

from cpmcu.models.common import BuildOptions, SpecFields
from cpmcu.models.experts import expert_names
from cpmcu.models.registry import find_model
from scripts.synthetic.presets import PRESETS
from tests.reference.tiny_checkpoints import tiny_config

QWEN3_30B_A3B = PRESETS["qwen3-30b-a3b"].config


def build(config: dict[str, Any], **options: Any) -> SpecFields:
    return find_model(config).build(config, BuildOptions(**options))


def kinds(fields: SpecFields) -> str:
    """One letter for each layer: e with experts, d dense."""
    return "".join("e" if "moe" in dict(layer) else "d" for layer in fields.layers)


def test_qwen3_30b_a3b() -> None:
    fields = build(QWEN3_30B_A3B)
    assert kinds(fields) == "e" * 48
    assert fields.layers[7] == (
        ("attention", {}),
        (
            "moe",
            {
                "num_experts": 128,
                "top_k": 8,
                "intermediate_size": 768,
                "norm_topk_prob": True,
            },
        ),
    )
    assert fields.qk_norm and not fields.qkv_bias and fields.head_dim == 128


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, "eeeee"),
        ({"decoder_sparse_step": 2}, "deded"),
        ({"mlp_only_layers": [0, 3]}, "deede"),
        ({"mlp_only_layers": [3], "decoder_sparse_step": 2}, "deddd"),
        ({"mlp_only_layers": None, "decoder_sparse_step": None}, "eeeee"),
        ({"decoder_sparse_step": 6}, ""),  # all layers are attention and mlp
    ],
)
def test_layers_with_experts(keys: dict[str, Any], expected: str) -> None:
    assert kinds(build({**tiny_config("qwen3moe", num_hidden_layers=5), **keys})) == expected


def test_names_of_transformers_5() -> None:
    config = tiny_config("qwen3moe")
    config["num_local_experts"] = config.pop("num_experts")
    del config["norm_topk_prob"]
    params = dict(build(config).layers[0])["moe"]
    assert params["num_experts"] == 6
    assert params["norm_topk_prob"] is False


def test_windows_and_experts() -> None:
    config = tiny_config("qwen3moe", use_sliding_window=True, sliding_window=30)
    fields = build(config)
    assert [dict(layer)["attention"] for layer in fields.layers] == [{"window": 30}] * 2
    assert kinds(fields) == "ee"


def test_shared_expert() -> None:
    fields = build(tiny_config("qwen2moe"))
    assert dict(fields.layers[0])["moe"]["shared_intermediate_size"] == 56
    assert fields.qkv_bias and not fields.qk_norm
    assert not build(tiny_config("qwen2moe", qkv_bias=False)).qkv_bias


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("qwen3moe", {"num_experts": 0}, "num_experts is 0, expected a positive integer"),
        ("qwen3moe", {"num_experts_per_tok": 7}, "is 7, expected at most num_experts=6"),
        ("qwen3moe", {"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        ("qwen3moe", {"moe_intermediate_size": 20}, "is 20, expected a multiple of 8"),
        ("qwen3moe", {"decoder_sparse_step": -1}, "decoder_sparse_step is -1"),
        ("qwen3moe", {"mlp_only_layers": 3}, "mlp_only_layers is 3, expected a list"),
        ("qwen3moe", {"mlp_only_layers": [True]}, r"mlp_only_layers is \[True\]"),
        ("qwen3moe", {"norm_topk_prob": 1}, "norm_topk_prob is 1, expected true or false"),
        ("qwen3moe", {"attention_bias": True}, "attention_bias is True, expected false"),
        ("qwen2moe", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("qwen2moe", {"shared_expert_intermediate_size": 12}, "is 12, expected a multiple of 8"),
        ("qwen2moe", {"shared_expert_intermediate_size": None}, "is missing, expected a positive"),
    ],
)
def test_refused(family: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(tiny_config(family, **keys))


# ---- tensor names


def test_names_of_single_experts() -> None:
    fields = build(tiny_config("qwen3moe", mlp_only_layers=[1]))
    for name in (
        "model.layers.0.mlp.experts.5.gate_proj.weight",
        "model.layers.0.mlp.experts.0.down_proj.qweight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.1.mlp.gate_proj.weight",
        "model.layers.1.mlp.experts.9.up_proj.weight",  # layer 1 is dense, so not used
    ):
        (piece,) = expert_names(name, fields)
        assert (piece.name, piece.first_row, piece.num_rows) == (name, 0, None)
    with pytest.raises(ValueError, match=r"is of expert 6, but config\.json has 6 experts"):
        expert_names("model.layers.0.mlp.experts.6.gate_proj.weight", fields)


@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_names_of_fused_experts(suffix: str) -> None:
    fields = build(tiny_config("qwen3moe"))
    prefix = "model.layers.1.mlp.experts."
    pieces = expert_names(f"{prefix}gate_up_proj{suffix}", fields)
    assert len(pieces) == 12
    assert all(piece.leading == (6, 80) and piece.num_rows == 40 for piece in pieces)
    assert pieces[3].name == f"{prefix}1.up_proj.weight"
    assert [piece.first_row for piece in pieces] == list(range(0, 480, 40))
    pieces = expert_names(f"{prefix}down_proj{suffix}", fields)
    assert [piece.name for piece in pieces] == [f"{prefix}{i}.down_proj.weight" for i in range(6)]
    assert all(piece.leading == (6, 64) and piece.num_rows == 64 for piece in pieces)
