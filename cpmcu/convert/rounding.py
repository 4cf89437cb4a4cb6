"""Weights of 4 or 8 bits: rounding by GPTQ, and the tensors of a GPTQ checkpoint.

A matrix W [N, K] becomes integers q and one scale for each `group` inputs of a row. The last group
may be shorter. With 4 bits, q is in 0..15 and w = (q - 8) * scale. With 8 bits, q is in 0..255 and
w = (q - 128) * scale.

GPTQ (Frantar et al., arXiv:2210.17323) rounds one column after another. It compensates the rounding
error of a column in the later columns, so that the layer's outputs X W^T change least. The inputs X
enter as H = X^T X.

This file makes two choices. First, scales are fixed before any column is rounded. Columns can
therefore be rounded in order of descending diag(H), while a group stays `group` adjacent columns
(desc_act false, static_groups true). Second, a scale is representable in float16 and in bfloat16.
Engines that store scales in the type of the activations therefore do not round it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cpmcu.quant.gptq import stored_format
from cpmcu.quant.packing import (
    pack_gptq,
    pack_gptq_8,
    pack_gptq_zeros,
    unpack_gptq,
    unpack_gptq_zeros,
)

SUFFIXES = ("qweight", "qzeros", "scales", "g_idx")
_SMALLEST_SCALE = 2.0**-14  # smallest scale: the smallest normal float16 number


@dataclass(frozen=True, slots=True)
class Quantized:
    """q uint8 [K, N], scales float16 [G, N], w = (q - 2^(bits - 1)) * scale."""

    q: Tensor
    scales: Tensor
    group: int
    bits: int = 4

    def dequantize(self) -> Tensor:
        """Returns the weights that the codes stand for, float32 [N, K]."""
        scales = self.scales.float().repeat_interleave(self.group, dim=0)[: len(self.q)]
        return ((self.q.float() - (1 << self.bits - 1)) * scales).T.contiguous()

    def tensors(self) -> dict[str, Tensor]:
        """Returns GPTQ's tensors by suffix. Raises ValueError unless 8 divides N and K."""
        inputs = torch.arange(len(self.q), dtype=torch.int32)
        q = self.q.cpu().numpy()
        if self.bits == 8:
            groups, outputs = self.scales.shape
            words = pack_gptq_8(q), np.full((groups, outputs // 4), 0x7F7F7F7F, np.int32)
        else:
            words = pack_gptq(q), pack_gptq_zeros(np.full(self.scales.shape, 8, np.uint8))
        return {
            "qweight": torch.from_numpy(words[0]),
            "qzeros": torch.from_numpy(words[1]),
            "scales": self.scales.cpu().contiguous(),
            "g_idx": inputs // self.group,
        }


def dequantize_state(
    state: Mapping[str, Tensor], quantization_config: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Converts a GPTQ checkpoint's tensors (NAME.qweight and others) to dense NAME.weight.

    A weight is float32 [N, K]. Other tensors are unchanged. Raises ValueError for any other
    quantisation than GPTQ with 4 bits.
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
    """Rounds to a value that is both a bfloat16 and a normal float16, and not 0."""
    return values.clamp_min(_SMALLEST_SCALE).to(torch.bfloat16).float()


def _highest(bits: int) -> int:
    """The largest level, 7 or 127. The smallest level is -8 or -128."""
    return (1 << bits - 1) - 1


def peak_scales(weight: Tensor, group: int, bits: int = 4) -> Tensor:
    """Returns scales [G, N] that map the largest magnitude of each group to the highest level."""
    parts = torch.split(weight, group, dim=1)
    return torch.stack([_scale(part.abs().amax(1) / _highest(bits)) for part in parts])


def best_scales(
    weight: Tensor,
    group: int,
    importance: Tensor | None = None,
    step: float = 1 / 8,
    bits: int = 4,
) -> Tensor:
    """Returns the scales [G, N] with the least squared rounding error.

    A smaller scale clips the largest weights and gives the others finer steps. `importance` [K]:
    weights of the inputs in the error. A scale is peak / d, for a d of:

    | bits | from | below | apart |
    |---|---|---|---|
    | 4 | 7 | 14 | step |
    | 8 | 127 | 158.75 | step * 127 / 7 |
    """
    highest = _highest(bits)
    last = 2 * highest if bits == 4 else 1.25 * highest
    divisors = torch.arange(highest, last, step * highest / 7).tolist()
    chosen = []
    start = 0
    for part in torch.split(weight, group, dim=1):
        inputs = part.shape[1]
        weigh = 1.0 if importance is None else importance[start : start + inputs].to(part)
        peak = part.abs().amax(1)
        best = torch.full_like(peak, torch.inf)
        scales = _scale(peak / highest)
        for divisor in divisors:
            scale = _scale(peak / divisor)
            rounded = _levels(part, scale[:, None], bits) * scale[:, None]
            error = (weigh * (part - rounded) ** 2).sum(1)
            better = error < best
            best, scales = torch.where(better, error, best), torch.where(better, scale, scales)
        chosen.append(scales)
        start += inputs
    return torch.stack(chosen)


# ---- rounding


def _levels(values: Tensor, scales: Tensor, bits: int) -> Tensor:
    highest = _highest(bits)
    return (values / scales).round().clamp(-highest - 1, highest)


def round_to_nearest(
    weight: Tensor, group: int, scales: Tensor | None = None, bits: int = 4
) -> Quantized:
    """Rounds each weight of W [N, K] to nearest. `scales` [G, N]: default `peak_scales`."""
    weight = weight.detach().float()
    scales = peak_scales(weight, group, bits) if scales is None else scales
    wide = scales.repeat_interleave(group, dim=0)[: weight.shape[1]]
    q = (_levels(weight.T, wide, bits) + (1 << bits - 1)).to(torch.uint8)
    return Quantized(q, scales.to(torch.float16), group, bits)


def gptq(
    weight: Tensor,
    gram: Tensor,
    group: int,
    damping: float = 0.01,
    block: int = 128,
    bits: int = 4,
) -> Quantized:
    """Rounds W [N, K] so that X W^T changes little, given gram = X^T X [K, K].

    `damping` times the mean of diag(gram) is added to the diagonal. A rounding error is
    compensated at once within its block of `block` columns, and after the block in later columns.
    """
    rows, inputs = weight.shape
    if gram.shape != (inputs, inputs):
        raise ValueError(f"gram is {list(gram.shape)}, expected [{inputs}, {inputs}]")
    weight = weight.detach().float()
    gram = _damped(gram.double(), damping)
    scales = best_scales(weight, group, gram.diagonal(), bits=bits)
    order = gram.diagonal().argsort(descending=True, stable=True)
    group_of = order // group
    factor = _inverse_factor(gram[order][:, order]).float()

    left = weight[:, order]  # target values of the columns that are not rounded yet
    q = torch.empty(inputs, rows, dtype=torch.uint8, device=weight.device)
    for begin in range(0, inputs, block):
        end = min(begin + block, inputs)
        errors = torch.empty(rows, end - begin, device=weight.device)
        for j in range(begin, end):
            scale = scales[group_of[j]]
            level = _levels(left[:, j], scale, bits)
            q[order[j]] = (level + (1 << bits - 1)).to(torch.uint8)
            error = (left[:, j] - level * scale) / factor[j, j]
            left[:, j + 1 : end] -= torch.outer(error, factor[j, j + 1 : end])
            errors[:, j - begin] = error
        left[:, end:] -= errors @ factor[begin:end, end:]
    return Quantized(q, scales.to(torch.float16), group, bits)


def _damped(gram: Tensor, damping: float) -> Tensor:
    """Adds damping to the diagonal, so gram is invertible even if an input is always 0."""
    mean = gram.diagonal().mean()
    return gram + torch.eye(len(gram)).to(gram) * (damping * mean if mean > 0 else 1.0)


def _inverse_factor(gram: Tensor) -> Tensor:
    """Returns the upper Cholesky factor of gram^-1."""
    lower = torch.linalg.cholesky(gram)
    upper: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
    return upper


def output_error(weight: Tensor, other: Tensor, gram: Tensor) -> float:
    """|X W^T - X V^T|^2 / |X W^T|^2 for W and V [N, K] and gram = X^T X."""
    weight, difference = weight.double(), (weight - other).double()
    gram = gram.double()
    return float(((difference @ gram) * difference).sum() / ((weight @ gram) * weight).sum())
