"""gated_delta_net: prompts in chunks, token trees, the deferred commit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.util import (
    GPU,
    Floats,
    context,
    empty,
    get,
    on_devices,
    ops,
    put,
    put_ints,
    rounded,
)
from tests.reference.delta_net import DeltaNet, fused_columns, path_to
from tests.tolerances import Tolerance, assert_close

# float32 sums over Dk and the recurrence; on CUDA also approximate exponentials.
TOLERANCE = {
    "float32": Tolerance(diff=1e-10, max_abs=2e-5),
    "float16": Tolerance(diff=1e-6, max_abs=2e-3),
    "bfloat16": Tolerance(diff=4e-5, max_abs=1.6e-2),
}
MAX_TREE = 16
SIZES = [(1, 1, 8, 8), (2, 4, 16, 24), (1, 3, 128, 128), (2, 4, 128, 128)]
on_devices_dtypes_sizes = pytest.mark.parametrize(
    ("device", "dtype", "size"),
    [("cpu", dtype, size) for dtype in ("float32", "bfloat16") for size in SIZES[:3]]
    + [
        pytest.param("cuda", dtype, size, marks=GPU)
        for dtype in ("float16", "bfloat16")
        for size in SIZES[2:]
    ],
)


class Layer:
    """Weights, slots and inputs of a layer on a device. Slot i has a random sequence of tokens."""

    def __init__(
        self, device: str, dtype: str, size: tuple[int, int, int, int], fused: bool = False,
        max_tree: int = MAX_TREE,
    ) -> None:  # fmt: skip
        self.device, self.dtype, self.fused, self.num_slots = device, dtype, fused, 4
        rng = np.random.default_rng(7)
        hk, hv, dk, dv = size
        channels = 2 * hk * dk + hv * dv

        def draw(*shape: int) -> Floats:
            return rounded(rng.standard_normal(shape), dtype)

        self.net = DeltaNet(
            hk, hv, dk, dv,
            conv=draw(channels, 4), a_log=np.log(rng.uniform(0.1, 8, hv)).astype(np.float32),
            dt_bias=rng.standard_normal(hv).astype(np.float32), norm=draw(dv), eps=1e-6,
            round=lambda x: rounded(x, dtype),
        )  # fmt: skip
        self.weights = {
            "conv_weight": put(device, self.net.conv, dtype),
            "a_log": put(device, self.net.a_log), "dt_bias": put(device, self.net.dt_bias),
            "norm_weight": put(device, self.net.norm, dtype),
        }  # fmt: skip
        self.state = {
            "state": put(device, np.zeros((self.num_slots, hv, dv // 8, dk * 8))),
            "window": put(device, np.zeros((self.num_slots, hv, 3, 2 * dk + dv)), dtype),
            "pending": empty(device, [self.num_slots, hv, max_tree, 2 * dk + dv + 8], dtype),
            "folded": put_ints(device, np.zeros((self.num_slots, hv))),
        }
        self.tokens = [
            (draw(200, channels), draw(200, hv * dv), draw(200, hv), draw(200, hv))
            for _ in range(self.num_slots)
        ]
        self.lengths = np.zeros(self.num_slots, np.int64)
        self.paths = np.full((self.num_slots, max_tree), -1)
        self.counts = np.zeros(self.num_slots, np.int64)

    def run(
        self, slots: list[int], tokens: list[list[int]], parents: list[list[int]] | None = None,
        commits: bool = False, accepts_all: bool = False,
    ) -> list[Floats]:  # fmt: skip
        """One step: `tokens` are numbers of the slot's tokens. Returns the outputs of each slot."""
        counts = [len(each) for each in tokens]
        begins = np.concatenate([[0], np.cumsum(counts)])
        qkv, z, b, a = (
            np.concatenate([self.tokens[slot][i][each] for slot, each in zip(slots, tokens)])
            for i in range(4)
        )
        qkvz, ba = np.concatenate([qkv, z], 1), np.concatenate([b, a], 1)
        if self.fused:
            qkvz_order, ba_order = fused_columns(self.net)
            qkvz, ba = qkvz[:, qkvz_order], ba[:, ba_order]
        device = self.device
        step = ops.StepTokens(
            num_tokens=int(begins[-1]), num_seqs=len(slots), max_seq_tokens=max(counts),
            max_kv=1000, positions=put_ints(device, np.zeros(begins[-1])),
            token_seqs=put_ints(device, np.repeat(np.arange(len(slots)), counts)),
            seq_slots=put_ints(device, slots), seq_token_begin=put_ints(device, begins),
            slot_lengths=put_ints(device, self.lengths),
            page_table=put_ints(device, np.zeros((self.num_slots, 1))),
            token_parents=None if parents is None
            else put_ints(device, np.concatenate(parents)),
        )  # fmt: skip
        net = self.net
        out = empty(device, [int(begins[-1]), net.num_value_heads * net.value_dim], self.dtype)
        ops.gated_delta_net(
            context(device), out=out, qkvz=put(device, qkvz, self.dtype),
            ba=put(device, ba, self.dtype), num_key_heads=net.num_key_heads,
            num_value_heads=net.num_value_heads, key_dim=net.key_dim, value_dim=net.value_dim,
            fused=self.fused, norm_eps=net.eps, **self.weights, **self.state,
            accepted=ops.Accepted(
                ids=put_ints(device, self.paths), paths=put_ints(device, self.paths),
                counts=put_ints(device, self.counts),
            ),
            accepts_all=accepts_all, commits=commits, tokens=step,
        )  # fmt: skip
        values = get(out)
        return np.split(values, begins[1:-1])

    def prefill(self, slots: list[int], tokens: list[list[int]]) -> list[Floats]:
        outputs = self.run(slots, tokens, commits=True)
        for slot, each in zip(slots, tokens):
            self.accept(slot, [], len(each))
        return outputs

    def accept(self, slot: int, path: list[int], count: int | None = None) -> None:
        """The tokens of the slot's last step that became part of its sequence."""
        self.lengths[slot] += len(path) if count is None else count
        self.counts[slot] = len(path)
        self.paths[slot] = -1
        self.paths[slot, : len(path)] = path

    def expected(self, slot: int, tokens: list[int]) -> Floats:
        return self.net.outputs(*(each[tokens] for each in self.tokens[slot]))


