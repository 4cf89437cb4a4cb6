"""Block drafters that would draft something else than their files say are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.blocks import HIDDEN, REDUCED, TREE, VOCAB, Case, load, tensor, write
from tests.reference.engines import extension_or_skip

extension_or_skip()

NO_IDS = {"dflash_config": {"target_layer_ids": None}}
GATE, RNN = (f"markov_head.{part}_proj.weight" for part in ("gate", "joint"))
REFUSED: dict[str, tuple[Case, str]] = {
    "no layers": (Case("dflash", NO_IDS), "target_layer_ids is missing"),
    "no layers of DSpark": (
        Case("dspark", {"target_layer_ids": None}),
        "target_layer_ids is missing",
    ),
    "the last layer": (
        Case("dflash", {"dflash_config": {"target_layer_ids": [0, 2]}}),
        r"target_layer_ids is \[0, 2\].*last layer",
    ),
    "no such layer": (
        Case("dflash", {"dflash_config": {"target_layer_ids": [0, 7]}}),
        r"target_layer_ids is \[0, 7\]",
    ),
    "no theta": (Case("jetspec", {"rope_theta": None}), "rope_theta is missing"),
    "a mask beyond the table": (
        Case("dflash", {"dflash_config": {"mask_token_id": VOCAB}}),
        f"mask_token_id is {VOCAB}, expected .* 0 to {VOCAB - 1}",
    ),
    "no mask": (
        Case("dflash2", {"dflash_config": {"mask_token_id": None}}),
        "mask_token_id is missing",
    ),
    "a projector": (Case("dflash", {"dflash_config": {"projector_type": "domino"}}), "(?i)domino"),
    "Domino, other corrected tokens": (
        Case("domino", {"dflash_config": {"pure_draft_prefix_len": 0}}),
        "pure_draft_prefix_len is 0, expected 1",
    ),
    "Domino, unknown rows": (
        Case("domino", {"dflash_config": {"shift_label": None}}),
        "shift_label is missing, expected true or false",
    ),
    "Domino, scaled logits": (
        Case("domino", {"output_multiplier": 0.5}),
        "output_multiplier is 0.5, expected 1 in a Domino head",
    ),
    "Domino, another size": (
        Case("domino", extra={"prefix_gru.weight_hh_l0": tensor(72, 32, seed=1)}),
        "gru_hidden_dim is 24, expected 32",
    ),
    "Domino, a state that no kernel reads": (
        Case("domino", {"dflash_config": {"gru_hidden_dim": 20}}),
        "a state of 20 and a projection of 16 values, expected multiples of 8",
    ),
    "an rnn Markov head of an odd rank": (
        Case("dspark", {"markov_head_type": "rnn", "markov_rank": 12}),
        "has rank 12, expected a multiple of 8, at most 1024",
    ),
    "Domino, reduced vocabulary": (Case("domino", {"draft_vocab_size": 5}), "d2t is present"),
    "attn_output_gate": (Case("dflash", {"attn_output_gate": True}), "attn_output_gate"),
    "XPress": (Case("dflash", {"architectures": ["DFlashQwen3XPressModel"]}), "XPress"),
    "LiLiCorr without its tensors": (
        Case("dflash", {"architectures": ["LiLiCorrDraftModel"]}),
        "the draft has LiLiCorr",
    ),
    "LiLiCorr by a flag without its tensors": (
        Case("dflash", {"dflash_config": {"lilicorr_enabled": True}}),
        "the draft has LiLiCorr",
    ),
    "LiLiCorr by a projector without its tensors": (
        Case("dflash", {"dflash_config": {"projector_type": "lilicorr"}}),
        "a projector of type 'lilicorr'",
    ),
    **{
        f"LiLiCorr without {key}": (
            Case("lilicorr", {"dflash_config": {f"lilicorr_{key}": None}}),
            f"lilicorr_{key} is missing, expected",
        )
        for key in ("vector_eps", "logit_scale")
    },
    **{
        f"LiLiCorr, {key} of {value!r}": (
            Case("lilicorr", {"dflash_config": {f"lilicorr_{key}": value}}),
            message,
        )
        for key, value, message in (
            ("candidate_topk", 32, "lilicorr_candidate_topk is 32, expected at most 16"),
            ("candidate_topk", 3, "lilicorr_candidate_topk is 3, expected a power of two"),
            ("num_heads", 3, "3 heads and 32 values, expected heads of a multiple of 8"),
            ("num_heads", 8, "8 heads and 32 values"),
            ("factor_dim", 12, "12 factors, expected multiples of 8"),
            ("mlp_ratio", 1.1, "MLPs of 35 values"),
            ("enabled", False, "lilicorr_enabled is False, expected true"),
            ("logit_scale", 0, "lilicorr_logit_scale is 0, expected a positive number"),
        )
    },
    "LiLiCorr, the root's row predicts": (
        Case("lilicorr", {"dflash_config": {"sample_from_anchor": True}}),
        "sample_from_anchor is True, expected false",
    ),
    "LiLiCorr, reduced vocabulary": (
        Case("lilicorr", {"draft_vocab_size": 5}),
        "d2t is present, expected a LiLiCorr head of the target's whole vocabulary",
    ),
    "LiLiCorr, quantised": (
        Case("lilicorr", extra={"lilicorr.context_proj.weight_scale": tensor(32, 4, seed=1)}),
        "context_proj.weight_scale is of a quantised matrix",
    ),
    "LiLiCorr, slots of another block": (
        Case("lilicorr", extra={"lilicorr.slot_embedding": tensor(1, 1, 6, 1, 32, seed=1)}),
        r"slot_embedding has shape \[1, 1, 6, 1, 32\], expected \[1, 1, 7, 1, ...\]",
    ),
    "LiLiCorr, ranks of other candidates": (
        Case("lilicorr", extra={"lilicorr.rank_embedding": tensor(1, 1, 1, 8, 32, seed=1)}),
        r"rank_embedding has shape \[1, 1, 1, 8, 32\], expected \[1, 1, 1, 4, ...\]",
    ),
    "LiLiCorr, distances of another block": (
        Case("lilicorr", extra={"lilicorr.relative_slot_bias": tensor(2, 13, seed=1)}),
        "relative_slot_bias",
    ),
    "LiLiCorr, a projection of equal widths": (
        Case(
            "lilicorr",
            {"dflash_config": {"lilicorr_hidden_size": 0}},
            extra={"lilicorr.token_proj.weight": tensor(HIDDEN, HIDDEN, seed=1)},
        ),
        "token_proj",
    ),
    "LiLiCorr, another tensor": (
        Case("lilicorr", extra={"lilicorr.layers.2.attn_norm.weight": tensor(32, seed=1)}),
        "layers.2.attn_norm",
    ),
    "Laguna": (Case("dflash", {"architectures": ["DFlashLagunaForCausalLM"]}), "Laguna"),
    "layers of Gemma 4": (
        Case("dspark", {"architectures": ["Gemma4DSparkModel"]}),
        "the layers of Gemma4DSpark",
    ),
    "layers of LFM2": (Case("dspark", {"architectures": ["Lfm2DSparkDraftModel"]}), "Lfm2DSpark"),
    "tensors of XPress": (
        Case("dflash", extra={"xpress_head.w1.weight": tensor(VOCAB, 4, seed=1)}),
        "XPress",
    ),
    "tensors of Laguna": (
        Case("dflash", extra={"aux_hidden_norms.0.weight": tensor(HIDDEN, seed=1)}),
        "Laguna",
    ),
    "a Markov head before a soft cap": (
        Case("dspark", {"final_logit_softcapping": 30.0}),
        "final_logit_softcapping is 30.0",
    ),
    "a Markov head and a scale": (
        Case("dspark", {"logit_scale": 0.5}),
        "logit_scale is 0.5, expected 1",
    ),
    "a cap that is no number": (
        Case("dflash", {"final_logit_softcapping": "30"}),
        "final_logit_softcapping is '30', expected a positive number",
    ),
    "an unknown Markov head": (Case("dspark", {"markov_head_type": "fir"}), "'fir'"),
    "an rnn Markov head of another rank": (
        Case("dspark", {"markov_head_type": "rnn"}, extra={RNN: tensor(48, 90, seed=4)}),
        "markov_head.joint_proj",
    ),
    "another embedding": (
        Case("dspark", extra={"embed_tokens.weight": tensor(VOCAB, HIDDEN, seed=2)}),
        "embed_tokens.weight differs from the target's",
    ),
    "an unknown tensor": (
        Case("dflash", extra={"layers.0.extra.weight": tensor(HIDDEN, seed=3)}),
        "layers.0.extra.weight",
    ),
    "another hidden size": (Case("dflash", {"hidden_size": 32}), "hidden_size is 32"),
    "another number of layers": (
        Case("dflash", {"num_target_layers": 4}),
        "num_target_layers is 4, expected 3",
    ),
    "a window smaller than a block": (
        Case("dflash", {"sliding_window": 7}),
        "window of 7 is smaller than block_size 8",
    ),
    "a large block": (Case("dflash", {"block_size": 18}), "block_size is 18, expected 2 to 17"),
    "a large block of DSpark": (Case("dspark", {"block_size": 17}), "block_size is 17"),
    "scaled values": (Case("dflash", {"attention_value_scale": 2.0}), "attention_value_scale is 2"),
    "interleaved RoPE": (Case("dflash", {"is_neox_style": False}), "is_neox_style is [Ff]alse"),
    "another rank": (
        Case("dspark", extra={"markov_head.markov_w1.weight": tensor(VOCAB, 8, seed=4)}),
        "markov_rank is 16, expected 8",
    ),
    "a convolution longer than a block": (
        Case("dflash2", {"dflash_config": {"conv_kernel_size": 9}}),
        "9 weights a channel",
    ),
    "groups that divide no row": (
        Case("dflash2", {"dflash_config": {"conv_group_size": 24}}, drop=("fc.weight",)),
        "groups of 24",
    ),
    "too many candidates": (
        Case("dflash2", {"dflash_config": {"selector_top_k": 40}}),
        "selector_top_k is 40",
    ),
    "more candidates than tokens": (
        Case("dflash2", {"dflash_config": {"selector_top_k": 8}}),
        "8",
    ),
    "d2t without a head": (
        Case("dspark", REDUCED, drop=("lm_head.weight",)),
        "d2t is present, expected lm_head.weight",
    ),
    "another target's width": (
        Case("dflash", {"target_hidden_size": 128}),
        "target_hidden_size is 128, expected 64",
    ),
    "another vocabulary": (Case("dflash", {"vocab_size": 8}), "vocab_size is 8, expected 7"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_one_sentence(name: str, tmp_path: Path) -> None:
    case, message = REFUSED[name]
    target, draft = write(tmp_path, case)
    with pytest.raises(ValueError, match=message) as error:
        load(target, draft.directory, TREE)
    assert "\n" not in str(error.value)


DROPPED = {
    "fc.weight": "dflash2",
    "hidden_norm.weight": "dspark",
    "norm.weight": "dflash",
    "layers.1.self_attn.k_norm.weight": "dflash",
    "layers.0.mlp_conv.base_kernel": "dflash2",
    "candidate_selector.successor_codebook": "dflash2",
    "markov_head.markov_w2.weight": "dspark",
    "prefix_gru.weight_ih_l0": "domino",
    "prefix_gru.weight_hh_l0": "domino",
    "embed_proj.2.weight": "domino",
    "lilicorr.token_proj.bias": "lilicorr",
    "lilicorr.layers.1.attn.in_proj_bias": "lilicorr",
    "lilicorr.rank_embedding": "lilicorr",
    "lilicorr.in_head.weight": "lilicorr",
    GATE: "dspark",
    RNN: "dspark",
}
KEYS = {GATE: {"markov_head_type": "gated"}, RNN: {"markov_head_type": "rnn"}}


@pytest.mark.parametrize("name", DROPPED)
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    target, draft = write(tmp_path, Case(DROPPED[name], KEYS.get(name, {}), drop=(name,)))
    with pytest.raises(ValueError, match=name.removesuffix(".weight")) as error:
        load(target, draft.directory, {"spec_num_iter": 4, "method": DROPPED[name]})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"spec_num_iter": 8}, "spec_num_iter.* is 8, expected at most 7"),
        ({"spec_num_iter": 1, "spec_tree_size": 18}, "spec_tree_size is 18"),
        ({"spec_window_size": 64}, "spec_window_size is 64"),
    ],
)
def test_impossible_shapes(given: dict[str, int], message: str, tmp_path: Path) -> None:
    target, draft = write(tmp_path, Case("dflash", target={"vocab_size": 60}))
    with pytest.raises(ValueError, match=message):
        load(target, draft.directory, {"method": "dflash", **given})
