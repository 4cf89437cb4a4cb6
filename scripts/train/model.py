"""Loads and trains language models of transformers.

transformers has no MiniCPM. Its Granite, a Llama with four scales, computes the same function.

    x = scale_emb * embed[ids]
    x = x + residual_scale * attention(norm(x))      residual_scale = scale_depth / sqrt(L)
    x = x + residual_scale * mlp(norm(x))
    logits = head @ (norm(x) * dim_model_base / H)

Shapes: B sequences, T tokens, H hidden, D head_dim, V vocabulary, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    Cache,
    GraniteConfig,
    GraniteForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from cpmcu.convert.rounding import dequantize_state
from cpmcu.loading.index import read_json
from cpmcu.loading.model_files import is_gguf, model_files

FAMILIES = ("llama", "mistral", "minicpm", "qwen2", "qwen3")
# Keys of config.json with the same meaning in every family.
SHARED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "max_position_embeddings"),
    *("rope_theta", "rope_scaling", "rope_parameters", "tie_word_embeddings", "hidden_act"),
)
Config = dict[str, Any]


def minicpm_config(**shape: Any) -> Config:
    """Returns the config.json of this recipe's MiniCPM model. `shape` overrides keys."""
    return {
        "architectures": ["MiniCPMForCausalLM"],
        "model_type": "minicpm",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "dim_model_base": 64,
        "eos_token_id": [2, 4],
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 256,
        "initializer_range": 0.1,
        "intermediate_size": 768,
        "max_position_embeddings": 2048,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "scale_depth": 1.4,
        "scale_emb": 12.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 4096,
        **shape,
    }


def granite_config(config: Config, residual_scale: float) -> GraniteConfig:
    """Returns a Granite configuration with the shape and scales of a config.json of any family."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kept = {name: config[name] for name in SHARED if config.get(name) is not None}
    return GraniteConfig(
        **kept | {"head_dim": head_dim},
        attention_multiplier=head_dim**-0.5,
        embedding_multiplier=config.get("scale_emb", 1.0),
        residual_multiplier=residual_scale,
        logits_scaling=hidden / (config.get("dim_model_base") or hidden),
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def transformers_config(config: Config) -> PreTrainedConfig:
    """Returns transformers' configuration for a config.json of a supported family."""
    kind = config.get("model_type", "llama")
    if kind not in FAMILIES:
        raise ValueError(f"model_type is {kind!r}, expected one of {', '.join(FAMILIES)}")
    if kind == "minicpm":
        depth = config.get("scale_depth")
        layers = config["num_hidden_layers"]
        return granite_config(config, 1.0 if depth is None else depth / math.sqrt(layers))
    return AutoConfig.for_model(kind, **{k: v for k, v in config.items() if k != "model_type"})


# ---- inputs of a draft from its target


@dataclass(slots=True)
class Output:
    """The results of one forward pass. Draft heads read `hidden` or `aux_hidden`."""

    logits: Tensor | None  # [B, T, V]
    hidden: Tensor  # [B, T, H] after the final norm
    aux_hidden: list[Tensor]  # residual stream entering each requested layer, [B, T, H] each
    cache: Cache


class Target:
    """A model of transformers with its config.json."""

    def __init__(self, model: PreTrainedModel, source: Config) -> None:
        self.model, self.source = model, source

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.vocab_size)

    @property
    def hidden_size(self) -> int:
        return int(self.model.config.hidden_size)

    @property
    def layers(self) -> nn.ModuleList:
        layers: nn.ModuleList = self.model.model.layers
        return layers

    def embed(self, ids: Tensor) -> Tensor:
        scale = getattr(self.model.config, "embedding_multiplier", 1.0)
        return self.model.get_input_embeddings()(ids) * scale

    @property
    def head_scale(self) -> float:
        return 1 / getattr(self.model.config, "logits_scaling", 1.0)

    def head(self, hidden: Tensor) -> Tensor:
        return self.model.lm_head(hidden) * self.head_scale

    def rope(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Returns cos and sin, [1, T, D], of positions start .. start + count - 1."""
        positions = torch.arange(start, start + count, device=self.device)[None]
        like = self.model.get_input_embeddings().weight[:0]
        return self.model.model.rotary_emb(like, position_ids=positions)

    def __call__(
        self,
        ids: Tensor,
        past: Cache | None = None,
        aux_layers: Sequence[int] = (),
        with_logits: bool = True,
    ) -> Output:
        """Runs ids [B, T]. `past`: the keys and values of earlier tokens."""
        output = self.model.model(
            input_ids=ids,
            past_key_values=past,
            use_cache=True,
            output_hidden_states=bool(aux_layers),
        )
        hidden = output.last_hidden_state
        aux_hidden = [output.hidden_states[layer] for layer in aux_layers]
        logits = self.head(hidden) if with_logits else None
        return Output(logits, hidden, aux_hidden, output.past_key_values)

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean cross-entropy of the next token, in nats."""
        logits = self.model(input_ids=ids, use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


# ---- checkpoints


def read_state(directory: Path) -> dict[str, Tensor]:
    """Reads the tensors of all safetensors files or of a GGUF file, GPTQ's as float32."""
    if is_gguf(directory):
        checkpoint = model_files(directory).decoded().checkpoint()
        arrays = {name: checkpoint.read(name).copy() for name in checkpoint.tensors}
        return {
            name: torch.from_numpy(array).view(getattr(torch, checkpoint.tensors[name].meta.dtype))
            for name, array in arrays.items()
        }
    state: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        state |= load_file(path)
    if not state:
        raise FileNotFoundError(f"{directory}: no *.safetensors file")
    config = read_json(directory / "config.json")
    if config.get("quantization_config"):
        state = dequantize_state(state, config["quantization_config"])
    return state


def load_pretrained(
    directory: Path | str, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Target:
    """Loads a Hugging Face directory or a GGUF file. Its parameters are frozen."""
    directory = Path(directory)
    config = model_files(directory).decoded().json("config.json")
    config.pop("quantization_config", None)
    state = read_state(directory)
    # A checkpoint without tie_word_embeddings and without a head is tied.
    if "lm_head.weight" not in state:
        config["tie_word_embeddings"] = True
    state = {k: v for k, v in state.items() if not k.endswith("rotary_emb.inv_freq")}
    made = transformers_config(config)
    logging.disable_progress_bar()
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(made)].from_pretrained(
        None, config=made, state_dict=state, dtype=dtype
    )
    return Target(model.to(device).eval().requires_grad_(False), config)


def new_minicpm(config: Config, seed: int, dropout: float = 0.0) -> Target:
    """Creates a MiniCPM model for training. `dropout` applies to each residual branch.

    Matrices ~ N(0, 1/fan_in). Scaled embeddings have unit variance.
    """
    model = GraniteForCausalLM(transformers_config(config))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if parameter.dim() == 1:
            nn.init.ones_(parameter)
            continue
        std = 1 / config["scale_emb"] if "embed_tokens" in name else parameter.shape[1] ** -0.5
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * std)

    def drop(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        return F.dropout(output, dropout, module.training)

    for layer in model.model.layers if dropout else ():
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.down_proj.register_forward_hook(drop)
    return Target(model, config)
