"""mamba2: prompts in chunks, token trees, the deferred commit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.kernels.util import (
    GPU,
    Step,
    context,
    deep_tree,
    empty,
    get,
    ops,
    put,
    put_ints,
    rounded,
)
from tests.tolerances import Tolerance, assert_close

# float32 sums over N and the recurrence; y is rounded once.
TOLERANCE = {
    "float32": Tolerance(diff=1e-10, max_abs=2e-5),
    "float16": Tolerance(diff=1e-6, max_abs=2e-3),
    "bfloat16": Tolerance(diff=4e-5, max_abs=1.6e-2),
}
NODES = 64
# heads, columns, groups, state_size
SIZES = [(1, 8, 1, 8), (6, 24, 2, 40), (4, 64, 2, 128), (3, 16, 1, 128), (2, 128, 1, 256)]
on_devices_dtypes_sizes = pytest.mark.parametrize(
    ("device", "dtype", "size"),
    [("cpu", dtype, size) for dtype in ("float32", "bfloat16") for size in SIZES[:3]]
    + [
        pytest.param("cuda", dtype, size, marks=GPU)
        for dtype in ("float16", "bfloat16")
        for size in SIZES[2:]
    ],
)
LIMITS = {"min_step": 0.1, "max_step": 1.5}  # both are reached


@dataclass(frozen=True)
class Inputs:
    """Weights, and the tokens of a sequence."""

    size: tuple[int, int, int, int]
    xbc: np.ndarray  # [T, heads P + 2 groups N]
    dt: np.ndarray  # [T, 3 + heads]
    a_log: np.ndarray
    dt_bias: np.ndarray
    d: np.ndarray


def made(size: tuple[int, int, int, int], count: int, dtype: str) -> Inputs:
    heads, width, groups, state = size
    rng = np.random.default_rng(width + count)
    xbc = rounded(rng.standard_normal((count, heads * width + 2 * groups * state)), dtype)
    dt = rounded(2 * rng.standard_normal((count, 3 + heads)), dtype)
    a_log, dt_bias, d = (rng.uniform(low, 1, heads) for low in (-3, -2, 0.5))
    return Inputs(size, xbc, dt, *(x.astype(np.float32) for x in (a_log, dt_bias, d)))


def outputs(of: Inputs, tokens: range) -> np.ndarray:
    """y of a chain of tokens from an empty state, in float64."""
    heads, width, groups, state = of.size
    s, rows = np.zeros((heads, width, state)), []
    for t in tokens:
        x, b, c = np.split(of.xbc[t], [heads * width, heads * width + groups * state])
        x = x.reshape(heads, width)
        b, c = (np.repeat(m.reshape(groups, state), heads // groups, 0) for m in (b, c))
        step = np.clip(np.log1p(np.exp(of.dt[t, 3:] + of.dt_bias)), *LIMITS.values())
        decay = np.exp(-np.exp(of.a_log.astype(np.float64)) * step)
        s = s * decay[:, None, None] + (step[:, None] * x)[:, :, None] * b[:, None]
        rows.append(((s * c[:, None]).sum(-1) + of.d[:, None] * x).reshape(-1))
    return np.array(rows).reshape(len(tokens), heads * width)


class Slots:
    """The state of the slots on a device."""

    def __init__(self, device: str, dtype: str, step: Step, of: Inputs) -> None:
        self.device, self.dtype, self.of = device, dtype, of
        heads, width, _, state = of.size
        slots = step.num_slots
        self.state = put(device, np.zeros((slots, heads, width, state)), "float32")
        self.pending = put(device, np.zeros((slots, heads, NODES, width + state + 8)), dtype)
        self.folded = put_ints(device, np.zeros((slots, heads)))

    def run(self, step: Step, tokens: Any, commits: bool, parents: Any = None, **more: Any) -> Any:
        of, device = self.of, self.device
        heads, width, groups, state = of.size
        y = empty(device, [step.num_rows, heads * width], self.dtype)
        ops.mamba2(
            context(device), y=y, xbc=put(device, of.xbc[tokens], self.dtype),
            dt=put(device, of.dt[tokens], self.dtype), first_dt=3, num_heads=heads, head_dim=width,
            num_groups=groups, state_size=state, a_log=put(device, of.a_log, "float32"),
            dt_bias=put(device, of.dt_bias, "float32"), d=put(device, of.d, "float32"),
            state=self.state, pending=self.pending, folded=self.folded, commits=commits,
            tokens=step.rows(device, parents), **LIMITS, **more,
        )  # fmt: skip
        return get(y)


@on_devices_dtypes_sizes
def test_prompts(device: str, dtype: str, size: tuple[int, int, int, int]) -> None:
    counts = [1, 33, 65, 130]
    step = Step(lengths=[0] * 4, counts=counts)
    of = made(size, step.num_rows, dtype)
    ends = np.cumsum(counts)
    parts = [outputs(of, range(end - count, end)) for end, count in zip(ends, counts)]
    found = Slots(device, dtype, step, of).run(step, slice(None), True)
    assert_close(found, np.concatenate(parts), TOLERANCE[dtype])


@on_devices_dtypes_sizes
def test_chunks_and_decoding_have_the_bits_of_the_prompt(
    device: str, dtype: str, size: tuple[int, int, int, int]
) -> None:
    count = 150
    whole = Step(lengths=[0], counts=[count])
    of = made(size, count, dtype)
    expected = Slots(device, dtype, whole, of).run(whole, slice(None), True)
    slots = Slots(device, dtype, whole, of)
    slot = int(whole.slots[0])
    done, found = 0, []
    accepted: dict[str, Any] = {}
    paths, counts = np.full((whole.num_slots, 8), -1), np.zeros(whole.num_slots)

    def prefill(chunk: int) -> None:
        nonlocal done
        step = Step(lengths=[done], counts=[chunk])
        found.append(slots.run(step, slice(done, done + chunk), True, **accepted))
        done += chunk

    for chunk in (1, 3, 80, 2):
        prefill(chunk)
    for accept in (1, 3, 1, 8, 2, 1):  # a chain of 8, of which the first few are accepted
        step = Step(lengths=[done], counts=[8])
        found.append(slots.run(step, slice(done, done + 8), False, **accepted)[:accept])
        done += accept
        paths[slot, :] = -1
        paths[slot, :accept] = np.arange(accept)
        counts[slot] = accept
        accepted = {"accepted": ops.Accepted(
            ids=put_ints(device, paths), paths=put_ints(device, paths),
            counts=put_ints(device, counts),
        )}  # fmt: skip
    prefill(40)  # the last step's token is added before it
    assert np.array_equal(np.concatenate(found), expected[:done])


@on_devices_dtypes_sizes
@pytest.mark.parametrize("nodes", [2, 33, 64])
def test_tree_nodes_have_the_bits_of_chains(
    device: str, dtype: str, size: tuple[int, int, int, int], nodes: int
) -> None:
    masks = deep_tree(nodes)
    step = Step(lengths=[5], counts=[nodes], masks=[masks])
    of = made(size, 5 + nodes, dtype)
    first = Step(lengths=[0], counts=[5])
    slots = Slots(device, dtype, first, of)
    slots.run(first, slice(5), True)
    parents = [int(mask & ~(1 << i)).bit_length() - 1 for i, mask in enumerate(map(int, masks))]
    found = slots.run(step, slice(5, None), False, parents=put_ints(device, parents))
    paths = np.full((first.num_slots, nodes), -1)
    counts = np.zeros(first.num_slots)
    for node in range(nodes):
        path = [i for i in range(node + 1) if int(masks[node]) >> i & 1]
        tokens = [*range(5), *(5 + i for i in path)]
        chain = Step(lengths=[0], counts=[len(tokens)])
        alone = Slots(device, dtype, chain, of)
        assert np.array_equal(alone.run(chain, tokens, True)[-1], found[node]), f"node {node}"
    # The state after the last node's path is accepted.
    slot = int(first.slots[0])
    paths[slot, : len(path)] = path
    counts[slot] = len(path)
    after = Step(lengths=[len(tokens)], counts=[1])
    accepted = ops.Accepted(
        ids=put_ints(device, paths), paths=put_ints(device, paths), counts=put_ints(device, counts)
    )
    next_token = slots.run(after, [0], False, accepted=accepted)
    assert np.array_equal(next_token, alone.run(after, [0], True))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_shapes_must_fit(device: str) -> None:
    step = Step(lengths=[0], counts=[1])
    of = made(SIZES[2], 1, "float16")
    slots = Slots(device, "float16", step, of)
    slots.of = made((4, 64, 4, 128), 1, "float16")
    slots.of = Inputs(slots.of.size, of.xbc, of.dt, of.a_log, of.dt_bias, of.d)
    with pytest.raises(ValueError, match=r"mamba2: y is \[1, 256\], xbc float16 \[1, 768\]"):
        slots.run(step, slice(None), True)
