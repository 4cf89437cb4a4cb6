"""The 4-bit recipe: scales, GPTQ against its definition, calibration inputs, and files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.reference.tiny_checkpoints import write_tiny
from tests.unit.recipe import import_recipe

ROOT = Path(__file__).resolve().parents[2]
ASSETS = ROOT / "cpmcu" / "assets"
SHAPES = [(1, 1), (1, 8), (7, 13), (16, 128), (24, 131), (5, 300), (40, 384)]  # [N, K]
VOCAB = 203


@pytest.fixture(scope="module")
def recipe() -> Iterator[SimpleNamespace]:
    with import_recipe() as modules:
        from cpmcu.convert import rounding

        modules.rounding = rounding
        yield modules


def correlated(rows: int, inputs: int, seed: int = 0) -> tuple[Any, Any]:
    """W [rows, inputs], and X^T X of inputs that mix a few common directions."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, inputs, generator=generator)
    mixed = torch.randn(600, 4, generator=generator) @ torch.randn(4, inputs, generator=generator)
    x = mixed + 0.3 * torch.randn(600, inputs, generator=generator)
    x = x * torch.rand(inputs, generator=generator).add(0.1)
    return weight, (x.T @ x).double()


def damped(gram: Any, damping: float) -> Any:
    import torch

    return gram + damping * gram.diagonal().mean() * torch.eye(len(gram))


