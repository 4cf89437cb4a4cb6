"""min_tokens: masks, masked nodes, and launching ahead after the minimum."""

from __future__ import annotations

import numpy as np
import pytest
from fake_engine import FakeEngine
from test_runner import EOS, Job, script, start

from cpmcu import SamplingParams
from cpmcu.engine.min_tokens import MinTokens

__all__ = ["start"]

CHAIN = [-1, 0, 1, 2]
TREE = [-1, 0, 0, 1, 1, 2, 3]  # depths 0 1 1 2 2 2 3


def allowed(mask: np.ndarray, vocab_size: int) -> set[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert not bits[vocab_size:].any()
    return set(np.flatnonzero(bits).tolist())


@pytest.mark.parametrize("vocab_size", [31, 32, 70])
def test_the_mask_excludes_the_end_tokens(vocab_size: int):
    masks = MinTokens(1, [2, 30, 500], vocab_size).masks(0, [-1])
    assert allowed(masks[0], vocab_size) == set(range(vocab_size)) - {2, 30}
    assert masks[0].dtype == np.uint32


@pytest.mark.parametrize(
    ("num_tokens", "parents", "nodes"),
    [
        (0, CHAIN, {0, 1, 2, 3}),
        (4, CHAIN, {0, 1, 2, 3}),
        (6, CHAIN, {0, 1}),
        (7, CHAIN, {0}),
        (8, CHAIN, set()),
        (6, TREE, {0, 1, 2}),
        (5, TREE, {0, 1, 2, 3, 4, 5}),
    ],
)
def test_nodes_are_masked_by_their_depth(num_tokens: int, parents: list[int], nodes: set[int]):
    """The token sampled at a node of depth d is token number num_tokens + d of the output."""
    assert MinTokens(8, [0], 40).masks(num_tokens, parents).keys() == nodes


def test_with_a_grammar():
    free, end, both = (np.array([word], np.uint32) for word in (0b110, 0b001, 0b011))
    least = MinTokens(2, [0], 32)
    grammar = {0: both, 1: end, 2: both}  # node 3 is unreachable
    masks = least.masks(0, [-1, 0, 1, 0], grammar)
    assert {node: int(mask[0]) for node, mask in masks.items()} == {0: 0b010, 1: 0b001, 2: 0b011}
    assert least.masks(0, [-1], {0: free})[0] == free


@pytest.mark.parametrize("burst", [1, 3])
def test_steps_are_launched_ahead_after_the_minimum(start, burst: int):
    engine = FakeEngine(script, burst=burst)
    runner = start(engine)
    job = Job(max_tokens=60, min_tokens=MinTokens(10, [EOS], 100))
    runner.submit(job.request)
    assert job.wait().token_ids == job.expected(60)
    rows = [detail for method, detail in engine.log if method == "end_masked"]
    assert len(rows) == -(-9 // burst)  # the first token comes from prefill
    assert sum(row >= 0 for step in rows for row in step) == 9
    assert any(method == "decode" for method, _ in engine.log)
    assert engine.most_in_flight == 2


def test_without_end_tokens_no_step_is_masked(start):
    engine = FakeEngine(script)
    job = Job(max_tokens=20, min_tokens=MinTokens(10, [], 100))
    start(engine).submit(job.request)
    assert len(job.wait().token_ids) == 20
    assert not any(method == "begin_masked" for method, _ in engine.log)


@pytest.mark.parametrize("burst", [1, 4])
def test_stop_strings_match_after_the_minimum(start, burst: int):
    runner = start(FakeEngine(script, burst=burst))
    whole = Job(max_tokens=30)
    runner.submit(whole.request)
    text = whole.wait().text
    for least in (0, 3, 4, 5, 9):
        job = Job(max_tokens=30, stop=[text[4], text[11]], min_tokens=MinTokens(least, [], 100))
        runner.submit(job.request)
        output = job.wait()
        stop = 4 if least < 5 else 11
        assert (output.text, output.stop_reason) == (text[:stop], text[stop])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_tokens": -1}, "min_tokens is -1, but must be"),
        ({"min_tokens": 1.5}, "min_tokens is 1.5, but must be an integer"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5, but must be at most max_tokens"),
    ],
)
def test_one_sentence(fields, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)
