"""Runs the first steps of an engine on a hidden sequence, before the first request.

First steps are slow: weights are touched, kernels are loaded, graphs are captured. So no request
has to wait for them. Their times also tell the chooser of shapes whether any draft can pay on this
machine. If no draft can pay, no draft is tried, and the draft does not process prompts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cpmcu.engine.shapes import PLAIN, Shape

if TYPE_CHECKING:
    from cpmcu import C

PROMPT = [0, 0]  # tokens that every vocabulary has
COLD, WARM = 3, 3  # plain steps before and after the drafted ones
DRAFTED = 3  # as many as make a time trusted
FIXED = 2  # steps of an engine that has no choice of shapes
LIMIT = 0.05  # seconds after which no further step is begun


def warm_up(
    engine: C.Engine, page_size: int, shapes: Sequence[Shape], sampling: C.SamplingConfig
) -> list[tuple[Shape, float]]:
    """Runs plain steps and some of the smallest draft; returns shape and seconds of each.

    The result is empty if there is no choice of shapes. The slot and its pages are given back.
    Nothing runs if a sequence has too little room.
    """
    steps: list[Shape | None] = [None] * FIXED
    if shapes:
        steps = [*[PLAIN] * COLD, *list(shapes[1:2]) * DRAFTED, *[PLAIN] * WARM]
    most = len(PROMPT) + len(steps) * engine.tokens_per_step
    room = min(engine.max_model_len, engine.num_pages * page_size)
    if most > room or len(PROMPT) > engine.chunk_length:
        return []
    slot = engine.add_sequence(sampling, PROMPT)
    try:
        return _run(engine, slot, steps) if engine.reserve(slot, most) else []
    finally:
        engine.release(slot)
        while engine.in_flight():
            engine.collect()


def _run(engine: C.Engine, slot: int, steps: list[Shape | None]) -> list[tuple[Shape, float]]:
    """As the engine thread does: up to `launch_ahead` steps are in flight."""
    end = time.perf_counter() + LIMIT
    engine.prefill([(slot, PROMPT, True)])
    engine.collect()
    launched: list[float] = []
    times: list[tuple[Shape, float]] = []
    collected = 0.0
    for i, shape in enumerate(steps):
        while len(launched) < min(i + engine.launch_ahead, len(steps)):
            launched.append(time.perf_counter())
            engine.decode([slot], steps[len(launched) - 1])
        outputs = engine.collect()
        before, collected = collected, time.perf_counter()
        if shape is not None:
            times.append((shape, collected - max(launched[i], before)))
        tokens = [token for output in outputs for token in output.tokens]
        if collected > end or not tokens or min(tokens) < 0:  # negative: the logits are not finite
            break
    return times
