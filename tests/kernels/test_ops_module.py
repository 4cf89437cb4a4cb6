"""The bindings of C.ops: arrays, contexts, graphs."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.util import context, empty, get, on_devices, ops, put, rounded


@on_devices
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "uint64", "uint8"])
def test_new_arrays_hold_nan(device: str, dtype: str) -> None:
    assert (empty(device, [3, 5], dtype).numpy().view(np.uint8) == 0xFF).all()


@on_devices
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_arrays_return_the_copied_values(device: str, dtype: str) -> None:
    values = np.array([[0.0, -1.5, np.inf], [np.nan, 1e-7, 3.14159]])
    expected = rounded(values, dtype)
    assert np.array_equal(get(put(device, values, dtype)), expected, equal_nan=True)


def test_copies_of_the_wrong_size_or_dtype_are_refused() -> None:
    array = empty("cpu", [2, 3], "bfloat16")
    with pytest.raises(ValueError, match="bytes"):
        array.copy_from(np.zeros((2, 2), np.uint16))
    with pytest.raises(ValueError, match="bfloat16"):
        array.copy_from(np.zeros((2, 3), np.float16))
    with pytest.raises(ValueError, match="contiguous"):
        array.copy_from(np.zeros((3, 2), np.uint16).T)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="tpu"):
        ops.Context("tpu")
    with pytest.raises(ValueError, match="float8"):
        empty("cpu", [1], "float8")


@pytest.mark.gpu
def test_a_graph_replays_the_captured_ops() -> None:
    x = np.random.default_rng(0).standard_normal((4, 64))
    weight, source = put("cuda", np.ones(64), "float16"), put("cuda", x, "float16")
    out = empty("cuda", [4, 64], "float16")
    graph = context("cuda").graph(lambda: ops.rms_norm(context("cuda"), out, source, weight))
    assert np.isnan(get(out)).all()  # the capture does not run the op
    assert graph.replay(2) > 0
    first = get(out)
    source.copy_from(-source.numpy())
    graph.replay()
    assert np.array_equal(get(out), -first)
