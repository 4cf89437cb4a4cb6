"""Inputs of sparse attention for kernel tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from tests.kernels.attention import Case, put_fp8
from tests.kernels.util import (
    PAGE,
    Step,
    context,
    decode,
    empty,
    encode,
    ops,
    put,
    put_ints,
    put_raw,
)
from tests.reference import fp8
from tests.reference.sparse import COARSE, FINE, Rule, compress

MEMORY_SEQS = 8  # sequences with two KV heads each
SMALL_RULE = Rule(init_blocks=1, window_size=128, topk=3, dense_len=300)


@dataclass
class SparseCase(Case):
    """A step with compressed keys, too; those that no token may read are NaN."""

    rule: Rule = field(default=SMALL_RULE)
    keys_are_old: bool = True
    one_launch: bool = True  # one launch of select_blocks for steps of one token

    def compressed(self, seq: int) -> tuple[np.ndarray, np.ndarray]:
        """Fine and coarse keys [spans, Hkv, D] of the cached and new tokens, as they are stored."""
        keys = (compress(self.k[seq], spans) for spans in (FINE, COARSE))
        fine, coarse = (decode(encode(each, self.dtype), self.dtype) for each in keys)
        return fine, coarse

    def planes(self) -> tuple[np.ndarray, np.ndarray]:
        """Raw [pages, Hkv, 4, D] and [pages, Hkv, 1, D]."""
        nan = encode(np.nan, self.dtype)
        shape = (self.step.num_pages, self.num_kv_heads, 4, self.head_dim)
        fine, coarse = np.full(shape, nan), np.full((*shape[:2], 1, shape[3]), nan)
        for seq in range(len(self.step.lengths)):
            rows, pages = self.compressed(seq)
            last = int(self.step.positions[self.step.token_seqs == seq].max())
            num_pages = max(0, last // PAGE - 1)  # a query in block q reads pages up to q - 2
            for i, row in enumerate(rows[: max(0, 4 * num_pages - 1)], 1):
                fine[self.step.where(seq, i * 16)[0], :, i % 4] = encode(row, self.dtype)
            for i, row in enumerate(pages[: max(0, num_pages - 1)], 1):
                coarse[self.step.where(seq, i * PAGE)[0], :, 0] = encode(row, self.dtype)
        return fine, coarse

    def select(self, device: str, qkv: Any, rows: Any) -> Any:
        """The selection [T, Hkv, words] of select_blocks."""
        fine, coarse = (self.put_raw(device, plane) for plane in self.planes())
        words = ops.selection_words(self.step.max_kv)
        selection = empty(device, [self.step.num_rows, self.num_kv_heads, words], "uint64")
        floats = ops.select_scratch_floats(
            num_tokens=self.step.num_rows, num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads, max_kv=self.step.max_kv,
        )  # fmt: skip
        ops.select_blocks(
            context(device), selection=selection, qkv=qkv, fine=fine, coarse=coarse,
            scale=self.scale, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim, tokens=rows, scratch=empty(device, [floats], "float32"),
            keys_are_old=self.keys_are_old, memory=select_memory(device, self.one_launch),
            **vars(self.rule),
        )  # fmt: skip
        return selection

    def blocks(self, device: str) -> np.ndarray:
        """Returns bool [T, Hkv, words * 64]: does select_blocks choose the block?"""
        qkv, _, _, rows = self.put(device)
        return as_bools(self.select(device, qkv, rows).numpy())

    def params(self, device: str, qkv: Any, k: Any, v: Any, rows: Any) -> tuple[Any, Any]:
        self.selecting = self.selecting | {
            "selection": self.select(device, qkv, rows),
            "dense_len": self.rule.dense_len,
            "max_splits": ops.max_selected_splits(**vars(self.rule), max_kv=self.step.max_kv),
        }
        return super().params(device, qkv, k, v, rows)

    def key_planes(self, device: str) -> list[Any]:
        """Returns the key cache on the device."""
        return [self.put_raw(device, self.cache(self.k))]


@dataclass
class Fp8SparseCase(SparseCase):
    """Keys and values are stored as e4m3 with scales, and hold what these stand for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.k, self.v = ([fp8.dequantised(rows) for rows in each] for each in (self.k, self.v))

    def key_planes(self, device: str) -> list[Any]:
        """Returns the codes and the scales of the key cache on the device."""
        return put_fp8(device, self, self.k)

    def put(self, device: str) -> tuple[Any, Any, Any, Any]:
        k, v = (put_fp8(device, self, entries) for entries in (self.k, self.v))
        return put(device, self.qkv, self.dtype), k, v, self.step.rows(device)

    def params(self, device: str, qkv: Any, k: Any, v: Any, rows: Any) -> tuple[Any, Any]:
        self.selecting = {"k_scales": k[1], "v_scales": v[1]}
        return super().params(device, qkv, k[0], v[0], rows)


@cache
def select_memory(device: str, one_launch: bool) -> Any:
    """The memory of select_blocks, kept between launches; without it, several launches choose."""
    if not one_launch:
        return None
    num_bytes = ops.select_memory_bytes(num_seqs=MEMORY_SEQS, num_kv_heads=2)
    return put_raw(device, np.zeros(num_bytes, np.uint8))


def as_bools(words: np.ndarray) -> np.ndarray:
    bits = words[..., None] >> np.arange(64, dtype=np.uint64) & np.uint64(1)
    return bits.astype(bool).reshape(*words.shape[:-1], -1)


def compressed_on(device: str, case: SparseCase, counts: list[int] | None) -> Any:
    """Runs compress_keys. `counts`: accepted tokens of each sequence; None: a prefill step.

    Other layers are in front; on a GPU, enough of them for two launches."""
    step, others = case.step, 64 if device == "cuda" else 1
    keys = case.key_planes(device)
    others_keys = [empty(device, list(each.shape), each.dtype) for each in keys]
    k_caches, *k_scales = ([other] * others + [key] for other, key in zip(others_keys, keys))
    shape = [step.num_pages, case.num_kv_heads, 4, case.head_dim]
    shapes = [[*shape[:2], rows, shape[3]] for rows in (4, 1)]
    planes = [empty(device, each, case.dtype) for each in shapes]
    unused = [empty(device, each, case.dtype) for each in shapes]
    accepted = None
    if counts is not None:
        per_slot = np.zeros(step.num_slots, np.int32)
        per_slot[step.slots] = counts
        accepted = put_ints(device, per_slot)
    ops.compress_keys(
        context(device), k_caches=k_caches, fine=[unused[0]] * others + [planes[0]],
        coarse=[unused[1]] * others + [planes[1]], tokens=step.rows(device),
        accepted_counts=accepted, **({"k_scales": k_scales[0]} if k_scales else {}),
    )  # fmt: skip
    return [decode(plane.numpy(), case.dtype) for plane in planes]


def step_after(lengths: list[int], counts: list[int]) -> Step:
    """A decode step as `commit` sees it: the lengths include the accepted tokens."""
    after = [length + count for length, count in zip(lengths, counts)]
    return Step(lengths=after, counts=[max(counts)] * len(lengths))
