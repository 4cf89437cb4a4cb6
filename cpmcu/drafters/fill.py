"""Fill: the plan of a drafter whose drafts a path from the context joins.

It is no kind of draft. --spec-fill adds it to the drafter of any kind.
"""

from __future__ import annotations

from dataclasses import replace

from cpmcu.config import MODEL_STEPS, SpeculativeConfig
from cpmcu.drafters.registry import DraftPlan


def fill_plan(
    method: str, plan: DraftPlan, speculation: SpeculativeConfig
) -> tuple[str, DraftPlan]:
    """(Name of the C++ drafter, plan) for the drafter `method` with `plan`, and the context."""
    shortest, longest = speculation.ngram_range
    steps = speculation.num_model_steps or MODEL_STEPS
    part = replace(plan, depth=min(steps, plan.longest or steps))
    options = {"min_ngram": shortest, "max_ngram": longest}
    return "fill", replace(plan, drafter=None, parts=((method, part),), options=options)
