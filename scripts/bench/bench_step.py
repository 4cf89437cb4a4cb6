"""Times the kernels of a speculative step beside the forward passes: one line per op.

One sequence of MiniCPM4-8B with an EAGLE head: depth 4, top-k 8, tree 32, 32768 draft tokens.
A CUDA graph holds each op several times; the time is that of one launch in microseconds. If the
shape of an op depends on the level, each shape is timed. Logits and keys are in L2, as after the
preceding kernel of a step. The accepted path is the worst case: each of its tokens moves in 32
layers.

    python scripts/bench/bench_step.py [--dtype bfloat16] [--json] [--device cpu]

The CPU is timed without graphs; its figures say only that the program runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from bench_attention import microseconds, normal, put, raw

from cpmcu import C
from cpmcu.drafters.options.ngram import MAX_NGRAM

ops = C.ops
PAGE = C.PAGE_SIZE
HIDDEN, VOCAB, DRAFT_VOCAB = 4096, 73448, 32768
LAYERS, KV_HEADS, HEAD_DIM = 32, 2, 128
DEPTH, TOPK, NODES = 4, 8, 32
PATH = DEPTH + 1  # tokens that the step accepts
LENGTH, MAX_LEN = 1024, 8192
FILL_LENGTH, FILL_DEPTH = 32768, 9  # text and longest path of a filled draft
CANDIDATES = TOPK + (DEPTH - 1) * TOPK * TOPK
BUDGET_US = 80.0
HISTORY = 1 << 20  # tokens; each launch of accept_tree appends up to PATH
LAUNCHES = 20  # launches of an op in a graph


class Step:
    """The arrays of one sequence in slot 0, and a method for each op."""

    def __init__(self, ctx: Any, dtype: str) -> None:
        self.ctx, self.slots = ctx, put(ctx, [0])
        self.beam = self.make_beam()
        self.topk_tokens = ops.Array(ctx, [TOPK, TOPK], "int32")
        self.topk_logprobs = ops.Array(ctx, [TOPK, TOPK], "float32")
        self.draft_logits = {rows: normal(ctx, [rows, DRAFT_VOCAB], "float32") for rows in (1, 8)}
        self.id_map = put(ctx, np.arange(DRAFT_VOCAB) * 2)
        self.draft = ops.Draft(
            tokens=ops.Array(ctx, [1, NODES - 1], "int32"),
            parents=ops.Array(ctx, [1, NODES - 1], "int32"),
            scores=ops.Array(ctx, [1, NODES - 1], "float32"),
        )
        names = ("token_ids", "token_positions", "token_slots", "token_seqs")
        self.rows = {name: ops.Array(ctx, [1, NODES], "int32") for name in names}
        self.rows["seq_token_begin"] = ops.Array(ctx, [2], "int32")
        self.built = ops.TokenTrees(
            **{name: ops.Array(ctx, [1, NODES], "int32") for name in ("tokens", "parents")},
            depths=ops.Array(ctx, [1, NODES], "int32"),
            masks=ops.Array(ctx, [1, NODES], "uint64"),
            **self.rows,
        )
        self.make_worst_tree()
        self.make_state()
        self.make_sampling()
        self.make_fill()
        self.make_draft_rows()
        pages = MAX_LEN // PAGE
        self.pool = normal(ctx, [2 * LAYERS, pages, KV_HEADS * PAGE * HEAD_DIM], dtype)
        self.page_table = put(ctx, np.random.default_rng(0).permutation(pages)[None])
        self.hidden = normal(ctx, [NODES, HIDDEN], dtype)
        self.accepted_hidden = ops.Array(ctx, [PATH, HIDDEN], dtype)
        self.last_hidden = ops.Array(ctx, [1, HIDDEN], dtype)

    def make_beam(self) -> Any:
        ints = {
            "tokens": [1, CANDIDATES],
            "level_candidates": [1, DEPTH, TOPK],
            "token_ids": [1, TOPK],
            "token_parents": [1, TOPK],
            "token_positions": [1, TOPK],
            "token_seqs": [1, TOPK],
            "seq_token_begin": [2],
        }
        arrays = {name: ops.Array(self.ctx, shape, "int32") for name, shape in ints.items()}
        return ops.DraftBeam(
            num_seqs=1,
            topk=TOPK,
            depth=DEPTH,
            scores=ops.Array(self.ctx, [1, CANDIDATES], "float32"),
            token_scores=ops.Array(self.ctx, [1, TOPK], "float32"),
            ancestor_masks=ops.Array(self.ctx, [1, TOPK], "uint64"),
            **arrays,
        )

    def make_worst_tree(self) -> None:
        """The last nodes are the accepted path; all others are rejected children of the root."""
        path = [0, *range(NODES - DEPTH, NODES)]
        tokens, drawn = np.arange(NODES) + 100, np.full(NODES, 9)
        parents, depths = np.zeros(NODES, int), np.ones(NODES, int)
        parents[0], depths[0] = -1, 0
        for above, node in itertools.pairwise(path):
            parents[node], depths[node] = above, depths[above] + 1
            drawn[above] = tokens[node]
        masks = [1 << node for node in range(NODES)]
        for node in range(1, NODES):
            masks[node] |= masks[parents[node]]
        self.worst = ops.TokenTrees(
            tokens=put(self.ctx, tokens[None]),
            parents=put(self.ctx, parents[None]),
            depths=put(self.ctx, depths[None]),
            masks=raw(self.ctx, np.array([masks], np.uint64)),
            **self.rows,
        )
        self.drawn = put(self.ctx, drawn)
        self.worst_path = put(self.ctx, [path])

    def make_state(self) -> None:
        """Makes the state of slot 0 as if the last step had accepted the path of the worst tree."""
        self.lengths, self.after = put(self.ctx, [LENGTH]), put(self.ctx, [LENGTH + PATH])
        self.accepted_counts = put(self.ctx, [PATH])
        self.accepted = ops.Accepted(
            ids=put(self.ctx, np.zeros([1, PATH])),
            paths=self.worst_path,
            counts=self.accepted_counts,
        )
        self.state = ops.SlotState(
            lengths=self.lengths,
            next_tokens=put(self.ctx, [7]),
            counts=put(self.ctx, np.zeros([1, VOCAB])),
            vocab_size=VOCAB,
            history=put(self.ctx, np.zeros([1, HISTORY])),
            accepted=self.accepted,
        )

    def make_sampling(self) -> None:
        ctx = self.ctx
        self.logits = normal(ctx, [NODES, VOCAB], "float32")
        self.token_slots = put(ctx, np.zeros(NODES))
        self.token_positions = put(ctx, LENGTH + np.arange(NODES))
        self.tokens = ops.Array(ctx, [NODES], "int32")
        slot = np.zeros(1, ops.slot_sampling_dtype)
        slot["top_p"], slot["repetition_penalty"], slot["num_logprobs"] = 1, 1, -1
        self.greedy = raw(ctx, slot)
        slot["temperature"], slot["top_p"], slot["top_k"] = 0.8, 0.9, 50
        self.drawing = raw(ctx, slot)
        stop = np.zeros(1, ops.slot_stop_dtype)
        stop["num_stop_ids"], stop["stop_ids"], stop["max_tokens"] = 2, 1, 1 << 30
        self.stops = raw(ctx, stop)
        self.token_logprobs = raw(ctx, np.zeros(NODES, ops.token_logprobs_dtype))
        self.sink = ops.ResultSink(
            results=raw(ctx, np.zeros([8, 1], ops.slot_result_dtype), pinned=True),
            ring_size=8,
            max_seqs=1,
            step_counter=raw(ctx, np.zeros(1, np.uint64)),
            done=raw(ctx, np.zeros(1, np.uint64), pinned=True),
        )

    def make_fill(self) -> None:
        """Makes a text of random tokens, and the arrays of a filled draft."""
        self.long_text = ops.SlotState(
            lengths=put(self.ctx, [FILL_LENGTH]),
            next_tokens=put(self.ctx, [7]),
            counts=put(self.ctx, np.zeros([1, 1])),
            vocab_size=1,
            history=put(self.ctx, np.random.default_rng(1).integers(VOCAB, size=[1, FILL_LENGTH])),
            accepted=self.accepted,
        )
        self.fill_paths = raw(self.ctx, np.zeros(1, ops.fill_path_dtype))
        self.rates = {
            name: ops.Array(self.ctx, [MAX_NGRAM + 1], "float32") for name in ("hits", "trials")
        }
        self.filled = ops.Draft(
            tokens=ops.Array(self.ctx, [1, NODES - 1], "int32"),
            parents=ops.Array(self.ctx, [1, NODES - 1], "int32"),
            scores=ops.Array(self.ctx, [1, NODES - 1], "float32"),
        )

    def make_draft_rows(self) -> None:
        names = ("ids", "positions", "token_seqs", "hidden_rows")
        arrays = {name: put(self.ctx, np.zeros([1, PATH])) for name in names}
        self.draft_lengths, self.last_rows = put(self.ctx, [LENGTH]), put(self.ctx, [0])
        self.draft_rows = arrays | {"seq_token_begin": put(self.ctx, [0, PATH])}

    def begin_draft(self) -> None:
        ops.begin_draft(
            self.ctx,
            seq_slots=self.slots,
            num_seqs=1,
            lengths=self.lengths,
            accepted=self.accepted,
            shifted=True,
            draft_lengths=self.draft_lengths,
            last_rows=self.last_rows,
            **self.draft_rows,
        )

    def topk(self, rows: int) -> None:
        ops.topk_logprobs(
            self.ctx,
            logits=self.draft_logits[rows],
            topk=TOPK,
            id_map=self.id_map,
            tokens=self.topk_tokens,
            logprobs=self.topk_logprobs,
        )

    def expand(self, level: int) -> None:
        ops.tree_expand(
            self.ctx,
            beam=self.beam,
            level=level,
            topk_tokens=self.topk_tokens,
            topk_logprobs=self.topk_logprobs,
            seq_slots=self.slots,
            accepted_counts=self.accepted_counts,
            draft_lengths=self.draft_lengths,
        )

    def grow(self) -> None:
        """Expands each level once: `select` needs all candidates."""
        self.topk(1)
        self.expand(0)
        self.topk(TOPK)
        for level in range(1, DEPTH):
            self.expand(level)

    def select(self) -> None:
        ops.draft_select(self.ctx, beam=self.beam, draft=self.draft)

    def observe(self) -> None:
        ops.fill_observe(
            self.ctx,
            seq_slots=self.slots,
            state=self.long_text,
            paths=self.fill_paths,
            **self.rates,
        )

    def fill(self) -> None:
        ops.draft_fill(
            self.ctx,
            seq_slots=self.slots,
            state=self.long_text,
            draft=self.draft,
            max_depth=FILL_DEPTH,
            min_ngram=1,
            max_ngram=16,
            paths=self.fill_paths,
            filled=self.filled,
            **self.rates,
        )

    def build(self) -> None:
        ops.tree_build(
            self.ctx,
            draft=self.draft,
            trees=self.built,
            seq_slots=self.slots,
            slots=self.state,
        )

    def sample(self, sampling: Any) -> None:
        ops.sample(
            self.ctx,
            logits=self.logits,
            token_slots=self.token_slots,
            token_positions=self.token_positions,
            sampling=sampling,
            tokens=self.tokens,
        )

    def accept(self) -> None:
        ops.accept_tree(
            self.ctx,
            trees=self.worst,
            drawn=self.drawn,
            logprobs=self.token_logprobs,
            seq_slots=self.slots,
            sampling=self.greedy,
            state=self.state,
            stops=self.stops,
            sink=self.sink,
        )

    def keep(self) -> None:
        ops.keep_accepted(
            self.ctx,
            pool=self.pool,
            num_heads=KV_HEADS,
            width=HEAD_DIM,
            page_table=self.page_table,
            num_nodes=NODES,
            seq_slots=self.slots,
            lengths=self.after,
            accepted=self.accepted,
            hidden=self.hidden,
            accepted_hidden=self.accepted_hidden,
        )

    def gather_last(self) -> None:
        ops.gather_rows(self.ctx, self.last_hidden, self.hidden, self.last_rows)


def ops_of(step: Step) -> list[tuple[str, int, Callable[[], None]]]:
    """Returns (name, launches per step, op) in the order of a step. 0 launches: not in a step."""
    return [
        ("begin_draft", 1, step.begin_draft),
        ("gather last hidden, 1 row", 1, step.gather_last),
        ("topk_logprobs, 1 row", 1, lambda: step.topk(1)),
        ("tree_expand, level 0", 1, lambda: step.expand(0)),
        (f"topk_logprobs, {TOPK} rows", DEPTH - 1, lambda: step.topk(TOPK)),
        (f"tree_expand, {TOPK} rows", DEPTH - 1, lambda: step.expand(1)),
        ("draft_select", 1, step.select),
        ("fill_observe", 0, step.observe),
        (f"draft_fill, {FILL_LENGTH} tokens of text", 0, step.fill),
        ("tree_build", 1, step.build),
        (f"sample, {NODES} rows, greedy", 1, lambda: step.sample(step.greedy)),
        (f"sample, {NODES} rows, T, top-k, top-p", 0, lambda: step.sample(step.drawing)),
        ("accept_tree", 1, step.accept),
        (f"keep_accepted, {LAYERS} layers", 1, step.keep),
    ]


def time_of(ctx: Any, device: str, body: Callable[[], None]) -> float:
    """Microseconds of one launch."""
    if device == "cuda":

        def bodies() -> None:
            for _ in range(LAUNCHES):
                body()

        return microseconds(ctx, bodies, LAUNCHES)
    body()
    begin = time.perf_counter()
    body()
    return (time.perf_counter() - begin) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16", choices=["float16", "bfloat16"])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args()
    ctx = ops.Context(args.device)
    step = Step(ctx, args.dtype)
    step.grow()

    def report(name: str, count: int, us: float) -> None:
        if args.json:
            line = json.dumps({"name": name, "per_step": count, "us": us, "step_us": count * us})
        else:
            line = f"{name:36} {us:9.2f} µs x {count} = {count * us:9.2f} µs"
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    total = 0.0
    for name, count, body in ops_of(step):
        if name == "draft_select":
            step.grow()  # timing a single level has advanced that level alone
        us = time_of(ctx, args.device, body)
        report(name, count, us)
        total += count * us
    if args.json:
        end = json.dumps({"name": "step", "us": total, "budget_us": BUDGET_US})
    else:
        end = f"sum of a step {total:.1f} µs, {total / BUDGET_US:.2f} of the budget {BUDGET_US} µs"
    sys.stdout.write(end + "\n")


if __name__ == "__main__":
    main()
