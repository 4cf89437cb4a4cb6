"""The draft recipe: heads, multi-step training, files, the numpy oracle, the shipped drafts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.reference.numpy_drafts import NumpyEagle2, NumpyEagle3, NumpyHead, NumpyTarget
from tests.reference.tiny_checkpoints import TinyCheckpoint, write_tiny
from tests.unit.recipe import import_recipe

ROOT = Path(__file__).resolve().parents[2]
ASSETS = ROOT / "cpmcu" / "assets"
TARGET = ASSETS / "tiny-python-minicpm"
VOCAB, HIDDEN, INNER, DRAFT_VOCAB = 203, 64, 96, 50
KINDS = [("minicpm", "eagle2"), ("minicpm", "eagle3"), ("llama", "eagle2"), ("qwen3", "eagle3")]


@pytest.fixture(scope="module")
def recipe() -> Iterator[SimpleNamespace]:
    with import_recipe() as modules:
        yield modules


def tiny_target(recipe: SimpleNamespace, directory: Path, family: str) -> tuple[Any, Any]:
    tiny = write_tiny(directory, family, num_hidden_layers=4)
    return tiny, recipe.model.load_pretrained(directory)


def random_head(recipe: SimpleNamespace, target: Any, kind: str) -> Any:
    """A head whose norm weights are random as well."""
    import torch

    counts = np.random.default_rng(1).integers(0, 1000, VOCAB)
    head = recipe.train_head.build_head(kind, target, counts, DRAFT_VOCAB, seed=0)
    generator = torch.Generator().manual_seed(1)
    for parameter in head.parameters():
        if parameter.dim() == 1:
            parameter.data.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    return head.eval()


def numpy_head(tiny: TinyCheckpoint, head: Any) -> NumpyHead:
    target = NumpyTarget(tiny.fields(), tiny.weights)
    weights = {name: value.detach().float().numpy() for name, value in head.state_dict().items()}
    if head.kind == "eagle3":
        weights["d2t"] = head.d2t.numpy()
        return NumpyEagle3(target, weights, head_dim=16)
    scale = 1.4 / np.sqrt(5) if head.scaled else 1.0
    return NumpyEagle2(target, weights, head_dim=16, residual_scale=scale)


def random_ids(count: int) -> list[int]:
    return np.random.default_rng(2).integers(0, VOCAB, count).tolist()


def test_aux_layers(recipe: SimpleNamespace) -> None:
    aux_layers = recipe.drafts.aux_layers
    assert aux_layers(32) == (2, 16, 29)
    assert aux_layers(7) == (2, 3, 4)
    assert aux_layers(6) == (3, 4, 5)
    assert aux_layers(4) == (1, 2, 3)
    assert aux_layers(3) == (0, 1, 2)
    with pytest.raises(ValueError, match="three layers"):
        aux_layers(2)


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_unrolled_training_pass_equals_chains_one_by_one(
    recipe: SimpleNamespace, tmp_path: Path, family: str, kind: str
) -> None:
    """The numpy oracle computes the same chains."""
    import torch

    depth, count = 4, 11
    tiny, target = tiny_target(recipe, tmp_path, family)
    head = random_head(recipe, target, kind)
    ids = random_ids(count + 1)
    whole = torch.tensor([ids])
    with torch.no_grad():
        output = target(whole[:, :-1], aux_layers=head.aux_layers)
        cos, sin = target.rope(0, count)
        embeddings = target.embed(whole[:, 1:])
        start = head.start(output)
        unrolled = head.unroll(start, embeddings, cos, sin, depth)
        for root in range(count):
            x, past = head.step(
                embeddings[:, : root + 1],
                start[:, : root + 1],
                cos[:, : root + 1],
                sin[:, : root + 1],
            )
            hidden = x[:, -1:]
            assert (hidden - unrolled[0][:, root : root + 1]).abs().max() < 1e-4
            for step in range(1, min(depth, count - root)):
                row = slice(root + step, root + step + 1)
                hidden, past = head.step(
                    embeddings[:, row], hidden, cos[:, row], sin[:, row], past=past
                )
                assert (hidden - unrolled[step][:, row]).abs().max() < 1e-4

    oracle = numpy_head(tiny, head)
    states, aux_hidden = oracle.target.states(ids[:-1], head.aux_layers)
    logits, recycled = oracle.prefill(aux_hidden if kind == "eagle3" else states, ids[1:])
    expected = head.logits(unrolled[0], target)[0].detach().numpy()
    np.testing.assert_allclose(logits, expected, atol=1e-3)
    for root in (0, 3, count - depth):
        oracle.keep(0)
        inputs = [f[: root + 1] for f in aux_hidden] if kind == "eagle3" else states[: root + 1]
        recycled = oracle.prefill(inputs, ids[1 : root + 2])[1][-1]
        for step in range(1, depth):
            logits, recycled = oracle.step(recycled, ids[root + step + 1])
            torch_x = unrolled[step][:, root + step]
            np.testing.assert_allclose(recycled, torch_x[0].numpy(), atol=1e-3)
            expected = head.logits(torch_x, target)[0].detach().numpy()
            np.testing.assert_allclose(logits, expected, atol=1e-3)


@pytest.mark.parametrize("family", ["minicpm", "qwen3"])
def test_a_head_without_an_output_head_uses_the_rows_of_the_target(
    recipe: SimpleNamespace, tmp_path: Path, family: str
) -> None:
    import torch

    _, target = tiny_target(recipe, tmp_path / "target", family)
    counts = np.random.default_rng(1).integers(0, 1000, VOCAB)
    build = recipe.train_head.build_head
    shared = build("eagle3", target, counts, DRAFT_VOCAB, seed=0, own_head=False)
    own = build("eagle3", target, counts, DRAFT_VOCAB, seed=0)  # the head starts with those rows
    x = torch.randn(1, 5, HIDDEN)
    torch.testing.assert_close(shared.logits(x, target), own.logits(x, target))
    recipe.head_files.write_head(shared, tmp_path / "draft", "# card\n", {}, None)
    loaded = recipe.head_files.load_head(tmp_path / "draft", target)
    assert not [name for name in loaded.state_dict() if "lm_head" in name]
    rounded = shared.to(torch.bfloat16).float()
    torch.testing.assert_close(loaded.logits(x, target), rounded.logits(x, target))


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_a_few_steps_lower_the_loss_and_files_are_as_specified(
    recipe: SimpleNamespace, tmp_path: Path, family: str, kind: str
) -> None:
    import torch
    from safetensors import safe_open

    torch.manual_seed(0)
    _, target = tiny_target(recipe, tmp_path / "target", family)
    counts = np.arange(VOCAB)[::-1].copy()
    head = recipe.train_head.build_head(kind, target, counts, DRAFT_VOCAB, seed=0)
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    weight = 0.1 if kind == "eagle2" else 0.0
    model = recipe.train_head.Distillation(head, target, depth=3, feature_weight=weight)
    assert len(list(model.parameters())) == len(list(head.parameters()))
    stream = recipe.corpus.TokenStream.pack([random_ids(200)])
    config = recipe.trainer.TrainConfig(
        steps=12, batch_size=4, seq_len=16, warmup_steps=1, learning_rate=1e-2, log_every=1
    )
    out = tmp_path / "draft"

    def save(report: Any) -> None:
        recipe.head_files.write_head(head, out, "# card\n", {"eos_token_id": 2}, counts)

    untrained = recipe.trainer.evaluate(model.loss, stream, 16, 4, target.device)
    report = recipe.trainer.train(model, model.loss, stream, stream, config, save)
    # The targets are random and the eagle3 heads begin with the target's output head, so that
    # there is little to learn.
    assert report.best_validation_loss < untrained - 0.005
    assert all(
        torch.equal(value, before[name]) for name, value in target.model.state_dict().items()
    )

    q, kv = 64, 32
    if kind == "eagle2":
        layer, expected, width = "layers.0.", {"fc.weight": [HIDDEN, 2 * HIDDEN]}, HIDDEN
        if family == "minicpm":
            for name in ("input_norm1", "input_norm2", "layers.0.input_layernorm"):
                expected[f"{name}.weight"] = [HIDDEN]
    else:
        layer, expected, width = "midlayer.", {"fc.weight": [HIDDEN, 3 * HIDDEN]}, 2 * HIDDEN
        for name in ("midlayer.hidden_norm", "midlayer.input_layernorm", "norm"):
            expected[f"{name}.weight"] = [HIDDEN]
        expected |= {"lm_head.weight": [DRAFT_VOCAB, HIDDEN], "d2t": [DRAFT_VOCAB], "t2d": [VOCAB]}
    expected[layer + "post_attention_layernorm.weight"] = [HIDDEN]
    for part, rows in (("q", q), ("k", kv), ("v", kv)):
        expected[f"{layer}self_attn.{part}_proj.weight"] = [rows, width]
    expected[layer + "self_attn.o_proj.weight"] = [HIDDEN, q]
    expected[layer + "mlp.gate_proj.weight"] = expected[layer + "mlp.up_proj.weight"] = [
        INNER,
        HIDDEN,
    ]
    expected[layer + "mlp.down_proj.weight"] = [HIDDEN, INNER]
    with safe_open(out / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == expected
    for name, tensor in tensors.items():
        kinds = {"d2t": torch.int64, "t2d": torch.bool}
        assert tensor.dtype == kinds.get(name, torch.bfloat16)

    written = json.loads((out / "config.json").read_text())
    assert written["num_hidden_layers"] == 1 and written["eos_token_id"] == 2
    assert np.load(out / "token_counts.npy").tolist() == counts.tolist()
    if kind == "eagle3":
        assert written["architectures"] == ["LlamaForCausalLMEagle3"]
        assert written["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
        assert written["draft_vocab_size"] == DRAFT_VOCAB
        assert written.get("scale_emb") == (12 if family == "minicpm" else None)
        ids = torch.arange(DRAFT_VOCAB) + tensors["d2t"]
        assert ids.tolist() == list(range(DRAFT_VOCAB))  # these are the most frequent tokens here
        assert tensors["t2d"].nonzero().flatten().tolist() == ids.tolist()
    elif family == "minicpm":
        assert written["architectures"] == ["EagleMiniCPMForCausalLM"]
        assert (written["scale_emb"], written["scale_depth"]) == (12, 1.4)
        assert (written["dim_model_base"], written["mup_denominator"]) == (16, 5)
    else:
        assert written["architectures"] == ["LlamaForCausalLMEagle"]

    loaded = recipe.head_files.load_head(out, target)
    x = torch.randn(1, 5, HIDDEN)
    assert loaded.aux_layers == head.aux_layers
    with torch.no_grad():
        difference = loaded.logits(x, target) - head.logits(x, target)
    assert difference.abs().max() < 0.1  # bf16 rounding of the weights


def test_draft_vocabulary_holds_the_most_frequent_tokens(recipe: SimpleNamespace) -> None:
    counts = np.array([5, 9, 0, 9, 1])
    assert recipe.train_head.draft_vocabulary(counts, 3) == [0, 1, 3]


def test_acceptance_of_the_target_by_itself_is_complete(
    recipe: SimpleNamespace, tmp_path: Path
) -> None:
    """A greedy text equals its model's own chain at every position."""
    _, target = tiny_target(recipe, tmp_path, "llama")
    import torch

    prompts = torch.tensor([random_ids(6), random_ids(7)[1:]])
    result = recipe.measure_acceptance.measure(target, target, prompts, 20, 0.0, None, depth=5)
    assert result.at_depth == [1.0] * 5
    assert result.mean_length == 5.0 and result.chain == 4


