"""Hugging Face's configuration of a GGUF file, from its metadata."""

from __future__ import annotations

from typing import Any

import numpy as np

from cpmcu.checks import shown
from cpmcu.loading.gguf.header import GgufHeader

# general.architecture -> Hugging Face's architecture. `llama` is also Mistral and SmolLM.
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
_LENGTHS = {  # key of the metadata, after the architecture's name -> key of config.json
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_ENDS = ("eos", "eot", "eom")


def hf_config(header: GgufHeader) -> dict[str, Any]:
    """The content of config.json. Raises ValueError for an architecture that is not read."""
    get = header.metadata.get
    arch = get("general.architecture")
    if arch not in _ARCHITECTURES:
        raise ValueError(
            f"general.architecture is {shown(arch)}, expected one of: "
            f"{', '.join(_ARCHITECTURES)}; a model of another family loads from its files in "
            "Hugging Face format"
        )
    config: dict[str, Any] = {"architectures": [_ARCHITECTURES[arch]], "model_type": arch}
    lengths = _LENGTHS | (_EXPERTS if arch == "qwen3moe" else {})
    for key, name in lengths.items():
        config[name] = get(f"{arch}.{key}")
        if type(config[name]) is not int:
            raise ValueError(f"{arch}.{key} is {shown(config[name])}, expected an integer")
    heads = config["num_attention_heads"]
    config |= {
        "num_key_value_heads": get(f"{arch}.attention.head_count_kv", heads),
        "head_dim": get(f"{arch}.attention.key_length")
        or get(f"{arch}.rope.dimension_count")
        or config["hidden_size"] // max(heads, 1),
        "rms_norm_eps": get(f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_theta": get(f"{arch}.rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(header, arch, config["max_position_embeddings"]),
        "vocab_size": get(f"{arch}.vocab_size") or len(get("tokenizer.ggml.tokens") or ()),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_ids(header),
    }
    if arch == "qwen3moe":
        config["norm_topk_prob"] = True  # the file does not say; all models of this family do
    return config


def generation_config(header: GgufHeader) -> dict[str, Any]:
    """The sampling defaults that the file states, with the names of generation_config.json."""
    names = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
    stated = {
        name: header.metadata[f"general.sampling.{key}"]
        for key, name in names.items()
        if f"general.sampling.{key}" in header.metadata
    }
    return stated | ({"do_sample": True} if stated else {})


def end_ids(header: GgufHeader) -> list[int]:
    """Ids of the tokens that end an answer."""
    found = [header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in _ENDS]
    return list(dict.fromkeys(token for token in found if token is not None))


def rotated_heads(header: GgufHeader) -> dict[str, int]:
    """Returns the number of heads of each projection whose rows llama.cpp reordered."""
    if header.metadata.get("general.architecture") != "llama":
        return {}
    config = hf_config(header)
    return {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}


def _rope_scaling(header: GgufHeader, arch: str, context: int) -> dict[str, Any] | None:
    factors = header.tensors.get("rope_freqs.weight")
    if factors is not None:  # Llama 3: divisors of the frequencies, one for each pair
        values = np.memmap(factors.path, np.float32, "r", factors.offset, factors.shape).tolist()
        return {
            "rope_type": "longrope",
            "short_factor": values,
            "long_factor": values,
            "attention_factor": 1.0,
            "original_max_position_embeddings": context,
        }
    get = header.metadata.get
    kind = get(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ValueError(
            f"{arch}.rope.scaling.type is {shown(kind)}, expected none, linear or yarn"
        )
    scaling = {"rope_type": kind, "factor": get(f"{arch}.rope.scaling.factor")}
    if kind == "yarn":
        original = get(f"{arch}.rope.scaling.original_context_length")
        scaling["original_max_position_embeddings"] = original
    return scaling
