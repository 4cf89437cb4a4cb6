"""Compressed keys, the choice of blocks, and attention to the chosen blocks."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.attention import Case
from tests.kernels.sparse import SMALL_RULE, SparseCase, compressed_on, step_after
from tests.kernels.util import (
    PAGE,
    Step,
    chain_masks,
    deep_tree,
    get,
    on_devices,
    on_devices_and_cuda_dtypes,
    on_devices_and_dtypes,
    ops,
    sizes,
)
from tests.reference import sparse as reference
from tests.reference.sparse import Rule
from tests.tolerances import KERNELS, assert_close

HEADS = (8, 2, 64)
REAL_RULE = Rule()
# A score is a sum of exponentials; scores closer than this may change places.
SAME_SCORE = {"float32": 1e-4, "float16": 1e-4, "bfloat16": 1e-4}


# ---- compressed keys


@on_devices_and_dtypes
@pytest.mark.parametrize("heads", [(4, 2, 64), (7, 1, 128), (4, 4, 256)])
def test_compressed_keys_of_a_prompt(device: str, dtype: str, heads: tuple[int, int, int]) -> None:
    step = Step(lengths=[0, 0, 63, 64, 120, 130], counts=[1, 200, 1, 64, 8, 77])
    case = SparseCase(step, *heads, dtype)
    check_compressed(case, device, None, step.lengths, step.ends)


@on_devices_and_dtypes
def test_compressed_keys_of_accepted_tokens(device: str, dtype: str) -> None:
    lengths, counts = [0, 14, 15, 63, 64, 126, 127, 200, 190], [1, 1, 1, 1, 1, 2, 2, 17, 0]
    case = SparseCase(step_after(lengths, counts), *HEADS, dtype)
    ends = [length + count for length, count in zip(lengths, counts)]
    check_compressed(case, device, counts, lengths, ends)


def check_compressed(
    case: SparseCase, device: str, counts: Any, begins: list[int], ends: list[int]
) -> None:
    """Keys that end among the new tokens are the means; others are untouched, that is NaN."""
    planes = compressed_on(device, case, counts)
    for seq, (begin, end) in enumerate(zip(begins, ends)):
        k = case.k[seq]
        for plane, (length, stride) in zip(planes, (reference.FINE, reference.COARSE)):
            means = reference.compress(k, (length, stride))
            for row in range(len(k) // stride):
                page, entry = case.step.where(seq, row * stride)
                found = plane[page, :, entry // stride]
                if not begin <= (row + 1) * stride - 1 < end:
                    assert np.isnan(found).all(), (seq, row)
                elif row == 0:  # its span would begin before the first token
                    assert not found.any()
                else:
                    assert_close(found, means[row - 1], KERNELS["exact_inputs"][case.dtype])


# ---- the choice of blocks


def check_blocks(case: SparseCase, device: str) -> None:
    """The chosen blocks are the reference's; blocks with almost equal scores may change places."""
    found = case.blocks(device)
    for row in range(case.step.num_rows):
        seq, position = case.step.token_seqs[row], int(case.step.positions[row])
        q = case.qkv[row].reshape(-1, case.head_dim)[: case.num_heads]
        fine, coarse = case.compressed(seq)
        wanted = reference.selected_blocks(q, fine, coarse, position, case.rule, case.scale)
        own = position // PAGE
        assert not found[row, :, own + 1 :].any()
        chosen = found[row, :, : own + 1]
        assert (chosen.sum(axis=1) == wanted.sum(axis=1)).all(), position
        if np.array_equal(chosen, wanted):
            continue
        scores = reference.block_scores(q, fine, coarse, position, case.scale)
        for head in range(case.num_kv_heads):
            between = scores[head, list(reference.candidates(position, case.rule))]
            offset = case.rule.init_blocks
            kept = chosen[head, offset : offset + len(between)]
            limit = between[wanted[head, offset : offset + len(between)]].min()
            near = SAME_SCORE[case.dtype] * limit
            assert between[kept].min() >= limit - near, position
            assert between[~kept].max() <= limit + near, position
            assert (chosen[head, :offset] == wanted[head, :offset]).all()
            assert chosen[head, offset + len(between) :].all()


# dense_len 300; windows of 128 tokens are full from block 2 on; more candidates than topk from
# position 6 * 64 on.
EDGES = [0, 1, 63, 64, 127, 128, 191, 298, 299, 300, 301, 319, 320, 383, 384, 385, 447, 448, 511,
         512, 513, 640, 1000]  # fmt: skip


@on_devices_and_dtypes
@pytest.mark.parametrize("heads", sizes((4, 2, 64), (7, 1, 128), (20, 1, 64), (16, 1, 128)))
def test_blocks_around_the_edges(device: str, dtype: str, heads: tuple[int, int, int]) -> None:
    case = SparseCase(Step(lengths=EDGES, counts=[1] * len(EDGES)), *heads, dtype)
    check_blocks(case, device)


