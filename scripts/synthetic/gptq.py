"""Random 4-bit projections in GPTQ's format."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import numpy as np

from scripts.synthetic.sources import Array, Bits
from scripts.synthetic.tensors import Config, Fill, TensorSpec, normal, random_bits, stored

GROUP_SIZE = 128
# Each q is 1 plus the sum of two integers from 0 to 7. Its mean is 8, so weights have mean 0.
# Otherwise a bias common to all rows would grow from layer to layer.
CODES = Bits(0x77777777, 0x11111111, terms=2)
LEVELS_STD = math.sqrt(10.5)  # standard deviation of q - 8
CONFIG: Config = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": GROUP_SIZE,
    "desc_act": False,
    "static_groups": True,
    "sym": True,
    "lm_head": False,
    "checkpoint_format": "gptq",
}


def random_tensors(
    module: str, rows: int, columns: int, std: float, group: int = GROUP_SIZE
) -> Iterator[TensorSpec]:
    """One projection of random codes whose weights have this standard deviation."""
    codes = random_bits(CODES)
    yield from gptq_tensors(module, rows, columns, codes, std / LEVELS_STD, group=group)


def gptq_tensors(
    module: str,
    rows: int,
    columns: int,
    q: Fill,
    scale: float,
    scales: Fill | None = None,
    group: int = GROUP_SIZE,
) -> Iterator[TensorSpec]:
    """The tensors of one projection [columns -> rows]: w = (q - 8) * scale."""
    if columns % group or rows % 8:
        raise SystemExit(
            f"{module} is [{columns} -> {rows}], but 4-bit weights need multiples of {group} and 8"
        )
    groups = columns // group
    zeros, order = _zeros_and_order(rows, columns, group)
    scales = scales or normal(0.05 * scale, mean=scale)
    yield TensorSpec(f"{module}.qweight", (columns // 8, rows), q, "int32")
    yield TensorSpec(f"{module}.qzeros", (groups, rows // 8), stored(zeros), "int32")
    yield TensorSpec(f"{module}.scales", (groups, rows), scales, "float16")
    yield TensorSpec(f"{module}.g_idx", (columns,), stored(order), "int32")


@functools.cache
def _zeros_and_order(rows: int, columns: int, group: int) -> tuple[Array, Array]:
    """qzeros (z - 1) and g_idx. A model with experts has tens of thousands of equal ones."""
    zeros = np.full(columns // group * rows // 8, 0x77777777, np.int32)
    return zeros, np.arange(columns, dtype=np.int32) // group
