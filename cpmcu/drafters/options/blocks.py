"""Options of drafters that propose a block of tokens in one pass."""

from __future__ import annotations

import dataclasses

from cpmcu.drafters.options import register_options
from cpmcu.drafters.options.networks import FrSpecOptions
from cpmcu.drafters.options.trees import MAX_TREE_SIZE, TreeShape
from cpmcu.options import option

FIXED_TREE = 16  # nodes of a tree whose shape is fixed
CHOSEN_TREE = 32  # nodes of the largest tree, if each step chooses its shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockOptions(FrSpecOptions):
    """Options of a block drafter.

    `spec_num_iter` is at most the number of tokens that a block predicts. `spec_topk_per_iter` is
    the number of candidates of a position; 1 asks for a chain.
    """

    spec_layer_shift: int = option(
        0,
        "read hidden states of the target this many layers later than the draft's files say, to "
        "test whether their trainer counted layers otherwise",
        least=-1,
        most=1,
        brief="",
    )

    def __post_init__(self) -> None:
        depth, size = self.spec_num_iter, self.spec_tree_size
        if self.spec_topk_per_iter == 1 and depth and size and size > depth + 1:
            raise ValueError(
                f"spec_tree_size is {size}, but a chain of {depth} tokens has {depth + 1}: give "
                "only spec_num_iter, or a larger spec_topk_per_iter"
            )

    def block(self, positions: int, topk: int, *, chooses: bool) -> TreeShape:
        """The largest shape of drafts from blocks that predict `positions` tokens.

        `topk`: candidates of a position; `chooses`: each step chooses its shape. Raises ValueError
        for a longer path, and for more nodes than the candidates give.
        """
        depth = self.spec_num_iter or positions
        if depth > positions:
            raise ValueError(
                f"spec_num_iter (num_speculative_tokens) is {depth}, expected at most {positions}, "
                "the tokens that a block of this draft predicts"
            )
        if self.spec_topk_per_iter == 1:
            topk = 1
        most = min(MAX_TREE_SIZE, sum(topk**level for level in range(depth + 1)))
        size = self.spec_tree_size
        if size is None:
            size = min(most, max(depth + 1, CHOSEN_TREE if chooses else FIXED_TREE))
        if size > most:
            raise ValueError(
                f"spec_tree_size is {size}, expected at most {most}: {depth} positions of {topk} "
                "candidates each"
            )
        return TreeShape(depth, topk, size)


@register_options("dflash", "jetspec")
@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlashOptions(BlockOptions):
    """Options of DFlash and JetSpec heads."""


@register_options("dflash2")
@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlash2Options(BlockOptions):
    """Options of DFlash2 heads."""


@register_options("dspark")
@dataclasses.dataclass(frozen=True, kw_only=True)
class DSparkOptions(BlockOptions):
    """Options of DSpark heads."""


@register_options("domino")
@dataclasses.dataclass(frozen=True, kw_only=True)
class DominoOptions(BlockOptions):
    """Options of Domino heads."""


@register_options("lilicorr")
@dataclasses.dataclass(frozen=True, kw_only=True)
class LiLiCorrOptions(BlockOptions):
    """Options of LiLiCorr heads."""
