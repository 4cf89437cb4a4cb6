"""Pinned host memory: blocks of one size, taken from larger segments and shared by tiers."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cpmcu import C

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 128 << 20
SEGMENTS_AHEAD = 8  # 1 GB: a long prompt moves as much within 0.5 s
MOST_BLOCKS = (1 << 31) - 1  # the extension counts blocks in an int
GROWER_PAUSE = 0.005  # seconds between two looks at what the thread has taken


class HostMemory:
    """Blocks of one size for the tiers that `tier` makes. Used by the engine thread only.

    Page-locking memory takes about 0.4 s per GB, so a thread allocates segments before they are
    needed.
    """

    def __init__(self, engine: C.Engine, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.limit = 0  # maximum number of blocks of all tiers
        # If True, no memory is taken ahead, since that would slow reads into blocks.
        self.is_calm = False
        self._engine = engine
        self._owners: list[str] = []
        self._per_segment = 1
        self._blocks: C.HostBlocks | None = None
        self._free: list[int] = []
        self._num_blocks = 0
        self._grower: threading.Thread | None = None
        # launch_ahead is 1 on a CPU, where no memory is page-locked and a segment takes no time.
        self._in_threads = engine.launch_ahead > 1

    def tier(self, limit_bytes: int, owner: str) -> HostTier:
        """A tier of up to `limit_bytes`, before the first block is taken.

        `owner`: named by warnings.
        """
        assert self._blocks is None
        most = min(limit_bytes // self.block_bytes, MOST_BLOCKS) if self.block_bytes else 0
        if most > 0:
            self._owners.append(owner)
        self.limit = min(self.limit + most, MOST_BLOCKS)
        return HostTier(self, most)

    @property
    def blocks(self) -> C.HostBlocks:
        """The host memory. Valid only if `limit` is above 0."""
        if self._blocks is None:
            from cpmcu import C

            assert self.limit > 0
            self._per_segment = max(1, min(SEGMENT_BYTES // self.block_bytes, self.limit))
            self._blocks = C.HostBlocks(
                self._engine, self.block_bytes, self._per_segment, self.limit
            )
        return self._blocks

    @property
    def num_bytes(self) -> int:
        """Bytes taken from the system."""
        return 0 if self._blocks is None else self._blocks.num_bytes

    @property
    def has_room(self) -> bool:
        """Is a block free, or will one be?"""
        return bool(self._free) or self._num_blocks < self.limit

    def take(self) -> int:
        """A free block, or -1. Waits if a thread is allocating a segment."""
        self.grow()
        while not self._free and self._grower is not None:
            self._grower.join(GROWER_PAUSE)
            self.grow()
        return self._free.pop() if self._free else -1

    def give(self, block: int) -> None:
        """A block is free again."""
        self._free.append(block)

    def grow(self) -> None:
        """Requests another segment if few blocks are free."""
        if self.limit == 0:
            return
        if self._grower is not None and not self._grower.is_alive():
            self._grower = None
        found = min(self.blocks.num_blocks, self.limit)
        self._free.extend(range(self._num_blocks, found))
        self._num_blocks = max(self._num_blocks, found)
        if self.is_calm and self._free:
            return
        missing = SEGMENTS_AHEAD - len(self._free) // self._per_segment
        if missing <= 0 or self._grower is not None or self._num_blocks >= self.limit:
            return
        if self._in_threads:
            self._grower = threading.Thread(
                target=self._take_segments, args=(missing,), name="cpmcu-host", daemon=True
            )
            self._grower.start()
        elif not self._free:
            self._take_segments(1)
            self.grow()

    def close(self) -> None:
        """Frees the memory. No copy may be in progress."""
        if self._grower is not None:
            self._grower.join()
        self._blocks = None
        self.limit = 0

    def _take_segments(self, count: int) -> None:
        blocks = self.blocks
        try:
            for _ in range(count):
                if blocks.grow() >= self.limit:
                    break
        except MemoryError as error:
            owners = " and ".join(self._owners)
            logger.warning("%s: no more host memory can be taken: %s", owners, error)
            self.limit = blocks.num_blocks


class HostTier:
    """The blocks of a HostMemory that one owner may take. Used by the engine thread only."""

    def __init__(self, memory: HostMemory, limit: int) -> None:
        self.memory = memory
        self.limit = limit  # maximum number of blocks
        self.num_used = 0  # number of blocks that are handed out

    @property
    def blocks(self) -> C.HostBlocks:
        """The memory of all tiers. Valid only if `limit` is above 0."""
        return self.memory.blocks

    @property
    def has_room(self) -> bool:
        """Is a block free, or will one be?"""
        return self.num_used < self.limit and self.memory.has_room

    @property
    def is_calm(self) -> bool:
        """Is no memory taken ahead?"""
        return self.memory.is_calm

    @is_calm.setter
    def is_calm(self, calm: bool) -> None:
        self.memory.is_calm = calm

    def take(self) -> int:
        """A free block, or -1. Waits if a thread is allocating a segment."""
        block = self.memory.take() if self.num_used < self.limit else -1
        self.num_used += block >= 0
        return block

    def give(self, block: int) -> None:
        """A block is free again."""
        self.memory.give(block)
        self.num_used -= 1

    def view(self, block: int) -> memoryview:
        """The bytes of a block."""
        return self.memory.blocks.view(block)

    def grow(self) -> None:
        """Requests another segment if few blocks are free."""
        if self.num_used < self.limit:
            self.memory.grow()
