"""Drafts that do not fit their target are refused with one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpmcu.loading.tensors import TensorMeta
from tests.reference.tiny_checkpoints import TinyCheckpoint, write_tiny
from tests.reference.tiny_drafts import write_draft
from tests.reference.tiny_w4 import SIZES
from tests.unit.drafts import opened, refused, spec_of, write_w4_draft


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("eagle", {"vocab_size": 99}, "vocab_size is 99, expected 203, the target's"),
        ("eagle", {"hidden_size": 32}, "hidden_size is 32, expected 64, the target's"),
        ("eagle", {"scale_emb": 1}, "scale_emb is 1, expected 12, the target's"),
        ("eagle", {"embedding_multiplier": 12}, "embedding_multiplier is 12, expected 1: which"),
        ("minicpm_eagle", {"dim_model_base": 32}, "dim_model_base is 32, expected 16"),
        ("minicpm_eagle_hf", {"scale_depth": 1.0}, "scale_depth is 1.0, expected 1.4"),
        ("minicpm_eagle", {"drop": ("input_norm2.weight",)}, "input_norm1.weight is present alone"),
        ("eagle3", {"hidden_size": 32}, "hidden_size is 32, expected 64"),
        ("eagle3", {"vocab_size": 99}, "vocab_size is 99, expected 203"),
        (
            "eagle3",
            {"norm_before_fc": True},
            "norm_before_fc is true, .* input_norm.weight",
        ),
        ("eagle3", {"fc_norm": True}, "fc_norm is true, expected the tensor fc_norm.0.weight, too"),
        ("eagle3", {"use_aux_norm": True}, "fc_norm is true, expected the tensor fc_norm.0.weight"),
        ("eagle3", {"mlp_bias": True}, "mlp_bias is True, expected false"),
        ("eagle", {"mlp_bias": True}, "mlp_bias is True, expected false"),
        (
            "eagle",
            {"extra": {"rms_norm_rotation.weight": np.eye(64), "embed_tokens.weight": np.eye(64)}},
            "rms_norm_rotation.weight is present: .* rotated weights, expected a head of a model",
        ),
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
        (
            "eagle",
            {"drop": ("fc.weight",)},
            "expected a draft of one of the kinds: dflash, dflash2, domino, dspark, eagle",
        ),
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
    assert "the draft is eagle, expected eagle3" in refused(target, eagle, use_eagle3=True)
    assert "the draft is eagle3, expected eagle" in refused(target, eagle3, method="eagle")
    assert "use_eagle3 is no" in refused(target, eagle3, use_eagle3=False)
    message = refused(target, eagle, method="medusa")
    assert "method is 'medusa', expected auto or one of: " in message
    assert "eagle, eagle3, gemma4_assistant, hierarchical," in message
    message = refused(target, eagle, method="ngrm")
    assert "method is 'ngrm' (did you mean ngram?), expected auto or" in message
    assert "ngram has no weights" in refused(target, eagle, method="ngram")
    assert "eagle needs weights" in refused(target, None, method="eagle")
    (eagle / "config.json").unlink()
    assert "has no config.json" in refused(target, eagle)


def test_layers_that_the_files_quantise(tmp_path: Path) -> None:
    target = write_tiny(tmp_path / "target", "llama", **SIZES | {"num_hidden_layers": 3})
    draft = write_w4_draft(tmp_path / "draft", "eagle", target)
    message = refused(target, draft, draft_quant="w4")
    assert (
        "draft_quant is 'w4', but the draft's files store its layers as gptq, expected" in message
    )


def test_a_target_that_stores_its_head_quantised(tmp_path: Path) -> None:
    """A draft uses the quantised head unchanged, or has its own head."""
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
def test_unknown_tensors_of_a_head(
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
