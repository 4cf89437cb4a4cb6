"""4-bit checkpoints: all layouts yield the same bits, close to those of the dequantised weights."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.engine.harness import DEVICES, SMALL, generate, make_engine, random_ids
from tests.reference.engines import extension_or_skip, prompt_logits
from tests.reference.tiny_checkpoints import TinyCheckpoint, write_tiny
from tests.reference.tiny_w4 import LAYOUTS, SIZES, quantise, write_w4
from tests.tolerances import LOGITS, LOGITS_CUDA, assert_close

extension_or_skip()

IDS = random_ids(133, 203, seed=3)
on_devices = pytest.mark.parametrize("device", DEVICES)


def dense(root: Path, family: str, **settings: Any) -> TinyCheckpoint:
    return write_tiny(root / "dense", family, **(SIZES | settings))


def settings_of(device: str) -> dict[str, Any]:
    dtype = "bfloat16" if device == "cuda" else "float32"
    return {"device": device, "dtype": dtype, "max_num_seqs": 1, "memory_limit": 0.2}


def logits(directory: Path, device: str, **config: Any) -> npt.NDArray[np.float32]:
    config = {"chunk_length": 256, **settings_of(device), **config}
    return prompt_logits(make_engine(directory, **config), IDS)


def tolerance(device: str) -> Any:
    return LOGITS_CUDA["bfloat16"] if device == "cuda" else LOGITS["float32"]


def check_layouts(
    root: Path, tiny: TinyCheckpoint, layouts: tuple[str, ...], device: str, **settings: Any
) -> None:
    weights = quantise(tiny.weights, **settings)
    dequantised = write_w4(root / "dequantised", tiny.config, weights, "dense")
    expected = logits(dequantised, device)
    first = None
    for layout in layouts:
        found = logits(write_w4(root / layout, tiny.config, weights, layout), device)
        assert_close(found, expected, tolerance(device))
        assert first is None or np.array_equal(found, first), layout
        first = found


@on_devices
@pytest.mark.parametrize("group_size", [128, -1])
@pytest.mark.parametrize("family", ["llama"] if SMALL else ["llama", "qwen2", "qwen3", "minicpm"])
def test_every_layout(tmp_path: Path, device: str, family: str, group_size: int) -> None:
    """Biases of q, k, v (qwen2), norms of q and k (qwen3), scales of branches (minicpm)."""
    check_layouts(tmp_path, dense(tmp_path, family), LAYOUTS, device, group_size=group_size)


@on_devices
def test_layers_with_other_names(tmp_path: Path, device: str) -> None:
    """LFM2 names its projections w1, w2, w3, in_proj and out_proj."""
    tiny = dense(tmp_path, "lfm2", num_hidden_layers=4, block_auto_adjust_ff_dim=False)
    ends = (".w1.weight", ".w2.weight", ".w3.weight", ".in_proj.weight", ".out_proj.weight")
    named = tuple(name.removesuffix(".weight") for name in tiny.weights if name.endswith(ends))
    check_layouts(tmp_path, tiny, ("gptq", "awq", "compressed"), device, extra=named)


@on_devices
@pytest.mark.parametrize("group_size", [128, -1])
def test_zero_points(tmp_path: Path, device: str, group_size: int) -> None:
    layouts = ("gptq", "gptq_v2", "awq", "compressed")
    tiny = dense(tmp_path, "qwen2")
    check_layouts(tmp_path, tiny, layouts, device, group_size=group_size, has_zeros=True)


@on_devices
def test_bfloat16_scales(tmp_path: Path, device: str) -> None:
    check_layouts(tmp_path, dense(tmp_path, "llama"), LAYOUTS, device, scale_dtype="bfloat16")


@on_devices
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_activations(tmp_path: Path, device: str, dtype: str) -> None:
    tiny = dense(tmp_path, "llama")
    weights = quantise(tiny.weights)
    expected = logits(write_w4(tmp_path / "dequantised", tiny.config, weights, "dense"), "cpu")
    directory = write_w4(tmp_path / "gptq", tiny.config, weights, "gptq")
    assert_close(logits(directory, device, dtype=dtype), expected, LOGITS[dtype])


@on_devices
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dense_layers_among_quantised_ones(tmp_path: Path, device: str, layout: str) -> None:
    """A layer, a fused projection and a single projection stay dense."""
    tiny = dense(tmp_path, "qwen3", num_hidden_layers=3)
    kept = ("layers.0.mlp.gate_proj", "layers.0.mlp.up_proj", "layers.2.self_attn.o_proj")
    kept += tuple(f"layers.1.{name}" for name in ("self_attn.o_proj", "mlp.down_proj"))
    check_layouts(tmp_path, tiny, (layout,), device, keep=kept)


@on_devices
@pytest.mark.parametrize("layout", ["gptq", "compressed"])
def test_a_quantised_lm_head(tmp_path: Path, device: str, layout: str) -> None:
    tiny = dense(tmp_path, "llama", vocab_size=208)
    check_layouts(tmp_path, tiny, (layout,), device, extra=("lm_head",))


@on_devices
def test_chunks_change_no_bit(tmp_path: Path, device: str) -> None:
    tiny = dense(tmp_path, "llama")
    directory = write_w4(tmp_path / "w4", tiny.config, quantise(tiny.weights), "gptq")
    whole = logits(directory, device)
    for length in (1, 7, 64, 65):
        assert np.array_equal(logits(directory, device, chunk_length=length), whole), length


@on_devices
def test_names_of_the_file(tmp_path: Path, device: str) -> None:
    """CPM.cu's converter and loader use two file names. Both precede model.safetensors."""
    tiny = dense(tmp_path, "llama", num_hidden_layers=1)
    weights = quantise(tiny.weights)
    expected = logits(write_w4(tmp_path / "a", tiny.config, weights, "marlin"), device)
    for name in ("model_gptq", "model_gptq_marlin"):
        write_w4(tmp_path / name, tiny.config, quantise(tiny.weights), "gptq")
        file = f"{name}.safetensors"
        write_w4(tmp_path / name, tiny.config, weights, "marlin", file=file)
        assert np.array_equal(logits(tmp_path / name, device), expected)


