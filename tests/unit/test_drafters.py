"""Drafts of every format: recognised, fitted to their target, or refused with a sentence."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cpmcu import _extension, config
from cpmcu.config import ASSETS, EngineConfig, SpeculativeConfig, shipped_draft
from cpmcu.drafters import heads, registry
from cpmcu.drafters.frspec import keep_eos
from cpmcu.drafters.registry import DraftPlan, register_drafter, registered_drafters
from cpmcu.loading import draft as draft_loading
from cpmcu.loading.checkpoint import open_checkpoint
from cpmcu.loading.draft import LoadedDraft, open_draft
from cpmcu.loading.loader import load_model
from cpmcu.loading.tensors import TensorMeta
from cpmcu.models.common import BuildOptions
from cpmcu.models.registry import find_model
from cpmcu.models.rope import rope_from_config
from cpmcu.tokenizer import eos_ids
from tests.reference import fake_extension as fakes
from tests.reference.tiny_checkpoints import TinyCheckpoint, write_tiny
from tests.reference.tiny_drafts import KINDS, write_draft
from tests.reference.tiny_w4 import SIZES, quantise, write_w4

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
}
LAYER = {
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "post_attention_layernorm.weight",
}
FIRST = {f"draft.layers.0.{name}" for name in LAYER}
MINICPM = FIRST | {
    "draft.fc.weight",
    "draft.input_norm1.weight",
    "draft.input_norm2.weight",
    "draft.layers.0.input_layernorm.weight",
}
EAGLE3 = {f"draft.midlayer.{name}" for name in LAYER} | {
    "draft.fc.weight",
    "draft.midlayer.input_layernorm.weight",
    "draft.midlayer.hidden_norm.weight",
    "draft.norm.weight",
}
MODEL = {f"draft.model.layers.0.{name}" for name in LAYER} | {
    "draft.model.embed_tokens.weight",
    "draft.model.layers.0.input_layernorm.weight",
    "draft.model.norm.weight",
    "draft.lm_head.weight",
}
NAMES = {
    "eagle": FIRST | {"draft.fc.weight"},
    "eagle_bias": FIRST | {"draft.fc.weight", "draft.fc.bias"},
    "minicpm_eagle": MINICPM,
    "minicpm_eagle_hf": MINICPM,
    "eagle3": EAGLE3 | {"draft.lm_head.weight"},
    "eagle3_shared": EAGLE3,
    "model": MODEL,
}


@pytest.fixture
def target(tmp_path: Path) -> TinyCheckpoint:
    return write_tiny(tmp_path / "target", "minicpm", num_hidden_layers=3)


def opened(
    target: TinyCheckpoint, draft: Path | None, quantised_head: bool = False, **options: Any
) -> LoadedDraft:
    speculation = SpeculativeConfig(draft_model_path=draft and str(draft), **options)
    model = registry.TargetModel(
        target.config,
        target.fields(),
        eos_ids=(2,),
        quantised_head=quantised_head,
        checkpoint=open_checkpoint(target.directory),
    )
    loaded = open_draft(speculation, target.directory, model)
    assert loaded is not None
    return loaded


def engine_names(loaded: LoadedDraft) -> set[str]:
    assert loaded.files is not None and loaded.plan.fields is not None
    return {
        piece.name
        for name in loaded.files.tensors
        if name not in loaded.plan.ignored
        for piece in loaded.plan.names(name, loaded.plan.fields)
    }


def spec_of(loaded: LoadedDraft) -> Any:
    extension = SimpleNamespace(ModelSpec=SimpleNamespace, DrafterSpec=SimpleNamespace)
    return loaded.spec(extension, "float32")


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


# ---- specifications


def test_eagle_spec(target: TinyCheckpoint, tmp_path: Path) -> None:
    spec = spec_of(opened(target, write_draft(tmp_path / "d", "eagle", target).directory))
    assert (spec.method, spec.depth, spec.topk, spec.tree_size) == ("eagle", 4, 8, 32)
    fixed = spec_of(opened(target, tmp_path / "d", spec_auto=False))
    assert (fixed.depth, fixed.topk, fixed.tree_size) == (2, 10, 12)
    assert spec.window == 1024
    assert (spec.input_norms, spec.attention_norm, spec.fc_bias) == (False, False, False)
    model = spec.model
    assert model.num_hidden_layers == 1 and model.vocab_size == 203
    assert model.rope_inv_freq == list(target.fields().rope_inv_freq)
    assert model.embed_scale == 1.0
    assert model.logit_scale == 16 / 64
    assert model.residual_scale == 1.4 / math.sqrt(4)
    bias = write_draft(tmp_path / "b", "eagle_bias", target)
    assert spec_of(opened(target, bias.directory)).fc_bias


@pytest.mark.parametrize("kind", ["minicpm_eagle", "minicpm_eagle_hf"])
def test_minicpm_spec(
    target: TinyCheckpoint, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    draft = write_draft(tmp_path / "d", kind, target, mup_denominator=32).directory
    loaded = opened(target, draft, spec_num_iter=3, spec_topk_per_iter=4, spec_window_size=9)
    spec = spec_of(loaded)
    assert (spec.depth, spec.topk, spec.tree_size, spec.window) == (3, 4, 12, 9)
    assert spec.input_norms and spec.attention_norm
    assert spec.model.embed_scale == 12
    assert spec.model.residual_scale == pytest.approx(1.4 / math.sqrt(32))
    metas = {name: TensorMeta(name, "float32", ()) for name in NAMES[kind]}
    with caplog.at_level(logging.INFO), pytest.raises(ValueError, match="do not fit"):
        loaded.plan_load(metas, list(metas))  # of wrong shapes
    assert "embed_tokens.weight is not read: the target's is used" in caplog.text
    if kind == "minicpm_eagle_hf":
        assert "model.norm.weight is not read" in caplog.text
        assert "lm_head.weight is not read" in caplog.text


def test_llama_target_has_no_scales(tmp_path: Path) -> None:
    target = write_tiny(tmp_path / "target", "llama")
    spec = spec_of(opened(target, write_draft(tmp_path / "d", "eagle", target).directory))
    model = spec.model
    assert (model.residual_scale, model.embed_scale, model.logit_scale) == (1.0, 1.0, 1.0)


def test_eagle3_spec(target: TinyCheckpoint, tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "d", "eagle3", target)
    spec = spec_of(opened(target, draft.directory, use_eagle3=True))
    offsets = draft.weights["d2t"]
    assert spec.vocab_ids == [int(i + offset) for i, offset in enumerate(offsets)]
    assert spec.feature_layers == [2, 1, 0]  # 2, L / 2, L - 3
    assert spec.own_head and not spec.norm_output
    assert spec.model.residual_scale == 1.0
    assert spec.model.logit_scale == 1.0
    scales = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16}
    scaled = write_draft(tmp_path / "m", "eagle3", target, **scales)
    spec = spec_of(opened(target, scaled.directory))
    assert spec.model.logit_scale == 16 / 64
    assert spec.model.residual_scale == 1.4 / math.sqrt(4)
    layers = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
    shared = write_draft(tmp_path / "s", "eagle3_shared", target, **layers)
    spec = spec_of(opened(target, shared.directory))
    assert spec.feature_layers == [0, 1, 2] and spec.vocab_ids == []
    assert spec.norm_output and not spec.own_head


def test_norm_output_is_read_where_the_other_flags_are(
    target: TinyCheckpoint, tmp_path: Path
) -> None:
    def norm_output(**change: Any) -> Any:
        draft = write_draft(tmp_path / "d", "eagle3", target, **change)
        return spec_of(opened(target, draft.directory)).norm_output

    assert norm_output(eagle_config={"norm_output": True})
    assert not norm_output(eagle_config={"norm_output": False})
    assert norm_output(norm_output=True, eagle_config={})


def test_rope_of_another_head_dim(tmp_path: Path) -> None:
    """It is the target's, of which the original length may be at the top of config.json.

    So it is if the head states none of its own.
    """
    scaling = {"rope_type": "yarn", "factor": 4.0}
    target = write_tiny(
        *(tmp_path / "target", "llama"),
        num_hidden_layers=3,
        rope_scaling=scaling,
        original_max_position_embeddings=128,
    )
    own = {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    own |= {"rope_theta": None, "rope_scaling": None}
    draft = write_draft(
        *(tmp_path / "d", "eagle", target), **own, original_max_position_embeddings=64
    )
    fields = opened(target, draft.directory).plan.fields
    assert fields is not None
    expected = rope_from_config(target.config, 32, 512)
    assert fields.rope_inv_freq == tuple(expected.inv_freq.tolist())


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_copies_of_the_target(
    tmp_path: Path, stored: str, tied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The target's tables are used, and another one is told of; rounding is no difference."""
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
        return f"{next(iter(extra))} of the draft has other numbers" in caplog.text

    for dtype in ("float32", "float16", "bfloat16"):
        assert not told("eagle", dtype, {"lm_head.weight": head})
        assert not told("eagle3_shared", dtype, {"model.embed_tokens.weight": table})
        assert told("eagle", dtype, {"lm_head.weight": 1.05 * head})
        for kind in ("eagle", "eagle3_shared"):
            assert told(kind, dtype, {"embed_tokens.weight": 1.05 * table})