@on_devices_and_cuda_dtypes
@pytest.mark.parametrize(
    "lengths", sizes([8191, 8192], [8193, 10239], [10240, 20000], [33000], small=1)
)
def test_blocks_of_the_published_rule(device: str, dtype: str, lengths: list[int]) -> None:
    step = Step(lengths=lengths, counts=[1] * len(lengths))
    check_blocks(SparseCase(step, 32, 2, 128, dtype, rule=REAL_RULE), device)


@on_devices
def test_all_blocks_if_topk_is_larger_than_the_candidates(device: str) -> None:
    rule = Rule(init_blocks=2, window_size=128, topk=50, dense_len=0)
    case = SparseCase(Step(lengths=[0, 300, 2000], counts=[1, 5, 70]), *HEADS, "float16", rule=rule)
    found = case.blocks(device)
    for row, position in enumerate(case.step.positions):
        assert found[row].sum() == 2 * (position // PAGE + 1)


@on_devices
@pytest.mark.parametrize("count", [1, 2])
def test_equal_scores_choose_the_lower_block(device: str, count: int) -> None:
    case = SparseCase(Step(lengths=[999], counts=[count]), *HEADS, "float32")
    case = dataclasses.replace(case, dtype="float16") if device == "cuda" else case
    case.k = [np.ones_like(case.k[0])]
    found = case.blocks(device)
    # The query is in block 15. The list holds block 0, two best ones and the window.
    assert (np.flatnonzero(found[0, 0]) == [0, 1, 2, 14, 15]).all()
    assert (found == found[0, 0]).all()


@on_devices
@pytest.mark.parametrize("topk", [1, 2, 13])
def test_no_best_blocks(device: str, topk: int) -> None:
    """topk counts the first blocks, too: a query gets topk blocks and the three of its window."""
    rule = Rule(init_blocks=1, window_size=192, topk=topk, dense_len=0)
    case = SparseCase(Step(lengths=[1000], counts=[1]), *HEADS, "float16", rule=rule)
    assert (case.blocks(device)[0].sum(axis=1) == topk + 3).all()


@on_devices
@pytest.mark.parametrize("count", [1, 3])
def test_nan_keys_choose_as_many_blocks(device: str, count: int) -> None:
    case = SparseCase(Step(lengths=[1000], counts=[count]), *HEADS, "float16")
    case.k = [np.full_like(case.k[0], np.nan)]
    assert (case.blocks(device).sum(axis=2) == 5).all()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 1500), min_size=1, max_size=3),
    count=st.integers(1, 70),
    group=st.sampled_from([1, 2, 3, 16]),
    rule=st.builds(
        lambda init, best, window, dense: Rule(init, 64 * window, init + best, dense),
        st.integers(0, 3),
        st.integers(0, 9),
        st.integers(2, 5),
        st.integers(0, 700),
    ),
    seed=st.integers(0, 1000),
)
def test_any_rule(lengths: list[int], count: int, group: int, rule: Rule, seed: int) -> None:
    step = Step(lengths=lengths, counts=[count] * len(lengths), seed=seed)
    case = SparseCase(step, 2 * group, 2, 16, "float32", seed=seed, rule=rule)
    check_blocks(case, "cpu")
    found = case.blocks("cpu")
    num_splits = (found.sum(axis=2) + 1) // 2  # a split has two blocks
    assert num_splits.max() <= ops.max_selected_splits(**vars(rule), max_kv=step.max_kv)


@on_devices_and_cuda_dtypes
def test_the_choice_does_not_depend_on_other_tokens(device: str, dtype: str) -> None:
    lengths = [290, 700, 1100, 900]
    case = SparseCase(Step(lengths=lengths, counts=[64, 1, 33, 1100]), *HEADS, dtype)
    together = case.blocks(device)
    for seq, begin in enumerate(case.step.begins[:-1]):
        end = int(case.step.begins[seq + 1])
        edges = {1023, 1024} if seq == 3 else set()  # a launch has 1,024 tokens
        for row in {int(begin), end - 1} | edges:
            alone = Step(lengths=[int(case.step.positions[row])], counts=[1], seed=5)
            single = SparseCase(alone, *HEADS, dtype)
            single.qkv, single.k = case.qkv[[row]], [case.k[seq][: alone.ends[0]]]
            words = single.blocks(device)[0]
            assert np.array_equal(words, together[row, :, : words.shape[1]])


@on_devices_and_cuda_dtypes
def test_one_launch_chooses_as_several(device: str, dtype: str) -> None:
    """Steps of one token: lengths shrink and grow, so messages of earlier launches are left."""
    cases = [
        SparseCase(Step(lengths=lengths, counts=[1] * len(lengths)), 32, 2, 128, dtype, rule=rule)
        for lengths, rule in [
            (EDGES[:8], SMALL_RULE),
            ([33000], REAL_RULE),
            (EDGES[8:16], SMALL_RULE),
            ([10240, 20000], REAL_RULE),
            (EDGES[16:], SMALL_RULE),
        ]
    ]
    for case in [*cases, cases[1], cases[0]]:
        several = dataclasses.replace(case, one_launch=False)
        assert np.array_equal(case.blocks(device), several.blocks(device))


# ---- attention to the chosen blocks