def sequential(layer: Layer, slot: int, tokens: list[int], prompt: int) -> Floats:
    """Outputs of a prompt and of plain decoding steps of one token."""
    outputs = [*layer.prefill([slot], [tokens[:prompt]])[0]] if prompt else []
    for token in tokens[prompt:]:
        outputs.append(layer.run([slot], [[token]])[0][0])
        layer.accept(slot, [0])
    return np.array(outputs)


@on_devices_dtypes_sizes
def test_prompts_and_decoding(device: str, dtype: str, size: Any) -> None:
    layer = Layer(device, dtype, size)
    tokens = [*range(70)]
    outputs = sequential(layer, 2, tokens, prompt=53)
    assert_close(outputs, layer.expected(2, tokens), TOLERANCE[dtype])


@on_devices_dtypes_sizes
def test_chunks_and_batches_change_no_bit(device: str, dtype: str, size: Any) -> None:
    whole, parts = Layer(device, dtype, size), Layer(device, dtype, size)
    together = whole.prefill([1, 3], [[*range(67)], [*range(5)]])
    assert_close(together[0], whole.expected(1, [*range(67)]), TOLERANCE[dtype])
    alone = [
        parts.prefill([1], [[*range(begin, end)]])[0]
        for begin, end in [(0, 1), (1, 3), (3, 19), (19, 66), (66, 67)]
    ]
    assert np.array_equal(np.concatenate(alone), together[0])
    assert np.array_equal(parts.prefill([3], [[*range(5)]])[0], together[1])
    steps = sequential(Layer(device, dtype, size), 1, [*range(67)], prompt=0)
    assert np.array_equal(steps, together[0]), "a prefill differs from decoding"


