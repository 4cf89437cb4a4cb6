"""A fake cpmcu.C that stores weights and computes nothing, for tests of loading."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from cpmcu.loading.tensors import STORAGE_DTYPES


class FakeEngine:
    """Lists the expected tensors, and keeps the loaded bytes in `loaded`."""

    def __init__(self, spec: Any, config: Any) -> None:
        self.spec, self.config = spec, config
        self.max_model_len = self.planned_model_len(spec, config)
        self.loaded: dict[str, tuple[str, np.ndarray]] = {}
        self.finished = False

    @staticmethod
    def planned_model_len(spec: Any, config: Any, draft: Any = None) -> int:
        length: int = config.max_model_len or spec.max_position_embeddings
        return length

    def expected_tensors(self) -> list[Any]:
        s = self.spec
        q_rows, kv_rows = (
            heads * s.head_dim for heads in (s.num_attention_heads, s.num_key_value_heads)
        )
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (s.vocab_size, s.hidden_size),
            "model.norm.weight": (s.hidden_size,),
        }
        if not s.tie_word_embeddings:
            shapes["lm_head.weight"] = (s.vocab_size, s.hidden_size)
        for layer in range(s.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            for norm in ("input_layernorm", "post_attention_layernorm"):
                shapes[f"{prefix}{norm}.weight"] = (s.hidden_size,)
            for part, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
                shapes[f"{prefix}self_attn.{part}_proj.weight"] = (rows, s.hidden_size)
                if s.qkv_bias:
                    shapes[f"{prefix}self_attn.{part}_proj.bias"] = (rows,)
                if s.qk_norm and part != "v":
                    shapes[f"{prefix}self_attn.{part}_norm.weight"] = (s.head_dim,)
            shapes[f"{prefix}self_attn.o_proj.weight"] = (s.hidden_size, q_rows)
            for part in ("gate", "up"):
                shapes[f"{prefix}mlp.{part}_proj.weight"] = (s.intermediate_size, s.hidden_size)
            shapes[f"{prefix}mlp.down_proj.weight"] = (s.hidden_size, s.intermediate_size)
        return [
            SimpleNamespace(name=name, shape=list(shape), dtype=s.dtype, required=True)
            for name, shape in shapes.items()
        ]

    def load_file(self, path: str, entries: list[Any], progress: Any = None) -> None:
        done = 0
        for entry in entries:
            count = entry.nbytes // np.dtype(STORAGE_DTYPES[entry.dtype]).itemsize
            data = np.fromfile(path, STORAGE_DTYPES[entry.dtype], count, offset=entry.offset)
            self.load_tensor(entry.name, data.reshape(entry.shape), entry.dtype)
            done += entry.nbytes
            if progress is not None:
                progress(done)

    def load_tensor(self, name: str, array: Any, dtype: str) -> None:
        expected = {info.name: info for info in self.expected_tensors()}
        assert name in expected and name not in self.loaded
        assert list(array.shape) == expected[name].shape, name
        self.loaded[name] = (dtype, np.array(array))

    def finish_loading(self) -> None:
        assert set(self.loaded) == {info.name for info in self.expected_tensors()}
        self.finished = True


def fake_extension(num_devices: int = 0) -> Any:
    """The fake result of `cpmcu._extension.load`."""
    return SimpleNamespace(
        device_count=lambda: num_devices,
        ModelSpec=SimpleNamespace,
        RuntimeConfig=SimpleNamespace,
        FileEntry=SimpleNamespace,
        Engine=FakeEngine,
    )