@pytest.mark.parametrize(
    ("nested", "ids", "inputs"),
    [
        (True, [1, 3, 5], [2, 4, 6]),
        (False, [1, 3, 5], [1, 3, 5]),
        (True, [2, 4, 6], [2, 4, 6]),
        (True, [1, 3, 4], [1, 3, 4]),
        (True, [5, 3, 1], [5, 3, 1]),
    ],
)
def test_features_that_are_given_as_outputs(
    tmp_path: Path,
    nested: bool,
    ids: list[int],
    inputs: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = write_tiny(tmp_path / "t", "llama", num_hidden_layers=9)
    stated: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": ids}
    stated = {"eagle_config": stated} if nested else stated
    draft = write_draft(tmp_path / "d", "eagle3", target, **stated)
    with caplog.at_level(logging.INFO):
        assert spec_of(opened(target, draft.directory)).feature_layers == inputs
    said = "taken as outputs of layers: inputs of [2, 4, 6]" in caplog.text
    assert said == (ids != inputs)


YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LENGTH, ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"


def rope_of(target: TinyCheckpoint, draft: Path, **options: Any) -> tuple[tuple[float, ...], float]:
    fields = opened(target, draft, **options).plan.fields
    assert fields is not None
    return fields.rope_inv_freq, fields.rope_attention_scaling


@pytest.mark.parametrize("kind", ["eagle", "minicpm_eagle_hf", "eagle3"])
@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"rope_theta": 500000.0}, {}),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, {}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}, {}),
        ({"rope_scaling": YARN | {ORIGINAL: 64}}, {}),
        ({"rope_scaling": YARN, ORIGINAL: 64}, {}),
        ({"rope_scaling": YARN, LENGTH: 256}, {ORIGINAL: 100}),
        ({"rope_scaling": LLAMA3}, {ORIGINAL: 100}),
    ],
)
def test_rope_of_a_head_that_states_it(
    tmp_path: Path, kind: str, stated: dict[str, Any], expected: dict[str, Any]
) -> None:
    """It is the head's own, with the target's lengths where it states none."""
    scaling = {"rope_type": "linear", "factor": 2.0}
    target = write_tiny(
        *(tmp_path / "target", "minicpm"),
        num_hidden_layers=3,
        rope_theta=20000.0,
        rope_scaling=scaling,
        original_max_position_embeddings=100,
    )
    unstated = {"rope_theta": None, "rope_scaling": None, LENGTH: None, ORIGINAL: None}
    draft = write_draft(tmp_path / "d", kind, target, **unstated | stated)
    rope = rope_from_config({LENGTH: 512, **stated, **expected}, 16, 512)
    found = rope_of(target, draft.directory)
    assert found == (tuple(rope.inv_freq.tolist()), rope.attention_scaling)
    assert found[0] != target.fields().rope_inv_freq


