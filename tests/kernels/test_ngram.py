from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.util import context, on_devices, ops, put_ints, sizes
from tests.reference import tree as reference


class Texts:
    """Histories of several slots, each with a root and the given part of a chain."""

    def __init__(self, rng: np.random.Generator, num_seqs: int, max_len: int, vocab: int) -> None:
        num_slots = num_seqs + 2
        self.slots = rng.permutation(num_slots)[:num_seqs]
        self.history = rng.integers(vocab, size=(num_slots, max_len))
        self.lengths = rng.integers(max_len + 1, size=num_slots)
        self.roots = rng.integers(vocab, size=num_slots)

    def run(
        self, device: str, chain: np.ndarray, first: int, min_ngram: int, max_ngram: int
    ) -> np.ndarray:
        array = put_ints(device, chain)
        ops.ngram_lookup(
            context(device), seq_slots=put_ints(device, self.slots),
            history=put_ints(device, self.history), lengths=put_ints(device, self.lengths),
            next_tokens=put_ints(device, self.roots), min_ngram=min_ngram, max_ngram=max_ngram,
            chain=array, first=first,
        )  # fmt: skip
        return array.numpy()

    def expected(self, chain: np.ndarray, first: int, min_ngram: int, max_ngram: int) -> np.ndarray:
        rows = []
        for slot, drafted in zip(self.slots, chain[:, :first].tolist()):
            count = chain.shape[1] - first
            text = [*self.history[slot, : self.lengths[slot]].tolist(), int(self.roots[slot])]
            found = [-1] * count
            if min(drafted, default=0) >= 0:
                found = reference.lookup([*text, *drafted], min_ngram, max_ngram, count)
            rows.append([*drafted, *found])
        return np.array(rows)


@on_devices
@pytest.mark.parametrize("vocab", sizes(1, 2, 3, 10, 1000))
@pytest.mark.parametrize(("min_ngram", "max_ngram"), sizes((1, 1), (1, 4), (2, 3), (4, 4), (3, 32)))
def test_random_texts(device: str, vocab: int, min_ngram: int, max_ngram: int) -> None:
    rng = np.random.default_rng([vocab, min_ngram, max_ngram])
    for num_tokens, first in ((1, 0), (5, 0), (5, 2), (3, 3), (40, 7)):
        for max_len in (1, 5, 80):
            texts = Texts(rng, 20, max_len, vocab)
            chain = rng.integers(vocab, size=(20, num_tokens))
            chain[rng.random(chain.shape) < 0.02] = -1
            got = texts.run(device, chain, first, min_ngram, max_ngram)
            assert np.array_equal(got, texts.expected(chain, first, min_ngram, max_ngram))


@on_devices
@pytest.mark.parametrize("length", sizes(5000, 40000, small=1))
def test_long_texts(device: str, length: int) -> None:
    rng = np.random.default_rng(length)
    texts = Texts(rng, 2, length, 100000)
    texts.lengths[:] = length
    for slot, begin in zip(texts.slots, (0, length // 2 + 3)):
        texts.history[slot, begin : begin + 8] = np.arange(200001, 200009)
        texts.history[slot, -3:] = np.arange(200001, 200004)
        texts.roots[slot] = 200004
    got = texts.run(device, np.zeros((2, 4), int), 0, 1, 4)
    assert got.tolist() == [[200005, 200006, 200007, 200008]] * 2


@on_devices
def test_a_repeating_text_is_continued(device: str) -> None:
    texts = Texts(np.random.default_rng(0), 1, 8, 10)
    texts.history[:], texts.lengths[:], texts.roots[:] = [1, 2, 3, 1, 2, 3, 1, 2], 8, 3
    assert texts.run(device, np.zeros((1, 7), int), 0, 1, 4).tolist() == [[1, 2, 3, 1, 2, 3, 1]]


@on_devices
def test_limits(device: str) -> None:
    texts = Texts(np.random.default_rng(0), 1, 8, 10)
    with pytest.raises(ValueError, match="3 to 2"):
        texts.run(device, np.zeros((1, 2), int), 0, 3, 2)
    with pytest.raises(ValueError, match="1 to 33"):
        texts.run(device, np.zeros((1, 2), int), 0, 1, 33)
    with pytest.raises(ValueError, match="a chain of 2 tokens, of which 3 are given"):
        texts.run(device, np.zeros((1, 2), int), 3, 1, 4)
