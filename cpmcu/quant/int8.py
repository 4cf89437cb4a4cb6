"""8-bit integer weights: w = (q - z) * scale for a group of inputs, or of a whole row.

| format | words |
|---|---|
| gptq | `qweight` int32 [K / 4, N], byte i is k = 4 row + i |
| compressed | `weight_packed` int32 [N, K / 4], byte i is k = 4 column + i |
| plain | `weight` int8 [N, K], holds q - 128 |

z is 128 unless the file has zero points: `qzeros` int32 [G, N / 4], or `weight_zero_point`
[N / 4, G]. The engine repacks the words (csrc/linear/int8_tensors.cpp).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

from cpmcu.loading.tensors import TensorMeta
from cpmcu.quant.int4 import CHANNEL_WISE, check_finite, misfit, stated_scales, zero_biases
from cpmcu.quant.parts import Part
from cpmcu.quant.registry import LinearOptions, Read


class Int8Format(enum.Enum):
    """Tensors in the file: (words, scales)."""

    GPTQ = ".qweight", ".scales"
    COMPRESSED = ".weight_packed", ".weight_scale"
    PLAIN = ".weight", ".weight_scale"


def int8_part(
    form: Int8Format,
    tensors: Mapping[str, TensorMeta],
    modules: Sequence[str],
    *,
    group_size: int,
    zero_points: bool = False,
    version: int = 1,
    ignored: Mapping[str, str] | None = None,
) -> Part:
    """The modules with 8-bit weights. GPTQ's zero points have `version` (packing.pack_gptq_zeros).

    Raises ValueError for sizes that are not multiples of 8, and for scales that are missing or
    neither float16 nor bfloat16. Either all matrices have a single scale each, or none has. The
    part's `verify` raises ValueError for scales that are not finite.
    """
    words, scales = form.value
    dtype = stated_scales(tensors, [module + scales for module in modules])
    biases = zero_biases(tensors, modules)
    single = set()
    for module in modules:
        if module + scales not in tensors:
            raise ValueError(f"{module}{scales} is missing, expected it beside {module}{words}")
        one = form is Int8Format.PLAIN and tensors[module + scales].num_elements == 1
        _check_shapes(form, tensors[module + words], tensors[module + scales], group_size, one)
        single.add(one)
    if len(single) > 1:
        raise ValueError(
            "some int8 matrices have one scale and others one for each row, expected all alike"
        )

    def verify(read: Read) -> None:
        biases.verify(read)
        for module in modules:
            check_finite(tensors[module + scales], read)

    name = form.name.lower() + ("_tensor" if True in single else "")
    if form is Int8Format.GPTQ and zero_points and version == 2:
        name = "gptq_v2"
    return Part(
        modules,
        LinearOptions(
            layout="int8",
            format=name,
            group_size=group_size,
            zero_points=zero_points,
            scale_dtype=dtype,
        ),
        "8 bits" + (f" with groups of {group_size}" if group_size != CHANNEL_WISE else ""),
        ignored={**(ignored or {}), **biases.ignored},
        verify=verify,
    )


def _check_shapes(
    form: Int8Format, words: TensorMeta, scales: TensorMeta, group_size: int, one: bool
) -> None:
    """Raises ValueError for another dtype, K or N that 8 does not divide, or scales that misfit."""
    expected = {
        Int8Format.GPTQ: "int32 [K / 4, N]",
        Int8Format.COMPRESSED: "int32 [N, K / 4]",
        Int8Format.PLAIN: "int8 [N, K]",
    }[form]
    if words.dtype != expected.partition(" ")[0] or len(words.shape) != 2:
        raise misfit(words, expected)
    rows, columns = words.shape
    k, n = {
        Int8Format.GPTQ: (4 * rows, columns),
        Int8Format.COMPRESSED: (4 * columns, rows),
        Int8Format.PLAIN: (columns, rows),
    }[form]
    if k % 8 or n % 8:
        raise misfit(words, f"{expected} with N and K that are multiples of 8")
    groups = 1 if group_size == CHANNEL_WISE else -(-k // group_size)
    shape = (groups, n) if form is Int8Format.GPTQ else (n, groups)
    if scales.shape != shape and not one:
        raise misfit(scales, f"{list(shape)} beside {list(words.shape)} of 8 bits")
