"""Draft heads, built of transformers' layers: forward and training.

A draft head predicts tokens after the next one from the target's hidden states. Row t reads the
target's hidden state h at position t and the embedding e of token t + 1, which the target has
chosen. It has rotary position t and predicts token t + 2. The next draft token comes from row
t + 1, which reads the head's own output of row t in place of a hidden state.

    eagle2   x = fc [norm1(e) | norm2(h)]           h = the target's final-norm output
             x = x + s * attention(norm(x));  x = x + s * mlp(norm(x))
             logits = target.head(x)                recycled: x
    eagle3   h = fc [f1 | f2 | f3]                  f = residual streams entering three layers;
             x = h + attention([norm(e) | norm(h)])     fc is not applied to a recycled h
             x = x + mlp(norm(x))
             logits = lm_head(norm(x))              recycled: x
                                                    without an lm_head: the target's rows

e is the target's embedding times its scale_emb. For a MiniCPM target s = scale_depth / sqrt(L + 1)
with L the layers of the target, and the target's head scales its input by dim_model_base / H as
always. For other targets eagle2 is the original EAGLE: s = 1, and neither norm1, norm2 nor the
norm before attention exists.

The logits of eagle3 are over a draft vocabulary of Vd tokens: index i is token i + d2t[i] of the
target.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from model import Config, Output, Target, granite_config
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GraniteConfig
from transformers.models.granite.modeling_granite import GraniteDecoderLayer, GraniteRMSNorm


def aux_layers(num_layers: int) -> tuple[int, int, int]:
    """Returns the layers (counted from 0) whose inputs are the auxiliary hidden states of EAGLE-3.

    They are 2, L/2 and L - 3, the default of other engines. If these are not ascending (L < 7),
    the last three layers are used, and the file names them.
    """
    if num_layers < 3:
        raise ValueError(f"EAGLE-3 reads three layers and the target has {num_layers}")
    usual = (2, num_layers // 2, num_layers - 3)
    if usual[0] < usual[1] < usual[2]:
        return usual
    return (num_layers - 3, num_layers - 2, num_layers - 1)


class Head(nn.Module):
    """Base of all kinds of head. Parameter names are the tensor names of the checkpoint."""

    kind = ""
    scaled = False  # the MiniCPM layout of eagle2
    aux_layers: tuple[int, ...] = ()
    longest: int | None = None  # maximum number of tokens of a chain; None: any

    def __init__(self, target: Config, residual_scale: float = 1.0, **shape: int) -> None:
        """`target`: the target's config.json.

        `shape` may set intermediate_size, num_attention_heads, num_key_value_heads, head_dim.
        """
        super().__init__()
        self.target = target
        self.config = granite_config(target | {"num_hidden_layers": 1, **shape}, residual_scale)
        self.config._attn_implementation = "sdpa"

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def start(self, target: Output) -> Tensor:
        """Returns the first step's input hidden state [B, T, H] from the target's output."""
        return target.hidden

    def step(
        self,
        embedding: Tensor,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None = None,
        past: Cache | None = None,
    ) -> tuple[Tensor, Cache]:
        """Maps embedding and hidden [B, T, H] to the recycled hidden state, and appends to `past`.

        Without a mask attention is causal. A mask [T, S + T] is boolean; true: visible.
        """
        raise NotImplementedError

    def logits(self, x: Tensor, target: Target) -> Tensor:
        """Returns logits [B, T, V], or [B, T, Vd] for a head with a draft vocabulary."""
        return target.head(x)

    def to_target(self, index: Tensor) -> Tensor:
        """Converts indices of the logits to the target's token ids."""
        return index

    def in_draft_vocabulary(self, values: Tensor) -> Tensor:
        """Selects the columns of [..., V] that are in the head's vocabulary."""
        return values

    def unroll(
        self, hidden: Tensor, embeddings: Tensor, cos: Tensor, sin: Tensor, steps: int
    ) -> list[Tensor]:
        """Runs `steps` steps for all rows of a known text; returns one [B, T, H] per step.

        Row p of step s belongs to the chain that began at row p - s. It reads row p - 1 of step
        s - 1. It attends to step 0 up to row p - s, then to one row of each later step, like a
        chain in an engine. Rows p < s of step s belong to no chain.
        """
        rows = torch.arange(hidden.shape[1], device=hidden.device)
        lag = rows[:, None] - rows[None, :]  # [T, T], query row minus key row
        past: Cache | None = None
        outputs: list[Tensor] = []
        for step in range(steps):
            blocks = [lag >= step] + [lag == step - i for i in range(1, step + 1)]
            x, past = self.step(embeddings, hidden, cos, sin, torch.cat(blocks, dim=1), past)
            outputs.append(x)
            hidden = F.pad(x[:, :-1], (0, 0, 1, 0))
        return outputs

    def training_steps(
        self, hidden: Tensor, embeddings: Tensor, cos: Tensor, sin: Tensor, depth: int
    ) -> list[tuple[int, Tensor]]:
        """Returns (s, output) of all steps that are trained. Row p of step s predicts p + 2."""
        return list(enumerate(self.unroll(hidden, embeddings, cos, sin, depth)))

    @torch.no_grad()
    def chains(self, ids: Tensor, target: Target, depth: int) -> Tensor:
        """The head's first choices [B, T - 1 - depth, depth] along a known text, ids [B, T].

        Entry (b, t, i) is for token t + 2 + i, given that the tokens before it are those of ids.
        """
        count = ids.shape[1] - 1 - depth
        output = target(ids[:, :-1], aux_layers=self.aux_layers, with_logits=False)
        cos, sin = target.rope(0, ids.shape[1] - 1)
        embeddings = target.embed(ids[:, 1:])
        steps = self.unroll(self.start(output), embeddings, cos, sin, depth)
        best = [self.to_target(self.logits(x, target).argmax(-1)) for x in steps]
        return torch.stack([each[:, i : i + count] for i, each in enumerate(best)], dim=-1)

    def initialise(self, seed: int) -> None:
        """Matrices ~ N(0, 1/fan_in)."""
        generator = torch.Generator().manual_seed(seed)
        for _, parameter in sorted(self.named_parameters()):
            if parameter.dim() == 2:
                values = torch.randn(parameter.shape, generator=generator)
                parameter.data.copy_(values / math.sqrt(parameter.shape[1]))

    def architecture(self) -> dict[str, Any]:
        """Returns the keys of config.json that identify this kind of head."""
        raise NotImplementedError

    def to_hf(self) -> dict[str, Any]:
        config, rope = self.config, dict(self.config.rope_parameters)
        theta = rope.pop("rope_theta")
        return {
            **self.architecture(),
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "max_position_embeddings": config.max_position_embeddings,
            "num_attention_heads": config.num_attention_heads,
            "num_hidden_layers": 1,
            "num_key_value_heads": config.num_key_value_heads,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_scaling": None if rope == {"rope_type": "default"} else rope,
            "rope_theta": theta,
            "torch_dtype": "bfloat16",
            "vocab_size": config.vocab_size,
        }