def test_walk_counts_tokens_of_whole_speculative_steps(recipe: SimpleNamespace) -> None:
    import torch

    matches = torch.zeros(1, 10, 3, dtype=torch.bool)
    matches[0, 1] = torch.tensor([True, True, False])  # 3 tokens, then root 4
    matches[0, 4] = torch.tensor([False, True, True])  # 1 token, then root 5
    matches[0, 5] = True  # a chain of 2: 3 tokens, then root 8
    result = recipe.measure_acceptance.acceptance(matches, [14], prompt_tokens=2, chain=2)
    assert result.tokens == 9  # roots 1 to 9
    assert result.mean_length == pytest.approx((3 + 1 + 3 + 1 + 1) / 5)
    assert result.at_depth == pytest.approx([2 / 9, 2 / 9, 1 / 9])


def test_generated_text_is_the_targets_own(recipe: SimpleNamespace, tmp_path: Path) -> None:
    import torch

    _, target = tiny_target(recipe, tmp_path, "minicpm")
    prompts = torch.tensor([random_ids(5)] * 2)
    ids = recipe.continue_text.continue_prompts(target, prompts, 8, [0.0, 1.0], seed=0)
    assert ids.shape == (2, 13)
    greedy = target.model.generate(prompts[:1], max_new_tokens=8, pad_token_id=0)
    assert ids[:1].tolist() == greedy.tolist()
    assert ids[1].tolist() != ids[0].tolist()


