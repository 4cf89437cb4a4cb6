from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.util import SMALL, context, empty, on_devices, ops, put, put_ints, sizes


def run(
    device: str, logits: np.ndarray, topk: int, id_map: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    tokens = empty(device, (len(logits), topk), "int32")
    logprobs = empty(device, (len(logits), topk))
    ops.topk_logprobs(
        context(device), logits=put(device, logits), topk=topk, tokens=tokens, logprobs=logprobs,
        id_map=None if id_map is None else put_ints(device, id_map),
    )  # fmt: skip
    return tokens.numpy(), logprobs.numpy()


def check(device: str, logits: np.ndarray, topk: int) -> None:
    """Compares with a stable sort in float64. The logits are float32 values."""
    logits = logits.astype(np.float32).astype(np.float64)
    tokens, logprobs = run(device, logits, topk)
    z = np.where(np.isnan(logits), -np.inf, logits)
    order = np.argsort(-z, axis=1, kind="stable")[:, :topk]
    assert np.array_equal(tokens, order)
    maximum = z.max(1, keepdims=True)
    with np.errstate(invalid="ignore"):
        shifted = np.where(z == maximum, 0, z - maximum)
        expected = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    expected = np.take_along_axis(np.where(z == -np.inf, -np.inf, expected), order, 1)
    logprobs = np.where(logprobs < -1e38, -np.inf, logprobs)  # the distance to an infinite logit
    finite = np.isfinite(expected)
    assert np.array_equal(logprobs[~finite], expected[~finite])
    error = np.abs(logprobs[finite] - expected[finite])
    assert (error <= 8e-6 * np.maximum(1, np.abs(expected[finite]))).all()


@on_devices
@pytest.mark.parametrize("vocab_size", sizes(33, 100, 1021, 32000, 73448, 151936, small=3))
@pytest.mark.parametrize("topk", sizes(1, 10, 32))
def test_random_logits(device: str, vocab_size: int, topk: int) -> None:
    rng = np.random.default_rng(vocab_size)
    num_rows = 4 if SMALL else 3 if vocab_size > 10000 else 32
    check(device, rng.standard_normal((num_rows, vocab_size)) * 3, topk)


@on_devices
@pytest.mark.parametrize("topk", sizes(*range(1, 33)))
def test_every_k(device: str, topk: int) -> None:
    rng = np.random.default_rng(topk)
    for vocab_size in (topk, topk + 1, 64, 999):
        check(device, rng.standard_normal((4 if SMALL else 20, max(vocab_size, topk))) * 3, topk)


@on_devices
@pytest.mark.parametrize("vocab_size", sizes(40, 1031, 4099, 32768, small=2))
def test_ties_go_to_the_lower_id(device: str, vocab_size: int) -> None:
    rng = np.random.default_rng(0)
    logits = np.round(rng.standard_normal((12, vocab_size)) * 2)
    logits[0] = 0.25
    logits[1] = np.where(rng.random(vocab_size) < 0.5, 0.0, -0.0)
    logits[2, :] = -1
    logits[2, -3:] = 7
    for topk in (1, 10, 32):
        check(device, logits, topk)


@on_devices
@pytest.mark.parametrize("vocab_size", sizes(5002, 65538, 131072, small=1))
def test_values_that_cluster(device: str, vocab_size: int) -> None:
    """The large values lie so that a few threads read most of them."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((4, vocab_size))
    token = np.arange(vocab_size)
    logits[0, token % 2048 < 128] += 10
    logits[1, token % 2048 < 4] += 10
    logits[2, token % 2048 >= 1920] = 5
    logits[3, token < 300] += 10
    for topk in (1, 10, 32):
        check(device, logits, topk)


@on_devices
def test_infinities_and_nan(device: str) -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((8, 500))
    logits[0, ::2] = np.nan
    logits[1, 5:] = -np.inf
    logits[2] = -np.inf
    logits[3] = np.nan
    logits[4, 77] = np.inf
    logits[5, [70, 80]] = np.inf
    logits[6, 1:] = np.nan
    logits[7] = np.where(rng.random(500) < 0.5, np.nan, -np.inf)
    for topk in (1, 10, 32):
        check(device, logits, topk)


@on_devices
def test_large_logits(device: str) -> None:
    rng = np.random.default_rng(0)
    check(device, 3e4 + rng.standard_normal((4, 5000)), 10)
    check(device, rng.standard_normal((4, 5000)) * 1e30, 10)


@on_devices
def test_id_map(device: str) -> None:
    rng = np.random.default_rng(0)
    logits, id_map = rng.standard_normal((5, 300)), rng.permutation(1000)[:300]
    plain, expected = run(device, logits, 10)
    tokens, logprobs = run(device, logits, 10, id_map)
    assert np.array_equal(tokens, id_map[plain]) and np.array_equal(logprobs, expected)


@on_devices
def test_rows_do_not_depend_on_each_other(device: str) -> None:
    logits = np.random.default_rng(0).standard_normal((32, 4096))
    together = run(device, logits, 10)[1]
    alone = np.concatenate([run(device, row[None], 10)[1] for row in logits])
    assert np.array_equal(together, alone)


@on_devices
def test_limits(device: str) -> None:
    with pytest.raises(ValueError, match="top-k 33 of 100 tokens"):
        run(device, np.zeros((1, 100)), 33)
    with pytest.raises(ValueError, match="top-k 10 of 9 tokens"):
        run(device, np.zeros((1, 9)), 10)
