"""A path from the context joins drafts, and its hit rates are measured (draft_fill.h)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tests.kernels.util import context, empty, on_devices, ops, put, put_ints, put_raw, sizes
from tests.reference import fill as reference

Token = tuple[int, int, float]  # token, parent, score


class Case:
    """Texts and drafts of several sequences. A small vocabulary makes many matches."""

    def __init__(self, rng: np.random.Generator, num_seqs: int, max_len: int, vocab: int) -> None:
        num_slots = num_seqs + 2
        self.rng, self.vocab, self.num_seqs = rng, vocab, num_seqs
        self.slots = rng.permutation(num_slots)[:num_seqs]
        self.history = rng.integers(vocab, size=(num_slots, max_len))
        self.lengths = rng.integers(max_len + 1, size=num_slots)
        self.roots = rng.integers(vocab, size=num_slots)
        self.paths = np.zeros(num_slots, ops.fill_path_dtype)
        self.rates = reference.Rates()
        self.accepted = np.zeros((num_slots, 17), int)
        self.accepted_paths = np.full((num_slots, 17), -1)
        self.counts = np.zeros(num_slots, int)

    def random_rates(self) -> None:
        trials = self.rng.integers(0, 200, size=reference.MAX_NGRAM + 1)
        self.rates.trials = trials.astype(float).tolist()
        self.rates.hits = np.floor(trials * self.rng.random(len(trials))).tolist()

    def random_draft(self, count: int, chain: bool) -> list[Token]:
        """Tokens in the order of their scores; siblings have different tokens."""
        found: list[Token] = [(0, -1, 0.0)]
        while len(found) <= count:
            parent = len(found) - 1 if chain else int(self.rng.integers(len(found)))
            token = int(self.rng.integers(self.vocab))
            score = found[parent][2] - self.rng.exponential(0.7)
            if not any(t == token and p == parent for t, p, _ in found):
                found.append((token, parent, score))
            elif self.vocab == 1:
                chain = True
        order = sorted(range(1, count + 1), key=lambda i: -found[i][2])
        number = {0: 0} | {i: at + 1 for at, i in enumerate(order)}
        return [(found[i][0], number[found[i][1]], float(np.float32(found[i][2]))) for i in order]

    def state(self, device: str) -> Any:
        accepted = ops.Accepted(
            ids=put_ints(device, self.accepted),
            paths=put_ints(device, self.accepted_paths),
            counts=put_ints(device, self.counts),
        )
        return ops.SlotState(
            lengths=put_ints(device, self.lengths), next_tokens=put_ints(device, self.roots),
            counts=put_ints(device, np.zeros((len(self.lengths), 1))), vocab_size=1,
            history=put_ints(device, self.history), accepted=accepted,
        )  # fmt: skip

    def put_rates(self, device: str) -> dict[str, Any]:
        return {"hits": put(device, self.rates.hits), "trials": put(device, self.rates.trials)}

    def fill(
        self,
        device: str,
        drafts: list[list[Token]],
        depth: int,
        count: int,
        ngrams: tuple[int, int] = (1, 4),
        chain: bool = False,
        scores: bool = True,
    ) -> list[list[Token]]:
        """Runs the op and returns the filled drafts."""
        tokens, parents, values = (np.array([[t[i] for t in d] for d in drafts]) for i in range(3))
        draft = ops.Draft(
            tokens=put_ints(device, tokens),
            **({} if chain else {"parents": put_ints(device, parents)}),
            **({"scores": put(device, values)} if scores else {}),
        )
        shape = (self.num_seqs, count)
        out = {
            "tokens": empty(device, shape, "int32"),
            "parents": empty(device, shape, "int32"),
            "scores": empty(device, shape),
        }
        paths = put_raw(device, self.paths)
        ops.draft_fill(
            context(device), seq_slots=put_ints(device, self.slots), state=self.state(device),
            draft=draft, max_depth=depth, min_ngram=ngrams[0], max_ngram=ngrams[1], paths=paths,
            filled=ops.Draft(**out), **self.put_rates(device),
        )  # fmt: skip
        self.paths = paths.numpy().view(ops.fill_path_dtype).reshape(-1)
        got = [out[name].numpy().tolist() for name in ("tokens", "parents", "scores")]
        return [list(zip(*(rows[seq] for rows in got))) for seq in range(self.num_seqs)]

    def observe(self, device: str) -> tuple[list[float], list[float]]:
        rates = self.put_rates(device)
        ops.fill_observe(
            context(device), seq_slots=put_ints(device, self.slots), state=self.state(device),
            paths=put_raw(device, self.paths), **rates,
        )  # fmt: skip
        return rates["hits"].numpy().tolist(), rates["trials"].numpy().tolist()

    def text(self, seq: int) -> list[int]:
        slot = self.slots[seq]
        return [*self.history[slot, : self.lengths[slot]].tolist(), int(self.roots[slot])]

    def path(self, seq: int) -> reference.Path:
        found = self.paths[self.slots[seq]]
        count = found["num_tokens"]
        return reference.Path(found["first"], found["match"], found["tokens"][:count].tolist())


def check(got: list[Token], expected: list[Token]) -> None:
    assert [(token, parent) for token, parent, _ in got] == [(t, p) for t, p, _ in expected]
    for (_, _, score), (_, _, right) in zip(got, expected):
        assert score == right or math.isclose(score, right, rel_tol=1e-5, abs_tol=1e-5)
    for at, (token, parent, _) in enumerate(got):
        assert token < 0 or parent == 0 or (parent <= at and got[parent - 1][0] >= 0)


@on_devices
@pytest.mark.parametrize("vocab", sizes(2, 3, 5, 12, 1000))
@pytest.mark.parametrize("ngrams", sizes((1, 4), (1, 1), (2, 5), (1, 32)))
def test_random_drafts(device: str, vocab: int, ngrams: tuple[int, int]) -> None:
    rng = np.random.default_rng([vocab, *ngrams])
    for max_len, drafted, count, depth, chain in (
        (1, 1, 1, 1, True), (5, 3, 5, 5, True), (80, 3, 5, 5, True), (80, 7, 7, 3, False),
        (200, 31, 31, 9, False), (90, 63, 63, 16, False), (90, 12, 40, 16, False),
        (300, 4, 16, 16, True), (40, 20, 7, 6, False),
    ):  # fmt: skip
        case = Case(rng, 13, max_len, vocab)
        case.random_rates()
        drafts = [case.random_draft(drafted, chain) for _ in range(13)]
        got = case.fill(device, drafts, depth, count, ngrams)
        for seq, draft in enumerate(drafts):
            right, path = reference.fill(case.text(seq), draft, depth, count, *ngrams, case.rates)
            assert path == case.path(seq) or path.tokens == case.path(seq).tokens == []
            assert case.paths[case.slots[seq]]["length"] == case.lengths[case.slots[seq]]
            check(got[seq], right)


@on_devices
def test_drafts_without_scores_or_parents(device: str) -> None:
    rng = np.random.default_rng(1)
    case = Case(rng, 9, 60, 4)
    drafts = [case.random_draft(4, chain=True) for _ in range(9)]
    for draft in drafts[:4]:
        draft[2] = (-1, *draft[2][1:])  # unused from there on
    got = case.fill(device, drafts, 8, 6, chain=True, scores=False)
    for seq, draft in enumerate(drafts):
        known = [(token, i, reference.UNKNOWN * (i + 1)) for i, (token, _, _) in enumerate(draft)]
        check(got[seq], reference.fill(case.text(seq), known, 8, 6, 1, 4, case.rates)[0])


def one(history: list[int], root: int) -> Case:
    case = Case(np.random.default_rng(0), 1, len(history), 10)
    case.history[:], case.lengths[:], case.roots[:] = history, len(history), root
    return case


@on_devices
def test_a_chain_is_continued_from_the_context(device: str) -> None:
    case = one([1, 2, 3, 4, 5, 6, 7, 8, 9], 1)
    got = case.fill(device, [[(2, 0, -0.1), (3, 1, -0.2), (4, 2, -0.3)]], 5, 5)
    assert [token for token, _, _ in got[0]] == [2, 3, 4, 5, 6]
    assert [parent for _, parent, _ in got[0]] == [0, 1, 2, 3, 4]
    assert case.path(0) == reference.Path(3, 4, [2, 3, 4, 5, 6])


@on_devices
def test_drafted_tokens_alone_make_a_pattern(device: str) -> None:
    case = one([5, 6, 7, 8, 9], 1)
    got = case.fill(device, [[(6, 0, -0.1), (7, 1, -0.2)]], 4, 4)
    assert [token for token, _, _ in got[0]] == [6, 7, 8, 9]
    assert case.path(0) == reference.Path(2, 2, [6, 7, 8, 9])


@on_devices
def test_a_long_match_takes_the_place_of_an_unsure_draft(device: str) -> None:
    case = one([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3], 4)
    got = case.fill(device, [[(8, 0, -3.0), (8, 1, -6.0)]], 4, 3)
    assert [token for token, _, _ in got[0]] == [5, 6, 7]
    got = case.fill(device, [[(8, 0, -0.05), (8, 1, -0.1)]], 4, 3)  # a likely token stays
    assert [token for token, _, _ in got[0]] == [8, 8, 5]


@on_devices
def test_without_a_match_the_draft_stays(device: str) -> None:
    case = one([1, 2, 3], 9)
    draft = [(7, 0, -0.5), (8, 1, -1.0), (6, 0, -2.0)]
    got = case.fill(device, [draft], 4, 5)
    assert [(token, parent) for token, parent, _ in got[0]] == [(7, 0), (8, 1), (6, 0)] + 2 * [
        (-1, 0)
    ]
    assert case.path(0).tokens == []


@on_devices
def test_scores_that_are_no_numbers_come_last(device: str) -> None:
    case = one([1, 2, 3], 9)
    got = case.fill(device, [[(7, 0, math.nan), (8, 0, -1.0), (6, 1, math.nan)]], 4, 4)
    assert [(token, parent) for token, parent, _ in got[0]] == [(8, 0), (7, 0), (6, 2), (-1, 0)]


@on_devices
def test_rates_are_measured(device: str) -> None:
    rng = np.random.default_rng(5)
    case = Case(rng, 14, 50, 3)
    expected = reference.Rates()
    for step in range(30):
        case.lengths = rng.integers(51, size=16)
        case.history, case.roots = rng.integers(3, size=(16, 50)), rng.integers(3, size=16)
        case.fill(device, [case.random_draft(3, chain=True) for _ in range(14)], 6, 8)
        before = case.lengths.copy()
        case.counts = rng.integers(0, 8, size=16)
        case.accepted = rng.integers(3, size=(16, 17))
        case.accepted_paths[:, 0] = np.where(rng.random(16) < 0.8, 0, -1)  # -1: a prefill
        case.lengths = before + case.counts + (rng.random(16) < 0.2)  # + 1: after another step
        for seq, slot in enumerate(case.slots):
            if (
                case.accepted_paths[slot, 0] == 0
                and case.lengths[slot] == before[slot] + (case.counts[slot])
            ):
                expected.count(case.path(seq), case.accepted[slot, : case.counts[slot]].tolist())
        expected.age()
        case.rates.hits, case.rates.trials = case.observe(device)
        assert case.rates == expected, step
    assert sum(expected.trials) > 100


@on_devices
def test_old_trials_count_less(device: str) -> None:
    case = one([1, 2], 3)
    case.rates.hits[4], case.rates.trials[4] = 200.0, 256.0
    case.rates.hits[5], case.rates.trials[5] = 200.0, 255.0
    hits, trials = case.observe(device)
    assert (hits[4], trials[4]) == (100, 128) and (hits[5], trials[5]) == (200, 255)


@on_devices
@pytest.mark.parametrize("length", sizes(5000, 40000, small=1))
def test_long_texts(device: str, length: int) -> None:
    case = Case(np.random.default_rng(length), 2, length, 100000)
    case.lengths[:] = length
    for slot, begin in zip(case.slots, (0, length // 2 + 3)):
        case.history[slot, begin : begin + 8] = np.arange(200001, 200009)
        case.history[slot, -3:] = np.arange(200001, 200004)
        case.roots[slot] = 200004
    got = case.fill(device, [[(7, 0, -5.0)]] * 2, 4, 4)
    assert [[token for token, _, _ in row] for row in got] == [[200005, 200006, 200007, 200008]] * 2


@on_devices
def test_limits(device: str) -> None:
    case = one([1, 2], 3)
    draft = [(7, 0, -0.5)]
    with pytest.raises(ValueError, match="matches of 3 to 2"):
        case.fill(device, [draft], 4, 4, (3, 2))
    with pytest.raises(ValueError, match="paths of up to 17 tokens"):
        case.fill(device, [draft], 17, 4)
    with pytest.raises(ValueError, match="a draft of 1 tokens becomes one of 64"):
        case.fill(device, [draft], 4, 64)
