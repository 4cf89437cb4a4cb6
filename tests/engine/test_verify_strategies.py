"""Verify strategies: target_match is exact, greedy is the text of temperature 0, topp accepts more
and only what its rules allow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.engine.drafted import PROMPTS, SAMPLINGS, TREES, VOCAB, Drive, Models
from tests.reference.engines import extension_or_skip, prompt_logits

extension_or_skip()

NEVER = {"verify_strategy": "topp", "verify_window": 16}  # longer than any draft
SAMPLED = {"temperature": 0.4, "top_p": 0.8, "seed": 5}
TREE = ["chain", "narrow"]


def drive_of(models: Models, tree: str, kind: str = "noisy", **verify: Any) -> Drive:
    return Drive(models.drafted(kind, "llama", {**TREES[tree], **verify}))


@pytest.mark.parametrize("tree", TREE)
def test_target_match_is_the_default(models: Models, tree: str) -> None:
    default = drive_of(models, tree)
    named = drive_of(models, tree, verify_strategy="target_match")
    expected = models.plain("llama", PROMPTS[4], 40, **SAMPLINGS["all"])
    for drive in (default, named):
        assert drive.one(PROMPTS[4], 40, **SAMPLINGS["all"]) == expected
    assert named.emitted == default.emitted


@pytest.mark.parametrize("tree", TREE)
def test_greedy_is_the_text_of_temperature_zero(models: Models, tree: str) -> None:
    """The texts are equal with penalties and bias, and with any shapes of steps."""
    shapes = iter([None, (0, 1), None, (2, 3)] * 40)
    drive = drive_of(models, tree, verify_strategy="greedy")
    exact = drive_of(models, tree)
    fields = SAMPLINGS["all"]
    expected = models.plain("llama", PROMPTS[4], 30, **{**fields, "temperature": 0})
    assert drive.one(PROMPTS[4], 30, **fields) == expected
    assert exact.one(PROMPTS[4], 30, **fields) != expected  # a sampled text is another
    assert exact.one(PROMPTS[4], 30, **{**fields, "temperature": 0}) == expected
    assert drive.emitted == exact.emitted
    drive.shapes = lambda: next(shapes)
    assert drive.one(PROMPTS[4], 30, **fields) == expected


@pytest.mark.parametrize("tree", TREE)
def test_topp_accepts_more(models: Models, tree: str) -> None:
    exact, lossy = drive_of(models, tree), drive_of(models, tree, verify_strategy="topp")
    steps = []
    for drive in (exact, lossy):
        steps.append(0)
        for ids in PROMPTS[2:5]:
            assert len(drive.one(ids, 40, **SAMPLED)) == 40
            steps[-1] += len(drive.emitted)
    assert steps[1] < 0.9 * steps[0], steps


@pytest.mark.parametrize(
    "fields",
    [SAMPLINGS["penalised"], {**SAMPLINGS["all"], "top_k": 1}],
    ids=["temperature 0", "top_k 1"],
)
@pytest.mark.parametrize("tree", TREE)
def test_topp_is_exact_where_one_token_passes(
    models: Models, tree: str, fields: dict[str, Any]
) -> None:
    """One candidate passes the filters, and no draft is long enough for the window."""
    drive = drive_of(models, tree, **NEVER)
    for ids in PROMPTS[3:5]:
        assert drive.one(ids, 30, **fields) == models.plain("llama", ids, 30, **fields)


@pytest.mark.parametrize("window", [0, 1, 16])
def test_topp_emits_only_what_its_rules_allow(models: Models, window: int) -> None:
    """The target scores the text alone and gives each token's rank and log-probability."""

    engine = models.drafted(
        "noisy",
        "llama",
        {**TREES["chain"], "verify_strategy": "topp", "verify_window": window},
    )
    ids, fields = PROMPTS[4], {**SAMPLED, "top_p": 0.4}
    slot, first = Drive(engine).start(ids, max_tokens=80, logprobs=0, **fields)
    tokens, logprobs = [first], []
    while len(tokens) < 80:
        assert engine.reserve(slot, len(ids) + len(tokens) + engine.tokens_per_step)
        engine.decode([slot])
        (output,) = engine.collect()
        tokens += output.tokens
        logprobs += output.logprobs
    engine.release(slot)
    text = ids + tokens
    logits = prompt_logits(models.engine("llama", None, chunk_length=256), text[:-1])[len(ids) :]
    places = []
    for z, token, found in zip(logits.astype(np.float64), tokens[1:], logprobs):
        expected = z[token] - z.max() - np.log(np.exp(z - z.max()).sum())
        assert abs(expected - found) < (1e-3 if models.device == "cpu" else 0.1)
        p = np.exp((z - z.max()) / fields["temperature"])
        before = p[p > p[token]].sum() / p.sum()  # probability of more likely tokens
        places.append((int((p > p[token]).sum()), before < fields["top_p"] + 1e-3))
    outside = [place for place, inside in places if not inside]
    assert len({place for place, _ in places}) > 1
    # Only the window lets a token pass that top_p forbids.
    assert set(outside) <= (set() if window == 16 else {1})
    assert outside or window > 0


def test_topp_keeps_to_masks(models: Models) -> None:
    """Only tokens of the mask are emitted, both of children and of second candidates."""
    from cpmcu import C

    engine = models.drafted(
        "noisy", "llama", {**TREES["narrow"], "verify_strategy": "topp", "verify_window": 0}
    )
    words = np.full((1, -(-VOCAB // 32)), 0x5555AAAA, np.uint32)
    may = {t for t in range(VOCAB) if 0x5555AAAA >> (t % 32) & 1}
    ids = PROMPTS[3]
    slot = engine.add_sequence(C.SamplingConfig(max_tokens=40, **SAMPLED), ids)
    assert engine.reserve(slot, len(ids))
    engine.prefill([(slot, ids, True)], [0], words)
    tokens, bursts = engine.collect()[0].tokens, []
    while len(tokens) < 40:
        assert engine.reserve(slot, len(ids) + len(tokens) + engine.tokens_per_step)
        ((nodes, _),) = engine.begin_masked([slot])
        engine.end_masked([0] * len(nodes), words)
        (output,) = engine.collect()
        tokens += output.tokens
        bursts.append(len(output.tokens))
    engine.release(slot)
    assert set(tokens) <= may
    assert max(bursts) > 1
