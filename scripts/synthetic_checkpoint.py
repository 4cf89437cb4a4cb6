"""Write a checkpoint of true shapes with seeded random weights, for benchmarks and tests.

    python scripts/synthetic_checkpoint.py --preset minicpm4-8b --out DIR

The result is an ordinary Hugging Face directory: config.json, generation_config.json,
model.safetensors (or shards with an index), and a tokenizer. Weights are normal, never zero, and
scaled so that activations stay finite: matrices have a standard deviation of 1/sqrt(fan_in),
those that end a residual branch are smaller, norm weights are near 1. The numbers of a tensor
depend on the seed, its name and the device alone, so two runs on one kind of device write equal
files, and a model with fewer layers has the same first layers.

Tensors are made one at a time, with torch on a GPU where there is one and with numpy otherwise,
and stream to disk: an 8B model never lies in memory as a whole.

Presets whose names end in -eagle or -eagle3 are draft heads; beside their weights lies
token_counts.npy, counts of tokens as of natural text, from which FR-Spec takes the most frequent.

    python scripts/synthetic_checkpoint.py --preset minicpm4-8b --planted 0.8 \\
        --out DIR --draft-out DIR2

writes a target and a draft of it whose acceptance is known (see "planted pairs" below).

--quant gptq, and --draft-quant gptq for a planted draft, store the layers' projections (and a
head's fc) in 4 bits with groups of 128: random bits, and scales that give them the same spread.

To add a model, add a row to PRESETS. To add another kind of tensor, write a Fill.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also works from a source tree

from cpmcu.convert.output import check_destination, new_directory

Config = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_TOKENIZER = ROOT / "cpmcu" / "assets" / "tiny-python-minicpm"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
ITEM_SIZE = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I64": 8, "BOOL": 1}
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "draft_vocab_size"),
)
SCALES = ("scale_emb", "scale_depth", "dim_model_base")
CHUNK = 1 << 24  # elements made at a time


# ---- sources of numbers


class Source(Protocol):
    """Makes the bytes of one tensor, in chunks, from a seed."""

    def normal(self, seed: int, count: int, mean: float, std: float, dtype: str) -> Iterator: ...

    # Row i is `scale` times number index[i] of the `count` unit vectors that the seed makes.
    def vectors(
        self, seed: int, count: int, index: np.ndarray, columns: int, scale: float, dtype: str
    ) -> Iterator: ...

    # Eight q each: two numbers from 0 to 7, and 1. Their mean is 8, so that weights have mean 0; a
    # bias that all rows share would grow from layer to layer.
    def words(self, seed: int, count: int) -> Iterator: ...


class NumpySource:
    name = "numpy"

    def normal(
        self, seed: int, count: int, mean: float, std: float, dtype: str
    ) -> Iterator[np.ndarray]:
        rng = np.random.default_rng(seed)
        for begin in range(0, count, CHUNK):
            values = rng.standard_normal(min(CHUNK, count - begin), dtype=np.float32)
            values *= np.float32(std)
            values += np.float32(mean)
            yield encode(values, dtype)

    def vectors(
        self, seed: int, count: int, index: np.ndarray, columns: int, scale: float, dtype: str
    ) -> Iterator[np.ndarray]:
        rng = np.random.default_rng(seed)
        table = rng.standard_normal((count, columns), dtype=np.float32)
        table *= np.float32(scale) / np.linalg.norm(table, axis=1, keepdims=True)
        for begin in range(0, index.size, step := max(1, CHUNK // columns)):
            yield encode(table[index[begin : begin + step]].ravel(), dtype)

    def words(self, seed: int, count: int) -> Iterator[np.ndarray]:
        rng = np.random.default_rng(seed)
        for begin in range(0, count, CHUNK):
            first, second = (
                rng.integers(0, 1 << 32, min(CHUNK, count - begin), dtype=np.uint32)
                for _ in range(2)
            )
            yield (first & 0x77777777) + (second & 0x77777777) + np.uint32(0x11111111)


class TorchSource:
    """The same on a GPU. Its numbers differ from numpy's."""

    def __init__(self, device: str) -> None:
        import torch  # optional: only GPU machines need it here

        self.torch = torch
        self.device = torch.device(device)
        self.name = torch.cuda.get_device_name(self.device)
        self.host: Any = None  # one pinned staging buffer, made for the largest chunk

    def normal(
        self, seed: int, count: int, mean: float, std: float, dtype: str
    ) -> Iterator[memoryview]:
        torch = self.torch
        kind = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[dtype]
        generator = torch.Generator(self.device).manual_seed(seed)
        for begin in range(0, count, CHUNK):
            size = min(CHUNK, count - begin)
            values = torch.empty(size, dtype=torch.float32, device=self.device)
            values.normal_(mean, std, generator=generator)
            yield self.staged(values.to(kind))

    def vectors(
        self, seed: int, count: int, index: np.ndarray, columns: int, scale: float, dtype: str
    ) -> Iterator[memoryview]:
        torch = self.torch
        kind = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[dtype]
        generator = torch.Generator(self.device).manual_seed(seed)
        table = torch.empty((count, columns), dtype=torch.float32, device=self.device)
        table.normal_(generator=generator)
        table *= scale / table.norm(dim=1, keepdim=True)
        rows = torch.from_numpy(index).to(self.device)
        for begin in range(0, index.size, step := max(1, CHUNK // columns)):
            yield self.staged(table[rows[begin : begin + step]].to(kind).flatten())

    def words(self, seed: int, count: int) -> Iterator[memoryview]:
        torch = self.torch
        generator = torch.Generator(self.device).manual_seed(seed)
        for begin in range(0, count, CHUNK):
            values = torch.empty(
                (2, min(CHUNK, count - begin)), dtype=torch.int32, device=self.device
            )
            values.random_(generator=generator)
            yield self.staged((values & 0x77777777).sum(0, dtype=torch.int32) + 0x11111111)

    def staged(self, values: Any) -> memoryview:
        """The bytes of a tensor on the GPU; valid until the next call."""
        data = values.view(self.torch.uint8)
        if self.host is None:
            self.host = self.torch.empty(CHUNK * 4, dtype=self.torch.uint8, pin_memory=True)
        self.host[: data.numel()].copy_(data)
        return memoryview(self.host.numpy())[: data.numel()]


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """fp32 values as they are stored."""
    if dtype == "BF16":
        return round_to_bfloat16(values)
    return values.astype(np.float16) if dtype == "F16" else values


def round_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """The upper 16 bits of finite fp32 values, rounded to nearest even, as uint16."""
    bits = values.view(np.uint32)
    return ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)


def make_source(device: str) -> Source:
    """`device` is auto, cpu, or a torch device such as cuda:0."""
    if device == "cpu":
        return NumpySource()
    try:
        import torch
    except ImportError:
        if device != "auto":
            raise SystemExit(f"--device {device} needs torch, which is not installed") from None
        return NumpySource()
    if device == "auto":
        return TorchSource("cuda") if torch.cuda.is_available() else NumpySource()
    return TorchSource(device)


# ---- tensors

Fill = Callable[[Source, int, int, str], Iterable]  # source, seed, count, dtype -> chunks


def normal(std: float, mean: float = 0.0) -> Fill:
    def fill(source: Source, seed: int, count: int, dtype: str) -> Iterable:
        return source.normal(seed, count, mean, std, dtype)

    return fill


def stored(values: np.ndarray) -> Fill:
    """Exactly these values, whose type is the file's."""

    def fill(source: Source, seed: int, count: int, dtype: str) -> Iterable:
        yield np.ascontiguousarray(values).reshape(-1)

    return fill


def vectors(seed: int, index: np.ndarray, config: Config, scale: float) -> Fill:
    """Row i is `scale` times number index[i] of a table of unit vectors, one for each token."""
    size, columns, table = config["vocab_size"], config["hidden_size"], tensor_seed(seed, "planted")

    def fill(source: Source, seed: int, count: int, dtype: str) -> Iterable:
        return source.vectors(table, size, index, columns, scale, dtype)

    return fill


@dataclass(frozen=True, slots=True)
class TensorSpec:
    name: str
    shape: tuple[int, ...]
    fill: Fill
    dtype: str | None = None  # None: the run's dtype
    std: float = 0.0  # of a matrix that can be quantised; 0: it cannot

    @property
    def count(self) -> int:
        return math.prod(self.shape)


def matrix(name: str, rows: int, columns: int, gain: float = 1.0) -> TensorSpec:
    """y = x W^T with W [rows, columns] keeps the size of x times `gain`."""
    std = gain / math.sqrt(columns)
    return TensorSpec(name, (rows, columns), normal(std), std=std)


def norm(name: str, size: int) -> TensorSpec:
    return TensorSpec(name, (size,), normal(0.05, mean=1.0))


def attention_tensors(
    config: Config, prefix: str, columns: int, branch: float
) -> Iterator[TensorSpec]:
    """Projections of attention over inputs of `columns`."""
    hidden, kind = config["hidden_size"], config["model_type"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        yield matrix(f"{prefix}{name}_proj.weight", rows * head_dim, columns)
        if kind == "qwen2":
            yield TensorSpec(f"{prefix}{name}_proj.bias", (rows * head_dim,), normal(0.1))
    if kind == "qwen3":
        yield norm(f"{prefix}q_norm.weight", head_dim)
        yield norm(f"{prefix}k_norm.weight", head_dim)
    yield matrix(f"{prefix}o_proj.weight", hidden, heads * head_dim, branch)


def mlp_tensors(config: Config, prefix: str, branch: float) -> Iterator[TensorSpec]:
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    yield matrix(f"{prefix}gate_proj.weight", intermediate, hidden)
    yield matrix(f"{prefix}up_proj.weight", intermediate, hidden)
    yield matrix(f"{prefix}down_proj.weight", hidden, intermediate, branch)


def decoder_tensors(config: Config) -> Iterator[TensorSpec]:
    """The tensors of a dense Llama, MiniCPM, Qwen2 or Qwen3 model, in forward order."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    layers = config["num_hidden_layers"]
    scale_emb = config.get("scale_emb", 1.0)
    tied = config["tie_word_embeddings"]
    # A tied table is also the head: without a scale on its input it must be small.
    small = tied and "dim_model_base" not in config
    embed_std = 2 / math.sqrt(hidden) if small else 1 / scale_emb
    yield TensorSpec("model.embed_tokens.weight", (vocab, hidden), normal(embed_std))

    # MiniCPM scales residual branches by itself; elsewhere the weights must.
    branch = 0.5 if "scale_depth" in config else 1 / math.sqrt(2 * layers)
    for index in range(layers):
        prefix = f"model.layers.{index}."
        yield norm(f"{prefix}input_layernorm.weight", hidden)
        yield from attention_tensors(config, f"{prefix}self_attn.", hidden, branch)
        yield norm(f"{prefix}post_attention_layernorm.weight", hidden)
        yield from mlp_tensors(config, f"{prefix}mlp.", branch)
    yield norm("model.norm.weight", hidden)
    if not tied:
        # The scale on the head's input is undone, so that logits have a spread of about 2.
        head_scale = config.get("dim_model_base", hidden) / hidden
        yield matrix("lm_head.weight", vocab, hidden, 2 / head_scale)


def eagle_tensors(config: Config) -> Iterator[TensorSpec]:
    """An EAGLE head: the original layout, or with its three more norms that of MiniCPM4.

    Real files also hold the target's embedding table, which nobody reads.
    """
    hidden, minicpm4 = config["hidden_size"], config["model_type"] == "minicpm"
    if minicpm4:
        yield norm("input_norm1.weight", hidden)
        yield norm("input_norm2.weight", hidden)
    yield matrix("fc.weight", hidden, 2 * hidden)
    for index in range(config["num_hidden_layers"]):
        prefix = f"layers.{index}."
        if minicpm4 or index > 0:
            yield norm(f"{prefix}input_layernorm.weight", hidden)
        yield from attention_tensors(config, f"{prefix}self_attn.", hidden, 0.5)
        yield norm(f"{prefix}post_attention_layernorm.weight", hidden)
        yield from mlp_tensors(config, f"{prefix}mlp.", 0.5)


def eagle3_tensors(config: Config) -> Iterator[TensorSpec]:
    """An EAGLE-3 head, which drafts the most frequent tokens of `token_counts`."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    drafted = np.sort(most_frequent(config, config["draft_vocab_size"]))
    yield from draft_vocabulary(drafted, vocab)
    yield matrix("fc.weight", hidden, 3 * hidden)
    for name in ("hidden_norm", "input_layernorm"):
        yield norm(f"midlayer.{name}.weight", hidden)
    yield from attention_tensors(config, "midlayer.self_attn.", 2 * hidden, 0.5)
    yield norm("midlayer.post_attention_layernorm.weight", hidden)
    yield from mlp_tensors(config, "midlayer.mlp.", 0.5)
    yield norm("norm.weight", hidden)
    yield matrix("lm_head.weight", drafted.size, hidden, 2)


def draft_vocabulary(drafted: np.ndarray, vocab: int) -> Iterator[TensorSpec]:
    """d2t [Vd], with which target id = draft id + d2t[draft id], and t2d [V], who is drafted."""
    offsets = drafted.astype(np.int64) - np.arange(drafted.size)
    yield TensorSpec("d2t", (drafted.size,), stored(offsets), "I64")
    yield TensorSpec("t2d", (vocab,), stored(np.isin(np.arange(vocab), drafted)), "BOOL")


def token_counts(vocab: int) -> np.ndarray:
    """How often each token occurs, by Zipf's law, frequent and rare ids mixed."""
    ranks = np.random.default_rng(tensor_seed(0, "token_counts")).permutation(vocab)
    return (10**9 // (ranks + 1)).astype(np.int64)


def most_frequent(config: Config, count: int) -> np.ndarray:
    """The most frequent tokens, the special ones left out."""
    counts = token_counts(config["vocab_size"])
    counts[sorted(special_ids(config))] = -1
    return np.argsort(-counts, kind="stable")[:count]


def special_ids(config: Config) -> set[int]:
    """The ids that begin, end and fill."""
    found: set[int] = set()
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids = config.get(key)
        found.update([ids] if isinstance(ids, int) else ids or ())
    return {i for i in found if i < config["vocab_size"]}


# ---- 4-bit weights as GPTQ stores them

GROUP_SIZE = 128
LEVELS_STD = math.sqrt(10.5)  # of q - 8, see Source.words
QUANTIZATION_CONFIG: Config = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": GROUP_SIZE,
    "desc_act": False,
    "static_groups": True,
    "sym": True,
    "lm_head": False,
    "checkpoint_format": "gptq",
}


def quantised(specs: Iterable[TensorSpec]) -> Iterator[TensorSpec]:
    """The same model with projections and fc in 4 bits; everything else as it is."""
    for spec in specs:
        module = spec.name.removesuffix(".weight")
        if not module.endswith(("_proj", "fc")) or module == spec.name:
            yield spec
            continue
        if spec.std == 0:
            raise SystemExit(f"{spec.name} has no 4-bit form")
        yield from gptq_tensors(module, *spec.shape, words(), spec.std / LEVELS_STD)


def gptq_tensors(
    module: str, rows: int, columns: int, q: Fill, scale: float, scales: Fill | None = None
) -> Iterator[TensorSpec]:
    """A layer [columns -> rows]: w = (q - 8) * scale."""
    if columns % GROUP_SIZE or rows % 8:
        raise SystemExit(
            f"{module} is [{columns} -> {rows}], but 4-bit weights need multiples of {GROUP_SIZE} "
            "and 8"
        )
    groups = columns // GROUP_SIZE
    zeros = np.full(groups * rows // 8, 0x77777777, np.int32)  # z - 1
    order = np.arange(columns, dtype=np.int32) // GROUP_SIZE
    scales = scales or normal(0.05 * scale, mean=scale)
    yield TensorSpec(f"{module}.qweight", (columns // 8, rows), q, "I32")
    yield TensorSpec(f"{module}.qzeros", (groups, rows // 8), stored(zeros), "I32")
    yield TensorSpec(f"{module}.scales", (groups, rows), scales, "F16")
    yield TensorSpec(f"{module}.g_idx", (columns,), stored(order), "I32")


def words() -> Fill:
    def fill(source: Source, seed: int, count: int, dtype: str) -> Iterable:
        return source.words(seed, count)

    return fill


# ---- presets


@dataclass(frozen=True, slots=True)
class Preset:
    """One row: what the checkpoint is, and the function that lists its tensors."""

    config: Config
    generation: Config
    tensors: Callable[[Config], Iterable[TensorSpec]] = decoder_tensors
    files: dict[str, bytes] = field(default_factory=dict)  # written beside the weights as they are
    draft: bool = False  # token_counts.npy beside it, no tokenizer, no generation_config.json


# LongRoPE factors published with MiniCPM4, head_dim 128 and 64; long and short are equal.
LONGROPE_128 = [
    *(0.9977997200264581, 1.014658295992452, 1.0349680404997148, 1.059429246056193),
    *(1.0888815016813513, 1.1243301355211495, 1.166977103606075, 1.2182568066927284),
    *(1.2798772354275727, 1.3538666751582975, 1.4426259039919596, 1.5489853358570191),
    *(1.6762658237220625, 1.8283407612492941, 2.0096956085876183, 2.225478927469756),
    *(2.481536379650452, 2.784415934557119, 3.1413289096347365, 3.560047844772632),
    *(4.048719380066383, 4.752651957515948, 5.590913044973868, 6.584005926629993),
    *(7.7532214876576155, 9.119754865903639, 10.704443927019176, 12.524994176518703),
    *(14.59739595363613, 16.93214476166354, 19.53823297353041, 22.417131025031697),
    *(25.568260840911098, 28.991144156566317, 32.68408069090375, 36.65174474170465),
    *(40.90396065611201, 45.4664008671033, 50.37147343433591, 55.6804490772103),
    *(61.470816952306556, 67.8622707390618, 75.00516023410414, 83.11898235973767),
    *(92.50044360202462, 103.57086856690864, 116.9492274587385, 118.16074567836519),
    *(119.18497548708795, 120.04810876261652, 120.77352815196981, 121.38182790207875),
    *(121.89094985353891, 122.31638758099915, 122.6714244963338, 122.9673822552567),
    *(123.21386397019609, 123.41898278254268, 123.58957065488238, 123.73136519024158),
    *(123.84917421274221, 123.94701903496814, 124.02825801299717, 124.09569231686116),
]
LONGROPE_64 = [
    *(1.0004360675811768, 1.0668443441390991, 1.1631425619125366, 1.3025742769241333),
    *(1.5040205717086792, 1.7941505908966064, 2.2101221084594727, 2.802666664123535),
    *(3.6389970779418945, 4.804192543029785, 6.39855432510376, 8.527148246765137),
    *(11.277542114257812, 14.684998512268066, 18.69317054748535, 23.13019371032715),
    *(27.72362518310547, 32.1606559753418, 36.168827056884766, 39.57627868652344),
    *(42.32667541503906, 44.45526885986328, 46.04962921142578, 47.21482849121094),
    *(48.05115509033203, 48.64370346069336, 49.05967712402344, 49.34980392456055),
    *(49.551246643066406, 49.69068145751953, 49.78697967529297, 49.85338592529297),
]


def longrope(factors: list[float], original: int) -> Config:
    return {
        "rope_type": "longrope",
        "long_factor": factors,
        "short_factor": factors,
        "original_max_position_embeddings": original,
    }


def minicpm(**keys: Any) -> Config:
    return {
        "architectures": ["MiniCPMForCausalLM"],
        "model_type": "minicpm",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": [2, 73440],
        "pad_token_id": 2,
        "hidden_act": "silu",
        "initializer_range": 0.1,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": 73448,
        **keys,
    }


def llama(**keys: Any) -> Config:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "use_cache": True,
        **keys,
    }


def qwen(version: int, **keys: Any) -> Config:
    config = {
        "architectures": [f"Qwen{version}ForCausalLM"],
        "model_type": f"qwen{version}",
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_window_layers": keys["num_hidden_layers"],
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
    }
    if version == 3:
        config |= {"attention_bias": False, "sliding_window": None}
    return config | keys


def generation(bos: int, eos: list[int], pad: int | None = None, **keys: Any) -> Config:
    config: Config = {"bos_token_id": bos, "eos_token_id": eos}
    if pad is not None:
        config["pad_token_id"] = pad
    return config | keys


TINY = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": [2, 4],
    "pad_token_id": 0,
}
TINY_GENERATION = generation(1, [2, 4], pad=0)

LLAMA_8B = {
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
MINICPM4_8B = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "intermediate_size": 16384,
    "rope_scaling": longrope(LONGROPE_128, 32768),
}

PRESETS: dict[str, Preset] = {
    "minicpm4-8b": Preset(
        minicpm(**MINICPM4_8B, num_hidden_layers=32),
        generation(1, [2, 73440], pad=2, do_sample=True, temperature=0.8, top_p=0.8),
    ),
    "minicpm4-0.5b": Preset(
        minicpm(
            hidden_size=1024,
            num_hidden_layers=24,
            num_attention_heads=16,
            num_key_value_heads=2,
            intermediate_size=4096,
            rms_norm_eps=1e-5,
            rope_scaling=longrope(LONGROPE_64, 32768),
            tie_word_embeddings=True,
        ),
        generation(1, [2, 73440], pad=2, do_sample=True, temperature=0.8, top_p=0.8),
    ),
    "llama3.1-8b": Preset(
        llama(**LLAMA_8B, num_hidden_layers=32),
        generation(128000, [128001, 128008, 128009], do_sample=True, temperature=0.6, top_p=0.9),
    ),
    "qwen3-8b": Preset(
        qwen(
            3,
            bos_token_id=151643,
            eos_token_id=151645,
            hidden_size=4096,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            intermediate_size=12288,
            max_position_embeddings=40960,
            vocab_size=151936,
        ),
        generation(
            151643,
            [151645, 151643],
            pad=151643,
            do_sample=True,
            temperature=0.6,
            top_k=20,
            top_p=0.95,
        ),
    ),
    "qwen2.5-7b": Preset(
        qwen(
            2,
            bos_token_id=151643,
            eos_token_id=151645,
            hidden_size=3584,
            num_hidden_layers=28,
            num_attention_heads=28,
            num_key_value_heads=4,
            intermediate_size=18944,
            max_position_embeddings=32768,
            sliding_window=131072,
            vocab_size=152064,
        ),
        generation(
            151643,
            [151645, 151643],
            pad=151643,
            do_sample=True,
            repetition_penalty=1.05,
            temperature=0.7,
            top_k=20,
            top_p=0.8,
        ),
    ),
    "tiny-llama": Preset(
        llama(
            **TINY,
            head_dim=64,
            rope_scaling={
                "factor": 8.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 256,
                "rope_type": "llama3",
            },
            rope_theta=10000.0,
        ),
        TINY_GENERATION,
    ),
    "tiny-qwen2": Preset(qwen(2, **TINY), TINY_GENERATION),
    # Heads wider than H / Hq, and tied embeddings.
    "tiny-qwen3": Preset(qwen(3, **TINY, head_dim=128, tie_word_embeddings=True), TINY_GENERATION),
    "tiny-minicpm": Preset(minicpm(**TINY, dim_model_base=64), TINY_GENERATION),
    "minicpm4-8b-eagle": Preset(
        minicpm(**MINICPM4_8B, num_hidden_layers=1), {}, eagle_tensors, draft=True
    ),
    "llama3.1-8b-eagle": Preset(
        llama(**LLAMA_8B, num_hidden_layers=1), {}, eagle_tensors, draft=True
    ),
    "llama3.1-8b-eagle3": Preset(
        llama(
            **LLAMA_8B,
            architectures=["LlamaForCausalLMEagle3"],
            num_hidden_layers=1,
            draft_vocab_size=32000,
        ),
        {},
        eagle3_tensors,
        draft=True,
    ),
    "tiny-minicpm-eagle": Preset(
        minicpm(**TINY | {"num_hidden_layers": 1}, dim_model_base=64), {}, eagle_tensors, draft=True
    ),
}


# ---- planted pairs
#
# A target whose greedy text, and a draft whose acceptance, are known in advance, through the real
# kernels at true shapes. Tokens c_0, c_1, ... are a random cycle through the drafted vocabulary.
# The stream of a token is (nearly) its embedding, a random unit vector; the head's row of c_(i+1)
# is the vector of c_i, and random vectors are nearly orthogonal: after c_i comes c_(i+1). Tokens
# outside the cycle have the embedding of one inside. The draft passes the embedding on and has a
# copy of the head, in which a seeded fraction 1 - P of the rows have changed places: after those
# tokens it is sure of a wrong one. So a drafted step is accepted with probability P, each
# independently, and a cycle of depth D emits 1 + P + ... + P^D tokens on average.

TOP_LOGIT = 30.0  # of the right token; the others' are near 0
BRANCHES = 0.1  # size of all residual branches together, beside the embedding's 1


@dataclass(frozen=True, slots=True)
class Planted:
    """Which vector each row of the tables is, and what follows each token."""

    next_token: np.ndarray  # [V] what the target says after each token
    drafted: np.ndarray  # [Vd] target ids, ascending: the cycle
    accepted: np.ndarray  # [V] does the draft say the same?
    embed_rows: np.ndarray  # [V]
    head_rows: np.ndarray  # [V]
    draft_rows: np.ndarray  # [Vd]


def plant(config: Config, seed: int, acceptance: float, draft_vocab: int) -> Planted:
    """Lays out a pair. Raises SystemExit for numbers that cannot be."""
    vocab = config["vocab_size"]
    most = vocab - len(special_ids(config))
    if not 0.0 <= acceptance <= 1.0:
        raise SystemExit(f"--planted is {acceptance}, but must be a probability from 0 to 1")
    if not 2 <= draft_vocab <= most:
        raise SystemExit(f"--draft-vocab-size is {draft_vocab}, but must be 2 to {most}")
    rng = np.random.default_rng(tensor_seed(seed, "cycle"))
    drafted = np.sort(most_frequent(config, draft_vocab)).astype(np.int64)
    order = rng.permutation(drafted)
    ids = np.arange(vocab)
    embed_rows = drafted[ids % draft_vocab]
    embed_rows[drafted] = drafted
    head_rows = ids.copy()
    head_rows[np.roll(order, -1)] = order
    next_token = np.empty(vocab, np.int64)
    next_token[order] = np.roll(order, -1)
    next_token = next_token[embed_rows]
    wrong = rng.permutation(drafted)[: round((1 - acceptance) * draft_vocab)]
    wrong = wrong if wrong.size != 1 else rng.permutation(drafted)[:2]  # one alone stays right
    accepted = ~np.isin(embed_rows, wrong)
    draft_rows = head_rows.copy()
    draft_rows[next_token[wrong]] = np.roll(wrong, 1)
    return Planted(next_token, drafted, accepted, embed_rows, head_rows, draft_rows[drafted])


def planted_target(config: Config, seed: int, pair: Planted) -> Iterator[TensorSpec]:
    embed_scale = math.sqrt(config["hidden_size"]) / config.get("scale_emb", 1.0)
    tables = {
        "model.embed_tokens.weight": vectors(seed, pair.embed_rows, config, embed_scale),
        "lm_head.weight": vectors(seed, pair.head_rows, config, planted_head_scale(config)),
    }
    for spec in decoder_tensors(config):
        fill = tables.get(spec.name)
        yield TensorSpec(spec.name, spec.shape, fill) if fill else quiet(spec, config)


def planted_draft(
    config: Config, seed: int, pair: Planted, quant: str | None = None
) -> Iterator[TensorSpec]:
    hidden = config["hidden_size"]
    yield from draft_vocabulary(pair.drafted, config["vocab_size"])
    for spec in eagle_tensors(config):
        if spec.name != "fc.weight":
            spec = quiet(spec, config)
            yield from quantised([spec]) if quant else [spec]
        elif quant:
            yield from pass_left_half_in_4_bits(hidden)
        else:
            yield TensorSpec(spec.name, spec.shape, pass_left_half(hidden))
    head = vectors(seed, pair.draft_rows, config, planted_head_scale(config))
    yield TensorSpec("lm_head.weight", (pair.drafted.size, hidden), head)


def planted_head_scale(config: Config) -> float:
    """Length of the head's rows that makes the logit of the right token TOP_LOGIT."""
    hidden = config["hidden_size"]
    return TOP_LOGIT / math.sqrt(hidden) / (config.get("dim_model_base", hidden) / hidden)


def quiet(spec: TensorSpec, config: Config) -> TensorSpec:
    """The same tensor where the stream is to stay what it is."""
    if spec.name.endswith("norm.weight") or "input_norm" in spec.name:
        return TensorSpec(spec.name, spec.shape, normal(0.0, mean=1.0))
    if spec.name.endswith(("o_proj.weight", "down_proj.weight")):
        branch = BRANCHES / math.sqrt(2 * config["num_hidden_layers"])
        return matrix(spec.name, *spec.shape, branch)
    return spec


def pass_left_half(hidden: int) -> Fill:
    """[I | 0] for an input [embedding | feature], with a little noise: zeros would run faster."""

    def fill(source: Source, seed: int, count: int, dtype: str) -> Iterable:
        noise = 0.01 / math.sqrt(2 * hidden)
        for begin in range(0, hidden, step := max(1, CHUNK // (2 * hidden))):
            rows = min(step, hidden - begin)
            values = np.random.default_rng([seed, begin]).standard_normal(
                (rows, 2 * hidden), dtype=np.float32
            )
            values *= np.float32(noise)
            values[np.arange(rows), np.arange(begin, begin + rows)] += 1
            yield encode(values.ravel(), dtype)

    return fill


def pass_left_half_in_4_bits(hidden: int) -> Iterator[TensorSpec]:
    """[I | 0] as above: the group with the one has scale 1/7 and zeros, the others are noise."""
    noise = 0.01 / math.sqrt(2 * hidden) / LEVELS_STD
    k = np.arange(hidden)

    def q(source: Source, seed: int, count: int, dtype: str) -> Iterable:
        made = np.random.default_rng(seed).integers(
            0, 1 << 32, (2 * hidden // 8, hidden), dtype=np.uint32
        )
        of_group = (k // GROUP_SIZE * (GROUP_SIZE // 8))[:, None] + np.arange(GROUP_SIZE // 8)
        made[of_group, k[:, None]] = 0x88888888
        made[k // 8, k] |= np.uint32(7) << (4 * (k % 8)).astype(np.uint32)  # 15
        yield made.ravel()

    def scales(source: Source, seed: int, count: int, dtype: str) -> Iterable:
        made = np.full((2 * hidden // GROUP_SIZE, hidden), noise, np.float32)
        made[k // GROUP_SIZE, k] = 1 / 7
        yield encode(made.ravel(), dtype)

    yield from gptq_tensors("fc", hidden, 2 * hidden, q, noise, scales)


def planted_presets(
    preset: Preset,
    config: Config,
    seed: int,
    acceptance: float,
    draft_vocab: int,
    draft_quant: str | None = None,
) -> tuple[Preset, Preset]:
    """Target and draft; `config` is the target's, overrides applied."""
    config = config | {"tie_word_embeddings": False}
    pair = plant(config, seed, acceptance, draft_vocab)
    target = replace(preset, config=config, tensors=lambda c: planted_target(c, seed, pair))
    draft = Preset(
        config
        | {
            "num_hidden_layers": 1,
            "draft_vocab_size": draft_vocab,
            "planted_acceptance": acceptance,
        },
        {},
        lambda c: planted_draft(c, seed, pair, draft_quant),
        draft=True,
    )
    return target, draft


# ---- writing


def tensor_seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "little")


def shard(
    specs: Iterable[TensorSpec], dtype: str, limit: int
) -> list[list[tuple[TensorSpec, str, int]]]:
    """Fill files of at most `limit` bytes in order; each entry is (spec, dtype, bytes)."""
    shards: list[list[tuple[TensorSpec, str, int]]] = [[]]
    used = 0
    for spec in specs:
        kind = spec.dtype or dtype
        size = spec.count * ITEM_SIZE[kind]
        if shards[-1] and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append((spec, kind, size))
        used += size
    return shards


def safetensors_header(entries: list[tuple[TensorSpec, str, int]]) -> bytes:
    """Length and JSON, padded with spaces so that tensor data begins at a multiple of 64."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec, kind, size in entries:
        data_offsets = [offset, offset + size]
        header[spec.name] = {"dtype": kind, "shape": spec.shape, "data_offsets": data_offsets}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    return len(text).to_bytes(8, "little") + text


class Progress:
    """One line on a terminal, rewritten; otherwise silent until the end."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.begin = total, 0, time.perf_counter()
        self.live = sys.stderr.isatty()

    def add(self, size: int) -> None:
        self.done += size
        if self.live:
            print(f"\r{self.text()}", end="", file=sys.stderr, flush=True)

    def text(self) -> str:
        elapsed = max(time.perf_counter() - self.begin, 1e-9)
        return (
            f"{self.done / 1e9:6.2f} / {self.total / 1e9:.2f} GB  "
            f"{self.done / 1e9 / elapsed:.2f} GB/s  {elapsed:.0f} s"
        )


def write_weights(
    specs: Iterable[TensorSpec],
    directory: Path,
    dtype: str,
    seed: int,
    shard_bytes: int,
    source: Source,
) -> Progress:
    """Write model.safetensors, or shards and their index."""
    shards = shard(specs, dtype, shard_bytes)
    total = sum(size for entries in shards for _, _, size in entries)
    progress = Progress(total)
    weight_map: dict[str, str] = {}
    for index, entries in enumerate(shards, start=1):
        name = "model.safetensors"
        if len(shards) > 1:
            name = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        with open(directory / name, "wb", buffering=0) as file:
            write_all(file, safetensors_header(entries))
            for spec, kind, size in entries:
                written = 0
                for chunk in spec.fill(source, tensor_seed(seed, spec.name), spec.count, kind):
                    data = memoryview(chunk).cast("B")
                    write_all(file, data)
                    written += len(data)
                    progress.add(len(data))
                if written != size:
                    raise RuntimeError(f"{spec.name}: made {written} bytes, planned {size}")
                weight_map[spec.name] = name
    if len(shards) > 1:
        index_content = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(directory / "model.safetensors.index.json", index_content)
    if progress.live:
        print(file=sys.stderr)
    return progress


def write_all(file: Any, data: bytes | memoryview) -> None:
    """An unbuffered write may take only a part."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def write_json(path: Path, content: Config) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def copy_tokenizer(source: Path, destination: Path) -> None:
    if not (source / "tokenizer.json").is_file() and not (source / "tokenizer.model").is_file():
        raise SystemExit(f"{source} holds neither tokenizer.json nor tokenizer.model")
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, destination / name)


def check_config(config: Config) -> None:
    """SystemExit for sizes and scales that no tensor can be made of."""
    for key in (*SIZES, *SCALES):
        value, kind = config.get(key, 1), int if key in SIZES else (int, float)
        if key == "head_dim" and value is None:  # hidden_size / num_attention_heads
            continue
        if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < math.inf:
            expected = "integer" if key in SIZES else "number"
            raise SystemExit(f"{key} is {value!r}, but must be a positive {expected}")


def check_out(out: Path, force: bool, tokenizer: Path | None = None) -> None:
    sources = [] if tokenizer is None else [tokenizer]
    try:
        check_destination(out, sources, overwrite=force, flag="--force")
    except ValueError as error:
        raise SystemExit(str(error)) from error


def check_apart(out: Path, draft_out: Path) -> None:
    out, draft_out = out.expanduser().resolve(), draft_out.expanduser().resolve()
    if out.is_relative_to(draft_out) or draft_out.is_relative_to(out):
        raise SystemExit(
            f"--out {out} and --draft-out {draft_out} must be two folders, side by side"
        )


def write_checkpoint(
    preset: Preset,
    out: Path,
    *,
    dtype: str = "bfloat16",
    seed: int = 0,
    shard_bytes: int = 5_000_000_000,
    overrides: Config | None = None,
    tokenizer: Path | None = None,
    device: str = "auto",
    force: bool = False,
    quant: str | None = None,
) -> Progress:
    """Write the whole directory beside its place, then move it there.

    `quant` "gptq": projections in 4 bits, unless the preset's own tensors have them so already.
    """
    config = {**preset.config, **(overrides or {}), "torch_dtype": dtype}
    if quant:
        config["quantization_config"] = QUANTIZATION_CONFIG
    if preset.draft:
        tokenizer = None
    elif tokenizer is None and config["vocab_size"] >= 4096 and DEFAULT_TOKENIZER.is_dir():
        tokenizer = DEFAULT_TOKENIZER
    check_out(out, force, tokenizer)
    source = make_source(device)
    with new_directory(out) as directory:
        write_json(directory / "config.json", config)
        if preset.draft:
            np.save(directory / "token_counts.npy", token_counts(config["vocab_size"]))
        else:
            write_json(directory / "generation_config.json", preset.generation)
        for name, content in preset.files.items():
            (directory / name).write_bytes(content)
        if tokenizer is not None:
            copy_tokenizer(tokenizer, directory)
        specs = list(preset.tensors(config))
        if quant and not any(spec.name.endswith(".qweight") for spec in specs):
            specs = list(quantised(specs))
        return write_weights(specs, directory, DTYPES[dtype], seed, shard_bytes, source)


# ---- command line


def parse_override(text: str) -> tuple[str, Any]:
    """KEY=VALUE, the value as JSON or else as a plain string."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form KEY=VALUE")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", required=True, help=f"one of {', '.join(PRESETS)}")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--dtype", choices=list(DTYPES), help="default: bfloat16, with --quant float16"
    )
    parser.add_argument("--quant", choices=["gptq"], help="store projections in 4 bits")
    parser.add_argument("--draft-quant", choices=["gptq"], help="the same of the planted draft")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard-size-gb", type=float, default=5.0)
    parser.add_argument("--num-hidden-layers", type=int, help="fewer or more layers than the model")
    parser.add_argument(
        "--set",
        type=parse_override,
        action="append",
        default=[],
        metavar="KEY=JSON",
        help="another value for any key of config.json; shapes follow it",
    )
    parser.add_argument(
        "--planted",
        type=float,
        metavar="P",
        help="write a target whose text is known and, with --draft-out, an EAGLE head of which "
        "each drafted step is accepted with probability P",
    )
    parser.add_argument("--draft-out", type=Path, help="folder of the planted draft")
    parser.add_argument(
        "--draft-vocab-size",
        type=int,
        help="tokens that the planted draft knows (default: 32768, at most half of all)",
    )
    parser.add_argument("--tokenizer", type=Path, help="copy tokenizer files from this folder")
    parser.add_argument("--device", default="auto", help="auto, cpu (numpy), cuda, cuda:1 …")
    parser.add_argument("--force", action="store_true", help="replace an existing checkpoint")
    args = parser.parse_args(argv)

    if args.preset not in PRESETS:
        raise SystemExit(f"unknown preset {args.preset!r}; known: {', '.join(PRESETS)}")
    overrides = dict(args.set)
    if args.num_hidden_layers is not None:
        overrides["num_hidden_layers"] = args.num_hidden_layers
    check_config({**PRESETS[args.preset].config, **overrides})
    if not 0 < args.shard_size_gb < math.inf:
        raise SystemExit(f"--shard-size-gb is {args.shard_size_gb}, but must be above 0")
    jobs = [(PRESETS[args.preset], args.out, args.quant)]
    if (args.planted is None) != (args.draft_out is None):
        raise SystemExit("--planted and --draft-out go together: give both or neither")
    if args.draft_quant and args.planted is None:
        raise SystemExit("--draft-quant is for the draft of --planted; use --quant")
    dtype = args.dtype or ("float16" if args.quant else "bfloat16")
    if args.planted is not None:
        preset = PRESETS[args.preset]
        if preset.draft:
            raise SystemExit(f"--planted needs a target, but {args.preset} is a draft")
        config = {**preset.config, **overrides}
        draft_vocab = args.draft_vocab_size or min(32768, config["vocab_size"] // 2)
        target, draft = planted_presets(
            preset, config, args.seed, args.planted, draft_vocab, args.draft_quant
        )
        jobs = [(target, args.out, args.quant), (draft, args.draft_out, args.draft_quant)]
        overrides = {}
        for _, out, _ in jobs:  # before the long work
            check_out(out, args.force, args.tokenizer)
        check_apart(args.out, args.draft_out)
    for preset, out, quant in jobs:
        progress = write_checkpoint(
            preset,
            out,
            dtype=dtype,
            seed=args.seed,
            shard_bytes=int(args.shard_size_gb * 1e9),
            overrides=overrides,
            tokenizer=args.tokenizer,
            device=args.device,
            force=args.force,
            quant=quant,
        )
        kind = args.preset if args.planted is None else f"{args.preset} planted {args.planted}"
        print(f"{out}: {kind}, {quant or dtype}, seed {args.seed}, {progress.text().strip()}")


if __name__ == "__main__":
    main()
