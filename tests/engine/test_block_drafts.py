"""Block drafters (DFlash, JetSpec, DFlash2, DSpark, LiLiCorr) draft what numpy networks draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpmcu.config import SpeculativeConfig
from cpmcu.spec_metrics import AcceptanceCounter
from tests.engine.blocks import (
    HIDDEN,
    MASK,
    REDUCED,
    TREE,
    VOCAB,
    Case,
    Pair,
    load,
    speculators,
    tensor,
    text_of,
    write,
)
from tests.engine.drafted import SAMPLINGS, Drive, memory_full_of
from tests.engine.prefix import PAGE, Job, running
from tests.reference.block_draft import NumpyBlock
from tests.reference.engines import extension_or_skip
from tests.reference.tiny_blocks import BLOCKS, write_block
from tests.reference.tiny_checkpoints import write_tiny
from tests.reference.tiny_w4 import quantise, write_w4

extension_or_skip()

LENGTHS = (1, 2, 63, 64, 65, 130)
CHUNKS = (1, 7, 64)
CHAIN = {"spec_num_iter": 4, "spec_topk_per_iter": 1}

SINKS = {f"layers.{i}.self_attn.attention_sink_bias": tensor(4, seed=i) for i in range(2)}
CASES = {
    "DFlash": Case("dflash"),
    "DFlash, all layers causal": Case("dflash", {"is_causal": True}),
    "DFlash, no layer causal": Case("dflash", {"is_causal": False}),
    "DFlash, causal in the nested object": Case("dflash", {"dflash_config": {"causal": True}}),
    "DFlash, no kinds of layers": Case("dflash", {"layer_types": None, "sliding_window": None}),
    "DFlash, use_swa": Case(
        "dflash",
        {"layer_types": None, "dflash_config": {"use_swa": True, "swa_window_size": 12}},
    ),
    "DFlash, use_swa of full layers": Case(
        "dflash", {"layer_types": ["full_attention"] * 2, "dflash_config": {"use_swa": True}}
    ),
    "DFlash, windows of the last layers": Case(
        "dflash", {"layer_types": None, "use_sliding_window": True, "max_window_layers": 1}
    ),
    "DFlash, window of a block": Case("dflash", {"sliding_window": 8}),
    "DFlash, mask_embedding": Case("dflash", extra={"mask_embedding": tensor(HIDDEN, seed=5)}),
    "DFlash, scaled mask_embedding": Case(
        "dflash", {"input_embedding_scale": 3.0}, extra={"mask_embedding": tensor(HIDDEN, seed=5)}
    ),
    "DFlash, layers by their inputs": Case(
        "dflash",
        {
            "dflash_config": {"target_layer_ids": None},
            "eagle_aux_hidden_state_layer_ids": [2, 0],
        },
    ),
    "DFlash, biases": Case("dflash", {"attention_bias": True}),
    "DFlash, sinks": Case("dflash", extra=SINKS),
    "DFlash, norms around zero": Case("dflash", {"use_gemma_norm": True}),
    "DFlash, other layers of the target": Case(
        "dflash", {"dflash_config": {"target_layer_ids": [1, -1, 0]}}
    ),
    "DFlash, rope_parameters": Case(
        "dflash",
        {
            "rope_theta": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
        },
    ),
    "DFlash, rope_parameters before rope_theta": Case(
        "dflash", {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}
    ),
    "DFlash, RoPE of the target scaled": Case(
        "dflash", target={"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, family="llama"
    ),
    "DFlash, scaled RoPE": Case(
        "dflash", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, family="llama"
    ),
    "DFlash, scales": Case(
        "dflash",
        {
            "input_embedding_scale": 0.5,
            "output_multiplier": 0.7,
            "final_logit_softcapping": 3.0,
        },
    ),
    "DFlash, scaled target": Case("dflash", family="minicpm"),
    "DFlash, tied target": Case("dflash", target={"tie_word_embeddings": True}),
    "DFlash, other names": Case(
        "dflash",
        rename={
            "fc.": "encoder.fc.",
            "hidden_norm.": "encoder.output_norm_enc.",
        },
    ),
    "DFlash of speculators": Case("dflash", speculators(dflash_config=None)),
    "DFlash of speculators, reduced vocabulary": Case(
        "dflash", speculators(dflash_config=None, draft_vocab_size=5)
    ),
    "DFlash of speculators, the root's row predicts": Case(
        "dflash", speculators(dflash_config=None, sample_from_anchor=True)
    ),
    "DFlash of speculators, causal windows": Case(
        "dflash", speculators(dflash_config=None, sliding_window_non_causal=False)
    ),
    "JetSpec": Case("jetspec"),
    "DFlash2": Case("dflash2"),
    "DFlash2, three taps": Case(
        "dflash2",
        {"dflash_config": {"conv_kernel_size": 3, "selector_rank": 8, "selector_top_k": 6}},
        rename={"_codebook": "_codebook.weight"},
    ),
    "DFlash2, causal": Case("dflash2", {"is_causal": True, "layer_types": None}),
    "DSpark": Case("dspark"),
    "DSpark, gated": Case("dspark", {"markov_head_type": "gated"}),
    "DSpark, gated, reduced vocabulary": Case("dspark", {"markov_head_type": "gated", **REDUCED}),
    "DSpark, rnn": Case("dspark", {"markov_head_type": "rnn"}),
    "DSpark, rnn, reduced vocabulary": Case("dspark", {"markov_head_type": "rnn", **REDUCED}),
    "DSpark, rnn, rank 24": Case("dspark", {"markov_head_type": "rnn", "markov_rank": 24}),
    "DSpark, confidence without Markov": Case("dspark", {"confidence_head_with_markov": False}),
    "DSpark, scaled logits": Case("dspark", {"output_multiplier": 0.3}),
    "DSpark, the root's row does not predict": Case("dspark", {"dspark_bonus_anchor": True}),
    "DSpark, reduced vocabulary": Case("dspark", REDUCED),
    "DSpark of rank 0": Case("dspark", {"markov_rank": 0, "enable_confidence_head": False}),
    "DSpark of speculators": Case("dspark", speculators(**REDUCED)),
    "DSpark of speculators, the root's row predicts": Case(
        "dspark", speculators(sample_from_anchor=True)
    ),
    "DSpark, keys in dspark_config": Case(
        "dspark",
        {
            "target_layer_ids": None,
            "mask_token_id": 1,
            "dspark_config": {"target_layer_ids": [1, 0], "mask_token_id": MASK},
        },
    ),
    "DSpark, names with model.": Case(
        "dspark", rename={name: "model." + name for name in ("layers.", "fc.", "hidden_norm.")}
    ),
    "LiLiCorr": Case("lilicorr"),
    "LiLiCorr, convolutions": Case(
        "lilicorr", {"dflash_config": {"conv_kernel_size": 2, "conv_group_size": 8}}
    ),
    "LiLiCorr, as wide as the block": Case(
        "lilicorr", {"dflash_config": {"lilicorr_hidden_size": 0, "lilicorr_num_heads": 4}}
    ),
    "LiLiCorr, long vectors": Case(
        "lilicorr", {"dflash_config": {"lilicorr_vector_eps": 3.0, "lilicorr_mlp_ratio": 4}}
    ),
    "LiLiCorr, windows": Case(
        "lilicorr",
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 20},
        family="minicpm",
    ),
    "LiLiCorr, numbered MLPs": Case(
        "lilicorr",
        rename={
            "feature_norm.": "feature_mlp.0.",
            "feature_mlp.up_proj.": "feature_mlp.1.",
            "feature_mlp.down_proj.": "feature_mlp.3.",
            **{
                f"lilicorr.layers.{i}.mlp.{part}_proj.": f"lilicorr.layers.{i}.mlp.{place}."
                for i in range(2)
                for part, place in (("up", 0), ("down", 2))
            },
        },
    ),
}

KINDS = (*BLOCKS, "dspark rnn")


def case_of(kind: str, **fields: Any) -> Case:
    """The case of one of KINDS: a kind of draft, and its kind of Markov head."""
    name, _, markov = kind.partition(" ")
    return Case(name, {"markov_head_type": markov} if markov else {}, **fields)


@pytest.mark.parametrize("name", CASES)
def test_drafts_are_those_of_the_numpy_network(name: str, tmp_path: Path) -> None:
    """Trees and chains take turns. Tokens were accepted and rejected before. Prompts have
    chunks."""
    pair = Pair(tmp_path, CASES[name], TREE)
    shapes = [None, (4, 5), (3, 9), (1, 2), (2, 8)]
    seen: set[int] = set()
    for i, length in enumerate(LENGTHS):
        sampling = list(SAMPLINGS.values())[i % 2]
        each = pair.run(text_of(length), 10, CHUNKS[i % 3], shapes=shapes, **sampling)
        seen |= set(each.emitted)
    assert {1, 2} <= seen


@pytest.mark.parametrize("kind", BLOCKS)
def test_drafts_from_a_larger_vocabulary(kind: str, tmp_path: Path) -> None:
    """The vocabulary has more tokens than a position has candidates. A whole block is drafted."""
    sizes = {"vocab_size": 160}
    own: dict[str, Any] = {
        "dspark": {"draft_vocab_size": 72, "enable_confidence_head": False},
        "lilicorr": {"dflash_config": {"lilicorr_candidate_topk": 16}},
    }.get(kind, {})
    depth = 7
    pair = Pair(
        tmp_path, Case(kind, own, target=sizes), {"spec_num_iter": depth, "spec_tree_size": 30}
    )
    for length in LENGTHS[1::2]:
        each = pair.run(text_of(length, 160), 4, shapes=[None, (7, 8)])
        assert max(len(set(tokens)) for _, tokens, _, _ in each.drafts) > 7
        if kind == "dspark":  # some parents are not in the draft's vocabulary
            chosen = pair.draft.weights["d2t"] + np.arange(72)
            assert not {root for root, *_ in (tokens for _, tokens, _, _ in each.drafts)} <= set(
                chosen.tolist()
            )


@pytest.mark.parametrize("topk", [1, 2])
def test_few_candidates_of_a_lilicorr_head(topk: int, tmp_path: Path) -> None:
    """With one candidate, a draft is the chain of the likeliest tokens of all rows."""
    case = Case("lilicorr", {"dflash_config": {"lilicorr_candidate_topk": topk}})
    pair = Pair(tmp_path, case, {"spec_num_iter": 4, "spec_tree_size": 5 if topk == 1 else 12})
    for length in (1, 65):
        each = pair.run(text_of(length), 6, shapes=[None, (3, 4)])
        for (before, tokens, _, _), (lattice, _) in zip(each.drafts, pair.lattices(each)):
            assert lattice.tokens.shape[1] == topk
            if topk == 1:
                assert tokens[1:] == lattice.tokens[: len(tokens) - 1, 0].tolist(), before


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_in_bfloat16(kind: str, device: str, tmp_path: Path) -> None:
    """More than 80 % of the drafts hold the likeliest nodes, up to rounding."""
    sizes = {"hidden_size": 128, "head_dim": 64, "vocab_size": 40}
    pair = Pair(
        tmp_path,
        case_of(kind, target=sizes, dtype="bfloat16"),
        TREE,
        device=device,
        memory_limit=0.2,
    )
    right = []
    for length in LENGTHS:
        each = pair.start(text_of(length, 40), **SAMPLINGS["seeded"])
        for shape in (None, (4, 5), (3, 9), (4, 12)):
            pair.step([each], shape)
        pair.engine.release(each.slot)
        for lattice, draft in pair.lattices(each):
            try:
                lattice.check(*draft, margin=0.2)
                right.append(True)
            except AssertionError:
                right.append(False)
    assert np.mean(right) > 0.8, np.mean(right)


@pytest.mark.parametrize("shift", [-1, 1])
def test_other_layers_of_the_target_on_demand(shift: int, tmp_path: Path) -> None:
    case = Case("dflash", target={"num_hidden_layers": 4})
    pair = Pair(tmp_path, case, {**TREE, "spec_layer_shift": shift})
    assert pair.network.layers == [1, 2]
    pair.network.layers = [1 + shift, 2 + shift]
    pair.run(text_of(70), 8)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_the_number_of_candidates_is_an_option(kind: str, tmp_path: Path) -> None:
    shape = {"spec_num_iter": 4, "spec_topk_per_iter": 2, "spec_tree_size": 20, "method": kind}
    pair = Pair(tmp_path, Case(kind), shape)
    for length in (2, 65):
        pair.run(text_of(length), 8, topk=2)
    chain = Pair(tmp_path / "chain", CASES["DSpark"], CHAIN)
    each = chain.run(text_of(40), 8)
    assert all(parents == [-1, 0, 1, 2, 3] for _, _, parents, _ in each.drafts)


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("jetspec", "jetspec"),
        ("dflash2", "dflash"),
        ("dspark", "dspark"),
        ("lilicorr", "lilicorr"),
    ],
)
def test_keys_of_vllm_ask_for_a_chain(kind: str, method: str, tmp_path: Path) -> None:
    target, draft = write(tmp_path, Case(kind))
    keys = {"method": method, "model": str(draft.directory), "num_speculative_tokens": 5}
    speculation = SpeculativeConfig.from_mapping(keys)
    drive = Drive(load(target, None, {}, speculative_config=speculation))
    slot, _ = drive.start(text_of(20), max_tokens=9)
    assert drive.engine.reserve(slot, 40)
    ((tokens, parents),) = drive.engine.begin_masked([slot])
    assert parents == [-1, 0, 1, 2, 3, 4] and -1 not in tokens


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark", "dspark rnn", "lilicorr"])
def test_fr_spec_drafts_frequent_tokens(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "frequent.npy"
    np.save(path, np.arange(2, 100, 2))
    case = case_of(kind, target={"vocab_size": 100})
    pair = Pair(tmp_path, case, {**TREE, "frspec_path": str(path), "draft_head_quant": "none"})
    ids = np.arange(2, 100, 2).tolist()
    weights = pair.draft.weights
    copies = {name: w for name, w in weights.items() if name != "lm_head.weight"}
    pair.network = NumpyBlock(pair.network.target, pair.draft.config, copies, ids)
    pair.network.drafted = pair.depth
    for length in (2, 65):
        each = pair.run(text_of(length, 100), 6, shapes=[None, (4, 5)])
        assert all(token % 2 == 0 for _, tokens, *_ in each.drafts for token in tokens[1:])


@pytest.mark.parametrize("chunk", [1, 19, 20, 21, 60])
@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_prompts_far_beyond_the_window(kind: str, chunk: int, tmp_path: Path) -> None:
    """Chunks have about as many tokens as the window of 20."""
    pair = Pair(tmp_path, Case(kind), TREE)
    pair.run(text_of(230), 6, chunk)


@pytest.mark.parametrize("kind", KINDS)
def test_many_steps_in_a_used_slot(kind: str, tmp_path: Path) -> None:
    """Nothing of rejected tokens, of another sequence or of fresh memory is read."""
    with memory_full_of(0x7F):
        pair = Pair(tmp_path, case_of(kind), TREE)
    other = pair.run(text_of(140), 10, **SAMPLINGS["seeded"])
    each = pair.run(text_of(30), 50, shapes=[None, (4, 5), (1, 2)], **SAMPLINGS["seeded"])
    assert each.slot == other.slot and {1, 2, 3} <= set(each.emitted)
    roots = {tokens[0] for _, tokens, _, _ in each.drafts}
    assert MASK in roots  # the root's row holds the mask token, too


@pytest.mark.parametrize("kind", KINDS)
def test_steps_without_a_draft_leave_no_gap(kind: str, tmp_path: Path) -> None:
    """Such steps make up to 16 tokens. Prompts are shorter than that, and longer."""
    pair = Pair(tmp_path, case_of(kind), TREE)
    for length in (1, 5, 70):
        each = pair.start(text_of(length), **SAMPLINGS["seeded"])
        for plain in (1, 3, 11):
            pair.step([each])
            for _ in range(plain):
                pair.step([each], (0, 1))
            pair.step([each])
        each.drafts = [draft for draft in each.drafts if draft[-1] > 0]
        assert len(each.drafts) == 6
        pair.check(each)


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_of_a_batch_are_alone(kind: str, tmp_path: Path) -> None:
    pair = Pair(tmp_path, case_of(kind), TREE, max_num_seqs=3)
    sequences = [pair.start(text_of(n), **SAMPLINGS["seeded"]) for n in (5, 64, 130)]
    for i in range(8):
        pair.step(sequences[i % 2 :] if i < 4 else sequences[::-1], (3, 9) if i % 3 else None)
    for each in sequences:
        pair.check(each)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_block_at_the_end_of_the_context(kind: str, tmp_path: Path) -> None:
    """Rows of the last blocks have positions beyond max_model_len."""
    pair = Pair(tmp_path, Case(kind), TREE, max_model_len=128)
    each = pair.start(text_of(110))
    while len(each.text) + TREE["spec_num_iter"] < 128:
        pair.step([each])
    assert len(each.text) > 120
    pair.check(each)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_hit_changes_no_draft(kind: str, tmp_path: Path) -> None:
    """Every step accepts as many drafted tokens as without the hit, in another slot, too."""
    pair = Pair(tmp_path, case_of(kind), TREE, max_num_seqs=2)
    seen: set[int] = set()
    with running(pair.engine) as (runner, cache):
        for length in (66, 130, 195):
            steps, tokens = [], []
            for _ in range(2):
                acceptance = AcceptanceCounter(4, detailed=True)
                job = Job(text_of(length), 30, acceptance=acceptance, **SAMPLINGS["seeded"])
                other = Job(text_of(length + 1), 30, **SAMPLINGS["greedy"])
                runner.submit(other.request, job.request)
                tokens.append((other.wait(), job.wait()))
                steps.append(acceptance.metrics().per_step_accepted)
            assert job.request.cached_tokens == (length - 1) // PAGE * PAGE
            assert tokens[0] == tokens[1] and steps[0] == steps[1], length
            seen |= set(steps[0] or ())
        runner.call(lambda _: cache.check())
    assert len(seen) > 2


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_quantised_draft_is_its_dequantised_draft(kind: str, tmp_path: Path) -> None:
    """Context rows use only the rows of k and v in a fused matrix."""
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 64, "vocab_size": VOCAB}
    target = write_tiny(tmp_path / "t", "qwen3", num_hidden_layers=3, **sizes)
    made = write_block(tmp_path / "d", kind, target)
    # The transformer of LiLiCorr, the selector of DFlash2 and the network of Domino stay dense.
    kept = tuple(name.removesuffix(".weight") for name in made.weights if "lilicorr" in name)
    weights = quantise(made.weights, keep=kept)
    assert {"fc", "layers.1.self_attn.k_proj"} <= weights.linears.keys()
    quant = {"ignore": ["lm_head", "re:.*_projection$", "re:.*embed_proj.*", "re:.*prefix_gru.*"]}
    runs = []
    for layout in ("dense", "compressed"):
        draft = write_w4(tmp_path / layout, made.config, weights, layout, quant=quant)
        engine = load(target, draft, {**TREE, "draft_head_quant": "none"})
        slot, first = Drive(engine).start(text_of(70), max_tokens=100)
        text, drafts = [first], []
        for _ in range(8):
            assert engine.reserve(slot, 70 + len(text) + engine.tokens_per_step)
            drafts.append(engine.begin_masked([slot])[0])
            engine.end_masked([-1] * len(drafts[-1][0]), np.zeros((0, 0), np.uint32))
            text += engine.collect()[0].tokens
        runs.append((text, drafts))
    assert runs[0] == runs[1]


def test_an_own_head_is_used(tmp_path: Path) -> None:
    """An lm_head that is no copy of the target's makes the logits."""
    head = tensor(VOCAB, HIDDEN, seed=9) / 8
    pair = Pair(tmp_path, Case("dspark", extra={"lm_head.weight": head}), TREE)
    pair.run(text_of(40), 10)
