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

    def __init__(self, engine: C.Engine, num_bytes: int) -> None:
        """`num_bytes`: most host memory. 0: no sequence is swapped."""
        self._engine = engine
        self._host = HostTier(engine, engine.page_bytes, num_bytes, "the swap space")

    def save(self, slot: int) -> list[int] | None:
        """Moves the pages of a slot, which no step in flight uses, to host memory.

        Returns their blocks. None: they do not fit, and nothing has changed.
        """
        if self._host.limit == 0:
            return None
        pages = self._engine.slot_pages(slot)
        if len(pages) > self._host.limit - self._host.num_used:
            return None
        blocks: list[int] = []
        while len(blocks) < len(pages):
            block = self._host.take()
            if block < 0:  # the system gives less memory than the limit
                self.forget(blocks)
                return None
            blocks.append(block)
        self._engine.save_pages(pages, self._host.blocks, blocks)
        self._engine.vacate(slot)
        return blocks

    def load(self, slot: int, blocks: list[int]) -> None:
        """Copies the pages of `blocks` to the slot, which has at least as many pages."""
        pages = self._engine.slot_pages(slot)[: len(blocks)]
        self._engine.load_pages(pages, self._host.blocks, blocks)
        self.forget(blocks)

    def forget(self, blocks: list[int]) -> None:
        """The blocks are free again."""
        for block in blocks:
            self._host.give(block)

    def close(self) -> None:
        """Frees the memory. No copy may be in progress."""
        self._host.close()