@pytest.mark.parametrize(
    ("kind", "family", "layer", "theta"),
    [
        ("eagle", "llama", "", 20000.0),
        ("minicpm_eagle", "minicpm", "", 20000.0),
        ("eagle3", "llama", "midlayer.", 10000.0),
        ("eagle3", "minicpm", "midlayer.", 20000.0),
        ("eagle3", "minicpm", "layers.0.", 10000.0),
    ],
)
def test_rope_of_a_head_that_states_none(
    tmp_path: Path, kind: str, family: str, layer: str, theta: float
) -> None:
    target = write_tiny(tmp_path / "t", family, num_hidden_layers=3, rope_theta=20000.0)
    draft = write_draft(tmp_path / "d", kind, target, rope_theta=None, rope_scaling=None)
    renamed = {k.replace("midlayer.", layer): v for k, v in draft.weights.items()}
    draft = write_draft(
        *(tmp_path / "d", kind, target),
        drop=tuple(draft.weights),
        extra=renamed,
        rope_theta=None,
        rope_scaling=None,
    )
    rope = rope_from_config({"rope_theta": theta}, 16, 512)
    assert rope_of(target, draft.directory) == (tuple(rope.inv_freq.tolist()), 1.0)


def test_rope_that_is_stated_as_the_target_states_it(tmp_path: Path) -> None:
    """What options make of the target's is the head's too."""
    target = write_tiny(tmp_path / "t", "minicpm", head_dim=128)
    draft = write_draft(tmp_path / "d", "minicpm_eagle_hf", target)
    options = BuildOptions(minicpm4_yarn=True)
    fields = find_model(target.config).build(target.config, options)
    speculation = SpeculativeConfig(draft_model_path=str(draft.directory))
    model = registry.TargetModel(target.config, fields)
    loaded = open_draft(speculation, target.directory, model)
    assert loaded is not None and loaded.plan.fields is not None
    assert loaded.plan.fields.rope_inv_freq == fields.rope_inv_freq
    assert fields.rope_inv_freq != target.fields().rope_inv_freq


def test_rows_that_a_remap_chose(target: TinyCheckpoint, tmp_path: Path) -> None:
    """They are rows of the target's lm_head, which FR-Spec takes from there."""
    rows = {"token_id_remap": np.arange(7), "lm_head.weight": np.ones((7, 64))}
    loaded = opened(
        target, write_draft(tmp_path / "d", "minicpm_eagle", target, extra=rows).directory
    )
    assert loaded.plan.shares_head and engine_names(loaded) == MINICPM


