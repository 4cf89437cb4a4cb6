"""GGUF types that stay in their blocks: logits of the decoded twin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpmcu.loading.model_files import GgufFiles, model_files
from tests.engine.harness import DEVICES
from tests.engine.test_moe_w4 import tiny_moe
from tests.engine.test_w4 import dense, logits, tolerance
from tests.reference.engines import extension_or_skip
from tests.tolerances import assert_close
from tests.unit.test_gguf import TYPES, as_llama_cpp, gguf, metadata_of, write_gguf

extension_or_skip()

KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "NVFP4")
K_QUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
# Byte offsets of the float16 numbers in a block.
HALVES = {
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)},
    **{"IQ4_XS": (0,), "IQ4_NL": (0,)},
}


def in_blocks(weight: Any, kind: str) -> Any:
    """Rows of blocks. They are random if the gguf package can only decode the type."""
    rows = np.asarray(weight, np.float32)
    if kind not in HALVES and kind != "NVFP4":
        return gguf.quants.quantize(rows, TYPES[kind])
    n, k = rows.shape
    rng = np.random.default_rng(n + k)
    if kind in HALVES:
        values, nbytes = gguf.GGML_QUANT_SIZES[TYPES[kind]]
        made = rng.integers(0, 256, (n, k // values, nbytes), dtype=np.uint8)
        for at in HALVES[kind]:
            made[:, :, at : at + 2] = np.ones(1, "<f2").view(np.uint8)
        largest = np.abs(gguf.dequantize(made.reshape(n, -1), TYPES[kind])).max()
        for at in HALVES[kind]:
            d = rng.uniform(0.5, 1, (n, k // values, 1)) * np.abs(rows).max() / largest
            made[:, :, at : at + 2] = d.astype("<f2").view(np.uint8)
    else:
        made = rng.integers(0, 256, (n, k // 64, 36), dtype=np.uint8)
        made[:, :, :4] = rng.integers(8, 40, (n, k // 64, 4))
        made[0, 0, :2] = 0, 0x7F  # both are 0
    return made.reshape(n, -1)


def write(
    path: Path, tiny: Any, kinds: dict[str, str], *, decoded: bool, arch: str = "llama"
) -> Path:
    """`kinds`: part of a name -> type; other tensors are float32."""
    tensors: dict[str, Any] = {}
    for name, array in as_llama_cpp(tiny, arch).items():
        kind = next((kind for part, kind in kinds.items() if part in name), None)
        if kind is None or array.ndim < 2:
            tensors[name] = np.asarray(array, np.float32)
            continue
        raw = in_blocks(array.reshape(-1, array.shape[-1]), kind)
        raw = raw.reshape(*array.shape[:-1], -1)
        factor = np.array([0.125], np.float32)
        if decoded:
            values = gguf.dequantize(raw, TYPES[kind])
            tensors[name] = values * factor if kind == "NVFP4" else values
            continue
        tensors[name] = raw, TYPES[kind]
        if kind == "NVFP4":
            tensors[name.replace(".weight", ".scale")] = factor
    write_gguf(path, arch, metadata_of(tiny.config, arch), tensors)
    return path


# Names of mixtures -> types; q, k and v, or gate and up, are one matrix here.
MIXED = {
    "32": {"attn_q": "Q4_0", "attn_k": "Q5_0", "attn_v": "Q8_0", "attn_o": "IQ4_NL"},
    "K": {
        "attn_q": "Q4_K",
        "attn_k": "Q4_K",
        "attn_v": "Q6_K",
        "ffn_up": "Q5_K",
        "output.": "Q6_K",
    },
    "halves": {"attn_q": "Q4_K", "attn_k": "Q5_1", "attn_v": "Q8_0", "attn_o": "Q4_1"},
    "decoded": {"attn_q": "Q4_K", "attn_k": "Q4_K", "attn_v": "MXFP4"},
}
MIXED["32"] |= {"ffn_down": "Q8_0", "ffn": "Q4_0"}
MIXED["K"] |= {"ffn_gate": "Q3_K", "ffn_down": "IQ4_XS", "attn_output": "Q2_K", "output.": "Q6_K"}
MIXED["halves"] |= {"ffn_gate": "Q6_K", "ffn": "Q8_0", "output.": "Q4_K"}
MIXED["decoded"] |= {"ffn": "Q4_K", "output.": "Q4_K"}


@pytest.fixture
def halves_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU multiplies packed forms with halves, too."""
    monkeypatch.setattr(GgufFiles, "on_cpu", lambda files: files)


