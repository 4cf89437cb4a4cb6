"""The numpy reference of block drafters: known drafts in special cases, and exact trees."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.reference.block_draft import Lattice, NumpyBlock, gru, log_softmax
from tests.reference.lilicorr import NumpyLiLiCorr
from tests.reference.numpy_drafts import NumpyTarget
from tests.reference.tiny_blocks import BLOCKS, write_block
from tests.reference.tiny_checkpoints import TinyCheckpoint, write_tiny

IDS, ROOT = [7, 3, 9, 1, 30, 22, 5, 8, 41, 6], 17


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    directory = tmp_path_factory.mktemp("target")
    return write_tiny(directory, "qwen3", vocab_size=60, num_hidden_layers=3)


def network(target: TinyCheckpoint, made: TinyCheckpoint) -> tuple[NumpyBlock, Any]:
    """The network in float64, and the target's hidden states of IDS."""
    of_target = NumpyTarget(target.fields(), target.weights, np.float64)
    drafter = NumpyBlock(of_target, made.config, made.weights)
    return drafter, of_target.states(IDS, drafter.layers)[1]


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_sees_context_and_root(kind: str, target: TinyCheckpoint, tmp_path: Path) -> None:
    drafter, states = network(target, write_block(tmp_path, kind, target))
    rows = drafter.hidden(states, ROOT)
    assert rows.shape == (7, 64) and np.isfinite(rows).all()
    assert np.abs(rows - drafter.hidden(states, ROOT + 1)).max() > 1e-3
    moved = [state + np.eye(len(state))[:, [4]] for state in states]
    assert np.abs(rows - drafter.hidden(moved, ROOT)).max() > 1e-3


@pytest.mark.parametrize("taps", [2, 3])
def test_an_identity_convolution_is_dflash(
    taps: int, target: TinyCheckpoint, tmp_path: Path
) -> None:
    made = write_block(tmp_path, "dflash2", target, dflash_config={"conv_kernel_size": taps})
    drafter, states = network(target, made)
    assert drafter.weights["layers.0.mlp_conv.base_kernel"].shape[1] == taps
    convolved = drafter.hidden(states, ROOT)
    plain, _ = network(target, made)
    for name in list(plain.weights):
        if "_conv." in name:
            del plain.weights[name]
    expected = plain.hidden(states, ROOT)
    assert np.abs(convolved - expected).max() > 1e-2
    for name, array in drafter.weights.items():
        if "_conv." in name:
            array[...] = 0
        if name.endswith("base_kernel"):
            array[:, 0] = 1
    assert np.array_equal(drafter.hidden(states, ROOT), expected)


def test_pairs_of_zero_are_marginals(target: TinyCheckpoint, tmp_path: Path) -> None:
    """The scores of DSpark without W2, and of DFlash2 without successors."""
    zeroed = {"dspark": "markov_head.markov_w2.weight"}
    zeroed["dflash2"] = "candidate_selector.successor_codebook"
    for kind, name in zeroed.items():
        drafter, states = network(target, write_block(tmp_path / kind, kind, target))
        lattice = drafter.lattice(states, ROOT)
        drafter.weights[name][...] = 0
        marginals = log_softmax(drafter.logits(drafter.hidden(states, ROOT)))
        own = -np.sort(-marginals)[:, : lattice.tokens.shape[1]]
        zero = drafter.lattice(states, ROOT)
        assert np.allclose(zero.scores, own[:, None], atol=1e-12, rtol=0)
        assert zero.chain(7) == [0] * 7 and np.array_equal(zero.tokens, lattice.tokens)
        assert np.abs(lattice.scores - own[:, None]).max() > 0.1


def test_an_open_gate_changes_no_score(target: TinyCheckpoint, tmp_path: Path) -> None:
    """A gated Markov head whose gates are 1 is a vanilla one; other gates change scores."""
    gated = write_block(tmp_path / "gated", "dspark", target, markov_head_type="gated")
    drafter, states = network(target, gated)
    scores = drafter.lattice(states, ROOT).scores
    drafter.weights["markov_head.gate_proj.weight"][...] = 0
    drafter.weights["markov_head.gate_proj.bias"][...] = 50
    open_scores = drafter.lattice(states, ROOT).scores
    drafter.config["markov_head_type"] = "vanilla"
    assert np.allclose(drafter.lattice(states, ROOT).scores, open_scores, atol=1e-12, rtol=0)
    assert np.abs(scores - open_scores).max() > 0.1