# ---- heads quantised at load


@on_devices
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("bits", "worst"), [("w8", 0.02), ("w4", 0.3)])
def test_lm_head_quant(tmp_path: Path, device: str, tied: bool, bits: str, worst: float) -> None:
    tiny = dense(tmp_path, "minicpm", tie_word_embeddings=tied)
    exact, rounded = (
        logits(tiny.directory, device, lm_head_quant=quant) for quant in ("none", bits)
    )
    error = np.abs(rounded - exact).max() / np.abs(exact).max()
    assert 0 < error < worst
    again = logits(tiny.directory, device, lm_head_quant=bits)
    assert np.array_equal(again, rounded)


def test_lm_head_quant_of_a_quantised_head(tmp_path: Path) -> None:
    tiny = dense(tmp_path, "llama", vocab_size=208)
    weights = quantise(tiny.weights, extra=("lm_head",))
    directory = write_w4(tmp_path / "w4", tiny.config, weights, "gptq")
    with pytest.raises(ValueError, match="stores lm_head as gptq, expected 'none'"):
        logits(directory, "cpu", lm_head_quant="w4")


# ---- damaged files


@pytest.mark.parametrize("layout", LAYOUTS)
def test_error_names_the_missing_or_invalid_tensor(tmp_path: Path, layout: str) -> None:
    tiny = dense(tmp_path, "llama")
    weights = quantise(tiny.weights, has_zeros=layout == "awq")
    module = "model.layers.1.self_attn.o_proj"
    packed, scales = f"{module}.qweight", f"{module}.scales"
    if layout == "compressed":
        packed, scales = f"{module}.weight_packed", f"{module}.weight_scale"
    for name in (packed, scales):
        directory = write_w4(tmp_path / "a", tiny.config, weights, layout, drop=(name,))
        with pytest.raises(ValueError, match=f"missing.*{name}"):
            logits(directory, "cpu")
        wrong = {name: np.zeros((3, 5), np.int32 if name == packed else np.float16)}
        directory = write_w4(tmp_path / "b", tiny.config, weights, layout, change=wrong)
        with pytest.raises(ValueError, match=rf"{name} has shape \[3, 5\], expected"):
            logits(directory, "cpu")
    directory = write_w4(
        tmp_path / "c",
        tiny.config,
        weights,
        layout,
        change={f"{module}.bias": np.ones(256, np.float16)},
    )
    with pytest.raises(ValueError, match=f"{module}.bias is not zero"):
        logits(directory, "cpu")
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="truncated"):
        logits(directory, "cpu")


def test_zero_bias_is_ignored(tmp_path: Path) -> None:
    tiny = dense(tmp_path, "llama")
    weights = quantise(tiny.weights)
    zeros = {"model.layers.0.mlp.down_proj.bias": np.zeros(256, np.float16)}
    directory = write_w4(tmp_path / "a", tiny.config, weights, "gptq", change=zeros)
    plain = write_w4(tmp_path / "b", tiny.config, weights, "gptq")
    assert np.array_equal(logits(directory, "cpu"), logits(plain, "cpu"))


def test_indices_and_zero_points_must_match_the_config(tmp_path: Path) -> None:
    tiny = dense(tmp_path, "llama")
    weights = quantise(tiny.weights)
    module = "model.layers.1.mlp.down_proj"
    shuffled = np.random.default_rng(0).permutation(np.arange(352) // 128).astype(np.int32)
    directory = write_w4(
        tmp_path / "a", tiny.config, weights, "gptq", change={f"{module}.g_idx": shuffled}
    )
    with pytest.raises(ValueError, match=f"{module}.g_idx permutes the inputs"):
        logits(directory, "cpu")
    zeros = {f"{module}.qzeros": np.full((3, 32), 0x77777778, np.int32)}
    directory = write_w4(tmp_path / "b", tiny.config, weights, "gptq", change=zeros)
    with pytest.raises(ValueError, match=f"{module}.qzeros has the zero point 9, expected 8"):
        logits(directory, "cpu")


@pytest.mark.parametrize("layout", ["gptq", "marlin"])
def test_plain_steps_equal_those_of_dequantised_weights(tmp_path: Path, layout: str) -> None:
    tiny = dense(tmp_path, "llama")
    weights = quantise(tiny.weights)
    outputs = []
    for name in (layout, "dense"):
        engine = make_engine(
            write_w4(tmp_path / name, tiny.config, weights, name), **settings_of("cpu")
        )
        outputs.append(generate(engine, IDS[:40], 30))
    assert outputs[0] == outputs[1]


@on_devices
def test_two_engines_at_the_same_time(tmp_path: Path, device: str) -> None:
    """Kernels whose CTAs must all be co-resident must not deadlock with those of another engine."""
    tiny = dense(tmp_path, "llama")
    directory = write_w4(tmp_path / "gptq", tiny.config, quantise(tiny.weights), "gptq")
    engines = [make_engine(directory, **settings_of(device), chunk_length=256) for _ in range(2)]
    count = 20 if SMALL else 100
    expected = generate(engines[0], IDS, count)
    with ThreadPoolExecutor(2) as pool:
        texts = pool.map(lambda engine: [generate(engine, IDS, count) for _ in range(3)], engines)
        assert list(texts) == [[expected] * 3] * 2
