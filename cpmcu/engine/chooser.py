"""Chooses the shape of each speculative step: the one with the most tokens a second, as measured.

A step may draft with the engine's whole shape, with a smaller shape, or not at all (a plain step).
The best shape depends on the text, the draft, the machine and the number of sequences. So the
chooser times steps, counts tokens and tries shapes, small ones first. A *budget*, counted in plain
steps, pays for the time that trials lose. It starts with a few plain steps, and earns a small share
of all time and of the time that drafting saves. A maximum limits it. In the first 100 tokens a
useless draft costs START_BUDGET + 100 TIME_SHARE plain steps, plus the time by which trials exceed
their prediction.

The choice changes no token: every shape emits the tokens of plain decoding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from cpmcu.engine.emitted_tokens import EmittedTokens
from cpmcu.engine.shapes import PLAIN, Shape
from cpmcu.engine.step_times import StepTimes

START_BUDGET, MOST_BUDGET = 2.8, 3.0  # the budget at the start and its maximum, in plain steps
TIME_SHARE = 0.007  # share of all time that is added to the budget
GAIN_SHARE = 0.5  # share of the time saved by drafting that is added to the budget
TRIAL = 3  # steps of a trial; its first steps, right after plain ones, accept fewer tokens
PAUSE = 2  # steps that pass after a trial until its results are known
# A shape is tried if its predicted tokens a second are at least MARGIN times those of the best.
MARGIN = 1.05
REVIEW = 4  # drafted steps between two plans, since making a plan takes as long as some kernels
PLAIN_REVIEW = 12  # plain steps between two plans: they are the shortest steps
RETRIED = 500  # steps after which a shape is tried again, even if no gain is expected
# Loss against plain decoding, in plain steps, after which most samples are dropped. If drafting
# adds more than one plain step to a step, the limit is multiplied by the added plain steps.
LOST_STEPS = 3.0
KEPT = 0.5  # after that loss, all earlier samples together weigh as much as this number of samples
NEW_TEXT = 3  # all samples of older texts together weigh as much as this number of samples
HOPELESS = 0.9  # a shape with a smaller share of plain decoding's tokens a second is not tried
_LONGEST = 10.0  # maximum time of a step that counts, in plain steps: the rest has other causes


@dataclasses.dataclass(slots=True)
class _Plan:
    """The shapes of the next steps."""

    num_seqs: int
    plain: float  # time of a plain step, in seconds
    best: Shape
    rate: float  # tokens a second that are expected of `best`
    trial: Shape | None = None  # a shape to try before `best`
    trial_steps: int = 0
    left: int = 0  # number of steps until the next plan


class ShapeChooser:
    """Chooses from `shapes`, which include the plain step.

    Used by one thread. Steps may be chosen before those in flight are observed.
    """

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self.shapes = list(shapes)
        self._times = StepTimes()
        self._tokens = EmittedTokens()
        self._budget = START_BUDGET
        self._plan: _Plan | None = None
        self._pause = 0
        self._gained = 0.0  # plain steps gained by drafting since plain steps were last the best
        self._lost = 0.0  # plain steps lost by drafts that were thought to be the best
        self._losing: list[tuple[Shape, Sequence[int]]] = []  # the steps that lost this time

    def expect(self, shape: Shape, num_seqs: int, seconds: float) -> None:
        """Records the time of a warm-up step.

        Its tokens belong to no request and are not counted.
        """
        self._times.add(shape, num_seqs, seconds)

    def may_pay(self, num_seqs: int, shape: Shape | None = None) -> bool:
        """Could the shape beat the plain step if every drafted token were accepted?

        `shape` None: could any shape? True until a draft has been timed.
        """
        plain = self._times.plain(num_seqs)
        if plain is None:
            return True
        shapes = self.shapes if shape is None else [shape]
        return any(
            (1 + shape[0]) * plain > HOPELESS * self._times.bounds(shape, num_seqs)[0]
            for shape in shapes
            if shape != PLAIN
        )

    def choose(self, num_seqs: int) -> Shape:
        """The shape of the next step, which has `num_seqs` sequences."""
        plan = self._plan
        if plan is None or plan.left <= 0 or plan.num_seqs != num_seqs:
            plan = self._plan = self._make_plan(num_seqs)
        if plan is None:
            return PLAIN
        if plan.trial is not None and plan.trial_steps > 0:
            plan.trial_steps -= 1
            self._pause = PAUSE
            return plan.trial
        plan.left -= 1
        self._pause -= 1
        return plan.best

    def observe(self, shape: Shape, num_seqs: int, seconds: float, emitted: Sequence[int]) -> None:
        """Records the time of a step. `emitted`: its tokens for each running sequence."""
        self._times.add(shape, num_seqs, seconds)
        if emitted:
            self._tokens.add(shape, emitted)
        plan = self._plan
        if plan is None or not emitted:
            return
        mean = sum(emitted) / len(emitted)
        if plan.num_seqs != num_seqs:  # the plan is for another number of sequences
            lost = seconds / (self._times.plain(num_seqs) or seconds) - mean
            self._budget -= max(0.0, min(lost, 2 * MOST_BUDGET))
            return
        earned = TIME_SHARE * min(seconds / plan.plain, _LONGEST)
        if shape != plan.best:
            loss = (seconds - mean / plan.rate) / plan.plain
            earned -= max(-MOST_BUDGET, min(loss, 2 * MOST_BUDGET))
            if plan.trial_steps == 0:
                plan.left = 0
        elif shape != PLAIN:
            cost = self._times.bounds(shape, num_seqs)[1] / plan.plain
            earned += GAIN_SHARE * max(0.0, mean - cost)
            if self._gives_up(shape, cost, emitted):
                plan.left = 0
        self._budget = min(self._budget + earned, MOST_BUDGET)

    def forget_text(self) -> None:
        """Gives earlier acceptance less weight, because a new sequence begins."""
        self._tokens.forget(NEW_TEXT)
        self._lost = 0.0
        if self._plan is not None:
            self._plan.left = 0

    def _gives_up(self, shape: Shape, cost: float, emitted: Sequence[int]) -> bool:
        """Has drafting with the best shapes lost so much time that the text must have changed?

        If so, forgets most samples. `cost`: time of the step, in plain steps.
        """
        gain = sum(emitted) / len(emitted) - cost
        self._gained += gain
        if self._lost == 0:
            self._losing = []
        self._losing.append((shape, emitted))
        self._lost = max(0.0, self._lost - gain)
        if self._lost > LOST_STEPS * max(1.0, cost - 1):
            self._tokens.forget(KEPT, kept=self._losing)
            # The budget pays only for the part of this loss that exceeds the gain of drafting so
            # far.
            self._budget -= min(self._lost, max(0.0, -self._gained))
            self._lost = 0.0
            return True
        return False

    def _make_plan(self, num_seqs: int) -> _Plan | None:
        """Returns a new plan; None until a plain step has been timed."""
        plain = self._times.plain(num_seqs)
        if plain is None or not self._times.knows_plain(num_seqs):
            return None
        bounds = {shape: self._times.bounds(shape, num_seqs) for shape in self.shapes}
        tokens = {shape: self._tokens.expected(shape) for shape in self.shapes}
        best = max(self.shapes, key=lambda shape: tokens[shape] / bounds[shape][1])
        plan = _Plan(num_seqs, plain, best, tokens[best] / bounds[best][1])
        plan.left = PLAIN_REVIEW if best == PLAIN else REVIEW
        if best == PLAIN:
            self._gained = 0.0
        if self._pause > 0:
            plan.left = self._pause
            return plan
        promised = plan.rate * MARGIN
        for shape in self.shapes:
            if shape == best:
                continue
            low, high = bounds[shape]
            loss = max(0.0, high - tokens[shape] / plan.rate) / plain
            hoped = self._tokens.hoped(shape) / low
            steps = self._trial_steps(shape, num_seqs)
            if hoped > promised:
                if loss * steps <= self._budget:
                    promised, plan.trial, plan.trial_steps = hoped, shape, steps
            elif (
                plan.trial is None
                and self._times.age(shape, num_seqs) > RETRIED
                and loss <= self._budget / 2
            ):
                plan.trial, plan.trial_steps = shape, 1
        return plan

    def _trial_steps(self, shape: Shape, num_seqs: int) -> int:
        trusted = shape != PLAIN and self._times.is_trusted(shape, num_seqs)
        return TRIAL if trusted else 1
