"""Options of MTP modules."""

from __future__ import annotations

import dataclasses

from cpmcu.drafters.options import register_options
from cpmcu.drafters.options.networks import FrSpecOptions
from cpmcu.options import option


@register_options("mtp", "qwen3_next_mtp", "qwen3_5_mtp", "deepseek_mtp", "mimo_mtp")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MtpOptions(FrSpecOptions):
    """Options of MTP modules."""

    enable_multi_layers_mtp: bool | None = option(
        None,
        "several MTP modules: each drafts one token; no: the first one drafts all (default: yes)",
        brief="",
    )
