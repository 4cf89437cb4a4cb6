"""Top-p verification: the candidates of a row, and the tokens that they let pass."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from tests.kernels.test_accept import VOCAB, Cycle, Slots
from tests.kernels.test_sample import (
    FILTERS,
    MASKED,
    packed,
    penalty_state,
    random_logits,
    random_masks,
    slots_of,
    with_defaults,
)
from tests.kernels.util import (
    SMALL,
    context,
    empty,
    empty_structs,
    get_structs,
    on_devices,
    ops,
    put,
    put_ints,
    put_raw,
)
from tests.reference import ops as reference
from tests.reference import tree as trees


def candidates_of(
    device: str, logits: np.ndarray, slots: np.ndarray, **inputs: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, log-probabilities and candidates; row r belongs to slot r. The same tokens and
    log-probabilities must come without candidates."""
    num_rows = len(logits)
    results = []
    for wanted in (True, False):
        tokens = empty(device, [num_rows], "int32")
        logprobs = empty_structs(device, [num_rows], ops.token_logprobs_dtype)
        found = empty_structs(device, [num_rows], ops.token_candidates_dtype)
        rows = put_ints(device, np.arange(num_rows))
        ops.sample(
            context(device), logits=put(device, logits), tokens=tokens, logprobs=logprobs,
            token_slots=rows, token_positions=rows, sampling=put_raw(device, slots),
            candidates=found if wanted else None, **inputs,
        )  # fmt: skip
        scores = get_structs(logprobs, ops.token_logprobs_dtype)
        results.append((tokens.numpy(), scores, get_structs(found, ops.token_candidates_dtype)))
    (tokens, scores, found), (other, plain, _) = results
    assert np.array_equal(tokens, other) and scores.tobytes() == plain.tobytes()
    return tokens, scores, found


@on_devices
@pytest.mark.parametrize("vocab_size", [1030] if SMALL else [1, 3, 7, 1030])
def test_candidates(device: str, vocab_size: int) -> None:
    """Rows have filters, penalties, bias and masks, or none."""
    few = [with_defaults({"top_k": k, "top_p": 0.99}) for k in (2, 3)]
    rows = [{**fields, "num_logprobs": i % 4 - 1} for i, fields in enumerate([*MASKED, *few])]
    slots = slots_of(*rows)
    counts, bias = penalty_state(len(rows), vocab_size)
    allowed = random_masks(5, vocab_size)
    mask_rows = np.arange(len(rows)) % 6 - 1
    logits = random_logits(len(rows), vocab_size, seed=3, scale=2)
    logits[1, 0] = np.nan
    tokens, _, found = candidates_of(
        device, logits, slots, counts=put_ints(device, counts), bias=put(device, bias),
        mask_rows=put_ints(device, mask_rows),
        masks=put_raw(device, packed(allowed).view(np.uint8)),
    )  # fmt: skip
    nums = Counter()
    for row, s in enumerate(slots):
        z = reference.adjusted(logits[row], s, counts[row], bias[row])
        if mask_rows[row] >= 0:
            z = np.where(allowed[mask_rows[row]], z, -np.inf)
        order = [int(t) for t in np.argsort(-z, kind="stable")[:5] if z[t] > -np.inf]
        num = min(len(order), 1)
        if s["temperature"] > 0 and order:
            with np.errstate(invalid="ignore"):
                num = int(reference.passing(z, s)[order].sum())
        if row == 1:
            assert tokens[row] == ops.NO_TOKEN
            order, num = [], 0
        assert found[row]["ids"].tolist() == order + [-1] * (5 - len(order)), row
        assert found[row]["num"] == num, row
        nums[num] += 1
        if s["num_logprobs"] >= 0 and order:
            expected = reference.log_softmax(logits[row])[order]
            assert np.allclose(found[row]["logprobs"][: len(order)], expected, atol=1e-4)
    if vocab_size > 5:
        assert {0, 1, 5} < set(nums)


