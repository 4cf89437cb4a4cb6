from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.util import (
    Step,
    context,
    get,
    inv_freq_of,
    on_devices,
    on_devices_and_dtypes,
    ops,
    put,
    random_tree,
    rounded,
    sizes,
)
from tests.reference import ops as reference
from tests.tolerances import KERNELS, assert_close

HEADS = sizes(
    (1, 1, 64), (4, 2, 128), (3, 1, 512), (7, 1, 64), (16, 2, 128), (2, 2, 256), (3, 1, 80)
)


def check_step(
    device: str, dtype: str, step: Step, heads: tuple[int, int, int], *,
    bias: bool = False, norm: bool = False, scaling: float = 1.0, eps: float = 1e-6,
    rotary_dim: int = 0, spread: bool = False, norm_offset: float = 0,
) -> None:  # fmt: skip
    """Checks a step. `spread`: a gate of the size of a head follows each query head."""
    num_heads, num_kv, dim = heads
    columns = (num_heads + 2 * num_kv) * dim
    rng = np.random.default_rng(3)
    inv_freq = inv_freq_of(rotary_dim or dim)

    def draw(*shape: int) -> np.ndarray:
        return rounded(rng.standard_normal(shape), dtype)

    qkv = draw(step.num_rows, columns)
    biases = draw(columns) if bias else None
    q_norm, k_norm = (draw(dim), draw(dim)) if norm else (None, None)
    cache_shape = (step.num_pages, num_kv, 64, dim)
    k_before, v_before = draw(*cache_shape), draw(*cache_shape)

    heads_in = (qkv if biases is None else qkv + biases).reshape(step.num_rows, -1, dim)
    q, k, v = np.split(heads_in, [num_heads, num_heads + num_kv], axis=1)
    if q_norm is not None and k_norm is not None:
        q, k = (reference.rms_norm(x, norm_offset + w, eps) for x, w in ((q, q_norm), (k, k_norm)))
    new_qkv, new_k, new_v = qkv.copy(), k_before.copy(), v_before.copy()
    for row in range(step.num_rows):
        position = int(step.positions[row])
        rotated = reference.rope(q[row], position, inv_freq, scaling)
        new_qkv[row, : num_heads * dim] = rotated.reshape(-1)
        page, entry = step.where(step.token_seqs[row], step.token_entries[row])
        new_k[page, :, entry] = reference.rope(k[row], position, inv_freq, scaling)
        new_v[page, :, entry] = v[row]

    layout, wide = {}, qkv
    if spread:
        gates = draw(step.num_rows, num_heads, dim)
        wide = spread_out(qkv, gates)
        k = 2 * num_heads * dim
        layout["layout"] = ops.QkvLayout(
            row=k + 2 * num_kv * dim, q_head=2 * dim, k=k, v=k + num_kv * dim
        )
        new_qkv = spread_out(new_qkv, gates)

    def run(device: str) -> list[np.ndarray]:
        def optional(values: np.ndarray | None) -> Any:
            return None if values is None else put(device, values, dtype)

        arrays = [put(device, a, dtype) for a in (wide, k_before, v_before)]
        rotary = ops.RotaryKv(
            qkv=arrays[0], k_cache=arrays[1], v_cache=arrays[2], bias=optional(biases),
            q_norm=optional(q_norm), k_norm=optional(k_norm), norm_eps=eps,
            norm_offset=norm_offset, inv_freq=put(device, inv_freq), attention_scaling=scaling,
            num_heads=num_heads, num_kv_heads=num_kv, head_dim=dim, tokens=step.rows(device),
            rotary_dim=rotary_dim, **layout,
        )  # fmt: skip
        ops.rotary_kv(context(device), rotary)
        return [get(array) for array in arrays]

    results = run(device)
    tolerance = KERNELS["exact_inputs"][dtype]
    q_columns = num_heads * dim * (2 if spread else 1)
    assert_close(results[0][:, :q_columns], new_qkv[:, :q_columns], tolerance)
    for result, new, before in zip(results[1:], (new_k, new_v), (k_before, v_before)):
        assert_close(result, new, tolerance)
        assert np.array_equal(result[new == before], new[new == before]), "another entry changed"
    if device == "cuda":
        for result, oracle in zip(results[1:], run("cpu")[1:]):
            assert_close(result, oracle, tolerance)


@on_devices_and_dtypes
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("bias", "norm"), [(False, False), (True, False), (False, True)])
def test_heads(device: str, dtype: str, heads: Any, bias: bool, norm: bool) -> None:
    if device == "cuda" and heads[2] == 80:
        pytest.skip("head_dim 80 is for the CPU only")
    step = Step(lengths=[0, 63, 64, 130], counts=[3, 2, 1, 5])
    check_step(device, dtype, step, heads, bias=bias, norm=norm)


@on_devices_and_dtypes
def test_all_together(device: str, dtype: str) -> None:
    step = Step(lengths=[5, 1], counts=[1, 64])
    check_step(device, dtype, step, (4, 2, 64), bias=True, norm=True, scaling=1.19, eps=1e-5)


