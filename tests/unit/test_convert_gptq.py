"""GPTQ to Marlin: the documented bytes, every tensor, and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

from cpmcu.convert.__main__ import main
from cpmcu.convert.complete import head_fields, layer_shapes
from cpmcu.convert.gptq_to_marlin import gptq_to_marlin
from cpmcu.loading.checkpoint import open_checkpoint
from tests.reference.tiny_checkpoints import FAMILIES
from tests.reference.tiny_gptq import (
    Array,
    TinyGptq,
    save,
    words,
    write_gptq,
    write_gptq_eagle,
    write_gptq_eagle3,
)

ROOT = Path(__file__).resolve().parents[2]
FUSED = {"self_attn.qkv_proj": ("q", "k", "v"), "mlp.gate_up_proj": ("gate", "up")}


def marlin_words(q: Array) -> Array:
    """The definition of the layout: a loop over words and nibbles, for all tiles at once."""
    k, n = q.shape
    tiles = q.reshape(k // 16, 16, n // 64, 64).astype(np.uint32)
    words = np.zeros((k // 16, n // 64, 128), np.uint32)
    for lane in range(32):
        for j in range(4):
            for p in range(8):
                row = 2 * (lane % 4) + 8 * (p & 1) + (p >> 2)
                column = 16 * j + lane // 4 + 8 * ((p >> 1) & 1)
                words[:, :, 4 * lane + j] |= tiles[:, row, :, column] << np.uint32(4 * p)
    return words.reshape(k // 16, 2 * n).view(np.int32)


CHANNEL_ORDER = [0, 1, 8, 9, 16, 17, 24, 25, 2, 3, 10, 11, 18, 19, 26, 27]
CHANNEL_ORDER += [4, 5, 12, 13, 20, 21, 28, 29, 6, 7, 14, 15, 22, 23, 30, 31]


def marlin_scales(scales: Array, group_size: int) -> Array:
    """Returns scales in Marlin's order, by its definition."""
    order, width = CHANNEL_ORDER, 32
    if group_size != -1:
        order, width = [8 * (t % 8) + t // 8 for t in range(64)], 64
    columns = [width * (n // width) + order[n % width] for n in range(scales.shape[1])]
    return scales[:, columns]


def read(directory: Path) -> dict[str, Array]:
    checkpoint = open_checkpoint(directory)
    return {name: np.array(checkpoint.read(name)) for name in checkpoint.tensors}


def expected(tiny: TinyGptq, group_size: int, rename: Callable[[str], str]) -> dict[str, Array]:
    """All tensors of the converted checkpoint."""
    parts = (".qweight", ".scales", ".qzeros", ".g_idx")
    found = {rename(n): a for n, a in tiny.tensors.items() if not n.endswith(parts)}
    for module in tiny.linears:
        layer, _, name = module.rpartition("self_attn." if "self_attn." in module else "mlp.")
        group = [module]
        for fused, names in FUSED.items():
            if name.removesuffix("_proj") in names:
                group = [module.replace(name, f"{part}_proj") for part in names]
                module = layer + fused
        blocks = [tuple(np.concatenate(a, axis=1) for a in zip(*map(tiny.linears.get, group)))]
        if module == "model.fc":  # an EAGLE head's fc is packed in halves of K
            (q, scales), half = blocks[0], len(blocks[0][0]) // 2
            blocks = [(q[:half], scales[: half // 128]), (q[half:], scales[half // 128 :])]
        packed = [(marlin_words(q), marlin_scales(s, group_size)) for q, s in blocks]
        qweight, scales = (np.concatenate(arrays, axis=1) for arrays in zip(*packed))
        found |= {rename(f"{module}.qweight"): qweight, rename(f"{module}.scales"): scales}
    return found


def assert_same(found: dict[str, Array], wanted: dict[str, Array]) -> None:
    assert set(found) == set(wanted)
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape, name
        assert found[name].tobytes() == np.ascontiguousarray(array).tobytes(), name


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(
    ("family", "group_size", "settings"),
    [
        *((family, 128, {}) for family in FAMILIES),
        ("llama", -1, {"hidden_size": 256, "num_attention_heads": 8}),
        ("qwen3", 128, {"quant": {"checkpoint_format": "gptq_v2"}}),
        ("llama", 128, {"dtype": "bfloat16", "num_hidden_layers": 1}),
        ("llama", 128, {"tie_word_embeddings": True}),
        (
            "qwen2",
            -1,
            {
                "hidden_size": 256,
                "num_attention_heads": 5,
                "num_key_value_heads": 5,
                "head_dim": 64,
            },
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_models(
    tmp_path: Path, family: str, group_size: int, settings: dict[str, Any], shards: int
) -> None:
    tiny = write_gptq(tmp_path / "in", family, group_size=group_size, shards=shards, **settings)
    done = gptq_to_marlin(str(tmp_path / "in"), tmp_path / "out")
    assert done.directory == tmp_path / "out"
    assert_same(read(tmp_path / "out"), expected(tiny, group_size, str))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    stated = {**tiny.config["quantization_config"], "checkpoint_format": "gptq_marlin"}
    assert config == {**tiny.config, "quantization_config": stated}


def test_experts_are_refused(tmp_path: Path) -> None:
    write_gptq(tmp_path / "in", "qwen3moe", moe_intermediate_size=128)
    with pytest.raises(ValueError, match=r"experts.0.gate_proj is of an expert, expected a dense"):
        gptq_to_marlin(str(tmp_path / "in"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("shards", [1, 2])
def test_eagle(tmp_path: Path, shards: int) -> None:
    tiny = write_gptq_eagle(tmp_path / "in", shards=shards)
    gptq_to_marlin(str(tmp_path / "in"), tmp_path / "out")
    found = read(tmp_path / "out")
    assert_same(found, expected(tiny, 128, lambda name: name.removeprefix("model.")))
    assert found["fc.qweight"].shape == (8, 512) and found["fc.scales"].shape == (1, 256)
    layer = "layers.0.self_attn.qkv_proj."
    assert {"embed_tokens.weight", "input_norm1.weight", layer + "scales"} <= set(found)


def test_eagle3(tmp_path: Path) -> None:
    tiny = write_gptq_eagle3(tmp_path / "in")
    gptq_to_marlin(str(tmp_path / "in"), tmp_path / "out")
    found = read(tmp_path / "out")
    wanted = expected(tiny, 128, str)
    wanted["d2t"] = wanted["d2t"].astype(np.int32)
    assert_same(found, wanted)
    assert found["fc.qweight"].shape == (24, 256) and found["fc.scales"].shape == (3, 128)
    assert found["midlayer.self_attn.qkv_proj.qweight"].shape == (16, 2 * 192)


@pytest.mark.parametrize(
    ("write", "before", "after"),
    [
        (write_gptq_eagle, "model.layers.0.", "model.eagle_layers.0."),
        (write_gptq_eagle3, "midlayer.", "model.layers.0."),
    ],
)
def test_other_naming_schemes_of_heads(tmp_path: Path, write: Any, before: str, after: str) -> None:
    tiny = write(tmp_path / "in")
    gptq_to_marlin(str(tmp_path / "in"), tmp_path / "out")
    renamed = {name.replace(before, after): array for name, array in tiny.tensors.items()}
    save(tmp_path / "in", tiny.config, renamed)
    gptq_to_marlin(str(tmp_path / "in"), tmp_path / "again")
    assert_same(read(tmp_path / "again"), read(tmp_path / "out"))


def test_several_bands(tmp_path: Path) -> None:
    """More inputs than one band, and a shorter last band."""
    tiny = write_gptq(tmp_path / "in", intermediate_size=640, num_hidden_layers=1)
    gptq_to_marlin(str(tmp_path / "in"), tmp_path / "out")
    assert_same(read(tmp_path / "out"), expected(tiny, 128, str))


def test_dense_layers_stay(tmp_path: Path) -> None:
    """An unquantised layer keeps its tensors."""
    tiny = write_gptq(tmp_path / "in", quant={"dynamic": {"-:model.layers.0.*": {}}})
    tensors = {n: a for n, a in tiny.tensors.items() if "layers.0." not in n}
    shapes = layer_shapes(head_fields(tiny.config, None), "model.layers.0.", 128)
    shapes |= {f"model.layers.0.{name}.weight": (128,) for name in ("input_layernorm", "odd")}
    dense = {name: np.full(shape, 0.5, np.float16) for name, shape in shapes.items()}
    save(tmp_path / "in", tiny.config, {**tensors, **dense})
    gptq_to_marlin(str(tmp_path / "in"), tmp_path / "out")
    found = read(tmp_path / "out")
    for name, array in dense.items():
        np.testing.assert_array_equal(found[name], array)
    assert {n for n in found if "layers.0." in n} == set(dense)
    assert "model.layers.1.self_attn.qkv_proj.qweight" in found


def test_without_zeros_and_indices(tmp_path: Path) -> None:
    """Files without the zero points and group indices that a symmetric layout implies."""
    tiny = write_gptq(tmp_path / "in")
    kept = {n: a for n, a in tiny.tensors.items() if not n.endswith((".qzeros", ".g_idx"))}
    save(tmp_path / "in", tiny.config, kept)
    gptq_to_marlin(str(tmp_path / "in"), tmp_path / "out")
    assert_same(read(tmp_path / "out"), expected(tiny, 128, str))


def test_config_of_older_programs(tmp_path: Path) -> None:
    """quantize_config.json becomes quantization_config and is not copied."""
    tiny = write_gptq(tmp_path / "in")
    config = dict(tiny.config)
    old = {"bits": 4, "group_size": 128, "sym": True, "desc_act": False}
    del config["quantization_config"]
    save(tmp_path / "in", config, tiny.tensors)
    (tmp_path / "in" / "quantize_config.json").write_text(json.dumps(old))
    gptq_to_marlin(str(tmp_path / "in"), tmp_path / "out")
    assert not (tmp_path / "out" / "quantize_config.json").exists()
    stated = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert stated == {**old, "quant_method": "gptq", "checkpoint_format": "gptq_marlin"}


def test_file_is_a_safetensors_file(tmp_path: Path) -> None:
    """The safetensors library reads the output."""
    tiny = write_gptq(tmp_path / "in", "qwen2", vocab_size=7)
    gptq_to_marlin(str(tmp_path / "in"), tmp_path / "out")
    path = tmp_path / "out" / "model_gptq.safetensors"
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata() == {"format": "pt"}
        for name, array in expected(tiny, 128, str).items():
            np.testing.assert_array_equal(file.get_tensor(name), array)
    for stored in open_checkpoint(tmp_path / "out").tensors.values():
        assert stored.offset is not None and stored.offset % 2 == 0
        assert stored.offset % 4 == 0 or stored.meta.dtype != "int32"


def test_memory_is_bounded(tmp_path: Path, monkeypatch: Any) -> None:
    """A layer of 8 Mi weights, of which 256 Ki are unpacked at a time, and small layers."""
    monkeypatch.setattr(f"{gptq_to_marlin.__module__}.check_complete", lambda *arguments: None)
    tiny = write_gptq(tmp_path / "in", num_hidden_layers=1)
    rng = np.random.default_rng(0)
    down = "model.layers.0.mlp.down_proj"
    tiny.tensors[f"{down}.qweight"] = rng.integers(-(2**31), 2**31, (1024, 1024), np.int32)
    tiny.tensors[f"{down}.scales"] = np.ones((64, 1024), np.float16)
    tiny.tensors[f"{down}.qzeros"] = words(np.full((64, 1024), 7, np.uint8))
    tiny.tensors[f"{down}.g_idx"] = (np.arange(8192) // 128).astype(np.int32)
    tiny.tensors["lm_head.weight"] = np.ones((8192, 1024), np.float16)
    save(tmp_path / "in", tiny.config, tiny.tensors)
    tracemalloc.start()
    gptq_to_marlin(str(tmp_path / "in"), tmp_path / "out")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


# ---- refusals

DOWN = "model.layers.1.mlp.down_proj"


def changed_config(**keys: Any) -> Callable[[TinyGptq], None]:
    def change(tiny: TinyGptq) -> None:
        tiny.config["quantization_config"] |= keys

    return change


def changed_tensor(name: str, array: Array | None) -> Callable[[TinyGptq], None]:
    def change(tiny: TinyGptq) -> None:
        if array is None:
            del tiny.tensors[name]
        else:
            tiny.tensors[name] = array

    return change


def no_config(tiny: TinyGptq) -> None:
    del tiny.config["quantization_config"]


def act_order(tiny: TinyGptq) -> None:
    tiny.tensors[f"{DOWN}.g_idx"] = (np.arange(256) % 2).astype(np.int32)


def without_q(tiny: TinyGptq) -> None:
    for part in ("qweight", "scales", "qzeros", "g_idx"):
        del tiny.tensors[f"model.layers.1.self_attn.k_proj.{part}"]


def more_layers(tiny: TinyGptq) -> None:
    tiny.config["num_hidden_layers"] = 3


def wider_mlp(tiny: TinyGptq) -> None:
    tiny.config["intermediate_size"] = 384


def quantised_head(tiny: TinyGptq) -> None:
    for part in ("qweight", "scales"):
        tiny.tensors[f"lm_head.{part}"] = tiny.tensors[f"{DOWN}.{part}"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed_config(bits=8), "the weights have 8 bits, expected 4"),
        (changed_config(bits=None), "the weights have None bits, expected 4"),
        (changed_config(sym=False), "sym is False, expected true"),
        (changed_config(desc_act=True), "desc_act is True, expected false"),
        (changed_config(group_size=64), "group_size is 64, expected 128, or -1 for one scale"),
        (changed_config(checkpoint_format="marlin"), "checkpoint_format is 'marlin', expected"),
        (changed_config(checkpoint_format="gptq_marlin"), "in Marlin's layout already"),
        (changed_config(is_marlin_format=True), "in Marlin's layout already"),
        (changed_config(quant_method="awq"), "quantised with awq .4 bits., expected GPTQ"),
        (changed_config(dynamic={"+:.*down.*": {"bits": 8}}), "dynamic has the rule '.:..down"),
        (changed_config(dynamic=3), "dynamic is 3, expected rules for single layers"),
        (changed_config(checkpoint_format=["gptq"]), "checkpoint_format is ..gptq.., expected"),
        (no_config, "no quantization_config and is quantised with an unnamed scheme"),
        (act_order, "down_proj.g_idx permutes the inputs .desc_act., expected groups of 128 in"),
        (without_q, "q_proj is quantised and .*k_proj is not, expected the same"),
        (quantised_head, "lm_head is quantised, expected only layers' projections: CPM.cu"),
        (
            changed_tensor(f"{DOWN}.qzeros", words(np.full((2, 128), 6, np.uint8))),
            "down_proj.qzeros has the zero point 7, expected 8 everywhere",
        ),
        (changed_tensor(f"{DOWN}.scales", None), "down_proj has a qweight and no scales"),
        (
            changed_tensor(f"{DOWN}.scales", np.full((2, 128), np.nan, np.float16)),
            r"down_proj.scales holds nan at \[0, 0\], expected finite numbers: the file is damaged",
        ),
        (
            changed_tensor(f"{DOWN}.g_idx", np.arange(256) // 128),
            r"down_proj.g_idx is int64 \[256\], expected int32 \[256\]",
        ),
        (
            changed_tensor("model.layers.0.input_layernorm.weight", None),
            "1 tensors are missing that config.json asks for: model.layers.0.input_layernorm.wei",
        ),
        (
            changed_tensor("lm_head.weight", np.ones((203, 64), np.float16)),
            r"lm_head.weight has shape \[203, 64\], expected \[203, 128\] by config.json",
        ),
        (more_layers, "9 tensors are missing that config.json asks for: model.layers.2.self_attn"),
        (wider_mlp, r"gate_proj.weight has shape \[256, 128\], expected \[384, 128\]"),
        (changed_tensor(f"{DOWN}.qweight", None), "down_proj.qzeros is present without a qweight"),
        (
            changed_tensor(f"{DOWN}.scales", np.ones((2, 128), np.int32)),
            r"down_proj.scales is int32 \[2, 128\], expected float16",
        ),
        (
            changed_tensor(f"{DOWN}.qweight", np.ones((16, 256), np.int32)),
            r"expected float16 or bfloat16 \[1, 256\] beside \[16, 256\]; has it been converted",
        ),
        (
            changed_tensor(f"{DOWN}.qweight", np.ones((9, 128), np.int32)),
            "down_proj has 72 inputs, expected a multiple of 128",
        ),
        (
            changed_tensor("model.layers.1.self_attn.moe.qweight", np.ones((16, 128), np.int32)),
            "moe has a qweight and no scales",
        ),
    ],
)  # fmt: skip
def test_refusals(
    tmp_path: Path, change: Callable[[TinyGptq], None], message: str, capsys: Any
) -> None:
    tiny = write_gptq(tmp_path / "in")
    change(tiny)
    save(tmp_path / "in", tiny.config, tiny.tensors)
    with pytest.raises(ValueError, match=message):
        gptq_to_marlin(str(tmp_path / "in"), tmp_path / "out")
    arguments = ["--src", str(tmp_path / "in"), "--dst", str(tmp_path / "out")]
    assert main(["gptq-to-marlin", *arguments]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "Traceback" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (write_gptq_eagle, "model.layers.0.post_attention_layernorm.weight"),
        (write_gptq_eagle, "model.layers.0.mlp.down_proj"),
        (write_gptq_eagle3, "midlayer.input_layernorm.weight"),
        (write_gptq_eagle3, "midlayer.self_attn.o_proj"),
        (write_gptq_eagle3, "norm.weight"),
    ],
)
def test_heads_with_missing_tensors(tmp_path: Path, write: Any, name: str) -> None:
    tiny = write(tmp_path / "in")
    tensors = {found: array for found, array in tiny.tensors.items() if not found.startswith(name)}
    save(tmp_path / "in", tiny.config, tensors)
    short = name.removeprefix("model.")
    with pytest.raises(ValueError, match=f"1 tensors are missing .*: {short}"):
        gptq_to_marlin(str(tmp_path / "in"), tmp_path / "out")


def test_heads_with_wrong_shapes(tmp_path: Path) -> None:
    tiny = write_gptq_eagle3(tmp_path / "in")
    tiny.config["num_key_value_heads"] = 2
    save(tmp_path / "in", tiny.config, tiny.tensors)
    with pytest.raises(ValueError, match=r"k_proj.weight has shape \[32, 256\], expected \[64, 2"):
        gptq_to_marlin(str(tmp_path / "in"), tmp_path / "out")


def test_channel_wise_layers_with_few_inputs(tmp_path: Path) -> None:
    """cpmcu could not load them: the shapes do not determine the order of the scales."""
    write_gptq(tmp_path / "in", group_size=-1)
    with pytest.raises(ValueError, match="q_proj has 128 inputs with group_size -1, expected more"):
        gptq_to_marlin(str(tmp_path / "in"), tmp_path / "out")


def test_sizes_that_do_not_fit_tiles(tmp_path: Path) -> None:
    write_gptq(tmp_path / "in", num_key_value_heads=2, head_dim=24, num_attention_heads=16)
    with pytest.raises(ValueError, match="qkv_proj has 480 outputs, expected a multiple of 64"):
        gptq_to_marlin(str(tmp_path / "in"), tmp_path / "out")


def test_channel_wise_eagle(tmp_path: Path) -> None:
    write_gptq_eagle(tmp_path / "in", group_size=-1, hidden_size=256)
    with pytest.raises(ValueError, match=r"fc is \[512 -> 256\] with group_size -1, expected"):
        gptq_to_marlin(str(tmp_path / "in"), tmp_path / "out")


def test_script(tmp_path: Path) -> None:
    """The script with CPM.cu's name and flags gives the same output from any directory."""
    write_gptq(tmp_path / "in", num_hidden_layers=1)
    gptq_to_marlin(str(tmp_path / "in"), tmp_path / "out")
    script = [sys.executable, str(ROOT / "scripts" / "gptq2marlin.py")]
    done = subprocess.run(
        [*script, "--src", "in", "--dst", "again"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (
        "converting in: " in done.stderr and "4 linear layers are in Marlin's layout" in done.stderr
    )
    for name in ("config.json", "model_gptq.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
