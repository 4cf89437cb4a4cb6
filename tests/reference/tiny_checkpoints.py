"""Writes tiny random checkpoints of each model family as Hugging Face directories.

FAMILIES are those with attention in every layer, HYBRIDS those with gated delta nets.

tiny = write_tiny(tmp_path, "qwen2", num_hidden_layers=3, shards=2, dtype="bfloat16")
tiny.directory, tiny.config, tiny.weights   # weights: float32, rounded as in the files
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cpmcu.models.common import BuildOptions, SpecFields
from cpmcu.models.reader import language_config
from cpmcu.models.registry import find_model
from tests.reference import tiny_lfm2, tiny_mamba
from tests.reference.tiny_hybrid import HYBRIDS, MODEL_TYPES, hybrid_config, hybrid_weights

Array = npt.NDArray[Any]

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "olmo2": ("Olmo2ForCausalLM", "olmo2"),
    "olmo3": ("Olmo3ForCausalLM", "olmo3"),
    "graniteswa": ("GraniteSWAForCausalLM", "granite_swa"),
    "gemma4": ("Gemma4ForCausalLM", "gemma4_text"),
    "muse": ("MuseGlimmerForConditionalGeneration", "muse_glimmer"),
    "gptoss": ("GptOssForCausalLM", "gpt_oss"),
    "lfm2": ("Lfm2ForCausalLM", "lfm2"),
    "lfm2moe": ("Lfm2MoeForCausalLM", "lfm2_moe"),
    "lfm3": ("Lfm3ForCausalLM", "lfm3"),
    "mistral": ("MistralForCausalLM", "mistral"),
    "ministral": ("MinistralForCausalLM", "ministral"),
    "ministral3": ("Ministral3ForCausalLM", "ministral3"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "mimo": ("MiMoForCausalLM", "mimo"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "minicpm": ("MiniCPMForCausalLM", "minicpm"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "qwen2moe": ("Qwen2MoeForCausalLM", "qwen2_moe"),
    "granite": ("GraniteForCausalLM", "granite"),
    "granite4": ("GraniteMoeHybridForCausalLM", "granitemoehybrid"),
    "granitehybrid": ("GraniteMoeHybridForCausalLM", "granitemoehybrid"),
    "nemotron": ("NemotronHForCausalLM", "nemotron_h"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
    "seedoss": ("SeedOssForCausalLM", "seed_oss"),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3"),
}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "minicpm")  # dense

BASE_CONFIG: dict[str, Any] = {
    "vocab_size": 203,  # a prime that is not close to a tile size
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
}
BIASED = (
    "gpt_oss",
    "qwen2",
    "qwen2_moe",
    "mimo",
    "seed_oss",
)  # model types with a bias on q, k and v
GRANITE_SCALES = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 8.0,
}
GRANITE4 = {
    "num_local_experts": 0,
    "shared_intermediate_size": 96,
    "position_embedding_type": "rope",
    "layer_types": ["full_attention"] * 2,
    "mamba_n_heads": 4,
}
# Keys of config.json that a family adds.
OWN_KEYS: dict[str, dict[str, Any]] = {
    "graniteswa": {
        "sliding_window": 33,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "layer_rope_theta": [0, 10000.0, 0, 1000.0],
        "logits_scaling": 2.0,
    },
    "gemma4": {
        "global_head_dim": 128,  # CUDA has it, too
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 33,
        "layer_types": None,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 3.0,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 10000.0,
            },
        },
    },
    "muse": {
        "sliding_window": 33,
        "layer_types": None,
        "final_logit_softcapping": 3.0,
        "output_multiplier": 0.5,
        "qk_scale_factor": 2.0,
        "post_norm_eps": 1e-3,
    },
    "gptoss": {
        "intermediate_size": 40,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "swiglu_limit": 1.5,  # so that it is reached
        "sliding_window": 33,
        "layer_types": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 32,
            "max_position_embeddings": 512,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    },
}
MINICPM_SCALES = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16}

_CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True)
class TinyCheckpoint:
    """`weights` are the values of the files as float32."""

    directory: Path
    config: dict[str, Any]
    weights: dict[str, Array]

    def fields(self, options: BuildOptions | None = None) -> SpecFields:
        """The spec fields that the package reads from the config."""
        options = options or BuildOptions(has_lm_head="lm_head.weight" in self.weights)
        return find_model(self.config).build(self.config, options)


def tiny_config(family: str, dtype: str = "float32", **overrides: Any) -> dict[str, Any]:
    """A config.json; an override of None removes the key."""
    if family in HYBRIDS:
        return hybrid_config(family, dtype, BASE_CONFIG, overrides)
    architecture, model_type = ARCHITECTURES[family]
    config = {"architectures": [architecture], "model_type": model_type, "torch_dtype": dtype}
    config |= BASE_CONFIG | (MINICPM_SCALES if family == "minicpm" else {})
    config |= GRANITE_SCALES if family.startswith("granite") else {}
    config |= GRANITE4 if family == "granite4" else {}
    config |= EXPERTS if family.endswith("moe") else {}
    config |= tiny_lfm2.OWN_KEYS.get(family, {}) | tiny_mamba.OWN_KEYS.get(family, {})
    config |= {"shared_expert_intermediate_size": 56} if family == "qwen2moe" else {}
    config |= OWN_KEYS.get(family, {})
    if family == "mistral":
        config["sliding_window"] = None
    if "hidden_size" in overrides or "num_attention_heads" in overrides:
        config.pop("head_dim")
    config |= overrides
    if family == "gemma4":
        config.setdefault("vocab_size_per_layer_input", config["vocab_size"])
    return {
        key: value for key, value in config.items() if value is not None or key not in overrides
    }


def random_weights(config: Mapping[str, Any], seed: int = 0) -> dict[str, Array]:
    """float32 weights of a config, scaled so that activations stay near 1."""
    if config["model_type"] in MODEL_TYPES:
        return hybrid_weights(config, seed)
    if config["model_type"] in tiny_lfm2.MODEL_TYPES:
        return tiny_lfm2.lfm2_weights(config, seed)
    if tiny_mamba.is_own(config):
        return tiny_mamba.mamba_weights(config, seed)
    rng = np.random.default_rng(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    q_size, kv_size = heads * head_dim, (config.get("num_key_value_heads") or heads) * head_dim
    model_type = config["model_type"]

    def matrix(rows: int, columns: int) -> Array:
        return (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    def norm(size: int) -> Array:
        return rng.uniform(0.5, 1.5, size).astype(np.float32)

    embed = rng.standard_normal((config["vocab_size"], hidden)).astype(np.float32)
    weights = {"model.embed_tokens.weight": embed}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        is_gemma, is_muse = model_type == "gemma4_text", model_type == "muse_glimmer"
        if is_muse:
            weights[prefix + "self_attn.gate_proj.weight"] = matrix(q_size, hidden)
            for place in ("pre_feedforward", "post_feedforward"):
                weights[f"{prefix}{place}_layernorm.weight"] = norm(hidden)
        if is_gemma:
            is_full = config["layer_types"][layer] == "full_attention"
            head_dim = config["global_head_dim"] if is_full else config["head_dim"]
            kv_heads = config["num_key_value_heads"]
            if is_full and config["attention_k_eq_v"]:
                kv_heads = config["num_global_key_value_heads"]
            q_size, kv_size = heads * head_dim, kv_heads * head_dim
            for place in ("pre_feedforward", "post_feedforward"):
                weights[f"{prefix}{place}_layernorm.weight"] = norm(hidden)
            weights[prefix + "layer_scalar"] = norm(1)
            own = config["hidden_size_per_layer_input"]
            if own:
                weights[prefix + "per_layer_input_gate.weight"] = matrix(own, hidden)
                weights[prefix + "per_layer_projection.weight"] = matrix(hidden, own)
                weights[prefix + "post_per_layer_input_norm.weight"] = norm(hidden)
            if config.get("enable_moe_block"):
                weights |= gemma_experts(config, prefix, matrix, norm)
        is_olmo = model_type in ("olmo2", "olmo3")
        if is_olmo:
            weights[prefix + "post_feedforward_layernorm.weight"] = norm(hidden)
            weights[prefix + "self_attn.q_norm.weight"] = norm(q_size)
            weights[prefix + "self_attn.k_norm.weight"] = norm(kv_size)
        else:
            weights[prefix + "input_layernorm.weight"] = norm(hidden)
        for part, rows in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            weights[f"{prefix}self_attn.{part}_proj.weight"] = matrix(rows, hidden)
            if config.get("attention_bias", model_type in BIASED):
                weights[f"{prefix}self_attn.{part}_proj.bias"] = norm(rows) - 1
            if model_type in ("qwen3", "qwen3_moe", "gemma4_text") and part != "v":
                weights[f"{prefix}self_attn.{part}_norm.weight"] = norm(head_dim)
        if is_gemma and is_full and config["attention_k_eq_v"]:
            del weights[prefix + "self_attn.v_proj.weight"]
        first_shared = config["num_hidden_layers"] - config.get("num_kv_shared_layers", 0)
        if is_gemma and layer >= first_shared:
            for part in ("k_proj", "v_proj", "k_norm"):
                weights.pop(f"{prefix}self_attn.{part}.weight", None)
        weights[prefix + "self_attn.o_proj.weight"] = matrix(hidden, q_size)
        if model_type in ("gpt_oss", "granite_swa"):
            weights[prefix + "self_attn.sinks"] = 2 * norm(heads)
        weights[prefix + "post_attention_layernorm.weight"] = norm(hidden)
        modules = {"mlp.": inner}
        if has_experts(config, layer):
            weights[prefix + "mlp.gate.weight"] = 3 * matrix(config["num_experts"], hidden)
            experts = [f"mlp.experts.{expert}." for expert in range(config["num_experts"])]
            modules = dict.fromkeys(experts, config["moe_intermediate_size"])
            if shared_width := config.get("shared_expert_intermediate_size"):
                weights[prefix + "mlp.shared_expert_gate.weight"] = 3 * matrix(1, hidden)
                modules["mlp.shared_expert."] = shared_width
        if model_type == "gpt_oss":
            if config.get("attention_bias", True):
                weights[prefix + "self_attn.o_proj.bias"] = norm(hidden) - 1
            experts, modules = config["num_local_experts"], {}
            weights[prefix + "mlp.router.weight"] = 3 * matrix(experts, hidden)
            weights[prefix + "mlp.router.bias"] = norm(experts) - 1
            for part, rows, columns in (("gate_up", hidden, 2 * inner), ("down", inner, hidden)):
                stack = [matrix(columns, rows).T for _ in range(experts)]
                weights[f"{prefix}mlp.experts.{part}_proj"] = np.stack(stack)
                bias = norm(experts * columns).reshape(experts, columns) - 1
                weights[f"{prefix}mlp.experts.{part}_proj_bias"] = bias
        if model_type == "granitemoehybrid":
            width = config["shared_intermediate_size"]
            weights[prefix + "shared_mlp.input_linear.weight"] = matrix(2 * width, hidden)
            weights[prefix + "shared_mlp.output_linear.weight"] = matrix(hidden, width)
            modules = {}
        if config.get("use_double_wide_mlp") and layer >= first_shared:
            modules = {"mlp.": 2 * inner}
        for module, width in modules.items():
            weights[f"{prefix}{module}gate_proj.weight"] = matrix(width, hidden)
            weights[f"{prefix}{module}up_proj.weight"] = matrix(width, hidden)
            weights[f"{prefix}{module}down_proj.weight"] = matrix(hidden, width)
        if model_type == "phi3":
            fuse_rows(weights, prefix + "self_attn.", "qkv_proj", ("q", "k", "v"))
            fuse_rows(weights, prefix + "mlp.", "gate_up_proj", ("gate", "up"))
    if own := config.get("hidden_size_per_layer_input"):
        columns = own * config["num_hidden_layers"]
        table = rng.standard_normal((config["vocab_size"], columns)).astype(np.float32)
        weights["model.embed_tokens_per_layer.weight"] = table
        weights["model.per_layer_model_projection.weight"] = matrix(columns, hidden)
        weights["model.per_layer_projection_norm.weight"] = norm(own)
    weights["model.norm.weight"] = norm(hidden)
    if not config.get("tie_word_embeddings"):
        weights["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    if model_type == "muse_glimmer":  # the factors of its layers' norms are 1 + weight
        centred = {n: w - ("layernorm" in n) for n, w in weights.items()}
        weights = {n.replace("model.", "model.language_model.", 1): w for n, w in centred.items()}
    return weights


def gemma_experts(
    config: Mapping[str, Any],
    prefix: str,
    matrix: Callable[[int, int], Array],
    norm: Callable[[int], Array],
) -> dict[str, Array]:
    """The experts beside the MLP of a layer of Gemma 4."""
    hidden, experts = config["hidden_size"], config["num_experts"]
    width = config["moe_intermediate_size"]
    weights = {
        "router.proj.weight": 3 * matrix(experts, hidden) * np.float32(np.sqrt(hidden)),
        "router.scale": norm(hidden),
        "router.per_expert_scale": norm(experts),
        "experts.gate_up_proj": np.stack([matrix(2 * width, hidden) for _ in range(experts)]),
        "experts.down_proj": np.stack([matrix(hidden, width) for _ in range(experts)]),
    }
    for place in ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1"):
        weights[f"{place}.weight"] = norm(hidden)
    weights["post_feedforward_layernorm_2.weight"] = norm(hidden)
    return {prefix + name: array for name, array in weights.items()}


def fuse_rows(weights: dict[str, Array], prefix: str, name: str, parts: Sequence[str]) -> None:
    """Replaces the matrices `<part>_proj` by one with their rows."""
    rows = [weights.pop(f"{prefix}{part}_proj.weight") for part in parts]
    weights[f"{prefix}{name}.weight"] = np.concatenate(rows)


def has_experts(config: Mapping[str, Any], layer: int) -> bool:
    step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    if config["model_type"] == "gemma4_text":  # gemma_experts
        return False
    return "num_experts" in config and (layer + 1) % step == 0 and layer not in dense


def fuse_experts(config: Mapping[str, Any], weights: Mapping[str, Array]) -> dict[str, Array]:
    """The weights with the experts of each layer as `gate_up_proj` and `down_proj`."""
    if tiny_mamba.is_own(config):
        return tiny_mamba.hf_weights(config, weights)
    fused = dict(weights)
    if "num_experts" not in config or config["model_type"] in ("gemma4_text", "lfm2_moe"):
        return fused
    for layer in range(config["num_hidden_layers"]):
        if not has_experts(config, layer):
            continue
        prefix = f"model.layers.{layer}.mlp.experts."
        stacks = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
        for name, parts in stacks.items():
            fused[prefix + name] = np.stack(
                [
                    np.concatenate([fused.pop(f"{prefix}{i}.{part}_proj.weight") for part in parts])
                    for i in range(config["num_experts"])
                ]
            )
    return fused


def write_tiny(
    directory: Path,
    family: str = "llama",
    *,
    dtype: str = "float32",
    shards: int = 1,
    seed: int = 0,
    weights: Mapping[str, Array] | None = None,
    **overrides: Any,
) -> TinyCheckpoint:
    """Writes config.json, generation_config.json and safetensors. By default weights are random."""
    directory.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family, dtype, **overrides)
    if weights is None:
        weights = random_weights(config, seed)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    generation = {"eos_token_id": [min(2, language_config(config)["vocab_size"] - 1)]}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    names = list(weights)
    if shards == 1:
        write_safetensors(directory / "model.safetensors", weights, dtype)
    else:
        weight_map = {}
        for shard in range(shards):
            file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
            part = {name: weights[name] for name in names[shard::shards]}
            write_safetensors(directory / file, part, dtype)
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    stored = {name: from_bits(to_bits(array, dtype), dtype) for name, array in weights.items()}
    return TinyCheckpoint(directory, config, stored)


def write_safetensors(path: Path, weights: Mapping[str, Array], dtype: str = "float32") -> None:
    """One file. Floating arrays are stored as `dtype`, integers as int32."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    chunks, offset = [], 0
    for name, array in weights.items():
        integer = np.issubdtype(array.dtype, np.integer)
        data = array.astype("<i4") if integer else to_bits(array, dtype)
        code = "I32" if integer else _CODES[dtype]
        end = offset + data.nbytes
        header[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": [offset, end]}
        chunks.append(data.tobytes())
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(chunks))


def to_bits(array: Array, dtype: str) -> Array:
    """The array as stored: float32, float16, or bfloat16 (to nearest even) as uint16."""
    if dtype != "bfloat16":
        return np.ascontiguousarray(array, np.dtype(dtype).newbyteorder("<"))
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bits(stored: Array, dtype: str) -> Array:
    """The inverse of `to_bits`, as float32."""
    if dtype != "bfloat16":
        return stored.astype(np.float32)
    return (stored.astype(np.uint32) << 16).view(np.float32)