def test_a_state_carries_the_path(target: TinyCheckpoint, tmp_path: Path) -> None:
    """Scores of an rnn Markov head depend on earlier tokens through the state alone.

    A head without the columns of the state, and whose output is W1's row, is a vanilla head with
    tanh.
    """
    rnn = write_block(tmp_path / "rnn", "dspark", target, markov_head_type="rnn")
    drafter, states = network(target, rnn)
    lattice = drafter.lattice(states, ROOT)
    assert np.abs(lattice.below((0, 1)) - lattice.below((2, 1))).max() > 0.05
    assert np.abs(lattice.below((0, 3, 1)) - lattice.below((2, 3, 1))).max() > 0.01
    joint = drafter.weights["markov_head.joint_proj.weight"]
    drafter.weights["markov_head.joint_proj.bias"][...] = 0
    joint[...] = 0
    joint[32:, 16:32] = np.eye(16)
    plain, _ = network(target, rnn)
    plain.config["markov_head_type"] = "vanilla"
    plain.weights["markov_head.markov_w1.weight"] = np.tanh(
        drafter.weights["markov_head.markov_w1.weight"]
    )
    scores = plain.lattice(states, ROOT).scores
    lattice = drafter.lattice(states, ROOT)
    for path in ((), (4,), (0, 1), (2, 1), (3, 0, 2)):
        expected = scores[len(path), path[-1] if path else 0]
        assert np.allclose(lattice.below(path), expected, atol=1e-12, rtol=0), path


def test_states_follow_the_formula(target: TinyCheckpoint, tmp_path: Path) -> None:
    """A wide-open gate keeps the state 0; a shut one replaces it by the candidate each time."""
    rnn = write_block(tmp_path, "dspark", target, markov_head_type="rnn")
    drafter, states = network(target, rnn)
    bias = drafter.weights["markov_head.joint_proj.bias"]
    drafter.weights["markov_head.joint_proj.weight"][:16] = 0
    below = {}
    for gate in (50.0, -50.0):
        bias[:16] = gate
        lattice = drafter.lattice(states, ROOT)
        below[gate] = [lattice.below(path) for path in ((0, 5, 1), (2, 5, 1))]
    assert np.allclose(*below[50.0], atol=1e-12, rtol=0)
    assert np.abs(np.subtract(*below[-50.0])).max() > 1e-3


def test_a_domino_head_without_correction_is_dflash(target: TinyCheckpoint, tmp_path: Path) -> None:
    """W2 = 0 leaves the logits of the block. The first token is never corrected."""
    drafter, states = network(target, write_block(tmp_path / "d", "domino", target))
    lattice = drafter.lattice(states, ROOT)
    paths = ((), (0,), (3, 1), (0, 2, 5))
    corrected = [lattice.below(path) for path in paths]
    moved = np.abs(lattice.below((0, 1)) - lattice.below((2, 1))).max()
    assert moved > 0.05  # the state depends on the path
    drafter.weights["embed_proj.2.weight"][...] = 0
    logprobs = log_softmax(drafter.logits(drafter.hidden(states, ROOT)))
    zero = drafter.lattice(states, ROOT)
    for path, scores in zip(paths, corrected):
        own = -np.sort(-logprobs[len(path)])[: zero.tokens.shape[1]]
        assert np.allclose(zero.below(path), own, atol=1e-12, rtol=0)
        assert (np.abs(scores - own).max() > 0.05) == (len(path) > 0)


def lilicorr(target: TinyCheckpoint, directory: Path, **keys: Any) -> tuple[NumpyBlock, Any]:
    """A LiLiCorr head with other keys, and the target's hidden states."""
    nested = {name if "conv" in name else f"lilicorr_{name}": keys[name] for name in keys}
    return network(target, write_block(directory, "lilicorr", target, dflash_config=nested))


