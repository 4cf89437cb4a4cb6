"""gated_activation, add_bias and softcap."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.util import (
    check,
    context,
    get,
    on_devices,
    on_devices_and_dtypes,
    ops,
    put,
    put_ints,
    rounded,
    sizes,
)


def activated(
    kind: str, gate: np.ndarray, up: np.ndarray, alpha: float, limit: float
) -> np.ndarray:
    if kind == "silu":
        return gate / (1 + np.exp(-gate)) * up
    if kind == "gelu_tanh":
        inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
        return gate / 2 * (1 + np.tanh(inner)) * up
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate / (1 + np.exp(-alpha * gate)) * (up + 1)


@on_devices_and_dtypes
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "clamped_swiglu"])
@pytest.mark.parametrize(
    ("num_rows", "width", "experts"), sizes((1, 8, 0), (7, 24, 3), (67, 1536, 1), (3, 2880, 5))
)
def test_activates(
    device: str, dtype: str, kind: str, num_rows: int, width: int, experts: int
) -> None:
    rng = np.random.default_rng(width)
    x = rounded(rng.standard_normal((num_rows, 2 * width)) * 4, dtype)
    bias = rounded(rng.standard_normal((max(experts, 1), 2 * width)) * (experts > 0), dtype)
    index = rng.integers(0, max(experts, 1), num_rows)
    order = rng.permutation(num_rows)
    alternates = experts != 1
    values = x + bias[index[order]]
    halves = (
        (values[:, ::2], values[:, 1::2]) if alternates else (values[:, :width], values[:, width:])
    )
    expected = activated(kind, *halves, alpha=1.5, limit=3.0)

    def run(device: str) -> np.ndarray:
        out = put(device, np.zeros((num_rows, width)), dtype)
        given = {
            "bias": put(device, bias, dtype),
            "index": put_ints(device, index),
            "order": put_ints(device, order),
        }
        ops.gated_activation(
            context(device), out=out, x=put(device, x, dtype), kind=kind, alpha=1.5, limit=3.0,
            alternates=alternates, **(given if experts else {}),
        )  # fmt: skip
        return get(out)

    check(run, device, expected, "exact_inputs", dtype)


@on_devices_and_dtypes
@pytest.mark.parametrize(("num_rows", "width"), sizes((1, 8), (7, 24), (67, 1856)))
def test_squares_a_relu(device: str, dtype: str, num_rows: int, width: int) -> None:
    x = rounded(np.random.default_rng(width).standard_normal((num_rows, width)) * 4, dtype)

    def run(device: str) -> np.ndarray:
        out = put(device, np.zeros((num_rows, width)), dtype)
        ops.gated_activation(context(device), out=out, x=put(device, x, dtype), kind="relu2")
        return get(out)

    check(run, device, np.maximum(x, 0) ** 2, "exact_inputs", dtype)


@on_devices_and_dtypes
@pytest.mark.parametrize(("num_rows", "width"), sizes((1, 8), (7, 24), (67, 1536)))
def test_up_of_another_tensor(device: str, dtype: str, num_rows: int, width: int) -> None:
    rng = np.random.default_rng(width)
    gate = rounded(rng.standard_normal((num_rows, width)) * 4, dtype)
    up = rounded(rng.standard_normal((num_rows, width + 24)) * 4, dtype)

    def run(device: str) -> np.ndarray:
        out = put(device, np.zeros((num_rows, width)), dtype)
        ops.gated_activation(
            context(device), out=out, x=put(device, gate, dtype), kind="gelu_tanh",
            up=put(device, up, dtype), first_up=16,
        )  # fmt: skip
        return get(out)

    expected = activated("gelu_tanh", gate, up[:, 16 : 16 + width], 1, 0)
    check(run, device, expected, "exact_inputs", dtype)


@on_devices
def test_gate_and_up_have_one_width(device: str) -> None:
    out, x = (put(device, np.ones((1, width)), "float16") for width in (16, 24))
    with pytest.raises(ValueError, match="twice as many columns in x"):
        ops.gated_activation(context(device), out=out, x=x, kind="silu")


@on_devices_and_dtypes
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize(
    ("num_rows", "width", "experts"), sizes((1, 8, 1), (7, 136, 4), (67, 2880, 3))
)
def test_adds_a_bias(
    device: str, dtype: str, wide: bool, num_rows: int, width: int, experts: int
) -> None:
    rng = np.random.default_rng(width)
    y_dtype = "float32" if wide else dtype
    y = rounded(rng.standard_normal((num_rows, width)), y_dtype)
    bias = rounded(rng.standard_normal((experts, width)), dtype)
    index = rng.integers(0, experts, num_rows)
    expected = y + bias[index]

    def run(device: str) -> np.ndarray:
        array = put(device, y, y_dtype)
        given = {"index": put_ints(device, index)} if experts > 1 else {}
        ops.add_bias(context(device), y=array, bias=put(device, bias, dtype), **given)
        return get(array)

    check(run, device, expected, "exact_inputs", y_dtype)


@on_devices
def test_a_bias_has_the_width_of_y(device: str) -> None:
    y, bias = (put(device, np.ones((1, width)), "float16") for width in (16, 24))
    with pytest.raises(ValueError, match="do not fit, expected one width"):
        ops.add_bias(context(device), y=y, bias=bias)


@on_devices
@pytest.mark.parametrize("shape", [(1, 1), (3, 1001)])
def test_softcap(device: str, shape: tuple[int, int]) -> None:
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32).astype(float) * 40

    def run(device: str) -> np.ndarray:
        array = put(device, x)
        ops.softcap(context(device), array, 30.0)
        return get(array)

    check(run, device, 30 * np.tanh(x / 30), "exact_inputs", "float32")


@on_devices
def test_a_cap_is_positive(device: str) -> None:
    with pytest.raises(ValueError, match="a cap above 0"):
        ops.softcap(context(device), put(device, np.ones((1, 8))), 0.0)
