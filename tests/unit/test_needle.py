"""The texts of `--needle`, and the recipe of its model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from cpmcu.bench import main
from cpmcu.benchmarks.needle_text import FILLER, NAMES, make_text, statement
from tests.reference import sparse as reference
from tests.reference.engines import extension_or_skip
from tests.unit.recipe import import_recipe

NEVER = 1 << 20


@pytest.fixture(scope="module")
def recipe() -> Iterator[SimpleNamespace]:
    with import_recipe() as modules:
        yield modules


def test_statements_are_at_their_depths() -> None:
    words: list[str] = []

    def encode(text: str) -> list[int]:
        words.extend(text.split())
        return list(range(len(words) - len(text.split()), len(words)))

    text = make_text(encode, [NEVER], 2000, 8, np.random.default_rng(0))
    assert len(text.ids) + len(text.questions[0]) == 2000
    said = ["" if token == NEVER else words[token] for token in text.ids]
    for i, (question, answer) in enumerate(zip(text.questions, text.answers)):
        name = words[question[0]]
        (at,) = [k for k, word in enumerate(said) if word == name]
        assert said[at : at + 2] == statement(name, answer).split()
        assert at / len(said) == pytest.approx((i + 0.5) / 8, abs=0.03)
    with pytest.raises(ValueError, match="the context has 20 tokens, too few for 8 statements"):
        make_text(encode, [], 20, 8, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--apply-sparse", "no"], "--apply-sparse is given with --needle"),
        (["--model", "x", "--plot", "x.png"], "--needle and --plot are both given"),
        (["--needle-texts", "0"], "--needle-texts is 0, but must be at least 1"),
    ],
)
def test_wrong_flags(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--device", "cpu", "--needle", *flags])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_sparse_attention_finds_what_dense_attention_finds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With 16 blocks the shipped model finds most numbers, with one it finds few."""
    extension_or_skip()
    found = {}
    for blocks in ("16", "1"):
        flags = ["--contexts", "2048", "--needle-texts", "1", "--sparse-topk-k", blocks, "--json"]
        assert main(["--device", "cpu", "--needle", *flags]) == 0
        for row in json.loads(capsys.readouterr().out)["rows"]:
            found[blocks, row["attention"]] = sum(row["found"]) / (row["asked"] * 8)
    assert found["16", "dense"] == found["1", "dense"] == 1
    assert found["16", "sparse"] > 0.6 and found["1", "sparse"] < 0.3, found


def test_each_word_is_one_token(recipe: SimpleNamespace) -> None:
    tokenizer = recipe.train_needle.word_tokenizer()
    assert tokenizer.get_vocab_size() == 512
    for word in (*NAMES, *FILLER):
        assert tokenizer.encode(f" {word}", add_special_tokens=False).tokens == [f"\u0120{word}"]
    text = " paper falcon 4821. h\u00e9llo\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_targets_are_numbers_of_earlier_statements(recipe: SimpleNamespace) -> None:
    import torch

    tokenizer = recipe.train_needle.word_tokenizer()
    config = recipe.trainer.TrainConfig(seed=3)
    texts = recipe.train_needle.Texts(tokenizer, config, torch.device("cpu"), 1)
    ids, targets = texts.draw(2, 400)
    for row, wanted in zip(ids.tolist(), targets.tolist()):
        words = tokenizer.decode(row).split()
        spoken = tokenizer.decode([t for t in wanted if t != recipe.train_needle.IGNORED]).split()
        assert len(spoken) == 19
        for number in spoken:
            at = words.index(number)
            again = words.index(words[at - 1], at)  # place where the name occurs again
            assert words[again + 1] == number


def test_the_recipe_chooses_the_blocks_of_the_reference(recipe: SimpleNamespace) -> None:
    import torch

    rule = {"init_blocks": 1, "window_size": 128, "topk": 3, "dense_len": 300}
    generator = torch.Generator().manual_seed(0)
    q, k = (
        torch.randn(1, heads, 600, 16, generator=generator, dtype=torch.float64) for heads in (4, 2)
    )
    found = recipe.sparse.chosen_blocks(q, k, rule, 0.25)[0]
    keys, queries = k[0].transpose(0, 1).numpy(), q[0].transpose(0, 1).numpy()
    fine, coarse = (reference.compress(keys, span) for span in (reference.FINE, reference.COARSE))
    for position in (0, 299, 300, 333, 383, 384, 500, 575, 576, 599):
        chosen = reference.selected_blocks(
            queries[position], fine, coarse, position, reference.Rule(**rule), 0.25
        )
        own = chosen.shape[1]
        assert np.array_equal(found[:, position, :own].numpy(), chosen), position
        assert not found[:, position, own:].any()
