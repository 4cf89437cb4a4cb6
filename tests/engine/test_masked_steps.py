"""Decode steps with token masks: every drafter yields the same tokens as plain decoding.

As with a grammar, the masks depend on the tokens so far. They are random.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.drafted import (
    CONTEXT,
    PROMPTS,
    SAMPLINGS,
    SOME_DRAFTS,
    TREES,
    VOCAB,
    Drive,
    Models,
    family_of,
)
from tests.engine.harness import DEVICES, SMALL
from tests.reference.engines import extension_or_skip, prompt_logits

extension_or_skip()

NUM_WORDS = -(-VOCAB // 32)


@pytest.fixture(scope="module", params=DEVICES)
def masked_models(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Models:
    return Models(tmp_path_factory.mktemp("masked"), str(request.param))


def allowed(tokens: list[int]) -> np.ndarray:
    """Returns, as bool [V], the tokens that may follow an output.

    After every third token it allows at least half of the vocabulary, else a few tokens.
    """
    rng = np.random.default_rng([len(tokens), *tokens[-4:]])
    share = 0.9 if len(tokens) % 3 else rng.choice([0.02, 0.5])
    may = rng.random(VOCAB) < share
    may[rng.integers(VOCAB)] = True
    return may


def packed(may: np.ndarray) -> np.ndarray:
    bits = np.packbits(np.pad(may, (0, -VOCAB % 32)), bitorder="little")
    return bits.view("<u4")


class Output:
    """A sequence on an engine, with or without masks."""

    def __init__(self, engine: Any, ids: list[int], count: int, masked: bool, **fields: Any):
        from cpmcu import C

        self.engine, self.ids, self.count, self.masked = engine, ids, count, masked
        self.tokens: list[int] = []
        self.bursts: list[int] = []
        self.slot = engine.add_sequence(C.SamplingConfig(**{"max_tokens": count, **fields}), ids)
        assert engine.reserve(self.slot, len(ids))

    def masks(self, tokens: list[int], parents: list[int]) -> list[np.ndarray | None]:
        """The masks of the nodes of a tree."""
        if not self.masked:
            return [None] * len(tokens)
        paths: list[list[int] | None] = [self.tokens]
        for node in range(1, len(tokens)):
            before = paths[parents[node]]
            reached = before is not None and tokens[node] >= 0 and allowed(before)[tokens[node]]
            paths.append([*before, tokens[node]] if reached else None)
        return [None if path is None else packed(allowed(path)) for path in paths]

    def take(self, tokens: list[int]) -> None:
        for token in tokens:
            assert not self.masked or allowed(self.tokens)[token]
            self.tokens.append(token)
        self.bursts.append(len(tokens))

    def reserve(self) -> None:
        wanted = len(self.ids) + len(self.tokens) + self.engine.tokens_per_step
        assert self.engine.reserve(self.slot, min(wanted, CONTEXT))


def pack(masks: list[np.ndarray | None]) -> tuple[list[int], np.ndarray]:
    found = [mask for mask in masks if mask is not None]
    indices = iter(range(len(found)))
    rows = [-1 if mask is None else next(indices) for mask in masks]
    return rows, np.stack(found) if found else np.zeros((0, 0), np.uint32)


def run(engine: Any, outputs: list[Output], shapes: Sequence[tuple[int, int]] = ()) -> None:
    """Prefills in one step, then decodes all outputs; masked steps cycle through `shapes`."""
    turns = itertools.cycle(shapes or [None])
    masks = [mask for output in outputs for mask in output.masks([0], [-1])]
    engine.prefill([(output.slot, output.ids, True) for output in outputs], *pack(masks))
    running = outputs
    while True:
        by_slot = {output.slot: output for output in outputs}
        for result in engine.collect():
            by_slot[result.slot].take(result.tokens)
        running = [output for output in running if len(output.tokens) < output.count]
        if not running:
            break
        for output in running:
            output.reserve()
        slots = [output.slot for output in running]
        if any(output.masked for output in running):
            trees = engine.begin_masked(slots, next(turns))
            nodes = [output.masks(*tree) for output, tree in zip(running, trees)]
            engine.end_masked(*pack([mask for each in nodes for mask in each]))
        else:
            engine.decode(slots)
    for output in outputs:
        engine.release(output.slot)


def one(engine: Any, ids: list[int], count: int, **fields: Any) -> Output:
    output = Output(engine, ids, count, True, **fields)
    run(engine, [output])
    return output


@pytest.mark.parametrize("kind", SOME_DRAFTS)
def test_same_tokens(masked_models: Models, kind: str) -> None:
    models, family = masked_models, family_of(kind)
    tree = list(TREES)[SOME_DRAFTS.index(kind) % len(TREES)]
    plain = models.engine(family, None)
    drafted = models.drafted(kind, family, TREES[tree])
    count = 12 if SMALL else 40
    for i, fields in enumerate(SAMPLINGS.values()):
        ids = PROMPTS[i]
        expected = one(plain, ids, count, **fields).tokens
        assert one(drafted, ids, count, **fields).tokens[:count] == expected
        # The masks changed the output. Without masks it is that of plain decoding.
        unmasked = models.plain(family, ids, count, **fields)
        assert unmasked != expected
        assert Drive(drafted).one(ids, count, **fields) == unmasked
    assert one(drafted, ids, count, **fields).tokens == expected


def test_drafts_are_accepted_under_masks(masked_models: Models) -> None:
    drafted = masked_models.drafted("itself", "llama", TREES["full"])
    bursts = one(drafted, PROMPTS[3], 60).bursts
    assert sum(bursts) / len(bursts) > 1.3 and max(bursts) >= 4


@pytest.mark.parametrize("kind", [None, "noisy", "eagle", "eagle3", "ngram"])
def test_masked_and_unmasked_sequences_together(masked_models: Models, kind: str | None) -> None:
    models = masked_models
    config = {"max_num_seqs": 4}
    engine = (
        models.engine("llama", None, **config)
        if kind is None
        else models.drafted(kind, "llama", TREES["narrow"], **config)
    )
    alone = models.engine("llama", None)
    cases = [(5, 30, "greedy"), (0, 44, "all"), (3, 9, "seeded"), (2, 37, "penalised")]
    shapes = [(1, 2), (0, 1), (3, 4)] if kind else []
    for masked in ([True, False, True, False], [False, True, False, False]):
        outputs = [
            Output(engine, PROMPTS[i][:30], count, each, **SAMPLINGS[name])
            for (i, count, name), each in zip(cases, masked)
        ]
        run(engine, outputs, shapes)
        for (i, count, name), each, output in zip(cases, masked, outputs):
            ids, fields = PROMPTS[i][:30], SAMPLINGS[name]
            if each:
                expected = one(alone, ids, count, **fields).tokens
            else:
                expected = models.plain("llama", ids, count, **fields)
            assert output.tokens[:count] == expected[:count]


@pytest.mark.parametrize("kind", ["itself", "eagle", "ngram"])
def test_the_context_ends_under_masks(masked_models: Models, kind: str) -> None:
    ids = PROMPTS[6] * 2 + PROMPTS[5][:90]
    count = CONTEXT - len(ids)
    expected = one(masked_models.engine("llama", None, chunk_length=512), ids, count).tokens
    drafted = masked_models.drafted(kind, "llama", TREES["full"], chunk_length=512)
    assert one(drafted, ids, count).tokens == expected
    assert len(expected) == count


def test_greedy_token_is_the_likeliest_allowed_one(tmp_path: Path) -> None:
    """The test runs on the CPU, where the logits of prefill and decoding agree closely."""
    models = Models(tmp_path, "cpu")
    engine = models.engine("llama", None)
    ids = PROMPTS[2]
    tokens = one(engine, ids, 30).tokens
    logits = prompt_logits(engine, ids + tokens)[len(ids) - 1 : -1]
    for i, (token, z) in enumerate(zip(tokens, logits)):
        may = allowed(tokens[:i])
        assert may[token]
        assert z[token] >= np.where(may, z, -np.inf).max() - 1e-4


# ---- open masked steps, and checks


@pytest.mark.parametrize("kind", [None, "eagle"])
def test_abandoned_open_masked_step_changes_nothing(
    masked_models: Models, kind: str | None
) -> None:
    models = masked_models
    engine = (
        models.engine("llama", None)
        if kind is None
        else models.drafted(kind, "llama", TREES["narrow"])
    )
    expected = one(engine, PROMPTS[2], 12).tokens
    output = Output(engine, PROMPTS[2], 12, True)
    engine.prefill([(output.slot, output.ids, True)], *pack(output.masks([0], [-1])))
    while True:
        output.take(engine.collect()[0].tokens)
        if len(output.tokens) >= 12:
            break
        output.reserve()
        engine.begin_masked([output.slot])
        (tree,) = engine.begin_masked([output.slot])
        engine.end_masked(*pack(output.masks(*tree)))
    assert output.tokens[:12] == expected
    engine.reserve(output.slot, len(PROMPTS[2]) + 20)
    engine.begin_masked([output.slot])
    engine.release(output.slot)
    with pytest.raises(RuntimeError, match="no masked step has begun"):
        engine.end_masked([-1], np.zeros((0, 0), np.uint32))
    assert engine.in_flight() == 0


def test_masks_are_checked(masked_models: Models) -> None:
    engine = masked_models.engine("llama", None)
    words = np.full((1, NUM_WORDS), 0xFFFFFFFF, np.uint32)
    output = Output(engine, PROMPTS[1], 5, True)
    item = (output.slot, output.ids, True)
    with pytest.raises(
        ValueError, match=f"{NUM_WORDS + 1} words a row, expected 2 and {NUM_WORDS}"
    ):
        engine.prefill([item], [0], np.zeros((1, NUM_WORDS + 1), np.uint32))
    with pytest.raises(ValueError, match="masks are given for 2 rows, expected the 1 rows"):
        engine.prefill([item], [0, -1], words)
    with pytest.raises(ValueError, match="a row names mask 1, there are 1 masks"):
        engine.prefill([item], [1], words)
    with pytest.raises(ValueError, match="2 masks are given, expected at most one for each"):
        engine.prefill([item], [1], np.concatenate([words, words]))
    with pytest.raises(TypeError):
        engine.prefill([item], [0], words.astype(np.float64))
    engine.prefill([item], [0], words)
    engine.collect()
    with pytest.raises(RuntimeError, match="no masked step has begun"):
        engine.end_masked([0], words)
    engine.release(output.slot)
