"""A Domino head drafts the chains and trees that the numpy network drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.blocks import TREE, Case, Pair, text_of
from tests.engine.drafted import SAMPLINGS, memory_full_of
from tests.reference.block_draft import NumpyBlock
from tests.reference.engines import extension_or_skip

extension_or_skip()

LENGTHS = (1, 2, 63, 64, 65, 130)
CHAIN = {"spec_num_iter": 4, "spec_topk_per_iter": 1}
SEVEN: dict[str, Any] = {"method": "domino", "spec_num_iter": 7, "spec_topk_per_iter": 1}

CASES = {
    "shifted": Case("domino"),
    "not shifted": Case("domino", {"dflash_config": {"shift_label": False}}),
    "windows": Case(
        "domino", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 20}
    ),
    "scaled target": Case("domino", family="minicpm"),
    "tied target": Case("domino", target={"tie_word_embeddings": True}),
    "other sizes": Case("domino", {"dflash_config": {"gru_hidden_dim": 40, "emb_dim": 8}}),
    "keys at the top": Case(
        "domino",
        {
            "dflash_config": {"projector_type": None, "shift_label": None},
            "projector_type": "domino",
            "shift_label": False,
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_drafts_are_those_of_the_numpy_network(name: str, tmp_path: Path) -> None:
    """Chains and trees of several shapes take turns. Tokens were accepted and rejected before."""
    pair = Pair(tmp_path, CASES[name], TREE)
    seen: set[int] = set()
    for i, length in enumerate(LENGTHS):
        sampling = list(SAMPLINGS.values())[i % 2]
        shapes = [None, (4, 5), (2, 3), (3, 9), (1, 5), (2, 8)]
        each = pair.run(text_of(length), 10, (1, 7, 64)[i % 3], shapes=shapes, **sampling)
        seen |= set(each.emitted)
    assert len(seen) > 1


def test_a_whole_block_of_a_larger_vocabulary(tmp_path: Path) -> None:
    """The vocabulary has more tokens than a position has candidates."""
    pair = Pair(tmp_path, Case("domino", target={"vocab_size": 160}), SEVEN)
    for length in LENGTHS[1::2]:
        each = pair.run(text_of(length, 160), 4, shapes=[None, (7, 8)])
        assert all(len(tokens) == 8 for _, tokens, _, _ in each.drafts)


def test_drafts_in_bfloat16(device: str, tmp_path: Path) -> None:
    """More than 80 % of the drafts are the likeliest chain, up to rounding."""
    sizes = {"hidden_size": 128, "head_dim": 64, "vocab_size": 40}
    case = Case("domino", target=sizes, dtype="bfloat16")
    pair = Pair(tmp_path, case, CHAIN, device=device, memory_limit=0.2)
    right = []
    for length in LENGTHS:
        each = pair.start(text_of(length, 40), **SAMPLINGS["seeded"])
        for shape in (None, (4, 5), (2, 3), (1, 2)):
            pair.step([each], shape)
        pair.engine.release(each.slot)
        for lattice, (tokens, parents, depth) in pair.lattices(each):
            assert parents == list(range(-1, len(tokens) - 1))
            try:
                lattice.check(tokens, parents, depth, margin=0.2)
                right.append(True)
            except AssertionError:
                right.append(False)
    assert np.mean(right) > 0.8, np.mean(right)


def test_sequences_of_a_batch_are_alone(tmp_path: Path) -> None:
    """A sequence reads nothing of others, of earlier sequences or of fresh memory."""
    with memory_full_of(0x7F):
        pair = Pair(tmp_path, Case("domino"), CHAIN, max_num_seqs=3)
    for _ in range(2):
        sequences = [pair.start(text_of(n), **SAMPLINGS["seeded"]) for n in (5, 64, 130)]
        for i in range(8):
            pair.step(sequences[i % 2 :] if i < 4 else sequences[::-1], (2, 3) if i % 3 else None)
        for each in sequences:
            pair.check(each)


def test_fr_spec_drafts_frequent_tokens(tmp_path: Path) -> None:
    path = tmp_path / "frequent.npy"
    np.save(path, np.arange(2, 100, 2))
    speculation = {**CHAIN, "frspec_path": str(path), "draft_head_quant": "none"}
    pair = Pair(tmp_path, Case("domino", target={"vocab_size": 100}), speculation)
    ids = np.arange(2, 100, 2).tolist()
    pair.network = NumpyBlock(pair.network.target, pair.draft.config, pair.draft.weights, ids)
    for length in (2, 65):
        each = pair.run(text_of(length, 100), 6, shapes=[None, (2, 3)])
        assert all(token % 2 == 0 for _, tokens, *_ in each.drafts for token in tokens[1:])
