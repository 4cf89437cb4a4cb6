"""Quantisation schemes: recognition, dense modules, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpmcu.config import EngineConfig, SpeculativeConfig
from cpmcu.loading.checkpoint import open_checkpoint
from cpmcu.loading.index import read_json
from cpmcu.loading.loader import with_head
from cpmcu.quant.registry import LinearOptions, QuantPlan, plan_quant
from tests.reference.tiny_checkpoints import TinyCheckpoint, write_tiny
from tests.reference.tiny_w4 import LAYOUTS, SIZES, quantise, write_w4

SCHEMES = {
    "gptq": "gptq",
    "gptq_v2": "gptq",
    "awq": "awq",
    "compressed": "compressed-tensors",
    "marlin": "cpmcu-marlin",
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return write_tiny(tmp_path_factory.mktemp("dense"), "llama", **SIZES)


def plan(directory: Path) -> QuantPlan:
    checkpoint = open_checkpoint(directory)
    metas = {name: stored.meta for name, stored in checkpoint.tensors.items()}
    found = plan_quant(read_json(directory / "config.json"), metas)
    if found.verify is not None:
        found.verify(checkpoint.read)
    return found


@pytest.mark.parametrize("group_size", [128, -1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_recognised(tiny: TinyCheckpoint, tmp_path: Path, layout: str, group_size: int) -> None:
    weights = quantise(tiny.weights, group_size=group_size)
    found = plan(write_w4(tmp_path, tiny.config, weights, layout))
    assert found.scheme == SCHEMES[layout] and found.linear_method == "packed"
    assert found.linear_options == LinearOptions(
        layout="int4",
        format=layout,
        group_size=group_size,
        zero_points=layout == "awq",
        scale_dtype="float16",
        stacked=layout == "marlin",
    )
    assert found.linear_overrides == {"lm_head": "dense"}


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2", "compressed"])
def test_zero_points_are_loaded_if_present(
    tiny: TinyCheckpoint, tmp_path: Path, layout: str
) -> None:
    weights = quantise(tiny.weights, has_zeros=True, scale_dtype="bfloat16")
    options = plan(write_w4(tmp_path, tiny.config, weights, layout)).linear_options
    assert options.zero_points and options.scale_dtype == "bfloat16"


def test_gptq_without_sym_loads_zero_points(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    directory = write_w4(tmp_path, tiny.config, quantise(tiny.weights), "gptq", quant={"sym": None})
    assert plan(directory).linear_options.zero_points


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
def test_the_newer_name_of_the_format(tiny: TinyCheckpoint, tmp_path: Path, layout: str) -> None:
    weights, named = quantise(tiny.weights, has_zeros=True), {"checkpoint_format": None}
    old = write_w4(tmp_path / "old", tiny.config, weights, layout)
    new = write_w4(tmp_path / "new", tiny.config, weights, layout, quant=named | {"format": layout})
    assert plan(new).linear_options == plan(old).linear_options


def test_desc_act_has_no_effect_on_channel_wise_scales(
    tiny: TinyCheckpoint, tmp_path: Path
) -> None:
    weights = quantise(tiny.weights, group_size=-1)
    directory = write_w4(tmp_path, tiny.config, weights, "gptq", quant={"desc_act": True})
    assert plan(directory).linear_options.group_size == -1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_marlin_is_recognised_by_shapes_alone(
    tiny: TinyCheckpoint, tmp_path: Path, layout: str
) -> None:
    """CPM.cu's converter copies config.json; that of a head may have no quantization_config."""
    directory = write_w4(tmp_path, tiny.config, quantise(tiny.weights), layout)
    checkpoint = open_checkpoint(directory)
    metas = {name: stored.meta for name, stored in checkpoint.tensors.items()}
    if layout == "marlin":
        assert plan_quant(tiny.config, metas).scheme == "cpmcu-marlin"
    else:
        with pytest.raises(ValueError, match="unnamed scheme"):
            plan_quant(tiny.config, metas)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_modules_with_plain_weights_stay_dense(
    tiny: TinyCheckpoint, tmp_path: Path, layout: str
) -> None:
    kept = ("layers.0.mlp.gate_proj", "layers.0.mlp.up_proj", "layers.1.self_attn.o_proj")
    ignore = {"modules_to_not_convert": ["anything"], "ignore": ["lm_head", "re:.*layers.0.mlp.*"]}
    weights = quantise(tiny.weights, keep=kept)
    directory = write_w4(tmp_path, tiny.config, weights, layout, quant=ignore)
    assert plan(directory).linear_overrides == {
        "lm_head": "dense",
        "model.layers.0.mlp.gate_up_proj": "dense",
        "model.layers.1.self_attn.o_proj": "dense",
    }


