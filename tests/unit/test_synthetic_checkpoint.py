"""The synthetic checkpoint writer: shapes, determinism, format, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cpmcu.models.common import BuildOptions
from cpmcu.models.registry import find_model
from scripts.synthetic.__main__ import main
from scripts.synthetic.presets import PRESETS
from scripts.synthetic.sources import round_to_bfloat16
from tests.reference.numpy_model import NumpyModel

ROOT = Path(__file__).resolve().parents[2]
TINY = ["tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-qwen3-moe", "tiny-minicpm"]


def write(preset: str, out: Path, *flags: str) -> Path:
    main(["--preset", preset, "--out", str(out), "--device", "cpu", *flags])
    return out


def read_tensors(path: Path) -> dict[str, tuple[str, list[int], np.ndarray]]:
    """Returns (dtype, shape, float32 values) of each tensor by name, parsed by hand."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert (8 + length) % 64 == 0
    body = data[8 + length :]
    tensors = {}
    end = 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, stop = entry["data_offsets"]
        assert begin == end, "tensors lie back to back"
        end = stop
        raw = body[begin:stop]
        if entry["dtype"] == "BF16":
            values = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            kind = {"F16": np.float16, "F32": np.float32}[entry["dtype"]]
            values = np.frombuffer(raw, kind).astype(np.float32)
        tensors[name] = (entry["dtype"], entry["shape"], values)
    assert end == len(body)
    return tensors


@pytest.mark.parametrize("preset", TINY)
def test_shapes_match_config_and_values_are_sane(preset: str, tmp_path: Path) -> None:
    out = write(preset, tmp_path / "model")
    config = json.loads((out / "config.json").read_text())
    tensors = read_tensors(out / "model.safetensors")
    hidden, head_dim = config["hidden_size"], config.get("head_dim") or 64
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    expected = {
        "model.embed_tokens.weight": [config["vocab_size"], hidden],
        "model.norm.weight": [hidden],
        "model.layers.1.self_attn.q_proj.weight": [q, hidden],
        "model.layers.1.self_attn.k_proj.weight": [kv, hidden],
        "model.layers.1.self_attn.v_proj.weight": [kv, hidden],
        "model.layers.1.self_attn.o_proj.weight": [hidden, q],
    }
    module, width = "model.layers.1.mlp.", config["intermediate_size"]
    if "num_experts" in config:
        expected[module + "gate.weight"] = [config["num_experts"], hidden]
        module += f"experts.{config['num_experts'] - 1}."
        width = config["moe_intermediate_size"]
    expected[module + "gate_proj.weight"] = [width, hidden]
    expected[module + "down_proj.weight"] = [hidden, width]
    for name, shape in expected.items():
        assert tensors[name][1] == shape, name
    assert ("lm_head.weight" in tensors) == (not config["tie_word_embeddings"])
    has_bias = "model.layers.0.self_attn.q_proj.bias" in tensors
    assert has_bias == (config["model_type"] == "qwen2")
    has_qk_norm = "model.layers.0.self_attn.q_norm.weight" in tensors
    assert has_qk_norm == (config["model_type"] in ("qwen3", "qwen3_moe"))
    for name, (dtype, _, values) in tensors.items():
        assert dtype == "BF16"
        assert np.isfinite(values).all(), name
        assert values.std() > 0, name
        if name.endswith("norm.weight"):
            assert abs(values.mean() - 1) < 0.05, name


def test_safetensors_reads_it(tmp_path: Path) -> None:
    safetensors_numpy = pytest.importorskip("safetensors.numpy")
    out = write("tiny-minicpm", tmp_path / "model", "--dtype", "float16")
    ours = read_tensors(out / "model.safetensors")
    theirs = safetensors_numpy.load_file(out / "model.safetensors")
    assert set(ours) == set(theirs)
    for name, (_, _, values) in ours.items():
        np.testing.assert_array_equal(values, theirs[name].astype(np.float32).ravel())


def test_same_seed_same_file(tmp_path: Path) -> None:
    first = write("tiny-llama", tmp_path / "a", "--seed", "3") / "model.safetensors"
    second = write("tiny-llama", tmp_path / "b", "--seed", "3") / "model.safetensors"
    other = write("tiny-llama", tmp_path / "c", "--seed", "4") / "model.safetensors"
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes() != other.read_bytes()