def test_sampling_of_the_generated_text(recipe: SimpleNamespace, tmp_path: Path) -> None:
    import torch

    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.05, 0.15, 0.2, 0.6]]).log()
    kept = recipe.continue_text.nucleus(logits, 0.7).isfinite()
    assert kept.tolist() == [[True, True, False, False], [False, False, True, True]]
    _, target = tiny_target(recipe, tmp_path, "llama")
    prompts = torch.tensor([random_ids(5)])
    ids = recipe.continue_text.continue_prompts(
        target, prompts, 30, [0.0], seed=0, repetition_penalty=1e6
    )[0].tolist()
    assert len(set(ids)) == len(set(random_ids(5))) + 30  # no token is repeated


def test_text_formats(recipe: SimpleNamespace) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    form = recipe.corpus.TextFormat.of(tokenizer, eos=2, special_text=True)
    assert (form.bos, form.eos, form.im_start, form.im_end) == (1, 2, 3, 4)
    assert recipe.corpus.encode(tokenizer, ["</s>"], special_text=True) == [[2]]
    assert recipe.corpus.encode(tokenizer, ["</s>"]) != [[2]]
    bare = recipe.corpus.TextFormat(bos=None, eos=9, im_start=None, im_end=None)
    document = recipe.corpus.Document("a.py", "x = 1\n", "0")
    stream = recipe.corpus.training_stream(tokenizer, [document], seed=0, form=bare)
    assert stream.ids[-1] == 9 and 1 not in stream.ids and 3 not in stream.ids
    wide = recipe.corpus.TokenStream.pack([[70000, 1]]) + recipe.corpus.TokenStream.pack([[3]])
    assert wide.ids.tolist() == [70000, 1, 3] and wide.starts.tolist() == [0, 2]


