"""The GEMMs of experts for the sorted pairs of a prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.kernels.test_experts import (
    W4_VARIANTS,
    expert_inputs,
    random_logits,
    route,
    w4_experts,
)
from tests.kernels.util import (
    GPU,
    check,
    context,
    empty,
    get,
    on_devices,
    on_devices_and_cuda_dtypes,
    on_devices_and_dtypes,
    ops,
    put,
    rounded,
    sizes,
)
from tests.reference import ops as reference

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Pairs of each expert. A tile has 64 rows, or 128 with more than 64 pairs an expert.
COUNTS = sizes(
    [1], [0, 1, 0], [63, 0, 64, 65, 7, 0, 1, 13], [129, 128, 0, 127, 1], [0, 0, 300, 0, 0],
    [64] * 6, [2, 3] * 40,
)  # fmt: skip
of_counts = pytest.mark.parametrize("counts", COUNTS, ids=lambda c: "-".join(map(str, c[:8])))


def needs_sorted_gemm(device: str) -> None:
    if not ops.has_sorted_gemm(context(device)):
        pytest.skip("needs compute capability 9.0")


def logits_of(experts: Ints, num_experts: int) -> Floats:
    """Returns logits [T, E] by which token t gets the expert experts[t]."""
    return rounded(4.0 * (experts[:, None] == np.arange(num_experts)), "float32")


def shuffled_experts(counts: list[int]) -> Ints:
    return np.random.default_rng(len(counts)).permutation(np.repeat(np.arange(len(counts)), counts))


def sorted_pairs(
    device: str,
    x: Floats,
    w: Any,
    routing: Any,
    dtype: str,
    out: str,
    width: int,
    *,
    gated: bool = False,
    sorted_y: bool = False,
) -> Any:
    """`x`: rows of tokens. `w`: an Array [E, N, K], or (blocks, options of packed_sorted_gemm)."""
    num_pairs = routing.pairs.numpy().size
    rows = empty(device, [num_pairs, x.shape[1]], dtype)
    ops.gather_pairs(context(device), rows, put(device, x, dtype), routing)
    y = empty(device, [num_pairs, width], out)
    if isinstance(w, tuple):
        ops.packed_sorted_gemm(context(device), y, rows, w[0], routing, sorted_y=sorted_y, **w[1])
    else:
        ops.sorted_gemm(context(device), y, rows, w, routing, sorted_y=sorted_y, gated=gated)
    return y


@on_devices_and_dtypes
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "width"),
    sizes((1, 4, 2, 8), (13, 9, 3, 264), (100, 128, 8, 2048), (5, 3, 1, 1032)),
)
def test_gather(
    device: str, dtype: str, num_tokens: int, num_experts: int, top_k: int, width: int
) -> None:
    x, _ = expert_inputs(num_tokens, 1, 8, width, dtype)
    routing = route(device, random_logits(num_tokens, num_experts), num_experts, top_k, True)
    rows = empty(device, [num_tokens * top_k, width], dtype)
    ops.gather_pairs(context(device), rows, put(device, x, dtype), routing)
    assert np.array_equal(get(rows), x[routing.pairs.numpy() // top_k])


@on_devices_and_cuda_dtypes
@pytest.mark.parametrize(
    ("gated", "float_out", "sorted_y"),
    [(False, True, False), (True, False, True), (False, False, True), (True, True, False)],
)
@pytest.mark.parametrize(("n", "k"), sizes((48, 136), (272, 64), (528, 200), small=1))
@of_counts
def test_sorted_gemm(
    device: str,
    dtype: str,
    gated: bool,
    float_out: bool,
    sorted_y: bool,
    n: int,
    k: int,
    counts: list[int],
) -> None:
    needs_sorted_gemm(device)
    experts = shuffled_experts(counts)
    x, w = expert_inputs(len(experts), len(counts), n, k, dtype)
    out = "float32" if float_out else dtype
    width = n // 2 if gated else n

    def run(device: str) -> Floats:
        routing = route(device, logits_of(experts, len(counts)), len(counts), 1, True)
        options = {"gated": gated, "sorted_y": sorted_y}
        y = get(
            sorted_pairs(device, x, put(device, w, dtype), routing, dtype, out, width, **options)
        )
        return y[np.argsort(routing.pairs.numpy())] if sorted_y else y

    expected = reference.expert_gemm(x, w, experts, 1, gated)
    check(run, device, expected, "normed_gemm" if gated else "gemm", out)


@on_devices_and_cuda_dtypes
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("variant", W4_VARIANTS)
@pytest.mark.parametrize(("n", "k"), sizes((48, 200), (272, 392), (528, 128), small=1))
@of_counts
def test_w4_sorted_gemm(
    device: str, dtype: str, gated: bool, variant: str, n: int, k: int, counts: list[int]
) -> None:
    """As in the layer: rows of 16 bits after gate and up, float32 by pair after down."""
    needs_sorted_gemm(device)
    experts, num_experts = shuffled_experts(counts), len(counts)
    x, _ = expert_inputs(len(experts), 1, n, k, dtype)
    width = n // 2 if gated else n
    out = dtype if gated else "float32"
    values, _ = w4_experts("cpu", num_experts, n, k, gated=gated, **W4_VARIANTS[variant])

    def run(device: str) -> Floats:
        _, w = w4_experts(device, num_experts, n, k, gated=gated, **W4_VARIANTS[variant])
        routing = route(device, logits_of(experts, num_experts), num_experts, 1, True)
        y = get(sorted_pairs(device, x, w, routing, dtype, out, width, sorted_y=gated))
        return y[np.argsort(routing.pairs.numpy())] if gated else y

    expected = reference.expert_gemm(x, values, experts, 1, gated)
    check(run, device, expected, "normed_gemm" if gated else "gemm", out)


@on_devices_and_dtypes
@pytest.mark.parametrize("form", ["16 bits", "4 bits"])
@pytest.mark.parametrize("gated", [False, True])
def test_a_sorted_pair_does_not_depend_on_the_others(
    device: str, dtype: str, gated: bool, form: str
) -> None:
    """Its bits are the same in any chunk, with tiles of 64 or 128 rows, anywhere in a tile."""
    needs_sorted_gemm(device)
    num_experts, top_k, n, k = 4, 2, 272, 392
    x, dense = expert_inputs(300, num_experts, n, k, dtype)
    _, w4 = w4_experts(device, num_experts, n, k, gated=gated, has_zeros=True)
    w = w4 if form == "4 bits" else put(device, dense, dtype)
    logits = random_logits(300, num_experts)
    logits[150:] = logits[150]  # half of the tokens have the same experts
    width = n // 2 if gated else n

    def pairs_of(begin: int, end: int) -> Any:
        routing = route(device, logits[begin:end], num_experts, top_k, True)
        options: dict[str, Any] = {"sorted_y": gated}
        if form == "16 bits":
            options["gated"] = gated
        y = sorted_pairs(
            device, x[begin:end], w, routing, dtype, dtype if gated else "float32", width, **options
        ).numpy()
        return y[np.argsort(routing.pairs.numpy())] if gated else y

    whole = pairs_of(0, 300)
    for begin, end in [(0, 1), (5, 7), (90, 154), (100, 228), (150, 279), (299, 300), (3, 300)]:
        part = pairs_of(begin, end)
        assert np.array_equal(part, whole[top_k * begin : top_k * end]), f"rows {begin} to {end}"


@on_devices_and_dtypes
def test_many_experts(device: str, dtype: str) -> None:
    """The largest number of experts; most have no pairs."""
    needs_sorted_gemm(device)
    num_experts, n, k = 1024, 16, 8
    experts = np.array([1023, 0, 5, 1023, 511, 5, 5, 640])
    x, w = expert_inputs(len(experts), num_experts, n, k, dtype)

    def run(device: str) -> Floats:
        routing = route(device, logits_of(experts, num_experts), num_experts, 1, True)
        return get(sorted_pairs(device, x, put(device, w, dtype), routing, dtype, "float32", n))

    check(run, device, reference.expert_gemm(x, w, experts, 1, False), "gemm", "float32")


@GPU
@pytest.mark.parametrize("num_tokens", [5, 300])
def test_a_graph_of_a_prompt_follows_the_router(num_tokens: int) -> None:
    device, num_experts, top_k, n, k = "cuda", 4, 2, 272, 200
    needs_sorted_gemm(device)
    x, w = expert_inputs(num_tokens, num_experts, n, k, "float16")
    tokens, weights = put(device, x, "float16"), put(device, w, "float16")
    logits = put(device, random_logits(num_tokens, num_experts))
    routing = ops.Routing(
        context(device), num_tokens=num_tokens, num_experts=num_experts, top_k=top_k
    )
    rows = empty(device, [num_tokens * top_k, k], "float16")
    y = empty(device, [num_tokens * top_k, n])

    def body() -> None:
        ops.moe_route(context(device), routing, logits, renormalise=True)
        ops.gather_pairs(context(device), rows, tokens, routing)
        ops.sorted_gemm(context(device), y, rows, weights, routing)

    graph = context(device).graph(body)
    for seed in range(3):
        scores = np.random.default_rng(seed).standard_normal((num_tokens, num_experts))
        logits.copy_from(scores.astype(np.float32))
        graph.replay()
        experts, _ = reference.route(scores.astype(np.float32).astype(float), top_k, True)
        expected = reference.expert_gemm(x, w, experts.reshape(-1), top_k, False)
        check(lambda _: get(y), "cpu", expected, "gemm", "float32")


@on_devices
def test_shapes_of_sorted_rows_must_agree(device: str) -> None:
    routing = route(device, random_logits(2, 4), 4, 2, True)
    x, w = put(device, np.ones((4, 16)), "float16"), put(device, np.ones((4, 24, 16)), "float16")
    for rows, shape in [(put(device, np.ones((2, 16)), "float16"), [4, 24]), (x, [4, 16])]:
        with pytest.raises(ValueError, match="expert_gemm: "):
            ops.sorted_gemm(context(device), empty(device, shape, "float16"), rows, w, routing)
    with pytest.raises(ValueError, match="gather_pairs: "):
        ops.gather_pairs(context(device), x, x, routing)