@on_devices_dtypes_sizes
def test_trees_equal_plain_decoding(device: str, dtype: str, size: Any) -> None:
    """Random trees, random accepted paths: each node has the bits of decoding along its path."""
    rng = np.random.default_rng(5)
    layer, slots = Layer(device, dtype, size), [0, 3]
    sequences: list[list[int]] = [[*range(9)], [*range(2)]]
    layer.prefill(slots, sequences)
    for _ in range(4):
        parents, nodes = [], []
        for _ in slots:
            count = 1 + int(rng.integers(MAX_TREE))
            chain = rng.random() < 0.3
            parents.append(
                [-1, *(i - 1 if chain else int(rng.integers(i)) for i in range(1, count))]
            )
            nodes.append([int(n) for n in rng.integers(200, size=count)])
        size_of_step = min(map(len, nodes))
        parents = [each[:size_of_step] for each in parents]
        nodes = [each[:size_of_step] for each in nodes]
        layer.run(slots, nodes, parents)  # abandoned: it must leave no trace
        outputs = layer.run(slots, nodes, parents)
        for i, slot in enumerate(slots):
            node = int(rng.integers(size_of_step))
            path = path_to(parents[i], node)
            tokens = sequences[i] + [nodes[i][n] for n in path]
            plain = sequential(Layer(device, dtype, size), slot, tokens, len(sequences[i]))
            assert np.array_equal(outputs[i][path], plain[len(sequences[i]) :])
            layer.accept(slot, path)
            sequences[i] = tokens
    assert_close(
        layer.run(slots, [[7], [8]])[0],
        layer.expected(0, sequences[0] + [7])[-1:],
        TOLERANCE[dtype],
    )


@on_devices_dtypes_sizes
def test_prompts_of_all_lengths_continue(device: str, dtype: str, size: Any) -> None:
    """Lengths around the stages of the kernel, 16 or 32 tokens; then a plain decode step."""
    whole = Layer(device, dtype, size).prefill([2], [[*range(164)]])[0]
    assert_close(whole, Layer(device, dtype, size).expected(2, [*range(164)]), TOLERANCE[dtype])
    for count in (1, 2, 3, 4, 13, 15, 16, 17, 31, 32, 33, 37, 63, 64, 65, 96, 97, 129, 163):
        layer = Layer(device, dtype, size)
        outputs = layer.prefill([2], [[*range(count)]])[0]
        assert np.array_equal(outputs, whole[:count]), f"{count} tokens"
        after = layer.run([2], [[count]])[0][0]
        assert np.array_equal(after, whole[count]), f"the token after {count} tokens"


