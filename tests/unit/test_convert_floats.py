"""`convert quantize --format nvfp4, mxfp4`: files against the formats' definitions."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cpmcu.convert.__main__ import main
from cpmcu.loading.checkpoint import open_checkpoint
from tests.reference.tiny_checkpoints import write_tiny

torch = pytest.importorskip("torch")
from cpmcu.convert.quantize import quantize  # noqa: E402
from cpmcu.convert.quantize_options import QuantizeOptions  # noqa: E402
from tests.engine.test_w4 import logits, tolerance  # noqa: E402
from tests.reference.engines import extension_or_skip  # noqa: E402
from tests.reference.float_groups import E2M1, E4M3, dequantise  # noqa: E402
from tests.tolerances import assert_close  # noqa: E402

Array = npt.NDArray[Any]
FORMS = ("nvfp4", "mxfp4")
SIZES = {"hidden_size": 160, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}


def read(directory: Path) -> dict[str, Array]:
    checkpoint = open_checkpoint(directory)
    return {name: np.array(checkpoint.read(name)) for name in checkpoint.tensors}


def nearest(ratio: float) -> int:
    """The code of the nearest number; of two, the even one."""
    distances = [(abs(ratio - float(E2M1[c])), c % 2, c) for c in range(8)]
    return min(distances)[2]


def expected_scales(form: str, weight: Array, largest: float) -> tuple[Array, float]:
    """Computes the scales group by group, as the table of cpmcu/convert/float_rounding.py says."""
    group = 16 if form == "nvfp4" else 32
    peaks = np.abs(weight).reshape(len(weight), -1, group).max(2)
    if form == "mxfp4":
        made = np.zeros(peaks.shape, np.uint8)
        for at, peak in np.ndenumerate(peaks):
            if peak > 0:
                fraction, exponent = math.frexp(float(peak))  # peak = 2 fraction * 2^(exponent - 1)
                made[at] = 127 + exponent - 1 + (2 * fraction >= 1.75) - 2
        return made, 1.0
    factor = np.float32(6 * 448) * (np.float32(1) / np.float32(largest))
    numbers = torch.from_numpy(factor * (peaks.astype(np.float32) / np.float32(6)))
    stored = numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return np.where(stored == 0, 0x20, stored), float(factor)


@pytest.mark.parametrize("form", FORMS)
def test_files_round_to_nearest(tmp_path: Path, form: str) -> None:
    tiny = write_tiny(tmp_path / "in", "qwen2", num_attention_heads=4, **SIZES)
    weights = dict(tiny.weights)
    weights["model.layers.0.self_attn.k_proj.weight"][:, :32] = 0  # a group of zeros
    write_tiny(tmp_path / "in", "qwen2", weights=weights, num_attention_heads=4, **SIZES)
    done = quantize(str(tmp_path / "in"), tmp_path / "out", QuantizeOptions(format=form))
    assert f"14 linear layers have {form.upper()}" in done.notes[0] and len(done.notes) == 1
    before, after = read(tmp_path / "in"), read(tmp_path / "out")
    for name, weight in before.items():
        part = name.removesuffix(".weight")
        if not part.endswith("_proj") or name == part:
            assert np.array_equal(after[name], weight), name
            continue
        prefix, _, leaf = part.rpartition(".")
        stacks = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
        shared = next((stack for stack in stacks if leaf in stack), (leaf,))
        matrices = [before[f"{prefix}.{other}.weight"] for other in shared]
        largest = max(float(np.abs(each).max()) for each in matrices)
        scales, factor = expected_scales(form, weight, largest)
        assert np.array_equal(after[f"{part}.weight_scale"], scales), name
        if form == "nvfp4":
            assert after[f"{part}.weight_global_scale"] == [np.float32(factor)]
        packed = after[f"{part}.weight_packed"]
        codes = np.stack([packed & 15, packed >> 4], -1).reshape(weight.shape)
        wide = E4M3[scales] / factor if form == "nvfp4" else 2.0 ** (scales.astype(int) - 127)
        ratios = weight / wide.repeat(16 if form == "nvfp4" else 32, 1)
        for i in range(0, len(weight), 7):
            for k, ratio in enumerate(ratios[i]):
                size = abs(float(ratio))
                assert codes[i, k] & 7 == nearest(size) or abs(size % 0.25) < 1e-4
                assert (codes[i, k] >> 3) == (weight[i, k] < 0)
        found = dequantise(form, packed, scales, 1 / factor)
        assert ((found - weight) ** 2).mean() < 0.03 * (weight.astype(np.float64) ** 2).mean()


@pytest.mark.parametrize("form", FORMS)
def test_the_output_runs(tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The command; its output has the logits of its dequantised twin."""
    extension_or_skip()
    tiny = write_tiny(tmp_path / "in", "llama", dtype="float32")
    flags = ["--format", form, "--device", "cpu", "--plain-output"]
    assert main(["quantize", str(tmp_path / "in"), str(tmp_path / "out"), *flags]) == 0
    capsys.readouterr()
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["format"] == f"{form}-pack-quantized" and "lm_head" in config["ignore"]
    after, weights = read(tmp_path / "out"), dict(tiny.weights)
    for name in weights:
        part = name.removesuffix(".weight")
        if f"{part}.weight_packed" in after:
            factor = after.get(f"{part}.weight_global_scale", np.ones(1))
            packed, scales = after[f"{part}.weight_packed"], after[f"{part}.weight_scale"]
            exact = dequantise(form, packed, scales, 1 / float(factor[0]))
            weights[name] = exact.astype(np.float32)
    twin = write_tiny(tmp_path / "twin", "llama", dtype="float32", weights=weights)
    assert_close(logits(tmp_path / "out", "cpu"), logits(twin.directory, "cpu"), tolerance("cpu"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--format", "nvfp4", "--bits", "8"], "--format is 'nvfp4', which has its own bits"),
        (["--format", "mxfp4", "--group-size", "32"], "is rounded to nearest, expected no other"),
        (["--format", "int4"], "invalid choice"),
    ],
)
def test_flags_that_do_not_fit(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["quantize", "a", "b", *flags])
    assert message in capsys.readouterr().err


def test_inputs_that_no_group_divides(tmp_path: Path) -> None:
    write_tiny(tmp_path / "in", "llama", intermediate_size=72)
    with pytest.raises(ValueError, match="expected multiples of 8 and 16 of nvfp4; --format gptq"):
        quantize(str(tmp_path / "in"), tmp_path / "out", QuantizeOptions(format="nvfp4"))
    assert not (tmp_path / "out").exists()
