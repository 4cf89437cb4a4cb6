"""score_experts, mask_groups and weigh_experts: the routers that are not a plain softmax."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.util import check, context, empty, get, on_devices, ops, put, rounded, sizes
from tests.tolerances import KERNELS, assert_close

KIND = "exact_inputs"
# tokens, experts, top_k
SIZES = sizes((1, 8, 2), (7, 5, 5), (65, 128, 8), (300, 512, 22))


@on_devices
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), SIZES)
def test_sigmoid_router(
    device: str, biased: bool, renormalise: bool, num_tokens: int, num_experts: int, top_k: int
) -> None:
    rng = np.random.default_rng(num_experts)
    logits = rounded(rng.standard_normal((num_tokens, num_experts + 1)) * 2, "float32")
    bias = rounded(rng.standard_normal(num_experts) * biased, "float32")
    scores = 1 / (1 + np.exp(-logits[:, :-1]))

    def run(device: str) -> np.ndarray:
        routing = ops.Routing(
            context(device), num_tokens=num_tokens, num_experts=num_experts, top_k=top_k
        )
        keys, kept = put(device, logits), empty(device, scores.shape)
        given = {"bias": put(device, bias)} if biased else {}
        ops.score_experts(context(device), kept, keys, **given)
        assert_close(get(keys), np.c_[scores + bias, logits[:, -1]], KERNELS[KIND]["float32"])
        ops.moe_route(context(device), routing, keys, renormalise=True)
        ops.weigh_experts(
            context(device), routing, num_tokens=num_tokens, scores=kept, renormalise=renormalise,
            epsilon=1e-6, factor=2.5,
        )  # fmt: skip
        chosen = np.argsort(-get(keys)[:, :-1], axis=1, kind="stable")[:, :top_k]
        assert np.array_equal(routing.experts.numpy().reshape(-1, top_k), chosen)
        weights = np.take_along_axis(scores, chosen, 1)
        if renormalise:
            weights = weights / (weights.sum(1, keepdims=True) + 1e-6)
        return get(routing.weights).reshape(-1, top_k) / weights

    ones = np.full((num_tokens, top_k), 2.5)
    check(run, device, ones, KIND, "float32")


@on_devices
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "count", "top_k"),
    sizes((1, 8, 4, 2), (7, 15, 5, 1), (65, 512, 8, 4), (3, 1024, 512, 17), (300, 256, 1, 1)),
)
def test_groups(device: str, num_tokens: int, num_experts: int, count: int, top_k: int) -> None:
    """The two largest numbers of a group count. Whole numbers give many equal groups."""
    rng = np.random.default_rng(num_experts)
    logits = rng.integers(-3, 4, (num_tokens, num_experts + 1)).astype(np.float32)
    groups = logits[:, :-1].reshape(num_tokens, count, -1)
    values = np.sort(groups, axis=-1)[..., -2:].sum(-1)
    best = np.argsort(-values, axis=1, kind="stable")[:, :top_k]
    left = np.full(groups.shape, -np.inf, np.float32)
    rows = np.arange(num_tokens)[:, None]
    left[rows, best] = groups[rows, best]
    keys = put(device, logits)
    ops.mask_groups(context(device), keys, num_experts=num_experts, count=count, top_k=top_k)
    assert np.array_equal(get(keys), np.c_[left.reshape(num_tokens, -1), logits[:, -1]])


@on_devices
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), SIZES)
def test_a_scale_of_each_expert(device: str, num_tokens: int, num_experts: int, top_k: int) -> None:
    rng = np.random.default_rng(num_experts)
    logits = rounded(rng.standard_normal((num_tokens, num_experts)) * 2, "float32")
    scale = rounded(rng.uniform(0.5, 2, num_experts), "float32")
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    weights = np.exp(np.take_along_axis(logits, chosen, 1))
    weights = weights / weights.sum(1, keepdims=True) * scale[chosen]

    def run(device: str) -> np.ndarray:
        routing = ops.Routing(
            context(device), num_tokens=num_tokens, num_experts=num_experts, top_k=top_k
        )
        ops.moe_route(context(device), routing, put(device, logits), renormalise=True)
        ops.weigh_experts(context(device), routing, num_tokens=num_tokens, scale=put(device, scale))
        return get(routing.weights).reshape(-1, top_k)

    check(run, device, weights, KIND, "float32")


@on_devices
def test_shapes_must_fit(device: str) -> None:
    array = put(device, np.ones((2, 8)))
    with pytest.raises(ValueError, match=r"score_experts: scores .* do not fit"):
        ops.score_experts(context(device), array, put(device, np.ones((2, 7))))
    for count, top_k in ((3, 1), (8, 1), (4, 5), (4, 0)):
        with pytest.raises(ValueError, match=rf"8 experts from {top_k} of {count} groups"):
            ops.mask_groups(context(device), array, num_experts=8, count=count, top_k=top_k)
    routing = ops.Routing(context(device), num_tokens=2, num_experts=8, top_k=2)
    with pytest.raises(ValueError, match="do not fit 2 tokens and 8 experts"):
        ops.weigh_experts(context(device), routing, num_tokens=2, scale=put(device, np.ones(7)))
