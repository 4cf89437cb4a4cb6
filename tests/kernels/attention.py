"""Inputs of attention for kernel tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.kernels.util import Step, check, context, empty, encode, get, ops, put, put_raw, rounded
from tests.reference import fp8
from tests.reference import ops as reference


@dataclass
class Case:
    """Inputs of attention. Entries that no token sees hold NaN, so using one is visible."""

    step: Step
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    seed: int = 0
    window: int = 0
    by_position: bool = False
    gated: bool = False  # a gate of the size of a head follows each query head
    with_sinks: bool = False
    pairs: int = 0  # pairs of sequence and KV head in the scratch of an fp8 cache; 0: usual
    selecting: dict[str, Any] = field(default_factory=dict)  # arguments for sparse attention

    def __post_init__(self) -> None:
        step, dim = self.step, self.head_dim
        rng = np.random.default_rng(self.seed)
        columns = (self.num_heads + 2 * self.num_kv_heads) * dim
        self.scale = dim**-0.5
        values = np.random.default_rng([self.seed, 9]).uniform(-1, 6, self.num_heads)
        self.sinks = values.astype(np.float32).astype(float) if self.with_sinks else None
        self.qkv = rounded(rng.standard_normal((step.num_rows, columns)) * 1.5, self.dtype)
        # [entries, Hkv, D] of each sequence. The values do not depend on the shape of the step.
        self.k, self.v = (
            [
                rounded(
                    np.random.default_rng([self.seed, seq, which]).standard_normal(
                        (end, self.num_kv_heads, dim)
                    ),
                    self.dtype,
                )
                for seq, end in enumerate(step.ends)
            ]
            for which in (0, 1)
        )

    def cache(self, entries: list[np.ndarray]) -> np.ndarray:
        """Raw [pages, Hkv, 64, D] with the sequences' entries in their pages."""
        shape = (self.step.num_pages, self.num_kv_heads, 64, self.head_dim)
        cache = np.full(shape, encode(np.nan, self.dtype))
        for seq, values in enumerate(entries):
            page, entry = self.step.where(seq, np.arange(len(values)))
            cache[page, :, entry] = encode(values, self.dtype)
            # Pages before the windows of all tokens may be missing.
            outside = self.step.lengths[seq] + 1 - self.window if self.window else 0
            for first in range(0, outside - 63, 64):
                cache[self.step.where(seq, first)[0]] = encode(np.nan, self.dtype)
        return cache

    def put_raw(self, device: str, raw: np.ndarray) -> Any:
        if self.dtype != "bfloat16":
            return put_raw(device, raw)
        array = ops.Array(context(device), list(raw.shape), "bfloat16")
        array.copy_from(raw)
        return array

    def put(self, device: str) -> tuple[Any, Any, Any, Any]:
        """Returns qkv, the caches and the tokens of the step on the device."""
        k, v = (self.put_raw(device, self.cache(entries)) for entries in (self.k, self.v))
        qkv = self.qkv
        if self.gated:
            q, rest = np.split(qkv, [self.num_heads * self.head_dim], axis=1)
            q = q.reshape(len(qkv), self.num_heads, self.head_dim)
            pairs = np.concatenate([q, np.full_like(q, np.nan)], axis=2)
            qkv = np.concatenate([pairs.reshape(len(qkv), -1), rest], axis=1)
        return put(device, qkv, self.dtype), k, v, self.step.rows(device)

    def run(self, name: str, device: str) -> Any:
        return self.launch(name, device, *self.put(device))

    def params(self, device: str, qkv: Any, k: Any, v: Any, rows: Any) -> tuple[Any, Any]:
        """The parameters of an op, and its `out`."""
        num_rows = qkv.shape[0]
        out = empty(device, [num_rows, self.num_heads * self.head_dim], self.dtype)
        floats = ops.attention_scratch_floats(
            num_tokens=num_rows, num_heads=self.num_heads, head_dim=self.head_dim,
            max_kv=self.step.max_kv,
        )  # fmt: skip
        if "max_splits" in self.selecting:
            splits = self.selecting["max_splits"]
            floats = ops.sparse_scratch_floats(num_rows, self.num_heads, self.head_dim, splits)
        if self.pairs:
            floats = self.pairs * ops.fp8_pair_floats(self.head_dim, self.step.max_kv)
        elif "k_scales" in self.selecting:
            planned = (self.num_kv_heads, self.head_dim, self.step.max_kv)
            floats = max(floats, ops.fp8_prefill_floats(*planned))
        more = {} if self.sinks is None else {"sinks": put(device, self.sinks)}
        if self.gated:
            k_begin = 2 * self.num_heads * self.head_dim
            v_begin = k_begin + self.num_kv_heads * self.head_dim
            more["layout"] = ops.QkvLayout(
                row=qkv.shape[1], q_head=2 * self.head_dim, k=k_begin, v=v_begin
            )
        attention = ops.Attention(
            out=out, qkv=qkv, k_cache=k, v_cache=v, scale=self.scale, num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, tokens=rows,
            scratch=empty(device, [floats]), window=self.window, by_position=self.by_position,
            **self.selecting, **more,
        )  # fmt: skip
        return attention, out

    def launch(self, name: str, device: str, qkv: Any, k: Any, v: Any, rows: Any) -> Any:
        attention, out = self.params(device, qkv, k, v, rows)
        getattr(ops, name)(context(device), attention)
        return out

    def entries(self, row: int) -> np.ndarray:
        """The entries that token `row` sees."""
        entries, own = self.step.visible(row), int(self.step.token_entries[row])
        if not self.by_position:
            return reference.in_window(entries, own, self.window)
        return entries[reference.in_window(np.arange(len(entries)), len(entries) - 1, self.window)]

    def reference(self) -> np.ndarray:
        out = np.empty((self.step.num_rows, self.num_heads * self.head_dim))
        for row in range(self.step.num_rows):
            seq, entries = self.step.token_seqs[row], self.entries(row)
            q = self.qkv[row].reshape(-1, self.head_dim)[: self.num_heads]
            k, v = self.k[seq][entries], self.v[seq][entries]
            found = reference.attention_row(q, k, v, self.scale, self.sinks)
            out[row] = found.reshape(-1)
        return out

    def check(self, name: str, device: str) -> None:
        run = lambda device: get(self.run(name, device))  # noqa: E731
        check(run, device, self.reference(), "attention", self.dtype)


def put_fp8(device: str, case: Case, entries: list[np.ndarray]) -> list[Any]:
    """Codes [pages, Hkv, 64, D] and scales [pages, Hkv, 64, 1] of a cache of the entries.

    Rows that no token sees are NaN.
    """
    shape = (case.step.num_pages, case.num_kv_heads, 64, case.head_dim)
    codes = np.full(shape, 0x7F, np.uint8)
    scales = np.full((*shape[:3], 1), np.nan, np.float32)
    for seq, rows in enumerate(entries):
        page, entry = case.step.where(seq, np.arange(len(rows)))
        new_codes, new_scales = fp8.quantise(rows)
        codes[page, :, entry] = fp8.interleaved(new_codes)
        scales[page, :, entry, 0] = new_scales
        outside = case.step.lengths[seq] + 1 - case.window if case.window else 0
        for first in range(0, outside - 63, 64):
            scales[case.step.where(seq, first)[0]] = np.nan
    return [put_raw(device, plane) for plane in (codes, scales)]
