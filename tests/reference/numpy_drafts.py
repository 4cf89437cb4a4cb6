"""EAGLE-2, EAGLE-3 and MTP draft heads in plain numpy: the reference of the drafters' tests.

    target = NumpyTarget(fields, weights)              # weights of a Hugging Face checkpoint
    hidden, aux_hidden = target.states(ids, layers)    # the input of the heads
    head = NumpyEagle2(target, load_file(draft / "model.safetensors"))
    logits, recycled = head.prefill(hidden[:-1], ids[1:])

Row t of a head reads the target's state of position t and token t + 1. Its rotary position is t.
It predicts token t + 2. A head keeps its rows. `prefill` and `extend` append rows that read the
target's states. `step` appends one row that reads a recycled state. `keep` removes rows from the
end. The dtype is that of the target, by default float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cpmcu.models.common import SpecFields

Array = npt.NDArray[Any]


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + x.dtype.type(eps)) * weight


def rotate(x: Array, positions: Array, fields: SpecFields) -> Array:
    """Rotate pairs (i, i + R/2) of the first R elements of x [T, heads, D]."""
    inv_freq = np.asarray(fields.rope_inv_freq, x.dtype)
    half = inv_freq.size
    angles = positions.astype(x.dtype)[:, None, None] * inv_freq
    cos = np.cos(angles) * x.dtype.type(fields.rope_attention_scaling)
    sin = np.sin(angles) * x.dtype.type(fields.rope_attention_scaling)
    left, right, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([left * cos - right * sin, right * cos + left * sin, rest], -1)


def attend(q: Array, k: Array, v: Array, visible: Array) -> Array:
    """Returns attention [T, Hq * D] of q [T, Hq, D] over k and v [S, Hkv, D]; visible [T, S]."""
    group = q.shape[1] // k.shape[1]
    outputs = []
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].T / np.sqrt(q.dtype.type(q.shape[-1]))
        scores = np.where(visible, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        outputs.append(weights / weights.sum(-1, keepdims=True) @ v[:, head // group])
    return np.concatenate(outputs, -1)


def swiglu(x: Array, weights: Mapping[str, Array], prefix: str) -> Array:
    gate = x @ weights[prefix + "gate_proj.weight"].T
    up = x @ weights[prefix + "up_proj.weight"].T
    return (gate / (1 + np.exp(-gate)) * up) @ weights[prefix + "down_proj.weight"].T


class NumpyTarget:
    """The parts of a target model that draft heads use."""

    def __init__(
        self,
        fields: SpecFields,
        weights: Mapping[str, Array],
        dtype: type[np.floating[Any]] = np.float32,
    ) -> None:
        self.fields = fields
        self.dtype = dtype
        self.weights = {name: np.asarray(array, dtype) for name, array in weights.items()}

    def embed(self, ids: Sequence[int]) -> Array:
        """Returns the embeddings [T, H] times scale_emb."""
        table = self.weights["model.embed_tokens.weight"]
        return table[np.asarray(ids, np.int64)] * self.dtype(self.fields.embed_scale)

    def head(self, hidden: Array) -> Array:
        """Returns the logits [T, V] of states after the final norm."""
        fields = self.fields
        tied = fields.tie_word_embeddings or "lm_head.weight" not in self.weights
        name = "model.embed_tokens.weight" if tied else "lm_head.weight"
        return (hidden * self.dtype(fields.logit_scale)) @ self.weights[name].T

    def states(self, ids: Sequence[int], layers: Sequence[int] = ()) -> tuple[Array, list[Array]]:
        """Returns (states [T, H] after the final norm, the inputs of `layers`)."""
        fields, weights = self.fields, self.weights
        positions = np.arange(len(ids))
        visible = positions[:, None] >= positions[None, :]
        scale = self.dtype(fields.residual_scale)
        x = self.embed(ids)
        aux_hidden = {}
        for layer in range(fields.num_hidden_layers):
            aux_hidden[layer] = x
            prefix = f"model.layers.{layer}."
            normed = rms_norm(x, weights[prefix + "input_layernorm.weight"], fields.rms_norm_eps)
            heads = {}
            for part in ("q", "k", "v"):
                name = f"{prefix}self_attn.{part}_proj."
                y = normed @ weights[name + "weight"].T
                if fields.qkv_bias:
                    y = y + weights[name + "bias"]
                heads[part] = y.reshape(len(x), -1, fields.head_dim)
            for part in ("q", "k"):
                if fields.qk_norm:
                    weight = weights[f"{prefix}self_attn.{part}_norm.weight"]
                    heads[part] = rms_norm(heads[part], weight, fields.rms_norm_eps)
                heads[part] = rotate(heads[part], positions, fields)
            y = attend(heads["q"], heads["k"], heads["v"], visible)
            x = x + scale * (y @ weights[prefix + "self_attn.o_proj.weight"].T)
            normed = rms_norm(
                x, weights[prefix + "post_attention_layernorm.weight"], fields.rms_norm_eps
            )
            x = x + scale * swiglu(normed, weights, prefix + "mlp.")
        hidden = rms_norm(x, weights["model.norm.weight"], fields.rms_norm_eps)
        return hidden, [aux_hidden[layer] for layer in layers]


class NumpyHead:
    """Keeps the keys and values of its rows; row t has position t."""

    def __init__(self, target: NumpyTarget, weights: Mapping[str, Array], head_dim: int) -> None:
        self.target = target
        self.eps = target.fields.rms_norm_eps
        self.head_dim = head_dim
        self.weights = {
            name: np.asarray(array, target.dtype if array.dtype.kind != "i" else np.int64)
            for name, array in weights.items()
            if name not in ("t2d", "embed_tokens.weight")
        }
        self.rows: list[tuple[Array, Array]] = []  # keys and values [Hkv, D] of each row

    def prefill(self, states: Any, next_ids: Sequence[int]) -> tuple[Array, Array]:
        """Removes all rows, then calls `extend`."""
        self.keep(0)
        return self.extend(states, next_ids)

    def extend(self, states: Any, next_ids: Sequence[int]) -> tuple[Array, Array]:
        """Appends rows that read the target's states: (logits [T, V or Vd], recycled [T, H]).

        `states` is [T, H] for EAGLE-2 and MTP, and three such arrays for EAGLE-3. next_ids[t] is
        the token that follows the token of states[t].
        """
        return self._run(self._start(states), next_ids)

    def step(self, recycled: Array, next_id: int) -> tuple[Array, Array]:
        """Appends one row that reads a recycled state [H]: (logits [V or Vd], recycled [H])."""
        logits, hidden = self._run(recycled[None], [next_id])
        return logits[0], hidden[0]

    def keep(self, count: int) -> None:
        """Removes all rows but the first `count`."""
        del self.rows[count:]

    def token(self, index: int) -> int:
        """The target's token id for an index into the logits."""
        return index

    def chain(self, recycled: Array, logits: Array, depth: int) -> list[int]:
        """The greedy chain after a row. Its rows are removed at the end."""
        before = len(self.rows)
        tokens = [self.token(int(logits.argmax()))]
        while len(tokens) < depth:
            logits, recycled = self.step(recycled, tokens[-1])
            tokens.append(self.token(int(logits.argmax())))
        self.keep(before)
        return tokens

    def _run(self, hidden: Array, next_ids: Sequence[int]) -> tuple[Array, Array]:
        x = self._layer(self.target.embed(next_ids), hidden)
        return self._logits(x), x

    def _attention(self, x: Array, prefix: str) -> Array:
        """Appends the rows of x [T, ·] and attends over all rows, causally."""
        first = len(self.rows)
        positions = np.arange(first, first + len(x))
        heads = {
            part: (
                x @ self.weights[f"{prefix}{part}_proj.weight"].T
                + self.weights.get(f"{prefix}{part}_proj.bias", self.target.dtype(0))
            ).reshape(len(x), -1, self.head_dim)
            for part in ("q", "k", "v")
        }
        for part in ("q", "k"):
            heads[part] = rotate(heads[part], positions, self.target.fields)
        self.rows.extend(zip(heads["k"], heads["v"]))
        k = np.stack([row[0] for row in self.rows])
        v = np.stack([row[1] for row in self.rows])
        visible = positions[:, None] >= np.arange(len(self.rows))[None, :]
        return attend(heads["q"], k, v, visible) @ self.weights[prefix + "o_proj.weight"].T

    def _norm(self, x: Array, name: str) -> Array:
        return rms_norm(x, self.weights[name], self.eps)

    def _start(self, states: Any) -> Array:
        raise NotImplementedError

    def _layer(self, embedding: Array, hidden: Array) -> Array:
        raise NotImplementedError

    def _logits(self, x: Array) -> Array:
        raise NotImplementedError


