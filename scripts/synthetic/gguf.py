"""Random models as one GGUF file of the type Q4_K_M.

Matrices are Q4_K. As in llama.cpp's files, about half of attn_v and ffn_down are Q6_K, and so is
the head. Embeddings are float16, and so is a head of synthetic acceptance. The tokenizer has the
256 bytes as tokens. Source of the blocks: ggml-common.h of the ggml repository.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cpmcu.loading.gguf.checkpoint import PARTS, TOP
from scripts.synthetic.sources import Array, Bits, Source
from scripts.synthetic.tensors import Config, TensorSpec, random_bits

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
GGUF, GGUF_FILE = "q4_k_m", "model.gguf"
ALIGNMENT = 32
BLOCK = 256  # numbers of a block of K-quants
F32, F16, Q4_K, Q6_K = 0, 1, 12, 14
TOKEN, CONTROL = 1, 3  # values of tokenizer.ggml.token_type


@dataclass(frozen=True, slots=True)
class GgufSpec:
    """A tensor: its type, its dimensions with the slowest first, and its bytes."""

    name: str
    type_id: int
    shape: tuple[int, ...]
    nbytes: int
    fill: Callable[[Source, int], Iterator[Array]]  # source, seed


# ---- tensors


def gguf_name(name: str) -> str:
    """GGUF's name of a tensor of Hugging Face's files."""
    if name in _TOP:
        return _TOP[name]
    _, _, layer, rest = name.split(".", 3)
    part, _, kind = rest.rpartition(".")
    if ".experts." in part:
        return f"blk.{layer}.ffn_{part.rpartition('.')[2].removesuffix('_proj')}_exps.{kind}"
    return f"blk.{layer}.{_PARTS[part]}.{kind}"


_TOP = {theirs: ours for ours, theirs in TOP.items()}
_PARTS = {theirs: ours for ours, theirs in PARTS.items()}


def gguf_specs(specs: Iterable[TensorSpec], config: Config) -> list[GgufSpec]:
    """The tensors under GGUF's names. The experts of a layer become one tensor for each part.

    Raises SystemExit for a family that is not written, and for rows that are not whole blocks.
    """
    architecture(config)
    made: dict[str, GgufSpec] = {}
    for spec in specs:
        prefix, is_expert, rest = spec.name.partition(".experts.")
        if is_expert:  # all experts alike, under the name of the first
            part = rest.partition(".")[2]
            stacked = (config["num_experts"], *spec.shape)
            spec = replace(spec, name=f"{prefix}.experts.0.{part}", shape=stacked)
        name = gguf_name(spec.name)
        if name not in made:
            made[name] = gguf_spec(name, spec, config["num_hidden_layers"])
    return list(made.values())


def gguf_spec(name: str, spec: TensorSpec, layers: int) -> GgufSpec:
    is_embedding, is_matrix = name == "token_embd.weight", len(spec.shape) > 1
    if is_embedding or (is_matrix and spec.std == 0):
        return plain(name, F16, spec)
    if not is_matrix or ".ffn_gate_inp." in name:
        return plain(name, F32, spec)
    if spec.shape[-1] % BLOCK:
        raise SystemExit(f"{spec.name} has {spec.shape[-1]} inputs, expected a multiple of {BLOCK}")
    layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
    wide = name == "output.weight" or (
        any(part in name for part in (".attn_v.", ".ffn_down")) and has_more_bits(layer, layers)
    )
    type_id, kind = (Q6_K, q6_k) if wide else (Q4_K, q4_k)
    blocks = math.prod(spec.shape) // BLOCK

    def fill(source: Source, seed: int) -> Iterator[Array]:
        return kind(source, seed, blocks, spec.std)

    return GgufSpec(name, type_id, spec.shape, blocks * NBYTES[type_id], fill)


def plain(name: str, type_id: int, spec: TensorSpec) -> GgufSpec:
    dtype = "float16" if type_id == F16 else "float32"

    def fill(source: Source, seed: int) -> Iterator[Array]:
        return spec.fill(source, seed, spec.count, dtype)

    return GgufSpec(name, type_id, spec.shape, spec.count * (2 if type_id == F16 else 4), fill)


def has_more_bits(layer: int, layers: int) -> bool:
    """Returns whether llama.cpp gives the layer more bits.

    It does so in the first and the last eighth of the layers, and in every third layer between.
    """
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


# ---- blocks

NBYTES = {Q4_K: 144, Q6_K: 210}
_SIXES = np.arange(48, 64)  # the 6-bit scales and minima of Q4_K
_SIGNED = np.arange(64, 128)  # the int8 scales of Q6_K


def q4_k(source: Source, seed: int, blocks: int, std: float) -> Iterator[Array]:
    """w = d s q - 7.5 d m: s and m from 48 to 63, q from 0 to 15."""
    q = np.arange(16)
    square = np.mean(_SIXES**2) * (np.mean(q**2) + 56.25) - 15 * np.mean(_SIXES) ** 2 * np.mean(q)
    d = std / math.sqrt(square)
    header = np.array([d, 7.5 * d], np.float16).view(np.uint8)
    for chunk in of_blocks(source, seed, blocks, NBYTES[Q4_K]):
        chunk[:, :4] = header
        chunk[:, 4:12] |= 0xF0  # scales and minima of the first groups, high bits of the others
        yield chunk.reshape(-1)


def q6_k(source: Source, seed: int, blocks: int, std: float) -> Iterator[Array]:
    """w = d s (q - 32): s of both signs from 64 to 128, q from 0 to 63."""
    q = np.arange(64) - 32
    d = std / math.sqrt(np.mean(_SIGNED**2) * np.mean(q**2))
    header = np.array([d], np.float16).view(np.uint8)
    for chunk in of_blocks(source, seed, blocks, NBYTES[Q6_K]):
        scales = chunk[:, 192:208]
        scales &= 0xBF  # -128 to -65, or 0 to 63
        scales |= ~(scales >> 1) & 0x40
        chunk[:, 208:] = header
        yield chunk.reshape(-1)


def of_blocks(source: Source, seed: int, blocks: int, nbytes: int) -> Iterator[Array]:
    """Random bytes [blocks, nbytes], in chunks that are whole blocks."""
    step = (1 << 25) // nbytes // 4 * 4
    for index, begin in enumerate(range(0, blocks, step)):
        count = min(step, blocks - begin) * nbytes
        fill = random_bits(Bits(0xFFFFFFFF))
        (made,) = fill(source, seed + index, count, "uint8")
        yield made.reshape(-1, nbytes)


# ---- file


def architecture(config: Config) -> str:
    """GGUF's name of the family. Raises SystemExit for one that is not written."""
    kind = config["model_type"]
    if kind not in ARCHITECTURES:
        raise SystemExit(
            f"models of type {kind} are not written as GGUF, expected one of "
            f"{', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[kind]


def metadata(config: Config) -> dict[str, Any]:
    arch, heads = architecture(config), config["num_attention_heads"]
    of_model = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config.get("head_dim") or config["hidden_size"] // heads,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config["rope_theta"]),
        "vocab_size": config["vocab_size"],
    }
    if arch == "qwen3moe":
        of_model |= {
            "expert_count": config["num_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
        }
    return {
        "general.architecture": arch,
        "general.alignment": ALIGNMENT,
        **{f"{arch}.{key}": value for key, value in of_model.items()},
        **tokenizer(config),
    }


def tokenizer(config: Config) -> dict[str, Any]:
    """A byte-level BPE without merges: 256 bytes, then tokens that no text has."""
    eos, bos = config["eos_token_id"], config["bos_token_id"]
    ends = eos if isinstance(eos, list) else [eos]
    tokens = [f"<token {i}>" for i in range(config["vocab_size"])]
    types = [TOKEN] * len(tokens)
    for number in (bos, *ends):
        types[number] = CONTROL
    free = (i for i, kind in enumerate(types) if kind == TOKEN)
    for character, number in zip(byte_alphabet(), free):
        tokens[number] = character
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": bos,
        "tokenizer.ggml.eos_token_id": ends[0],
    }


