"""Options of a draft model that a head of its own drafts."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from cpmcu.drafters.options import register_options
from cpmcu.drafters.options.fill import StepsOptions
from cpmcu.drafters.options.networks import NetworkOptions
from cpmcu.drafters.options.trees import ChainOptions
from cpmcu.options import option


@register_options("hierarchical")
@dataclasses.dataclass(frozen=True, kw_only=True)
class HierarchicalOptions(StepsOptions, ChainOptions, NetworkOptions):
    """Options of the draft model and its head."""

    chain_depth: ClassVar[int] = 7

    head_model_path: str | None = option(
        None,
        "with --spec-method hierarchical: EAGLE head of the draft model, which drafts for it",
        metavar="PATH|REPO",
        brief="",
        keys={"draft_model": None},
        names_drafter=True,
    )

    def __post_init__(self) -> None:
        ChainOptions.__post_init__(self)
