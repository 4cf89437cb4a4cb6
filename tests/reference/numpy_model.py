"""A transformer in plain numpy: the reference of tests that run without torch.

It supports all fields of a ModelSpec: grouped-query attention, rotary embedding with any
inverse frequencies, RMSNorm on q and k heads, a bias on q, k and v, muP scales, a tied head,
experts and sparse attention.
Weights have the names and shapes of a Hugging Face Llama checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cpmcu.models.common import SpecFields
from tests.reference import fp8, sparse
from tests.reference.ops import route

Array = npt.NDArray[Any]


class NumpyModel:
    """`weights`: name -> floating array. All arithmetic is in `dtype`.

    `fp8_cache`: keys and values are rounded as in an fp8 KV cache.
    """

    def __init__(
        self,
        fields: SpecFields,
        weights: Mapping[str, Array],
        dtype: type[np.floating[Any]] = np.float64,
        fp8_cache: bool = False,
    ) -> None:
        self.fields = fields
        self.weights = {name: np.asarray(array, dtype) for name, array in weights.items()}
        self.dtype = dtype
        self.fp8_cache = fp8_cache
        self.chosen: list[Array] = []  # [T, k] experts of each layer with experts, in order of runs

    def logits(self, ids: Sequence[int]) -> Array:
        """Returns the logits [T, V] of the whole sequence."""
        fields, weights = self.fields, self.weights
        embedding = weights["model.embed_tokens.weight"]
        hidden = embedding[np.asarray(ids)] * fields.embed_scale
        for layer in range(fields.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            normed = self._norm(hidden, weights[prefix + "input_layernorm.weight"])
            blocks = dict(fields.layers[layer]) if fields.layers else {}
            rule = blocks.get("sparse_attention")
            attended = self._attention(normed, prefix, rule and sparse.Rule(**rule))
            hidden = hidden + attended * fields.residual_scale
            normed = self._norm(hidden, weights[prefix + "post_attention_layernorm.weight"])
            hidden = hidden + self._mlp_or_experts(normed, layer) * fields.residual_scale
        hidden = self._norm(hidden, weights["model.norm.weight"]) * fields.logit_scale
        head = embedding if fields.tie_word_embeddings else weights["lm_head.weight"]
        return hidden @ head.T

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The tokens that greedy decoding appends. It runs the whole sequence for each token."""
        ids = list(prompt)
        for _ in range(num_tokens):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[len(prompt) :]

    def _norm(self, x: Array, weight: Array) -> Array:
        mean_square = (x * x).mean(-1, keepdims=True)
        return x / np.sqrt(mean_square + self.dtype(self.fields.rms_norm_eps)) * weight

    def _heads(self, x: Array, prefix: str, part: str, num_heads: int) -> Array:
        projected = x @ self.weights[f"{prefix}self_attn.{part}_proj.weight"].T
        if self.fields.qkv_bias:
            projected = projected + self.weights[f"{prefix}self_attn.{part}_proj.bias"]
        return projected.reshape(len(x), num_heads, self.fields.head_dim)  # [T, heads, D]

    def _rotate(self, x: Array) -> Array:
        inv_freq = np.asarray(self.fields.rope_inv_freq, self.dtype)
        half = inv_freq.size
        angles = np.arange(len(x), dtype=self.dtype)[:, None, None] * inv_freq
        cos = np.cos(angles) * self.fields.rope_attention_scaling
        sin = np.sin(angles) * self.fields.rope_attention_scaling
        left, right, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return np.concatenate([left * cos - right * sin, right * cos + left * sin, rest], -1)

    def _attention(self, x: Array, prefix: str, rule: sparse.Rule | None) -> Array:
        fields = self.fields
        q = self._heads(x, prefix, "q", fields.num_attention_heads)
        k = self._heads(x, prefix, "k", fields.num_key_value_heads)
        v = self._heads(x, prefix, "v", fields.num_key_value_heads)
        if fields.qk_norm:
            q = self._norm(q, self.weights[prefix + "self_attn.q_norm.weight"])
            k = self._norm(k, self.weights[prefix + "self_attn.k_norm.weight"])
        q, k = self._rotate(q), self._rotate(k)
        if self.fp8_cache:
            k, v = (fp8.dequantised(rows).astype(self.dtype) for rows in (k, v))
        projection = self.weights[prefix + "self_attn.o_proj.weight"].T
        if rule is not None:
            out = sparse.attention(q, k, v, rule, fields.head_dim**-0.5)
            return out.reshape(len(x), -1) @ projection
        group = fields.num_attention_heads // fields.num_key_value_heads
        future = np.triu(np.ones((len(x), len(x)), bool), 1)
        outputs = []
        for head in range(fields.num_attention_heads):
            scores = q[:, head] @ k[:, head // group].T / np.sqrt(self.dtype(fields.head_dim))
            scores = np.where(future, -np.inf, scores)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            outputs.append(weights / weights.sum(-1, keepdims=True) @ v[:, head // group])
        return np.concatenate(outputs, -1) @ projection

    def _mlp_or_experts(self, x: Array, layer: int) -> Array:
        prefix = f"model.layers.{layer}.mlp."
        blocks = dict(self.fields.layers[layer]) if self.fields.layers else {}
        if "moe" not in blocks:
            return self._mlp(x, prefix)
        scores = x @ self.weights[prefix + "gate.weight"].T
        experts, weights = route(scores, blocks["moe"]["top_k"], blocks["moe"]["norm_topk_prob"])
        self.chosen.append(experts)
        result = np.zeros_like(x)
        for t, row in enumerate(x):
            for expert, weight in zip(experts[t], weights[t]):
                result[t] += weight * self._mlp(row[None], f"{prefix}experts.{expert}.")[0]
        if blocks["moe"].get("shared_intermediate_size"):
            gate = x @ self.weights[prefix + "shared_expert_gate.weight"].T
            result += self._mlp(x, prefix + "shared_expert.") / (1 + np.exp(-gate))
        return result

    def _mlp(self, x: Array, prefix: str) -> Array:
        gate = x @ self.weights[prefix + "gate_proj.weight"].T
        up = x @ self.weights[prefix + "up_proj.weight"].T
        return (gate / (1 + np.exp(-gate)) * up) @ self.weights[prefix + "down_proj.weight"].T
