"""Times windows of decode steps of one sequence and computes the floor of a plain step."""

from __future__ import annotations

import dataclasses
import re
import statistics
import time
from typing import TYPE_CHECKING, Any

from cpmcu.benchmarks.progress import BenchProgress

if TYPE_CHECKING:
    from cpmcu import C

WINDOWS = 5
WARM_UP = 8  # steps before the timed ones
_EXPERTS = re.compile(r"model\.layers\.(?P<layer>\d+)\.mlp\.experts\.")


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """Plain decoding at one context length. The suffix of a field is its unit."""

    context: int
    prefill_s: float
    prefill_tokens_per_s: float
    step_ms: float
    step_spread_ms: float  # slowest minus fastest window of timed steps
    floor_ms: float
    ratio: float  # measured time of a step / its floor


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """Times of one prefill and of the windows of decode steps after it."""

    prefill_s: float
    windows_ms: list[float]  # mean time of a step in each window
    middle: int  # cached tokens in the middle of the timed steps

    @property
    def step_ms(self) -> float:
        """Milliseconds of a step in the median window."""
        return statistics.median(self.windows_ms)

    @property
    def spread_ms(self) -> float:
        """Milliseconds of a step in the slowest window minus those in the fastest."""
        return max(self.windows_ms) - min(self.windows_ms)


def step_bytes(engine: C.Engine, spec: C.ModelSpec, context: int) -> int:
    """Bytes that a decode step of one token must move with `context` cached tokens.

    The step reads weights, keys and values. Sparse attention reads only the chosen blocks, and the
    compressed keys. The states of gated delta nets are read and written.
    """
    from cpmcu import C
    from cpmcu.models import sparse

    rows = engine.memory_plan()  # the rows of one GPU; several GPUs read at the same time
    weights = sum(
        row["bytes"] * _active_share(row["name"], spec) for row in rows if row["group"] == "weights"
    )
    if not spec.tie_word_embeddings:
        weights -= next(row["bytes"] for row in rows if row["name"] == "model.embed_tokens")
    num_planes = 2 if spec.fp8_kv_cache else 1  # KV entries; with FP8 also scales
    entries = 0  # bytes of KV entries and their scales
    for group, window in enumerate(engine.pages.windows):
        name = f"pages.window_{window}" if window else "pages"
        planes = [row["bytes"] for row in rows if row["group"] == "kv" and row["name"] == name]
        page_bytes = sum(planes[:num_planes]) // engine.pages.num_pages(group)
        entries += min(window or context, context) * page_bytes // C.PAGE_SIZE
    blocks: list[Any] = [block for layer in spec.layers for block in layer]
    states = sum(
        4 * params["num_value_heads"] * params["key_head_dim"] * params["value_head_dim"]
        for kind, params in blocks
        if kind == "gated_delta_net"
    )
    saved = sum(
        _saved_bytes(params, spec, context) for kind, params in blocks if kind == sparse.KIND
    )
    return int(weights + entries - saved + 2 * states)


def _saved_bytes(params: dict[str, Any], spec: C.ModelSpec, context: int) -> int:
    """Bytes of KV entries that a sparse layer skips at position `context`, less its extra reads.

    The layer reads four fine compressed keys and a coarse one of each page but the last two.
    """
    from cpmcu import C

    heads = params.get("num_key_value_heads", spec.num_key_value_heads)
    dim = params.get("head_dim", spec.head_dim)
    compressed = heads * dim * (4 if spec.dtype == "float32" else 2)  # bytes of a compressed key
    row = heads * (dim + 4) if spec.fp8_kv_cache else compressed
    page, own = C.PAGE_SIZE, context // C.PAGE_SIZE
    window_begin = own + 1 - params["window_size"] // page
    if context < params["dense_len"] or window_begin <= 0:
        return 0
    best = params["topk"] - params["init_blocks"]
    # Blocks that are neither initial nor chosen.
    skipped = window_begin - min(params["init_blocks"], window_begin) - best
    if skipped <= 0:
        return 0
    extra = 5 * (own - 1) * compressed if best > 0 else 0
    return int(2 * page * skipped * row - extra)


