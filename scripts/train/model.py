"""A MiniCPM / Llama decoder in plain PyTorch, for training and as a readable reference.

    x = scale_emb * embed[ids]
    x = x + residual_scale * attention(norm(x))      residual_scale = scale_depth / sqrt(L)
    x = x + residual_scale * mlp(norm(x))
    logits = head @ (norm(x) * dim_model_base / H)

RMSNorm, rotary positions on half-split pairs (NeoX), grouped-query attention, SwiGLU. With tied
embeddings the head is the unscaled table. A Llama is the case where all three scales are 1;
biases on q, k, v (Qwen2) and norms on q and k (Qwen3) are options, so that the directories of
these families load too.

Shapes: B sequences, T tokens, S cached tokens, H hidden, Hq/Hkv heads, D head_dim, V vocabulary,
L layers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gptq import dequantize_state
from safetensors.torch import load_file
from torch import Tensor, nn

KVCache = list[tuple[Tensor, Tensor]]  # per layer: keys and values, [B, Hkv, S, D] each


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The keys of config.json that the forward pass needs, under their own names."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = True
    scale_emb: float = 12.0
    scale_depth: float | None = 1.4  # None: residual branches are not scaled
    dim_model_base: float | None = 64  # None: the head's input is not scaled
    qkv_bias: bool = False
    qk_norm: bool = False
    dropout: float = 0.0  # of each residual branch, in training only

    @property
    def residual_scale(self) -> float:
        if self.scale_depth is None:
            return 1.0
        return self.scale_depth / math.sqrt(self.num_hidden_layers)

    @property
    def head_scale(self) -> float:
        if self.dim_model_base is None:
            return 1.0
        return self.dim_model_base / self.hidden_size

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> ModelConfig:
        """Read a Hugging Face config.json of the Llama, MiniCPM, Qwen2 or Qwen3 family."""
        kind = config.get("model_type", "llama")
        if kind not in ("llama", "mistral", "minicpm", "qwen2", "qwen3"):
            raise ValueError(f"model_type {kind!r} is not one of llama, mistral, minicpm, qwen2/3")
        heads = config["num_attention_heads"]
        rope = config.get("rope_scaling") or config.get("rope_parameters")
        theta = config.get("rope_theta") or (rope or {}).get("rope_theta") or 10000.0
        return cls(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            num_hidden_layers=config["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate_size=config["intermediate_size"],
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=float(theta),
            rope_scaling=rope,
            max_position_embeddings=config.get("max_position_embeddings", 2048),
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            scale_emb=float(config.get("scale_emb", 1.0)),
            scale_depth=config.get("scale_depth"),
            dim_model_base=config.get("dim_model_base"),
            qkv_bias=kind == "qwen2",
            qk_norm=kind == "qwen3",
        )

    def to_hf(self) -> dict[str, Any]:
        """The config.json of a model that this recipe trains (MiniCPM)."""
        if self.qkv_bias or self.qk_norm or self.scale_depth is None or self.dim_model_base is None:
            raise ValueError("only MiniCPM models are written: scales set, no biases, no q/k norms")
        return {
            "architectures": ["MiniCPMForCausalLM"],
            "model_type": "minicpm",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "dim_model_base": self.dim_model_base,
            "eos_token_id": [2, 4],
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.1,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_position_embeddings,
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "pad_token_id": 0,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_scaling": self.rope_scaling,
            "rope_theta": self.rope_theta,
            "scale_depth": self.scale_depth,
            "scale_emb": self.scale_emb,
            "tie_word_embeddings": self.tie_word_embeddings,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": self.vocab_size,
        }


# ---- positions


def rope_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Inverse frequencies [D/2] in fp32, and the factor on cos and sin (1 unless longrope)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    inverse = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return inverse, 1.0
    if kind == "linear":
        return inverse / scaling["factor"], 1.0
    if kind == "llama3":
        original = scaling["original_max_position_embeddings"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = original * inverse / (2 * math.pi)  # full turns within the original context
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return inverse * (keep + (1 - keep) / scaling["factor"]), 1.0
    if kind == "longrope":
        longest = config.max_position_embeddings
        original = scaling.get("original_max_position_embeddings", longest)
        name = "short_factor" if longest <= original else "long_factor"
        factors = torch.tensor(scaling[name], dtype=torch.float32)
        stretch = max(longest / original, 1.0)
        return inverse / factors, math.sqrt(1 + math.log(stretch) / math.log(original))
    raise ValueError(f"rope_type {kind!r} is not one of default, linear, llama3, longrope")


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + D/2) of x [B, heads, T, D]; cos and sin are [T, D/2]."""
    first, second = x.float().chunk(2, dim=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(rotated, dim=-1).to(x.dtype)


# ---- layers


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        scaled = x.float()
        scaled = scaled * torch.rsqrt(scaled.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, input_size: int | None = None) -> None:
        """`input_size` differs from H in draft heads that read two streams side by side."""
        super().__init__()
        size = input_size or config.hidden_size
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.head_dim = config.head_dim
        self.group = config.num_attention_heads // config.num_key_value_heads
        self.q_proj = nn.Linear(size, q_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(size, kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(size, kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.qk_norm = config.qk_norm

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None = None,
        past: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """x [B, T, H] -> [B, T, H] and the keys and values so far.

        Without a mask attention is causal. A mask [T, S + T] is boolean, true = visible.
        """
        batch, tokens, _ = x.shape
        q = self.q_proj(x).view(batch, tokens, -1, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, tokens, -1, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, tokens, -1, self.head_dim).transpose(1, 2)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if past is not None:
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
        causal = mask is None and past is None
        if mask is None and past is not None and tokens > 1:  # one new token sees everything
            visible = torch.ones(tokens, k.shape[2], dtype=torch.bool, device=x.device)
            mask = visible.tril(k.shape[2] - tokens)
        y = F.scaled_dot_product_attention(
            q,
            k.repeat_interleave(self.group, dim=1),
            v.repeat_interleave(self.group, dim=1),
            attn_mask=mask,
            is_causal=causal,
        )
        return self.o_proj(y.transpose(1, 2).reshape(batch, tokens, -1)), (k, v)


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.residual_scale = config.residual_scale
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None = None,
        past: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        y, kv = self.self_attn(self.input_layernorm(x), cos, sin, mask, past)
        x = x + self.residual_scale * self.dropout(y)
        y = self.mlp(self.post_attention_layernorm(x))
        x = x + self.residual_scale * self.dropout(y)
        return x, kv


# ---- model


@dataclass(slots=True)
class Output:
    """What one forward pass leaves behind; draft heads are trained on `hidden` or `features`."""

    logits: Tensor | None  # [B, T, V]
    hidden: Tensor  # [B, T, H] after the final norm
    residual: Tensor  # [B, T, H] before the final norm
    features: list[Tensor]  # residual stream entering each requested layer, [B, T, H] each
    cache: KVCache


class CausalLM(nn.Module):
    """Parameter names equal the tensor names of a Hugging Face checkpoint."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        layers = [DecoderLayer(config) for _ in range(config.num_hidden_layers)]
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(config.vocab_size, config.hidden_size),
                "layers": nn.ModuleList(layers),
                "norm": RMSNorm(config.hidden_size, config.rms_norm_eps),
            }
        )
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.register_buffer("inverse_frequencies", torch.empty(0), persistent=False)
        self.attention_factor = 1.0
        self.set_rope()

    def set_rope(self) -> None:
        frequencies, self.attention_factor = rope_frequencies(self.config)
        self.inverse_frequencies = frequencies.to(self.device)

    @property
    def device(self) -> torch.device:
        return self.model["norm"].weight.device

    @property
    def head_weight(self) -> Tensor:
        """[V, H]"""
        if self.config.tie_word_embeddings:
            return self.model["embed_tokens"].weight
        return self.lm_head.weight

    def initialise(self, seed: int) -> None:
        """Matrices ~ N(0, 1/fan_in); embeddings so that the scaled ones have unit variance."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in sorted(self.named_parameters()):
            if parameter.dim() == 1:
                nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
                continue
            std = 1 / math.sqrt(parameter.shape[1])
            if "embed_tokens" in name:
                std = 1 / self.config.scale_emb
            values = torch.randn(parameter.shape, generator=generator) * std
            parameter.data.copy_(values)

    def embed(self, ids: Tensor) -> Tensor:
        return self.model["embed_tokens"](ids) * self.config.scale_emb

    def rope(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """cos and sin, [T, D/2] in fp32, of positions start .. start + count - 1."""
        positions = torch.arange(start, start + count, device=self.device, dtype=torch.float32)
        angles = positions[:, None] * self.inverse_frequencies[None, :]
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor

    def head(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden * self.config.head_scale, self.head_weight)

    def forward(
        self,
        ids: Tensor,
        past: KVCache | None = None,
        feature_layers: Sequence[int] = (),
        with_logits: bool = True,
    ) -> Output:
        """ids [B, T]; `past` continues earlier tokens."""
        start = past[0][0].shape[2] if past else 0
        cos, sin = self.rope(start, ids.shape[1])
        x = self.embed(ids)
        features: list[Tensor] = []
        cache: KVCache = []
        for index, layer in enumerate(self.model["layers"]):
            if index in feature_layers:
                features.append(x)
            x, kv = layer(x, cos, sin, past=past[index] if past else None)
            cache.append(kv)
        hidden = self.model["norm"](x)
        logits = self.head(hidden) if with_logits else None
        return Output(logits, hidden, x, features, cache)

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Mean next-token cross-entropy, in nats."""
        logits = self(ids).logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(
        self,
        ids: Sequence[int],
        max_new_tokens: int,
        temperature: float = 0.0,
        stop_ids: Iterable[int] = (),
        seed: int = 0,
    ) -> list[int]:
        """New token ids after a prompt; greedy at temperature 0. Stops after a stop id."""
        generator = torch.Generator().manual_seed(seed)
        stops = set(stop_ids)
        chunk = torch.tensor([list(ids)], device=self.device)
        past: KVCache | None = None
        new: list[int] = []
        while len(new) < max_new_tokens:
            output = self(chunk, past)
            logits = output.logits[0, -1].float().cpu()
            if temperature > 0:
                probabilities = torch.softmax(logits / temperature, dim=-1)
                token = int(torch.multinomial(probabilities, 1, generator=generator))
            else:
                token = int(logits.argmax())
            new.append(token)
            if token in stops:
                break
            past = output.cache
            chunk = torch.tensor([[token]], device=self.device)
        return new


# ---- checkpoints


def read_state(directory: Path) -> dict[str, Tensor]:
    """The tensors of one or several safetensors files; 4-bit ones of GPTQ as float32 weights."""
    state: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        state |= load_file(path)
    if not state:
        raise FileNotFoundError(f"{directory}: no *.safetensors file")
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    if config.get("quantization_config"):
        state = dequantize_state(state, config["quantization_config"])
    return state


def load_pretrained(
    directory: Path | str, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> CausalLM:
    """Load a Hugging Face directory, as `read_state` reads it."""
    directory = Path(directory)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    state = read_state(directory)
    if "lm_head.weight" in state and config.get("tie_word_embeddings", False):
        del state["lm_head.weight"]
    # A checkpoint that says nothing about tying and has no head is tied.
    if "lm_head.weight" not in state:
        config["tie_word_embeddings"] = True
    state = {k: v for k, v in state.items() if not k.endswith("rotary_emb.inv_freq")}
    with torch.device("meta"):
        model = CausalLM(ModelConfig.from_hf(config))
    model.load_state_dict({k: v.to(device, dtype) for k, v in state.items()}, assign=True)
    model.set_rope()
    return model.eval()