# Parents of trees of up to 64 nodes, in breadth order.
TREES = {
    "star": [-1] + [0] * 63,
    "chain": [node - 1 for node in range(64)],
    "binary": [(node + 1) // 2 - 1 for node in range(64)],
    "ternary": [-1, *((node - 1) // 3 for node in range(1, 40))],
    "two chains": [-1, 0, 0, *(node - 2 for node in range(3, 64))],
    # A leaf beside each node of a chain: first the leaf, or first the chain.
    "leaves first": [-1, *(max(0, (node - 1) // 2 * 2) for node in range(1, 64))],
    "leaves last": [-1, *(max(0, (node - 1) // 2 * 2 - 1) for node in range(1, 64))],
    "one node": [-1],
    "three nodes": [-1, 0, 0],
}


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize(
    ("device", "size"),
    [
        pytest.param("cpu", SIZES[2], id="cpu"),
        pytest.param("cuda", SIZES[2], id="cuda", marks=GPU),
        # Two CTAs an SM, so that the kernel has room for fewer copies of S than it would use.
        pytest.param("cuda", (2, 40, 128, 128), id="cuda, 40 heads", marks=GPU),
    ],
)
def test_wide_and_deep_trees(device: str, size: Any, shape: str) -> None:
    """Leaves have the bits of a prompt with their path. Then the longest path is accepted."""
    rng, dtype, parents = np.random.default_rng(3), "bfloat16", TREES[shape]
    prompt = [*range(5)]
    nodes = [int(token) for token in rng.integers(200, size=len(parents))]
    layer = Layer(device, dtype, size, max_tree=64)
    layer.prefill([1], [prompt])
    outputs = layer.run([1], [nodes], [parents])[0]
    leaves = sorted(set(range(len(parents))) - set(parents))
    chosen = {leaves[0], leaves[-1], *(int(leaf) for leaf in rng.choice(leaves, 6))}
    for leaf in sorted(chosen):
        path = path_to(parents, leaf)
        tokens = prompt + [nodes[node] for node in path]
        plain = Layer(device, dtype, size).prefill([1], [tokens])[0]
        assert np.array_equal(outputs[path], plain[len(prompt) :]), f"leaf {leaf}"
    path = max((path_to(parents, leaf) for leaf in leaves), key=len)
    tokens = prompt + [nodes[node] for node in path] + [7]
    layer.accept(1, path)
    plain = Layer(device, dtype, size).prefill([1], [tokens])[0]
    assert np.array_equal(layer.run([1], [[7]])[0][0], plain[-1])


@pytest.mark.parametrize(
    ("device", "dtype", "size"),
    [
        ("cpu", "float32", SIZES[1]),
        ("cpu", "bfloat16", SIZES[1]),
        # More than 66 heads in all: a plain step on an H100 does not use clusters.
        pytest.param("cuda", "float16", (2, 40, 128, 128), marks=GPU),
        pytest.param("cuda", "bfloat16", (2, 40, 128, 128), marks=GPU),
    ],
)
def test_steps_of_many_sequences_change_no_bit(device: str, dtype: str, size: Any) -> None:
    """Plain steps of four sequences, some after an abandoned step, after a tree, or at once."""
    layer, slots = Layer(device, dtype, size), [0, 1, 2, 3]
    sequences = [[*range(length)] for length in (5, 1, 9, 2)]
    begins = [len(tokens) for tokens in sequences]
    outputs: list[list[Floats]] = [[] for _ in slots]
    layer.prefill(slots, sequences)

    def step(first: int, parents: list[int], path: list[int], at_once: bool = False) -> None:
        """Node j of slot s is token first + 5 s + j; the path is accepted."""
        nodes = [[first + 5 * slot + node for node in range(len(parents))] for slot in slots]
        found = layer.run(slots, nodes, [parents for _ in slots], accepts_all=at_once)
        for slot in slots:
            outputs[slot] += [*found[slot][path]]
            layer.accept(slot, path)
            sequences[slot] += [nodes[slot][node] for node in path]

    for first in (20, 30, 40):
        step(first, [-1], [0])
    layer.run(slots, [[7], [8], [9], [10]])  # abandoned: it must leave no trace
    step(50, [-1], [0])
    step(60, [-1, 0, 0, 2], [0, 2, 3])
    step(80, [-1], [0])
    step(90, [-1], [0])
    for first in (100, 110):  # the first one also adds the token before
        step(first, [-1], [0], at_once=True)
    step(120, [-1, 0, 0, 2], [0, 2, 3])
    step(130, [-1], [0], at_once=True)
    step(140, [-1], [0])
    chunks = [[3], [4, 5], [6], [7, 8, 9]]
    for slot, found in zip(slots, layer.prefill(slots, chunks)):
        outputs[slot] += [*found]
        tokens = sequences[slot] + chunks[slot]
        plain = sequential(Layer(device, dtype, size), slot, tokens, begins[slot])
        assert np.array_equal(outputs[slot], plain[begins[slot] :]), f"slot {slot}"


@on_devices
def test_fused_projections(device: str) -> None:
    size, dtype = SIZES[3], "bfloat16"
    layers = [Layer(device, dtype, size, fused) for fused in (False, True)]
    first, second = (sequential(layer, 1, [*range(20)], 17) for layer in layers)
    assert np.array_equal(first, second)


@on_devices
def test_a_prompt_may_follow_a_decoding_step(device: str) -> None:
    """The prefill first adds the pending tokens of the decode step to S."""
    layer = Layer(device, "bfloat16", SIZES[2])
    layer.prefill([1], [[0, 1, 2]])
    layer.run([1], [[3, 4, 5, 6]], [[-1, 0, 0, 2]])
    layer.accept(1, [0, 2, 3])
    outputs = layer.prefill([1], [[9, 10]])[0]
    plain = sequential(Layer(device, "bfloat16", SIZES[2]), 1, [0, 1, 2, 3, 5, 6, 9, 10], 3)
    assert np.array_equal(outputs, plain[-2:])


@on_devices
def test_too_many_tokens_are_refused(device: str) -> None:
    layer = Layer(device, "bfloat16", SIZES[2])
    with pytest.raises(ValueError, match="up to 17 tokens of a sequence, expected at most 16"):
        layer.run([0], [[*range(17)]])
