from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.kernels.attention import Case
from tests.kernels.util import (
    ANY_LENGTH,
    SMALL,
    Step,
    chain_masks,
    context,
    deep_tree,
    encode,
    for_cuda_only,
    on_devices,
    on_devices_and_cuda_dtypes,
    on_devices_and_dtypes,
    ops,
    put,
    put_ints,
    put_raw,
    random_tree,
    sizes,
)

HEADS = sizes(
    (1, 1, 64), (4, 2, 128), (3, 1, 512), (6, 2, 64), (8, 2, 128), (7, 1, 128), (14, 2, 64),
    (16, 2, 128), (32, 2, 128), (2, 2, 256), (8, 1, 256), (32, 4, 512),
)  # fmt: skip
EDGES = [0, 1, 63, 64, 65, 127, 128, 129]
DECODE, PREFILL = "attention_decode", "attention_prefill"


# ---- against the reference


@on_devices_and_dtypes
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", [DECODE, PREFILL])
def test_heads(device: str, dtype: str, name: str, heads: tuple[int, int, int]) -> None:
    Case(Step(lengths=[0, 63, 130, 300], counts=[1, 2, 1, 3]), *heads, dtype).check(name, device)


@on_devices_and_dtypes
@pytest.mark.parametrize("heads", [(4, 2, 128), (7, 1, 64), (4, 1, 256), (2, 1, 512)])
@pytest.mark.parametrize("name", [DECODE, PREFILL])
def test_gates_between_query_heads(
    device: str, dtype: str, name: str, heads: tuple[int, int, int]
) -> None:
    step = Step(lengths=[0, 63, 300], counts=[1, 60, 3])
    Case(step, *heads, dtype, gated=True).check(name, device)


@on_devices_and_dtypes
@pytest.mark.parametrize("heads", [(4, 2, 128), (7, 1, 64), (64, 8, 64)])
@pytest.mark.parametrize(("name", "window"), [(DECODE, 0), (DECODE, 128), (PREFILL, 128)])
def test_sinks(
    device: str, dtype: str, name: str, window: int, heads: tuple[int, int, int]
) -> None:
    step = Step(lengths=[0, 63, 130, 700], counts=[1, 2, 9, 3])
    Case(step, *heads, dtype, window=window, with_sinks=True).check(name, device)
    tree = Step(lengths=[5, 200], counts=[12, 33], masks=[deep_tree(12), deep_tree(33)])
    if name == DECODE:
        Case(tree, *heads, dtype, window=window, with_sinks=True, by_position=True).check(
            name, device
        )


@on_devices
def test_sinks_are_one_for_each_head(device: str) -> None:
    case = Case(Step(lengths=[0], counts=[1]), 4, 2, 64, "float16", with_sinks=True)
    case.sinks = np.zeros(3)
    with pytest.raises(ValueError, match=r"sinks are float32 \[3\]"):
        case.run(DECODE, device)


@on_devices_and_dtypes
@pytest.mark.parametrize("name", [DECODE, PREFILL])
def test_lengths_around_page_edges(device: str, dtype: str, name: str) -> None:
    step = Step(lengths=EDGES, counts=[1] * len(EDGES))
    Case(step, 4, 2, 64, dtype).check(name, device)


@on_devices_and_cuda_dtypes
@pytest.mark.parametrize("lengths", sizes([640], [4095, 4096, 4097], [8191, 8192, 8193],
                                          [12287, 12288, 12289],
                                          [28671, 28672, 28673, 61441],
                                          [32766, 32767, 32768, 70001], small=1))  # fmt: skip
@pytest.mark.parametrize("name", [DECODE, PREFILL])
def test_long(device: str, dtype: str, name: str, lengths: list[int]) -> None:
    step = Step(lengths=lengths, counts=[1] * len(lengths))
    Case(step, 4, 1, 64, dtype).check(name, device)