def test_only_some_rows_are_read(
    target: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "COMPARED_ROWS", 1)
    table = np.array(target.weights["model.embed_tokens.weight"])
    table[:101], table[102:] = 0, 0
    draft = write_draft(tmp_path / "d", "eagle", target, extra={"embed_tokens.weight": table})
    opened(target, draft.directory)


def test_a_prefix_of_d2t(target: TinyCheckpoint, tmp_path: Path) -> None:
    rows = {"model.d2t": np.arange(50), "model.lm_head.weight": np.ones((50, 64))}
    draft = write_draft(tmp_path / "d", "eagle", target, extra=rows)
    loaded = opened(target, draft.directory)
    spec = spec_of(loaded)
    assert spec.own_head and spec.vocab_ids == list(range(0, 100, 2))
    assert engine_names(loaded) == NAMES["eagle"] | {"draft.lm_head.weight"}


def test_eagle3_layer_names(target: TinyCheckpoint, tmp_path: Path) -> None:
    """Some trainers call the layer `model.layers.0`."""
    draft = write_draft(tmp_path / "d", "eagle3", target)
    renamed = {
        name.replace("midlayer.", "model.layers.0."): array for name, array in draft.weights.items()
    }
    other = write_draft(tmp_path / "o", "eagle3", target, drop=tuple(draft.weights), extra=renamed)
    assert engine_names(opened(target, other.directory)) == NAMES["eagle3"]


def test_model_and_ngram_specs(target: TinyCheckpoint, tmp_path: Path) -> None:
    spec = spec_of(opened(target, write_draft(tmp_path / "d", "model", target).directory))
    assert spec.method == "model" and spec.window == 0
    assert spec.model.residual_scale == 1.4
    spec = spec_of(opened(target, None, method="ngram", spec_num_iter=6, prompt_lookup_max=3))
    assert (spec.depth, spec.topk, spec.tree_size) == (6, 1, 7)
    assert (spec.min_ngram, spec.max_ngram) == (1, 3)
    assert not hasattr(spec, "model")
    named = opened(target, tmp_path / "d", method="draft_model")
    assert named.method == "model"