class NumpyEagle2(NumpyHead):
    """EAGLE and EAGLE-2. Input norms mean the MiniCPM4 layout, which also scales residuals."""

    def __init__(
        self,
        target: NumpyTarget,
        weights: Mapping[str, Array],
        head_dim: int,
        residual_scale: float = 1.0,
    ) -> None:
        """residual_scale: scale_depth / sqrt(layers of the target + 1) in the MiniCPM4 layout."""
        super().__init__(target, weights, head_dim)
        self.residual_scale = target.dtype(residual_scale)

    def _start(self, states: Any) -> Array:
        return np.asarray(states, self.target.dtype)

    def _layer(self, embedding: Array, hidden: Array) -> Array:
        if "input_norm1.weight" in self.weights:
            embedding = self._norm(embedding, "input_norm1.weight")
            hidden = self._norm(hidden, "input_norm2.weight")
        x = np.concatenate([embedding, hidden], -1) @ self.weights["fc.weight"].T
        if "fc.bias" in self.weights:
            x = x + self.weights["fc.bias"]
        normed = x
        if "layers.0.input_layernorm.weight" in self.weights:
            normed = self._norm(x, "layers.0.input_layernorm.weight")
        x = x + self.residual_scale * self._attention(normed, "layers.0.self_attn.")
        normed = self._norm(x, "layers.0.post_attention_layernorm.weight")
        return x + self.residual_scale * swiglu(normed, self.weights, "layers.0.mlp.")

    def _logits(self, x: Array) -> Array:
        return self.target.head(x)


