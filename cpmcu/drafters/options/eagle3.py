"""Options of EAGLE-3 heads."""

from __future__ import annotations

import dataclasses

from cpmcu.drafters.options import register_options
from cpmcu.drafters.options.networks import FrSpecOptions
from cpmcu.options import option


@register_options("eagle3")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Options(FrSpecOptions):
    """Options of an EAGLE-3 head."""

    use_eagle3: bool | None = option(
        None,
        "require an EAGLE-3 head (default: detected from the draft's files)",
        names_drafter=True,
    )
