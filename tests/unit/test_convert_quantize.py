"""`convert quantize`: files against GPTQ's definition, rounding, GGUF sources, refusals."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cpmcu.convert.__main__ import main
from cpmcu.loading.checkpoint import open_checkpoint
from cpmcu.shipped import shipped_model
from cpmcu.tokenizer import Tokenizer
from tests.reference.tiny_checkpoints import write_tiny
from tests.reference.tiny_gptq import write_gptq
from tests.unit.test_gguf import as_llama_cpp, metadata_of, write_gguf

torch = pytest.importorskip("torch")
from cpmcu.convert import quantize as module  # noqa: E402
from cpmcu.convert.quantize import quantize  # noqa: E402
from cpmcu.convert.quantize_options import QuantizeOptions  # noqa: E402

Array = npt.NDArray[Any]


def read(directory: Path) -> dict[str, Array]:
    checkpoint = open_checkpoint(directory)
    return {name: np.array(checkpoint.read(name)) for name in checkpoint.tensors}


def decoded(tensors: dict[str, Array], name: str) -> Array:
    """W [N, K] as AutoGPTQ defines it, number by number: scale of g_idx[k] times (q - z - 1)."""
    qweight, scales = tensors[f"{name}.qweight"], tensors[f"{name}.scales"]
    qzeros, g_idx = tensors[f"{name}.qzeros"], tensors[f"{name}.g_idx"]
    k, n = 8 * qweight.shape[0], qweight.shape[1]
    weight = np.zeros((n, k))
    for i in range(k):
        q = (qweight[i // 8].astype(np.int64) >> (4 * (i % 8))) & 15
        for j in range(n):
            zero = (int(qzeros[g_idx[i], j // 8]) >> (4 * (j % 8)) & 15) + 1
            weight[j, i] = float(scales[g_idx[i], j]) * (int(q[j]) - zero)
    return weight


def values(array: Array) -> Array:
    """Returns bfloat16 (stored as uint16) as float32, and other dtypes unchanged."""
    return (array.astype(np.uint32) << 16).view(np.float32) if array.dtype == np.uint16 else array


@pytest.mark.parametrize("group_size", [32, 128, -1])
def test_files_round_to_nearest(tmp_path: Path, group_size: int) -> None:
    """Each weight is the nearest level, or the outermost one; K = 160 ends in a short group."""
    sizes = {"hidden_size": 160, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    write_tiny(tmp_path / "in", "qwen2", dtype="bfloat16", num_attention_heads=4, **sizes)
    done = quantize(str(tmp_path / "in"), tmp_path / "out", QuantizeOptions(group_size=group_size))
    assert "7 linear layers" in done.notes[0]
    assert ("--group-size -1" in str(done.notes)) == (group_size == 128)
    before, after = read(tmp_path / "in"), read(tmp_path / "out")
    for name, weight in before.items():
        part = name.removesuffix(".weight")
        if not part.endswith("_proj") or name == part:
            assert np.array_equal(after[name], weight), name
            continue
        k = weight.shape[1]
        group = k if group_size == -1 else group_size
        assert after[f"{part}.g_idx"].tolist() == [i // group for i in range(k)]
        scales = after[f"{part}.scales"].astype(np.float64)[after[f"{part}.g_idx"]].T
        found, exact = decoded(after, part), values(weight)
        inside = (found > -8 * scales) & (found < 7 * scales)
        assert (np.abs(found - exact)[inside] <= scales[inside] / 2 * (1 + 1e-6)).all()
        assert inside.mean() > 0.8
        assert ((found - exact) ** 2).mean() < 0.02 * (exact**2).mean()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"] == {
        "bits": 4,
        "checkpoint_format": "gptq",
        "desc_act": False,
        "group_size": group_size,
        "lm_head": False,
        "quant_method": "gptq",
        "static_groups": True,
        "sym": True,
    }


def test_errors_on_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command with every flag, on a small model with the shipped model's tokenizer."""
    sizes = {"vocab_size": 4096, "num_hidden_layers": 2}
    weights = dict(write_tiny(tmp_path / "flat", "llama", **sizes).weights)
    weights["lm_head.weight"] = weights["lm_head.weight"] * 20  # likely and unlikely tokens
    write_tiny(tmp_path / "in", "llama", weights=weights, **sizes)
    shutil.copy(shipped_model() / "tokenizer.json", tmp_path / "in")
    text = tmp_path / "text.txt"
    text.write_text((Path(__file__).parent / "test_convert_output.py").read_text("utf-8"))
    calibrated = ["--group-size", "-1", "--verify", "--calibration", str(text)]
    calibrated += ["--calibration-tokens", "1500"]
    errors = {}
    for name, own in {
        "rtn": ["--method", "rtn", *calibrated],
        "gptq": ["--method", "gptq", *calibrated],
        "nvfp4": ["--format", "nvfp4", "--verify", str(text)],
        "mxfp4": ["--format", "mxfp4", "--verify", str(text)],
    }.items():
        flags = [*own, "--device", "cpu", "--plain-output"]
        status = main(["quantize", str(tmp_path / "in"), str(tmp_path / name), *flags])
        shown = capsys.readouterr().err
        assert status == 0, shown
        assert "time left" in shown and "perplexity" in shown
        errors[name] = float(shown.partition("KL divergence ")[2].split()[0])
    assert 0 < errors["gptq"] < errors["rtn"]
    assert 0 < errors["nvfp4"] < errors["mxfp4"]


