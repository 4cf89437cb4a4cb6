"""Options of fill: a path from the context joins the drafts of any drafter."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from cpmcu.drafters.options import DrafterOptions, register_options
from cpmcu.drafters.options.ngram import LookUpOptions
from cpmcu.drafters.options.trees import MAX_TREE_SIZE, TreeOptions, TreeShape
from cpmcu.options import option

FILLS = ("ngram",)
MODEL_STEPS = 4  # tokens that the filled drafter drafts itself
FILL_DEPTH = 9  # depth of the longest path, if the context fills drafts


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepsOptions(DrafterOptions):
    """Passes of the drafter in a step."""

    num_model_steps: int | None = option(
        None,
        f"with --spec-fill: tokens of a path that the drafter drafts (default: {MODEL_STEPS}); "
        "with --spec-method hierarchical alone: most passes of the draft model in a step",
        flags=("--spec-model-steps",),
        brief="",
        least=1,
    )


@register_options("fill", addition=True)
@dataclasses.dataclass(frozen=True, kw_only=True)
class FillOptions(LookUpOptions, StepsOptions, TreeOptions):
    """Options of fill."""

    longest_match: ClassVar[int] = 16

    fill: str | None = option(
        None,
        "ngram: a path from the prompt and output joins each draft, weighted by how often such "
        "paths were right; changes no text",
        flags=("--spec-fill",),
        choices=FILLS,
        keys={"mtp_strategy": {"default": None, "with_ngram": "ngram"}},
    )

    def check(self, method: str, kind: type[DrafterOptions]) -> None:
        steps, longest = self.num_model_steps, self.spec_num_iter
        if self.fill is not None:
            if method == self.fill:
                raise ValueError(
                    f"fill and method are both {self.fill!r}, expected the method of another draft"
                )
        elif not issubclass(kind, StepsOptions) and steps is not None and steps != longest:
            found = "not given: give fill, too" if longest is None else longest
            raise ValueError(
                f"num_model_steps is {steps} without a fill, but must equal spec_num_iter, which "
                f"is {found}"
            )
        if steps is not None and longest is not None and steps > longest:
            raise ValueError(
                f"num_model_steps is {steps}, but must be at most spec_num_iter, which is {longest}"
            )

    def shape(self, part: TreeShape, *, chain: bool) -> TreeShape:
        """The shape of filled drafts. `part`: the drafter's shape without fill."""
        if chain:
            return self.chain(FILL_DEPTH)
        width = self.spec_topk_per_iter or part.topk
        depth = max(part.depth, min(FILL_DEPTH, 1 + MAX_TREE_SIZE // width))
        return self.tree(dataclasses.replace(part, depth=depth))
