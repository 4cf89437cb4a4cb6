"""Writes tiny targets with several MTP modules in their files.

tiny, modules = write_modules(tmp_path, "mimo", num_modules=3, chained=False)
modules[1]["fc.weight"]     # with the names of a draft's files
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.reference.tiny_checkpoints import (
    Array,
    TinyCheckpoint,
    random_weights,
    tiny_config,
    write_tiny,
)

# The names of fc, of the norms of its inputs, and of the norm of the result.
NAMES = {
    "deepseek": ("eh_proj", "enorm", "hnorm", "shared_head.norm"),
    "mimo": ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm"),
}
PARTS = ("fc", "input_norm1", "input_norm2", "norm")
PREFIXES = {"deepseek": "model.layers.{}.", "mimo": "model.mtp_layers.{}."}


def write_modules(
    directory: Path,
    layout: str,
    num_modules: int = 3,
    *,
    chained: bool = False,
    family: str | None = None,
    dtype: str = "float32",
    seed: int = 0,
    copies: bool = False,
    **overrides: Any,
) -> tuple[TinyCheckpoint, list[dict[str, Array]]]:
    """The target, and the weights of each module. `copies`: with copies of the target's tables."""
    family = family or ("mimo" if layout == "mimo" else "llama")
    overrides = {"num_nextn_predict_layers": num_modules, **overrides}
    if chained:
        overrides["chain_mtp_hidden"] = True
    config = tiny_config(family, dtype, **overrides)
    weights = random_weights(config, seed)
    modules = [module_weights(config, seed + 1 + i) for i in range(num_modules)]
    first = config["num_hidden_layers"] if layout == "deepseek" else 0
    renamed = dict(zip(PARTS, NAMES[layout]))
    for i, module in enumerate(modules):
        prefix = PREFIXES[layout].format(first + i)
        for name, array in module.items():
            part, _, leaf = name.rpartition(".")
            name = f"{renamed[part]}.{leaf}" if part in renamed else name.removeprefix("layers.0.")
            weights[prefix + name] = array
        if copies:
            weights[prefix + "embed_tokens.weight"] = weights["model.embed_tokens.weight"]
            weights[prefix + "shared_head.head.weight"] = weights["lm_head.weight"]
    made = write_tiny(directory, family, dtype=dtype, weights=weights, **overrides)
    return made, modules


def module_weights(config: dict[str, Any], seed: int) -> dict[str, Array]:
    """A module of one layer like those of the target."""
    rng = np.random.default_rng(seed + 1000)
    hidden = config["hidden_size"]
    layer = random_weights({**config, "num_hidden_layers": 1}, seed)
    module = {
        name.replace("model.layers.0.", "layers.0."): array
        for name, array in layer.items()
        if name.startswith("model.layers.0.")
    }
    module["fc.weight"] = (rng.standard_normal((hidden, 2 * hidden)) / np.sqrt(2 * hidden)).astype(
        np.float32
    )
    for name in PARTS[1:]:
        module[f"{name}.weight"] = rng.uniform(0.5, 1.5, hidden).astype(np.float32)
    return module
