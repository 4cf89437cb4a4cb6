"""Pinned host memory of the prefix cache: blocks that are handed out, and slabs behind them."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cpmcu import C

logger = logging.getLogger(__name__)

SLAB_BYTES = 128 << 20
SLABS_AHEAD = 3  # free ones: a long prompt can move 1 GB of older pages within 0.5 s


class HostTier:
    """Blocks of one size, up to `limit_bytes`. Used by the engine thread only.

    Page-locking memory takes about 0.4 s a GB, so a thread takes slabs before they are needed.
    """

    def __init__(self, engine: C.Engine, block_bytes: int, limit_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.limit = limit_bytes // block_bytes if block_bytes else 0
        self._per_slab = max(1, min(SLAB_BYTES // max(1, block_bytes), self.limit))
        self._blocks: C.HostBlocks | None = None
        self._free: list[int] = []
        self._num_blocks = 0
        self._grower: threading.Thread | None = None
        self._in_threads = engine.launch_ahead > 1  # on a CPU, a slab takes no time
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
        """A free block, or -1. Waits for a slab that a thread is taking."""
        self.grow()
        if not self._free and self._grower is not None:
            self._grower.join()
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
        if self._grower is not None and not self._grower.is_alive():
            self._grower = None
        enough = len(self._free) > SLABS_AHEAD * self._per_slab
        if enough or self._grower is not None or self._num_blocks >= self.limit:
            return
        if self._in_threads:
            self._grower = threading.Thread(target=self._take_slab, name="cpmcu-host", daemon=True)
            self._grower.start()
        elif not self._free:
            self._take_slab()
            self.grow()

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
