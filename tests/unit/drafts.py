"""Opens drafts for a target and lists the engine's names of their tensors."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cpmcu.config import SpeculativeConfig
from cpmcu.drafters import registry
from cpmcu.loading.checkpoint import open_checkpoint
from cpmcu.loading.draft import LoadedDraft, open_draft
from tests.reference.tiny_checkpoints import TinyCheckpoint
from tests.reference.tiny_drafts import write_draft
from tests.reference.tiny_w4 import quantise, write_w4

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
    plan = loaded.with_files[0].plan
    assert plan.files is not None and plan.fields is not None
    return {
        piece.name
        for name in plan.files.tensors
        if name not in plan.ignored
        for piece in plan.names(name, plan.fields)
    }


def spec_of(loaded: LoadedDraft) -> Any:
    """The fields of a DrafterSpec, with its options as attributes."""
    extension = SimpleNamespace(ModelSpec=SimpleNamespace, DrafterSpec=SimpleNamespace)
    spec = loaded.spec(extension, "float32")
    return SimpleNamespace(**vars(spec), **spec.options)


def refused(target: TinyCheckpoint, draft: Path | None, **options: Any) -> str:
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        opened(target, draft, **options)
    message = str(error.value)
    assert "\n" not in message
    return message


def write_w4_draft(directory: Path, kind: str, target: TinyCheckpoint) -> Path:
    dense = write_draft(directory, kind, target)
    return write_w4(directory, dense.config, quantise(dense.weights), "gptq")
