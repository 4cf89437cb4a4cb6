"""Speculation changes no token, for every drafter, tree shape, chunk length and sampling."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.engine.drafted import (
    CONTEXT,
    COUNT,
    DRAFTS,
    PROMPTS,
    SAMPLINGS,
    SEVERAL,
    SOME_DRAFTS,
    TREE_NAMES,
    TREES,
    Drive,
    Models,
    family_of,
    memory_full_of,
)
from tests.engine.harness import SMALL
from tests.reference.engines import extension_or_skip

extension_or_skip()


@pytest.mark.parametrize("tree", TREE_NAMES)
@pytest.mark.parametrize("kind", DRAFTS)
def test_same_tokens(models: Models, kind: str, tree: str) -> None:
    family = family_of(kind)
    drive = Drive(models.drafted(kind, family, TREES[tree]), ahead=2)
    names = list(SAMPLINGS)
    # Large trees run with every other prompt only. Each prompt has another sampling.
    for i, ids in enumerate(SEVERAL[::2] if tree in ("wide", "full") else SEVERAL):
        name = names[(i + list(TREES).index(tree)) % len(names)]
        fields = SAMPLINGS[name]
        got = drive.one(ids, COUNT, **fields)
        assert got == models.plain(family, ids, COUNT, **fields), (len(ids), name)


@pytest.mark.parametrize("kind", SOME_DRAFTS)
def test_any_shapes_in_any_order(models: Models, kind: str) -> None:
    family = family_of(kind)
    chain = kind == "ngram"
    rng = random.Random(kind)
    shapes = (
        [(0, 1), (1, 2), (2, 3), (4, 5)] if chain else [(0, 1), (1, 1), (2, 9), (4, 8), (4, 33)]
    )
    drive = Drive(models.drafted(kind, family, TREES["wide"]), 2, lambda: rng.choice(shapes))
    for ids, name in zip(SEVERAL, ("greedy", "all", "seeded")):
        got = drive.one(ids, COUNT, **SAMPLINGS[name])
        assert got == models.plain(family, ids, COUNT, **SAMPLINGS[name])
        got = drive.one(
            ids, COUNT, **SAMPLINGS[name]
        )  # the slot's draft cache has gaps from earlier steps
        assert got == models.plain(family, ids, COUNT, **SAMPLINGS[name])


@pytest.mark.parametrize("skips", [[True], [True, False], [False, True]], ids=repr)
@pytest.mark.parametrize("kind", SOME_DRAFTS)
def test_draft_that_skips_prompts(models: Models, kind: str, skips: list[bool]) -> None:
    """The drafter skips the whole prompt, or every other chunk of it."""
    family = family_of(kind)
    skipped = itertools.cycle(skips)
    drive = Drive(models.drafted(kind, family, TREES["wide"]), 2, skips=lambda: next(skipped))
    for ids, name in zip(SEVERAL, ("greedy", "all", "seeded")):
        got = drive.one(ids, COUNT, chunk=16, **SAMPLINGS[name])
        assert got == models.plain(family, ids, COUNT, **SAMPLINGS[name])


def test_draft_recovers_after_plain_steps(models: Models) -> None:
    """The target is its own draft. The draft has no KV entries for the tokens of plain steps.

    The result must not depend on uninitialised cache memory, here filled with bytes 0x7f.
    """
    with memory_full_of(0x7F):
        engine = models.drafted("itself", "llama", TREES["chain"])
    shapes = iter([(4, 5)] * 3 + [(0, 1)] * 5 + [(4, 5)] * 50)
    drive = Drive(engine, shapes=lambda: next(shapes))
    assert drive.one(PROMPTS[5], 60) == models.plain("llama", PROMPTS[5], 60)
    assert drive.emitted[:8] == [5] * 3 + [1] * 5
    assert sum(drive.emitted[8:16]) > 8


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((5, 2), "a decode step of depth 5 and 2 nodes, expected a depth of 0 to 4"),
        ((4, 34), "34 nodes, expected a depth of 0 to 4 and 1 to 33 nodes"),
        ((-1, 1), "depth -1"),
        ((1, 0), "1 and 0 nodes"),
        ((0, 2), "a decode step of depth 0 and 2 nodes, expected 1, the root"),
        ((1, 10), "of depth 1 and 10 nodes, but .* at most depth 1 and 9 nodes"),
    ],
)
def test_shapes_are_checked(models: Models, shape: tuple[int, int], message: str) -> None:
    drive = Drive(models.drafted("eagle", "llama", TREES["wide"]))
    slot, _ = drive.start(PROMPTS[0], max_tokens=9)
    assert drive.engine.reserve(slot, 20)
    with pytest.raises(ValueError, match=message):
        drive.engine.decode([slot], shape)
    drive.engine.decode([slot])
    drive.engine.collect()
    drive.engine.release(slot)


@pytest.mark.parametrize("chunk", [7] if SMALL else [1, 7, 65])
@pytest.mark.parametrize("kind", SOME_DRAFTS)
def test_chunks(models: Models, kind: str, chunk: int) -> None:
    family = family_of(kind)
    drive = Drive(models.drafted(kind, family, TREES["narrow"]))
    for ids in (PROMPTS[3], PROMPTS[5]):
        runs = []
        for length in (chunk, 0):
            tokens = drive.one(ids, 30, length, **SAMPLINGS["seeded"])
            assert tokens == models.plain(family, ids, 30, **SAMPLINGS["seeded"])
            runs.append(drive.emitted)
        assert runs[0] == runs[1]  # the drafter read the same hidden states


@pytest.mark.parametrize("tree", ["chain", "full"])
@pytest.mark.parametrize(
    "family", ["qwen2_gptq"] if SMALL else ["llama", "qwen2", "qwen3", "minicpm", "qwen2_gptq"]
)
def test_target_as_its_own_draft_is_accepted(models: Models, family: str, tree: str) -> None:
    """A chain is always accepted completely, a tree at least to its first level."""
    draft = {"draft_model_path": str(models.draft("itself", family)), "draft_head_quant": "none"}
    drive = Drive(models.engine(family, draft | TREES[tree]))
    for ids in SEVERAL:
        assert drive.one(ids, 61) == models.plain(family, ids, 61)
        if tree == "chain":
            assert drive.emitted == [5] * 12
        else:
            assert min(drive.emitted[:-1]) >= 2


def test_noisy_draft_is_sometimes_accepted(models: Models) -> None:
    drive = Drive(models.drafted("noisy", "llama", TREES["narrow" if SMALL else "wide"]))
    seen: set[int] = set()
    for ids in SEVERAL:
        for name in ("greedy", "seeded"):
            drive.one(ids, 70, **SAMPLINGS[name])
            seen |= set(drive.emitted[:-1])
    assert {1, 2, 3} <= seen


@pytest.mark.parametrize("kind", SOME_DRAFTS)
@pytest.mark.parametrize("name", ["all"] if SMALL else ["greedy", "all"])
def test_several_sequences(models: Models, kind: str, name: str) -> None:
    from cpmcu import C

    family, fields = family_of(kind), SAMPLINGS[name]
    engine = models.drafted(kind, family, TREES["narrow"], max_num_seqs=4)
    drive = Drive(engine)
    prompts = [PROMPTS[i] for i in (5, 0, 3, 6)]
    counts = [30, 45, 10, 60]
    slots, tokens = [], []
    for ids, count in zip(prompts[:2], counts[:2]):
        slot, first = drive.start(ids, **fields, max_tokens=count)
        slots.append(slot), tokens.append([first])
    # One step reads two prompts.
    for ids, count in zip(prompts[2:], counts[2:]):
        slot = engine.add_sequence(C.SamplingConfig(**fields, max_tokens=count), ids)
        assert engine.reserve(slot, len(ids))
        slots.append(slot), tokens.append([])
    engine.prefill([(slots[2], prompts[2], True), (slots[3], prompts[3][:60], False)])
    tokens[2] += engine.collect()[0].tokens
    engine.prefill([(slots[3], prompts[3][60:180], False)])
    assert engine.collect() == []
    engine.prefill([(slots[3], prompts[3][180:], True)])
    tokens[3] += engine.collect()[0].tokens
    running = list(range(4))
    while running:
        for i in running:
            wanted = len(prompts[i]) + len(tokens[i]) + engine.tokens_per_step
            assert engine.reserve(slots[i], min(wanted, CONTEXT))
        engine.decode([slots[i] for i in running])
        for output in engine.collect():
            i = slots.index(output.slot)
            tokens[i] += output.tokens
            assert output.finished == (len(tokens[i]) == counts[i])
        running = [i for i in running if len(tokens[i]) < counts[i]]
    for ids, count, got in zip(prompts, counts, tokens):
        assert got == models.plain(family, ids, count, **fields)


def test_logprobs_are_those_of_plain_decoding(models: Models) -> None:
    plain = models.engine("llama", None)
    drafted = models.drafted("noisy", "llama", TREES["wide"])
    results = []
    for engine in (plain, drafted):
        fields = {**SAMPLINGS["all"], "logprobs": 3}
        slot, first = Drive(engine).start(PROMPTS[4], max_tokens=40, **fields)
        tokens, logprobs, tops = [first], [], []
        while len(tokens) < 40:
            engine.reserve(slot, len(PROMPTS[4]) + len(tokens) + engine.tokens_per_step)
            engine.decode([slot])
            (output,) = engine.collect()
            assert len(output.logprobs) == len(output.top_ids) == len(output.tokens)
            tokens += output.tokens
            logprobs += output.logprobs
            tops += output.top_ids
        engine.release(slot)
        results.append((tokens, logprobs, tops))
    assert results[0] == results[1]


@pytest.mark.parametrize("window", [16] if SMALL else [1, 16, 64])
def test_draft_window(models: Models, window: int) -> None:
    draft = str(models.draft("eagle", "llama"))
    speculation = {"draft_model_path": draft, "spec_window_size": window, **TREES["narrow"]}
    drive = Drive(models.engine("llama", speculation))
    for ids in PROMPTS:
        assert drive.one(ids, 40) == models.plain("llama", ids, 40)
