"""Block drafters: one pass drafts all tokens of a chain. DSpark, DFlash and JetSpec.

A block begins at its anchor, the newest token, at position p. The target's hidden states of all
tokens before it are known.

    context   c = hidden_norm(fc [f1 | f2 | f3])      f = residual streams entering three layers
              each layer's keys and values of a token before p come from c alone
    block     x = s [e, m, m, ...]                    e = the anchor's embedding, m = mask_embedding
              x = x + attention(norm(x))              rows p, p + 1, ... see c and their block
              x = x + mlp(norm(x))
              logits = target's lm_head(norm(x))
    dspark    logits = logits + W2 W1[previous token] row j predicts token p + j + 1

Row j of dflash and jetspec predicts token p + j, so row 0, the anchor, predicts nothing. A row of
jetspec sees no later rows of its block. Attention is Qwen3's: queries and keys are normalised in
each head. s is the target's scale_emb. A scale of the target's logits is part of the norm's weight,
so the files need no output_multiplier.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from drafts import Head, aux_layers
from model import Config, Target
from torch import Tensor, nn
from transformers import GraniteConfig
from transformers.models.granite.modeling_granite import (
    GraniteMLP,
    GraniteRMSNorm,
    repeat_kv,
    rotate_half,
)

KINDS = ("dspark", "dflash", "jetspec")
ARCHITECTURES = {
    "dspark": "Qwen3DSparkModel",
    "dflash": "DFlashDraftModel",
    "jetspec": "DFlashDraftModel",
}
PASSED_NOISE = 0.05  # scale of the random part of an initial fc
Rope = tuple[Tensor, Tensor]  # cos and sin, [1, T, D]


class BlockAttention(nn.Module):
    """Attention whose keys and values come from a context and from the block."""

    def __init__(self, config: GraniteConfig) -> None:
        super().__init__()
        size, dim, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        wide, narrow = config.num_attention_heads * dim, config.num_key_value_heads * dim
        self.dim, self.groups = dim, config.num_attention_heads // config.num_key_value_heads
        self.q_proj = nn.Linear(size, wide, bias=False)
        self.k_proj = nn.Linear(size, narrow, bias=False)
        self.v_proj = nn.Linear(size, narrow, bias=False)
        self.o_proj = nn.Linear(wide, size, bias=False)
        self.q_norm, self.k_norm = GraniteRMSNorm(dim, eps), GraniteRMSNorm(dim, eps)

    def heads(self, x: Tensor) -> Tensor:
        """Returns [B, heads, T, D] for [B, T, heads * D]."""
        return x.unflatten(-1, (-1, self.dim)).transpose(1, 2)

    def rotated(self, x: Tensor, rope: Rope) -> Tensor:
        cos, sin = rope[0][:, None], rope[1][:, None]
        return x * cos + rotate_half(x) * sin

    def forward(
        self, x: Tensor, context: Tensor, rope: Rope, context_rope: Rope, mask: Tensor
    ) -> Tensor:
        """x [B, R, H], context [B, T, H], mask [R, T + R]: true is visible."""
        both = torch.cat((context, x), dim=1)
        cos, sin = (torch.cat(pair, dim=1) for pair in zip(context_rope, rope, strict=True))
        query = self.rotated(self.q_norm(self.heads(self.q_proj(x))), rope)
        keys = self.rotated(self.k_norm(self.heads(self.k_proj(both))), (cos, sin))
        values = self.heads(self.v_proj(both))
        mixed = F.scaled_dot_product_attention(
            query, repeat_kv(keys, self.groups), repeat_kv(values, self.groups), mask
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))


class BlockLayer(nn.Module):
    def __init__(self, config: GraniteConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = GraniteRMSNorm(size, eps)
        self.post_attention_layernorm = GraniteRMSNorm(size, eps)
        self.self_attn = BlockAttention(config)
        self.mlp = GraniteMLP(config)

    def forward(
        self, x: Tensor, context: Tensor, rope: Rope, context_rope: Rope, mask: Tensor
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, rope, context_rope, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Block(Head):
    """A block drafter. `longest` is the number of tokens that a block predicts."""

    def __init__(
        self,
        target: Config,
        kind: str = "dspark",
        num_layers: int = 2,
        tokens: int = 5,
        rank: int = 48,
        **shape: int,
    ) -> None:
        """A block predicts `tokens` tokens. `rank` is that of the Markov head of a dspark draft."""
        super().__init__(target, **shape)
        if kind not in KINDS:
            raise ValueError(f"the kind is {kind!r}, expected one of {', '.join(KINDS)}")
        self.kind, self.longest = kind, tokens
        self.first_row = 0 if kind == "dspark" else 1  # the first row that predicts
        self.aux_layers = aux_layers(target["num_hidden_layers"])
        size, eps = self.config.hidden_size, self.config.rms_norm_eps
        self.fc = nn.Linear(len(self.aux_layers) * size, size, bias=False)
        self.hidden_norm, self.norm = GraniteRMSNorm(size, eps), GraniteRMSNorm(size, eps)
        self.mask_embedding = nn.Parameter(torch.zeros(size))
        self.layers = nn.ModuleList([BlockLayer(self.config) for _ in range(num_layers)])
        self.markov_head: nn.ModuleDict | None = None
        if kind == "dspark":
            words = self.config.vocab_size
            pair = {"markov_w1": nn.Embedding(words, rank)}
            self.markov_head = nn.ModuleDict({**pair, "markov_w2": nn.Linear(rank, words, False)})

    @property
    def num_rows(self) -> int:
        assert self.longest is not None
        return self.longest + self.first_row

    def block_mask(self, anchors: Tensor, count: int) -> Tensor:
        """[A R, count + A R]: what the rows of blocks at `anchors` [A] see; true is visible."""
        rows = torch.arange(len(anchors) * self.num_rows, device=anchors.device)
        block, row = rows // self.num_rows, rows % self.num_rows
        before = torch.arange(count, device=anchors.device) < anchors[block][:, None]
        same = block[:, None] == block
        if self.kind == "jetspec":
            same &= row[:, None] >= row
        return torch.cat((before, same), dim=1)

    def run(self, anchors: Tensor, ids: Tensor, states: list[Tensor], target: Target) -> Tensor:
        """Hidden states [B, A, longest, H] of the predicting rows, for anchors [A] in ids [B, T].

        `states`: the residual streams of the tokens of ids, or more tokens.
        """
        count, num_rows = ids.shape[1], self.num_rows
        positions = anchors[:, None] + torch.arange(num_rows, device=ids.device)
        cos, sin = target.rope(0, count + num_rows)
        flat = positions.flatten()
        rope, context_rope = (cos[:, flat], sin[:, flat]), (cos[:, :count], sin[:, :count])
        context = torch.cat([state[:, :count] for state in states], dim=-1)
        context = self.hidden_norm(self.fc(context))
        root = target.embed(ids[:, anchors])[:, :, None]  # [B, A, 1, H]
        mask_row = self.mask_embedding * self.config.embedding_multiplier
        masks = mask_row.to(root.dtype).expand(*root.shape[:2], num_rows - 1, -1)
        x = torch.cat((root, masks), dim=2).flatten(1, 2)
        mask = self.block_mask(anchors, count)
        for layer in self.layers:
            x = layer(x, context, rope, context_rope, mask)
        x = x.unflatten(1, (len(anchors), num_rows))
        return self.norm(x[:, :, self.first_row :])

    def block_logits(self, x: Tensor, previous: Tensor, target: Target) -> Tensor:
        """Logits [..., V] of hidden states [..., H]. `previous` [...]: the tokens before."""
        logits = target.model.lm_head(x)
        if self.markov_head is None:
            return logits
        return logits + self.markov_head["markov_w2"](self.markov_head["markov_w1"](previous))

    @torch.no_grad()
    def chains(self, ids: Tensor, target: Target, depth: int) -> Tensor:
        count = ids.shape[1] - 1 - depth
        states = target(ids, aux_layers=self.aux_layers, with_logits=False).aux_hidden
        parts = []
        for anchors in torch.arange(1, count + 1, device=ids.device).split(32):
            x = self.run(anchors, ids, states, target)[:, :, :depth]
            previous = ids[:, anchors[:, None] + torch.arange(depth, device=ids.device)]
            parts.append(self.block_logits(x, previous, target).argmax(-1))
        return torch.cat(parts, dim=1)

    def initialise(self, seed: int) -> None:
        super().initialise(seed)
        if self.markov_head is not None:
            nn.init.zeros_(self.markov_head["markov_w2"].weight)

    @torch.no_grad()
    def initialise_from(self, target: Target, seed: int) -> None:
        """Copies the target's final norm, and tensors of its last layers if the shapes are equal.

        The last auxiliary hidden state passes through fc, so the keys and values of the last layer
        are almost the target's. `mask_embedding` is random, with the size of a token's embedding.
        """
        generator = torch.Generator().manual_seed(seed)
        config, size = target.model.config, self.config.hidden_size
        residual_scale = getattr(config, "residual_multiplier", 1.0)
        for layer, source in zip(reversed(self.layers), reversed(target.layers)):
            found = dict(source.named_parameters())
            for name, parameter in layer.named_parameters():
                if name in found and found[name].shape == parameter.shape:
                    added = name.endswith(("o_proj.weight", "down_proj.weight"))
                    parameter.copy_(found[name] * (residual_scale if added else 1))
        self.fc.weight.mul_(PASSED_NOISE)
        self.fc.weight[:, -size:].diagonal().add_(1)
        self.hidden_norm.weight.copy_(target.layers[-1].input_layernorm.weight)
        self.norm.weight.copy_(target.model.model.norm.weight * target.head_scale)
        table = target.model.get_input_embeddings().weight
        self.mask_embedding.copy_(torch.randn(size, generator=generator))
        self.mask_embedding.mul_(table.float().std().to(self.mask_embedding))

    def architecture(self) -> dict[str, Any]:
        """Returns the config. `mask_token_id` is a placeholder: the file has a mask_embedding."""
        layers = [layer - 1 for layer in self.aux_layers]  # outputs of layers, not inputs
        mask = self.target.get("pad_token_id") or 0
        common: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self.kind]],
            "model_type": "qwen3",
            "attention_bias": False,
            "block_size": self.num_rows,
            "input_embedding_scale": float(self.config.embedding_multiplier),
            "num_target_layers": self.target["num_hidden_layers"],
            "tie_word_embeddings": False,
        }
        if self.markov_head is not None:
            return common | {
                "enable_confidence_head": False,
                "markov_head_type": "vanilla",
                "markov_rank": self.markov_head["markov_w1"].embedding_dim,
                "mask_token_id": mask,
                "target_layer_ids": layers,
            }
        nested = {"mask_token_id": mask, "target_layer_ids": layers}
        causal = {"causal_head": True} if self.kind == "jetspec" else {}
        return common | {"dflash_config": nested | causal}

    def to_hf(self) -> dict[str, Any]:
        return super().to_hf() | {"num_hidden_layers": len(self.layers)}