def _active_share(buffer: str, spec: C.ModelSpec) -> float:
    """The part of a weight buffer that one token reads: its own experts among all."""
    found = _EXPERTS.match(buffer)
    if found is None:
        return 1.0
    params: dict[str, Any] = dict(spec.layers[int(found["layer"])])["moe"]
    return float(params["top_k"] / params["num_experts"])


def random_prompt(vocab_size: int, context: int) -> list[int]:
    """`context` random token ids; the seed is `context`."""
    import numpy as np  # needs numpy, which --help does without

    ids: list[int] = np.random.default_rng(context).integers(3, vocab_size, context).tolist()
    return ids


def fitting_steps(engine: C.Engine, context: int, steps: int, tokens_per_step: int) -> int:
    """Steps per window, at most `steps`, that fit into the engine after `context` tokens.

    Raises ValueError if no step fits.
    """
    from cpmcu import C

    room = min(engine.max_model_len, engine.num_free_pages * C.PAGE_SIZE)
    fitting = ((room - context - 1) // tokens_per_step - WARM_UP) // WINDOWS
    if fitting < 1:
        most = room - 1 - (WARM_UP + WINDOWS) * tokens_per_step
        raise ValueError(
            f"the context has {context} tokens, expected at most {max(most, 0)}: the "
            f"engine holds {room}, and {WARM_UP + WINDOWS} steps of up to {tokens_per_step} follow"
        )
    return min(steps, fitting)


def measure(
    engine: C.Engine,
    vocab_size: int,
    context: int,
    steps: int,
    progress: BenchProgress | None = None,
) -> Timing:
    """Prefills `context` tokens, then times `WINDOWS` windows of decode steps.

    A window has `steps` steps, or fewer if the context is full. Raises InterruptedError after a
    Ctrl-C that `progress` has heard of.
    """
    from cpmcu import C

    ids = random_prompt(vocab_size, context)
    steps = fitting_steps(engine, context, steps, engine.tokens_per_step)
    total = context + 1 + (WARM_UP + WINDOWS * steps) * engine.tokens_per_step
    sampling = C.SamplingConfig(max_tokens=total)
    slot = engine.add_sequence(sampling, ids)
    engine.reserve(slot, total)

    progress = progress or BenchProgress()

    def prefill() -> float:
        begin = time.perf_counter()
        for at in range(0, context, engine.chunk_length):
            part = ids[at : at + engine.chunk_length]
            engine.prefill([(slot, part, at + len(part) == context)])
            engine.collect()
            progress.read(at + len(part), context)
        return time.perf_counter() - begin

    def collect() -> int:
        return sum(len(output.tokens) for output in engine.collect())

    def decode(count: int) -> tuple[float, int]:
        progress.check()
        begin, tokens = time.perf_counter(), 0
        for _ in range(count):
            engine.decode([slot])
            if engine.in_flight() > engine.launch_ahead:
                tokens += collect()
        while engine.in_flight():
            tokens += collect()
        return time.perf_counter() - begin, tokens

    with progress.prefill(context):
        prefill()  # chooses algorithms and loads kernels, so it is not timed
    progress.note(f"context {context}: timing prefill and {WINDOWS} windows of {steps} steps")
    engine.release(slot)
    slot = engine.add_sequence(sampling, ids)
    engine.reserve(slot, total)
    prefill_s = prefill()
    _, warm_up = decode(WARM_UP)
    windows = [decode(steps) for _ in range(WINDOWS)]
    engine.release(slot)
    return Timing(
        prefill_s=prefill_s,
        windows_ms=[seconds / steps * 1e3 for seconds, _ in windows],
        middle=context + warm_up + sum(tokens for _, tokens in windows) // 2,
    )


def plain_row(
    engine: C.Engine,
    spec: C.ModelSpec,
    context: int,
    steps: int,
    rate: float,
    progress: BenchProgress | None = None,
) -> Row:
    """Measures plain decoding and its floor. `rate`: read bandwidth in bytes/s."""
    timing = measure(engine, spec.vocab_size, context, steps, progress)
    floor_ms = step_bytes(engine, spec, timing.middle) / rate * 1e3
    return Row(
        context=context,
        prefill_s=timing.prefill_s,
        prefill_tokens_per_s=context / timing.prefill_s,
        step_ms=timing.step_ms,
        step_spread_ms=timing.spread_ms,
        floor_ms=floor_ms,
        ratio=timing.step_ms / floor_ms,
    )