@on_devices_and_dtypes
@pytest.mark.parametrize("size", sizes(1, 2, 12, 33, 60, 64))
@pytest.mark.parametrize("heads", [(4, 2, 128), (7, 1, 64), (3, 1, 512)])
def test_trees(device: str, dtype: str, size: int, heads: tuple[int, int, int]) -> None:
    rng = np.random.default_rng(size)
    counts = [size, 1, max(1, size // 2)]
    masks = [random_tree(rng, count) for count in counts]
    step = Step(lengths=[200, 63, 0], counts=counts, masks=masks)
    Case(step, *heads, dtype).check(DECODE, device)


@on_devices_and_dtypes
@pytest.mark.parametrize(
    ("lengths", "counts"),
    sizes(
        ([0], [1]), ([0], [65]), ([70, 0, 5], [64, 2, 127]), ([0], [200]), ([129], [129]),
        ([1000], [63]), ([300, 0], [256, 257]), ([127, 128, 129, 383], [1, 130, 383, 1]),
        ([5000], [300]),
    ),
)  # fmt: skip
def test_prefill_chunks(device: str, dtype: str, lengths: list[int], counts: list[int]) -> None:
    if max(lengths) >= 5000 and dtype != "float32":
        for_cuda_only(device, ANY_LENGTH)
    Case(Step(lengths=lengths, counts=counts), 4, 2, 128, dtype).check(PREFILL, device)


@on_devices_and_dtypes
def test_large_scores(device: str, dtype: str) -> None:
    case = Case(Step(lengths=[150, 3], counts=[2, 2]), 4, 2, 64, dtype)
    case.scale = 8.0  # one entry has all the weight; exp of the plain score overflows
    case.check(DECODE, device)
    case.check(PREFILL, device)


WINDOWS = sizes(1, 7, 64, 100, 1000)


@on_devices_and_dtypes
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("heads", sizes((4, 2, 64), (7, 1, 128), (2, 1, 256), (2, 1, 512), small=1))
@pytest.mark.parametrize(
    ("name", "counts"), [(DECODE, [1, 13, 64, 2, 1]), (PREFILL, [1, 200, 64, 129, 40])]
)
def test_window(
    device: str, dtype: str, name: str, counts: list[int], heads: tuple[int, int, int], window: int
) -> None:
    step = Step(lengths=[0, 63, 300, 1000, 4300], counts=counts)
    Case(step, *heads, dtype, window=window).check(name, device)


@on_devices_and_dtypes
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", [DECODE, PREFILL])
def test_window_of_trees(device: str, dtype: str, name: str, window: int) -> None:
    rng = np.random.default_rng(window)
    counts = [33, 64, 1]
    step = Step(lengths=[0, 100, 129], counts=counts, masks=[random_tree(rng, n) for n in counts])
    Case(step, 4, 2, 64, dtype, window=window).check(name, device)


@on_devices_and_dtypes
@pytest.mark.parametrize("window", [0, 5, 100])
def test_by_position(device: str, dtype: str, window: int) -> None:
    counts = [60, 1, 12]
    step = Step(lengths=[200, 63, 0], counts=counts, masks=[deep_tree(n) for n in counts])
    case = Case(step, 4, 2, 128, dtype, window=window, by_position=True)
    case.check(DECODE, device)


# ---- bit for bit


def one_sequence(case: Case, seq: int, rows: Sequence[int]) -> Case:
    """A step with the last tokens of a chain. The earlier tokens are cached."""
    step = case.step
    first = int(step.in_seq[rows[0]])
    alone = Step(lengths=[step.lengths[seq] + first], counts=[len(rows)], seed=77)
    result = type(case)(
        alone, case.num_heads, case.num_kv_heads, case.head_dim, case.dtype,
        with_sinks=case.with_sinks,
    )  # fmt: skip
    result.qkv = case.qkv[list(rows)]
    result.k, result.v = [case.k[seq][: alone.ends[0]]], [case.v[seq][: alone.ends[0]]]
    return result


LENGTHS = [0, 65, 700] if SMALL else [0, 65, 127, 700, 4200]


@on_devices_and_dtypes
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("heads", [(4, 2, 128), (7, 1, 64)])
def test_decode_tokens_do_not_depend_on_the_batch(
    device: str, dtype: str, heads: tuple[int, int, int], sinks: bool
) -> None:
    counts = [1, 7, 64, 13, 2][: len(LENGTHS)]
    case = Case(Step(lengths=LENGTHS, counts=counts), *heads, dtype, with_sinks=sinks)
    together = case.run(DECODE, device).numpy()
    for seq, count in enumerate(counts):
        begin = int(case.step.begins[seq])
        rows = range(begin, begin + count)
        alone = one_sequence(case, seq, rows).run(DECODE, device).numpy()
        assert np.array_equal(alone, together[begin : begin + count]), f"sequence {seq}"
        for row in {rows[0], rows[count // 2], rows[-1]}:
            single = one_sequence(case, seq, [row]).run(DECODE, device).numpy()
            assert np.array_equal(single[0], together[row]), f"token {row} of sequence {seq}"


@on_devices_and_cuda_dtypes
@pytest.mark.parametrize("heads", sizes((4, 1, 64), (3, 1, 128), (2, 1, 512), (2, 1, 256)))
@pytest.mark.parametrize("count", sizes(1, 9, small=1))
def test_decode_does_not_depend_on_split_ranges(
    device: str, dtype: str, count: int, heads: tuple[int, int, int]
) -> None:
    """One sequence with one token has many CTA split ranges. Many sequences or tokens have few."""
    lengths = [300] if SMALL else [9001, 33800, 3000]
    num_rows = [count] * len(lengths) + [1] * 9
    case = Case(Step(lengths=[*lengths, *range(9)], counts=num_rows), *heads, dtype)
    together = case.run(DECODE, device).numpy()
    for seq in range(len(lengths)):
        rows = range(seq * count, (seq + 1) * count)
        alone = one_sequence(case, seq, rows).run(DECODE, device).numpy()
        assert np.array_equal(alone, together[list(rows)]), f"sequence {seq}"
        for row in {rows[0], rows[-1]}:
            single = one_sequence(case, seq, [row]).run(DECODE, device).numpy()
            assert np.array_equal(single[0], together[row]), f"token {row} of sequence {seq}"


@on_devices_and_dtypes
@pytest.mark.parametrize("window", sizes(5000, 200, small=1))
@pytest.mark.parametrize("count", sizes(1, 9, small=1))
def test_windows_of_long_contexts_do_not_depend_on_split_ranges(
    device: str, dtype: str, count: int, window: int
) -> None:
    lengths = [300, 200] if SMALL else [9001, 33830]
    step = Step(lengths=[*lengths, *range(9)], counts=[count] * len(lengths) + [1] * 9)
    case = Case(step, 4, 1, 64, dtype, window=window)
    together = case.run(DECODE, device).numpy()
    for seq in range(len(lengths)):
        for row in {seq * count, (seq + 1) * count - 1}:
            single = one_sequence(case, seq, [row])
            single.window = window
            same = np.array_equal(single.run(DECODE, device).numpy()[0], together[row])
            assert same, f"token {row} of sequence {seq}"


@on_devices_and_dtypes
def test_a_chain_of_masks_equals_causal(device: str, dtype: str) -> None:
    counts = [12, 64]
    case = Case(Step(lengths=[100, 1], counts=counts), 4, 2, 64, dtype)
    causal = case.run(DECODE, device).numpy()
    case.step.masks = [chain_masks(count) for count in counts]
    assert np.array_equal(case.run(DECODE, device).numpy(), causal)


@on_devices_and_dtypes
def test_a_tree_token_does_not_depend_on_later_tokens(device: str, dtype: str) -> None:
    masks = random_tree(np.random.default_rng(1), 60)
    case = Case(Step(lengths=[333], counts=[60], masks=[masks]), 8, 2, 128, dtype)
    whole = case.run(DECODE, device).numpy()
    for count in (1, 2, 31, 59):
        part = Case(Step(lengths=[333], counts=[count], masks=[masks[:count]]), 8, 2, 128, dtype)
        part.qkv = case.qkv[:count]
        part.k, part.v = [case.k[0][: 333 + count]], [case.v[0][: 333 + count]]
        assert np.array_equal(part.run(DECODE, device).numpy(), whole[:count]), f"{count} tokens"


@on_devices_and_dtypes
def test_decode_does_not_depend_on_max_kv(device: str, dtype: str) -> None:
    case = Case(Step(lengths=LENGTHS, counts=[2] * len(LENGTHS)), 4, 2, 64, dtype)
    expected = case.run(DECODE, device).numpy()
    for max_kv in (4608, 8192, 32768):
        case.step.max_kv = max_kv
        assert np.array_equal(case.run(DECODE, device).numpy(), expected), f"max_kv {max_kv}"


LAST_ENTRIES = sizes(0, 127, 128, 300, 383, 640, 895, 1023, 1024, 1100, 1500, 1919, 2047, small=4)


@on_devices_and_dtypes
@pytest.mark.parametrize(
    ("heads", "count"),
    sizes(
        ((8, 1, 128), 1), ((32, 4, 128), 1), ((32, 8, 128), 2), ((3, 1, 128), 1), ((7, 1, 64), 1),
        ((8, 2, 64), 2), ((2, 2, 64), 8), small=2,
    ),
)  # fmt: skip
def test_clusters_do_not_change_a_bit(
    device: str, dtype: str, count: int, heads: tuple[int, int, int]
) -> None:
    """With up to 2048 entries, Hopper combines the splits of few tokens in clusters."""
    for length in LAST_ENTRIES:
        case = Case(Step(lengths=[length], counts=[count]), *heads, dtype)
        found = []
        for max_kv in (length + count, 2048 + count - 1, 8192):
            case.step.max_kv = max_kv
            found.append(case.run(DECODE, device).numpy())
        assert np.array_equal(found[0], found[2]), f"{length} entries, the grid of {length}"
        assert np.array_equal(found[1], found[2]), f"{length} entries, the grid of 2048"


@on_devices_and_dtypes
@pytest.mark.parametrize("heads", [(4, 2, 64), (2, 1, 128), (2, 1, 512)])
@pytest.mark.parametrize("length", [0, 700])
def test_prefill_tokens_do_not_depend_on_the_chunk(
    device: str, dtype: str, heads: tuple[int, int, int], length: int
) -> None:
    case = Case(Step(lengths=[length], counts=[300]), *heads, dtype)
    whole = case.run(PREFILL, device).numpy()
    for cuts in ([64, 128, 256], [1, 2, 65, 200], [17, 150, 299]):
        edges = [0, *cuts, 300]
        for begin, end in pairwise(edges):
            part = one_sequence(case, 0, range(begin, end)).run(PREFILL, device).numpy()
            assert np.array_equal(part, whole[begin:end]), f"tokens {begin} to {end}"


@on_devices_and_dtypes
@pytest.mark.parametrize("window", [7, 130])
@pytest.mark.parametrize("name", [DECODE, PREFILL])
def test_tokens_with_a_window_do_not_depend_on_the_step(
    device: str, dtype: str, name: str, window: int
) -> None:
    case = Case(Step(lengths=[100, 4200], counts=[64, 64]), 4, 2, 64, dtype, window=window)
    together = case.run(name, device).numpy()
    for seq in (0, 1):
        for first, last in ((0, 1), (1, 20), (20, 64)):
            rows = range(seq * 64 + first, seq * 64 + last)
            part = one_sequence(case, seq, rows)
            part.window = window
            same = np.array_equal(part.run(name, device).numpy(), together[list(rows)])
            assert same, f"tokens {first} to {last} of sequence {seq}"


def level_rows(step: Step, device: str, begin: int, end: int) -> tuple[np.ndarray, Any]:
    """A launch with tokens [begin, end) of every sequence. Returns their rows and StepTokens."""
    index = np.concatenate([first + np.arange(begin, end) for first in step.begins[:-1]])
    slot_lengths = np.full(step.num_slots, 12345)
    slot_lengths[step.slots] = step.lengths
    masks = None
    if step.masks is not None:
        masks = put_raw(device, np.concatenate(step.masks)[index].astype(np.uint64))
    rows = ops.StepTokens(
        num_tokens=len(index), num_seqs=len(step.lengths), max_seq_tokens=end - begin,
        max_kv=step.max_kv, positions=put_ints(device, step.positions[index]),
        token_seqs=put_ints(device, step.token_seqs[index]), seq_slots=put_ints(device, step.slots),
        seq_token_begin=put_ints(device, np.arange(len(step.lengths) + 1) * (end - begin)),
        slot_lengths=put_ints(device, slot_lengths), page_table=put_ints(device, step.page_table),
        ancestor_masks=masks, first_token=begin,
    )  # fmt: skip
    return index, rows


@on_devices_and_dtypes
@pytest.mark.parametrize("heads", [(4, 2, 128), (7, 1, 64), (2, 1, 512)])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize(("name", "window"), [(DECODE, 0), (DECODE, 40), (PREFILL, 0)])
def test_levels_equal_one_launch(
    device: str, dtype: str, name: str, window: int, tree: bool, heads: tuple[int, int, int]
) -> None:
    lengths = [0, 60, 100, 127]
    masks = [random_tree(np.random.default_rng(seq), 64) for seq in range(4)] if tree else None
    step = Step(lengths=lengths, counts=[64] * 4, masks=masks)
    case = Case(step, *heads, dtype, window=window)
    inv_freq = put(device, 100.0 ** -np.linspace(0, 1, case.head_dim // 2))

    def run(edges: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """rotary_kv writes the keys and values of each level."""
        k, v = (
            case.put_raw(device, case.cache([x[:n] for x, n in zip(entries, lengths)]))
            for entries in (case.k, case.v)
        )
        result = np.empty((step.num_rows, case.num_heads * case.head_dim), encode([], dtype).dtype)
        for begin, end in pairwise(edges):
            index, rows = level_rows(step, device, begin, end)
            qkv = put(device, case.qkv[index], dtype)
            rotary = ops.RotaryKv(
                qkv=qkv, inv_freq=inv_freq, k_cache=k, v_cache=v, num_heads=case.num_heads,
                num_kv_heads=case.num_kv_heads, head_dim=case.head_dim, tokens=rows,
            )  # fmt: skip
            ops.rotary_kv(context(device), rotary)
            result[index] = case.launch(name, device, qkv, k, v, rows).numpy()
        return result, k.numpy(), v.numpy()

    for levels, whole in zip(run([0, 1, 11, 21, 63, 64]), run([0, 64])):
        assert levels.tobytes() == whole.tobytes()


def as_plain_decoding(case: Case, nodes: Sequence[int]) -> Case:
    """Each tree node as a sequence of one token. Its ancestors are cached in the order of depth."""
    step = case.step
    lengths, keys, values = [], [], []
    for row in nodes:
        entries, seq = step.visible(row), int(step.token_seqs[row])
        lengths.append(len(entries) - 1)
        keys.append(case.k[seq][entries])
        values.append(case.v[seq][entries])
    alone = Step(lengths=lengths, counts=[1] * len(nodes), seed=5)
    result = replace(case, step=alone, by_position=False)
    result.qkv, result.k, result.v = case.qkv[list(nodes)], keys, values
    return result


def check_by_position(device: str, case: Case, nodes: Sequence[int]) -> None:
    case.by_position = True
    tree = case.run(DECODE, device).numpy()
    for first in range(0, len(nodes), 32):
        some = list(nodes[first : first + 32])
        plain = as_plain_decoding(case, some).run(DECODE, device).numpy()
        wrong = [int(row) for row, bits in zip(some, plain) if not np.array_equal(tree[row], bits)]
        assert not wrong, f"tokens {wrong}"


def trees(counts: list[int]) -> list[np.ndarray]:
    """Returns wide trees and deep trees with these numbers of nodes."""
    rng = np.random.default_rng(len(counts))
    return [deep_tree(n) if i % 2 else random_tree(rng, n) for i, n in enumerate(counts)]


GROUPS = sizes(
    (4, 1, 64), (4, 4, 128), (8, 1, 512), (16, 1, 128), (4, 1, 256), (36, 1, 64), (32, 2, 128)
)


@on_devices_and_dtypes
@pytest.mark.parametrize("size", sizes(2, 12, 1, 33, 60, 64))
@pytest.mark.parametrize("heads", GROUPS)
def test_tree_nodes_equal_plain_decoding(
    device: str, dtype: str, heads: tuple[int, int, int], size: int
) -> None:
    lengths = [127, 0, 128] if SMALL else [0, 1, 63, 64, 100, 127, 128, 129, 300]
    counts = [max(1, size - seq % 3) for seq in range(len(lengths))]
    extra = 5000 if size == 12 else 0  # added to max_kv
    step = Step(lengths=lengths, counts=counts, masks=trees(counts), extra_kv=extra)
    rows = range(0, step.num_rows, 1 if size < 33 else 5)
    check_by_position(device, Case(step, *heads, dtype), rows)


@on_devices_and_cuda_dtypes
@pytest.mark.parametrize(
    ("lengths", "heads", "size"),
    sizes(
        ([4090, 4096], (4, 1, 64), 12), ([5000, 4096, 4090], (16, 1, 128), 60),
        ([5000, 4090], (2, 2, 256), 64), ([5000, 8170], (8, 1, 512), 60),
        ([8192, 12280], (4, 1, 64), 33),
        ([28660], (2, 1, 128), 60), ([61430], (1, 1, 64), 12), ([32750], (2, 1, 128), 60),
        ([33790, 700], (32, 2, 128), 32), ([8170], (32, 2, 128), 64), small=1,
    ),
)  # fmt: skip
def test_tree_nodes_equal_plain_decoding_of_long_contexts(
    device: str, dtype: str, lengths: list[int], heads: tuple[int, int, int], size: int
) -> None:
    if max(lengths) > 5000 and heads != (1, 1, 64):
        for_cuda_only(device, ANY_LENGTH)
    counts = [size] * len(lengths)
    step = Step(lengths=lengths, counts=counts, masks=trees(counts), extra_kv=2500)
    nodes = [first + i for first in step.begins[:-1] for i in {0, 1, size // 2, size - 2, size - 1}]
    check_by_position(device, Case(step, *heads, dtype), nodes)


@on_devices_and_dtypes
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("heads", [(4, 2, 64), (2, 1, 512)])
def test_tree_nodes_with_a_window_equal_plain_decoding(
    device: str, dtype: str, heads: tuple[int, int, int], window: int
) -> None:
    counts = [33, 60, 12]
    step = Step(lengths=[127, 300, 1200], counts=counts, masks=trees(counts))
    rows = range(0, step.num_rows, 3)
    check_by_position(device, Case(step, *heads, dtype, window=window), rows)


@on_devices_and_cuda_dtypes
@pytest.mark.parametrize("window", sizes(0, 1500, small=1))
@pytest.mark.parametrize("head_dim", sizes(64, 128, small=1))
@pytest.mark.parametrize(
    ("lengths", "size"),
    [([1000, 900, 40, 0], 64)] if SMALL
    else [([4060, 2020, 1000, 510], 64), ([2110], 64), ([4200], 32), ([17100], 16)],
)  # fmt: skip
def test_many_trees_equal_plain_decoding(
    device: str, dtype: str, lengths: list[int], size: int, head_dim: int, window: int
) -> None:
    """With many or large trees, attention_splits sums each split group itself."""
    if head_dim > 64 or max(lengths) > 4200:
        for_cuda_only(device, ANY_LENGTH)
    counts = [size] * len(lengths)
    step = Step(lengths=lengths, counts=counts, masks=trees(counts))
    ends = (0, 1, size // 2 - 1, size - 2, size - 1)
    nodes = [first + i for first in step.begins[:-1] for i in ends]
    check_by_position(device, Case(step, 32, 8, head_dim, dtype, window=window), nodes)


# ---- errors


@on_devices
def test_decode_takes_up_to_64_tokens_of_a_sequence(device: str) -> None:
    with pytest.raises(ValueError, match="65"):
        Case(Step(lengths=[0], counts=[65]), 1, 1, 64, "float16").run(DECODE, device)


@on_devices
@pytest.mark.parametrize("name", [DECODE, PREFILL])
def test_query_heads_must_be_a_multiple_of_kv_heads(device: str, name: str) -> None:
    with pytest.raises(ValueError, match="5"):
        Case(Step(lengths=[0], counts=[1]), 5, 2, 64, "float16").run(name, device)


@on_devices
@pytest.mark.parametrize("name", [DECODE, PREFILL])
def test_negative_windows_are_refused(device: str, name: str) -> None:
    with pytest.raises(ValueError, match="-3"):
        Case(Step(lengths=[0], counts=[1]), 1, 1, 64, "float16", window=-3).run(name, device)


@on_devices
@pytest.mark.parametrize("name", [DECODE, PREFILL])
def test_masks_allow_up_to_64_tokens(device: str, name: str) -> None:
    step = Step(lengths=[0], counts=[64], masks=[chain_masks(64)])
    case = Case(step, 1, 1, 64, "float16")
    rows = ops.StepTokens(
        num_tokens=60, num_seqs=1, max_seq_tokens=60, max_kv=65,
        positions=put_ints(device, [0] * 60), token_seqs=put_ints(device, [0] * 60),
        seq_slots=put_ints(device, step.slots),
        seq_token_begin=put_ints(device, [0, 60]), slot_lengths=put_ints(device, [0] * 3),
        page_table=put_ints(device, step.page_table), first_token=5,
        ancestor_masks=put_raw(device, chain_masks(60)),
    )  # fmt: skip
    k, v = (case.put_raw(device, case.cache(entries)) for entries in (case.k, case.v))
    with pytest.raises(ValueError, match="65"):
        case.launch(name, device, put(device, case.qkv[:60], "float16"), k, v, rows)


@on_devices
def test_by_position_needs_masks(device: str) -> None:
    case = Case(Step(lengths=[0], counts=[2]), 1, 1, 64, "float16", by_position=True)
    with pytest.raises(ValueError, match="masks"):
        case.run(DECODE, device)
    case.step.masks = [chain_masks(2)]
    with pytest.raises(ValueError, match="attention_decode"):
        case.run(PREFILL, device)
