"""Float weights with a scale for each group of k: NVFP4, MXFP4 and MXFP8.

| form | w | codes | scales |
|---|---|---|---|
| NVFP4 | e2m1 * e4m3 / g or * s2 | uint8 [N, K / 2] | e4m3 [N, K / 16], and g or s2 |
| MXFP4 | e2m1 * 2^(s - 127) | uint8 [N, K / 2] | uint8 [N, K / 32] |
| MXFP8 | e4m3 * 2^(s - 127) | e4m3 [N, K] | uint8 [N, K / 32] |

A matrix has one g (compressed-tensors) or s2 (ModelOpt). A byte of codes of 4 bits has the even k
in its low nibble. Each part of a matrix (q, k and v; gate and up) keeps its own scales.
Activations stay in 16 bits; their scales (`input_scale`, `input_global_scale`) are not used.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping, Sequence

import numpy as np

from cpmcu.loading.tensors import TensorMeta
from cpmcu.quant.parts import Part
from cpmcu.quant.registry import LinearOptions, Read

logger = logging.getLogger(__name__)

E8M0 = ("uint8", "float8_e8m0fnu")  # dtypes of powers of two in files
_NOT_USED = (".weight_shape", ".input_scale", ".input_global_scale", ".output_scale")


class FloatFormat(enum.Enum):
    """Formats of csrc/linear/float_group_tensors.cpp: (name, form, scale of the matrix)."""

    NVFP4 = "nvfp4", "NVFP4", ".weight_global_scale"
    NVFP4_MODELOPT = "nvfp4_modelopt", "NVFP4", ".weight_scale_2"
    MXFP4 = "mxfp4", "MXFP4", ""
    MXFP4_MODELOPT = "mxfp4_modelopt", "MXFP4", ""
    MXFP4_BLOCKS = "mxfp4_blocks", "MXFP4", ""
    MXFP8 = "mxfp8", "MXFP8", ""


def float_group_part(
    form: FloatFormat, tensors: Mapping[str, TensorMeta], modules: Sequence[str]
) -> Part:
    """The modules of this form.

    The part's `verify` raises ValueError for a scale of a matrix that is not a positive number.
    """
    name, what, factor = form.value
    unused = [module + suffix for module in modules for suffix in _NOT_USED]
    logger.info("%s weights are multiplied with activations of 16 bits", what)

    def verify(read: Read) -> None:
        for module in modules if factor else ():
            if module + factor not in tensors:
                continue  # the loader reports it as missing
            found = read(module + factor)
            if found.size != 1 or not (np.isfinite(found).all() and (found > 0).all()):
                raise ValueError(
                    f"{module}{factor} holds {found.ravel()[:4].tolist()}, expected one positive "
                    "number: the file is damaged"
                )

    return Part(
        modules,
        LinearOptions(layout="float_groups", format=name),
        what,
        ignored={n: "activations are not quantised" for n in unused if n in tensors},
        verify=verify,
    )
