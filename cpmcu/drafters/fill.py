"""Fill: a path from the context (prompt and output) joins the drafts of any drafter."""

from __future__ import annotations

from dataclasses import replace

from cpmcu.config import SpeculativeConfig
from cpmcu.drafters.networks import default_shape
from cpmcu.drafters.options import options_of
from cpmcu.drafters.options.fill import MODEL_STEPS, FillOptions
from cpmcu.drafters.options.trees import TreeOptions, TreeShape, num_candidates
from cpmcu.drafters.registry import DraftFiles, DraftPlan, register_addition


@register_addition
class Fill:
    """The drafter "fill": the drafter that it fills is its only part."""

    def is_given(self, speculation: SpeculativeConfig) -> bool:
        return speculation.of(FillOptions).fill is not None

    def extend(
        self,
        method: str,
        plan: DraftPlan,
        files: DraftFiles | None,
        speculation: SpeculativeConfig,
    ) -> tuple[str, DraftPlan]:
        given = speculation.of(FillOptions)
        whole = given.shape(default_shape(files, speculation), chain=plan.chain)
        steps = given.num_model_steps or MODEL_STEPS
        if issubclass(options_of(method), TreeOptions):
            part = _limited(plan, whole, steps)
        else:  # shapes of another kind; the C++ drafter makes them smaller
            part = plan
            assert part.shape is not None
            depth = max(whole.depth, part.shape.depth)
            size = max(whole.tree_size, part.shape.tree_size)
            whole = replace(whole, depth=depth, tree_size=size)
        shortest, longest = given.ngram_range
        return "fill", DraftPlan(
            shape=whole,
            chain=plan.chain,
            options={"min_ngram": shortest, "max_ngram": longest},
            parts=((method, part),),
        )


def _limited(plan: DraftPlan, whole: TreeShape, steps: int) -> DraftPlan:
    """The plan of a part. Its paths have at most `steps` tokens. `whole`: shape of the draft."""
    depth = min(steps, plan.longest or steps, whole.depth)
    size = min(whole.tree_size, 1 + num_candidates(whole.topk, depth))
    topk = {"topk": whole.topk} if "topk" in plan.options else {}
    return replace(plan, shape=TreeShape(depth, whole.topk, size), options={**plan.options, **topk})
