"""The layers of a dense decoder in torch, one after another, for calibration.

    x = x + residual_scale * o_proj(attention(norm(x)))
    x = x + residual_scale * down_proj(silu(gate_proj(norm(x))) * up_proj(norm(x)))

Only the layer that runs is in memory, in float32. B texts of T tokens; H hidden size, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cpmcu.convert.minicpm_to_llama import to_float32
from cpmcu.loading.tensors import Checkpoint
from cpmcu.models.common import SpecFields
from cpmcu.models.names import NameMap, Piece

# Parameters of the blocks that `Layer` follows.
_KNOWN = {
    "attention": {"window", "rope_inv_freq", "rope_attention_scaling", "qkv_bias", "qk_norm"},
    "mlp": {"intermediate_size"},
}

# Called before the projections of a stage, which have a common input. Gets their names and the
# input [B, T, K] of each batch. May change the weights of these projections.
Stage = Callable[[tuple[str, ...], list[Tensor]], None]
STAGES = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))


def check_dense(fields: SpecFields) -> None:
    """Raises ValueError unless each layer is attention and an MLP of the known forms."""
    for layer in fields.layers:
        for kind, params in layer:
            strange = sorted(set(params) - _KNOWN.get(kind, set(params)))
            if kind not in _KNOWN or strange:
                what = f"{kind} with {strange[0]}" if strange else kind
                raise ValueError(
                    f"method is 'gptq', but the model has layers of {what}, expected attention "
                    "and an MLP in each layer; method 'rtn' quantises other models"
                )


class DenseLayers:
    """Reads the weights of a model layer by layer and runs text through them."""

    def __init__(
        self, checkpoint: Checkpoint, names: NameMap, fields: SpecFields, device: torch.device
    ) -> None:
        self.fields, self.device = fields, device
        self._checkpoint = checkpoint
        self._sources: dict[str, tuple[str, Piece]] = {}
        for source in checkpoint.tensors:
            self._sources |= {piece.name: (source, piece) for piece in names(source, fields)}

    def embed(self, batches: list[Tensor]) -> list[Tensor]:
        """Returns the embeddings [B, T, H] of the ids [B, T] of each batch."""
        table = self._read("model.embed_tokens.weight")
        scale = self.fields.embed_scale
        return [F.embedding(ids.to(self.device), table) * scale for ids in batches]

    def layer(self, index: int) -> Layer:
        """The layer with its weights."""
        prefix = f"model.layers.{index}."
        weights = {
            name.removeprefix(prefix): self._read(name)
            for name in self._sources
            if name.startswith(prefix)
        }
        params: dict[str, Any] = {}
        if self.fields.layers:
            params = dict(dict(self.fields.layers[index]).get("attention", {}))
        return Layer(self.fields, params, weights)

    def _read(self, name: str) -> Tensor:
        if name not in self._sources:
            raise ValueError(f"{name} is missing, expected all weights of the model")
        source, piece = self._sources[name]
        end = None if piece.num_rows is None else piece.first_row + piece.num_rows
        rows = self._checkpoint.read(source)[piece.first_row : end]
        dtype = self._checkpoint.tensors[source].meta.dtype
        return torch.from_numpy(to_float32(rows, dtype)).to(self.device)


class Layer:
    """One layer. `weights`: leaf such as self_attn.q_proj.weight -> float32 tensor."""

    def __init__(
        self, fields: SpecFields, params: Mapping[str, Any], weights: dict[str, Tensor]
    ) -> None:
        self.fields, self.weights = fields, weights
        self._window = int(params.get("window", 0))
        self._inv_freq = tuple(params.get("rope_inv_freq", fields.rope_inv_freq))
        self._rope_scale = float(
            params.get("rope_attention_scaling", fields.rope_attention_scaling)
        )

    def run(self, batches: list[Tensor], stage: Stage) -> None:
        """Replaces each batch [B, T, H] by the layer's output. Calls `stage` before projections."""
        scale = self.fields.residual_scale
        inputs = [self._norm(x, "input_layernorm") for x in batches]
        stage(STAGES[0], inputs)
        inputs = [self._attention(x) for x in inputs]
        stage(STAGES[1], inputs)
        for i, x in enumerate(inputs):
            batches[i] = batches[i] + scale * self._project(x, "self_attn.o_proj")
        inputs = [self._norm(x, "post_attention_layernorm") for x in batches]
        stage(STAGES[2], inputs)
        inputs = [
            F.silu(self._project(x, "mlp.gate_proj")) * self._project(x, "mlp.up_proj")
            for x in inputs
        ]
        stage(STAGES[3], inputs)
        for i, x in enumerate(inputs):
            batches[i] = batches[i] + scale * self._project(x, "mlp.down_proj")

    def _project(self, x: Tensor, module: str) -> Tensor:
        return F.linear(x, self.weights[f"{module}.weight"], self.weights.get(f"{module}.bias"))

    def _norm(self, x: Tensor, module: str) -> Tensor:
        weight = self.weights[f"{module}.weight"]
        offset = 1.0 if self.fields.zero_centred_norms else 0.0
        mean_square = x.square().mean(-1, keepdim=True)
        return x * torch.rsqrt(mean_square + self.fields.rms_norm_eps) * (weight + offset)

    def _heads(self, x: Tensor, part: str, rotate: bool) -> Tensor:
        """Returns q, k or v as [B, heads, T, D]."""
        found = self._project(x, f"self_attn.{part}_proj")
        found = found.reshape(*found.shape[:-1], -1, self.fields.head_dim)
        if f"self_attn.{part}_norm.weight" in self.weights:
            found = self._norm(found, f"self_attn.{part}_norm")
        found = found.transpose(1, 2)
        return self._rotate(found) if rotate else found

    def _rotate(self, x: Tensor) -> Tensor:
        inv_freq = torch.tensor(self._inv_freq, dtype=torch.float64)
        angles = torch.outer(torch.arange(x.shape[-2], dtype=torch.float64), inv_freq)
        cos = (angles.cos() * self._rope_scale).to(x)
        sin = (angles.sin() * self._rope_scale).to(x)
        half = len(self._inv_freq)
        left, right, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([left * cos - right * sin, right * cos + left * sin, rest], -1)

    def _attention(self, x: Tensor) -> Tensor:
        """Returns the input of o_proj [B, T, heads * D]."""
        q = self._heads(x, "q", rotate=True)
        group = self.fields.num_attention_heads // self.fields.num_key_value_heads
        k = self._heads(x, "k", rotate=True).repeat_interleave(group, dim=1)
        v = self._heads(x, "v", rotate=False).repeat_interleave(group, dim=1)
        length = x.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        if self._window:
            seen = seen.triu(1 - self._window)
        scale = self.fields.head_dim**-0.5
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
        return out.transpose(1, 2).flatten(2)