def test_a_gguf_file_becomes_a_directory(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    sizes = {"num_hidden_layers": 2, "vocab_size": 300, "tie_word_embeddings": True}
    tiny = write_tiny(tmp_path / "hf", "llama", **sizes)
    tokens = [chr(33 + i) for i in range(94)] + ["ab"] + [f"<{i}>" for i in range(205)]
    metadata = metadata_of(tiny.config, "llama") | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 95 + [3] * 205,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }
    tensors: dict[str, Any] = as_llama_cpp(tiny, "llama")
    kind = gguf.GGMLQuantizationType.Q8_0
    name = "blk.0.ffn_up.weight"
    tensors[name] = (gguf.quantize(tensors[name], kind), kind)
    write_gguf(tmp_path / "model.gguf", "llama", metadata, tensors)
    done = quantize(str(tmp_path / "model.gguf"), tmp_path / "out", QuantizeOptions(group_size=-1))
    assert "14 linear layers" in done.notes[0]
    after = read(tmp_path / "out")
    assert {array.dtype.name for array in after.values()} == {"uint16", "int32", "float16"}
    for module_name in ("model.layers.1.self_attn.q_proj", "model.layers.0.mlp.up_proj"):
        exact = tiny.weights[f"{module_name}.weight"]
        error = ((decoded(after, module_name) - exact) ** 2).mean() / (exact**2).mean()
        assert error < 0.02
    before, copy = (
        Tokenizer.from_directory(path) for path in (tmp_path / "model.gguf", tmp_path / "out")
    )
    assert copy.encode("abcab<7>!") == before.encode("abcab<7>!")
    stated = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert stated["chat_template"] == "{{ messages[0].content }}"


def test_the_gram_matrix_is_that_of_all_rows() -> None:
    parts = [torch.randn(2, 5, 7), torch.randn(1, 5, 7)]
    rows = torch.cat([part.reshape(-1, 7) for part in parts]).double()
    assert (module._gram(parts) - rows.T @ rows).abs().max() < 1e-5


def test_windows_of_the_text() -> None:
    windows = module._windows(list(range(5 * module.WINDOW + 3)))
    assert [part.shape[0] for part in windows] == [4, 1]
    assert torch.cat(windows).flatten().tolist() == list(range(5 * module.WINDOW))
    assert [part.tolist() for part in module._windows([4, 5, 6])] == [[[4, 5, 6]]]


