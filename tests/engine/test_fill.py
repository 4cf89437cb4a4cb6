"""Drafts that a path from the context joins: the same tokens, and more of them accepted."""

from __future__ import annotations

import inspect
import queue
from typing import Any

import pytest

from tests.engine.drafted import PROMPTS, SAMPLINGS, VOCAB, Drive, Models
from tests.engine.harness import SHIPPED, random_ids
from tests.engine.test_spec_shipped import shipped_engine
from tests.reference.engines import extension_or_skip

extension_or_skip()

HEAD = {"draft_model_path": str(SHIPPED.parent / "tiny-python-eagle2"), "spec_auto": False}
TREE = {"spec_topk_per_iter": 8, "spec_tree_size": 24}
CHAIN = {"spec_num_iter": 5, "spec_topk_per_iter": 1, "spec_tree_size": 6}


def mean(drive: Drive) -> float:
    """Tokens a decode step of the last sequence; its last step may be cut."""
    return sum(drive.emitted[:-1]) / len(drive.emitted[:-1])


@pytest.mark.slow  # sanitizer runs cover filled drafts in the other tests
@pytest.mark.parametrize(
    ("alone", "filled", "factor", "sampling"),
    [
        (
            {**TREE, "spec_num_iter": 4},
            {**TREE, "spec_num_iter": 9, "fill": "ngram"},
            1.6,
            "greedy",
        ),
        (CHAIN, {**CHAIN, "fill": "ngram", "num_model_steps": 3}, 1.3, "seeded"),
    ],
    ids=["tree", "chain"],
)
def test_a_copy_is_accepted_in_longer_pieces(
    device: str, alone: dict[str, Any], filled: dict[str, Any], factor: float, sampling: str
) -> None:
    from cpmcu.tokenizer import Tokenizer

    source = inspect.getsource(queue.Queue.get) + "\n"
    ids = Tokenizer.from_directory(SHIPPED).encode(source * 2)[:900]
    fields = SAMPLINGS[sampling] if sampling == "greedy" else {"temperature": 0.3, "seed": 3}
    expected = Drive(shipped_engine(device, {"no_speculation": True})).one(ids, 100, **fields)
    means = []
    for speculation in (alone, filled):
        drive = Drive(shipped_engine(device, {**HEAD, **speculation}), ahead=2)
        assert drive.one(ids, 100, **fields) == expected
        means.append(mean(drive))
    assert means[1] > factor * means[0], means


def test_a_useless_head_is_replaced_where_the_text_repeats(models: Models) -> None:
    """The head is random, so its scores are low; what repeats comes from the context."""
    ids = random_ids(30, VOCAB, seed=1) * 4
    bias = [(token, 50.0 if token == 7 else 0.0) for token in (7, 8)]  # a text of one token
    engine = models.drafted("eagle", "llama", {**CHAIN, "fill": "ngram"})
    drive = Drive(engine)
    got = drive.one(ids, 40, logit_bias=bias)
    assert got == models.plain("llama", ids, 40, logit_bias=bias) == [7] * 40
    assert drive.emitted[-3:-1] == [6, 6]
    alone = Drive(models.drafted("eagle", "llama", CHAIN))
    assert alone.one(ids, 40, logit_bias=bias) == got
    assert mean(alone) < mean(drive)


def test_sequences_side_by_side_and_in_used_slots(models: Models) -> None:
    engine = models.drafted(
        "minicpm_eagle",
        "minicpm",
        {"spec_num_iter": 7, **TREE, "fill": "ngram"},
        max_num_seqs=3,
    )
    prompts = [*PROMPTS[1:6], PROMPTS[5] * 2]
    waiting = list(enumerate(prompts))
    tokens: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
    running: dict[int, int] = {}  # slot -> prompt
    drive = Drive(engine)
    while waiting or running:
        while waiting and len(running) < 3:
            i, ids = waiting.pop(0)
            slot, first = drive.start(ids, max_tokens=30, **SAMPLINGS["all"])
            running[slot], tokens[i] = i, [first]
        for slot, i in running.items():
            assert engine.reserve(slot, len(prompts[i]) + len(tokens[i]) + engine.tokens_per_step)
        engine.decode(list(running))
        for output in engine.collect():
            tokens[running[output.slot]] += output.tokens
            if output.finished:
                del running[output.slot]
                engine.release(output.slot)
    for i, ids in enumerate(prompts):
        assert tokens[i] == models.plain("minicpm", ids, 30, **SAMPLINGS["all"])