@pytest.mark.gpu
def test_cuda_finds_the_candidates_of_the_cpu() -> None:
    slots = slots_of(*({**with_defaults(fields), "num_logprobs": 0} for fields in FILTERS))
    logits = random_logits(len(slots), 151936, seed=9)
    (tokens, _, cuda), (expected, _, cpu) = (
        candidates_of(device, logits, slots) for device in ("cuda", "cpu")
    )
    assert np.array_equal(tokens, expected)
    assert np.array_equal(cuda["ids"], cpu["ids"]) and np.array_equal(cuda["num"], cpu["num"])
    assert np.allclose(cuda["logprobs"], cpu["logprobs"], atol=1e-4)


@on_devices
@pytest.mark.parametrize("window", [0, 1, 2])
@pytest.mark.parametrize(("kind", "num_nodes"), [("chain", 6), ("tree", 24), ("tree", 64)])
def test_accept(device: str, kind: str, num_nodes: int, window: int) -> None:
    rng = np.random.default_rng([num_nodes, window])
    max_depth, num_seqs = 5, 3 if SMALL else 20
    more = 0
    for _ in range(1 if SMALL else 4):
        slots = Slots(device, num_seqs + 2, num_seqs + 1, max_depth + 1, rng)
        seq_slots = rng.permutation(num_seqs + 2)[:num_seqs]
        contents = []
        for _ in range(num_seqs):
            if kind == "chain":
                drafted = rng.integers(VOCAB, size=num_nodes - 1).tolist()
                contents.append(trees.chain(int(rng.integers(VOCAB)), drafted))
            else:
                contents.append(trees.random_tree(rng, num_nodes, max_depth, VOCAB))
        cycle = Cycle(slots, seq_slots, contents, rng, window)
        cycle.run()
        exact = [
            len(trees.accept(tree, drawn, [], 99).path)
            for tree, drawn in zip(contents, cycle.drawn)
        ]
        more += sum(num > other for num, other in zip(cycle.check(), exact))
    assert more or SMALL


@on_devices
def test_chains_are_accepted_as_by_fastdeploy(device: str) -> None:
    """The drawn token is a candidate, as FastDeploy draws one of them."""
    rng = np.random.default_rng(4)
    num_seqs, depth, window = 30, 8, 2
    slots = Slots(device, num_seqs, num_seqs, depth + 1, rng)
    slots.stops["finished"], slots.stops["num_stop_ids"], slots.stops["max_tokens"] = 0, 0, 99
    slots.host["lengths"][:] = 5
    drafts = rng.integers(VOCAB, size=(num_seqs, depth)).tolist()
    contents = [trees.chain(0, drafted) for drafted in drafts]
    cycle = Cycle(slots, np.arange(num_seqs), contents, rng, window)
    for row, own in enumerate(cycle.candidates):
        seq, node = divmod(row, depth + 1)
        own["ids"], own["num"] = rng.permutation(VOCAB)[:5], rng.integers(1, 3)
        if node < depth and rng.random() < 0.9:  # most drafted tokens are likely
            others = [token for token in rng.permutation(VOCAB) if token != drafts[seq][node]][:4]
            own["ids"] = np.insert(others, rng.choice(3, p=[0.6, 0.3, 0.1]), drafts[seq][node])
    cycle.drawn = cycle.candidates["ids"][:, 0].reshape(num_seqs, depth + 1).copy()
    cycle.run()
    found = cycle.check()
    lengths = []
    for seq, drafted in enumerate(drafts):
        topp = cycle.topp(seq)
        assert topp is not None
        lengths.append(1 + trees.fastdeploy_topp(drafted, topp.candidates, window))
    assert found == lengths
    assert len(set(lengths)) > 4


@on_devices
def test_a_negative_window_is_refused(device: str) -> None:
    rng = np.random.default_rng(0)
    cycle = Cycle(Slots(device, 1, 1, 3, rng), np.array([0]), [trees.chain(0, [1, 2])], rng, -1)
    with pytest.raises(ValueError, match="verify_window is -1, expected at least 0"):
        cycle.run()