@pytest.mark.parametrize("convolved", [False, True])
def test_one_candidate_of_a_lilicorr_head_is_dflash(
    convolved: bool, target: TinyCheckpoint, tmp_path: Path
) -> None:
    convolutions = {"conv_kernel_size": 2, "conv_group_size": 8} if convolved else {}
    drafter, states = lilicorr(target, tmp_path, candidate_topk=1, **convolutions)
    assert any("_conv." in name for name in drafter.weights) == convolved
    lattice = drafter.lattice(states, ROOT)
    likeliest = drafter.logits(drafter.hidden(states, ROOT)).argmax(-1)
    assert lattice.tokens[:, 0].tolist() == likeliest.tolist()
    assert np.array_equal(lattice.scores, np.zeros((7, 1, 1)))


def test_scores_of_a_lilicorr_head_are_conditional(target: TinyCheckpoint, tmp_path: Path) -> None:
    """Below each parent they sum to 1, and a scale near 0 makes all candidates alike."""
    drafter, states = lilicorr(target, tmp_path)
    lattice = drafter.lattice(states, ROOT)
    assert np.allclose(np.exp(lattice.scores).sum(-1), 1)
    assert np.abs(lattice.scores[1:, 0] - lattice.scores[1:, 1]).max() > 0.1
    drafter.config["lilicorr_logit_scale"] = 1e-9
    assert np.allclose(drafter.lattice(states, ROOT).scores, -np.log(4), atol=1e-8)


def test_ranks_slots_and_the_context_matter(target: TinyCheckpoint, tmp_path: Path) -> None:
    """A LiLiCorr head tells a position's candidates apart by more than their embeddings."""
    drafter, states = lilicorr(target, tmp_path)
    scores = drafter.lattice(states, ROOT).scores
    for name in ("rank_embedding", "slot_embedding", "relative_slot_bias", "same_slot_bias"):
        array = drafter.weights["lilicorr." + name]
        kept = array.copy()
        array[...] = np.flip(array, 3 if name == "rank_embedding" else 2) if array.ndim == 5 else 0
        assert np.abs(drafter.lattice(states, ROOT).scores - scores).max() > 1e-3, name
        array[...] = kept
    moved = drafter.hidden(states, ROOT)
    drafter.hidden = lambda *_: moved  # type: ignore[method-assign]
    other = [state.copy() for state in states]
    other[0][:-1] += 1  # not the last token
    assert np.array_equal(drafter.lattice(other, ROOT).scores, scores)
    other[0][-1] += 1
    assert np.abs(drafter.lattice(other, ROOT).scores[0] - scores[0]).max() > 1e-3


def test_positions_without_embeddings_and_biases_are_alike(
    target: TinyCheckpoint, tmp_path: Path
) -> None:
    """Other positions in another order give the same scores: only states and candidates count."""
    drafter, _ = lilicorr(target, tmp_path)
    own = {name.removeprefix("lilicorr."): w for name, w in drafter.weights.items()}
    head = NumpyLiLiCorr(drafter.config, own)
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((5, 4, 64)), -np.sort(rng.uniform(0.5, 4, (5, 4)))
    hidden, order = rng.standard_normal((5, 64)), np.array([3, 0, 4, 1, 2])
    permuted = [each[order] for each in (*inputs, hidden)]
    assert np.abs(head.states(*inputs, hidden)[order] - head.states(*permuted)).max() > 1e-2
    for name in ("slot_embedding", "relative_slot_bias", "same_slot_bias"):
        own[name] = np.zeros_like(own[name])
    assert np.allclose(head.states(*inputs, hidden)[order], head.states(*permuted), atol=1e-12)


def test_a_prefix_of_a_lilicorr_block(target: TinyCheckpoint, tmp_path: Path) -> None:
    """If only the first positions are drafted, later ones do not change their scores."""
    drafter, states = lilicorr(target, tmp_path)
    whole = drafter.lattice(states, ROOT)
    drafter.drafted = 3
    prefix = drafter.lattice(states, ROOT)
    assert np.array_equal(prefix.tokens, whole.tokens[:3]) and prefix.scores.shape == (3, 4, 4)
    assert np.abs(prefix.scores - whole.scores[:3]).max() > 1e-3
    drafter.weights["lilicorr.slot_embedding"][0, 0, 3:] += 1
    drafter.weights["lilicorr.relative_slot_bias"][:, [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]] += 1
    assert np.array_equal(drafter.lattice(states, ROOT).scores, prefix.scores)