@on_devices_and_dtypes
def test_zero_centred_norms(device: str, dtype: str) -> None:
    step = Step(lengths=[5, 1], counts=[1, 3])
    check_step(device, dtype, step, (4, 2, 64), norm=True, norm_offset=1)


def spread_out(qkv: np.ndarray, gates: np.ndarray) -> np.ndarray:
    """qkv with gates [T, Hq, D] between the query heads."""
    num_rows, num_heads, dim = gates.shape
    q, rest = np.split(qkv, [num_heads * dim], axis=1)
    pairs = np.concatenate([q.reshape(gates.shape), gates], axis=2)
    return np.concatenate([pairs.reshape(num_rows, -1), rest], axis=1)


@on_devices_and_dtypes
@pytest.mark.parametrize(
    ("heads", "rotary_dim"),
    [
        ((4, 2, 128), 32),
        ((2, 1, 256), 64),
        ((2, 1, 512), 128),
        ((3, 1, 64), 16),
        ((2, 2, 128), 112),
    ],
)
@pytest.mark.parametrize("spread", [False, True])
def test_rotary_dim_below_head_dim(
    device: str, dtype: str, heads: Any, rotary_dim: int, spread: bool
) -> None:
    step = Step(lengths=[0, 63, 130], counts=[3, 2, 5])
    check_step(
        device, dtype, step, heads, bias=True, norm=True, rotary_dim=rotary_dim, spread=spread
    )


@on_devices
@pytest.mark.parametrize("rotary_dim", [72, 3])
def test_rotary_dim_must_fit(device: str, rotary_dim: int) -> None:
    step = Step(lengths=[0], counts=[1])
    cache = put(device, np.zeros((step.num_pages, 1, 64, 64)), "float16")
    rotary = ops.RotaryKv(
        qkv=put(device, np.zeros((1, 192)), "float16"), k_cache=cache, v_cache=cache,
        inv_freq=put(device, inv_freq_of(128)), num_heads=1, num_kv_heads=1, head_dim=64,
        tokens=step.rows(device), rotary_dim=rotary_dim,
    )  # fmt: skip
    with pytest.raises(ValueError, match=f"{rotary_dim} of 64 elements are rotated"):
        ops.rotary_kv(context(device), rotary)


@on_devices_and_dtypes
def test_tree_positions_differ_from_entries(device: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    masks = [random_tree(rng, 33), random_tree(rng, 12)]
    step = Step(lengths=[60, 7], counts=[33, 12], masks=masks)
    assert not np.array_equal(step.positions, step.token_entries)
    check_step(device, dtype, step, (4, 2, 128))


@on_devices_and_dtypes
def test_far_positions(device: str, dtype: str) -> None:
    step = Step(lengths=[10, 20], counts=[2, 1])
    step.positions = np.array([131070, 131071, 32767])
    check_step(device, dtype, step, (2, 1, 128))


@on_devices_and_dtypes
def test_prefill_chunk(device: str, dtype: str) -> None:
    check_step(device, dtype, Step(lengths=[100, 0], counts=[257, 31]), (4, 2, 64))


@on_devices_and_dtypes
def test_queries_without_keys(device: str, dtype: str) -> None:
    """A layer without own keys has only queries. Their bits are those of queries beside keys."""
    step = Step(lengths=[5, 70], counts=[1, 9])
    rng = np.random.default_rng(0)
    qkv = rounded(rng.standard_normal((step.num_rows, 5 * 64)), dtype)
    cache = put(device, np.zeros((step.num_pages, 1, 64, 64)), dtype)
    found = []
    for num_kv_heads, columns in ((1, 5 * 64), (0, 3 * 64)):
        array = put(device, qkv[:, :columns], dtype)
        ops.rotary_kv(context(device), ops.RotaryKv(
            qkv=array, inv_freq=put(device, inv_freq_of(64)), num_heads=3,
            num_kv_heads=num_kv_heads, head_dim=64, tokens=step.rows(device),
            q_norm=put(device, np.ones(64), dtype), k_cache=cache, v_cache=cache,
        ))  # fmt: skip
        found.append(array.numpy()[:, : 3 * 64])
    assert np.array_equal(*found)


@on_devices
def test_qkv_must_have_all_heads(device: str) -> None:
    step = Step(lengths=[0], counts=[1])
    cache = put(device, np.zeros((step.num_pages, 1, 64, 64)), "float16")
    rotary = ops.RotaryKv(
        qkv=put(device, np.zeros((1, 128)), "float16"), k_cache=cache, v_cache=cache,
        inv_freq=put(device, inv_freq_of(64)), num_heads=1, num_kv_heads=1, head_dim=64,
        tokens=step.rows(device),
    )  # fmt: skip
    with pytest.raises(ValueError, match="128"):
        ops.rotary_kv(context(device), rotary)