# ---- shipped drafts


def test_shipped_sizes() -> None:
    sizes = {
        path.name: sum(file.stat().st_size for file in path.iterdir())
        for path in ASSETS.iterdir()
        if path.is_dir()
    }
    names = ("tiny-python-draft", "tiny-python-eagle2", "tiny-python-eagle3")
    assert sum(sizes[name] for name in names) <= 9_000_000
    assert sizes.get("tiny-python-mtp", 0) <= 4_000_000
    assert sizes["smollm2-eagle3"] <= 8_000_000
    assert sum(sizes.values()) <= 33_000_000


def test_shipped_counts_are_of_the_targets_vocabulary() -> None:
    counts = np.load(ASSETS / "tiny-python-eagle2" / "token_counts.npy")
    assert counts.dtype == np.int64 and counts.shape == (4096,) and counts.sum() > 1_000_000


@pytest.mark.parametrize(
    ("target_name", "name", "least"),
    [
        ("tiny-python-minicpm", "tiny-python-draft", 2.0),
        ("tiny-python-minicpm", "tiny-python-eagle2", 2.0),
        ("tiny-python-minicpm", "tiny-python-eagle3", 2.0),
        ("tiny-python-minicpm", "tiny-python-mtp", 2.0),
        ("tiny-python-minicpm-w4", "tiny-python-eagle2-w4", 2.0),
        ("tiny-python-draft", "tiny-python-draft-eagle2", 1.5),  # a head of 0.2 M parameters
    ],
)
def test_shipped_drafts_are_accepted(
    recipe: SimpleNamespace, target_name: str, name: str, least: float
) -> None:
    """Mean accept length of chains of 4, greedy and sampled, on fixed prompts."""
    import torch

    target = recipe.model.load_pretrained(ASSETS / target_name)
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    texts = (
        'import os\n\n\ndef walk(path):\n    """Yield every file under path."""\n    for name in ',
        "class Reader:\n    def __init__(self, file, size=None):\n        self.file = ",
    )
    rows = [tokenizer.encode(text).ids for text in texts]
    width = min(map(len, rows))
    prompts = torch.tensor([row[:width] for row in rows])
    draft = recipe.measure_acceptance.load_draft(ASSETS / name, target)
    for temperature in (0.0, 0.7):
        result = recipe.measure_acceptance.measure(draft, target, prompts, 80, temperature, None)
        assert result.mean_length > least, (temperature, str(result))
