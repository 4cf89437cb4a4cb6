"""Times gated_delta_net on the GPU: one line per shape.

Every launch works on another slot's state, so the L2 cache is cold, as between the layers of a
model. A CUDA graph has as many launches as needed for that.

| case | what a launch does |
|---|---|
| token | one token of a prompt: S is read, updated and written |
| chain, tree | nodes of a decode step. Accepted tokens of the step before are added to S first; \
without them S is read only |
| step | a plain decode step of several sequences: one token of each, one accepted token |
| at once | the same, but each token is added to S at once, so no accepted token is left |
| prompt | a chunk of 2,048 tokens of one sequence |

A plain decode step of one sequence is a chain of one node with one accepted token.

The share of the roofline is the bytes of S over the read bandwidth of this run; for prompts the
time of a token is printed instead.

    python scripts/bench/bench_delta_net.py [--heads 32,48] [--sequences 8,32,64] [--json]
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
from bench_attention import microseconds, normal, open_device, put, raw

from cpmcu import C

ops = C.ops
DIM = 128
KEY_HEADS = 16
MOST_NODES = 64
SLOTS = 64  # states of so many do not fit into the L2 cache; also the largest number of sequences
CHUNK = 2048


class Layer:
    """A layer's weights, and the states of the slots."""

    def __init__(self, ctx: Any, heads: int, dtype: str) -> None:
        self.ctx, self.heads, self.dtype = ctx, heads, dtype
        self.state_bytes = heads * DIM * DIM * 4
        channels = (2 * KEY_HEADS + heads) * DIM
        slots, width = SLOTS, 3 * DIM
        self.row = channels + heads * DIM
        self.shared = {
            "num_key_heads": KEY_HEADS, "num_value_heads": heads, "key_dim": DIM,
            "value_dim": DIM, "conv_weight": normal(ctx, [channels, 4], dtype),
            "a_log": raw(ctx, np.zeros(heads, np.float32)),
            "dt_bias": raw(ctx, np.zeros(heads, np.float32)),
            "norm_weight": normal(ctx, [DIM], dtype),
            "state": raw(ctx, np.zeros((slots, heads, DIM // 8, DIM * 8), np.float32)),
            "window": normal(ctx, [slots, heads, 3, width], dtype),
            "pending": normal(ctx, [slots, heads, MOST_NODES, width + 8], dtype),
            "folded": put(ctx, np.zeros((slots, heads))),
        }  # fmt: skip

    def launch_of(
        self,
        slots: list[int],
        parents: list[int] | None,
        count: int,
        length: int,
        accepted: int,
        accepts_all: bool = False,
    ) -> Any:
        """A function that runs `count` tokens of each slot; the slots have `length` tokens.

        `parents`: as nodes of a decode step. `accepted`: tokens of the step before.
        """
        ctx, seqs = self.ctx, len(slots)
        total = seqs * count
        tokens = ops.StepTokens(
            num_tokens=total, num_seqs=seqs, max_seq_tokens=count, max_kv=CHUNK,
            positions=put(ctx, [*range(count)] * seqs),
            token_seqs=put(ctx, np.repeat(range(seqs), count)),
            seq_slots=put(ctx, slots), seq_token_begin=put(ctx, range(0, total + 1, count)),
            slot_lengths=put(ctx, [length] * SLOTS), page_table=put(ctx, [[0]] * SLOTS),
            token_parents=None if parents is None else put(ctx, parents * seqs),
        )  # fmt: skip
        qkvz = normal(ctx, [total, self.row], self.dtype)
        ba = normal(ctx, [total, 2 * self.heads], self.dtype)
        out = ops.Array(ctx, [total, self.heads * DIM], self.dtype)
        paths = put(ctx, [[*range(accepted)] or [-1]] * SLOTS)
        counts = put(ctx, [accepted] * SLOTS)

        def run() -> None:
            ops.gated_delta_net(
                ctx, out=out, qkvz=qkvz, ba=ba, accepts_all=accepts_all,
                commits=parents is None, tokens=tokens,
                accepted=ops.Accepted(ids=paths, paths=paths, counts=counts), **self.shared,
            )  # fmt: skip

        return run

    def time(
        self, parents: list[int] | None, count: int, accepted: int, seqs: int = 1,
        at_once: bool = False,
    ) -> float:  # fmt: skip
        """Microseconds of a launch of `seqs` sequences."""
        ends = range(seqs, 2 if count >= CHUNK else SLOTS + 1, seqs)
        slots = [[*range(end - seqs, end)] for end in ends]
        launches = [
            self.launch_of(each, parents, count, accepted, accepted, at_once) for each in slots
        ]
        has_resets = accepted > 0 and not at_once
        # A step adds the accepted tokens to S once. A token of a prompt that ends at length 0 makes
        # them unknown to S again; its time is subtracted. With `at_once` only the first launch of
        # all finds an accepted token.
        resets = [self.launch_of(each, None, 1, -1, 0) for each in slots] if has_resets else []

        def microseconds_of(bodies: list[Any]) -> float:
            def body() -> None:
                for launch in bodies:
                    launch()

            return microseconds(self.ctx, body, len(slots))

        alone = microseconds_of(resets) if has_resets else 0
        return microseconds_of(launches + resets) - alone


def tree(count: int) -> list[int]:
    """Parents of a tree with two branches at each node."""
    return [(node + 1) // 2 - 1 for node in range(count)]


# Case, parents, tokens, accepted tokens.
CASES: list[tuple[str, list[int] | None, int, int]] = [
    ("token", None, 1, 0),
    ("chain", [-1], 1, 0),
    ("chain", [-1], 1, 1),
    ("chain", [node - 1 for node in range(4)], 4, 0),
    ("chain", [node - 1 for node in range(4)], 4, 4),
    ("tree", tree(16), 16, 0),
    ("tree", tree(16), 16, 4),
    ("tree", tree(32), 32, 4),
    ("tree", tree(64), 64, 0),
    ("prompt", None, CHUNK, 0),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--heads", default="32,48", help="value heads of a layer")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--sequences", default="8,32,64", help="of plain steps; at most 64")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    args = parser.parse_args()
    ctx, bandwidth = open_device(args.dtype)
    for heads in map(int, args.heads.split(",")):
        layer = Layer(ctx, heads, args.dtype)
        counts = [*map(int, args.sequences.split(","))]
        steps = [(case, [-1], 1, 1, seqs) for seqs in counts for case in ("step", "at once")]
        for case, parents, count, accepted, seqs in [*((*each, 1) for each in CASES), *steps]:
            time = layer.time(parents, count, accepted, seqs, case == "at once")
            moved = seqs * layer.state_bytes * (2 if parents is None or accepted else 1)
            floor = moved / bandwidth / 1e3
            line: dict[str, Any] = {
                "heads": heads, "case": case, "sequences": seqs, "tokens": count,
                "accepted": accepted, "us": time,
            }  # fmt: skip
            if case == "prompt":
                line["us_a_token"] = time / count
            else:
                line["roofline"] = floor / time
            if args.json:
                print(json.dumps(line))
                continue
            share = f"{time / count:.3f} us a token" if case == "prompt" else f"{floor / time:.0%}"
            tokens = f"{seqs:3} x {count:4} tokens, {accepted} accepted"
            print(f"{heads} heads  {case:7} {tokens}  {time:9.2f} us  {share}")


if __name__ == "__main__":
    main()