def test_forms_on_the_cpu(tmp_path: Path) -> None:
    tiny = dense(tmp_path, "llama", hidden_size=256, intermediate_size=512)
    kinds = {"attn_q": "Q4_K", "attn_": "Q8_0", "ffn_down": "Q4_1", "ffn_": "Q4_K"}
    files = model_files(write(tmp_path / "found.gguf", tiny, kinds, decoded=False))
    layer = "model.layers.0."
    modules = [layer + name for name in ("self_attn.q_proj", "mlp.down_proj", "mlp.up_proj")]
    for given, packed in ((files, [True] * 3), (files.on_cpu(), [False, False, True])):
        checkpoint = given.checkpoint()
        assert [is_packed(module, checkpoint) for module in modules] == packed
    assert np.isfinite(logits(tmp_path / "found.gguf", "cpu")).all()


def is_packed(module: str, checkpoint: Any) -> bool:
    return any(
        f"{module}.{name}" in checkpoint.tensors
        for name in ("weight_scale", "weight_records", "weight_half_records")
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [*KINDS, *K_QUANTS, *MIXED])
@pytest.mark.usefixtures("halves_on_cpu")
def test_logits(tmp_path: Path, device: str, kind: str) -> None:
    """q, k and v, or gate and up, of different types stay packed in a form that holds all."""
    wide = kind in K_QUANTS or kind in MIXED
    sizes = {"hidden_size": 256, "intermediate_size": 512} if wide else {"intermediate_size": 384}
    tiny = dense(tmp_path, "llama", tie_word_embeddings=False, vocab_size=208, **sizes)
    kinds = MIXED.get(kind, {"attn_": kind, "ffn_": kind, "output.": kind})
    found = write(tmp_path / "found.gguf", tiny, kinds, decoded=False)
    twin = write(tmp_path / "twin.gguf", tiny, kinds, decoded=True)
    checkpoint = model_files(found).checkpoint()
    layer = "model.layers.0."
    modules = [layer + "mlp.down_proj", layer + "mlp.up_proj", layer + "self_attn.q_proj"]
    assert [is_packed(module, checkpoint) for module in modules] == [True, True, kind != "decoded"]
    assert is_packed("lm_head", checkpoint) == (kind != "32")
    for name in checkpoint.tensors:
        assert name.rpartition(".")[2] != "scale"  # NVFP4's is weight_scale_2
    found_logits, twin_logits = (logits(path, device) for path in (found, twin))
    assert_close(found_logits, twin_logits, tolerance(device))


EXPERTS: dict[str, dict[str, str]] = {
    "Q4_K_M": {"gate_exps": "Q4_K", "up_exps": "Q4_K", "down_exps": "Q6_K", "attn_": "Q4_K"},
    "UD": {"gate_exps": "Q4_K", "up_exps": "Q5_K", "down_exps": "Q5_K"},
    "MXFP4_MOE": {"_exps": "MXFP4", "attn_": "Q8_0"},
    "halves": {"gate_exps": "Q5_1", "up_exps": "Q4_K", "down_exps": "Q4_1"},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.usefixtures("halves_on_cpu")
def test_experts(tmp_path: Path, device: str, kind: str) -> None:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "tie_word_embeddings": False}
    tiny = tiny_moe(tmp_path, **sizes)
    paths = [
        write(tmp_path / f"{decoded}.gguf", tiny, EXPERTS[kind], decoded=decoded, arch="qwen3moe")
        for decoded in (False, True)
    ]
    assert is_packed("model.layers.1.mlp.experts.2.down_proj", model_files(paths[0]).checkpoint())
    found, twin = (logits(path, device) for path in paths)
    assert_close(found, twin, tolerance(device))


def test_decoded_for_the_converter(tmp_path: Path) -> None:
    """The same numbers, as rows of float32 without a quantisation."""
    tiny = dense(tmp_path, "llama", intermediate_size=384)
    kinds = {"attn_": "NVFP4", "ffn_": "MXFP4"}
    files = model_files(write(tmp_path / "found.gguf", tiny, kinds, decoded=False)).decoded()
    twin = model_files(write(tmp_path / "twin.gguf", tiny, kinds, decoded=True)).checkpoint()
    assert "quantization_config" not in files.json("config.json")
    checkpoint = files.checkpoint()
    assert set(checkpoint.tensors) == set(twin.tensors)
    for name in twin.tensors:
        np.testing.assert_array_equal(checkpoint.read(name), twin.read(name))