def by_definition(weight: Any, gram: Any, scales: Any, group: int, damping: float) -> Any:
    """q [K, N] by the step that GPTQ repeats, in float64: round one column, spread its error by
    the inverse Hessian of the columns that are left, and take the column out of that inverse."""
    import torch

    left, gram = weight.double().clone(), damped(gram, damping)
    inverse = torch.linalg.inv(gram)
    q = torch.zeros(weight.shape[1], weight.shape[0], dtype=torch.uint8)
    for k in gram.diagonal().argsort(descending=True, stable=True).tolist():
        scale = scales[k // group].double()
        level = (left[:, k] / scale).round().clamp(-8, 7)
        q[k] = (level + 8).to(torch.uint8)
        error = (left[:, k] - level * scale) / inverse[k, k]
        left -= torch.outer(error, inverse[k])
        inverse = inverse - torch.outer(inverse[:, k], inverse[k]) / inverse[k, k]
    return q


@pytest.mark.parametrize(("rows", "inputs"), SHAPES)
@pytest.mark.parametrize("group", [128, 32])
def test_gptq_follows_its_definition(
    recipe: SimpleNamespace, rows: int, inputs: int, group: int
) -> None:
    weight, gram = correlated(rows, inputs)
    scales = recipe.rounding.best_scales(weight, group, damped(gram, 0.05).diagonal())
    expected = by_definition(weight, gram, scales, group, damping=0.05)
    for block in (1, 128, 7):
        result = recipe.rounding.gptq(weight, gram, group, damping=0.05, block=block)
        assert result.scales.float().equal(scales)
        # If float32 breaks a tie the other way, this level changes by one, and so may later
        # columns.
        assert (result.q != expected).float().mean() <= 0.01


@pytest.mark.parametrize(("rows", "inputs"), SHAPES)
def test_gptq_errs_less_than_rounding_to_nearest(
    recipe: SimpleNamespace, rows: int, inputs: int
) -> None:
    """GPTQ beats rounding to nearest on correlated inputs; a single input gains by scale only."""
    gptq = recipe.rounding
    weight, gram = correlated(rows, inputs, seed=1)
    error = gptq.output_error(weight, gptq.gptq(weight, gram, 128).dequantize(), gram)
    nearest = gptq.output_error(weight, gptq.round_to_nearest(weight, 128).dequantize(), gram)
    assert error <= nearest * (0.5 if inputs > 100 else 1)
    assert inputs == 1 or 0 < nearest < 0.1


@pytest.mark.parametrize(("rows", "inputs"), SHAPES)
@pytest.mark.parametrize("group", [128, 1000])
def test_weights_representable_in_4_bits_are_unchanged(
    recipe: SimpleNamespace, rows: int, inputs: int, group: int
) -> None:
    import torch

    generator = torch.Generator().manual_seed(2)
    levels = torch.randint(-8, 8, (rows, inputs), generator=generator).float()
    levels[:, ::group] = -8  # so each group has its largest magnitude
    levels[::3] = levels[::3].clamp_min(-7)
    levels[::3, ::group] = 7
    groups = recipe.rounding.num_groups(inputs, group)
    scales = torch.rand(rows, groups, generator=generator).add(0.01).bfloat16().float()
    weight = levels * scales.repeat_interleave(group, dim=1)[:, :inputs]
    weight[-1] = 0
    gram = correlated(rows, inputs)[1]
    result = recipe.rounding.gptq(weight, gram, group)
    assert result.dequantize().equal(weight)
    assert result.q.shape == (inputs, rows) and result.scales.shape == (groups, rows)
    assert result.q[:, :-1].equal(levels[:-1].T.add(8).to(torch.uint8))


def test_inputs_that_are_always_zero_are_rounded_to_nearest(recipe: SimpleNamespace) -> None:
    import torch

    weight, gram = correlated(9, 40)
    dead = [0, 17, 39]
    gram[dead] = 0
    gram[:, dead] = 0
    result = recipe.rounding.gptq(weight, gram, 40)
    nearest = recipe.rounding.round_to_nearest(weight, 40, result.scales.float())
    assert result.q[dead].equal(nearest.q[dead])
    assert not result.q.equal(nearest.q)
    nothing = torch.zeros_like(gram)
    result = recipe.rounding.gptq(weight, nothing, 40)
    best = recipe.rounding.best_scales(weight, 40)
    assert result.q.equal(recipe.rounding.round_to_nearest(weight, 40, best).q)


def test_scales_are_the_same_in_float16_and_bfloat16(recipe: SimpleNamespace) -> None:
    import torch

    weight, gram = correlated(30, 256)
    for factor in (1.0, 1e-7, 1e3):
        for scales in (
            recipe.rounding.gptq(weight * factor, gram, 128).scales,
            recipe.rounding.round_to_nearest(weight * factor, 128).scales,
        ):
            assert scales.dtype == torch.float16 and (scales > 0).all()
            assert scales.bfloat16().float().equal(scales.float())


def test_best_scales_err_least(recipe: SimpleNamespace) -> None:
    """Compares with every scale of the range on one group."""
    import torch

    weight, gram = correlated(6, 64)
    importance = gram.diagonal().float()
    best = recipe.rounding.best_scales(weight, 64, importance)

    def error(scales: Any) -> Any:
        rounded = recipe.rounding.round_to_nearest(weight, 64, scales).dequantize()
        return (importance * (rounded - weight) ** 2).sum(1)

    peak = weight.abs().amax(1)
    for levels in np.arange(7, 14, 0.125).tolist():
        scales = (peak / levels).bfloat16().float()[None]
        assert (error(best) <= error(scales) * (1 + 1e-5)).all()
    assert (error(best) < error(recipe.rounding.peak_scales(weight, 64))).all()
    assert torch.equal(recipe.rounding.peak_scales(weight, 64)[0], (peak / 7).bfloat16().float())


def test_bad_gram_is_refused(recipe: SimpleNamespace) -> None:
    weight, gram = correlated(4, 16)
    with pytest.raises(ValueError, match=r"gram is \[15, 15\], expected \[16, 16\]"):
        recipe.rounding.gptq(weight, gram[1:, 1:], 128)


# ---- files


@pytest.mark.parametrize(("rows", "inputs", "group"), [(8, 8, 8), (24, 264, 128), (16, 384, 384)])
def test_tensors_of_a_checkpoint(
    recipe: SimpleNamespace, rows: int, inputs: int, group: int
) -> None:
    """The words follow their definition, and the loader reads the same numbers back."""
    import torch

    weight, gram = correlated(rows, inputs)
    result = recipe.rounding.gptq(weight, gram, group)
    tensors = result.tensors()
    groups = recipe.rounding.num_groups(inputs, group)
    assert {name: (list(t.shape), t.dtype) for name, t in tensors.items()} == {
        "qweight": ([inputs // 8, rows], torch.int32),
        "qzeros": ([groups, rows // 8], torch.int32),
        "scales": ([groups, rows], torch.float16),
        "g_idx": ([inputs], torch.int32),
    }
    for k, n in [(0, 0), (inputs - 1, rows - 1), (5, 3)]:
        word = int(tensors["qweight"][k // 8, n]) & 0xFFFFFFFF
        assert word >> 4 * (k % 8) & 15 == int(result.q[k, n])
    assert (tensors["qzeros"] == 0x77777777).all()
    assert tensors["g_idx"].tolist() == [k // group for k in range(inputs)]

    kept = torch.ones(3)
    state = {f"a.b.{name}": tensor for name, tensor in tensors.items()} | {"norm.weight": kept}
    config = recipe.quantize.Settings().to_hf()
    dense = recipe.rounding.dequantize_state(state, config)
    assert dense.keys() == {"a.b.weight", "norm.weight"}
    assert dense["a.b.weight"].equal(result.dequantize()) and dense["norm.weight"] is kept
    second = {**state, "a.b.qzeros": state["a.b.qzeros"] + 0x11111111}
    second = recipe.rounding.dequantize_state(second, {**config, "checkpoint_format": "gptq_v2"})
    assert second["a.b.weight"].equal(result.dequantize())
    for wrong in ({"quant_method": "awq"}, {"bits": 8}, {"checkpoint_format": "marlin"}):
        with pytest.raises(ValueError, match="expected gptq with 4 bits"):
            recipe.rounding.dequantize_state(state, config | wrong)


@pytest.mark.parametrize(("rows", "inputs"), [(7, 16), (16, 13)])
def test_partial_words_are_refused(recipe: SimpleNamespace, rows: int, inputs: int) -> None:
    result = recipe.rounding.round_to_nearest(correlated(rows, inputs)[0], 128)
    with pytest.raises(ValueError, match="expected a multiple of 8"):
        result.tensors()


def tiny(recipe: SimpleNamespace, directory: Path, family: str) -> Any:
    write_tiny(directory, family, num_hidden_layers=3, dtype="bfloat16")
    return recipe.model.load_pretrained(directory)


def calibration() -> Any:
    import torch

    return torch.randint(0, VOCAB, (6, 40), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("family", ["minicpm", "qwen2", "qwen3"])
def test_a_model_and_its_files(recipe: SimpleNamespace, tmp_path: Path, family: str) -> None:
    import torch
    from safetensors.torch import load_file

    source, out, again = tmp_path / "model", tmp_path / "model-w4", tmp_path / "again"
    settings = recipe.quantize.Settings(group_size=-1)
    for destination in (out, again):
        model = tiny(recipe, source, family)
        (source / "tokenizer.json").write_text("{}")
        ids = calibration()
        done = recipe.quantize.quantize_model(model, ids, settings)
        recipe.quantize.write_quantized(source, destination, done, settings, "# card\n")
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")

    repeated = load_file(again / "model.safetensors")
    assert all(torch.equal(tensor, repeated[name]) for name, tensor in after.items())
    assert (out / "tokenizer.json").is_file() and (out / "README.md").read_text() == "# card\n"
    config = json.loads((out / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == json.loads((source / "config.json").read_text())
    assert (quantization["bits"], quantization["group_size"]) == (4, -1)
    assert quantization["sym"] is True and quantization["desc_act"] is False

    quantised = {name.rpartition(".")[0] for name in after if name.endswith("qweight")}
    assert quantised == {n.rpartition(".")[0] for n in before if n.endswith("_proj.weight")}
    for name, tensor in before.items():
        if not name.endswith("_proj.weight"):
            assert torch.equal(after[name], tensor) and after[name].dtype == tensor.dtype
    loaded = recipe.model.load_pretrained(out)
    with torch.no_grad():
        assert loaded(ids).logits.equal(model(ids).logits)
        original = recipe.model.load_pretrained(source)(ids).logits
        gptq_error = (loaded(ids).logits - original).square().mean()
        nearest = recipe.model.load_pretrained(source)
        recipe.quantize.round_model(nearest, settings)
        nearest_error = (nearest(ids).logits - original).square().mean()
    assert 0 < gptq_error < nearest_error


def test_a_layer_is_calibrated_on_outputs_of_quantised_layers(
    recipe: SimpleNamespace, tmp_path: Path
) -> None:
    """Checks o_proj of layer 1, which follows its quantised q, k and v.

    The order of batches has no effect.
    """
    model, ids = tiny(recipe, tmp_path, "minicpm"), calibration()
    settings = recipe.quantize.Settings(group_size=-1)
    done = recipe.quantize.quantize_model(model, ids, settings, batch_size=4)

    partly = recipe.model.load_pretrained(tmp_path)
    name = "model.layers.1.self_attn.o_proj"
    for other, matrix in done.items():
        if other == name:
            break
        partly.model.get_submodule(other).weight.copy_(matrix.dequantize())
    linear = partly.model.get_submodule(name)
    rows = []
    linear.register_forward_pre_hook(lambda module, inputs: rows.append(inputs[0].flatten(0, 1)))
    partly(ids)
    gram = rows[0].T @ rows[0]
    q = recipe.rounding.gptq(linear.weight, gram, linear.in_features).q
    assert (q != done[name].q).float().mean() <= 0.01
    plain = recipe.model.load_pretrained(tmp_path).model.get_submodule(name)
    assert (
        recipe.rounding.round_to_nearest(plain.weight, 64).q != done[name].q
    ).float().mean() > 0.05


@pytest.mark.parametrize(
    ("family", "kind"), [("minicpm", "eagle2"), ("llama", "eagle2"), ("qwen3", "eagle3")]
)
def test_a_head_and_its_files(
    recipe: SimpleNamespace, tmp_path: Path, family: str, kind: str
) -> None:
    import torch

    target = tiny(recipe, tmp_path / "target", family)
    head = recipe.train_head.build_head(kind, target, np.arange(VOCAB), 50, seed=0)
    counts = np.arange(VOCAB) if kind == "eagle2" else None
    recipe.head_files.write_head(head, tmp_path / "head", "# card\n", {}, counts)
    head = recipe.head_files.load_head(tmp_path / "head", target).requires_grad_(False)
    settings, out = recipe.quantize.Settings(group_size=-1), tmp_path / "head-w4"
    done = recipe.quantize.quantize_head(head, target, calibration(), settings, depth=3)
    layer = "layers.0" if kind == "eagle2" else "midlayer"
    assert {"fc", f"{layer}.self_attn.q_proj", f"{layer}.mlp.down_proj"} < done.keys()
    assert len(done) == 8
    recipe.quantize.write_quantized(tmp_path / "head", out, done, settings, "# card\n")
    assert (out / "token_counts.npy").is_file() == (kind == "eagle2")
    loaded = recipe.head_files.load_head(out, target)
    assert loaded.state_dict().keys() == head.state_dict().keys()
    for name, tensor in head.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_rows_of_no_chain_are_skipped(recipe: SimpleNamespace) -> None:
    """The i-th call of a batch drops its first i rows."""
    import torch

    linear = torch.nn.Linear(5, 3)
    x = torch.randn(4, 2, 6, 5, generator=torch.Generator().manual_seed(0))

    def batch(calls: Any) -> None:
        for call in calls:
            linear(call)

    gram = recipe.quantize.collect_gram(linear, [lambda: batch(x[:3]), lambda: batch(x[3:])])
    rows = [x[0], x[1][:, 1:], x[2][:, 2:], x[3]]
    flat = torch.cat([part.reshape(-1, 5) for part in rows]).double()
    assert (gram - flat.T @ flat).abs().max() < 1e-4
    linear(x[0])
    assert not linear._forward_pre_hooks


def test_shapes_that_do_not_fit_are_refused(recipe: SimpleNamespace, tmp_path: Path) -> None:
    model = tiny(recipe, tmp_path / "a", "llama")
    with pytest.raises(SystemExit, match=r"has 64 inputs, expected a multiple of 128; --group"):
        recipe.quantize.check_shapes(model.model, recipe.quantize.Settings())
    recipe.quantize.check_shapes(model.model, recipe.quantize.Settings(group_size=-1))
    write_tiny(tmp_path / "b", "llama", intermediate_size=92)
    odd = recipe.model.load_pretrained(tmp_path / "b")
    with pytest.raises(SystemExit, match=r"gate_proj is 92 x 64, but 8 weights share a word"):
        recipe.quantize.check_shapes(odd.model, recipe.quantize.Settings(group_size=-1))


@pytest.mark.parametrize("name", ["tiny-python-minicpm", "tiny-python-eagle2"])
def test_shipped_twins(recipe: SimpleNamespace, name: str) -> None:
    """Linear layers are close to the original; other tensors and files are equal."""
    import torch

    original, twin = ASSETS / name, ASSETS / f"{name}-w4"
    before, after = (recipe.model.read_state(directory) for directory in (original, twin))
    assert before.keys() == after.keys()
    rounded = 0
    for key, tensor in before.items():
        if key.endswith(("_proj.weight", "fc.weight")):
            error = (after[key] - tensor.float()).norm() / tensor.float().norm()
            assert 0.02 < error < 0.35, (key, error)
            rounded += tensor.numel()
        else:
            assert torch.equal(after[key], tensor)
    others = {p.name for p in original.iterdir()} - {"config.json", "model.safetensors"}
    for other in others - {"README.md"}:
        assert (twin / other).read_bytes() == (original / other).read_bytes()
    config = json.loads((twin / "config.json").read_text())
    assert config.pop("quantization_config") == recipe.quantize.Settings().to_hf()
    assert config == json.loads((original / "config.json").read_text())
    saved = sum(
        (d / "model.safetensors").stat().st_size * s for d, s in ((original, 1), (twin, -1))
    )
    assert saved > 1.4 * rounded  # bytes: 2 a weight before, a little over half a byte after
