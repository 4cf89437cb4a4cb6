"""Chunk length, pages, batches and launch-ahead never change the tokens of a sequence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.engine.harness import (
    SHIPPED,
    generate,
    make_engine,
    prefill,
    random_ids,
    sampling,
)
from tests.reference.engines import prompt_logits
from tests.reference.tiny_checkpoints import write_tiny

VOCAB = 160
PAGE = 64


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_tiny(path, "llama", dtype="bfloat16", vocab_size=VOCAB, head_dim=64)
    return path


@pytest.fixture(scope="module")
def engine(directory: Path, device: str):
    return make_engine(directory, device, max_num_seqs=4, chunk_length=128)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 128, 129, 200])
def test_chunk_length_does_not_change_tokens(engine, length: int) -> None:
    ids = random_ids(length, VOCAB, seed=length)
    expected = generate(engine, ids, 20)
    for chunk in (1, 7, 64, 100):
        if chunk < length:
            assert generate(engine, ids, 20, chunk=chunk) == expected


def test_chunk_length_does_not_change_logits(directory: Path, device: str) -> None:
    ids = random_ids(300, VOCAB)
    logits = [
        prompt_logits(make_engine(directory, device, chunk_length=chunk), ids)
        for chunk in (300, 64, 17)
    ]
    np.testing.assert_array_equal(logits[0], logits[1])
    np.testing.assert_array_equal(logits[0], logits[2])


@pytest.mark.parametrize("length", [62, 63, 64, 65])
def test_decode_agrees_with_prefill_across_pages(engine, length: int) -> None:
    """Greedy decoding draws the argmax of one pass over the whole text, up to near-ties."""
    ids = random_ids(length, VOCAB, seed=7)
    tokens = generate(engine, ids, 70)
    logits = prompt_logits(engine, ids + tokens[:-1])[length - 1 :]
    chosen = logits[np.arange(len(tokens)), tokens]
    assert (logits.max(axis=1) - chosen).max() < 0.1


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.8, "seed": 11, "top_p": 0.9}])
def test_batch_of_unequal_lengths_equals_each_alone(engine, fields: dict) -> None:
    prompts = [random_ids(n, VOCAB, seed=n) for n in (3, 64, 90, 1)]
    alone = [generate(engine, ids, 30, **fields) for ids in prompts]
    slots = [engine.add_sequence(sampling(**fields), ids) for ids in prompts]
    for slot, ids in zip(slots, prompts, strict=True):
        assert engine.reserve(slot, len(ids) + 30)
    # Two prompts of unequal length share a prefill step; the others are prefilled alone.
    engine.prefill([(slots[0], prompts[0], True), (slots[1], prompts[1], True)])
    first = {output.slot: output.tokens for output in engine.collect()}
    engine.prefill([(slots[2], prompts[2], True), (slots[3], prompts[3], True)])
    first |= {output.slot: output.tokens for output in engine.collect()}
    tokens = [first[slot] for slot in slots]
    for step in range(29):
        engine.decode(slots[: 4 if step < 20 else 3])  # the batch shrinks during the run
        for output in engine.collect():
            tokens[slots.index(output.slot)] += output.tokens
    for slot in slots:
        engine.release(slot)
    for got, expected in zip(tokens, alone, strict=True):
        assert got == expected[: len(got)]


def test_launch_ahead_changes_nothing(engine) -> None:
    ids = random_ids(50, VOCAB, seed=3)
    expected = generate(engine, ids, 40, temperature=1.0, seed=5)
    slot = engine.add_sequence(sampling(temperature=1.0, seed=5), ids)
    assert engine.reserve(slot, 100)
    engine.prefill([(slot, ids, True)])
    for _ in range(4):
        engine.decode([slot])
    tokens: list[int] = []
    while len(tokens) < 40:
        if engine.in_flight() < 5:
            engine.decode([slot])
        tokens += engine.collect()[0].tokens
    engine.release(slot)
    while engine.in_flight():
        assert engine.collect() == []  # steps of a released slot are dropped
    assert tokens == expected


def test_same_seed_same_text_other_seed_other_text(engine) -> None:
    ids = random_ids(20, VOCAB)
    first = generate(engine, ids, 30, temperature=1.0, seed=1)
    assert generate(engine, ids, 30, temperature=1.0, seed=1) == first
    assert generate(engine, ids, 30, temperature=1.0, seed=2) != first
    assert generate(engine, ids, 30, temperature=1.0, seed=1, stream=1) != first


def test_penalties_count_the_prompt_and_the_output(engine) -> None:
    ids = random_ids(20, VOCAB)
    tokens = generate(engine, ids, 60, frequency_penalty=100.0, presence_penalty=100.0)
    assert len(set(tokens)) == 60  # no token occurs twice
    banned = [(token, -1e9) for token in range(VOCAB) if token != 77]
    assert generate(engine, ids, 5, logit_bias=banned) == [77] * 5


def test_resumed_sequence_keeps_its_counts(engine) -> None:
    """After a prefill of prompt and output, marked as such, the sequence continues unchanged."""
    ids = random_ids(20, VOCAB)
    fields = {"temperature": 0.7, "seed": 9, "frequency_penalty": 2.0, "repetition_penalty": 1.5}
    expected = generate(engine, ids, 40, **fields)
    slot = engine.add_sequence(sampling(**fields), ids, expected[:15])
    tokens = [prefill(engine, slot, ids + expected[:15], 128)]
    while len(tokens) < 25:
        engine.reserve(slot, len(ids) + 15 + len(tokens))
        engine.decode([slot])
        tokens += engine.collect()[0].tokens
    engine.release(slot)
    assert tokens == expected[15:]


def test_logprobs_match_prompt_logits(engine) -> None:
    ids = random_ids(40, VOCAB)
    slot = engine.add_sequence(sampling(logprobs=5, temperature=0.0), ids)
    engine.reserve(slot, len(ids) + 1)
    engine.prefill([(slot, ids, True)])
    (output,) = engine.collect()
    engine.release(slot)
    logits = prompt_logits(engine, ids)[-1].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    best = np.argsort(-logprobs, kind="stable")[:5]
    assert output.tokens == [best[0]]
    assert output.top_ids == [best.tolist()]
    np.testing.assert_allclose(output.top_logprobs[0], logprobs[best], atol=1e-4)
    np.testing.assert_allclose(output.logprobs[0], logprobs[best[0]], atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 7, 64, 128])
@pytest.mark.parametrize("length", [2, 17, 64, 130])
def test_logprobs_of_a_prompt(engine, length: int, chunk: int) -> None:
    """The log-probabilities are those of the prompt's logits.

    Requesting them changes no later token.
    """
    ids = random_ids(length, VOCAB, seed=length)
    expected = generate(engine, ids, 10)
    slot = engine.add_sequence(sampling(), ids)
    assert engine.reserve(slot, length + 1)
    found = []
    for begin in range(0, length - 1, chunk):
        end = min(begin + chunk, length - 1)
        found += engine.prefill_logprobs(slot, ids[begin:end], ids[begin + 1 : end + 1], 3)
        assert engine.collect() == []
    engine.prefill([(slot, ids[-1:], True)])
    tokens = engine.collect()[0].tokens
    while len(tokens) < 10:
        assert engine.reserve(slot, length + len(tokens))
        engine.decode([slot])
        tokens += engine.collect()[0].tokens
    engine.release(slot)
    assert tokens == expected

    logits = prompt_logits(engine, ids)[:-1].astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    best = np.argsort(-logits, axis=1, kind="stable")[:, :3]
    rows = np.arange(length - 1)
    np.testing.assert_allclose([f[0] for f in found], logprobs[rows, ids[1:]], atol=1e-4)
    assert [f[1] for f in found] == best.tolist()
    np.testing.assert_allclose([f[2] for f in found], logprobs[rows[:, None], best], atol=1e-4)


def test_logprobs_of_a_prompt_reject_invalid_calls(engine) -> None:
    slot = engine.add_sequence(sampling(), [1, 2])
    assert engine.reserve(slot, 10)
    for targets, top, message in (
        ([2], 0, "1 targets for 2 tokens"),
        ([2, VOCAB], 0, f"token id {VOCAB} is outside the vocabulary"),
        ([2, 3], 21, "21 likeliest tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.prefill_logprobs(slot, [1, 2], targets, top)
    engine.release(slot)
    assert len(generate(engine, [1, 2, 3], 3)) == 3  # and nothing is lost


def test_generation_to_the_last_kv_entry_and_beyond(directory: Path, device: str) -> None:
    engine = make_engine(directory, device, max_model_len=100, max_num_seqs=1)
    ids = random_ids(90, VOCAB)
    slot = engine.add_sequence(sampling(), ids)
    first = prefill(engine, slot, ids, 128)
    assert first >= 0 and engine.reserve(slot, 100)
    for _ in range(10):
        engine.decode([slot])
        engine.collect()
    with pytest.raises(ValueError, match=r"holds 100 tokens and 1 more .* holds 100 a sequence"):
        engine.decode([slot])
    with pytest.raises(ValueError, match="101 tokens were asked for, the engine holds 100"):
        engine.reserve(slot, 101)
    engine.release(slot)
    assert len(generate(engine, ids, 11)) == 11  # the engine is still usable


def test_pages_are_reserved_and_released(directory: Path, device: str) -> None:
    engine = make_engine(directory, device, max_model_len=256, max_num_seqs=2)
    assert engine.num_pages == 2 * 256 // PAGE
    slots = [engine.add_sequence(sampling(), [1]) for _ in range(2)]
    with pytest.raises(RuntimeError, match="all 2 sequence slots are taken"):
        engine.add_sequence(sampling(), [1])
    assert engine.reserve(slots[0], 65) and engine.num_free_pages == engine.num_pages - 2
    assert engine.reserve(slots[0], 1) and engine.num_free_pages == engine.num_pages - 2
    with pytest.raises(ValueError, match="pages for 0 tokens and needs 5"):
        engine.prefill([(slots[1], [1, 2, 3, 4, 5], True)])
    for slot in slots:
        engine.release(slot)
    assert engine.num_free_pages == engine.num_pages


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.prefill([]), "a prefill step of 0 sequences"),
        (lambda e: e.prefill([(3, [1], True)]), "slot 3 holds no sequence"),
        (lambda e: e.decode([9]), "slot 9 holds no sequence"),
        (lambda e: e.decode([]), "a decode step of 0 sequences"),
        (lambda e: prompt_logits(e, []), "has no tokens"),
        (lambda e: prompt_logits(e, [VOCAB]), f"token id {VOCAB} is outside the vocabulary"),
        (lambda e: prompt_logits(e, [-1]), "token id -1 is outside"),
        (
            lambda e: prompt_logits(e, [1] * 1000),
            "1000 tokens were asked for, the engine holds 512",
        ),
        (lambda e: e.add_sequence(sampling(top_p=0.0), []), "top_p is 0, expected above 0"),
        (lambda e: e.add_sequence(sampling(temperature=-1.0), []), "temperature is -1"),
        (lambda e: e.add_sequence(sampling(logprobs=21), []), "logprobs is 21, expected -1"),
        (lambda e: e.add_sequence(sampling(logit_bias=[(VOCAB, 1.0)]), []), "names token 160"),
        (lambda e: e.release(2), "slot 2 holds no sequence"),
    ],
)
def test_invalid_calls_name_the_error(engine, call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(engine)
    assert len(generate(engine, [1, 2, 3], 3)) == 3  # and nothing is lost


def test_a_slot_twice_in_a_step_is_refused(engine) -> None:
    expected = generate(engine, [1, 2, 3, 4], 4)
    slot = engine.add_sequence(sampling(), [1, 2, 3, 4])
    assert engine.reserve(slot, 10)
    with pytest.raises(ValueError, match=f"slot {slot} is twice in one step"):
        engine.prefill([(slot, [1, 2], False), (slot, [3, 4], True)])
    engine.prefill([(slot, [1, 2, 3, 4], True)])
    tokens = engine.collect()[0].tokens
    for call in (engine.decode, engine.begin_masked):
        with pytest.raises(ValueError, match=f"slot {slot} is twice in one step"):
            call([slot, slot])
    while len(tokens) < 4:
        engine.decode([slot])
        tokens += engine.collect()[0].tokens
    engine.release(slot)
    assert tokens[:4] == expected


def test_a_prompt_chunk_behind_a_decode_step_in_flight_is_refused(engine) -> None:
    """The host does not yet know the position of the chunk."""
    slot = engine.add_sequence(sampling(), [1])
    assert engine.reserve(slot, 10)
    engine.prefill([(slot, [1], True)])
    engine.decode([slot])
    with pytest.raises(ValueError, match=f"slot {slot} has decode steps in flight; collect"):
        engine.prefill([(slot, [5], True)])
    while engine.in_flight():
        engine.collect()
    engine.prefill([(slot, [5], True)])
    assert len(engine.collect()[0].tokens) == 1
    engine.release(slot)


def test_decode_before_prefill_is_refused(engine) -> None:
    slot = engine.add_sequence(sampling(), [1])
    engine.reserve(slot, 10)
    with pytest.raises(ValueError, match="decodes before its prompt was prefilled"):
        engine.decode([slot])
    engine.prefill([(slot, [1], False)])  # no token is drawn, so decoding has no root
    assert engine.collect() == []
    with pytest.raises(ValueError, match="decodes before its prompt was prefilled"):
        engine.decode([slot])
    engine.release(slot)


@pytest.mark.gpu
def test_greedy_text_is_the_same_on_cpu_and_cuda() -> None:
    """On the shipped model, the margin of the best token exceeds rounding errors."""
    engines = [make_engine(SHIPPED, device, max_model_len=512) for device in ("cpu", "cuda")]
    prompts = [random_ids(n, 4096, seed=n) for n in (1, 5, 64, 200)]
    for ids in prompts:
        cpu, cuda = (generate(engine, ids, 60) for engine in engines)
        split = next((i for i, (a, b) in enumerate(zip(cpu, cuda, strict=True)) if a != b), None)
        if split is not None:  # they may differ only after a near-tie
            logits = prompt_logits(engines[0], ids + cpu[:split])[-1]
            assert abs(logits[cpu[split]] - logits[cuda[split]]) < 0.05


@pytest.mark.gpu
def test_graphs_change_nothing(directory: Path) -> None:
    ids = random_ids(100, VOCAB)
    with_graph = make_engine(directory, "cuda", cuda_graph=True)
    without = make_engine(directory, "cuda", cuda_graph=False)
    fields = {"temperature": 0.9, "seed": 3}
    assert generate(with_graph, ids, 100, **fields) == generate(without, ids, 100, **fields)
    counters = with_graph.counters
    assert counters["graph_captures"] == 1 and counters["graph_replays"] >= 97
    assert without.counters["graph_captures"] == 0


@pytest.mark.gpu
@pytest.mark.alone
def test_ten_engines_leak_no_device_memory(directory: Path) -> None:
    from cpmcu import C

    def one_life() -> None:
        engine = make_engine(directory, "cuda", max_num_seqs=2)
        generate(engine, [1, 2, 3], 8)
        del engine

    one_life()  # loads the CUDA context, kernels and cuBLASLt once
    lost = []
    for _ in range(4):  # another process may allocate memory meanwhile; a leak shows each time
        before = C.device_info(0)["free_bytes"]
        for _ in range(10):
            one_life()
        lost.append(before - C.device_info(0)["free_bytes"])
        if lost[-1] < 8 << 20:
            return
    pytest.fail(f"ten engines leaked device memory in each of four runs, in bytes: {lost}")


def test_a_field_that_only_python_knows_tells_to_build_again() -> None:
    from cpmcu import C

    with pytest.raises(TypeError, match=r'no field "newer": .* build it again'):
        C.ModelSpec(newer=1)