@pytest.mark.parametrize("shifted", [True, False])
def test_rows_of_a_domino_head(shifted: bool, target: TinyCheckpoint, tmp_path: Path) -> None:
    """All rows but one predict. The exception is the last row, or the root's."""
    made = write_block(tmp_path, "domino", target, dflash_config={"shift_label": shifted})
    drafter, states = network(target, made)
    rows = drafter.block(drafter.embedded(ROOT), drafter.context(states))
    expected = rows[:-1] if shifted else rows[1:]
    assert np.array_equal(drafter.hidden(states, ROOT), expected) and len(expected) == 7


def test_a_gru_follows_the_formula() -> None:
    """A GRU of one value equals the formula. A kept state does not change."""
    ours = gru(np.array([0.5]), np.array([0.3]), *np.array([[[0.2], [0.4], [0.6]]] * 2))
    reset, keep = (1 / (1 + np.exp(-weight * 0.8)) for weight in (0.2, 0.4))
    fresh = np.tanh(0.6 * 0.5 + reset * 0.6 * 0.3)
    assert np.allclose(ours, (1 - keep) * fresh + keep * 0.3, atol=1e-15)
    kept = gru(np.array([1.0]), np.array([0.3]), np.array([[1.0], [50], [1]]), np.zeros((3, 1)))
    assert np.allclose(kept, 0.3, atol=1e-15)


def test_pairs_are_probabilities(target: TinyCheckpoint, tmp_path: Path) -> None:
    """The score of a pair is the logarithm of a probability.

    In DFlash2 the probabilities in a row of the lattice sum to that of all candidates. In DSpark,
    if all tokens are candidates, they sum to 1.
    """
    drafter, states = network(target, write_block(tmp_path / "2", "dflash2", target))
    lattice = drafter.lattice(states, ROOT)
    mass = np.exp(-np.sort(-log_softmax(drafter.logits(drafter.hidden(states, ROOT))))[:, :4])
    assert np.allclose(np.exp(lattice.scores).sum(-1), mass.sum(-1)[:, None])
    spark, states = network(target, write_block(tmp_path / "s", "dspark", target))
    assert np.allclose(np.exp(spark.lattice(states, ROOT, topk=60).scores).sum(-1), 1)
    assert (np.exp(spark.lattice(states, ROOT, topk=20).scores).sum(-1) < 1).all()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
def test_later_rows_are_seen_if_not_causal(
    kind: str, causal: bool, target: TinyCheckpoint, tmp_path: Path
) -> None:
    drafter, states = network(target, write_block(tmp_path, kind, target, is_causal=causal))
    context = drafter.context(states)
    x = drafter.embedded(ROOT)
    rows = drafter.block(x, context)
    x[4, 0] += 0.5
    moved = np.abs(drafter.block(x, context) - rows).max(-1) > 1e-9
    assert moved.tolist() == [not causal] * 4 + [True] * (drafter.block_size - 4)


def test_a_causal_head_has_causal_layers(target: TinyCheckpoint, tmp_path: Path) -> None:
    heads = {
        "jetspec": write_block(tmp_path / "j", "jetspec", target),
        "dflash": write_block(tmp_path / "d", "dflash", target),
    }
    causal = {
        kind: [network(target, made)[0].is_causal(layer) for layer in range(2)]
        for kind, made in heads.items()
    }
    assert causal == {"jetspec": [True, True], "dflash": [False, True]}  # the sliding layer


@pytest.mark.parametrize(("layer", "window"), [(0, 0), (1, 4)])
def test_the_window_holds_the_newest_tokens(
    layer: int, window: int, target: TinyCheckpoint, tmp_path: Path
) -> None:
    """Row j at position L + j sees positions after L + j - window."""
    made = write_block(tmp_path, "dflash", target, sliding_window=4, block_size=2)
    drafter, states = network(target, made)
    assert drafter.window(layer) == window
    context = drafter.context(states)
    x = np.random.default_rng(0).standard_normal((2, 64))
    rows = drafter._attention(x, layer, context[layer])
    for token in range(len(IDS)):
        keys = context[layer][0].copy()
        keys[token] += 0.1
        moved = drafter._attention(x, layer, (keys, context[layer][1])) - rows
        seen = [not window or token > len(IDS) + row - window for row in range(2)]
        assert (np.abs(moved).max(-1) > 1e-9).tolist() == seen, token


