"""Random 4-bit projections in GPTQ's format."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator

import numpy as np

from scripts.synthetic.sources import Array, Source
from scripts.synthetic.tensors import Config, Fill, TensorSpec, normal, stored

GROUP_SIZE = 128
LEVELS_STD = math.sqrt(10.5)  # standard deviation of q - 8, see Source.words
QUANTIZATION_CONFIG: Config = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": GROUP_SIZE,
    "desc_act": False,
    "static_groups": True,
    "sym": True,
    "lm_head": False,
    "checkpoint_format": "gptq",
}


# As in published files of models with gated delta nets: small or sensitive modules stay dense.
DENSE_OF_HYBRIDS = ("in_proj_a", "in_proj_b", "in_proj_ba")
MTP = "mtp."


def quantisation_config(config: Config) -> Config:
    """The quantization_config of a model."""
    if "linear_num_key_heads" not in config:
        return QUANTIZATION_CONFIG
    rules = [f"-:.*{module}$" for module in DENSE_OF_HYBRIDS] + ["-:^mtp.*"]
    return QUANTIZATION_CONFIG | {"dynamic": {rule: {} for rule in rules}}


def quantised(specs: Iterable[TensorSpec]) -> Iterator[TensorSpec]:
    """Returns the model with projections and fc in 4 bits and all other tensors unchanged.

    An MTP head stays dense.
    """
    for spec in specs:
        module = spec.name.removesuffix(".weight")
        if module == spec.name or not _is_quantised(module):
            yield spec
            continue
        if spec.std == 0:
            raise SystemExit(f"{spec.name} cannot be stored in 4 bits")
        yield from gptq_tensors(module, *spec.shape, words(), spec.std / LEVELS_STD)


def _is_quantised(module: str) -> bool:
    leaf = module.rpartition(".")[2]
    if leaf in DENSE_OF_HYBRIDS or module.startswith(MTP):
        return False
    return leaf.endswith("_proj") or leaf == "fc" or leaf.startswith("in_proj_")


def gptq_tensors(
    module: str, rows: int, columns: int, q: Fill, scale: float, scales: Fill | None = None
) -> Iterator[TensorSpec]:
    """The tensors of one projection [columns -> rows]: w = (q - 8) * scale."""
    if columns % GROUP_SIZE or rows % 8:
        raise SystemExit(
            f"{module} is [{columns} -> {rows}], but 4-bit weights need multiples of {GROUP_SIZE} "
            "and 8"
        )
    groups = columns // GROUP_SIZE
    zeros, order = _zeros_and_order(rows, columns)
    scales = scales or normal(0.05 * scale, mean=scale)
    yield TensorSpec(f"{module}.qweight", (columns // 8, rows), q, "int32")
    yield TensorSpec(f"{module}.qzeros", (groups, rows // 8), stored(zeros), "int32")
    yield TensorSpec(f"{module}.scales", (groups, rows), scales, "float16")
    yield TensorSpec(f"{module}.g_idx", (columns,), stored(order), "int32")


@functools.cache
def _zeros_and_order(rows: int, columns: int) -> tuple[Array, Array]:
    """qzeros (z - 1) and g_idx. A model with experts has tens of thousands of equal ones."""
    zeros = np.full(columns // GROUP_SIZE * rows // 8, 0x77777777, np.int32)
    return zeros, np.arange(columns, dtype=np.int32) // GROUP_SIZE


def words() -> Fill:
    def fill(source: Source, seed: int, count: int, dtype: str) -> Iterator[Array]:
        return source.words(seed, count)

    return fill
