"""Checkpoints of published shapes without weights: complete headers, and holes instead of data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from cpmcu.loading.safetensors import DTYPE_CODES
from cpmcu.loading.tensors import STORAGE_DTYPES, itemsize
from scripts.synthetic.formats import FORMATS, quantisation_config, quantised
from scripts.synthetic.presets import PRESETS
from scripts.synthetic.sources import NumpySource


def write_hollow(directory: Path, name: str, quant: str | None = None) -> Path:
    """Writes the preset `name`. A file has holes where weights are, so it takes little space.

    Only the integers that a loader checks are written: zero points and the order of groups.
    """
    preset = PRESETS[name]
    dtype = FORMATS[quant].dtype if quant else "bfloat16"
    config: dict[str, Any] = {**preset.config, "torch_dtype": dtype}
    specs = list(preset.tensors(config))
    if quant and not preset.quantised:
        config["quantization_config"] = quantisation_config(config, quant)
        specs = list(quantised(specs, quant))
    directory.mkdir(parents=True, exist_ok=True)
    for file, content in (("config", config), ("generation_config", preset.generation)):
        (directory / f"{file}.json").write_text(json.dumps(content), encoding="utf-8")
    header: dict[str, Any] = {}
    end = 0
    for spec in specs:
        kind = spec.dtype or dtype
        begin, end = end, end + spec.count * itemsize(kind)
        code = DTYPE_CODES[kind]
        header[spec.name] = {"dtype": code, "shape": spec.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    source = NumpySource()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
        for spec in specs:
            if spec.name.endswith((".qzeros", ".g_idx")):
                file.seek(8 + len(text) + header[spec.name]["data_offsets"][0])
                for chunk in spec.fill(source, 0, spec.count, spec.dtype or dtype):
                    assert chunk.dtype == np.dtype(STORAGE_DTYPES[spec.dtype or dtype])
                    file.write(chunk.data)
    return directory