def test_a_tokenizer_of_another_vocabulary(
    target: TinyCheckpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    draft = write_draft(tmp_path / "d", "model", target).directory
    files = [directory / "tokenizer.json" for directory in (draft, target.directory)]

    def warned(of_draft: str | None, of_target: str | None) -> bool:
        for file, text in zip(files, (of_draft, of_target), strict=True):
            file.unlink(missing_ok=True)
            if text is not None:
                file.write_text(text, encoding="utf-8")
        caplog.clear()
        opened(target, draft)
        messages = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
        assert len(messages) <= 1
        assert all(str(file) in message for message in messages for file in files)
        return bool(messages)

    def made(vocabulary: dict[str, int], added: str = "<s>", **keys: Any) -> str:
        tokens = [{"id": 9, "content": added}]
        return json.dumps({"model": {"vocab": vocabulary, **keys}, "added_tokens": tokens})

    plain = made({"a": 0, "b": 1})
    assert not warned(plain, plain) and not warned(None, plain) and not warned(plain, None)
    assert not warned(plain, made({"b": 1, "a": 0}, merges=[]))
    assert warned(plain, made({"a": 1, "b": 0}))
    assert warned(plain, made({"a": 0, "b": 1}, added="<pad>"))
    assert warned(plain, "{") and warned("[]", plain)


def test_a_fused_head_is_split(target: TinyCheckpoint, tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "d", "eagle", target)
    parts = [f"layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    fused = np.concatenate([draft.weights[part] for part in parts])
    extra = {"layers.0.self_attn.qkv_proj.weight": fused}
    other = write_draft(tmp_path / "o", "eagle", target, drop=tuple(parts), extra=extra)
    assert engine_names(opened(target, other.directory)) == NAMES["eagle"]


# ---- which draft


def test_nothing_is_drafted_by_default(target: TinyCheckpoint, tmp_path: Path) -> None:
    model = registry.TargetModel(target.config, target.fields())

    def draft(**options: Any) -> LoadedDraft | None:
        return open_draft(SpeculativeConfig(**options), target.directory, model)

    assert draft() is None
    assert draft(no_speculation=True, draft_model_path="/nothing") is None
    with pytest.raises(ValueError, match="without a draft, expected draft_model_path too"):
        draft(frspec_vocab_size=10)
    with pytest.raises(FileNotFoundError, match="neither a directory"):
        draft(draft_model_path="/no/such/draft")


def test_the_shipped_draft(
    target: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = registry.TargetModel(target.config, target.fields())
    draft = write_draft(tmp_path / "d", "minicpm_eagle", target)
    found = {target.directory: draft.directory}
    monkeypatch.setattr(draft_loading, "shipped_draft", found.get)

    def drafted(**options: Any) -> LoadedDraft | None:
        return open_draft(SpeculativeConfig(**options), target.directory, model)

    shipped = drafted()
    assert shipped is not None and shipped.method == "eagle"
    assert (shipped.shape.depth, shipped.shape.topk, shipped.shape.tree_size) == (4, 8, 24)
    assert drafted(no_speculation=True) is None
    assert drafted(method="ngram").method == "ngram"  # type: ignore[union-attr]
    found.clear()
    assert drafted() is None


@pytest.mark.parametrize("suffix", ["", "-w4"])
def test_shipped_pairs(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found through links and relative paths, not by a name alone, and only if it is there."""
    target = ASSETS / f"tiny-python-minicpm{suffix}"
    draft = ASSETS / f"tiny-python-eagle2{suffix}"
    assert shipped_draft(target) == draft
    (tmp_path / "link").symlink_to(target)
    assert shipped_draft(tmp_path / "link") == draft
    monkeypatch.chdir(ASSETS)
    assert shipped_draft(Path(target.name)) == draft
    (tmp_path / target.name).mkdir()
    assert shipped_draft(tmp_path / target.name) is None
    assert shipped_draft(draft) is None
    monkeypatch.setattr(config, "ASSETS", tmp_path)
    assert shipped_draft(tmp_path / target.name) is None  # has no such draft


# ---- wrong pairs


def refused(target: TinyCheckpoint, draft: Path | None, **options: Any) -> str:
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        opened(target, draft, **options)
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("eagle", {"vocab_size": 99}, "vocab_size is 99, expected 203, the target's"),
        ("eagle", {"hidden_size": 32}, "hidden_size is 32, expected 64, the target's"),
        ("eagle", {"scale_emb": 1}, "scale_emb is 1, expected 12, the target's"),
        ("minicpm_eagle", {"dim_model_base": 32}, "dim_model_base is 32, expected 16"),
        ("minicpm_eagle_hf", {"scale_depth": 1.0}, "scale_depth is 1.0, expected 1.4"),
        ("minicpm_eagle", {"drop": ("input_norm2.weight",)}, "input_norm1.weight is there alone"),
        ("eagle3", {"hidden_size": 32}, "hidden_size is 32, expected 64"),
        ("eagle3", {"vocab_size": 99}, "vocab_size is 99, expected 203"),
        ("eagle3", {"norm_before_fc": True}, "variant with norm_before_fc is not supported yet"),
        ("eagle3", {"extra": {"fc_norm.weight": np.ones(64)}}, "variant with fc_norm is not"),
        ("eagle3", {"use_aux_norm": True}, "variant with use_aux_norm is not supported yet"),
        ("eagle3", {"mlp_bias": True}, "mlp_bias is True, expected false"),
        ("eagle", {"mlp_bias": True}, "mlp_bias is True, expected false"),
        ("eagle3", {"num_hidden_layers": 2}, "num_hidden_layers is 2, expected 1"),
        (
            "eagle3",
            {"eagle_aux_hidden_state_layer_ids": [0, 3]},
            r"is \[0, 3\], expected layers of the target, 0 to 2",
        ),
        (
            "eagle3",
            {"eagle_aux_hidden_state_layer_ids": [True, 1, 2]},
            r"is \[True, 1, 2\], expected layers of the target, 0 to 2",
        ),
        (
            "eagle3",
            {"eagle_aux_hidden_state_layer_ids": [0, 1]},
            r"fc.weight has shape \[64, 192\], expected 128 columns",
        ),
        ("eagle3", {"extra": {"d2t": np.full(101, 200)}}, "d2t leads to token ids 200 to 300"),
        ("eagle3", {"extra": {"d2t": -np.arange(101)}}, "d2t leads to some token ids twice"),
        ("eagle", {"extra": {"model.d2t": -np.arange(9)}}, "model.d2t leads to some token ids twi"),
        (
            "eagle3",
            {"draft_vocab_size": 77},
            "config.json: draft_vocab_size is 77, expected 101, the entries of d2t",
        ),
        (
            "eagle3",
            {"extra": {"d2t": np.zeros((101, 1), np.int64)}},
            r"d2t is int32 \[101, 1\]",
        ),
        ("eagle3", {"extra": {"d2t": np.zeros(101)}}, r"d2t is float32 \[101\], expected int32 or"),
        ("eagle3", {"drop": ("fc.weight",)}, "fc.weight is missing, expected the tensors of an"),
        ("eagle3", {"eagle_config": [1]}, r"eagle_config is \[1\], expected an object"),
        (
            "eagle3",
            {"eagle_config": {"norm_output": 1}},
            "config.json: eagle_config: norm_output is 1, expected true or false",
        ),
        ("eagle3", {"scale_emb": 99}, "scale_emb is 99, expected 12, the target's"),
        ("eagle3", {"scale_depth": 9.0}, "scale_depth is 9.0, expected 1.4, the target's"),
        ("eagle3_shared", {"dim_model_base": 64}, "dim_model_base is 64, expected 16"),
        ("eagle3", {"drop": ("d2t",)}, "the draft's vocabulary is 101, expected 203"),
        ("eagle3", {"extra": {"lm_head.weight": np.ones((7, 64))}}, "7 rows, expected 101"),
        (
            "eagle",
            {"extra": {"lm_head.weight": np.ones((7, 64))}},
            r"lm_head.weight has shape \[7, 64\], expected \[203, 64\], the target's",
        ),
        (
            "eagle3",
            {"extra": {"embed_tokens.weight": np.ones((203, 8))}},
            r"embed_tokens.weight has shape \[203, 8\], expected \[203, 64\], the target's",
        ),
        ("model", {"vocab_size": 99}, "vocab_size is 99, expected 203.*share the tokenizer"),
        ("model", {"architectures": ["Nothing"]}, "architecture 'Nothing' is not supported"),
        (
            "eagle",
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "says gptq, but no tensor ends in .qweight",
        ),
        ("eagle3", {"extra": {"lm_head.qweight": np.ones((8, 8), np.int32)}}, "to be dense"),
        ("eagle", {"drop": ("fc.weight",)}, "expected a draft of one of the kinds: eagle, eagle3"),
    ],
)
def test_wrong_pairs(
    target: TinyCheckpoint, tmp_path: Path, kind: str, change: dict[str, Any], message: str
) -> None:
    import re

    draft = write_draft(tmp_path / "d", kind, target, **change)
    found = refused(target, draft.directory)
    assert re.search(message, found), found
    assert str(draft.directory) in found


def test_wrong_kinds(target: TinyCheckpoint, tmp_path: Path) -> None:
    eagle = write_draft(tmp_path / "e", "eagle", target).directory
    eagle3 = write_draft(tmp_path / "3", "eagle3", target).directory
    assert "the draft is eagle, but eagle3 was asked for" in refused(target, eagle, use_eagle3=True)
    assert "the draft is eagle3, but eagle was" in refused(target, eagle3, method="eagle")
    assert "use_eagle3 is no" in refused(target, eagle3, use_eagle3=False)
    assert "method is 'medusa', expected auto or one of: eagle, eagle3, model, ngram" in refused(
        target, eagle, method="medusa"
    )
    assert "ngram has no weights" in refused(target, eagle, method="ngram")
    assert "eagle needs weights" in refused(target, None, method="eagle")
    (eagle / "config.json").unlink()
    assert "has no config.json" in refused(target, eagle)


def write_w4_draft(directory: Path, kind: str, target: TinyCheckpoint) -> Path:
    dense = write_draft(directory, kind, target)
    return write_w4(directory, dense.config, quantise(dense.weights), "gptq")


def test_a_target_that_stores_its_head_quantised(tmp_path: Path) -> None:
    """Drafts share it as it is, or have a head of their own."""
    target = write_tiny(tmp_path / "target", "llama", **SIZES | {"num_hidden_layers": 3})

    def head(kind: str, **options: Any) -> str:
        draft = write_w4_draft(tmp_path / kind, kind, target)
        overrides = spec_of(opened(target, draft, **options)).model.linear_overrides
        return str(overrides["draft.lm_head"])

    for kind in ("eagle", "eagle3_shared"):
        assert head(kind) == "w4_rtn"
        assert head(kind, quantised_head=True) == "dense"
        assert head(kind, quantised_head=True, draft_head_quant="none") == "dense"
    for kind in ("eagle3", "model"):
        assert head(kind, quantised_head=True) == "w4_rtn"
    draft = write_draft(tmp_path / "d", "eagle", target).directory
    np.save(tmp_path / "ids.npy", np.arange(20))
    rows = "stores lm_head quantised, of which no rows can be taken"
    for options, named in (
        ({"draft_head_quant": "w8"}, "draft_head_quant is 'w8'"),
        ({"draft_head_quant": "w4"}, "draft_head_quant is 'w4'"),
        ({"frspec_path": str(tmp_path / "ids.npy")}, "frspec_path or frspec_vocab_size is given"),
    ):
        found = refused(target, draft, quantised_head=True, **options)
        assert named in found and rows in found
        opened(target, draft, **options)
    few = write_draft(tmp_path / "few", "eagle3", target, drop=("lm_head.weight",)).directory
    found = refused(target, few, quantised_head=True)
    assert "the draft has d2t without an lm_head of its own" in found and rows in found
    opened(target, few)


# ---- FR-Spec


def frspec(target: TinyCheckpoint, draft: Path, path: Path | None = None, size: int = 0) -> Any:
    options = {"frspec_path": path and str(path), "frspec_vocab_size": size}
    options["spec_topk_per_iter"] = 3  # of which there are enough
    return spec_of(opened(target, draft, **options)).vocab_ids


def test_counts(target: TinyCheckpoint, tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "d", "eagle", target).directory
    counts = np.arange(203)[::-1].copy()
    np.save(draft / "token_counts.npy", counts)
    assert frspec(target, draft, size=5) == [0, 1, 2, 3, 4]
    np.save(draft / "token_counts.npy", np.arange(203))
    assert frspec(target, draft, size=5) == [202, 201, 200, 199, 2]  # eos for the least frequent
    np.save(draft / "token_counts.npy", np.arange(190))  # the model's vocabulary is padded
    assert frspec(target, draft, size=3) == [189, 188, 2]
    assert "must be 1 to 203" in refused(target, draft, frspec_path=str(draft / "token_counts.npy"))
    np.save(tmp_path / "ids.npy", np.array([9, 2, 7]))
    assert frspec(target, draft, tmp_path / "ids.npy") == [9, 2, 7]
    assert frspec(target, draft, tmp_path / "ids.npy", 3) == [9, 2, 7]


def test_torch_index(target: TinyCheckpoint, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    draft = write_draft(tmp_path / "d", "eagle3_shared", target).directory
    torch.save([5, 2, 8, 1], draft / "freq_4.pt")
    assert frspec(target, draft, size=4) == [5, 2, 8, 1]
    assert frspec(target, draft, draft) == [5, 2, 8, 1]
    assert frspec(target, draft, draft / "freq_4.pt", 4) == [5, 2, 8, 1]
    torch.save({"a": object}, draft / "freq_7.pt")
    torch.save([1.5], draft / "freq_8.pt")
    torch.save([2**70], draft / "freq_6.pt")
    torch.save([5, 2], draft / "freq_5.pt", _use_new_zipfile_serialization=False)
    whole = (draft / "freq_5.pt").read_bytes()
    for length in range(len(whole) - 1):
        (draft / "freq_5.pt").write_bytes(whole[:length])
        assert "cannot read it as plain data" in refused(target, draft, frspec_vocab_size=5)
    assert "has ids beyond 64 bits" in refused(target, draft, frspec_vocab_size=6)
    assert "cannot read it as plain data" in refused(target, draft, frspec_vocab_size=7)
    assert "expected a list of token ids" in refused(target, draft, frspec_vocab_size=8)
    named = {"frspec_path": str(draft / "freq_4.pt"), "frspec_vocab_size": 3}
    assert "has 4 tokens, expected frspec_vocab_size 3" in refused(target, draft, **named)
    assert "freq_6.pt, freq_7.pt, freq_8.pt, expected exactly one" in refused(
        target, draft, frspec_path=str(draft)
    )


@pytest.mark.parametrize(
    ("options", "most"), [({}, 8), ({"spec_auto": False}, 10), ({"spec_topk_per_iter": 3}, 3)]
)
def test_fewer_tokens_than_a_level_takes(
    target: TinyCheckpoint, tmp_path: Path, options: dict[str, Any], most: int
) -> None:
    plain = write_draft(tmp_path / "plain", "eagle", target).directory
    for count in (most - 1, most):
        drafted = {"d2t": np.zeros(count, np.int64), "lm_head.weight": np.ones((count, 64))}
        few = write_draft(
            *(tmp_path / "few", "eagle3", target), extra=drafted, draft_vocab_size=count
        ).directory
        np.save(tmp_path / "ids.npy", np.arange(count))
        for draft, more in ((few, {}), (plain, {"frspec_path": str(tmp_path / "ids.npy")})):
            if count == most:
                assert opened(target, draft, **options, **more).shape.topk == most
            else:
                message = refused(target, draft, **options, **more)
                assert f"only {count} tokens are drafted, expected at least {most}" in message


def test_wrong_frspec(target: TinyCheckpoint, tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "d", "eagle", target).directory
    path = tmp_path / "ids.npy"

    def complaint(array: Any) -> str:
        np.save(path, array)
        return refused(target, draft, frspec_path=str(path))

    assert "has ids 2 to 203, expected some of 0 to 202" in complaint(np.array([2, 203]))
    assert "has ids twice" in complaint(np.array([2, 3, 3]))
    assert "has no ids" in complaint(np.zeros(0, np.int64))
    assert "expected a list of integers" in complaint(np.ones(4))
    with path.open("wb") as file:
        np.savez(file, np.arange(9))
    zipped = path.read_bytes()
    for content in (b"nothing", b"", zipped, zipped[:-9]):
        path.write_bytes(content)
        assert "is not a numpy file" in refused(target, draft, frspec_path=str(path))
    assert "has no freq_N.pt, expected freq_9.pt or token_counts.npy" in refused(
        target, draft, frspec_vocab_size=9
    )
    assert "neither a file nor a directory" in refused(target, draft, frspec_path="/no/such/file")


@pytest.mark.parametrize("kind", ["eagle3", "model"])
def test_frspec_needs_a_shared_head(target: TinyCheckpoint, tmp_path: Path, kind: str) -> None:
    draft = write_draft(tmp_path / "d", kind, target).directory
    assert "expected a head that shares the target's lm_head" in refused(
        target, draft, frspec_vocab_size=5
    )
    assert "this draft (ngram) does not" in refused(
        target, None, method="ngram", frspec_vocab_size=5
    )


def test_keep_eos() -> None:
    assert keep_eos([5, 6, 7], []) == [5, 6, 7]
    assert keep_eos([5, 2, 7], [2]) == [5, 2, 7]
    assert keep_eos([5, 6, 2], [3, 2]) == [5, 2, 3]
    assert keep_eos([5, 6, 7], [2, 3, 2]) == [5, 2, 3]
    assert eos_ids({"a": {"eos_token_id": [2, 9]}, "b": {"eos_token_id": 2}, "c": {}}) == (2, 9)


# ---- loading


class DraftingEngine(fakes.FakeEngine):
    """A FakeEngine that also wants the draft's tensors."""

    def __init__(self, spec: Any, config: Any, draft: Any = None) -> None:
        self.draft = draft
        super().__init__(spec, config)

    def expected_tensors(self) -> list[Any]:
        infos = super().expected_tensors()
        if self.draft is None:
            return infos
        whole = fakes.FakeEngine(self.draft.model, self.config).expected_tensors()
        for info in whole:
            info.name = "draft." + info.name
        return infos + whole


def load(
    target: TinyCheckpoint, draft: Path, monkeypatch: pytest.MonkeyPatch, **config: Any
) -> Any:
    extension = fakes.fake_extension()
    extension.Engine, extension.DrafterSpec = DraftingEngine, SimpleNamespace
    monkeypatch.setattr(_extension, "load", lambda: extension)
    speculation = SpeculativeConfig(draft_model_path=str(draft))
    config = {"device": "cpu", "speculative_config": speculation, **config}
    return load_model(str(target.directory), config=EngineConfig(**config))


def test_both_checkpoints_are_loaded(
    target: TinyCheckpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    draft = write_draft(tmp_path / "d", "model", target, dtype="float16")
    loaded = load(target, draft.directory, monkeypatch)
    engine: Any = loaded.engine
    assert engine.finished and loaded.draft.method == "model"
    names = {"draft." + name for name in draft.weights} | set(target.weights)
    assert set(engine.loaded) == names
    stored = engine.loaded["draft.lm_head.weight"][1]
    np.testing.assert_array_equal(stored, draft.weights["lm_head.weight"].astype(np.float16))
    assert "converting 12 tensors to float32 while loading: 12 from float16" in caplog.text


def test_a_damaged_draft_is_refused_before_anything_is_loaded(
    target: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[str] = []
    monkeypatch.setattr(DraftingEngine, "load_file", lambda self, path, *rest: loads.append(path))
    extra = {"model.norm.weight": np.ones(32, np.float32)}
    draft = write_draft(
        tmp_path / "d", "model", target, drop=("model.layers.0.mlp.up_proj.weight",), extra=extra
    )
    with pytest.raises(ValueError) as error:
        load(target, draft.directory, monkeypatch)
    message = str(error.value)
    assert message.startswith(str(draft.directory))
    assert "draft.model.norm.weight has shape [32], expected [64]" in message
    assert "missing that config.json asks for: draft.model.layers.0.mlp.up_proj.weight" in message
    assert loads == []


@pytest.mark.parametrize(
    ("kind", "name", "shape"),
    [
        ("eagle3", "fc.bias", (64,)),
        ("eagle3", "midlayer.self_attn.o_proj.bias", (64,)),
        ("eagle3", "midlayer.self_attn.k_proj.bias", (32,)),
        ("eagle3", "midlayer.self_attn.k_norm.weight", (16,)),
        ("eagle3", "midlayer.mlp.up_proj.bias", (96,)),
        ("eagle3", "input_norm.weight", (192,)),
        ("eagle3", "aux_norms.0.weight", (64,)),
        ("eagle3", "layers.1.mlp.up_proj.weight", (96, 64)),
        ("eagle", "layers.1.mlp.up_proj.weight", (96, 64)),
        ("minicpm_eagle_hf", "model.eagle_layers.0.self_attn.o_proj.bias", (64,)),
    ],
)
def test_tensors_that_a_head_does_not_have_here(
    target: TinyCheckpoint, tmp_path: Path, kind: str, name: str, shape: tuple[int, ...]
) -> None:
    plain = opened(target, write_draft(tmp_path / "p", kind, target).directory)
    assert plain.files is not None and plain.plan.fields is not None
    expected = {}
    for source, meta in plain.files.tensors.items():
        for piece in plain.plan.names(source, plain.plan.fields):
            expected[piece.name] = TensorMeta(piece.name, meta.dtype, meta.shape)

    def load(extra: dict[str, Any]) -> None:
        directory = write_draft(tmp_path / "d", kind, target, extra=extra).directory
        assert opened(target, directory).plan_load(expected, ()) is not None

    prefix = name.rpartition("self_attn.")[0] or "midlayer."
    load({f"{prefix}self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)})
    if name.endswith(".bias"):
        load({name: np.zeros(shape, np.float32)})
    with pytest.raises(ValueError) as error:
        load({name: np.ones(shape, np.float32)})
    message = str(error.value)
    assert message.startswith(f"{tmp_path / 'd'}: has {name} (not part of this model), expected")


# ---- the registry


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
