"""The fingerprint of a model: equal for equal bytes, another one for others."""

from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path

import numpy as np

from cpmcu.engine.prefix.fingerprint import model_fingerprint
from tests.unit.prefix_pages import pattern


def checkpoint(directory: Path, seed: int = 0, change: int | None = None) -> Path:
    """Two tensors of 1 MB in one file; `change` flips a byte of the tensors."""
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "llama"}')
    data = bytearray(pattern(seed, 2 << 20))
    if change is not None:
        data[change] ^= 1
    header = {
        name: {"dtype": "U8", "shape": [1 << 20], "data_offsets": [n << 20, (n + 1) << 20]}
        for n, name in enumerate("ab")
    }
    raw = json.dumps(header).encode()
    raw = struct.pack("<Q", len(raw)) + raw
    (directory / "model.safetensors").write_bytes(raw + data)
    np.save(directory / "token_counts.npy", np.arange(10))
    return directory


def test_equal_models_have_one_fingerprint(tmp_path: Path) -> None:
    one, two = checkpoint(tmp_path / "one"), checkpoint(tmp_path / "two")
    (two / "README.md").write_text("a note")
    first = model_fingerprint([one], {"dtype": "bfloat16", "rope": {"b": 1, "a": [2]}})
    assert first == model_fingerprint([two], {"rope": {"a": [2], "b": 1}, "dtype": "bfloat16"})
    assert len(first) == 32 and int(first, 16) >= 0


def test_other_models_have_others(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model")
    tuned = checkpoint(tmp_path / "tuned", seed=1)  # equal shapes, other values
    middle = checkpoint(tmp_path / "middle", change=(1 << 19) + 100)  # one tensor's middle
    found = [model_fingerprint([path], {}) for path in (model, tuned, middle)]
    found += [model_fingerprint([model, path], {}) for path in (model, tuned)]
    found += [model_fingerprint([tuned, model], {}), model_fingerprint([model], {"dtype": "f16"})]
    (model / "config.json").write_text('{"model_type": "qwen2"}')
    found.append(model_fingerprint([model], {}))
    np.save(model / "token_counts.npy", np.arange(1, 11))
    found.append(model_fingerprint([model], {}))
    os.replace(model / "model.safetensors", model / "other.safetensors")
    found.append(model_fingerprint([model], {}))
    (model / "other.safetensors").write_bytes(b"\xff" * 50)  # damaged: the loader says so
    found.append(model_fingerprint([model], {}))
    assert len(set(found)) == len(found)


def test_a_large_model_takes_no_time(tmp_path: Path) -> None:
    ranges = [[n * 40_000_000, (n + 1) * 40_000_000] for n in range(400)]
    tensors = {f"t{n}": {"data_offsets": offsets} for n, offsets in enumerate(ranges)}
    raw = json.dumps(tensors).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(16_000_000_000)  # a hole
    start = time.process_time()  # other programs take no part
    model_fingerprint([tmp_path], {})
    assert time.process_time() - start < 0.1
