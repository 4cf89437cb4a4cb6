"""Host memory for preempted sequences: they go on later with the same bits.

A swapped sequence keeps its slot, so its per-slot tensors stay on the device. Its pages go to host
memory, and their device pages serve others. On a GPU, computing the pages again would be slower,
and last bits could differ: prefill and decode steps have different kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpmcu.engine.prefix.host import HostTier

if TYPE_CHECKING:
    from cpmcu import C


class SwapSpace:
    """Pages of swapped sequences. Used by the engine thread only."""

    def __init__(self, engine: C.Engine, host: HostTier) -> None:
        """`host`: blocks of a page. If its limit is 0, no sequence is swapped."""
        self._engine = engine
        self._host = host

    def save(self, slot: int) -> list[int] | None:
        """Moves the pages of a slot, which no step in flight uses, to host memory.

        Returns their blocks. None: they do not fit, and nothing has changed.
        """
        if self._host.limit == 0:
            return None
        pages = self._engine.pages.of_slot(slot)
        if len(pages) > self._host.limit - self._host.num_used:
            return None
        blocks: list[int] = []
        while len(blocks) < len(pages):
            block = self._host.take()
            if block < 0:  # the system gives less memory than the limit
                self.forget(blocks)
                return None
            blocks.append(block)
        self._engine.pages.save(pages, self._host.blocks, blocks)
        self._engine.vacate(slot)
        return blocks

    def load(self, slot: int, blocks: list[int]) -> None:
        """Copies the pages of `blocks` to the slot, which has at least as many pages."""
        pages = self._engine.pages.of_slot(slot)[: len(blocks)]
        self._engine.pages.load(pages, self._host.blocks, blocks)
        self.forget(blocks)

    def forget(self, blocks: list[int]) -> None:
        """The blocks are free again."""
        for block in blocks:
            self._host.give(block)