def check_attention(case: SparseCase, name: str, device: str) -> None:
    """Compares with attention in float64 over the blocks that select_blocks chose."""
    found = get(case.run(name, device))
    blocks = case.blocks(device)
    wanted = np.empty_like(found)
    for row in range(case.step.num_rows):
        seq, position = case.step.token_seqs[row], int(case.step.positions[row])
        entries = case.entries(row)  # entries that the token sees, in the order of positions
        q = case.qkv[row].reshape(-1, case.head_dim)[: case.num_heads]
        k, v = case.k[seq][entries], case.v[seq][entries]
        chosen = blocks[row, :, : position // PAGE + 1]
        wanted[row] = reference.attend(q, k, v, position, chosen, case.scale).reshape(-1)
    assert_close(found, wanted, KERNELS["attention"][case.dtype])


@on_devices_and_dtypes
@pytest.mark.parametrize("heads", sizes((8, 2, 64), (7, 1, 128), (32, 2, 128)))
@pytest.mark.parametrize("name", ["attention_decode", "attention_prefill"])
def test_attention(device: str, dtype: str, name: str, heads: tuple[int, int, int]) -> None:
    step = Step(lengths=[0, 280, 383, 1000], counts=[1, 33, 2, 1])
    check_attention(SparseCase(step, *heads, dtype), name, device)


@on_devices_and_dtypes
def test_prefill_across_the_switch(device: str, dtype: str) -> None:
    step = Step(lengths=[0, 250, 640], counts=[700, 200, 65])
    check_attention(SparseCase(step, *HEADS, dtype), "attention_prefill", device)


@on_devices_and_dtypes
@pytest.mark.parametrize("heads", [HEADS, (16, 1, 128), (7, 1, 128)])
def test_prefill_bits_do_not_depend_on_the_chunk(
    device: str, dtype: str, heads: tuple[int, int, int]
) -> None:
    """All tokens at once against two chunks, across dense_len and within a page."""
    together = SparseCase(Step(lengths=[270], counts=[200]), *heads, dtype)
    found = together.run("attention_prefill", device).numpy()
    for length, count in ((270, 101), (371, 99)):
        part = SparseCase(Step(lengths=[length], counts=[count]), *heads, dtype)
        part.qkv = together.qkv[length - 270 : length - 270 + count]
        part.k, part.v = ([x[0][: length + count]] for x in (together.k, together.v))
        bits = part.run("attention_prefill", device).numpy()
        assert np.array_equal(bits, found[length - 270 : length - 270 + count])


@on_devices_and_dtypes
@pytest.mark.parametrize("size", sizes(12, 33, 64))
def test_trees(device: str, dtype: str, size: int) -> None:
    step = Step(lengths=[280, 383, 1000], counts=[size] * 3, masks=[deep_tree(size)] * 3)
    case = SparseCase(step, *HEADS, dtype, by_position=True)
    check_attention(case, "attention_decode", device)


@on_devices_and_dtypes
@pytest.mark.parametrize("heads", sizes(HEADS, (16, 1, 128), small=2))
def test_a_tree_node_has_the_bits_of_plain_decoding(
    device: str, dtype: str, heads: tuple[int, int, int]
) -> None:
    """A chain as a tree, across dense_len and page edges, against one token at a time."""
    for length in (280, 370, 1000):
        step = Step(lengths=[length], counts=[40], masks=[chain_masks(40)])
        case = SparseCase(step, *heads, dtype, by_position=True)
        tree = case.run("attention_decode", device).numpy()
        for row in (0, 1, 19, 20, 39):
            alone = Step(lengths=[length + row], counts=[1])
            single = SparseCase(alone, *heads, dtype)
            single.qkv = case.qkv[[row]]
            single.k, single.v = ([x[0][: alone.ends[0]]] for x in (case.k, case.v))
            plain = single.run("attention_decode", device).numpy()
            assert np.array_equal(plain[0], tree[row]), (length, row)


@on_devices_and_dtypes
@pytest.mark.parametrize("name", ["attention_decode", "attention_prefill"])
def test_below_dense_len_the_bits_are_those_of_dense_attention(
    device: str, dtype: str, name: str
) -> None:
    case = SparseCase(Step(lengths=[0, 200], counts=[60, 64]), *HEADS, dtype)
    dense = Case(case.step, *HEADS, dtype)
    assert np.array_equal(case.run(name, device).numpy(), dense.run(name, device).numpy())


# ---- refusals


@on_devices
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window_size": 64}, "window_size is 64, expected a multiple of 64, at least 128"),
        ({"window_size": 200}, "window_size is 200, expected a multiple of 64"),
        ({"init_blocks": -1}, "init_blocks is -1"),
        ({"init_blocks": 4}, "init_blocks is 4 and topk 3"),
        ({"dense_len": -1}, "dense_len is -1"),
    ],
)
def test_impossible_rules(device: str, change: dict[str, int], message: str) -> None:
    rule = dataclasses.replace(SMALL_RULE, **change)
    case = SparseCase(Step(lengths=[0], counts=[1]), *HEADS, "float16", rule=rule)
    with pytest.raises(ValueError, match=message):
        case.blocks(device)
