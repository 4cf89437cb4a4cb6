"""With sparse attention, drafts and the prefix cache change no token."""

from __future__ import annotations

import pytest

from tests.engine.drafted import SAMPLINGS, SOME_DRAFTS, TREES, VOCAB, Drive, Models
from tests.engine.harness import SMALL, random_ids
from tests.engine.prefix import Job, running
from tests.engine.sparse import FAMILY, check_prefix_hits, family_of
from tests.reference.engines import extension_or_skip

extension_or_skip()

# ---- speculation

# The tokens cross dense_len, the edge of a block, and the first edge with a choice of blocks.
STARTS = [random_ids(length, VOCAB, seed=length) for length in (285, 305, 375)]
NUM_TOKENS = 30


@pytest.mark.parametrize(
    ("kind", "tree"),
    [
        *((kind, "narrow") for kind in SOME_DRAFTS),
        ("minicpm_eagle", "chain"),
        ("minicpm_eagle", "wide"),
    ],
)
def test_a_draft_changes_no_token(sparse_models: Models, kind: str, tree: str) -> None:
    family = family_of(kind)
    drive = Drive(sparse_models.drafted(kind, family, TREES[tree]), ahead=2)
    for ids, name in zip(STARTS, ("greedy", "seeded", "all")):
        got = drive.one(ids, NUM_TOKENS, **SAMPLINGS[name])
        assert got == sparse_models.plain(family, ids, NUM_TOKENS, **SAMPLINGS[name]), (
            len(ids),
            name,
        )


def test_accepted_tokens_are_compressed(sparse_models: Models) -> None:
    """The target is its own draft, so steps accept several tokens, across every edge."""
    drive = Drive(sparse_models.drafted("itself", FAMILY, TREES["narrow"]))
    ids = random_ids(30, VOCAB, seed=8)
    assert drive.one(ids, 400) == sparse_models.plain(FAMILY, ids, 400)
    assert sum(drive.emitted) > 2 * len(drive.emitted)


def test_sequences_side_by_side(sparse_models: Models) -> None:
    """8 trees of 33 nodes: attention runs in two groups of sequences."""
    count = 12
    engine = sparse_models.drafted("minicpm_eagle", FAMILY, TREES["wide"], max_num_seqs=16)
    drive = Drive(engine)
    prompts = [random_ids(length, VOCAB, seed=length) for length in range(60, 460, 50)]
    slots, tokens = [], []
    for ids in prompts:
        slot, first = drive.start(ids, max_tokens=count)
        slots.append(slot), tokens.append([first])
    while unfinished := [i for i, _ in enumerate(slots) if len(tokens[i]) < count]:
        for i in unfinished:
            assert engine.reserve(
                slots[i], len(prompts[i]) + len(tokens[i]) + engine.tokens_per_step
            )
        engine.decode([slots[i] for i in unfinished])
        for output in engine.collect():
            tokens[slots.index(output.slot)] += output.tokens
    for ids, found in zip(prompts, tokens):
        assert found == sparse_models.plain(FAMILY, ids, count)


# ---- prefix cache


@pytest.mark.parametrize("kind", ["", "minicpm_eagle", "model"])
@pytest.mark.parametrize("tier", ["host"] if SMALL else ["device", "host"])
def test_prefix_hits_change_no_token(sparse_models: Models, kind: str, tier: str) -> None:
    check_prefix_hits(sparse_models, kind, tier)


def test_when_pages_run_out(sparse_models: Models) -> None:
    engine = sparse_models.engine(FAMILY, None, max_num_seqs=4, max_model_len=448)
    with running(engine, host_bytes=4 * engine.pages.page_bytes) as (runner, _):
        prompts = [random_ids(290, VOCAB, seed=i) for i in range(6)]
        jobs = [Job(ids, 100) for ids in prompts]
        runner.submit(*(job.request for job in jobs))
        for job, ids in zip(jobs, prompts):
            assert job.wait() == sparse_models.plain(FAMILY, ids, 100)
