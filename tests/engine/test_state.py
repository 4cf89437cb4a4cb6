"""Pages and per-slot state of many sequences: each yields the tokens that it yields alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.drafted import (
    PROMPTS,
    SAMPLINGS,
    SOME_DRAFTS,
    TREES,
    VOCAB,
    Models,
    family_of,
)
from tests.engine.harness import SMALL, random_ids, sampling
from tests.reference.engines import extension_or_skip

extension_or_skip()

PAGE = 64
FEW = {"max_num_seqs": 2, "max_model_len": 2 * PAGE}  # two pages for each sequence, and look-ahead


def take_all_pages(engine: Any) -> list[int]:
    """Starts a sequence in each slot, with the maximum number of pages."""
    slots = []
    for ids in PROMPTS[: engine.max_num_seqs]:
        slot, _ = start(engine, ids, max_tokens=100)
        assert engine.reserve(slot, engine.max_model_len)
        slots.append(slot)
    assert engine.num_free_pages == 0
    return slots


@pytest.mark.parametrize("kind", [None, "noisy"])
def test_pages_of_a_step_in_flight_are_waited_for(models: Models, kind: str | None) -> None:
    engine = engine_of(models, kind, **FEW)
    slots = take_all_pages(engine)
    engine.decode(slots)
    engine.decode(slots)
    for slot in slots:
        engine.release(slot)
    ids, fields = PROMPTS[2], SAMPLINGS["seeded"]
    # Steps that are not yet collected may still read these pages.
    (tokens,) = together(engine, [(ids, 40, fields)])
    assert tokens == models.plain("llama", ids, 40, **fields)


@pytest.mark.parametrize("kind", [None, "noisy"])
def test_free_pages_after_a_release_in_flight(models: Models, kind: str | None) -> None:
    engine = engine_of(models, kind, **FEW)
    slots = take_all_pages(engine)
    held = engine.num_pages // 2
    engine.decode(slots)
    engine.release(slots[0])
    assert engine.num_free_pages == held
    assert [output.slot for output in engine.collect()] == slots[1:]
    assert engine.num_free_pages == held
    engine.release(slots[1])
    assert engine.num_free_pages == engine.num_pages


def test_pages_without_a_slot(models: Models) -> None:
    engine = engine_of(models, None, **FEW)
    assert engine.pages.take(0) == []
    first = engine.pages.take(1)
    rest = engine.pages.take(1000)
    assert len({*first, *rest}) == engine.num_pages and engine.num_free_pages == 0
    assert engine.pages.take(3) == []
    engine.pages.drop(first + rest)
    assert engine.num_free_pages == engine.num_pages
    take_all_pages(engine)


def test_copies_are_known_until_they_are_waited_for(models: Models) -> None:
    from cpmcu import C

    engine = engine_of(models, None, **FEW)
    blocks = C.HostBlocks(engine, engine.pages.page_bytes, 1, 1)
    blocks.grow()
    (page,) = engine.pages.take(1)
    assert not engine.pages.has_copies
    for copy in (engine.pages.save, engine.pages.load):
        copy([page], blocks, [0])
        assert engine.pages.has_copies
        engine.pages.wait_for_copies()
        assert not engine.pages.has_copies
    engine.pages.drop([page])


def test_forty_sequences_with_trees(models: Models) -> None:
    """A step of 320 tokens: head and attention run on groups of it."""
    num_seqs, tree = (40, {"spec_num_iter": 3, "spec_topk_per_iter": 3, "spec_tree_size": 8})
    engine = models.drafted("noisy", "llama", tree, max_num_seqs=num_seqs)
    names = ["greedy", "seeded", "all"]
    jobs = [
        (random_ids(2 + i, VOCAB, seed=i), 10, SAMPLINGS[names[i % 3]]) for i in range(num_seqs)
    ]
    compare(models, "llama", jobs, together(engine, jobs))


def test_steps_of_more_than_64_sequences(models: Models) -> None:
    """GEMMs run on groups of 64 rows. A batch shrinks from 200 sequences to 1."""
    num_seqs = 70 if SMALL else 200
    engine = engine_of(models, None, max_num_seqs=num_seqs, max_model_len=2 * PAGE)
    jobs = [
        (random_ids(1 + i % 70, VOCAB, seed=i), 2 + i % 23, SAMPLINGS[list(SAMPLINGS)[i % 3]])
        for i in range(num_seqs)
    ]
    steps: list[int] = []
    compare(models, "llama", jobs, together(engine, jobs, steps=steps))
    assert steps[0] == num_seqs and sorted(steps, reverse=True) == steps


def test_more_than_256_sequences_are_refused(models: Models) -> None:
    with pytest.raises(ValueError, match="max_num_seqs is 257, but must be at most 256"):
        engine_of(models, None, max_num_seqs=257)
    assert engine_of(models, None, max_num_seqs=256, max_model_len=64).max_num_seqs == 256


@pytest.mark.parametrize("kind", [None, "noisy", "ngram"])
def test_steps_of_one_to_nine_sequences(models: Models, kind: str | None) -> None:
    """On CUDA, steps of some of these numbers of sequences are padded."""
    engine = engine_of(models, kind, max_num_seqs=9)
    names = list(SAMPLINGS)
    jobs = [
        (random_ids(3 + 9 * i, VOCAB, seed=i), 12 + i, SAMPLINGS[names[i % len(names)]])
        for i in range(9)
    ]
    rng = random.Random(str(kind))
    sizes: set[int] = set()

    def some(running: list[int]) -> list[int]:
        chosen = rng.sample(running, rng.randint(1, len(running)))
        sizes.add(len(chosen))
        return chosen

    compare(models, "llama", jobs, together(engine, jobs, some))
    assert len(sizes) >= 7


@pytest.mark.parametrize("kind", [None, *SOME_DRAFTS])
def test_abandoned_open_masked_step_changes_no_state(models: Models, kind: str | None) -> None:
    """An abandoned step changes neither tokens nor the number of accepted drafted tokens."""
    engine = engine_of(models, kind, max_num_seqs=2)
    jobs = [(PROMPTS[i], 12 if SMALL else 30, SAMPLINGS[n]) for i, n in ((1, "greedy"), (4, "all"))]
    rng = random.Random(str(kind))

    def abandon(slots: list[int]) -> None:
        for _ in range(rng.randint(0, 2)):
            engine.begin_masked(rng.sample(slots, rng.randint(1, len(slots))))

    expected_steps: list[int] = []
    steps: list[int] = []
    expected = together(engine, jobs, steps=expected_steps)
    compare(models, family_of(kind or "llama"), jobs, expected)
    assert together(engine, jobs, before=abandon, steps=steps) == expected
    assert steps == expected_steps


# ---- helpers

Job = tuple[list[int], int, dict[str, Any]]  # prompt, number of tokens, sampling parameters


def engine_of(models: Models, kind: str | None, **config: Any) -> Any:
    if kind is None:
        return models.engine("llama", None, **config)
    return models.drafted(kind, family_of(kind), TREES["narrow"], **config)


def start(engine: Any, ids: list[int], **fields: Any) -> tuple[int, int]:
    """Prefills a prompt of one chunk; returns the slot and the first token."""
    slot = engine.add_sequence(sampling(**fields), ids)
    assert engine.reserve(slot, len(ids))
    engine.prefill([(slot, ids, True)])
    (output,) = last_outputs(engine)
    return slot, output.tokens[0]


def last_outputs(engine: Any) -> Any:
    """The results of the newest step. Older steps are of released sequences."""
    while engine.in_flight() > 1:
        assert engine.collect() == []
    return engine.collect()


def together(
    engine: Any,
    jobs: list[Job],
    choose: Callable[[list[int]], list[int]] = lambda running: running,
    before: Callable[[list[int]], None] = lambda slots: None,
    steps: list[int] | None = None,
) -> list[list[int]]:
    """The tokens of each job. `choose` selects and orders the running jobs of a step.

    `before` is called before each step with its slots. `steps` receives the tokens of each step.
    """
    slots, tokens = [], []
    for ids, count, fields in jobs:
        slot, first = start(engine, ids, **fields, max_tokens=count)
        slots.append(slot), tokens.append([first])
    running = list(range(len(jobs)))
    while running:
        chosen = choose(running)
        for i in chosen:
            wanted = len(jobs[i][0]) + len(tokens[i]) + engine.tokens_per_step
            assert engine.reserve(slots[i], min(wanted, engine.max_model_len))
        before([slots[i] for i in chosen])
        engine.decode([slots[i] for i in chosen])
        outputs = last_outputs(engine)
        assert [output.slot for output in outputs] == [slots[i] for i in chosen]
        assert all(output.tokens for output in outputs)
        for output in outputs:
            tokens[slots.index(output.slot)] += output.tokens
        if steps is not None:
            steps.append(sum(len(output.tokens) for output in outputs))
        running = [i for i in running if len(tokens[i]) < jobs[i][1]]
    for slot in slots:
        engine.release(slot)
    assert engine.num_free_pages == engine.num_pages
    return tokens


def compare(models: Models, family: str, jobs: list[Job], found: list[list[int]]) -> None:
    for (ids, count, fields), tokens in zip(jobs, found, strict=True):
        assert tokens == models.plain(family, ids, count, **fields), len(ids)
