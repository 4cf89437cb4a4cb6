"""Synthetic checkpoints with gated delta nets: shapes, 4-bit form, acceptance of the MTP head."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from cpmcu.drafters.mtp import DENSE_MODULES, EXPERT_MODULES
from cpmcu.loading.checkpoint import open_checkpoint
from cpmcu.loading.index import read_json
from cpmcu.models.common import BuildOptions
from cpmcu.models.reader import language_config
from cpmcu.models.registry import find_model
from cpmcu.quant.registry import plan_quant
from scripts.synthetic.acceptance import lay_out
from scripts.synthetic.presets import PRESETS
from tests.unit.test_synthetic_checkpoint import read_tensors, write

TINY = ["tiny-qwen3.5", "tiny-qwen3.5-vl", "tiny-qwen3-next", "tiny-qwen3.5-moe"]
PARTS = ("gate", "up", "down")


@pytest.mark.parametrize("preset", TINY)
def test_tensors_fit_the_config(preset: str, tmp_path: Path) -> None:
    out = write(preset, tmp_path / "model")
    config = language_config(read_json(out / "config.json"))
    family = find_model(config)
    fields = family.build(config, BuildOptions())
    assert [layer[0][0] for layer in fields.layers] == ["gated_delta_net"] * 3 + ["attention"]
    tensors = read_tensors(out / "model.safetensors")
    shapes = {
        piece.name: shape
        for name, (_, shape, _) in tensors.items()
        for piece in family.names(name, fields)
    }
    prefix = "model.layers.0.linear_attn."
    assert shapes[f"{prefix}conv1d.weight"] == [512, 1, 4]
    assert shapes[f"{prefix}A_log"] == shapes[f"{prefix}dt_bias"] == [4]
    assert (
        shapes[f"{prefix}norm.weight"] == [64] and shapes[f"{prefix}out_proj.weight"] == [256] * 2
    )
    if preset == "tiny-qwen3-next":
        assert shapes[f"{prefix}in_proj_qkvz.weight"] == [768, 256]
        assert shapes[f"{prefix}in_proj_ba.weight"] == [8, 256]
    else:
        assert shapes[f"{prefix}in_proj_qkv.weight"] == [512, 256]
        assert shapes[f"{prefix}in_proj_a.weight"] == [4, 256]
    assert shapes["model.layers.3.self_attn.q_proj.weight"] == [512, 256]
    assert ("lm_head.weight" in shapes) == (preset != "tiny-qwen3.5-vl")
    assert any(name.startswith("model.visual.") for name in tensors) == (preset[-2:] == "vl")
    heads = {name[4:].rpartition(".")[0] for name in tensors if name.startswith("mtp.")}
    if preset == "tiny-qwen3.5-moe":
        experts = {f"layers.0.mlp.experts.{e}.{part}_proj" for e in range(16) for part in PARTS}
        assert heads == {name for name in EXPERT_MODULES if name[-7:] != "experts"} | experts
        for module in ("model.layers.0.mlp.", "mtp.layers.0.mlp."):
            assert tensors[f"{module}experts.15.down_proj.weight"][1] == [256, 128]
            assert tensors[f"{module}shared_expert.up_proj.weight"][1] == [128, 256]
            assert tensors[f"{module}shared_expert_gate.weight"][1] == [1, 256]
            assert tensors[f"{module}gate.weight"][1] == [16, 256]
    else:
        assert heads == set(DENSE_MODULES)
    for name, (_, _, values) in tensors.items():
        assert np.isfinite(values).all() and values.std() > 0, name
        if "norm" in name and ".visual." not in name:
            centre = float(".linear_attn." in name)
            assert abs(values.mean() - centre) < 0.05, name
        if name.endswith("A_log"):
            assert values.min() >= 0 and values.max() <= np.log(16)
    assert np.load(out / "token_counts.npy").shape == (4096,)


@pytest.mark.parametrize("preset", TINY)
def test_4_bits(preset: str, tmp_path: Path) -> None:
    out = write(preset, tmp_path / "model", "--quant", "gptq")
    config = language_config(read_json(out / "config.json"))
    checkpoint, family = open_checkpoint(out), find_model(config)
    fields = family.build(config, BuildOptions())
    metas = {
        name: stored.meta
        for name, stored in checkpoint.tensors.items()
        if family.names(name, fields)
    }
    plan = plan_quant(config, metas)
    assert plan.verify is not None
    plan.verify(checkpoint.read)
    dense = {module.rpartition(".")[2] for module in plan.linear_overrides}
    assert dense - {"gate", "shared_expert_gate"} == {"in_proj_ba", "lm_head"}
    assert "mtp.fc.weight" in checkpoint.tensors
    assert "-:^mtp.*" in config["quantization_config"]["dynamic"]


@pytest.mark.parametrize(
    ("preset", "billions", "head"),
    [
        ("qwen3.5-4b", 4.33, 0.121),
        ("qwen3.5-9b", 9.20, 0.243),
        ("qwen3.5-27b", 27.3, 0.425),
        ("qwen3.5-35b-a3b", 35.5, 0.845),
        ("qwen3.5-122b-a10b", 124.6, 2.5),
    ],
)
def test_parameter_counts(preset: str, billions: float, head: float) -> None:
    row = PRESETS[preset]
    specs = list(row.tensors(row.config))
    assert sum(spec.count for spec in specs) / 1e9 == pytest.approx(billions, rel=0.005)
    mtp = sum(spec.count for spec in specs if spec.name.startswith("mtp."))
    assert mtp / 1e9 == pytest.approx(head, rel=0.01)


@pytest.mark.parametrize(
    ("preset", "acceptance"),
    [
        ("tiny-qwen3.5", 0.0),
        ("tiny-qwen3.5", 0.6),
        ("tiny-qwen3.5", 1.0),
        ("tiny-qwen3.5-moe", 0.6),
    ],
)
def test_tables_of_an_mtp_head_with_synthetic_acceptance(
    preset: str, acceptance: float, tmp_path: Path
) -> None:
    """The head predicts from its embedding alone. Hidden states would only add noise."""
    sizes = {"vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 1}
    flags = [word for key, value in sizes.items() for word in ("--set", f"{key}={value}")]
    flags += ["--acceptance", str(acceptance), "--dtype", "float32"]
    if preset == "tiny-qwen3.5-moe":
        flags += ["--set", "common_experts=2"]
    out = write(preset, tmp_path / "model", *flags)
    tensors = read_tensors(out / "model.safetensors")
    matrices = {name: values.reshape(shape) for name, (_, shape, values) in tensors.items()}
    embedding, head = matrices["model.embed_tokens.weight"], matrices["lm_head.weight"]
    normed = embedding / np.sqrt((embedding**2).mean(1, keepdims=True))
    x = normed @ matrices["mtp.fc.weight"][:, :256].T
    config = json.loads((out / "config.json").read_text())
    pair = lay_out(config, 0, acceptance, 256)
    assert (embedding @ head.T).argmax(1).tolist() == pair.next_token.tolist()
    found = (x @ head.T).argmax(1) == pair.next_token
    differing = np.flatnonzero(found != pair.accepted)
    # With acceptance 0, the draft is right only after one token and others with its embedding.
    assert differing.size == 0 or (acceptance == 0 and len(set(pair.embed_rows[differing])) == 1)
    assert found.mean() == pytest.approx(acceptance, abs=0.05)
    # If the draft's first choice is wrong, its next three choices are wrong, too, but for chance.
    choices = np.argsort(-(x @ head.T), axis=1)[~pair.accepted, :4]
    assert (choices == pair.next_token[~pair.accepted, None]).any(1).sum() < 0.1 * len(found)
    assert not head[:, -1].any()
    if preset == "tiny-qwen3.5-moe":
        assert not head[:, -2].any()
        for module in ("model.layers.0.", "mtp.layers.0."):
            scores = normed @ matrices[f"{module}mlp.gate.weight"].T
            chosen = np.argsort(-scores, axis=1)[:, :4]
            overlap = [len({*a} & {*b}) for a, b in itertools.pairwise(chosen)]
            assert 2.0 < np.mean(overlap) < 2.6  # two common ones, and 4/14 of the two others


def test_flags_of_a_model_with_an_mtp_head(tmp_path: Path) -> None:
    out = tmp_path / "model"
    with pytest.raises(SystemExit, match=r"the draft of tiny-qwen3\.5 is its MTP head"):
        write("tiny-qwen3.5", out, "--acceptance", "0.5", "--draft-out", str(tmp_path / "draft"))
    with pytest.raises(SystemExit, match="--draft-quant is for the draft in --draft-out"):
        write("tiny-qwen3.5", out, "--acceptance", "0.5", "--draft-quant", "gptq")
    with pytest.raises(SystemExit, match="linear_num_value_heads is 0, but must be"):
        write("tiny-qwen3.5", out, "--set", "linear_num_value_heads=0")
    assert not out.exists()