def test_fewer_layers_keep_the_first_ones(tmp_path: Path) -> None:
    # Branch scales depend on the depth except for MiniCPM, which scales in its forward pass.
    two = read_tensors(write("tiny-minicpm", tmp_path / "two") / "model.safetensors")
    out = write("tiny-minicpm", tmp_path / "one", "--num-hidden-layers", "1")
    one = read_tensors(out / "model.safetensors")
    assert set(one) < set(two)
    for name, (_, _, values) in one.items():
        np.testing.assert_array_equal(values, two[name][2])


def test_shards_and_index(tmp_path: Path) -> None:
    whole = read_tensors(write("tiny-qwen3", tmp_path / "whole") / "model.safetensors")
    out = write("tiny-qwen3", tmp_path / "parts", "--shard-size-gb", "0.002")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 1 and set(index["weight_map"].values()) == set(files)
    parts = {name: t for file in files for name, t in read_tensors(out / file).items()}
    assert set(parts) == set(whole) == set(index["weight_map"])
    for name, (_, _, values) in whole.items():
        np.testing.assert_array_equal(values, parts[name][2])
    assert index["metadata"]["total_size"] == sum(t[2].size * 2 for t in whole.values())


def test_bfloat16_rounds_to_nearest_even() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -1.005], np.float32)
    bits = round_to_bfloat16(values).astype(np.uint32) << 16
    np.testing.assert_array_equal(bits.view(np.float32), [1.0, 1.0, 1.015625, -1.0078125])


def test_refuses_to_overwrite(tmp_path: Path) -> None:
    out = write("tiny-llama", tmp_path / "model")
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(SystemExit, match="not empty"):
        write("tiny-llama", out, "--seed", "1")
    assert (out / "model.safetensors").read_bytes() == before
    write("tiny-llama", out, "--seed", "1", "--force")
    assert (out / "model.safetensors").read_bytes() != before

    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")
    with pytest.raises(SystemExit, match=r"no config\.json"):
        write("tiny-llama", tmp_path / "photos", "--force")
    (tmp_path / "link").symlink_to(out)
    write("tiny-llama", tmp_path / "link", "--seed", "2", "--force")
    assert (tmp_path / "link").is_symlink() and (out / "config.json").is_file()
    with pytest.raises(SystemExit, match="is or holds the source"):
        write("tiny-llama", out, "--tokenizer", str(out), "--force")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "model", "photos"]


def test_bad_preset_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"unknown preset 'gpt-2'.*minicpm4-8b.*tiny-llama"):
        write("gpt-2", tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--set", "hidden_size=abc"], "hidden_size is 'abc', but must be a positive integer"),
        (["--set", "hidden_size=-8"], "hidden_size is -8, but must be a positive integer"),
        (["--set", "num_attention_heads=0"], "num_attention_heads is 0, but must be"),
        (
            ["--set", "vocab_size=null", "--acceptance", "1", "--draft-out", "d"],
            "vocab_size is None",
        ),
        (["--set", "scale_emb=x"], "scale_emb is 'x', but must be a positive number"),
        (["--num-hidden-layers", "0"], "num_hidden_layers is 0, but must be"),
        (["--shard-size-gb", "-1"], "--shard-size-gb is -1.0, but must be above 0"),
        (
            ["--acceptance", "1", "--draft-out", "model"],
            "must be two folders, neither inside the other",
        ),
        (
            ["--acceptance", "1", "--draft-out", "model/draft"],
            "must be two folders, neither inside the other",
        ),
    ],
)
def test_invalid_flags_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=message):
        write("tiny-minicpm", tmp_path / "model", *flags)
    assert not list(tmp_path.iterdir())


def test_tokenizer_is_copied_by_default(tmp_path: Path) -> None:
    out = write("tiny-llama", tmp_path / "model")
    shipped = ROOT / "cpmcu" / "assets" / "tiny-python-minicpm" / "tokenizer.json"
    assert (out / "tokenizer.json").read_bytes() == shipped.read_bytes()
    out = write("tiny-llama", tmp_path / "small", "--set", "vocab_size=512")
    assert not (out / "tokenizer.json").exists()


@pytest.mark.parametrize(("common", "least", "most"), [(0, 0.3, 0.8), (2, 2.0, 2.7)])
def test_experts_that_neighbours_share(
    common: int, least: float, most: float, tmp_path: Path
) -> None:
    """Of 8 experts of a token among 128, the expected overlap of random choices is 0.5."""
    sizes = {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 8,
        "common_experts": common,
    }
    flags = [text for key, value in sizes.items() for text in ("--set", f"{key}={value}")]
    out = write("tiny-qwen3-moe", tmp_path / "model", *flags)
    config = json.loads((out / "config.json").read_text())
    tensors = read_tensors(out / "model.safetensors")
    weights = {name: values.reshape(shape) for name, (_, shape, values) in tensors.items()}
    model = NumpyModel(find_model(config).build(config, BuildOptions()), weights)
    model.logits(list(range(3, 43)))
    for experts in model.chosen:
        shared = [len({*a} & {*b}) for a, b in zip(experts.tolist(), experts[1:].tolist())]
        assert least < np.mean(shared) < most