@pytest.mark.parametrize("layout", ["gptq", "awq", "compressed"])
def test_a_fused_projection_is_quantised_as_a_whole(
    tiny: TinyCheckpoint, tmp_path: Path, layout: str
) -> None:
    weights = quantise(tiny.weights, keep=("layers.0.self_attn.k_proj",))
    directory = write_w4(tmp_path, tiny.config, weights, layout)
    with pytest.raises(ValueError, match=r"k_proj is dense and .*q_proj is quantised, expected"):
        plan(directory)


def test_a_quantised_lm_head_stays_quantised(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    big = write_tiny(tmp_path / "dense", "llama", vocab_size=208, **SIZES)
    weights = quantise(big.weights, extra=("lm_head",))
    found = plan(write_w4(tmp_path / "w4", big.config, weights, "gptq"))
    assert found.linear_overrides == {}
    with pytest.raises(ValueError, match="stores lm_head as gptq, expected 'none'"):
        with_head(found, "w8")


def transform(*locations: str) -> dict[str, Any]:
    places = [{"targets": ["Linear"], "location": location} for location in locations]
    return {"config_groups": {"R": {"type": "hadamard", "apply": places}}}


def test_transforms_of_weights_are_accepted(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    merged = {"transform_config": transform("weight_input", "weight_output")}
    assert plan(write_w4(tmp_path, tiny.config, quantise(tiny.weights), "compressed", quant=merged))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gptq", {"bits": 8}, r"scales is float16 \[2, 256\], expected \[1, 256\] .* of 8 bits"),
    ("gptq", {"bits": None}, "the weights have None bits, expected 4 or 8"),
    ("gptq", {"dynamic": [1]}, r"dynamic is \[1\], expected an object"),
    ("gptq", {"dynamic": {"+:(": {}}}, "has the rule '.*', which is no regular"),
    ("gptq", {"dynamic": {"-:.*up_proj": {}}}, "up_proj has a qweight, but the rule '-:"),
    ("gptq", {"dynamic": {".*up_proj": {"bits": 3}}}, "the weights have 3 bits, expected 4 or 8"),
    ("gptq", {"dynamic": {".*up_proj": 1}}, "of dynamic is 1, expected an object"),
    (
        "gptq",
        {"dynamic": {".*up_proj": {"sym": False}}},
        "gate_proj has 4 bits with groups of 128 and .*up_proj has 4 bits .*: they are one matrix",
    ),
    ("gptq", {"group_size": 8}, "group_size is 8, expected 16, 32, 64, 128, or -1"),
    ("gptq", {"bits": 8, "group_size": 16}, "group_size is 16, expected 32, 64, 128, or -1"),
    ("gptq", {"group_size": None}, "group_size is None, expected 16, 32, 64, 128, or -1"),
    ("gptq", {"desc_act": True}, "desc_act is true .*, expected false"),
    ("gptq", {"checkpoint_format": "bitblas"}, "checkpoint_format is 'bitblas', expected gptq"),
    ("gptq", {"checkpoint_format": None, "format": "exllama"}, "checkpoint_format is 'exllama'"),
    ("gptq", {"checkpoint_format": ["gptq"]}, "checkpoint_format is ..gptq.., expected gptq"),
    ("gptq_v2", {"bits": 3}, "the weights have 3 bits"),
    ("awq", {"bits": 8}, "the weights have 8 bits"),
    ("awq", {"group_size": 256}, "group_size is 256"),
    ("awq", {"version": "gemv"}, "version is 'gemv', expected 'gemm'"),
    ("awq", {"version": "GEMV_fast"}, "version is 'gemv_fast', expected 'gemm'"),
    ("awq", {"zero_point": False}, "zero_point is false, expected true"),
    ("compressed", {"format": "marlin-24"}, "format is 'marlin-24'"),
    ("compressed", {"config_groups": {}}, "config_groups is {}, expected a group"),
    ("compressed", {"config_groups": [1]}, r"config_groups is \[1\], expected an object"),
    ("compressed", {"sparsity_config": [1]}, r"sparsity_config is \[1\], expected an object"),
    (
        "compressed",
        {"config_groups": {"a": {"weights": [4], "format": "pack-quantized"}}},
        r"weights is \[4\], expected an object",
    ),
    ("compressed", {"sparsity_config": {"format": "sparse-24"}}, "sparsity is 'sparse-24'"),
    ("compressed", {"transform_config": transform("input")}, "has the location 'input', expected"),
    ("compressed", {"transform_config": transform("weight_input", "output")}, "location 'output'"),
    ("compressed", {"transform_config": {"config_groups": {"a": 1}}}, "has the location None"),
    ("marlin", {"bits": 8}, "the weights have 8 bits"),
    ("marlin", {"group_size": 32}, "group_size is 32"),
    ("marlin", {"desc_act": True}, "desc_act is true .*, expected false"),
    ("marlin", {"sym": False}, "sym is false, expected true of a Marlin file"),
    ("gptq", {"quant_method": "bitsandbytes", "bits": None}, "with bitsandbytes, which is not"),
    ("gptq", {"quant_method": "fp8"}, "says fp8, but no weight is float8_e4m3fn"),
    ("gptq", {"quant_method": "hqq"}, r"with hqq \(4 bits\), which is not supported"),
]
REFUSED_WEIGHTS: list[tuple[dict[str, Any], str]] = [
    ({"num_bits": 8}, r"weight_scale is float16 .*, expected \[256, 1\] .* of 8 bits"),
    ({"num_bits": 3}, "the weights have 3 bits, expected 4 or 8"),
    ({"type": "float"}, "the weights are 'float', expected 'int'"),
    ({"strategy": "tensor"}, "strategy is 'tensor', expected 'group' or 'channel'"),
    ({"group_size": 48}, "group_size is 48"),
    ({"actorder": "group"}, "actorder is 'group' .*, expected null"),
]


@pytest.mark.parametrize(("layout", "change", "message"), REFUSED)
def test_refused(
    tiny: TinyCheckpoint, tmp_path: Path, layout: str, change: dict[str, Any], message: str
) -> None:
    directory = write_w4(tmp_path, tiny.config, quantise(tiny.weights), layout, quant=change)
    with pytest.raises(ValueError, match=message) as error:
        plan(directory)
    assert "name the model's 16-bit files" in str(error.value)  # the next step


UP = "model.layers.0.mlp.up_proj"  # [256 -> 352]
FUSED = "model.layers.0.mlp.gate_up_proj"
REFUSED_VALUES: list[tuple[str, str, Any, str]] = [
    ("gptq", f"{UP}.scales", lambda a: a * np.inf, r"scales holds -?inf at \[0, 0\]"),
    ("awq", f"{UP}.scales", lambda a: a * np.nan, r"scales holds nan at \[0, 0\]"),
    (
        "compressed",
        f"{UP}.weight_scale",
        lambda a: a * np.nan,
        r"weight_scale holds -?(inf|nan) at \[0, 0\]",
    ),
    ("marlin", f"{FUSED}.scales", lambda a: a * np.nan, r"scales holds -?(inf|nan) at \[0, 0\]"),
    ("gptq", f"{UP}.g_idx", lambda a: a[::-1], "g_idx permutes the inputs"),
    ("gptq", f"{UP}.g_idx", lambda a: a[:64], r"g_idx is int32 \[64\], expected int32 \[256\]"),
    ("gptq", f"{UP}.g_idx", lambda a: a.sum(), r"g_idx is int64 \[\], expected int32 \[256\]"),
    ("gptq", f"{UP}.g_idx", lambda a: a.astype(np.float32), r"g_idx is float32 \[256\], expected"),
    (
        "gptq",
        f"{UP}.qzeros",
        lambda a: a[:1, :3],
        r"int32 \[1, 3\], expected int32 \[2, 44\]",
    ),
    ("gptq", f"{UP}.qzeros", lambda a: a.astype(np.int64), r"qzeros is int64 \[2, 44\], expected"),
    ("gptq", f"{UP}.qzeros", lambda a: a * 0, "qzeros has the zero point 1, expected 8"),
    ("marlin", f"{FUSED}.g_idx", lambda a: np.arange(256, dtype=np.int32) % 2, "g_idx permutes"),
    ("marlin", f"{FUSED}.qzeros", lambda a: np.zeros((2, 88), np.int32), "has the zero point 1"),
    ("marlin", f"{FUSED}.qzeros", lambda a: np.zeros(3, np.float32), r"qzeros is float32 \[3\]"),
]


@pytest.mark.parametrize(("layout", "name", "change", "message"), REFUSED_VALUES)
def test_refused_values(
    tiny: TinyCheckpoint, tmp_path: Path, layout: str, name: str, change: Any, message: str
) -> None:
    """Checks of tensor contents before the load."""
    weights = quantise(tiny.weights)
    good = open_checkpoint(write_w4(tmp_path / "good", tiny.config, weights, layout))
    plan(good.directory)
    array = np.asarray(change(good.read(name) if name in good.tensors else None))
    bad = write_w4(tmp_path / "bad", tiny.config, weights, layout, change={name: array})
    with pytest.raises(ValueError, match=message):
        plan(bad)


def test_version_1_that_stores_zero_points_as_version_2(
    tiny: TinyCheckpoint, tmp_path: Path
) -> None:
    weights, name = quantise(tiny.weights), f"{UP}.qzeros"
    zeros = open_checkpoint(write_w4(tmp_path / "a", tiny.config, weights, "gptq")).read(name)
    eights = np.full(zeros.shape, 0x88888888, np.uint32).view(np.int32)
    found = plan(write_w4(tmp_path / "b", tiny.config, weights, "gptq", change={name: eights}))
    assert name in found.ignored and not found.linear_options.zero_points


def test_marlin_with_redundant_tensors(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    change = {
        f"{FUSED}.g_idx": (np.arange(256) // 128).astype(np.int32),
        f"{FUSED}.qzeros": np.full((2, 88), 0x77777777, np.int32),
    }
    weights = quantise(tiny.weights)
    found = plan(write_w4(tmp_path, tiny.config, weights, "marlin", change=change))
    assert set(change) == set(found.ignored)


def group(weights: dict[str, Any], **fields: Any) -> dict[str, Any]:
    usual = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": 128,
        "actorder": None,
    }
    return {"targets": ["Linear"], "weights": usual | weights, **fields}


@pytest.mark.parametrize(("change", "message"), REFUSED_WEIGHTS)
def test_refused_compressed_weights(
    tiny: TinyCheckpoint, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    quant = {"config_groups": {"group_0": group(change)}}
    weights = quantise(tiny.weights)
    with pytest.raises(ValueError, match=message):
        plan(write_w4(tmp_path, tiny.config, weights, "compressed", quant=quant))


def test_refused_compressed_activations_and_groups(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    weights = quantise(tiny.weights)
    for groups, message in (
        ({"a": group({}, input_activations={"num_bits": 8})}, "input_activations is present"),
        ({"a": group({}, format="mxfp6-pack-quantized")}, "format is 'mxfp6-pack-quantized'"),
    ):
        quant = {"config_groups": groups}
        with pytest.raises(ValueError, match=message):
            plan(write_w4(tmp_path, tiny.config, weights, "compressed", quant=quant))
    index = {"model.layers.0.mlp.up_proj.weight_g_idx": np.zeros(256, np.int32)}
    with pytest.raises(ValueError, match="weight_g_idx"):
        plan(write_w4(tmp_path, tiny.config, weights, "compressed", change=index))


@pytest.mark.parametrize("layout", ["gptq", "awq", "compressed"])
def test_a_config_without_its_tensors(tiny: TinyCheckpoint, tmp_path: Path, layout: str) -> None:
    quant = read_json(
        write_w4(tmp_path, tiny.config, quantise(tiny.weights), layout) / "config.json"
    )
    metas = {name: stored.meta for name, stored in open_checkpoint(tiny.directory).tensors.items()}
    with pytest.raises(ValueError, match=f"says {SCHEMES[layout]}, but no tensor ends in"):
        plan_quant(quant, metas)


def test_scales_have_one_dtype(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    weights = quantise(tiny.weights)
    name = "model.layers.0.mlp.up_proj.scales"
    change = {name: np.ones((2, 352), np.float32)}
    directory = write_w4(tmp_path, tiny.config, weights, "gptq", change=change)
    with pytest.raises(
        ValueError, match="scales of integer weights are float16, float32, expected"
    ):
        plan(directory)


@pytest.mark.parametrize(
    ("layout", "renamed"),
    [
        ("gptq", {"quant_method": "gptq_marlin"}),
        ("gptq", {"quant_method": "auto_gptq"}),
        ("awq", {"quant_method": "awq_marlin"}),
        ("gptq", {"quant_method": "auto-round"}),
        ("gptq", {"quant_method": "inc", "packing_format": "auto_round:auto_gptq"}),
        ("awq", {"quant_method": "intel/auto-round", "packing_format": "auto_round:auto_awq"}),
        ("gptq", {"quant_method": "auto-round", "extra_config": {"lm_head": {"bits": 16}}}),
    ],
)
def test_names_of_tools_and_kernels(
    tiny: TinyCheckpoint, tmp_path: Path, layout: str, renamed: dict[str, Any]
) -> None:
    """Each name gives the plan of the format's own name. AutoRound's GPTQ files have no g_idx."""
    weights = quantise(tiny.weights, has_zeros=True)
    own = write_w4(tmp_path / "own", tiny.config, weights, layout)
    directory = write_w4(tmp_path / "renamed", tiny.config, weights, layout, quant=renamed)
    found, expected = plan(directory), plan(own)
    assert found.scheme == layout and found.linear_options == expected.linear_options
    assert found.linear_overrides == expected.linear_overrides


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"extra_config": {"model.x": {"bits": 8}}, "packing_format": "auto_round:auto_awq"},
            "gives model.x 8 bits, expected 4 as all",
        ),
        ({"extra_config": {".*up_proj": {"bits": 3}}}, "the weights have 3 bits, expected 4 or 8"),
        ({"packing_format": "auto_round:llm_compressor"}, "quantised with auto-round"),
    ],
)
def test_refused_files_of_autoround(
    tiny: TinyCheckpoint, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    quant = {"quant_method": "auto-round", **changes}
    directory = write_w4(tmp_path, tiny.config, quantise(tiny.weights), "gptq", quant=quant)
    with pytest.raises(ValueError, match=message):
        plan(directory)


@pytest.mark.parametrize(
    ("name", "values"), [("lm_head_quant", ("w3", "")), ("draft_head_quant", ("w3", "yes"))]
)
def test_flags_of_heads(name: str, values: tuple[str, ...]) -> None:
    config: Any = EngineConfig if name == "lm_head_quant" else SpeculativeConfig
    for value in values:
        with pytest.raises(ValueError, match=f"{name} is '{value}', but must be one of"):
            config(**{name: value})
    made = config(**{name: "w8"})
    assert (made.options[name] if name == "draft_head_quant" else getattr(made, name)) == "w8"
