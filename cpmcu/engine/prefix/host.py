"""Pinned host memory of the prefix cache: blocks that are handed out, and slabs behind them."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cpmcu import C

logger = logging.getLogger(__name__)

SLAB_BYTES = 128 << 20


class HostTier:
    """Blocks of one size, up to `limit_bytes`. Used by the engine thread only.

    Page-locking memory takes about 0.4 s a GB, so a thread takes the next slab before it is needed.
    On a CPU the engine takes it at once.
    """

    def __init__(self, engine: C.Engine, block_bytes: int, limit_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.limit = limit_bytes // block_bytes if block_bytes else 0
        self._per_slab = max(1, min(SLAB_BYTES // max(1, block_bytes), self.limit))
        self._blocks: C.HostBlocks | None = None
        self._free: list[int] = []
        self._num_blocks = 0
        self._grower: threading.Thread | None = None
        self._waits = engine.launch_ahead == 1  # nothing is gained by another thread
        if self.limit > 0:
            from cpmcu import C

            self._blocks = C.HostBlocks(engine, block_bytes, self._per_slab)

    @property
    def blocks(self) -> C.HostBlocks:
        """The memory. Only where `limit` is above 0."""
        assert self._blocks is not None
        return self._blocks

    @property
    def num_used(self) -> int:
        """Blocks that are handed out."""
        return self._num_blocks - len(self._free)

    def take(self) -> int:
        """A free block, or -1."""
        self.grow()
        return self._free.pop() if self._free else -1

    def give(self, block: int) -> None:
        """A block is free again."""
        self._free.append(block)

    def view(self, block: int) -> memoryview:
        """The bytes of a block."""
        return self.blocks.view(block)

    def grow(self) -> None:
        """Sees to it that blocks will be free: asks for a slab once few are."""
        if self._blocks is None:
            return
        found = min(self._blocks.num_blocks, self.limit)
        self._free.extend(range(self._num_blocks, found))
        self._num_blocks = max(self._num_blocks, found)
        few = len(self._free) <= self._per_slab // 2
        running = self._grower is not None and self._grower.is_alive()
        if not few or running or self._num_blocks >= self.limit:
            return
        if self._waits and not self._free:
            self._take_slab()
            self.grow()
        elif not self._waits:
            self._grower = threading.Thread(target=self._take_slab, name="cpmcu-host", daemon=True)
            self._grower.start()

    def close(self) -> None:
        """Gives the memory back. No copy may be under way."""
        if self._grower is not None:
            self._grower.join()
        self._blocks = None

    def _take_slab(self) -> None:
        assert self._blocks is not None
        try:
            self._blocks.grow()
        except MemoryError as error:
            logger.warning("the prefix cache gets no more host memory: %s", error)
            self.limit = self._num_blocks