def test_common_experts_need_their_embeddings(tmp_path: Path) -> None:
    flags = ("--set", "common_experts=1", "--acceptance", "0.8", "--draft-out", str(tmp_path / "d"))
    with pytest.raises(SystemExit, match="common_experts needs embeddings with a mean"):
        write("tiny-qwen3-moe", tmp_path / "t", *flags)


@pytest.mark.parametrize(
    ("preset", "billions"),
    [
        ("minicpm4-8b", 8.19),
        ("minicpm4-0.5b", 0.434),
        ("llama3.1-8b", 8.03),
        ("llama3.3-70b", 70.55),
        ("ministral-8b", 8.49),
        ("ministral-14b", 13.51),
        ("qwen3-8b", 8.19),
        ("qwen3-30b-a3b", 30.5),
        ("qwen2.5-7b", 7.62),
        ("gemma4-31b", 30.7),
        ("nemotron-3-nano", 31.58),
        ("nemotron-3-super", 123.6),  # 2.9 of them in the MTP head
    ],
)
def test_parameter_counts_of_real_models(preset: str, billions: float) -> None:
    row = PRESETS[preset]
    count = sum(spec.count for spec in row.tensors(row.config))
    assert count / 1e9 == pytest.approx(billions, rel=0.005)


def test_parameter_count_of_gpt_oss() -> None:
    """A byte of blocks holds two parameters; scales are none."""
    row, count = PRESETS["gpt-oss-20b"], 0
    for spec in row.tensors(row.config):
        kind = spec.name.rpartition("_")[2]
        count += spec.count * {"blocks": 2, "scales": 0}.get(kind, 1)
    assert count / 1e9 == pytest.approx(20.91, rel=0.001)


def test_longrope_has_half_a_head_of_factors() -> None:
    for preset, count in (("minicpm4-8b", 64), ("minicpm4-0.5b", 32)):
        config = PRESETS[preset].config
        scaling = config["rope_scaling"]
        assert config["hidden_size"] // config["num_attention_heads"] == 2 * count
        assert len(scaling["long_factor"]) == len(scaling["short_factor"]) == count


def test_gptq(tmp_path: Path) -> None:
    from cpmcu.loading.checkpoint import open_checkpoint
    from cpmcu.quant.packing import unpack_gptq
    from cpmcu.quant.registry import plan_quant

    for preset, module in (
        ("tiny-minicpm", "model.layers.0.mlp.down_proj"),
        ("tiny-minicpm-eagle", "fc"),
    ):
        out = write(preset, tmp_path / preset, "--quant", "gptq")
        config = json.loads((out / "config.json").read_text())
        assert config["torch_dtype"] == "float16"
        checkpoint = open_checkpoint(out)
        metas = {name: stored.meta for name, stored in checkpoint.tensors.items()}
        plan = plan_quant(config, metas)
        assert plan.scheme == "gptq" and plan.verify is not None
        plan.verify(checkpoint.read)
        q, scales = (checkpoint.read(f"{module}.{part}") for part in ("qweight", "scales"))
        assert scales.dtype == np.float16 and scales.shape == (4, 256)
        levels = unpack_gptq(q).astype(np.float32) - 8
        weights = levels * np.repeat(scales.astype(np.float32), 128, axis=0)
        dense = write(preset, tmp_path / f"{preset}-dense", "--dtype", "float16")
        expected = read_tensors(dense / "model.safetensors")[f"{module}.weight"][2].std()
        assert abs(weights.std() / expected - 1) < 0.02
        counts = np.bincount((levels + 8).astype(int).ravel(), minlength=16)
        assert counts[0] == 0 and counts[1:].min() > 0
        assert abs(levels.mean()) < 0.1
    with pytest.raises(SystemExit, match="multiples of 128"):
        write("tiny-minicpm", tmp_path / "odd", "--quant", "gptq", "--set", "intermediate_size=200")
    with pytest.raises(SystemExit, match="--draft-quant is for"):
        write("tiny-minicpm", tmp_path / "odd", "--draft-quant", "gptq")
