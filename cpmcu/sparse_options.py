"""Options of sparse attention (InfLLM-v2), which the engine's configuration inherits."""

from __future__ import annotations

import dataclasses

from cpmcu.checks import integer, truth
from cpmcu.options import option

BLOCK = 64  # tokens that are chosen together: those of a page
MOST = (1 << 31) - 1
_GROUP = "sparse attention"
_AS_TRAINED = "(default: as the checkpoint says)"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SparseOptions:
    """Fields that replace parts of a checkpoint's sparse_config; None: as the checkpoint says.

    Raises ValueError for a value out of range.
    """

    apply_sparse: bool | None = option(
        None,
        "sparse attention of MiniCPM4 for long contexts; no: dense attention (default: yes if "
        "config.json has sparse_config)",
        group=_GROUP,
    )
    sink_window_size: int | None = option(
        None,
        f"first tokens that every token attends to, in tokens: a multiple of {BLOCK} {_AS_TRAINED}",
        group=_GROUP,
    )
    block_window_size: int | None = option(
        None,
        "most recent tokens that a token attends to, in tokens, its own block of "
        f"{BLOCK} included: a multiple of {BLOCK} {_AS_TRAINED}",
        group=_GROUP,
    )
    sparse_topk_k: int | None = option(
        None,
        f"blocks of {BLOCK} tokens outside the window that a token attends to, the first ones "
        f"included {_AS_TRAINED}",
        group=_GROUP,
    )
    sparse_switch: int | None = option(
        None, f"attention of the first so many tokens is dense {_AS_TRAINED}", group=_GROUP
    )

    def __post_init__(self) -> None:
        if self.apply_sparse is not None:
            truth("apply_sparse", self.apply_sparse)
        for name, least, unit in (
            ("sink_window_size", 0, BLOCK),
            ("block_window_size", 2 * BLOCK, BLOCK),
            ("sparse_topk_k", 1, 1),
            ("sparse_switch", 0, 1),
        ):
            value = getattr(self, name)
            if value is None or (least <= integer(name, value) <= MOST and value % unit == 0):
                continue
            tokens = f"a number of tokens, a multiple of {unit}, " if unit > 1 else ""
            raise ValueError(f"{name} is {value}, but must be {tokens}from {least} to {MOST}")

    @property
    def changes(self) -> list[str]:
        """Names of the fields that replace a number of the checkpoint."""
        names = [field.name for field in dataclasses.fields(SparseOptions)]
        return [name for name in names[1:] if getattr(self, name) is not None]
