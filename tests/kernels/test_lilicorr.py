"""The ops of a LiLiCorr head against a float64 reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.util import (
    context,
    empty,
    get,
    on_devices,
    on_devices_and_dtypes,
    ops,
    put,
    put_ints,
    put_raw,
    rounded,
    sizes,
)
from tests.reference.lilicorr import NumpyLiLiCorr, features_of, layer_norm, log_softmax, silu

NEAR = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
# Sequences, positions, candidates.
LATTICES = sizes((1, 1, 1), (3, 4, 2), (2, 7, 4), (1, 15, 16), (1, 16, 16))
on_lattices = pytest.mark.parametrize("lattice", LATTICES)
Lattice = tuple[int, int, int]


class Drawn:
    """Random arrays, rounded to a dtype."""

    def __init__(self, device: str, dtype: str, lattice: Lattice) -> None:
        self.device, self.dtype, self.lattice = device, dtype, lattice
        self.rng = np.random.default_rng(lattice)
        self.num_seqs, self.depth, self.topk = lattice
        self.rows = self.num_seqs * self.depth * self.topk
        self.size = {"num_seqs": self.num_seqs, "depth": self.depth, "topk": self.topk}

    def draw(self, *shape: int) -> Any:
        return rounded(self.rng.standard_normal(shape), self.dtype)

    def put(self, array: Any) -> Any:
        return put(self.device, array, self.dtype)

    def empty(self, *shape: int) -> Any:
        return empty(self.device, shape, self.dtype)

    def check(self, array: Any, expected: Any) -> None:
        scale = NEAR[self.dtype] * max(1.0, float(np.abs(expected).max()))
        found = get(array).reshape(np.shape(expected))
        assert np.allclose(found, expected, atol=scale, rtol=0), np.abs(found - expected).max()

    def logprobs(self) -> Any:
        logits = -np.sort(-2 * self.rng.standard_normal(self.lattice), -1)
        total = np.exp(logits).sum(-1, keepdims=True) + self.rng.uniform(0.01, 2)
        return (logits - np.log(total)).astype(np.float32)


@on_devices_and_dtypes
@on_lattices
@pytest.mark.parametrize("width", [8, 264])
def test_features(device: str, dtype: str, lattice: Lattice, width: int) -> None:
    drawn = Drawn(device, dtype, lattice)
    logprobs = drawn.logprobs()
    norm_weight, norm_bias = drawn.draw(5), drawn.draw(5)
    weight, bias = drawn.draw(width, 5), drawn.draw(width)
    out = drawn.empty(drawn.rows, width)
    ops.candidate_features(
        context(device), **drawn.size, logprobs=put(device, logprobs),
        norm_weight=drawn.put(norm_weight), norm_bias=drawn.put(norm_bias),
        weight=drawn.put(weight), bias=drawn.put(bias), out=out,
    )  # fmt: skip
    features = features_of(logprobs.reshape(-1, drawn.topk).astype(np.float64))
    expected = silu(layer_norm(features, norm_weight, norm_bias) @ weight.T + bias)
    drawn.check(out, expected.reshape(drawn.rows, width))


@on_devices
def test_missing_log_probabilities_are_bounded(device: str) -> None:
    drawn = Drawn(device, "float16", (1, 2, 2))
    made = []
    for least in (-np.inf, np.nan, -1e4):
        logprobs = np.array([-0.5, least, -0.25, -3], np.float32)
        out = drawn.empty(4, 8)
        ops.candidate_features(
            context(device), **drawn.size, logprobs=put_raw(device, logprobs),
            norm_weight=drawn.put(np.ones(5)), norm_bias=drawn.put(np.zeros(5)),
            weight=drawn.put(np.eye(8)[:, :5]), bias=drawn.put(np.zeros(8)), out=out,
        )  # fmt: skip
        made.append(get(out))
    assert np.isfinite(made).all() and np.array_equal(made[0], made[1])
    assert np.array_equal(made[0], made[2])


@on_devices_and_dtypes
@on_lattices
@pytest.mark.parametrize("num_biases", [1, 3])
def test_states(device: str, dtype: str, lattice: Lattice, num_biases: int) -> None:
    """The table has more slots than the lattice has positions."""
    drawn, width = Drawn(device, dtype, lattice), 264
    num_seqs, depth, topk = lattice
    x, hidden = drawn.draw(drawn.rows, width), drawn.draw(num_seqs * depth, width)
    slots, ranks = drawn.draw(depth + 2, width), drawn.draw(topk, width)
    biases, array = drawn.draw(num_biases, width), drawn.put(x)
    ops.candidate_states(
        context(device), **drawn.size, x=array, hidden=drawn.put(hidden), slots=drawn.put(slots),
        ranks=drawn.put(ranks), biases=drawn.put(biases),
    )  # fmt: skip
    expected = x.reshape(num_seqs, depth, topk, width) + ranks + biases.sum(0)
    expected = expected + hidden.reshape(num_seqs, depth, 1, width) + slots[:depth, None]
    drawn.check(array, expected.reshape(drawn.rows, width))


@on_devices_and_dtypes
@pytest.mark.parametrize(("rows", "width"), sizes((1, 8), (5, 264), (70, 1024)))
def test_a_bias_and_silu(device: str, dtype: str, rows: int, width: int) -> None:
    drawn = Drawn(device, dtype, (1, 1, 1))
    y, bias = drawn.draw(rows, width), drawn.draw(width)
    array = drawn.put(y)
    ops.bias_silu(context(device), array, drawn.put(bias))
    drawn.check(array, silu(y + bias))


@on_devices_and_dtypes
@on_lattices
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 8), (2, 40), (2, 256)])
def test_attention(device: str, dtype: str, lattice: Lattice, heads: int, head_dim: int) -> None:
    """The table of biases has more distances than this depth needs."""
    drawn, width = Drawn(device, dtype, lattice), heads * head_dim
    num_seqs, depth, topk = lattice
    slots = depth + 3
    qkv, out = drawn.draw(drawn.rows, 3 * width), drawn.empty(drawn.rows, width)
    slot_bias, same_bias = drawn.draw(heads, 2 * slots + 1), drawn.draw(heads)
    ops.lattice_attention(
        context(device), **drawn.size, num_heads=heads, qkv=drawn.put(qkv),
        slot_bias=drawn.put(slot_bias), same_bias=drawn.put(same_bias), out=out,
    )  # fmt: skip
    weights = {"relative_slot_bias": slot_bias, "same_slot_bias": same_bias}
    bias = NumpyLiLiCorr({}, weights).bias(depth, topk)
    expected = []
    for rows in np.split(qkv, num_seqs):
        joined = rows.reshape(depth * topk, 3, heads, head_dim).transpose(1, 2, 0, 3)
        q, k, v = joined
        logits = q @ k.swapaxes(1, 2) / np.sqrt(head_dim) + bias
        mixed = np.exp(log_softmax(logits)) @ v
        expected.append(mixed.swapaxes(0, 1).reshape(depth * topk, width))
    drawn.check(out, np.concatenate(expected))


def test_the_sign_of_a_distance() -> None:
    """A query's distance to an earlier position is positive."""
    drawn = Drawn("cpu", "float32", (1, 2, 1))
    qkv = np.zeros((2, 24))
    qkv[:, 16:] = [[0.0] * 8, [1.0] * 8]
    out = drawn.empty(2, 8)
    for distance, expected in ((1, [0.5, 0.0]), (-1, [1.0, 0.5])):
        slot_bias = np.zeros((1, 5))
        slot_bias[0, 2 + distance] = 50
        ops.lattice_attention(
            context("cpu"), **drawn.size, num_heads=1, qkv=drawn.put(qkv),
            slot_bias=drawn.put(slot_bias), same_bias=drawn.put(np.zeros(1)), out=out,
        )  # fmt: skip
        assert np.allclose(get(out)[:, 0], expected, atol=1e-6)


