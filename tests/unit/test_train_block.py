"""The recipe of block drafters: rows of blocks, training, files, and what the engine drafts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.reference.engines import extension_or_skip
from tests.reference.tiny_checkpoints import TinyCheckpoint, write_tiny
from tests.unit.drafts import engine_names, opened, spec_of
from tests.unit.recipe import import_recipe

VOCAB, HIDDEN, TOKENS, RANK, LAYERS = 203, 64, 4, 8, 2
CANDIDATES = 32  # tokens of a row that the engine gives the bigram
KINDS = ["dspark", "dflash", "jetspec"]
CASES = [("minicpm", "dspark"), ("qwen3", "jetspec"), ("llama", "dflash"), ("qwen2", "dspark")]


@pytest.fixture(scope="module")
def recipe() -> Iterator[SimpleNamespace]:
    with import_recipe() as modules:
        yield modules


def make(
    recipe: SimpleNamespace, directory: Path, family: str, kind: str
) -> tuple[TinyCheckpoint, Any, Any]:
    """A target on disk, the same in torch, and a drafter with random norms and bigrams."""
    import torch

    tiny = write_tiny(directory, family, num_hidden_layers=4)
    target = recipe.model.load_pretrained(directory)
    head = recipe.train_block.build_block(target, kind, LAYERS, TOKENS, RANK, seed=0)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in head.named_parameters():
        if "norm" in name:
            parameter.data.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
        if "markov" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.mul_(4)  # the rows then depend more on the context
    return tiny, target, head.requires_grad_(False).eval()


def random_ids(count: int) -> list[int]:
    return np.random.default_rng(2).integers(3, VOCAB, count).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_one_pass_equal_single_blocks(
    recipe: SimpleNamespace, tmp_path: Path, kind: str
) -> None:
    """A single block gets the text up to its anchor alone."""
    import torch

    _, target, head = make(recipe, tmp_path, "minicpm", kind)
    ids = torch.tensor([random_ids(20), random_ids(21)[1:]])
    states = target(ids, aux_layers=head.aux_layers).aux_hidden
    anchors = torch.tensor([1, 2, 7, 8, 19])
    together = head.run(anchors, ids, states, target)
    assert together.shape == (2, 5, TOKENS, HIDDEN)
    for i, anchor in enumerate(anchors.tolist()):
        alone = head.run(anchors[i : i + 1], ids[:, : anchor + 1], states, target)
        assert (alone[:, 0] - together[:, i]).abs().max() < 1e-4
    # The hidden state of the anchor is not known yet. That of the token before is.
    changed = [state.clone() for state in states]
    for state in changed:
        state[:, 7] += 1
    difference = (head.run(anchors, ids, changed, target) - together).abs().amax((0, 2, 3))
    assert (difference[:3] == 0).all() and (difference[3:] > 1e-3).all()


@pytest.mark.parametrize("kind", KINDS)
def test_only_jetspec_hides_later_rows(recipe: SimpleNamespace, tmp_path: Path, kind: str) -> None:
    import torch

    _, _, head = make(recipe, tmp_path, "llama", kind)
    mask = head.block_mask(torch.tensor([2, 3]), 5)
    rows = head.num_rows
    assert rows == TOKENS + (kind != "dspark")
    context = torch.arange(5) < torch.tensor([2, 3])[:, None]
    assert torch.equal(mask[:, :5], context.repeat_interleave(rows, dim=0))
    seen = torch.ones(rows, rows, dtype=torch.bool)
    seen = seen.tril() if kind == "jetspec" else seen
    assert torch.equal(mask[:, 5:], torch.block_diag(seen, seen))


def test_chains_are_the_first_choices_of_every_block(
    recipe: SimpleNamespace, tmp_path: Path
) -> None:
    import torch

    _, target, head = make(recipe, tmp_path, "qwen3", "dspark")
    ids = torch.tensor([random_ids(45)])
    chains = head.chains(ids, target, 3)
    assert chains.shape == (1, 41, 3)  # more blocks than one pass has
    states = target(ids, aux_layers=head.aux_layers).aux_hidden
    for root in (0, 31, 32, 40):
        anchor = torch.tensor([root + 1])
        x = head.run(anchor, ids[:, : root + 2], states, target)[0, 0, :3]
        logits = head.block_logits(x, ids[0, root + 1 : root + 4], target)
        assert torch.equal(logits.argmax(-1), chains[0, root])


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_a_few_steps_lower_the_loss_and_the_engine_reads_the_files(
    recipe: SimpleNamespace, tmp_path: Path, family: str, kind: str
) -> None:
    import torch

    torch.manual_seed(0)
    tiny = write_tiny(tmp_path / "target", family, num_hidden_layers=4)
    target = recipe.model.load_pretrained(tmp_path / "target")
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    head = recipe.train_block.build_block(target, kind, LAYERS, TOKENS, RANK, seed=0)
    model = recipe.train_block.BlockDistillation(head, target, anchors=6)
    assert len(list(model.parameters())) == len(list(head.parameters()))
    stream = recipe.corpus.TokenStream.pack([random_ids(200)])
    config = recipe.trainer.TrainConfig(
        steps=12, batch_size=4, seq_len=16, warmup_steps=1, learning_rate=1e-2, log_every=1
    )
    out = tmp_path / "draft"

    def save(report: Any) -> None:
        recipe.head_files.write_head(head, out, "# card\n", {}, None)

    model.eval()
    untrained = recipe.trainer.evaluate(model.loss, stream, 16, 4, target.device)
    report = recipe.trainer.train(model, model.loss, stream, stream, config, save)
    # The target is random, so that there is little to learn.
    assert report.best_validation_loss < untrained - 0.005
    assert all(
        torch.equal(value, before[name]) for name, value in target.model.state_dict().items()
    )

    loaded = opened(tiny, out)
    assert loaded.method == ("dspark" if kind == "dspark" else "dflash")
    spec = spec_of(loaded)
    assert spec.options["target_layers"] == [1, 2, 3] == list(head.aux_layers)
    assert spec.options["predicts_from"] == (kind != "dspark")
    assert spec.options["causal_layers"] == ([0, 1] if kind == "jetspec" else [])
    assert spec.options["block_size"] == TOKENS + (kind != "dspark")
    assert spec.options["mask_embedding"]
    assert spec.options.get("rank") == (RANK if kind == "dspark" else None)
    assert len(engine_names(loaded)) == len(head.state_dict())
    again = recipe.head_files.load_head(out, target)
    assert (again.kind, again.longest, again.aux_layers) == (kind, TOKENS, head.aux_layers)
    written = json.loads((out / "config.json").read_text())
    assert written["input_embedding_scale"] == (12 if family == "minicpm" else 1)


def test_labels_are_those_of_the_places_that_rows_predict(
    recipe: SimpleNamespace, tmp_path: Path
) -> None:
    """The loss of one pass is that of single blocks. Positions after the window have no weight."""
    import torch

    _, target, head = make(recipe, tmp_path, "minicpm", "dspark")
    model = recipe.train_block.BlockDistillation(head, target, anchors=100, position_weight=0.5)
    model.eval()
    text = torch.tensor([random_ids(8)])
    found = model.loss(text[:, :-1], text[:, 1:])
    output = target(text, aux_layers=head.aux_layers)
    wanted = torch.softmax(output.logits[0], dim=-1)
    total = weights = 0.0
    for anchor in range(1, 8):  # 7 is the last token, whose distribution is known
        x = head.run(torch.tensor([anchor]), text, output.aux_hidden, target)[0, 0]
        for j in range(min(TOKENS, 8 - anchor)):
            logits = head.block_logits(x[j], text[0, anchor + j], target)
            loss = -(wanted[anchor + j] * torch.log_softmax(logits, dim=-1)).sum()
            total += float(loss) * 0.5**j
            weights += 0.5**j
    assert float(found) == pytest.approx(total / weights, rel=1e-4)


def test_anchors_are_spread_and_distinct(recipe: SimpleNamespace, tmp_path: Path) -> None:
    import torch

    _, target, head = make(recipe, tmp_path, "llama", "dspark")
    model = recipe.train_block.BlockDistillation(head, target, anchors=8)
    for count in (1, 7, 8, 9, 64):
        model.train()
        for _ in range(5):
            places = model.choose_anchors(count, torch.device("cpu")).tolist()
            assert len(set(places)) == len(places) == min(8, count)
            assert places == sorted(places) and min(places) > 0 and max(places) <= count
        model.eval()
        first = model.choose_anchors(count, torch.device("cpu"))
        assert torch.equal(first, model.choose_anchors(count, torch.device("cpu")))


def walk(recipe: SimpleNamespace, head: Any, target: Any, text: list[int]) -> list[int]:
    """The chain after `text`: at each row the best of the likeliest tokens, by corrected logits."""
    import torch

    ids = torch.tensor([text])
    states = target(ids, aux_layers=head.aux_layers).aux_hidden
    x = head.run(torch.tensor([len(text) - 1]), ids, states, target)[0, 0]
    chain, previous = [], text[-1]
    for row in x:
        candidates = target.model.lm_head(row).topk(CANDIDATES).indices
        logits = head.block_logits(row, torch.tensor(previous), target)
        previous = int(candidates[logits[candidates].argmax()])
        chain.append(previous)
    return chain


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_the_engine_drafts_what_torch_computes(
    recipe: SimpleNamespace, tmp_path: Path, family: str, kind: str
) -> None:
    extension = extension_or_skip()
    from cpmcu.config import EngineConfig, SpeculativeConfig
    from cpmcu.loading.loader import load_model

    tiny, target, head = make(recipe, tmp_path / "target", family, kind)
    out = tmp_path / "draft"
    recipe.head_files.write_head(head, out, "# card\n", {}, None)
    head = recipe.head_files.load_head(out, target)  # the weights in bf16
    speculation = SpeculativeConfig(
        draft_model_path=str(out), spec_num_iter=TOKENS, spec_topk_per_iter=1
    )
    config = EngineConfig(
        device="cpu", num_threads=1, max_num_seqs=1, speculative_config=speculation
    )
    engine = load_model(str(tiny.directory), config=config).engine
    drafted = []
    for length in (1, 21, 64):
        text = random_ids(length)
        slot = engine.add_sequence(extension.SamplingConfig(max_tokens=100), text)
        assert engine.reserve(slot, len(text))
        engine.prefill([(slot, text, True)])
        text += engine.collect()[0].tokens
        for _ in range(4):
            assert engine.reserve(slot, len(text) + engine.tokens_per_step)
            ((tokens, _),) = engine.begin_masked([slot], None)
            assert tokens[0] == text[-1]
            assert tokens[1:] == walk(recipe, head, target, text)
            drafted += tokens[1:]
            engine.end_masked([-1] * len(tokens), np.zeros((0, 0), np.uint32))
            text += engine.collect()[0].tokens
        engine.release(slot)
    assert len(set(drafted)) > TOKENS
