"""Options of drafters whose trees grow level by level, and of those that draft chains."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from cpmcu.drafters.options import DrafterOptions, fallback_options
from cpmcu.options import option

# The limits of csrc/kernels/tree/tree.h.
MAX_TREE_SIZE = 64
MAX_DRAFT_DEPTH = 16
MAX_DRAFT_TOPK = 32


def num_candidates(topk: int, depth: int) -> int:
    """Number of candidates that a draft scores: topk children of topk nodes in each level."""
    return topk + (depth - 1) * topk * topk


@dataclasses.dataclass(frozen=True, slots=True)
class TreeShape:
    """Shape of a drafted tree."""

    depth: int  # drafted levels of the tree
    topk: int  # nodes expanded per level, and children per node
    tree_size: int  # nodes that are verified, the root included


HEAD_SHAPE = TreeShape(depth=2, topk=10, tree_size=12)
# The largest shape, if each step chooses its shape.
CHOSEN_SHAPE = TreeShape(depth=4, topk=8, tree_size=32)
SHIPPED_SHAPE = TreeShape(depth=4, topk=8, tree_size=24)
CHAIN_DEPTH = 4


@fallback_options
@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeOptions(DrafterOptions):
    """Options of a drafter whose trees grow level by level."""

    spec_num_iter: int | None = option(
        None,
        "tokens of the longest drafted path (default: 4; named draft with a fixed tree: 2)",
        keys={"num_speculative_tokens": None},
        least=1,
        most=MAX_DRAFT_DEPTH,
        fixes_shape=True,
    )
    spec_topk_per_iter: int | None = option(
        None,
        "drafted children of a node, and nodes expanded per level (default: 8; named draft with a "
        "fixed tree: 10)",
        least=1,
        most=MAX_DRAFT_TOPK,
        fixes_shape=True,
    )
    spec_tree_size: int | None = option(
        None,
        f"tokens verified in a step, at most {MAX_TREE_SIZE}, the last emitted token included "
        "(default: 32; shipped draft: 24; named draft with a fixed tree: 12)",
        least=1,
        most=MAX_TREE_SIZE,
        fixes_shape=True,
    )

    def __post_init__(self) -> None:
        self.tree()

    @classmethod
    def complete(cls, keys: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """With `num_speculative_tokens` and no width, drafts have no branches, as in vLLM."""
        tokens = keys.get("num_speculative_tokens")
        if not isinstance(tokens, int):
            return
        fields.setdefault("spec_topk_per_iter", 1)
        if fields["spec_topk_per_iter"] == 1 and tokens < MAX_TREE_SIZE:
            fields.setdefault("spec_tree_size", tokens + 1)

    def tree(self, defaults: TreeShape = HEAD_SHAPE) -> TreeShape:
        """The shape of a tree, with `defaults` for what is not given."""
        depth = self.spec_num_iter or defaults.depth
        most = min(MAX_DRAFT_TOPK, MAX_TREE_SIZE // max(1, depth - 1))
        topk = self.spec_topk_per_iter or min(defaults.topk, most)
        if topk > most:
            raise ValueError(
                f"spec_topk_per_iter {topk} x (spec_num_iter {depth} - 1) is {topk * (depth - 1)}, "
                f"but must be at most {MAX_TREE_SIZE}"
            )
        candidates = num_candidates(topk, depth)
        size = self.spec_tree_size or min(defaults.tree_size, candidates + 1)
        if size - 1 > candidates:
            raise ValueError(
                f"spec_tree_size is {size}, but spec_num_iter {depth} and spec_topk_per_iter "
                f"{topk} draft only {candidates} tokens: at most {candidates + 1}"
            )
        return TreeShape(depth, topk, size)

    def chain(self, default: int) -> TreeShape:
        """The shape of a draft without branches. `default`: its depth if none is given."""
        depth = self.spec_num_iter or default
        for name, value in (("spec_topk_per_iter", 1), ("spec_tree_size", depth + 1)):
            if getattr(self, name) not in (None, value):
                raise ValueError(
                    f"{name} is {getattr(self, name)}, but a chain of {depth} tokens has {value}: "
                    "give only spec_num_iter"
                )
        return TreeShape(depth, 1, depth + 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainOptions(TreeOptions):
    """Options of a drafter whose drafts have no branches."""

    chain_depth: ClassVar[int] = CHAIN_DEPTH

    def __post_init__(self) -> None:
        self.chain(self.chain_depth)
