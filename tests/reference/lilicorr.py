"""The transformer of a LiLiCorr head in plain numpy, written from the formulas.

head = NumpyLiLiCorr(config, weights)
scores = head.scores(embedded, logprobs, hidden, context)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.reference.numpy_drafts import rms_norm

Array = npt.NDArray[Any]

FEATURE_EPS = 1e-5  # eps of the features' LayerNorm


def log_softmax(x: Array) -> Array:
    shifted = x - x.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def softmax(x: Array) -> Array:
    return np.exp(log_softmax(x))


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def features_of(logprobs: Array) -> Array:
    """The five features [D, K, 5] of candidates, sorted by their log-probabilities [D, K]."""
    topk = logprobs.shape[1]
    rank = np.arange(topk) / max(topk - 1, 1)
    first = np.arange(topk) == 0
    gap = logprobs - logprobs.max(1, keepdims=True)
    alike = [np.broadcast_to(each, logprobs.shape) for each in (rank, first)]
    return np.stack([logprobs, np.exp(logprobs), gap, *alike], -1)


def layer_norm(x: Array, weight: Array, bias: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + FEATURE_EPS) * weight + bias


class NumpyLiLiCorr:
    """`config`: with nested keys at the top level. `weights`: names without "lilicorr."."""

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, Array]) -> None:
        self.config, self.weights = config, weights

    def scores(self, embedded: Array, logprobs: Array, hidden: Array, context: Array) -> Array:
        """Pair scores [D, K, K]: log-probabilities of candidates below those before them.

        `embedded`: rows of the target's embedding table [D, K, H]. `logprobs`: [D, K], sorted.
        `hidden`: of the block's rows [D, H]. `context`: of the last cached token [H].
        """
        x = self.states(embedded, logprobs, hidden)
        factors, start = self.factors(x, context)
        outs, ins = factors
        scale = self.config["lilicorr_logit_scale"]
        pairs = np.empty((*logprobs.shape, logprobs.shape[1]), x.dtype)
        pairs[0] = scale * (ins[0] @ start)
        for depth in range(1, len(pairs)):
            pairs[depth] = scale * (outs[depth - 1] @ ins[depth].T)
        return log_softmax(pairs)

    def states(self, embedded: Array, logprobs: Array, hidden: Array) -> Array:
        """The transformer's results [D, K, N], after the last norm."""
        weights = self.weights
        depth, topk = logprobs.shape
        tokens = self._linear(embedded, "token_proj") if self._projects else embedded
        features = layer_norm(
            features_of(logprobs), weights["feature_norm.weight"], weights["feature_norm.bias"]
        )
        x = tokens + self._linear(hidden, "pass_hidden_proj")[:, None]
        x = x + self._mlp(features, "feature_mlp.")
        x = x + weights["slot_embedding"][0, 0, :depth] + weights["rank_embedding"][0, 0]
        rows = x.reshape(depth * topk, -1)
        for i in range(self.config["lilicorr_num_layers"]):
            layer = f"layers.{i}."
            rows = rows + self._attention(self._norm(rows, layer + "attn_norm"), layer, topk)
            rows = rows + self._mlp(self._norm(rows, layer + "mlp_norm"), layer + "mlp.")
        return self._norm(rows, "output_norm").reshape(depth, topk, -1)

    def factors(self, x: Array, context: Array) -> tuple[list[Array], Array]:
        """Unit vectors of all candidates, out and in [D, K, F], and of the root [F]."""
        anchor = self._norm(self._linear(context, "context_proj"), "anchor_norm")
        joined = np.concatenate([x, np.broadcast_to(anchor, x.shape), x * anchor], -1)
        mixed = silu(self._linear(joined, "factor_input_proj"))
        heads = [self._unit(self._linear(mixed, name)) for name in ("out_head", "in_head")]
        return heads, self._unit(self._linear(anchor, "anchor_out_head"))

    def bias(self, depth: int, topk: int) -> Array:
        """The terms that attention adds to the logits of each head [heads, D K, D K]."""
        slots = np.repeat(np.arange(depth), topk)
        distance = slots[:, None] - slots[None]
        middle = self.weights["relative_slot_bias"].shape[1] // 2
        relative = self.weights["relative_slot_bias"][:, distance + middle]
        return relative + (distance == 0) * self.weights["same_slot_bias"][:, None, None]

    def _attention(self, x: Array, layer: str, topk: int) -> Array:
        heads = self.config["lilicorr_num_heads"]
        joined = x @ self.weights[layer + "attn.in_proj_weight"].T
        joined = joined + self.weights[layer + "attn.in_proj_bias"]
        q, k, v = np.split(joined.reshape(len(x), 3 * heads, -1).swapaxes(0, 1), 3)
        logits = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
        mixed = softmax(logits + self.bias(len(x) // topk, topk)) @ v
        return self._linear(mixed.swapaxes(0, 1).reshape(len(x), -1), layer + "attn.out_proj")

    @property
    def _projects(self) -> bool:
        return "token_proj.weight" in self.weights

    def _linear(self, x: Array, name: str) -> Array:
        return x @ self.weights[name + ".weight"].T + self.weights[name + ".bias"]

    def _mlp(self, x: Array, prefix: str) -> Array:
        return self._linear(silu(self._linear(x, prefix + "up_proj")), prefix + "down_proj")

    def _norm(self, x: Array, name: str) -> Array:
        return rms_norm(x, self.weights[name + ".weight"], self.config["rms_norm_eps"])

    def _unit(self, x: Array) -> Array:
        length = np.sqrt((x**2).sum(-1, keepdims=True))
        return x / np.maximum(length, self.config["lilicorr_vector_eps"])