class NumpyEagle3(NumpyHead):
    """EAGLE-3 and 3.1, with an output head of their own over a draft vocabulary."""

    norm_output = False  # the recycled state is normed
    norm_before_residual = False  # the residual stream is normed

    def _run(self, hidden: Array, next_ids: Sequence[int]) -> tuple[Array, Array]:
        logits, x = super()._run(hidden, next_ids)
        return logits, self._norm(x, "norm.weight") if self.norm_output else x

    def _start(self, states: Any) -> Array:
        aux_hidden = [np.asarray(state, self.target.dtype) for state in states]
        if "fc_norm.0.weight" in self.weights:
            aux_hidden = [self._norm(x, f"fc_norm.{i}.weight") for i, x in enumerate(aux_hidden)]
        joined = np.concatenate(aux_hidden, -1)
        if "input_norm.weight" in self.weights:
            joined = self._norm(joined, "input_norm.weight")
        return joined @ self.weights["fc.weight"].T

    def _layer(self, embedding: Array, hidden: Array) -> Array:
        normed = [
            self._norm(embedding, "midlayer.input_layernorm.weight"),
            self._norm(hidden, "midlayer.hidden_norm.weight"),
        ]
        if self.norm_before_residual:
            hidden = normed[1]
        x = hidden + self._attention(np.concatenate(normed, -1), "midlayer.self_attn.")
        normed_x = self._norm(x, "midlayer.post_attention_layernorm.weight")
        return x + swiglu(normed_x, self.weights, "midlayer.mlp.")

    def _logits(self, x: Array) -> Array:
        return self._norm(x, "norm.weight") @ self.weights["lm_head.weight"].T

    def token(self, index: int) -> int:
        return index + int(self.weights["d2t"][index])


