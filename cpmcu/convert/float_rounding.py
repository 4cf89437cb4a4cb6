"""Weights as floats of 4 bits (e2m1) with a scale for each group, rounded to nearest.

| format | w | scale s of a group |
|---|---|---|
| nvfp4 | e2m1 * s / g | e4m3(g * peak / 6) for 16 inputs, with g = 448 * 6 / largest weight |
| mxfp4 | e2m1 * 2^(s - 127) | peak / 4, rounded to 2^(s - 127): up from 1.75 times a power on |

`peak` is the largest magnitude of a group. mxfp4 has groups of 32 inputs. Rounding and tensors are
those of compressed-tensors, and give the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_TOP, _TOP_SCALE = 6, 448  # the largest numbers that e2m1 and e4m3 can represent
_EMPTY_SCALE = 0.125  # the scale of a group of zeros
GROUPS = {"nvfp4": 16, "mxfp4": 32}


@dataclass(frozen=True, slots=True)
class FloatQuantized:
    """Codes uint8 [N, K] and scales [N, K / group]: e4m3, or uint8 of mxfp4; g [1] of nvfp4."""

    codes: Tensor
    scales: Tensor
    global_scale: Tensor | None

    def tensors(self) -> Mapping[str, Tensor]:
        """compressed-tensors' tensors by suffix: the even k in the low nibble."""
        packed = self.codes[:, 0::2] | self.codes[:, 1::2] << 4
        made = {"weight_packed": packed.cpu(), "weight_scale": self.scales.cpu()}
        if self.global_scale is not None:
            made["weight_global_scale"] = self.global_scale.cpu()
        return made


def check_size(module: str, outputs: int, inputs: int, form: str) -> None:
    """Raises ValueError unless 8 divides `outputs` and the group size divides `inputs`."""
    if outputs % 8 or inputs % GROUPS[form]:
        raise ValueError(
            f"{module} is [{outputs}, {inputs}], expected multiples of 8 and {GROUPS[form]} of "
            f"{form}; --format gptq takes other numbers of inputs"
        )


def round_floats(weight: Tensor, form: str, largest: float) -> FloatQuantized:
    """Rounds W [N, K]. `largest`: magnitude in W and in the matrices that share its g."""
    weight = weight.detach().float()
    groups = weight.reshape(len(weight), -1, GROUPS[form])
    peaks = groups.abs().amax(2)
    if form == "mxfp4":
        scales = (_power(peaks) - 2).clamp(0, 254)
        codes = _to_e2m1(torch.ldexp(groups, 127 - scales[:, :, None]))
        return FloatQuantized(codes.flatten(1), scales.to(torch.uint8), None)
    tiny = torch.finfo(torch.float32).tiny
    inverse = torch.tensor([max(largest, tiny)], device=weight.device).reciprocal()
    factor = _TOP * _TOP_SCALE * inverse
    factor = torch.where(factor.isinf(), 1.0, factor)
    scales = (factor * (peaks / _TOP)).to(torch.float8_e4m3fn)
    wide = torch.where(scales.float() == 0, _EMPTY_SCALE, scales.float())
    codes = _to_e2m1(groups / (wide / factor)[:, :, None])
    return FloatQuantized(codes.flatten(1), wide.to(torch.float8_e4m3fn), factor)


def _power(peaks: Tensor) -> Tensor:
    """The number's exponent plus 127; from 1.75 times its power of two on, one more."""
    return (peaks.view(torch.int32) + (1 << 21)) >> 23


def _to_e2m1(values: Tensor) -> Tensor:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; ties to the even code."""
    size = values.abs()
    code = (size > 0.25).to(torch.uint8)
    for bound, to_upper in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True)):
        code += (size >= bound) if to_upper else (size > bound)
    code += size > 5
    return code | (values < 0).to(torch.uint8) << 3
