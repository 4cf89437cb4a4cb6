"""Speculation changes no token of Qwen3-Next and Qwen3.5, whose layers have a recurrent state."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

from tests.engine.drafted import (
    CONTEXT,
    PROMPTS,
    SAMPLINGS,
    TREES,
    VOCAB,
    Drive,
    Models,
)
from tests.engine.harness import SMALL, random_ids
from tests.reference.engines import extension_or_skip
from tests.reference.tiny_checkpoints import write_tiny
from tests.reference.tiny_drafts import write_draft

extension_or_skip()

KINDS = ["mtp", "mtp_filled", "ngram", "model", "dflash2", "dspark"]
CASES = [*(("qwen3_5", kind) for kind in KINDS), *([] if SMALL else [("qwen3_next", "mtp")])]
SOME = PROMPTS[::2]


def drafted(models: Models, kind: str, family: str, tree: dict[str, int], **config: Any) -> Any:
    """An engine whose draft is the MTP head, n-gram look-up or a Llama with the vocabulary."""
    if kind != "model":
        return models.drafted(kind, family, tree, **config)
    models.target(family)  # skips the test where the target cannot run
    directory = models.root / "llama-draft"
    if not directory.is_dir():
        sizes = {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "head_dim": 64}
        write_draft(directory, "model", write_tiny(models.root / "llama-small", "llama", **sizes))
    return models.engine(family, {"draft_model_path": str(directory), **tree}, **config)


@pytest.mark.parametrize(
    "tree", ["chain", "root", "full"] if SMALL else ["chain", "root", "wide", "full"]
)
@pytest.mark.parametrize(("family", "kind"), CASES)
def test_same_tokens(models: Models, family: str, kind: str, tree: str) -> None:
    drive = Drive(drafted(models, kind, family, TREES[tree]), ahead=2)
    for i, ids in enumerate(SOME):
        fields = list(SAMPLINGS.values())[(i + list(TREES).index(tree)) % len(SAMPLINGS)]
        assert drive.one(ids, 40, **fields) == models.plain(family, ids, 40, **fields), len(ids)


@pytest.mark.slow
def test_same_tokens_after_fifty_prompts(models: Models) -> None:
    """A small vocabulary, so that many drafted tokens are accepted. Greedy and sampled."""
    models.hybrid("small", "qwen3_5", vocab_size=11)
    plain = Drive(models.engine("small", None))
    drives = [
        Drive(models.engine("small", {"method": "mtp", **TREES[tree]}), ahead=2)
        for tree in ("chain", "wide")
    ]
    lengths: set[int] = set()
    for seed in range(50):
        ids = random_ids(1 + 2 * seed, 11, seed)
        fields = {} if seed % 2 else {"temperature": 0.9, "seed": seed}
        expected = plain.one(ids, 24, **fields)
        for drive in drives:
            assert drive.one(ids, 24, **fields) == expected, seed
            lengths |= set(drive.emitted[:-1])
    assert {1, 2, 3, 4} <= lengths


@pytest.mark.parametrize("kind", KINDS)
def test_any_shapes_in_any_order(models: Models, kind: str) -> None:
    rng = random.Random(kind)
    trees = [(0, 1), (1, 2), (2, 3), (4, 5)]
    if kind != "ngram":
        trees = [(0, 1), (1, 1), (2, 9), (4, 8), (4, 33)]
    drive = Drive(drafted(models, kind, "qwen3_5", TREES["wide"]), 2, lambda: rng.choice(trees))
    for ids, name in zip(SOME, ("greedy", "all", "seeded")):
        for _ in range(2):
            got = drive.one(ids, 66, **SAMPLINGS[name])
            assert got == models.plain("qwen3_5", ids, 66, **SAMPLINGS[name])


@pytest.mark.parametrize("chunk", [1, 7, 65])
def test_chunks(models: Models, chunk: int) -> None:
    drive = Drive(models.drafted("mtp", "qwen3_5", TREES["narrow"]))
    for ids in (PROMPTS[3], PROMPTS[5]):
        runs = []
        for length in (chunk, 0):
            tokens = drive.one(ids, 30, length, **SAMPLINGS["seeded"])
            assert tokens == models.plain("qwen3_5", ids, 30, **SAMPLINGS["seeded"])
            runs.append(drive.emitted)
        assert runs[0] == runs[1]


@pytest.mark.parametrize("skips", [[True], [True, False]], ids=repr)
def test_draft_that_skips_prompts(models: Models, skips: list[bool]) -> None:
    skipped = itertools.cycle(skips)
    drive = Drive(models.drafted("mtp", "qwen3_5", TREES["wide"]), 2, skips=lambda: next(skipped))
    for ids in SOME:
        assert drive.one(ids, 40, chunk=16) == models.plain("qwen3_5", ids, 40)


@pytest.mark.parametrize("kind", KINDS)
def test_several_sequences(models: Models, kind: str) -> None:
    """Slots are reused by sequences of other lengths, beside others that run on."""
    from cpmcu import C

    engine = drafted(models, kind, "qwen3_5", TREES["narrow"], max_num_seqs=3, chunk_length=256)
    waiting = [(PROMPTS[i], count) for i, count in ((5, 30), (0, 45), (3, 10), (6, 60), (1, 25))]
    fields = SAMPLINGS["all"]
    running: dict[int, tuple[list[int], int, list[int]]] = {}
    done = []
    while waiting or running:
        while waiting and len(running) < 3:
            ids, count = waiting.pop(0)
            slot = engine.add_sequence(C.SamplingConfig(**fields, max_tokens=count), ids)
            assert engine.reserve(slot, len(ids))
            engine.prefill([(slot, ids, True)])
            running[slot] = (ids, count, list(engine.collect()[0].tokens))
        for slot, (ids, _, tokens) in running.items():
            wanted = len(ids) + len(tokens) + engine.tokens_per_step
            assert engine.reserve(slot, min(wanted, CONTEXT))
        engine.decode(list(running))
        for output in engine.collect():
            running[output.slot][2].extend(output.tokens)
        for slot, (ids, count, tokens) in list(running.items()):
            if len(tokens) >= count:
                done.append((ids, count, tokens))
                del running[slot]
                engine.release(slot)
    for ids, count, got in done:
        assert got == models.plain("qwen3_5", ids, count, **fields)


@pytest.mark.parametrize("quant", ["none", "w4"])
def test_frspec(models: Models, quant: str) -> None:
    models.target("qwen3_5")
    path = models.root / "frequent.npy"
    np.save(path, np.arange(2, VOCAB, 3))
    speculation = {"method": "mtp", "frspec_path": str(path), "draft_head_quant": quant}
    drive = Drive(models.engine("qwen3_5", {**speculation, **TREES["wide"]}))
    for ids in SOME:
        assert drive.one(ids, 40) == models.plain("qwen3_5", ids, 40)


def test_the_wrapper_with_vision_is_the_same_model(models: Models) -> None:
    drive = Drive(models.drafted("mtp", "qwen3_5_vl", TREES["narrow"]))
    for ids in SOME:
        assert drive.one(ids, 40) == models.plain("qwen3_5", ids, 40)


def test_a_head_of_another_export(models: Models) -> None:
    """Some exports drop the head; it may be read from another directory."""
    whole = models.target("qwen3_5")
    weights = {name: w for name, w in whole.weights.items() if not name.startswith("mtp.")}
    models.hybrid("bare", "qwen3_5", weights=weights, mtp_num_hidden_layers=0)
    speculation = {"method": "mtp", "draft_model_path": str(whole.directory), **TREES["chain"]}
    drive = Drive(models.engine("bare", speculation))
    inside = Drive(models.drafted("mtp", "qwen3_5", TREES["chain"]))
    for ids in SOME:
        assert drive.one(ids, 40) == inside.one(ids, 40) == models.plain("qwen3_5", ids, 40)
        assert drive.emitted == inside.emitted
