"""Block-sparse attention after InfLLM-v2 for models of transformers, with gradients.

The rule is that of docs/kernels/sparse_attention.md. The choice of blocks has no gradient.

Shapes: B sequences, T tokens, H query heads, G KV heads, D head_dim, N blocks of 64 tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

BLOCK = 64
FINE = (32, 16)  # tokens of a fine compressed key, and tokens from one to the next
COARSE = (128, 64)
NAME = "infllm-v2"  # name of this attention in transformers


def compress(k: Tensor, span: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """k [B, G, T, D] -> the means [B, G, spans, D] of spans and the end of each span."""
    length, stride = span
    means = k.unfold(2, length, stride).mean(-1)
    return means, length + stride * torch.arange(means.shape[2], device=k.device)


def chosen_blocks(
    q: Tensor, k: Tensor, rule: dict[str, int], scale: float, own_normaliser: bool = False
) -> Tensor:
    """The blocks that each token attends to, [B, G, T, N].

    q [B, H, T, D] and k [B, G, T, D] of the tokens 0 .. T - 1, after RoPE. `own_normaliser`: Z over
    all compressed keys that end at or before the token, as the checkpoints' own code has it.
    """
    sequences, groups, tokens, _ = k.shape
    device = k.device
    position = torch.arange(tokens, device=device)
    own = position // BLOCK
    blocks = torch.arange(-(-tokens // BLOCK), device=device)
    first, window = rule["init_blocks"], rule["window_size"] // BLOCK
    chosen = (blocks < first) | (blocks > own[:, None] - window)
    chosen = (chosen | (position < rule["dense_len"])[:, None]) & (blocks <= own[:, None])
    chosen = chosen.expand(sequences, groups, tokens, len(blocks))
    count = min(rule["topk"] - first, len(blocks))
    if tokens < COARSE[0] or count == 0:
        return chosen
    fine, fine_ends = compress(k.float(), FINE)
    coarse, coarse_ends = compress(k.float(), COARSE)
    end = BLOCK * (own - 1)[:, None]
    grouped = scale * q.float().unflatten(1, (groups, -1))
    of_coarse = grouped @ coarse[:, :, None].mT
    seen = coarse_ends <= (position[:, None] + 1 if own_normaliser else end)
    normaliser = of_coarse.masked_fill(~seen, -torch.inf).logsumexp(-1, keepdim=True)
    total = (grouped @ fine[:, :, None].mT - normaliser).exp().sum(2)
    total = total.masked_fill(fine_ends > end, 0.0)  # [B, G, T, fine keys]
    scores = F.max_pool1d(F.pad(total, (1, 4)).flatten(0, 2), 5, 4).unflatten(0, total.shape[:3])
    scores = F.pad(scores, (0, max(0, len(blocks) - scores.shape[-1])))[..., : len(blocks)]
    between = (blocks >= first) & (blocks <= own[:, None] - window)
    scores = scores.masked_fill(~between, -1.0)
    # Neighbours share a compressed key. If their scores are equal, the lower block wins.
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    picked = torch.zeros_like(chosen, dtype=torch.bool).scatter(-1, best, True)
    return chosen | (picked & between)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Attention of whole sequences. The rule is `module.config.sparse_rule`; None: dense."""
    rule = module.config.sparse_rule
    mask = None
    repeats = query.shape[1] // key.shape[1]
    tokens = query.shape[2]
    if rule is not None and tokens > rule["dense_len"]:
        with torch.no_grad():
            mask = chosen_blocks(query, key, rule, scaling).repeat_interleave(BLOCK, -1)
            causal = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()
            mask = (mask[..., :tokens] & causal).repeat_interleave(repeats, 1)
    key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling
    )
    return out.transpose(1, 2).contiguous(), None


def set_rule(model: PreTrainedModel, rule: dict[str, int] | None) -> None:
    """Makes all attention of the model sparse; None: dense. It can't use a cache."""
    AttentionInterface.register(NAME, _attention)
    model.config._attn_implementation = NAME
    model.config.sparse_rule = rule


def queries_and_keys(
    model: PreTrainedModel, ids: Tensor, rule: dict[str, int] | None
) -> list[tuple[Tensor, Tensor]]:
    """Queries and keys of each layer after RoPE, for ids [B, T]."""
    seen = []

    def record(module: torch.nn.Module, query: Tensor, key: Tensor, *rest: Any, **more: Any) -> Any:
        seen.append((query, key))
        return _attention(module, query, key, *rest, **more)

    set_rule(model, rule)
    AttentionInterface.register(NAME, record)
    try:
        model(input_ids=ids, use_cache=False)
    finally:
        AttentionInterface.register(NAME, _attention)
    return seen
