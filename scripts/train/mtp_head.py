"""Heads of MTP modules: multi-token prediction, as DeepSeek-V3 has it.

Rows and names are those of drafts.py:

    x = eh_proj [enorm(e) | hnorm(h)]           h = the target's final-norm output
    x = norm(one layer of the target's kind(x))
    logits = target.head(x)                     recycled: x

A single module drafts a chain with its own outputs. Of several, module m drafts one token: row t
reads the embedding of token t + m + 1 and predicts token t + m + 2. Its h is the target's in row
t, or the output of the module before, in the same row.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from drafts import Head, attend
from model import Target, transformers_config
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.models.granite.modeling_granite import GraniteRMSNorm


class Mtp(Head):
    """MTP modules, with DeepSeek's names: `model.layers.{L + m}` for a target of L layers."""

    kind = "mtp"

    def __init__(
        self, target: Target, num_modules: int = 1, chained: bool = False, **shape: int
    ) -> None:
        """`chained`: module m reads the output of module m - 1. `shape`: intermediate_size."""
        if unknown := sorted(shape.keys() - {"intermediate_size"}):
            raise ValueError(f"MTP modules have the target's {', '.join(unknown)}")
        source = target.source | shape
        super().__init__(source, **shape)
        self.chained = chained and num_modules > 1
        self.longest = num_modules if num_modules > 1 else None
        config = transformers_config(source)
        config._attn_implementation = "sdpa"
        size, eps = self.config.hidden_size, self.config.rms_norm_eps
        made = {}
        for module in range(num_modules):
            layer = type(target.layers[0])(config, layer_idx=0)
            layer.enorm, layer.hnorm = GraniteRMSNorm(size, eps), GraniteRMSNorm(size, eps)
            layer.eh_proj = nn.Linear(2 * size, size, bias=False)
            layer.shared_head = nn.ModuleDict({"norm": GraniteRMSNorm(size, eps)})
            made[str(source["num_hidden_layers"] + module)] = layer
        self.model = nn.ModuleDict({"layers": nn.ModuleDict(made)})

    @property
    def parts(self) -> list[nn.Module]:
        return list(self.model["layers"].values())

    def step(
        self,
        embedding: Tensor,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None = None,
        past: Cache | None = None,
    ) -> tuple[Tensor, Cache]:
        """One step of the first module. Only this module drafts a chain from its own outputs."""
        past = DynamicCache() if past is None else past
        return self._run(self.parts[0], embedding, hidden, cos, sin, mask, past), past

    def _run(
        self,
        layer: nn.Module,
        embedding: Tensor,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        past: Cache,
    ) -> Tensor:
        x = layer.eh_proj(torch.cat((layer.enorm(embedding), layer.hnorm(hidden)), dim=-1))
        return layer.shared_head["norm"](attend(layer, x, cos, sin, mask, past))

    def unroll(
        self, hidden: Tensor, embeddings: Tensor, cos: Tensor, sin: Tensor, steps: int
    ) -> list[Tensor]:
        """One step for each module, if there are several. Rows are those of `Head.unroll`."""
        if self.longest is None:
            return super().unroll(hidden, embeddings, cos, sin, steps)
        first, _ = self.step(embeddings, hidden, cos, sin)
        return [first, *self._others(first, hidden, embeddings, cos, sin, steps)]

    def _others(
        self,
        first: Tensor,
        hidden: Tensor,
        embeddings: Tensor,
        cos: Tensor,
        sin: Tensor,
        steps: int,
    ) -> list[Tensor]:
        """Outputs of the modules after the first. Row t of module m is row t + m of the result."""
        x, outputs = first, []
        for module, layer in enumerate(self.parts[1:steps], 1):
            later = F.pad(embeddings[:, module:], (0, 0, 0, module))
            read = x if self.chained else hidden
            x = self._run(layer, later, read, cos, sin, None, DynamicCache())
            outputs.append(F.pad(x[:, :-module], (0, 0, module, 0)))
        return outputs

    def training_steps(
        self, hidden: Tensor, embeddings: Tensor, cos: Tensor, sin: Tensor, depth: int
    ) -> list[tuple[int, Tensor]]:
        """All modules. The first one also drafts a chain of `depth` tokens alone."""
        alone = super().unroll(hidden, embeddings, cos, sin, depth)
        others = self._others(alone[0], hidden, embeddings, cos, sin, len(self.parts))
        return [*enumerate(alone), *enumerate(others, 1)]

    def alone(self) -> Mtp:
        """The first module as a head of one module. It shares the parameters."""
        head = copy.copy(self)
        head.longest = None
        return head

    @torch.no_grad()
    def initialise_from(self, target: Target) -> None:
        """Copies the target's final norm as initial weights, which its head fits."""
        for layer in self.parts:
            layer.shared_head["norm"].weight.copy_(target.model.model.norm.weight)
            for name, parameter in layer.named_parameters():
                if name.endswith(".bias"):
                    parameter.zero_()

    def to_hf(self) -> dict[str, Any]:
        """The target's config.json with the keys of the modules."""
        chained = {"chain_mtp_hidden": True} if self.chained else {}
        return {**self.target, "num_nextn_predict_layers": len(self.parts), **chained}