@on_devices_and_dtypes
@on_lattices
def test_inputs_of_factors(device: str, dtype: str, lattice: Lattice) -> None:
    drawn, width = Drawn(device, dtype, lattice), 264
    x, anchors = drawn.draw(drawn.rows, width), drawn.draw(drawn.num_seqs, width)
    out = drawn.empty(drawn.rows, 3 * width)
    ops.factor_inputs(
        context(device), **drawn.size, x=drawn.put(x), anchors=drawn.put(anchors), out=out
    )
    each = np.repeat(anchors, drawn.rows // drawn.num_seqs, 0)
    drawn.check(out, np.concatenate([x, each, x * each], -1))


def pairs_of(drawn: Drawn, candidates: Any, factors: Any, anchors: Any, eps: float) -> Any:
    pairs = put(drawn.device, np.full((*drawn.lattice, drawn.topk), 7.0))
    ops.factor_pairs(
        context(drawn.device), **drawn.size, candidates=put_ints(drawn.device, candidates),
        factors=put_raw(drawn.device, factors), anchors=put(drawn.device, anchors), eps=eps,
        scale=3.0, pairs=pairs,
    )  # fmt: skip
    return get(pairs)


@on_devices
@on_lattices
@pytest.mark.parametrize(("size", "eps"), [(8, 1e-6), (200, 15.0)])
def test_pairs(device: str, lattice: Lattice, size: int, eps: float) -> None:
    """Some vectors are shorter than eps; only row 0 of depth 0 is written."""
    drawn = Drawn(device, "float32", lattice)
    num_seqs, depth, topk = lattice
    factors, anchors = drawn.draw(drawn.rows, 2 * size), drawn.draw(num_seqs, size)
    found = pairs_of(drawn, np.zeros(lattice), factors.astype(np.float32), anchors, eps)
    split = factors.reshape(num_seqs, depth, topk, 2, size)
    unit = split / np.maximum(np.linalg.norm(split, axis=-1, keepdims=True), eps)
    start = anchors / np.maximum(np.linalg.norm(anchors, axis=-1, keepdims=True), eps)
    outs, ins = unit[..., 0, :], unit[..., 1, :]
    first = log_softmax(3.0 * np.einsum("bkf,bf->bk", ins[:, 0], start))
    assert np.allclose(found[:, 0, 0], first, atol=1e-5)
    assert (found[:, 0, 1:] == 7).all()
    scores = 3.0 * np.einsum("bdaf,bdcf->bdac", outs[:, :-1], ins[:, 1:])
    assert np.allclose(found[:, 1:], log_softmax(scores), atol=1e-5)


@on_devices
def test_missing_candidates_have_no_score(device: str) -> None:
    drawn = Drawn(device, "float32", (2, 3, 4))
    candidates = np.zeros((2, 3, 4), int)
    candidates[0, 1, 2] = candidates[1, 0, 0] = -1
    factors = drawn.draw(drawn.rows, 16).astype(np.float32)
    factors.reshape(2, 3, 4, 16)[1, 2, 3, 12] = np.nan  # an in-vector
    found = pairs_of(drawn, candidates, factors, drawn.draw(2, 8), 1e-6)
    missing = np.zeros(found.shape, bool)
    missing[0, 1, :, 2] = missing[0, 2, 2] = missing[1, 0, :, 0] = missing[1, 1, 0] = True
    missing[1, 2, :, 3] = True
    missing[:, 0, 1:] = False  # not written
    assert np.array_equal(np.isneginf(found), missing)
    mass = np.where(missing, 0, np.exp(found)).sum(-1)
    exists = ~missing.all(-1)
    exists[:, 0, 1:] = False
    assert np.allclose(mass[exists], 1, atol=1e-5)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "candidates": ({"topk": 32}, "top-k 32, depth 2, .* expected top-k 1 to 16"),
    "depth": ({"depth": 17}, "top-k 2, depth 17"),
    "heads": ({"num_heads": 3}, "3 heads in 16 columns"),
    "slots": ({"slot_bias": (2, 3)}, "3 distances and 2 positions"),
    "rows": ({"out": (5, 16)}, r"out is float32 \[5, 16\], expected float32 \[4, 16\]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_shapes(name: str) -> None:
    changes, message = WRONG[name]
    given: dict[str, Any] = {
        "num_seqs": 1, "depth": 2, "topk": 2, "num_heads": 2, "qkv": (4, 48),
        "slot_bias": (2, 5), "same_bias": (2,), "out": (4, 16), **changes,
    }  # fmt: skip
    fields = {
        key: put("cpu", np.zeros(value)) if isinstance(value, tuple) else value
        for key, value in given.items()
    }
    with pytest.raises(ValueError, match=message):
        ops.lattice_attention(context("cpu"), **fields)
