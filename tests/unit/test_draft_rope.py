"""RoPE of a draft: its own, or the target's if its config has no RoPE keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cpmcu.config import SpeculativeConfig
from cpmcu.drafters import registry
from cpmcu.loading.draft import open_draft
from cpmcu.models.common import BuildOptions
from cpmcu.models.registry import find_model
from cpmcu.models.rope import rope_from_config
from tests.reference.tiny_checkpoints import TinyCheckpoint, write_tiny
from tests.reference.tiny_drafts import write_draft
from tests.unit.drafts import opened


def test_rope_of_another_head_dim(tmp_path: Path) -> None:
    """The target's RoPE; its original length may be a top-level key of config.json.

    The same holds if the head's config has no RoPE keys.
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
def test_rope_of_a_head_with_rope_keys(
    tmp_path: Path, kind: str, stated: dict[str, Any], expected: dict[str, Any]
) -> None:
    """The head's own RoPE, with the target's lengths if the head has no length keys."""
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
def test_rope_of_a_head_without_rope_keys(
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


def test_rope_keys_equal_to_those_of_the_target(tmp_path: Path) -> None:
    """Options that change the target's RoPE also change the head's."""
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
