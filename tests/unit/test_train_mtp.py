"""The recipe's MTP modules: their rows, their files, and training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.reference.numpy_drafts import NumpyModule, NumpyTarget
from tests.reference.tiny_checkpoints import TinyCheckpoint, write_tiny
from tests.unit.drafts import opened, spec_of
from tests.unit.recipe import import_recipe

VOCAB, HIDDEN, INNER, LAYERS = 203, 64, 40, 4
NAMES = {"eh_proj": "fc", "enorm": "input_norm1", "hnorm": "input_norm2", "shared_head": ""}


@pytest.fixture(scope="module")
def recipe() -> Iterator[SimpleNamespace]:
    with import_recipe() as modules:
        yield modules


def make(
    recipe: SimpleNamespace, directory: Path, family: str, modules: int, chained: bool = False
) -> tuple[TinyCheckpoint, Any, Any]:
    """A target on disk, the same in torch, and modules with random norms."""
    import torch

    tiny = write_tiny(directory, family, num_hidden_layers=LAYERS)
    target = recipe.model.load_pretrained(directory)
    counts = np.zeros(VOCAB)
    head = recipe.train_head.build_head(
        "mtp", target, counts, 0, 0, modules, chained, intermediate_size=INNER
    )
    generator = torch.Generator().manual_seed(1)
    for parameter in head.parameters():
        if parameter.dim() == 1:
            parameter.data.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    return tiny, target, head.eval()


def numpy_modules(tiny: TinyCheckpoint, head: Any, scale: float) -> list[NumpyModule]:
    target = NumpyTarget(tiny.fields(), tiny.weights)
    weights: list[dict[str, Any]] = [{} for _ in head.parts]
    for name, value in head.state_dict().items():
        number, _, rest = name.removeprefix("model.layers.").partition(".")
        part, _, leaf = rest.partition(".")
        renamed = f"{NAMES[part]}.{leaf}".lstrip(".") if part in NAMES else f"layers.0.{rest}"
        weights[int(number) - LAYERS][renamed] = value.detach().float().numpy()
    return [NumpyModule(target, w, 16, residual_scale=scale) for w in weights]


@pytest.mark.parametrize(("family", "chained"), [("minicpm", True), ("llama", False)])
def test_rows_are_those_of_the_numpy_modules(
    recipe: SimpleNamespace, tmp_path: Path, family: str, chained: bool
) -> None:
    """Module m reads the id of token t + m + 1 in row t. The first one also drafts alone."""
    import torch

    depth, count = 3, 12
    tiny, target, head = make(recipe, tmp_path, family, depth, chained)
    ids = np.random.default_rng(2).integers(0, VOCAB, count + 1).tolist()
    whole = torch.tensor([ids])
    with torch.no_grad():
        output = target(whole[:, :-1])
        inputs = (head.start(output), target.embed(whole[:, 1:]), *target.rope(0, count))
        outputs = head.unroll(*inputs, depth)
        alone = head.alone().unroll(*inputs, depth + 2)
        trained = head.training_steps(*inputs, depth + 2)
        logits = [head.logits(x, target)[0].numpy() for x in outputs]
    modules = numpy_modules(tiny, head, 1.4 / np.sqrt(LAYERS) if family == "minicpm" else 1.0)
    target_states, _ = modules[0].target.states(ids[:-1])
    states = target_states
    for number, module in enumerate(modules):
        expected, own = module.prefill(states[: count - number], ids[1 + number :])
        np.testing.assert_allclose(logits[number][number:], expected, atol=1e-3)
        if chained:
            states = own
    assert [step for step, _ in trained] == [0, 1, 2, 3, 4, 1, 2]
    for (_, found), wanted in zip(trained, [*alone, *outputs[1:]], strict=True):
        assert torch.allclose(found, wanted, atol=1e-5)
    modules[0].keep(0)
    recycled = modules[0].prefill(target_states[:5], ids[1:6])[1][-1]
    for step in range(1, depth + 2):
        _, recycled = modules[0].step(recycled, ids[5 + step])
        np.testing.assert_allclose(recycled, alone[step][0, 4 + step].numpy(), atol=1e-3)


@pytest.mark.parametrize(("family", "modules"), [("qwen3", 1), ("minicpm", 3)])
def test_files_are_those_that_the_engine_reads(
    recipe: SimpleNamespace, tmp_path: Path, family: str, modules: int
) -> None:
    import torch

    tiny, target, head = make(recipe, tmp_path / "target", family, modules, chained=True)
    recipe.head_files.write_head(head, tmp_path / "mtp", "# card\n", {"eos_token_id": 2}, None)
    config = json.loads((tmp_path / "mtp" / "config.json").read_text())
    assert config.get("chain_mtp_hidden", False) == (modules > 1)
    assert (config["num_nextn_predict_layers"], config["num_hidden_layers"]) == (modules, LAYERS)
    loaded = opened(tiny, tmp_path / "mtp")  # no other kind of draft has such files
    assert loaded.method == "mtp"
    spec = spec_of(loaded)
    assert spec.model.intermediate_size == INNER and spec.model.qk_norm == (family == "qwen3")
    assert spec.options.get("chain_hidden", False) == (modules > 1)
    assert spec.options.get("num_modules", 1) == modules
    again = recipe.head_files.load_head(tmp_path / "mtp", target)
    assert (len(again.parts), again.chained) == (modules, modules > 1)
    for name, value in again.state_dict().items():
        assert torch.equal(value, head.state_dict()[name].bfloat16().float())


def test_a_few_steps_lower_the_loss(recipe: SimpleNamespace, tmp_path: Path) -> None:
    _, target, head = make(recipe, tmp_path, "minicpm", 2, chained=True)
    model = recipe.train_head.Distillation(head, target, depth=2)
    ids = np.random.default_rng(2).integers(0, VOCAB, 200).tolist()
    stream = recipe.corpus.TokenStream.pack([ids])
    config = recipe.trainer.TrainConfig(
        steps=12, batch_size=4, seq_len=16, warmup_steps=1, learning_rate=1e-2, log_every=1
    )
    before = recipe.trainer.evaluate(model.loss, stream, 16, 4, target.device)
    report = recipe.trainer.train(model, model.loss, stream, stream, config)
    # The target is random, so that there is little to learn.
    assert report.best_validation_loss < before - 0.02


def test_other_shapes_are_refused(recipe: SimpleNamespace, tmp_path: Path) -> None:
    write_tiny(tmp_path, "llama", num_hidden_layers=LAYERS)
    target = recipe.model.load_pretrained(tmp_path)
    with pytest.raises(ValueError, match="MTP modules have the target's head_dim"):
        recipe.train_head.build_head("mtp", target, np.zeros(VOCAB), 0, 0, head_dim=8)
