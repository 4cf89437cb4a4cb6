"""Sparse attention over an fp8 KV cache: compressed keys, attention, and bits."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from tests.kernels.sparse import Fp8SparseCase, compressed_on, step_after
from tests.kernels.test_attention import check_by_position, one_sequence, trees
from tests.kernels.test_fp8_cache import Fp8Case
from tests.kernels.test_sparse_attention import (
    HEADS,
    REAL_RULE,
    check_attention,
    check_blocks,
    check_compressed,
)
from tests.kernels.util import (
    ANY_LENGTH,
    Step,
    deep_tree,
    for_cuda_only,
    on_devices,
    on_devices_and_cuda_dtypes,
    on_devices_and_dtypes,
    sizes,
)

NAMES = ["attention_decode", "attention_prefill"]


# ---- compressed keys


@on_devices_and_dtypes
@pytest.mark.parametrize("heads", [(4, 2, 64), (7, 1, 128), (4, 4, 256)])
def test_compressed_keys_of_a_prompt(device: str, dtype: str, heads: tuple[int, int, int]) -> None:
    """The compressed keys of CUDA have the bits of those of the CPU."""
    step = Step(lengths=[0, 0, 63, 64, 120, 130], counts=[1, 200, 1, 64, 8, 77])
    case = Fp8SparseCase(step, *heads, dtype)
    check_compressed(case, device, None, step.lengths, step.ends)
    if device == "cuda":
        for found, expected in zip(*(compressed_on(each, case, None) for each in (device, "cpu"))):
            np.testing.assert_array_equal(found, expected)


@on_devices_and_dtypes
def test_compressed_keys_of_accepted_tokens(device: str, dtype: str) -> None:
    lengths, counts = [0, 14, 15, 63, 64, 126, 127, 200, 190], [1, 1, 1, 1, 1, 2, 2, 17, 0]
    case = Fp8SparseCase(step_after(lengths, counts), *HEADS, dtype)
    ends = [length + count for length, count in zip(lengths, counts)]
    check_compressed(case, device, counts, lengths, ends)


@on_devices
def test_scales_of_compressed_keys_must_fit(device: str) -> None:
    case = Fp8SparseCase(Step(lengths=[0], counts=[64]), *HEADS, "float16")
    codes = case.key_planes(device)[0]
    for planes, message in (
        ([codes], "compress_keys: a cache is uint8"),
        ([codes, codes], "the scales of a cache are uint8"),
    ):
        case.key_planes = lambda _, planes=planes: planes  # type: ignore[method-assign, misc]
        with pytest.raises(ValueError, match=message):
            compressed_on(device, case, None)


# ---- attention to the chosen blocks


@on_devices_and_dtypes
@pytest.mark.parametrize("heads", sizes((8, 2, 64), (7, 1, 128), (32, 2, 128)))
@pytest.mark.parametrize("name", NAMES)
def test_attention(device: str, dtype: str, name: str, heads: tuple[int, int, int]) -> None:
    step = Step(lengths=[0, 280, 383, 1000], counts=[1, 33, 2, 1])
    case = Fp8SparseCase(step, *heads, dtype)
    check_blocks(case, device)
    check_attention(case, name, device)


@on_devices_and_dtypes
@pytest.mark.parametrize("heads", sizes((8, 2, 64), (7, 1, 128), (20, 1, 64), (32, 2, 128)))
def test_one_token_of_each_sequence(device: str, dtype: str, heads: tuple[int, int, int]) -> None:
    """Up to 16 heads of a KV head have a kernel of their own."""
    lengths = [0, 63, 64, 127, 299, 300, 383, 448, 1000]
    step = Step(lengths=lengths, counts=[1] * len(lengths))
    check_attention(Fp8SparseCase(step, *heads, dtype), "attention_decode", device)


@on_devices_and_dtypes
def test_prefill_across_the_switch(device: str, dtype: str) -> None:
    step = Step(lengths=[0, 250, 640], counts=[700, 200, 65])
    check_attention(Fp8SparseCase(step, *HEADS, dtype), "attention_prefill", device)


@on_devices_and_dtypes
@pytest.mark.parametrize("size", sizes(12, 33, 64))
@pytest.mark.parametrize("heads", sizes(HEADS, (16, 1, 128), small=1))
def test_trees(device: str, dtype: str, heads: tuple[int, int, int], size: int) -> None:
    step = Step(lengths=[280, 383, 1000], counts=[size] * 3, masks=[deep_tree(size)] * 3)
    case = Fp8SparseCase(step, *heads, dtype, by_position=True)
    check_attention(case, "attention_decode", device)


@on_devices_and_cuda_dtypes
@pytest.mark.parametrize("name", NAMES)
def test_the_published_rule(device: str, dtype: str, name: str) -> None:
    step = Step(lengths=[8190, 20000], counts=[4, 3])
    check_attention(Fp8SparseCase(step, 32, 2, 128, dtype, rule=REAL_RULE), name, device)


# ---- bits


@on_devices_and_dtypes
@pytest.mark.parametrize("heads", sizes(HEADS, (16, 1, 128), (7, 1, 128), small=2))
def test_tree_nodes_equal_plain_decoding(
    device: str, dtype: str, heads: tuple[int, int, int]
) -> None:
    """The trees are wide or deep, and cross dense_len and the edges of pages."""
    counts = [40, 12, 33, 64]
    step = Step(lengths=[280, 370, 383, 1000], counts=counts, masks=trees(counts))
    check_by_position(device, Fp8SparseCase(step, *heads, dtype), range(0, step.num_rows, 5))


@on_devices_and_cuda_dtypes
def test_tree_nodes_of_long_contexts_equal_plain_decoding(device: str, dtype: str) -> None:
    for_cuda_only(device, ANY_LENGTH)
    counts = [60, 32]
    step = Step(lengths=[33790, 8180], counts=counts, masks=trees(counts))
    case = Fp8SparseCase(step, 32, 2, 128, dtype, rule=REAL_RULE)
    check_by_position(device, case, [0, 1, 30, 59, 60, 61, 75, 91])


@on_devices_and_dtypes
@pytest.mark.parametrize("heads", sizes(HEADS, (16, 1, 128), (7, 1, 128), small=2))
@pytest.mark.parametrize("name", NAMES)
def test_tokens_do_not_depend_on_the_step(
    device: str, dtype: str, name: str, heads: tuple[int, int, int]
) -> None:
    """Chunks of a prompt, and tokens of a decode step, alone and among other sequences."""
    counts = [64, 10, 1, 33] if name == "attention_decode" else [200, 100, 1, 70]
    case = Fp8SparseCase(Step(lengths=[250, 700, 1100, 370], counts=counts), *heads, dtype)
    whole = case.run(name, device).numpy()
    for seq, count in enumerate(counts):
        row = int(case.step.begins[seq])
        cuts = sorted({0, count // 3, count - 1, count})
        for begin, end in pairwise(cuts):
            rows = range(row + begin, row + end)
            found = one_sequence(case, seq, rows).run(name, device).numpy()
            assert np.array_equal(found, whole[row + begin : row + end]), (seq, begin)


@on_devices_and_cuda_dtypes
@pytest.mark.parametrize("pairs", [1, 2, 5])
def test_prompts_in_rounds(device: str, dtype: str, pairs: int) -> None:
    """The scratch holds one KV head of a sequence, or several sequences."""
    for_cuda_only(device, "the CPU kernel has no scratch")
    step = Step(lengths=[0, 250, 1000], counts=[290, 200, 70])
    whole, parts = (Fp8SparseCase(step, 32, 2, 128, dtype, pairs=n) for n in (6, pairs))
    found, expected = (case.run("attention_prefill", device).numpy() for case in (parts, whole))
    assert np.array_equal(found, expected)


@on_devices_and_dtypes
@pytest.mark.parametrize("name", NAMES)
def test_below_dense_len_the_bits_are_those_of_dense_attention(
    device: str, dtype: str, name: str
) -> None:
    case = Fp8SparseCase(Step(lengths=[0, 200], counts=[60, 64]), *HEADS, dtype)
    dense = Fp8Case(case.step, *HEADS, dtype)
    dense.k, dense.v = case.k, case.v
    assert np.array_equal(case.run(name, device).numpy(), dense.run(name, device).numpy())
