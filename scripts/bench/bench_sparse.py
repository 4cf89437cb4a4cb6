"""Times the parts of sparse attention on the GPU: one line per shape.

The shapes are those of MiniCPM4-8B: 32 query heads, 2 KV heads of 128, the published rule. Every
launch works on another sequence, so the L2 cache is cold, as between the layers of a model. A CUDA
graph has as many launches as needed for that.

| case | what a launch does |
|---|---|
| compress | the compressed keys that 16 accepted tokens end |
| select | the choice of blocks of a step's tokens, keys read before the previous kernel ends |
| attend | attention to the chosen blocks, with the combination of splits |
| both | select, then attend: the sparse part of a layer |
| prompt | the same for a chunk of 2,048 tokens |

Queries and keys are random, so each token of a step chooses other blocks: the worst case. With
--alike, all tokens of a step have the same queries. With --fp8, the cache has e4m3 codes. The share
of the roofline is the bytes that must be read over the read bandwidth of this run: compressed keys,
and blocks that a token chose.

    python scripts/bench/bench_sparse.py [--alike] [--fp8] [--dtype bfloat16] [--json]
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from bench_attention import (
    COLD_BYTES,
    HEAD_DIM,
    PAGE,
    caches,
    microseconds,
    normal,
    open_device,
    put,
    raw,
    tree_masks,
)

from cpmcu import C

ops = C.ops
HEADS, KV_HEADS = 32, 2
RULE = {"init_blocks": 1, "window_size": 2048, "topk": 64, "dense_len": 8192}
ENTRIES = [16384, 32768, 131072]
TOKENS = [1, 12, 32]
CHUNK = 2048
ACCEPTED = 16
LAUNCHES = 16  # launches of a decode step in one graph; also the most sequences


class Sequences:
    """Sequences of `entries` entries, `count` of them of this step, that leave the L2 cache."""

    def __init__(
        self, ctx: Any, entries: int, count: int, dtype: str, alike: bool, fp8: bool
    ) -> None:
        self.ctx, self.entries, self.count = ctx, entries, count
        pages = -(-entries // PAGE)
        page_bytes = KV_HEADS * HEAD_DIM * 2 * (2 * PAGE + 5)
        # As a step reads only about 100 blocks of a sequence, fewer sequences may suffice. All fit
        # a GPU.
        self.copies = max(2, min(LAUNCHES, math.ceil(4 * COLD_BYTES / (pages * page_bytes))))
        table = np.random.default_rng(0).permutation(self.copies * pages)
        self.page_table = put(ctx, table.reshape(self.copies, pages))
        cache = [self.copies * pages, KV_HEADS, PAGE, HEAD_DIM]
        self.caches = caches(ctx, cache, dtype, fp8)
        self.fine = normal(ctx, [*cache[:2], 4, HEAD_DIM], dtype)
        self.coarse = normal(ctx, [*cache[:2], 1, HEAD_DIM], dtype)
        columns = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        self.qkv = normal(ctx, [count, columns], dtype)
        if alike:
            self.qkv.copy_from(np.repeat(self.qkv.numpy()[:1], count, axis=0))
        self.out = ops.Array(ctx, [count, HEADS * HEAD_DIM], dtype)
        words = ops.selection_words(entries)
        self.selection = ops.Array(ctx, [count, KV_HEADS, words], "uint64")
        self.most = ops.max_selected_splits(**RULE, max_kv=entries)
        floats = self.most * min(count, PAGE) * HEADS * (HEAD_DIM + 2)
        if fp8 and count > PAGE:
            floats = max(floats, ops.fp8_prefill_floats(KV_HEADS, HEAD_DIM, entries))
        self.partials = ops.Array(ctx, [floats], "float32")
        scores = ops.select_scratch_floats(
            num_tokens=count, num_heads=HEADS, num_kv_heads=KV_HEADS, max_kv=entries
        )
        self.scores = ops.Array(ctx, [scores], "float32")
        memory = ops.select_memory_bytes(num_seqs=1, num_kv_heads=KV_HEADS)
        self.memory = raw(ctx, np.zeros(memory, np.uint8))

    def tokens(self, slot: int, tree: bool) -> Any:
        ctx, count = self.ctx, self.count
        length = self.entries - count
        masks = tree_masks(count) if tree else None
        depths = [mask.bit_count() - 1 for mask in masks] if masks else range(count)
        return ops.StepTokens(
            num_tokens=count, num_seqs=1, max_seq_tokens=count, max_kv=self.entries,
            positions=put(ctx, [length + depth for depth in depths]),
            token_seqs=put(ctx, np.zeros(count)), seq_slots=put(ctx, [slot]),
            seq_token_begin=put(ctx, [0, count]), slot_lengths=put(ctx, [length] * self.copies),
            page_table=self.page_table,
            ancestor_masks=raw(ctx, np.array(masks, np.uint64)) if masks else None,
        )  # fmt: skip

    def select(self, tokens: Any, keys_are_old: bool) -> None:
        ops.select_blocks(
            self.ctx, selection=self.selection, qkv=self.qkv, fine=self.fine, coarse=self.coarse,
            scale=HEAD_DIM**-0.5, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM,
            tokens=tokens, keys_are_old=keys_are_old, scratch=self.scores,
            memory=self.memory, **RULE,
        )  # fmt: skip

    def attend(self, op: Callable[..., None], tokens: Any, tree: bool) -> None:
        op(
            self.ctx,
            ops.Attention(
                out=self.out, qkv=self.qkv, **self.caches,
                scale=HEAD_DIM**-0.5, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM,
                by_position=tree, selection=self.selection, dense_len=RULE["dense_len"],
                max_splits=self.most, tokens=tokens, scratch=self.partials,
            ),
        )  # fmt: skip

    def time(self, body: Callable[[Any], None], tree: bool = False) -> float:
        """Mean microseconds of one call of body(tokens). The calls take the sequences in turn."""
        steps = [self.tokens(slot, tree) for slot in range(self.copies)]
        launches = LAUNCHES if self.count <= PAGE else self.copies

        def run() -> None:
            for i in range(launches):
                body(steps[i % self.copies])

        return microseconds(self.ctx, run, launches)

    def blocks(self) -> int:
        """Blocks that some token chose, over both KV heads, after select."""
        words = np.bitwise_or.reduce(self.selection.numpy(), axis=0)
        return sum(int(word).bit_count() for word in words.ravel())


def step(ctx: Any, entries: int, count: int, dtype: str, alike: bool, fp8: bool) -> dict[str, Any]:
    """Times of a decode step: {case: (microseconds, bytes that must be read)}."""
    shape, tree = Sequences(ctx, entries, count, dtype, alike, fp8), count > 1
    shape.select(shape.tokens(0, tree), True)
    row = HEAD_DIM * 2
    keys = 5 * KV_HEADS * row * (entries // PAGE - 2)
    entry = HEAD_DIM + 4 if fp8 else row
    values = 2 * PAGE * entry * shape.blocks()

    def both(tokens: Any) -> None:
        shape.select(tokens, True)
        shape.attend(ops.attention_decode, tokens, tree)

    def attend(tokens: Any) -> None:
        shape.attend(ops.attention_decode, tokens, tree)

    found = {
        "select": (shape.time(lambda tokens: shape.select(tokens, True), tree), keys),
        "attend": (shape.time(attend, tree), values),
        "both": (shape.time(both, tree), keys + values),
    }
    if count == 1:
        accepted = Sequences(ctx, entries, ACCEPTED, dtype, alike, fp8)
        span = KV_HEADS * entry * (2 * ACCEPTED + 128)
        scales = [accepted.caches["k_scales"]] if fp8 else []
        counts = put(ctx, [ACCEPTED] * accepted.copies)

        def compress(tokens: Any) -> None:
            ops.compress_keys(
                ctx, k_caches=[accepted.caches["k_cache"]], fine=[accepted.fine],
                coarse=[accepted.coarse], tokens=tokens, accepted_counts=counts, k_scales=scales,
            )  # fmt: skip

        found["compress"] = (accepted.time(compress), span)
    return found


def prompt(ctx: Any, entries: int, dtype: str, alike: bool, fp8: bool) -> tuple[float, float]:
    """Microseconds of select and of attention for the last chunk of a prompt."""
    shape = Sequences(ctx, entries, CHUNK, dtype, alike, fp8)
    select = shape.time(lambda tokens: shape.select(tokens, False))
    return select, shape.time(lambda tokens: shape.attend(ops.attention_prefill, tokens, False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--alike", action="store_true", help="all tokens have the same queries")
    parser.add_argument("--fp8", action="store_true", help="an fp8 cache")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    args = parser.parse_args()
    ctx, bandwidth = open_device(args.dtype)

    def report(entries: int, tokens: int, case: str, us: float, share: float | None) -> None:
        line = {"entries": entries, "tokens": tokens, "case": case, "us": us}
        if args.json:
            print(json.dumps(line | ({} if share is None else {"roofline": share})), flush=True)
            return
        rest = f"{us / tokens:.3f} us a token" if share is None else f"{share:.0%}"
        print(f"{entries:7} entries {tokens:5} tokens  {case:15} {us:9.2f} us  {rest}", flush=True)

    for entries in ENTRIES:
        for tokens in TOKENS:
            for case, (us, read) in step(
                ctx, entries, tokens, args.dtype, args.alike, args.fp8
            ).items():
                report(entries, tokens, case, us, read / bandwidth / 1e3 / us)
        select, attend = prompt(ctx, entries, args.dtype, args.alike, args.fp8)
        report(entries, CHUNK, "prompt, select", select, None)
        report(entries, CHUNK, "prompt, attend", attend, None)


if __name__ == "__main__":
    main()