def attend(
    layer: nn.Module, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, past: Cache
) -> Any:
    """Calls `layer`, a decoder layer or an attention of transformers, for `Head.step`."""
    return layer(
        x,
        position_embeddings=(cos, sin),
        attention_mask=None if mask is None else mask[None, None],
        past_key_values=past,
    )


class Eagle2(Head):
    kind = "eagle2"

    def __init__(self, target: Config, **shape: int) -> None:
        depth = target.get("scale_depth")
        scale = 1.0 if depth is None else depth / math.sqrt(target["num_hidden_layers"] + 1)
        super().__init__(target, scale, **shape)
        self.scaled = depth is not None
        size, eps = self.config.hidden_size, self.config.rms_norm_eps
        self.fc = nn.Linear(2 * size, size, bias=False)
        layer = GraniteDecoderLayer(self.config, layer_idx=0)
        if self.scaled:
            self.input_norm1 = GraniteRMSNorm(size, eps)
            self.input_norm2 = GraniteRMSNorm(size, eps)
        else:
            layer.input_layernorm = nn.Identity()
        self.layers = nn.ModuleList([layer])

    def step(
        self,
        embedding: Tensor,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None = None,
        past: Cache | None = None,
    ) -> tuple[Tensor, Cache]:
        if self.scaled:
            embedding, hidden = self.input_norm1(embedding), self.input_norm2(hidden)
        x = self.fc(torch.cat((embedding, hidden), dim=-1))
        past = DynamicCache() if past is None else past
        return attend(self.layers[0], x, cos, sin, mask, past), past

    def architecture(self) -> dict[str, Any]:
        if not self.scaled:
            return {
                "architectures": ["LlamaForCausalLMEagle"],
                "model_type": "llama",
                "tie_word_embeddings": False,
            }
        return {
            "architectures": ["EagleMiniCPMForCausalLM"],
            "model_type": "minicpm",
            "dim_model_base": self.target["dim_model_base"],
            "scale_depth": self.target["scale_depth"],
            "scale_emb": float(self.target["scale_emb"]),
            # Engines that read the residual scale from this key also get scale_depth / sqrt(L + 1).
            "mup_denominator": self.target["num_hidden_layers"] + 1,
            "tie_word_embeddings": self.target.get("tie_word_embeddings", False),
        }


