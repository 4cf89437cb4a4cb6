"""The MTP head as a draft: chosen by default, its specification, and refusals."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpmcu.config import SpeculativeConfig
from cpmcu.drafters import networks, registry
from cpmcu.loading.checkpoint import open_checkpoint
from cpmcu.loading.draft import open_draft
from cpmcu.loading.tensors import TensorMeta
from cpmcu.models.reader import language_config
from tests.reference.numpy_drafts import NumpyMtp, NumpyTarget
from tests.reference.tiny_checkpoints import TinyCheckpoint, write_tiny
from tests.reference.tiny_hybrid import EXPERTS, HYBRIDS
from tests.reference.tiny_w4 import write_hybrid_w4
from tests.unit.drafts import LAYER, engine_names, opened, refused, spec_of

NAMES = {f"draft.layers.0.{name}" for name in LAYER} | {
    "draft.fc.weight",
    "draft.input_norm1.weight",
    "draft.input_norm2.weight",
    "draft.norm.weight",
    "draft.layers.0.input_layernorm.weight",
    "draft.layers.0.self_attn.q_norm.weight",
    "draft.layers.0.self_attn.k_norm.weight",
}


@pytest.fixture(scope="module", params=HYBRIDS)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp(request.param)
    return write_tiny(directory, request.param, mtp_num_hidden_layers=1)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return write_tiny(tmp_path_factory.mktemp("q"), "qwen3_5", mtp_num_hidden_layers=1)


def without_mtp(tiny: TinyCheckpoint, directory: Path, dropped: str = "mtp.") -> TinyCheckpoint:
    """The same checkpoint without the tensors whose names begin with `dropped`."""
    weights = {name: w for name, w in tiny.weights.items() if not name.startswith(dropped)}
    return write_tiny(directory, "qwen3_5", weights=weights, mtp_num_hidden_layers=1)


def test_the_head_drafts_by_default(hybrid: TinyCheckpoint) -> None:
    loaded = opened(hybrid, None)
    assert (loaded.method, loaded.plan.window, loaded.files is not None) == ("mtp", None, True)
    assert (loaded.shape.depth, loaded.shape.topk, loaded.shape.tree_size) == (4, 8, 32)
    assert engine_names(loaded) == NAMES
    target = registry.TargetModel(hybrid.config, hybrid.fields())
    for options in ({"no_speculation": True}, {}):  # {}: no checkpoint, so no head
        assert open_draft(SpeculativeConfig(**options), hybrid.directory, target) is None
    assert opened(hybrid, None, method="ngram").method == "ngram"


@pytest.mark.parametrize("method", ["mtp", "qwen3_next_mtp"])
def test_spec_of_a_chain(hybrid: TinyCheckpoint, method: str) -> None:
    speculation = SpeculativeConfig.from_mapping({"method": method, "num_speculative_tokens": 3})
    target = registry.TargetModel(
        language_config(hybrid.config),
        hybrid.fields(),
        checkpoint=open_checkpoint(hybrid.directory),
    )
    loaded = open_draft(speculation, hybrid.directory, target)
    assert loaded is not None
    spec = spec_of(loaded)
    assert (spec.method, spec.depth, spec.tree_size) == ("mtp", 3, 4)
    assert spec.options == {"topk": 1}
    filled = dataclasses.replace(speculation, fill="ngram", num_model_steps=2)
    loaded = open_draft(filled, hybrid.directory, target)
    assert loaded is not None and engine_names(loaded) == NAMES
    spec = spec_of(loaded)
    assert (spec.method, spec.depth, spec.tree_size) == ("fill", 3, 4)
    assert spec.options == {"min_ngram": 1, "max_ngram": 16}
    (spec,) = spec.parts
    assert (spec.method, spec.depth, spec.tree_size) == ("mtp", 2, 3)
    assert spec.options == {"topk": 1}
    model, fields = spec.model, hybrid.fields()
    assert model.layers == [[("attention", {"output_gate": True}), ("mlp", {})]]
    assert model.num_hidden_layers == 1 and model.qk_norm and model.zero_centred_norms
    assert (model.vocab_size, model.hidden_size) == (203, 64) and not model.tie_word_embeddings
    assert model.rope_inv_freq == list(fields.rope_inv_freq)
    assert model.linear_overrides == {"draft.lm_head": "dense"}


def test_frspec_and_a_quantised_head(qwen: TinyCheckpoint, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(2, 60, 3))
    path = str(tmp_path / "ids.npy")
    spec = spec_of(opened(qwen, None, frspec_path=path, draft_head_quant="w4"))
    assert spec.vocab_ids == list(range(2, 60, 3))
    assert spec.model.linear_overrides == {"draft.lm_head": "w4_rtn"}


def read(directory: Path) -> TinyCheckpoint:
    """A checkpoint with the config of its file."""
    return TinyCheckpoint(directory, json.loads((directory / "config.json").read_text()), {})


@pytest.mark.parametrize("layout", ["gptq", "awq", "compressed"])
def test_a_dense_head_of_a_quantised_target(tmp_path: Path, layout: str) -> None:
    target = write_hybrid_w4(tmp_path, "qwen3_5", layout)
    config = read(target.directory).config
    model = registry.TargetModel(
        config, target.fields(), quantised=True, checkpoint=open_checkpoint(target.directory)
    )
    loaded = open_draft(SpeculativeConfig(), target.directory, model)
    assert loaded is not None and engine_names(loaded) == NAMES
    spec = spec_of(loaded)
    assert spec.model.linear_method == "dense"
    assert spec.model.linear_overrides == {"draft.lm_head": "w4_rtn"}


def test_layers_that_are_quantised_at_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    target = write_hybrid_w4(tmp_path, "qwen3_5", "gptq")
    checkpoint = open_checkpoint(target.directory)
    config = read(target.directory).config

    def methods(*, quantised: bool, **options: Any) -> tuple[str, str]:
        model = registry.TargetModel(
            config, target.fields(), quantised=quantised, checkpoint=checkpoint
        )
        loaded = open_draft(SpeculativeConfig(**options), target.directory, model)
        assert loaded is not None
        spec = spec_of(loaded).model
        return spec.linear_method, spec.linear_overrides["draft.lm_head"]

    assert methods(quantised=True) == ("dense", "w4_rtn")
    assert "rounded to 4 bits" not in caplog.text
    assert methods(quantised=False, draft_quant="w4") == ("w4_rtn", "w4_rtn")
    assert "(mtp): rounded to 4 bits; draft_quant none keeps 16 bits" in caplog.text
    named = {"draft_quant": "w4", "draft_head_quant": "none"}
    assert methods(quantised=True, **named) == ("w4_rtn", "dense")
    monkeypatch.setattr(networks, "WIDE", target.fields().hidden_size)
    assert methods(quantised=True) == ("w4_rtn", "w4_rtn")
    assert methods(quantised=True, draft_quant="none") == ("dense", "w4_rtn")
    assert methods(quantised=False) == ("dense", "dense")


def test_a_quantised_head(tmp_path: Path) -> None:
    target = write_hybrid_w4(tmp_path, "qwen3_5", "gptq", dense=("mtp.fc",))
    spec = spec_of(opened(read(target.directory), None))
    assert spec.model.linear_method == "packed"
    expected = {"draft.fc": "dense", "draft.lm_head": "w4_rtn"}
    assert spec.model.linear_overrides == expected


def test_an_export_without_the_head(
    qwen: TinyCheckpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = without_mtp(qwen, tmp_path / "target")
    model = registry.TargetModel(
        target.config, target.fields(), checkpoint=open_checkpoint(target.directory)
    )
    assert open_draft(SpeculativeConfig(), target.directory, model) is None
    said = (
        "no tensor's name begins with mtp., model.mtp_layers. or model.layers.4., "
        "expected the MTP head"
    )
    assert len(caplog.records) == 1 and f"nothing is drafted: {said}" in caplog.text
    assert said in refused(target, None, method="mtp")
    own = opened(target, qwen.directory, method="mtp")  # the head of another export
    assert own.files is not None and own.files.directory == qwen.directory
    assert engine_names(own) == NAMES


def test_heads_that_do_not_fit(
    qwen: TinyCheckpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    part = without_mtp(qwen, tmp_path / "part", "mtp.layers.0.mlp.up_proj")
    assert "no mtp.layers.0.mlp.up_proj, expected one layer" in refused(part, None, method="mtp")
    more = qwen.weights | {"mtp.layers.0.mlp.experts.0.up_proj.weight": np.ones((8, 8))}
    sparse = write_tiny(tmp_path / "m", "qwen3_5", weights=more, mtp_num_hidden_layers=1)
    message = refused(sparse, None, method="mtp")
    assert "the MTP head has no mtp.layers.0.mlp.gate, " in message
    experts = write_tiny(tmp_path / "x", "qwen3_5", mtp_num_hidden_layers=1, **EXPERTS)
    message = refused(qwen, experts.directory, method="mtp")
    assert "the MTP head has experts, expected a target that has experts, too" in message
    own = write_tiny(
        tmp_path / "e",
        "qwen3_5",
        weights=qwen.weights,
        mtp_num_hidden_layers=1,
        mtp_use_dedicated_embeddings=True,
    )
    assert "mtp_use_dedicated_embeddings is True" in refused(own, None, method="mtp")
    assert "spec_window_size is 9" in refused(qwen, None, method="mtp", spec_window_size=9)
    llama = write_tiny(tmp_path / "l", "llama")
    assert "no tensor's name begins with mtp." in refused(llama, None, method="mtp")
    message = refused(llama, qwen.directory, method="mtp")
    assert "expected a target with the layers of Qwen3-Next or Qwen3.5" in message
    assert not caplog.records


def test_a_hybrid_is_no_draft_model_yet(hybrid: TinyCheckpoint) -> None:
    message = refused(hybrid, hybrid.directory)
    assert "the draft has gated delta nets, expected a draft of attention layers" in message


def test_shapes_are_checked_while_loading(qwen: TinyCheckpoint) -> None:
    loaded = opened(qwen, None, method="mtp")
    metas = {name: TensorMeta(name, "float32", qwen.weights[_stored(name)].shape) for name in NAMES}
    plan = loaded.plan_load(metas, NAMES)
    assert plan is not None and plan.unused == {}
    metas["draft.fc.weight"] = TensorMeta("draft.fc.weight", "float32", (64, 64))
    with pytest.raises(ValueError, match=r"draft.fc.weight has shape \[64, 128\], expected"):
        loaded.plan_load(metas, NAMES)


def _stored(name: str) -> str:
    short = name.removeprefix("draft.")
    short = short.replace("input_norm1", "pre_fc_norm_embedding")
    return "mtp." + short.replace("input_norm2", "pre_fc_norm_hidden")


def test_the_numpy_head_is_a_layer_of_transformers(qwen: TinyCheckpoint) -> None:
    """The head is fc and a Qwen3.5 of one attention layer, which begins at embeddings."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    keys = {k: v for k, v in qwen.config.items() if k not in ("model_type", "torch_dtype")}
    keys |= {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    config = transformers.Qwen3_5TextConfig(**keys, attn_implementation="eager")
    model = transformers.AutoModel.from_config(config).float().eval()
    state = {
        name.removeprefix("mtp."): torch.from_numpy(weight)
        for name, weight in qwen.weights.items()
        if name.startswith(("mtp.layers.", "mtp.norm."))
    }
    state["embed_tokens.weight"] = torch.from_numpy(qwen.weights["model.embed_tokens.weight"])
    model.load_state_dict(state, strict=True)

    head = NumpyMtp(
        NumpyTarget(qwen.fields(), {n: w for n, w in qwen.weights.items() if n[:4] != "mtp."}),
        {name: w for name, w in qwen.weights.items() if name.startswith("mtp.")},
        head_dim=16,
    )
    rng = np.random.default_rng(0)
    states, ids = rng.standard_normal((70, 64)).astype(np.float32), rng.integers(0, 203, 70)
    _, first = head.prefill(states[:40], ids[:40].tolist())
    _, second = head.extend(states[40:69], ids[40:69].tolist())
    _, last = head.step(states[69], int(ids[69]))
    found = np.concatenate([first, second, last[None]])

    def norm(x: Any, name: str) -> Any:
        weight = qwen.weights[f"mtp.{name}.weight"]
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * (1 + weight)

    embedding = norm(qwen.weights["model.embed_tokens.weight"][ids], "pre_fc_norm_embedding")
    both = np.concatenate([embedding, norm(states, "pre_fc_norm_hidden")], -1)
    x = torch.from_numpy(both @ qwen.weights["mtp.fc.weight"].T)
    with torch.no_grad():
        expected = model(inputs_embeds=x[None]).last_hidden_state[0].numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
