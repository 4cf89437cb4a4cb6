"""keyless_rows: each row is a sequence of its own, at the root's position."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.util import context, on_devices, ops, put_ints, put_raw, sizes

PATH = 5


@on_devices
@pytest.mark.parametrize("num_rows", sizes(1, 3, 32))
@pytest.mark.parametrize("num_seqs", sizes(1, 7, 64))
def test_rows(device: str, num_seqs: int, num_rows: int) -> None:
    rng = np.random.default_rng([num_seqs, num_rows])
    num_slots, count = num_seqs + 2, num_seqs * num_rows
    slots = rng.permutation(num_slots)[:num_seqs]
    lengths = rng.integers(1, 5000, size=num_slots)
    roots = rng.integers(1000, size=num_slots)
    counts = rng.integers(PATH + 1, size=num_slots)
    accepted = ops.Accepted(
        ids=put_ints(device, np.zeros((num_slots, PATH))),
        paths=put_ints(device, np.zeros((num_slots, PATH))), counts=put_ints(device, counts),
    )  # fmt: skip
    out = {
        name: put_ints(device, np.full(size, -7))
        for name, size in {
            "row_slots": count,
            "positions": count,
            "token_seqs": count,
            "seq_token_begin": count + 1,
            "root_ids": num_seqs,
            "hidden_rows": num_seqs,
            "draft_lengths": num_slots,
        }.items()
    }
    masks = put_raw(device, np.full(count, 7, np.uint64))
    ops.keyless_rows(
        context(device), num_rows=num_rows, seq_slots=put_ints(device, slots),
        lengths=put_ints(device, lengths), next_tokens=put_ints(device, roots), accepted=accepted,
        masks=masks, **out,
    )  # fmt: skip
    found = {name: array.numpy() for name, array in out.items()}
    of_row = slots.repeat(num_rows)
    assert np.array_equal(found["row_slots"], of_row)
    assert np.array_equal(found["positions"], lengths[of_row])
    assert np.array_equal(found["token_seqs"], np.arange(count))
    assert np.array_equal(found["seq_token_begin"], np.arange(count + 1))
    assert not masks.numpy().any()
    assert np.array_equal(found["root_ids"], roots[slots])
    assert np.array_equal(found["hidden_rows"], slots * PATH + (lengths[slots] - 1) % PATH)
    expected = np.full(num_slots, -7)
    expected[slots] = lengths[slots] - np.maximum(counts[slots], 1)
    assert np.array_equal(found["draft_lengths"], expected)