class MidLayer(GraniteDecoderLayer):
    """A Llama layer whose attention reads the concatenated embedding and hidden state."""

    def __init__(self, config: GraniteConfig) -> None:
        super().__init__(config, layer_idx=0)
        self.hidden_norm = GraniteRMSNorm(config.hidden_size, config.rms_norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = self.self_attn.get_submodule(name).out_features
            wide = nn.Linear(2 * config.hidden_size, rows, bias=False)
            self.self_attn.register_module(name, wide)


class Eagle3(Head):
    kind = "eagle3"

    def __init__(
        self, target: Config, draft_tokens: Iterable[int], own_head: bool = True, **shape: int
    ) -> None:
        """`draft_tokens`: the target's token ids in the draft vocabulary, ascending.

        Without `own_head` the logits come from the target's rows of these tokens.
        """
        super().__init__(target, **shape)
        size = self.config.hidden_size
        ids = torch.as_tensor(list(draft_tokens), dtype=torch.int64)
        if not bool((ids.diff() > 0).all()):
            raise ValueError("the draft vocabulary must be in ascending order, without repeats")
        self.aux_layers = aux_layers(target["num_hidden_layers"])
        self.fc = nn.Linear(3 * size, size, bias=False)
        self.midlayer = MidLayer(self.config)
        self.norm = GraniteRMSNorm(size, self.config.rms_norm_eps)
        self.lm_head = nn.Linear(size, len(ids), bias=False) if own_head else None
        self.d2t: Tensor
        self.t2d: Tensor
        self.register_buffer("d2t", ids - torch.arange(len(ids)))
        self.register_buffer("t2d", torch.zeros(target["vocab_size"], dtype=torch.bool))
        self.t2d[ids] = True

    @property
    def draft_tokens(self) -> Tensor:
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def start(self, target: Output) -> Tensor:
        return self.fc(torch.cat(target.aux_hidden, dim=-1))

    def step(
        self,
        embedding: Tensor,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None = None,
        past: Cache | None = None,
    ) -> tuple[Tensor, Cache]:
        layer = self.midlayer
        both = torch.cat((layer.input_layernorm(embedding), layer.hidden_norm(hidden)), dim=-1)
        past = DynamicCache() if past is None else past
        x = hidden + attend(layer.self_attn, both, cos, sin, mask, past)[0]
        return x + layer.mlp(layer.post_attention_layernorm(x)), past

    def logits(self, x: Tensor, target: Target) -> Tensor:
        x = self.norm(x)
        if self.lm_head is not None:
            return self.lm_head(x)
        rows = target.model.lm_head.weight[self.draft_tokens]
        return F.linear(x, rows.to(x.dtype)) * target.head_scale

    def to_target(self, index: Tensor) -> Tensor:
        return index + self.d2t[index]

    def in_draft_vocabulary(self, values: Tensor) -> Tensor:
        return values[..., self.draft_tokens]

    @torch.no_grad()
    def copy_head(self, target: Target) -> None:
        """Copies the target's final norm, and its head for an own one, as initial weights."""
        self.norm.weight.copy_(target.model.model.norm.weight)
        if self.lm_head is None:
            return
        rows = target.model.lm_head.weight[self.draft_tokens.to(target.device)]
        self.lm_head.weight.copy_(rows.float() * target.head_scale)

    def architecture(self) -> dict[str, Any]:
        scale = float(self.target.get("scale_emb", 1.0))
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "draft_vocab_size": len(self.d2t),
            "eagle_aux_hidden_state_layer_ids": list(self.aux_layers),
            **({} if scale == 1 else {"scale_emb": scale}),
            "tie_word_embeddings": False,
        }
