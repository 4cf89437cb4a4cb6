"""4-bit weights: rounding by GPTQ, and how a checkpoint holds them.

A matrix W [N, K] becomes integers q in 0..15 and one scale for each `group` inputs of a row (the
last group may be shorter): w = (q - 8) * scale. GPTQ (Frantar et al., arXiv:2210.17323) rounds one
column after the other and adds what a column lost to those that are still to come, so that the
layer's outputs X W^T change least. It knows the inputs X by H = X^T X.

Two choices of ours. Scales are chosen from the weights before any column is rounded, so columns
can go in the order of falling diag(H) while a group is still `group` neighbours: this is what
files call desc_act false, static_groups true. And a scale is a number that float16 and bfloat16
both have, so it stays what it was in engines that keep scales in the type of the activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cpmcu.quant.gptq import stored_format
from cpmcu.quant.packing import pack_gptq, pack_gptq_zeros, unpack_gptq, unpack_gptq_zeros

LOWEST, HIGHEST = -8, 7
SUFFIXES = ("qweight", "qzeros", "scales", "g_idx")
_SMALLEST_SCALE = 2.0**-14  # float16 has fewer digits below


@dataclass(frozen=True, slots=True)
class Quantized:
    """q uint8 [K, N] of 0..15, scales float16 [G, N], w = (q - 8) * scale."""

    q: Tensor
    scales: Tensor
    group: int

    def dequantize(self) -> Tensor:
        """W, float32 [N, K]."""
        scales = self.scales.float().repeat_interleave(self.group, dim=0)[: len(self.q)]
        return ((self.q.float() - 8) * scales).T.contiguous()

    def tensors(self) -> dict[str, Tensor]:
        """What a GPTQ checkpoint stores, by suffix. Raises ValueError if N or K is no 8n."""
        inputs = torch.arange(len(self.q), dtype=torch.int32)
        zeros = np.full(self.scales.shape, 8, np.uint8)
        return {
            "qweight": torch.from_numpy(pack_gptq(self.q.cpu().numpy())),
            "qzeros": torch.from_numpy(pack_gptq_zeros(zeros)),
            "scales": self.scales.cpu().contiguous(),
            "g_idx": inputs // self.group,
        }


def dequantize_state(
    state: Mapping[str, Tensor], quantization_config: Mapping[str, Any]
) -> dict[str, Tensor]:
    """A GPTQ checkpoint's tensors as those of a dense one: NAME.qweight and so on -> NAME.weight.

    float32 [N, K]; other tensors stay. Raises ValueError for anything but 4 bits in GPTQ's form.
    """
    method, bits = quantization_config.get("quant_method"), quantization_config.get("bits")
    form = stored_format(quantization_config)
    if method != "gptq" or bits != 4 or form not in ("gptq", "gptq_v2"):
        raise ValueError(
            f"the checkpoint is quantised with {method} ({bits} bits, {form}), expected gptq with "
            "4 bits"
        )
    dense = {}
    for name, tensor in state.items():
        module, _, suffix = name.rpartition(".")
        if suffix not in SUFFIXES:
            dense[name] = tensor
        elif suffix == "qweight":
            q = unpack_gptq(tensor.numpy()).astype(np.int16)
            version = 1 if form == "gptq" else 2
            zeros = unpack_gptq_zeros(state[f"{module}.qzeros"].numpy(), version)
            group_of = state[f"{module}.g_idx"].long()
            scales = state[f"{module}.scales"].float()[group_of]
            levels = torch.from_numpy(q - zeros.astype(np.int16)[group_of.numpy()])
            dense[f"{module}.weight"] = (levels.float() * scales).T.contiguous()
    return dense


# ---- scales


def num_groups(inputs: int, group: int) -> int:
    return -(-inputs // group)


def _scale(values: Tensor) -> Tensor:
    """The nearest float32 that is also a bfloat16 and a normal float16, never 0."""
    return values.clamp_min(_SMALLEST_SCALE).to(torch.bfloat16).float()


def peak_scales(weight: Tensor, group: int) -> Tensor:
    """[G, N]: the largest magnitude of the group becomes 7."""
    parts = weight.split(group, dim=1)
    return torch.stack([_scale(part.abs().amax(1) / HIGHEST) for part in parts])


def best_scales(weight: Tensor, group: int, importance: Tensor | None = None) -> Tensor:
    """[G, N]: of peak / 7 to peak / 14 the scale with the least squared error of rounding.

    Smaller scales clip the largest weights and give the others finer steps. `importance` [K]
    weighs the inputs.
    """
    chosen = []
    start = 0
    for part in weight.split(group, dim=1):
        inputs = part.shape[1]
        weigh = 1.0 if importance is None else importance[start : start + inputs].to(part)
        peak = part.abs().amax(1)
        best = torch.full_like(peak, torch.inf)
        scales = _scale(peak / HIGHEST)
        for levels in torch.arange(HIGHEST, 2 * HIGHEST, 1 / 8).tolist():
            scale = _scale(peak / levels)
            error = (weigh * (part - _levels(part, scale[:, None]) * scale[:, None]) ** 2).sum(1)
            better = error < best
            best, scales = torch.where(better, error, best), torch.where(better, scale, scales)
        chosen.append(scales)
        start += inputs
    return torch.stack(chosen)


# ---- rounding


def _levels(values: Tensor, scales: Tensor) -> Tensor:
    return (values / scales).round().clamp(LOWEST, HIGHEST)


def round_to_nearest(weight: Tensor, group: int, scales: Tensor | None = None) -> Quantized:
    """W [N, K] rounded weight by weight; `scales` [G, N], by default those of `peak_scales`."""
    weight = weight.detach().float()
    scales = peak_scales(weight, group) if scales is None else scales
    wide = scales.repeat_interleave(group, dim=0)[: weight.shape[1]]
    q = (_levels(weight.T, wide) + 8).to(torch.uint8)
    return Quantized(q, scales.to(torch.float16), group)


def gptq(
    weight: Tensor, gram: Tensor, group: int, damping: float = 0.01, block: int = 128
) -> Quantized:
    """W [N, K] rounded so that X W^T changes little, given gram = X^T X [K, K].

    `damping`, a share of the mean of diag(gram), is added to the diagonal. Columns are updated
    at once within a block of `block` and once for all later ones.
    """
    rows, inputs = weight.shape
    if gram.shape != (inputs, inputs):
        raise ValueError(f"gram is {list(gram.shape)}, expected [{inputs}, {inputs}]")
    weight = weight.detach().float()
    gram = _damped(gram.double(), damping)
    scales = best_scales(weight, group, gram.diagonal())
    order = gram.diagonal().argsort(descending=True, stable=True)
    group_of = order // group
    factor = _inverse_factor(gram[order][:, order]).float()

    left = weight[:, order]  # what the columns still to be rounded should become
    q = torch.empty(inputs, rows, dtype=torch.uint8, device=weight.device)
    for begin in range(0, inputs, block):
        end = min(begin + block, inputs)
        errors = torch.empty(rows, end - begin, device=weight.device)
        for j in range(begin, end):
            scale = scales[group_of[j]]
            level = _levels(left[:, j], scale)
            q[order[j]] = (level + 8).to(torch.uint8)
            error = (left[:, j] - level * scale) / factor[j, j]
            left[:, j + 1 : end] -= torch.outer(error, factor[j, j + 1 : end])
            errors[:, j - begin] = error
        left[:, end:] -= errors @ factor[begin:end, end:]
    return Quantized(q, scales.to(torch.float16), group)


def _damped(gram: Tensor, damping: float) -> Tensor:
    """An input that is always 0 gets a diagonal too, and so is rounded to nearest."""
    mean = gram.diagonal().mean()
    return gram + torch.eye(len(gram)).to(gram) * (damping * mean if mean > 0 else 1.0)


def _inverse_factor(gram: Tensor) -> Tensor:
    """The upper Cholesky factor of gram^-1."""
    lower = torch.linalg.cholesky(gram)
    return torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)


def output_error(weight: Tensor, other: Tensor, gram: Tensor) -> float:
    """|X W^T - X V^T|^2 / |X W^T|^2 for W and V [N, K] and gram = X^T X."""
    weight, difference = weight.double(), (weight - other).double()
    gram = gram.double()
    return float(((difference @ gram) * difference).sum() / ((weight @ gram) * weight).sum())