def test_which_row_predicts(target: TinyCheckpoint, tmp_path: Path) -> None:
    """The root's row of DSpark predicts, that of DFlash does not."""
    drafter, states = network(target, write_block(tmp_path / "d", "dflash", target))
    rows = drafter.block(drafter.embedded(ROOT), drafter.context(states))
    assert np.array_equal(drafter.hidden(states, ROOT), rows[1:])
    made = write_block(tmp_path / "s", "dspark", target, markov_rank=0)
    assert not any("markov" in name for name in made.weights)
    drafter, states = network(target, made)
    rows = drafter.block(drafter.embedded(ROOT), drafter.context(states))
    assert np.array_equal(drafter.hidden(states, ROOT), rows) and len(rows) == 7


def test_context_of_parts_is_that_of_the_whole(target: TinyCheckpoint, tmp_path: Path) -> None:
    drafter, states = network(target, write_block(tmp_path, "dflash2", target))
    whole = drafter.context(states)
    parts = [drafter.context([state[at : at + 3] for state in states], at) for at in range(0, 9, 3)]
    for layer, (keys, values) in enumerate(whole):
        for i, array in enumerate((keys, values)):
            joined = np.concatenate([part[layer][i] for part in parts])
            assert np.allclose(joined, array[:9], atol=1e-12)


@pytest.mark.parametrize("off_path", [0.0, -1.2])
def test_a_tree_holds_the_best_paths(off_path: float) -> None:
    """It holds the best of all paths. A parent scores no less than its children."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        depth, topk = int(rng.integers(1, 5)), int(rng.integers(1, 5))
        num_nodes = int(rng.integers(2, 21))
        tokens = np.stack([rng.permutation(50)[:topk] for _ in range(depth)])
        scores = log_softmax(2 * rng.standard_normal((depth, topk, topk)))
        scores[0] = scores[0, 0]
        lattice = Lattice(tokens, scores, off_path)
        paths = [
            path
            for length in range(1, depth + 1)
            for path in itertools.product(range(topk), repeat=length)
        ]
        best = sorted(paths, key=lattice.score, reverse=True)[: num_nodes - 1]
        found = lattice.tree(depth, num_nodes)
        assert set(found) == set(best) and len(found) == len(best)
        assert all(path[:-1] in ((), *found[:i]) for i, path in enumerate(found))


def test_the_greedy_path_is_not_the_likeliest() -> None:
    scores = np.log([[[0.6, 0.4]] * 2, [[0.5, 0.5], [0.01, 0.99]]])
    lattice = Lattice(np.array([[3, 4], [5, 6]]), scores)
    assert lattice.chain(2) == [0, 0]
    assert lattice.tree(2, 4) == [(0,), (1,), (1, 1)]
    assert lattice.draft(2, 3) == [(0,), (0, 0)]


def test_a_check_tells_trees_apart() -> None:
    """Nodes with equal scores may change places, others may not."""
    scores = np.log([[[0.5, 0.3, 0.2]] * 3, [[0.4, 0.4, 0.2]] * 3])
    lattice = Lattice(np.array([[3, 4, 5], [6, 7, 8]]), scores)
    lattice.check([0, 3, 4, 6, 7], [-1, 0, 0, 1, 1], 2)
    lattice.check([0, 3, 4, 7, 6], [-1, 0, 0, 1, 1], 2)
    wrong = [
        ([0, 3, 4, 6, 8], [-1, 0, 0, 1, 1]),  # less likely
        ([0, 3, 4, 6, 6], [-1, 0, 0, 1, 1]),  # twice the same
        ([0, 3, 4, 6, 7], [-1, 0, 0, 1, 2]),  # below another parent
        ([0, 3, 4, 6, 9], [-1, 0, 0, 1, 1]),  # no candidate
        ([0, 3, 4, 6, -1], [-1, 0, 0, 1, 0]),  # unused
    ]
    for tokens, parents in wrong:
        with pytest.raises(AssertionError):
            lattice.check(tokens, parents, 2)
