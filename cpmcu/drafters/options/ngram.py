"""Options of n-gram look-up."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from cpmcu.drafters.options import DrafterOptions, register_options
from cpmcu.drafters.options.trees import ChainOptions
from cpmcu.options import option

MAX_NGRAM = 32  # equal to kMaxNgram in csrc/kernels/tree/tree.h


@dataclasses.dataclass(frozen=True, kw_only=True)
class LookUpOptions(DrafterOptions):
    """Lengths of the token sequences that are looked up in the prompt and the output."""

    longest_match: ClassVar[int] = 4  # longest match if no flag says another

    prompt_lookup_min: int | None = option(
        None,
        "n-gram: shortest match (default: 1)",
        brief="",
        keys={"min_ngram_size": None},
        least=1,
        most=MAX_NGRAM,
    )
    prompt_lookup_max: int | None = option(
        None,
        "n-gram: longest match (default: 4; with --spec-fill: 16)",
        keys={"max_ngram_size": None},
        least=1,
        most=MAX_NGRAM,
    )

    def __post_init__(self) -> None:
        shortest, longest = self.ngram_range
        if shortest > longest:
            raise ValueError(
                f"prompt_lookup_min is {shortest}, but must be at most prompt_lookup_max, which is "
                f"{longest}"
            )

    @property
    def ngram_range(self) -> tuple[int, int]:
        """Shortest and longest match, in tokens."""
        shortest = self.prompt_lookup_min or 1
        return shortest, self.prompt_lookup_max or max(self.longest_match, shortest)


@register_options("ngram")
@dataclasses.dataclass(frozen=True, kw_only=True)
class NgramOptions(LookUpOptions, ChainOptions):
    """Options of n-gram look-up alone."""

    def __post_init__(self) -> None:
        LookUpOptions.__post_init__(self)
        ChainOptions.__post_init__(self)
