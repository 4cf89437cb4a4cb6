"""Options of Gemma 4's assistants."""

from __future__ import annotations

import dataclasses

from cpmcu.drafters.options import register_options
from cpmcu.drafters.options.networks import NetworkOptions


@register_options("gemma4_assistant", "gemma4_mtp")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4AssistantOptions(NetworkOptions):
    """Options of an assistant of Gemma 4."""
