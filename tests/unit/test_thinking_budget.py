"""A limit on the tokens of reasoning: masks, and outputs with drafts and without."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from cpmcu import LLM, SamplingParams, ThinkingLimit
from cpmcu.engine.thinking_budget import ThinkingBudget
from tests.unit.test_bad_words import PROMPT
from tests.unit.test_min_tokens import allowed

LETTERS = " <>/abcdefgh"  # token t is letter t
BEGIN, END = "<b>", "</b>"


def ids(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def budget(tokens: int, *, begun: bool = True, output: str = "") -> ThinkingBudget:
    limit = ThinkingLimit(tokens=tokens, begin=BEGIN, end=END, begun=begun)
    found = ThinkingBudget(
        limit, ids(END), lambda tokens: "".join(LETTERS[t] for t in tokens), len(LETTERS)
    )
    for length in range(1, len(output) + 1):
        found.accept(ids(output)[:length])
    return found


def forced(found: ThinkingBudget, output: str) -> str | None:
    """The only letter that may follow; None if any may."""
    masks = found.masks(ids(output), ids(output)[-1:] or [0], [-1], {})
    if not masks:
        return None
    (letter,) = allowed(masks[0], len(LETTERS))
    return LETTERS[letter]


@pytest.mark.parametrize(
    ("tokens", "begun", "output", "letter"),
    [
        (0, True, "", "<"),
        (2, True, "a", None),
        (2, True, "ab", "<"),
        (2, True, "ab<", "/"),
        (2, True, "ab</b", ">"),
        (2, True, "ab</b>", None),
        (3, True, "ab<", "/"),  # the model had begun the tag
        (3, True, "abc<", "/"),
        (3, True, "a<a", "<"),
        (2, True, "</b>aaa", None),  # the model ended it
        (0, False, "", None),
        (0, False, "<b", None),
        (0, False, "<b>", "<"),
        (1, False, "  <b>", None),
        (1, False, "  <b>a", "<"),
        (1, False, "ab<b>aaa", None),  # no reasoning, since the output began otherwise
    ],
)
def test_the_token_that_must_follow(tokens, begun, output, letter):
    assert forced(budget(tokens, begun=begun, output=output), output) == letter


def test_each_node_of_a_tree_has_its_own_path():
    found = budget(2, output="a")
    tokens, parents = ids("ab</") + [-1], [-1, 0, 0, 2, 0]  # a: b, <: /
    masks = found.masks(ids("a"), tokens, parents, {})
    assert {node: allowed(mask, len(LETTERS)) for node, mask in masks.items()} == {
        1: set(ids("<")),
        2: set(ids("/")),
        3: set(ids("b")),
    }
    assert found.masks(ids("a"), tokens, parents, {}, unmasked=False) == {}


def test_another_mask_wins_if_it_forbids_the_tag():
    found, vocab = budget(0), len(LETTERS)
    assert vocab < 32
    for word, left in ((0b10, 0b10), (0b11, 0b10), (0b01, 0b01)):
        masks = found.masks([], [0], [-1], {0: np.array([word], np.uint32)})
        assert int(masks[0][0]) == left


def test_masks_are_needed_only_near_the_limit_and_until_the_end():
    assert budget(0).may_force(0) and budget(2000).may_force(1999)
    assert not budget(2000).may_force(100)
    assert not budget(2, output="</b>").may_force(4)
    assert not budget(2, begun=False, output="a").may_force(1)


@pytest.fixture(scope="module")
def models():
    """The shipped model, without a draft and with its own."""
    made = [LLM(device="cpu", num_threads=1, no_speculation=plain) for plain in (True, False)]
    yield made
    for llm in made:
        llm.close()


@pytest.mark.parametrize("temperature", [0, 1.2])
@pytest.mark.parametrize("tokens", [0, 1, 7, 300])
def test_an_output_goes_on_behind_the_tag(models, temperature, tokens):
    end = "# </think>\n"
    plain = SamplingParams(temperature=temperature, seed=3, max_tokens=tokens + 30, ignore_eos=True)
    limit = ThinkingLimit(tokens=tokens, end=end, begun=True)
    limited = dataclasses.replace(plain, thinking=limit, n=2 if tokens == 7 else 1)
    free, *found = (llm.generate(PROMPT, limited)[0].outputs for llm in models)
    assert [output.token_ids for output in free] == [output.token_ids for output in found[0]]
    tag = models[0].tokenizer.encode(end, add_special_tokens=False)
    assert len(tag) > 2
    for output in free:
        assert output.token_ids[tokens : tokens + len(tag)] == tag
        assert output.text.count(end) == 1
    same = models[1].generate(PROMPT, plain)[0].outputs[0]
    assert same.token_ids[:tokens] == free[0].token_ids[:tokens]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": -1}, "tokens is -1, but must be"),
        ({"tokens": 1.5}, "tokens is 1.5"),
        ({"tokens": 1, "end": ""}, "end is '', but must be a text"),
        ({"tokens": 1, "begun": 1}, "begun is 1"),
    ],
)
def test_wrong_limits(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ThinkingLimit(**fields)


def test_params_want_a_limit():
    with pytest.raises(ValueError, match="thinking is 5, but must be a ThinkingLimit"):
        SamplingParams(thinking=5)