def byte_alphabet() -> list[str]:
    """The characters of GPT-2's byte-level alphabet."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(i) for i in shown] + [chr(256 + i) for i in range(256 - len(shown))]


def write_gguf(
    path: Path,
    specs: list[GgufSpec],
    config: Config,
    chunks: Callable[[GgufSpec], Iterator[Array]],
    update: Callable[[int], None],
) -> None:
    """Writes one file. `update` gets the number of bytes of tensors written so far."""
    entries = metadata(config)
    header = [b"GGUF", struct.pack("<IQQ", 3, len(specs), len(entries))]
    header += [text(key) + typed(value) for key, value in entries.items()]
    offset = 0
    for spec in specs:
        shape = spec.shape[::-1]
        header.append(text(spec.name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
        header.append(struct.pack("<IQ", spec.type_id, offset))
        offset += padded(spec.nbytes)
    joined = b"".join(header)
    done = 0
    with path.open("xb") as file:
        file.write(joined.ljust(padded(len(joined)), b"\0"))
        for spec in specs:
            before = done
            for chunk in chunks(spec):
                done += file.write(np.ascontiguousarray(chunk).data)
                update(done)
            if done - before != spec.nbytes:
                raise AssertionError(f"{spec.name}: {done - before} bytes, not {spec.nbytes}")
            file.write(bytes(padded(spec.nbytes) - spec.nbytes))


def padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def typed(value: Any) -> bytes:
    """The type and the value of an entry: uint32, float32, text, or a list of integers or texts."""
    if isinstance(value, list):
        is_text = bool(value) and isinstance(value[0], str)
        items = b"".join(map(text, value)) if is_text else struct.pack(f"<{len(value)}I", *value)
        return struct.pack("<IIQ", 9, 8 if is_text else 4, len(value)) + items
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    is_float = isinstance(value, float)
    return struct.pack("<If", 6, value) if is_float else struct.pack("<II", 4, value)
