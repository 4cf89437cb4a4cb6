"""bad_words, allowed_token_ids and include_stop_str_in_output, with drafts and without."""

from __future__ import annotations

import numpy as np
import pytest

from cpmcu import LLM, SamplingParams
from cpmcu.engine.bad_words import BadWords
from tests.unit.test_min_tokens import allowed

PROMPT = "def fibonacci(n):"


def forbidden(masks: dict[int, np.ndarray], vocab_size: int = 40) -> dict[int, set[int]]:
    return {
        node: set(range(vocab_size)) - allowed(mask, vocab_size) for node, mask in masks.items()
    }


def test_the_last_token_of_a_word_is_masked_behind_the_others():
    words = BadWords([(1, 2), (3, 1, 4), (3, 1, 5)], 40)
    assert forbidden(words.masks([], [7], [-1], {})) == {}
    assert forbidden(words.masks([3, 1], [1], [-1], {})) == {0: {2, 4, 5}}
    assert forbidden(words.masks([1], [1], [-1], {})) == {0: {2}}
    # A tree: the root is the last token of the output, and each node sees its own path.
    tokens, parents = [3, 1, 8, 1, 9], [-1, 0, 0, 2, 3]
    assert forbidden(words.masks([3], tokens, parents, {})) == {1: {2, 4, 5}, 3: {2}}


def test_other_masks_win_if_no_token_is_left():
    words = BadWords([(1, 2)], 32)
    both, alone = np.array([0b110], np.uint32), np.array([0b100], np.uint32)
    assert int(words.masks([1], [1], [-1], {0: both})[0][0]) == 0b010
    assert int(words.masks([1], [1], [-1], {0: alone})[0][0]) == 0b100
    assert words.masks([1], [1], [-1], {}, unmasked=False) == {}


@pytest.fixture(scope="module")
def models():
    """The shipped model, without a draft and with its own."""
    made = [LLM(device="cpu", num_threads=1, no_speculation=plain) for plain in (True, False)]
    yield made
    for llm in made:
        llm.close()


def output_of(models, **params):
    """The output, which is the same with a draft and without."""
    params = SamplingParams(**{"max_tokens": 40, "seed": 1, **params})
    outputs = [llm.generate(PROMPT, params)[0].outputs[0] for llm in models]
    assert outputs[0].token_ids == outputs[1].token_ids
    assert outputs[0].text == outputs[1].text
    return outputs[0]


@pytest.mark.parametrize("temperature", [0, 1.2])
def test_an_output_has_no_bad_word(models, temperature):
    plain = output_of(models, temperature=temperature)
    tokenizer = models[0].tokenizer
    pieces = [tokenizer.decode(plain.token_ids[at : at + 3]) for at in range(0, 12, 3)]
    words = [text.strip() for text in pieces if text.strip()] + ["return"]
    assert words and all(word in plain.text for word in words[:-1])
    changed = output_of(models, temperature=temperature, bad_words=words)
    banned = {
        tuple(tokenizer.encode(s + w, add_special_tokens=False)) for w in words for s in ("", " ")
    }
    found = changed.token_ids
    assert not [
        w for w in banned for at in range(len(found)) if tuple(found[at : at + len(w)]) == w
    ]


@pytest.mark.parametrize("temperature", [0, 1.2])
def test_only_allowed_tokens_are_drawn(models, temperature):
    allowed_ids = tuple(dict.fromkeys(output_of(models, temperature=0).token_ids))[:5]
    found = output_of(models, temperature=temperature, allowed_token_ids=allowed_ids)
    assert len(found.token_ids) == 40 and set(found.token_ids) <= set(allowed_ids)
    biased = output_of(
        models,
        temperature=temperature,
        allowed_token_ids=allowed_ids,
        logit_bias={allowed_ids[1]: 100},
    )
    assert set(biased.token_ids) == {allowed_ids[1]}


def test_the_stop_text_is_shown_on_request(models):
    plain = output_of(models, temperature=0).text
    stop = plain[12:15]
    assert not output_of(models, temperature=0, stop=stop).text.endswith(stop)
    shown = output_of(models, temperature=0, stop=stop, include_stop_str_in_output=True)
    assert shown.text == plain[: plain.index(stop) + 3] and shown.stop_reason == stop
    token = output_of(models, temperature=0).token_ids[5]
    shown = output_of(
        models, temperature=0, stop_token_ids=[token], include_stop_str_in_output=True
    )
    assert shown.text.endswith(models[0].tokenizer.decode([token]))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("allowed_token_ids", [], "must have at least one token id"),
        ("allowed_token_ids", [-1], r"allowed_token_ids\[0\] is -1"),
        ("allowed_token_ids", [1 << 30], "allowed_token_ids names token"),
        ("bad_words", [" "], r"bad_words\[0\] is ' ', but must be a text that is not blank"),
        ("bad_words", "a", "bad_words is 'a'"),
        ("include_stop_str_in_output", 1, "include_stop_str_in_output is 1"),
    ],
)
def test_wrong_values(models, field, value, message):
    with pytest.raises(ValueError, match=message):
        models[0].generate(PROMPT, SamplingParams(**{field: value}))
