"""Pinned host memory: blocks for pages, taken from larger segments."""

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


class HostTier:
    """Blocks of one size, up to `limit_bytes`. Used by the engine thread only.

    Page-locking memory takes about 0.4 s per GB, so a thread allocates segments before they are
    needed.
    """

    def __init__(
        self,
        engine: C.Engine,
        block_bytes: int,
        limit_bytes: int,
        owner: str = "the prefix cache",
    ) -> None:
        """`owner`: named by warnings."""
        self._owner = owner
        self.block_bytes = block_bytes
        self.limit = min(limit_bytes // block_bytes, MOST_BLOCKS) if block_bytes else 0
        self._per_segment = max(1, min(SEGMENT_BYTES // max(1, block_bytes), self.limit))
        self._blocks: C.HostBlocks | None = None
        self._free: list[int] = []
        self._num_blocks = 0
        self._grower: threading.Thread | None = None
        self.is_calm = False  # no memory is taken ahead: it would slow down what fills blocks now
        self._in_threads = engine.launch_ahead > 1  # on a CPU, a segment takes no time
        if self.limit > 0:
            from cpmcu import C

            self._blocks = C.HostBlocks(engine, block_bytes, self._per_segment, self.limit)

    @property
    def blocks(self) -> C.HostBlocks:
        """The host memory. Valid only if `limit` is above 0."""
        assert self._blocks is not None
        return self._blocks

    @property
    def num_bytes(self) -> int:
        """Bytes taken from the system, at most `limit_bytes`."""
        return 0 if self._blocks is None else self._blocks.num_bytes

    @property
    def num_used(self) -> int:
        """Blocks that are handed out."""
        return self._num_blocks - len(self._free)

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

    def view(self, block: int) -> memoryview:
        """The bytes of a block."""
        return self.blocks.view(block)

    def grow(self) -> None:
        """Requests another segment if few blocks are free."""
        if self._blocks is None:
            return
        if self._grower is not None and not self._grower.is_alive():
            self._grower = None
        found = min(self._blocks.num_blocks, self.limit)
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

    def _take_segments(self, count: int) -> None:
        assert self._blocks is not None
        try:
            for _ in range(count):
                if self._blocks.grow() >= self.limit:
                    break
        except MemoryError as error:
            logger.warning("%s gets no more host memory: %s", self._owner, error)
            self.limit = self._blocks.num_blocks