class NumpyModule(NumpyEagle2):
    """One of several MTP modules: EAGLE-2 with norms of the inputs and of the result.

    `hidden_first`: the state comes before the embedding in the input of fc.
    """

    def __init__(
        self,
        target: NumpyTarget,
        weights: Mapping[str, Array],
        head_dim: int,
        hidden_first: bool = False,
        residual_scale: float = 1.0,
    ) -> None:
        """residual_scale: that of the target's layers."""
        super().__init__(target, weights, head_dim, residual_scale)
        if hidden_first:
            halves = np.split(self.weights["fc.weight"], 2, -1)
            self.weights["fc.weight"] = np.concatenate(halves[::-1], -1)

    def _layer(self, embedding: Array, hidden: Array) -> Array:
        return self._norm(super()._layer(embedding, hidden), "norm.weight")


def draft_of_modules(
    modules: Sequence[NumpyModule], states: Array, next_ids: Sequence[int], *, chained: bool
) -> list[int]:
    """The greedy draft, a token of each module, computed anew for the whole text.

    `states` [T, H] are the target's, next_ids[t] is the token that follows the token of states[t].
    `chained`: a module reads the states of the module before.
    """
    ids, drafted = list(next_ids), []
    for number, module in enumerate(modules):
        logits, own = module.prefill(states, ids[number:])
        drafted.append(int(logits[-1].argmax()))
        ids.append(drafted[-1])
        states = own if chained else states
    return drafted


class NumpyMtp(NumpyHead):
    """The MTP head of Qwen3-Next and Qwen3.5; `weights` have the names `mtp.*`.

    Norms multiply by 1 + weight. The output of `mtp.norm` makes the logits and is recycled.
    """

    def _start(self, states: Any) -> Array:
        return np.asarray(states, self.target.dtype)

    def _layer(self, embedding: Array, hidden: Array) -> Array:
        normed = [
            self._norm(embedding, "mtp.pre_fc_norm_embedding.weight"),
            self._norm(hidden, "mtp.pre_fc_norm_hidden.weight"),
        ]
        x = np.concatenate(normed, -1) @ self.weights["mtp.fc.weight"].T
        normed_x = self._norm(x, "mtp.layers.0.input_layernorm.weight")
        x = x + self._attention(normed_x, "mtp.layers.0.self_attn.")
        normed_x = self._norm(x, "mtp.layers.0.post_attention_layernorm.weight")
        x = x + swiglu(normed_x, self.weights, "mtp.layers.0.mlp.")
        return self._norm(x, "mtp.norm.weight")

    def _logits(self, x: Array) -> Array:
        return self.target.head(x)

    def _norm(self, x: Array, name: str) -> Array:
        return rms_norm(x, 1 + self.weights[name], self.eps)

    def _attention(self, x: Array, prefix: str) -> Array:
        first, fields = len(self.rows), self.target.fields
        positions = np.arange(first, first + len(x))
        q, gate = np.split(self._heads(x, prefix, "q", 2 * self.head_dim), 2, -1)
        k = self._norm(self._heads(x, prefix, "k", self.head_dim), f"{prefix}k_norm.weight")
        q = rotate(self._norm(q, f"{prefix}q_norm.weight"), positions, fields)
        v = self._heads(x, prefix, "v", self.head_dim)
        self.rows.extend(zip(rotate(k, positions, fields), v))
        keys, values = (np.stack([row[i] for row in self.rows]) for i in range(2))
        visible = positions[:, None] >= np.arange(len(self.rows))[None, :]
        out = attend(q, keys, values, visible) / (1 + np.exp(-gate.reshape(len(x), -1)))
        return out @ self.weights[f"{prefix}o_proj.weight"].T

    def _heads(self, x: Array, prefix: str, part: str, width: int) -> Array:
        """Returns one part of qkv as [T, heads, width]."""
        return (x @ self.weights[f"{prefix}{part}_proj.weight"].T).reshape(len(x), -1, width)