# ---- refusals


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--bits", "3"], "--bits is 3, expected 4 or 8"),
        (["--group-size", "16"], "--group-size is 16, expected 32, 64, 128, or -1 for whole rows"),
        (["--method", "gptq"], r"--method is 'gptq', expected a calibration text"),
        (["--verify"], "--verify is set without a text"),
        (["--calibration-tokens", "0"], "--calibration-tokens is 0, expected at least 1"),
    ],
)
def test_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["quantize", "tiny-python-minicpm", str(tmp_path / "out"), *flags])
    assert stopped.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_wrong_flags_are_found_before_torch_is_imported() -> None:
    code = (
        "import sys\n"
        "from cpmcu.convert.__main__ import main\n"
        "try:\n    main(['quantize', 'a', 'b', '--bits', '3'])\n"
        "except SystemExit as stopped:\n"
        "    sys.exit(stopped.code + 10 * len({'torch', 'numpy'} & {*sys.modules}))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quantize"], "MODEL is missing (or --src)"),
        (["quantize", "a"], "OUT is missing (or --dst)"),
        (["quantize", "--src", "a", "--dst", "b", "c"], "unexpected argument 'c'"),
        (["gptq-to-marlin", "a", "b", "--method", "rtn"], "--method applies to quantize"),
    ],
)
def test_usage(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def refused(source: Path, **options: Any) -> str:
    with pytest.raises(ValueError) as error:
        quantize(str(source), source.parent / "out", QuantizeOptions(**options))
    assert not (source.parent / "out").exists()
    return str(error.value)


def test_a_quantised_source(tmp_path: Path) -> None:
    write_gptq(tmp_path / "in")
    assert "is quantised with gptq (4 bits) already" in refused(tmp_path / "in")


def test_gptq_of_experts(tmp_path: Path) -> None:
    write_tiny(tmp_path / "in", "qwen3moe")
    text = tmp_path / "text.txt"
    text.write_text("a text")
    message = refused(tmp_path / "in", method="gptq", calibration=text)
    assert "layers of moe" in message and "method 'rtn'" in message


def test_experts_that_are_one_tensor(tmp_path: Path) -> None:
    write_tiny(tmp_path / "in", "gptoss")
    message = refused(tmp_path / "in", group_size=32)
    assert "mlp.experts." in message and "experts are stored together" in message


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path / "first", "llama")
    weights = dict(tiny.weights)
    weights["model.layers.0.mlp.up_proj.weight"] = np.full((96, 64), np.nan, np.float32)
    write_tiny(tmp_path / "in", "llama", weights=weights)
    assert "up_proj.weight holds numbers that are not finite" in refused(
        tmp_path / "in", group_size=-1
    )


def test_mistakes_are_found_before_the_rounding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rounding may take hours, after which a wrong text or a full disk would lose its result."""

    def rounding(*_: Any) -> None:
        raise AssertionError("the rounding began")

    monkeypatch.setattr(module, "_to_nearest", rounding)
    command = ["quantize", str(shipped_model()), str(tmp_path / "out"), "--device", "cpu"]
    assert main([*command, "--verify", str(tmp_path / "none.txt")]) == 1
    assert "none.txt: is missing, expected a file" in capsys.readouterr().err
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**5))
    assert main(command) == 1
    assert "has 0.1 MB free, expected at least" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_texts(tmp_path: Path) -> None:
    for content, message in ((b"\xff\xfe\xff", "is not UTF-8"), (b"", "expected a text of")):
        (tmp_path / "text.txt").write_bytes(content)
        with pytest.raises(ValueError, match=message):
            module.read_text(shipped_model(), tmp_path / "text.txt", 10)
    with pytest.raises(FileNotFoundError, match="is missing"):
        module.read_text(shipped_model(), tmp_path / "missing.txt", 10)
    with pytest.raises(ValueError, match="is a device or pipe, expected a file"):
        module.read_text(shipped_model(), Path("/dev/zero"), 10)
    (tmp_path / "text.txt").write_text("a b c d e f g h")
    assert len(module.read_text(shipped_model(), tmp_path / "text.txt", 3)) == 3
