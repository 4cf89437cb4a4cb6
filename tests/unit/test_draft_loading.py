"""The default draft, and loading of target and draft."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cpmcu import _extension, shipped
from cpmcu.config import EngineConfig, SpeculativeConfig
from cpmcu.drafters import finding, registry
from cpmcu.loading.draft import LoadedDraft, open_draft
from cpmcu.loading.loader import load_model
from cpmcu.shipped import ASSETS, shipped_draft
from tests.reference import fake_extension as fakes
from tests.reference.tiny_checkpoints import TinyCheckpoint
from tests.reference.tiny_drafts import write_draft


def test_nothing_is_drafted_by_default(
    target: TinyCheckpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = registry.TargetModel(target.config, target.fields())

    def draft(**options: Any) -> LoadedDraft | None:
        return open_draft(SpeculativeConfig(**options), target.directory, model)

    assert draft() is None
    assert draft(no_speculation=True, draft_model_path="/nothing") is None
    assert draft(frspec_vocab_size=10) is None
    assert "frspec_vocab_size has no effect: no draft is given" in caplog.text
    with pytest.raises(FileNotFoundError, match="neither a directory"):
        draft(draft_model_path="/no/such/draft")


def test_the_shipped_draft(
    target: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = registry.TargetModel(target.config, target.fields())
    draft = write_draft(tmp_path / "d", "minicpm_eagle", target)
    found = {target.directory: draft.directory}
    monkeypatch.setattr(
        finding,
        "shipped_draft",
        lambda path, kind: found.get(path) if kind == "auto" else None,
    )

    def drafted(**options: Any) -> LoadedDraft | None:
        return open_draft(SpeculativeConfig(**options), target.directory, model)

    shipped = drafted()
    assert shipped is not None and shipped.method == "eagle"
    assert (shipped.shape.depth, shipped.shape.topk, shipped.shape.tree_size) == (4, 8, 24)
    assert drafted(no_speculation=True) is None
    assert drafted(method="ngram").method == "ngram"  # type: ignore[union-attr]
    found.clear()
    assert drafted() is None
    assert drafted(verify_strategy="topp", no_speculation=True) is None
    with pytest.raises(ValueError, match="verify_strategy is 'greedy', but there is no draft"):
        drafted(verify_strategy="greedy")


@pytest.mark.parametrize("suffix", ["", "-w4"])
def test_shipped_pairs(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shipped pair is found through links and relative paths, not by name alone."""
    target = ASSETS / f"tiny-python-minicpm{suffix}"
    draft = ASSETS / f"tiny-python-eagle2{suffix}"
    assert shipped_draft(target) == shipped_draft(target, "eagle") == draft
    (tmp_path / "link").symlink_to(target)
    assert shipped_draft(tmp_path / "link") == draft
    monkeypatch.chdir(ASSETS)
    assert shipped_draft(Path(target.name)) == draft
    (tmp_path / target.name).mkdir()
    assert shipped_draft(tmp_path / target.name) is None
    assert shipped_draft(draft) is None
    monkeypatch.setattr(shipped, "ASSETS", tmp_path)
    assert shipped_draft(tmp_path / target.name) is None  # no shipped draft here


class DraftingEngine(fakes.FakeEngine):
    """A FakeEngine that also expects the draft's tensors."""

    draft_shapes = ((0, 1), (1, 2))

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


def test_rope_of_a_draft_if_memory_limits_the_length(
    target: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """longrope has other factors if the maximum length is at most the original length."""
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 128}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    draft = write_draft(tmp_path / "d", "model", target, rope_scaling=rope).directory
    long, short = (
        load(target, draft, monkeypatch, max_model_len=n).draft.model for n in (200, 100)
    )
    assert long.rope_inv_freq != short.rope_inv_freq
    monkeypatch.setattr(DraftingEngine, "planned_model_len", lambda spec, config, draft=None: 100)
    assert load(target, draft, monkeypatch).draft.model.rope_inv_freq == short.rope_inv_freq


def test_a_damaged_draft_is_refused_before_weights_are_loaded(
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


def test_options_of_a_draft_without_one(
    target: TinyCheckpoint, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"prompt_lookup_max": 3, "enable_multi_layers_mtp": False}
    model = registry.TargetModel(target.config, target.fields())
    assert open_draft(SpeculativeConfig(**options), target.directory, model) is None
    assert "prompt_lookup_max, enable_multi_layers_mtp has no effect: no draft" in caplog.text
