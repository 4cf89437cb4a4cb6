"""Runs the first steps of an engine on a hidden sequence, before the first request.

First steps are slow: weights are touched, kernels are loaded, graphs are captured. If they run
here, no request has to wait for them. Their times also tell the chooser of shapes what each draft
costs on this machine. Plain steps and the smallest draft are timed first, then every draft that
could pay. If no draft can pay, no draft is tried, and the draft does not process prompts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cpmcu.engine.shapes import PLAIN, Shape

if TYPE_CHECKING:
    from cpmcu import C
    from cpmcu.engine.chooser import ShapeChooser

PROMPT = [0, 0]  # ids that every vocabulary has
COLD, WARM = 3, 3  # number of plain steps before and after the drafted ones
DRAFTED = 3  # number of steps after which the chooser trusts a time
FIXED = 2  # number of steps if the engine has only one shape
LIMIT = 0.05  # maximum time of the steps above, in seconds
DRAFTS_LIMIT = 0.25  # maximum time of the steps of larger drafts, in seconds


def warm_up(
    engine: C.Engine, page_size: int, chooser: ShapeChooser | None, sampling: C.SamplingConfig
) -> None:
    """Runs plain steps and steps of the drafts, and tells the chooser their times.

    The slot and its pages are given back. Nothing runs if a sequence has too little room.
    """
    steps: list[Shape | None] = [None] * FIXED
    if chooser is not None:
        steps = [*[PLAIN] * COLD, *chooser.shapes[1:2] * DRAFTED, *[PLAIN] * WARM]
    room = min(engine.max_model_len, engine.num_pages * page_size)
    needed = _room(engine, steps)
    if needed > room or len(PROMPT) > engine.chunk_length:
        return
    slot = engine.add_sequence(sampling, PROMPT)
    try:
        if not engine.reserve(slot, needed):
            return
        engine.prefill([(slot, PROMPT, True)])
        engine.collect()
        end = time.perf_counter() + LIMIT
        complete = _run(engine, slot, steps, chooser, end)
        if chooser is None or not complete:
            return
        end = time.perf_counter() + DRAFTS_LIMIT
        for shape in chooser.shapes[2:]:
            steps += [shape] * DRAFTED
            needed = _room(engine, steps)
            if needed > room or not engine.reserve(slot, needed):
                return
            if chooser.may_pay(1, shape) and not _run(
                engine, slot, [shape] * DRAFTED, chooser, end
            ):
                return
    finally:
        engine.release(slot)
        while engine.in_flight():
            engine.collect()


def _room(engine: C.Engine, steps: Sequence[Shape | None]) -> int:
    return len(PROMPT) + len(steps) * int(engine.tokens_per_step)


def _run(
    engine: C.Engine,
    slot: int,
    steps: Sequence[Shape | None],
    chooser: ShapeChooser | None,
    end: float,
) -> bool:
    """Runs steps as the engine thread does: up to `launch_ahead` are in flight.

    Returns whether all steps ran.
    """
    launched: list[float] = []
    collected = 0.0
    for i, shape in enumerate(steps):
        while len(launched) < min(i + engine.launch_ahead, len(steps)):
            launched.append(time.perf_counter())
            engine.decode([slot], steps[len(launched) - 1])
        outputs = engine.collect()
        before, collected = collected, time.perf_counter()
        if shape is not None and chooser is not None:
            chooser.expect(shape, 1, collected - max(launched[i], before))
        tokens = [token for output in outputs for token in output.tokens]
        if collected > end or not tokens or min(tokens) < 0:  # negative: the logits are not finite
            return False
    return True
