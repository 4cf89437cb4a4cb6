"""The DrafterSpec of a draft: options, layers of auxiliary hidden states, rows of the head."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpmcu.drafters import heads
from cpmcu.loading.tensors import TensorMeta
from tests.reference.tiny_checkpoints import TinyCheckpoint, write_tiny
from tests.reference.tiny_drafts import write_draft
from tests.unit.drafts import MINICPM, NAMES, engine_names, opened, spec_of


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
        loaded.plan_load(metas, list(metas))  # wrong shapes
    assert "embed_tokens.weight is not read: the target's tensor is used" in caplog.text
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
    assert spec.target_layers == [2, 1, 0]  # 2, L / 2, L - 3
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
    assert spec.target_layers == [0, 1, 2] and spec.vocab_ids == []
    assert spec.norm_output and not spec.own_head


def test_norm_output_may_be_in_eagle_config(target: TinyCheckpoint, tmp_path: Path) -> None:
    def norm_output(**change: Any) -> Any:
        draft = write_draft(tmp_path / "d", "eagle3", target, **change)
        return spec_of(opened(target, draft.directory)).norm_output

    assert norm_output(eagle_config={"norm_output": True})
    assert not norm_output(eagle_config={"norm_output": False})
    assert norm_output(norm_output=True, eagle_config={})


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
def test_aux_hidden_layers_given_as_outputs(
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
        assert spec_of(opened(target, draft.directory)).target_layers == inputs
    said = "taken as outputs of layers: inputs of [2, 4, 6]" in caplog.text
    assert said == (ids != inputs)


def test_rows_selected_by_a_remap(target: TinyCheckpoint, tmp_path: Path) -> None:
    """FR-Spec selects the rows of the target's lm_head that a remap names."""
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


def test_model_and_ngram_specs(target: TinyCheckpoint, tmp_path: Path) -> None:
    spec = spec_of(opened(target, write_draft(tmp_path / "d", "model", target).directory))
    assert spec.method == "model" and spec.window == 0
    assert spec.model.residual_scale == 1.4
    spec = spec_of(opened(target, None, method="ngram", spec_num_iter=6, prompt_lookup_max=3))
    assert (spec.depth, spec.tree_size) == (6, 7)
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
