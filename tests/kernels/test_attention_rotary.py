"""attention_decode that applies rotary_kv first, bit for bit against the two ops one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.attention import Case
from tests.kernels.util import (
    SMALL,
    Step,
    context,
    deep_tree,
    inv_freq_of,
    on_devices,
    on_devices_and_dtypes,
    ops,
    put,
    random_tree,
    sizes,
)

EDGES = [0, 31, 130] if SMALL else [0, 1, 31, 32, 63, 64, 127, 128, 129, 255, 700, 1100, 4200]


def results(device: str, case: Case, together: bool, **options: Any) -> list[np.ndarray]:
    """Returns out, keys and values. Entries of the step are NaN in the caches before."""
    dim, dtype = case.head_dim, case.dtype
    qkv, _, _, rows = case.put(device)
    k, v = (
        case.put_raw(device, case.cache([x[:n] for x, n in zip(entries, case.step.lengths)]))
        for entries in (case.k, case.v)
    )
    rng = np.random.default_rng(5)

    def weights(size: int) -> Any:
        return put(device, rng.standard_normal(size), dtype)

    columns = (case.num_heads + 2 * case.num_kv_heads) * dim
    more = {name: weights(dim) for name in ("q_norm", "k_norm") if options.get("norm")}
    if options.get("bias"):
        more["bias"] = weights(columns)
    if case.gated:
        begin = 2 * case.num_heads * dim
        more["layout"] = ops.QkvLayout(
            row=qkv.shape[1], q_head=2 * dim, k=begin, v=begin + case.num_kv_heads * dim
        )
    rotary_dim = options.get("rotary_dim", dim)
    rotary = ops.RotaryKv(
        qkv=qkv, inv_freq=put(device, inv_freq_of(rotary_dim)), k_cache=k, v_cache=v,
        num_heads=case.num_heads, num_kv_heads=case.num_kv_heads, head_dim=dim, tokens=rows,
        rotary_dim=rotary_dim, norm_offset=options.get("norm_offset", 0.0),
        attention_scaling=options.get("scaling", 1.0), **more,
    )  # fmt: skip
    if together:
        case.selecting = {"rotary": rotary}
    else:
        ops.rotary_kv(context(device), rotary)
    out = case.launch("attention_decode", device, qkv, k, v, rows)
    case.selecting = {}
    return [array.numpy() for array in (out, k, v)]


def check(device: str, case: Case, **options: Any) -> None:
    apart, together = (results(device, case, x, **options) for x in (False, True))
    names = ("out", "keys", "values")
    wrong = [n for n, x, y in zip(names, apart, together) if x.tobytes() != y.tobytes()]
    assert not wrong


HEADS = sizes(
    (4, 2, 128), (32, 4, 128), (32, 8, 128), (16, 1, 128), (15, 1, 128), (2, 2, 64), (14, 2, 64),
    (16, 1, 64), (8, 1, 256), (16, 2, 256), (17, 1, 64), (3, 1, 512),
)  # fmt: skip


@on_devices_and_dtypes
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("norm", [False, True])
def test_one_token_of_several_sequences(
    device: str, dtype: str, norm: bool, heads: tuple[int, int, int]
) -> None:
    step = Step(lengths=EDGES, counts=[1] * len(EDGES))
    check(device, Case(step, *heads, dtype), norm=norm)


@on_devices_and_dtypes
@pytest.mark.parametrize("length", EDGES)
@pytest.mark.parametrize("max_kv", [0, 8192])
def test_one_sequence(device: str, dtype: str, max_kv: int, length: int) -> None:
    """One sequence has many split ranges, each with one split."""
    case = Case(Step(lengths=[length], counts=[1]), 16, 2, 128, dtype)
    case.step.max_kv = max(case.step.max_kv, max_kv)
    check(device, case, norm=True)


@on_devices_and_dtypes
@pytest.mark.parametrize(
    "options",
    [
        {"bias": True, "norm": True, "norm_offset": 1.0, "scaling": 1.19},
        {"rotary_dim": 32},
        {"rotary_dim": 64, "norm": True},
    ],
)
@pytest.mark.parametrize("gated", [False, True])
def test_options(device: str, dtype: str, gated: bool, options: dict[str, Any]) -> None:
    step = Step(lengths=[0, 63, 300], counts=[1, 1, 1])
    for heads in ((8, 2, 128), (4, 1, 256)):
        check(device, Case(step, *heads, dtype, gated=gated), **options)


@on_devices_and_dtypes
@pytest.mark.parametrize("window", sizes(1, 40, 64, 1000))
def test_window(device: str, dtype: str, window: int) -> None:
    step = Step(lengths=EDGES, counts=[1] * len(EDGES))
    check(device, Case(step, 8, 2, 128, dtype, window=window), norm=True)


@on_devices_and_dtypes
def test_steps_that_run_rotary_kv_by_itself(device: str, dtype: str) -> None:
    """Several tokens a sequence, trees and sinks."""
    chains = Step(lengths=[0, 126, 300], counts=[1, 5, 3])
    check(device, Case(chains, 4, 2, 128, dtype), norm=True)
    check(device, Case(Step(lengths=[70], counts=[1]), 4, 2, 64, dtype, with_sinks=True))
    masks = [random_tree(np.random.default_rng(0), 9), deep_tree(12)]
    tree = Step(lengths=[60, 200], counts=[9, 12], masks=masks)
    check(device, Case(tree, 4, 2, 128, dtype, by_position=True), norm=True)


@on_devices
def test_a_selection_and_rotary_kv_are_an_error(device: str) -> None:
    case = Case(Step(lengths=[70], counts=[1]), 4, 2, 64, "float16")
    qkv, k, v, rows = case.put(device)
    words = put(device, np.zeros((1, 2, 2)), "float32")
    rotary = ops.RotaryKv(
        qkv=qkv, inv_freq=put(device, inv_freq_of(64)), k_cache=k, v_cache=v, num_heads=4,
        num_kv_heads=2, head_dim=64, tokens=rows,
    )  # fmt: skip
    case.selecting = {"rotary": rotary, "selection": words, "max_splits": 1}
    with pytest.raises(ValueError, match="expected one of them"):
        case.launch("attention_decode", device, qkv, k, v, rows)
