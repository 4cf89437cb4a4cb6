"""Speculation when a sequence stops, reaches a limit, or resumes in another slot."""

from __future__ import annotations

from typing import Any

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
from tests.engine.harness import SMALL, random_ids
from tests.reference.engines import extension_or_skip

extension_or_skip()


@pytest.mark.parametrize("kind", ["itself", "noisy", "eagle", "ngram"])
def test_stop_id_inside_an_accepted_path(models: Models, kind: str) -> None:
    drive = Drive(models.drafted(kind, "llama", TREES["wide"]), ahead=2)
    for ids in PROMPTS[: 1 if SMALL else 4]:
        expected = models.plain("llama", ids, 40)
        for at in range(1, 14):
            stop = expected[at]
            if stop == expected[0]:  # the host handles the first token
                continue
            end = expected.index(stop) + 1
            assert (
                drive.one(ids, 40, stop_ids=[159, stop] if stop != 159 else [stop])
                == (expected[: min(end, _first(expected, 159))])
            )


def _first(tokens: list[int], token: int) -> int:
    return tokens[1:].index(token) + 2 if token in tokens[1:] else len(tokens)


@pytest.mark.parametrize("kind", ["itself", "eagle3"])
def test_token_limit_inside_an_accepted_path(models: Models, kind: str) -> None:
    drive = Drive(models.drafted(kind, "llama", TREES["wide"]), ahead=2)
    ids = PROMPTS[2]
    for count in range(1, 14):
        assert drive.one(ids, count) == models.plain("llama", ids, count)


@pytest.mark.parametrize("kind", SOME_DRAFTS)
@pytest.mark.parametrize("length", [CONTEXT - at for at in ([2] if SMALL else [9, 2, 1])])
def test_the_context_ends_inside_a_tree(models: Models, kind: str, length: int) -> None:
    family = family_of(kind)
    ids = random_ids(length, VOCAB, seed=length)
    drive = Drive(models.drafted(kind, family, TREES["full"]), ahead=2)
    assert drive.engine.max_model_len == CONTEXT
    assert drive.one(ids, CONTEXT - length) == models.plain(family, ids, CONTEXT - length)


def test_a_slot_that_ended_emits_nothing_more(models: Models) -> None:
    engine = models.drafted("itself", "llama", TREES["chain"])
    slot, _ = Drive(engine).start(PROMPTS[1], max_tokens=4)
    assert engine.reserve(slot, 60)
    engine.decode([slot])
    engine.decode([slot])
    (first,), (second,) = engine.collect(), engine.collect()
    assert len(first.tokens) == 3 and first.finished
    assert second.tokens == [] and second.finished
    engine.release(slot)


def test_reused_slot_has_no_old_state(models: Models) -> None:
    drive = Drive(models.drafted("itself", "llama", TREES["narrow"]), ahead=2)
    first = drive.one(PROMPTS[6], 40), drive.emitted
    drive.one(PROMPTS[2], 50)
    assert (drive.one(PROMPTS[6], 40), drive.emitted) == first


def test_a_resumed_sequence_goes_on(models: Models) -> None:
    """A sequence that lost its pages prefills its own output.

    On the CPU this does not change its tokens. On CUDA, prefill and decode round differently. So
    the expected tokens come from plain decoding that lost its pages at the same token.
    """
    from cpmcu import C

    ids, fields = PROMPTS[4], SAMPLINGS["all"]
    uninterrupted = models.plain("llama", ids, 60, **fields)

    def resumed(engine: Any) -> list[int]:
        tokens = uninterrupted[:20]
        slot = engine.add_sequence(C.SamplingConfig(**fields), ids, tokens)
        assert engine.reserve(slot, len(ids) + 60)
        engine.prefill([(slot, ids + tokens, True)])
        tokens = tokens + engine.collect()[0].tokens
        while len(tokens) < 60:
            engine.reserve(slot, len(ids) + len(tokens) + engine.tokens_per_step)
            engine.decode([slot])
            tokens += engine.collect()[0].tokens
        engine.release(slot)
        return tokens[:60]

    expected = resumed(models.engine("llama", None))
    assert resumed(models.drafted("noisy", "llama", TREES["narrow"])) == expected
    if models.device == "cpu":
        assert expected == uninterrupted
