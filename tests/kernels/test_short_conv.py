"""short_conv: the short convolutions of LFM2 and of Mamba-2, and their state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.util import (
    Step,
    check,
    context,
    deep_tree,
    empty,
    get,
    on_devices,
    on_devices_and_dtypes,
    ops,
    put,
    put_ints,
    rounded,
    sizes,
)

SIZES = sizes((8, 3), (40, 7), (264, 3), (136, 2))  # channels, kernel_size
NODES = 64


def inputs_of(bcx: np.ndarray, dtype: str) -> np.ndarray:
    b, _, x = np.split(bcx, 3, axis=1)
    return rounded(b * x, dtype)


def convolved(bcx: np.ndarray, before: np.ndarray, weight: np.ndarray, dtype: str) -> np.ndarray:
    """The outputs of a chain of tokens after the tokens with the inputs `before`."""
    kernel_size, c = weight.shape[1], np.split(bcx, 3, axis=1)[1]
    all_inputs = np.concatenate([before, inputs_of(bcx, dtype)])
    rows = [all_inputs[i : i + kernel_size] for i in range(len(bcx))]
    return np.stack([(weight.T * row).sum(0) for row in rows]) * c


class Slots:
    """The state of the slots on a device."""

    def __init__(self, device: str, dtype: str, step: Step, width: int, kernel_size: int) -> None:
        self.device, self.dtype, self.width, self.kernel_size = device, dtype, width, kernel_size
        slots = step.num_slots
        self.window = put(device, np.zeros((slots, kernel_size - 1, width)), dtype)
        self.pending = put(device, np.zeros((slots, NODES, width)), dtype)
        self.folded = put_ints(device, np.zeros((slots, width)))

    def run(
        self,
        step: Step,
        bcx: np.ndarray,
        weight: np.ndarray,
        commits: bool,
        parents: Any = None,
        **more: Any,
    ) -> Any:
        out = empty(self.device, [step.num_rows, self.width], self.dtype)
        ops.short_conv(
            context(self.device), out=out, x=put(self.device, bcx, self.dtype),
            weight=put(self.device, weight, self.dtype), window=self.window, pending=self.pending,
            folded=self.folded, commits=commits, tokens=step.rows(self.device, parents), **more,
        )  # fmt: skip
        return out


def made(width: int, kernel_size: int, count: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(width + count)
    bcx = rounded(rng.standard_normal((count, 3 * width)), dtype)
    return bcx, rounded(rng.standard_normal((width, kernel_size)), dtype)


@on_devices_and_dtypes
@pytest.mark.parametrize(("width", "kernel_size"), SIZES)
def test_prompts(device: str, dtype: str, width: int, kernel_size: int) -> None:
    counts = [1, 2, 65, 200]
    step = Step(lengths=[0] * 4, counts=counts)
    bcx, weight = made(width, kernel_size, step.num_rows, dtype)
    before = np.zeros((kernel_size - 1, width))
    expected = np.concatenate(
        [convolved(part, before, weight, dtype) for part in np.split(bcx, np.cumsum(counts)[:-1])]
    )

    def run(device: str) -> np.ndarray:
        return get(Slots(device, dtype, step, width, kernel_size).run(step, bcx, weight, True))

    check(run, device, expected, "exact_inputs", dtype)


@on_devices_and_dtypes
@pytest.mark.parametrize(("width", "kernel_size"), SIZES)
def test_chunks_and_decoding_have_the_bits_of_the_prompt(
    device: str, dtype: str, width: int, kernel_size: int
) -> None:
    count = 150
    whole = Step(lengths=[0], counts=[count])
    bcx, weight = made(width, kernel_size, count, dtype)
    expected = Slots(device, dtype, whole, width, kernel_size).run(whole, bcx, weight, True).numpy()
    slots = Slots(device, dtype, whole, width, kernel_size)
    slot = int(whole.slots[0])
    done, found = 0, []
    for chunk in (1, 3, 80, 2):
        step = Step(lengths=[done], counts=[chunk])
        part = bcx[done : done + chunk]
        found.append(slots.run(step, part, weight, True).numpy())
        done += chunk
    paths = np.full((whole.num_slots, 8), -1)
    counts = np.zeros(whole.num_slots)
    accepted: dict[str, Any] = {}
    for accept in (1, 3, 1, 8, 2, 1):  # a chain of 8, of which the first few are accepted
        step = Step(lengths=[done], counts=[8])
        out = slots.run(step, bcx[done : done + 8], weight, False, **accepted).numpy()
        found.append(out[:accept])
        done += accept
        paths[slot, :] = -1
        paths[slot, :accept] = np.arange(accept)
        counts[slot] = accept
        accepted = {"accepted": ops.Accepted(
            ids=put_ints(device, paths), paths=put_ints(device, paths),
            counts=put_ints(device, counts),
        )}  # fmt: skip
    assert np.array_equal(np.concatenate(found), expected[:done])


@on_devices_and_dtypes
@pytest.mark.parametrize(("width", "kernel_size"), SIZES)
def test_tree_nodes_have_the_bits_of_chains(
    device: str, dtype: str, width: int, kernel_size: int
) -> None:
    masks = deep_tree(33)
    step = Step(lengths=[5], counts=[33], masks=[masks])
    bcx, weight = made(width, kernel_size, 38, dtype)
    first = Step(lengths=[0], counts=[5])
    slots = Slots(device, dtype, first, width, kernel_size)
    slots.run(first, bcx[:5], weight, True)
    parents = [int(mask & ~(1 << i)).bit_length() - 1 for i, mask in enumerate(map(int, masks))]
    out = slots.run(step, bcx[5:], weight, False, parents=put_ints(device, parents)).numpy()
    for node in range(33):
        path = [5 + i for i in range(node + 1) if int(masks[node]) >> i & 1]
        chain = Step(lengths=[0], counts=[5 + len(path)])
        fresh = Slots(device, dtype, chain, width, kernel_size)
        alone = fresh.run(chain, bcx[[*range(5), *path]], weight, True).numpy()
        assert np.array_equal(alone[-1], out[node]), f"node {node}"


@on_devices_and_dtypes
@pytest.mark.parametrize(("width", "kernel_size"), SIZES)
def test_a_convolution_with_silu(device: str, dtype: str, width: int, kernel_size: int) -> None:
    """The inputs are some columns of x. Chunks, decoding and trees share the code with LFM2's."""
    counts, first = [1, 2, 65, 200], 24
    step = Step(lengths=[0] * 4, counts=counts)
    rng = np.random.default_rng(width)
    x = rounded(rng.standard_normal((step.num_rows, first + width + 8)), dtype)
    weight = rounded(rng.standard_normal((width, kernel_size)), dtype)
    bias = rounded(rng.standard_normal(width), dtype)
    inputs, expected = x[:, first : first + width], []
    for part in np.split(inputs, np.cumsum(counts)[:-1]):
        padded = np.concatenate([np.zeros((kernel_size - 1, width)), part])
        rows = [padded[i : i + kernel_size] for i in range(len(part))]
        sums = np.stack([(weight.T * row).sum(0) for row in rows]) + bias
        expected.append(sums / (1 + np.exp(-sums)))

    def run(device: str) -> np.ndarray:
        slots = Slots(device, dtype, step, width, kernel_size)
        own = {"silu": True, "first": first, "bias": put(device, bias, dtype)}
        return get(slots.run(step, x, weight, True, **own))

    check(run, device, np.concatenate(expected), "exact_inputs", dtype)


@on_devices
def test_shapes_must_fit(device: str) -> None:
    step = Step(lengths=[0], counts=[1])
    slots = Slots(device, "float16", step, 8, 3)
    with pytest.raises(ValueError, match=r"short_conv: out is \[1, 8\], x float16 \[1, 16\]"):
        slots.run(step, np.ones((1, 16)), np.ones((8, 3)), True)
