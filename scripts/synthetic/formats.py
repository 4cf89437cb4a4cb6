"""Formats of random quantised projections, one row each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from scripts.synthetic import compressed, gptq
from scripts.synthetic.tensors import Config, TensorSpec

# In published files of models with gated delta nets, small or sensitive modules stay dense.
DENSE_OF_HYBRIDS = ("in_proj_a", "in_proj_b", "in_proj_ba")
MTP = "mtp."


@dataclass(frozen=True, slots=True)
class Format:
    """The quantization_config, and a function (module, N, K, std) -> tensors of one projection."""

    config: Config
    tensors: Callable[[str, int, int, float], Iterator[TensorSpec]]
    dtype: str  # dtype of all other tensors in published files


FORMATS = {
    "gptq": Format(gptq.CONFIG, gptq.random_tensors, "float16"),
    "gptq-g64": Format(
        gptq.CONFIG | {"group_size": 64}, partial(gptq.random_tensors, group=64), "float16"
    ),
    "fp8": Format(compressed.FP8, compressed.fp8_tensors, "bfloat16"),
    "nvfp4": Format(compressed.NVFP4, compressed.nvfp4_tensors, "bfloat16"),
    "int8": Format(compressed.INT8, compressed.int8_tensors, "bfloat16"),
}


def quantisation_config(config: Config, name: str) -> Config:
    """The quantization_config of a model."""
    stated = FORMATS[name].config
    rules = []
    if "linear_num_key_heads" in config:
        rules += [f"-:.*{module}$" for module in DENSE_OF_HYBRIDS]
    if rules or "num_nextn_predict_layers" in config:
        rules.append("-:^mtp.*")
    if not name.startswith("gptq") or not rules:
        return stated
    return stated | {"dynamic": {rule: {} for rule in rules}}


def quantised(specs: Iterable[TensorSpec], name: str) -> Iterator[TensorSpec]:
    """Returns the model with projections and fc in this format and all other tensors unchanged.

    An MTP head stays dense.
    """
    for spec in specs:
        module = spec.name.removesuffix(".weight")
        if module == spec.name or not _is_quantised(module):
            yield spec
            continue
        if spec.std == 0:
            raise SystemExit(f"{spec.name} cannot be stored in {name}")
        yield from FORMATS[name].tensors(module, *spec.shape, spec.std)


def _is_quantised(module: str) -> bool:
    leaf = module.rpartition(".")[2]
    if leaf in DENSE_OF_HYBRIDS or module.startswith(MTP):
        return False
    return leaf.endswith("_proj") or leaf == "fc" or leaf.startswith("in_proj_")
