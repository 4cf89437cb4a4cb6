"""Moves pages between host memory and disk, on its own threads.

Every published page goes to disk. The stream copies it to a host block after the steps that wrote
it; once the copy is done, a thread writes the block to disk. Requested pages go the other way. If
the device has free pages, the first are copied there while later ones are read. The engine thread
never waits for the disk.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cpmcu import C
    from cpmcu.engine.prefix.disk import DiskStore
    from cpmcu.engine.prefix.host import HostTier
    from cpmcu.engine.prefix.index import Entry, PrefixIndex

logger = logging.getLogger(__name__)

NUM_THREADS = 8
PAGES_A_TASK = 4  # pages that a thread reads before it looks for work again
MOST_WRITES = 32  # maximum number of pages that are being written
FREE_PAGES = 8  # device pages that loading from disk leaves to running sequences


@dataclasses.dataclass(slots=True, eq=False)
class _Read:
    entry: Entry
    parent: bytes  # digest of all pages before this one
    block: int
    state: int
    found: tuple[bool, bool] = (False, False)  # whether the page and its state were found


class DiskTier:
    """The disk tier.

    Only the engine thread calls it; its own threads access the store and host blocks.
    """

    def __init__(self, store: DiskStore) -> None:
        self._store = store
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="cpmcu-disk")
        # Published entries of which no copy to the host was launched yet.
        self._wanted: deque[Entry] = deque()
        # (entry, number of steps launched before its copy to the host).
        self._copies: deque[tuple[Entry, int]] = deque()
        self._writes: deque[tuple[Entry, Future[bool]]] = deque()
        self._reads: dict[bytes, _Read] = {}
        self._finished: deque[_Read] = deque()  # reads that are done; filled by the threads
        self._arriving: deque[Entry] = deque()  # entries whose reads have begun, in order
        self._loaded: list[Entry] = []  # copied to the device since `_arriving` was last empty
        self._all_read = threading.Event()  # set once all reads under way are done
        self.num_read = 0  # number of pages read so far

    def bind(
        self,
        engine: C.Engine,
        index: PrefixIndex,
        host: HostTier,
        states: HostTier,
        take_block: Callable[[], int],
        take_state: Callable[[], int],
        forget_empty: Callable[[Entry], None],
    ) -> None:
        """Sets the objects that the tier works with. Call it before all other methods."""
        self._engine, self._index = engine, index
        self._host, self._states = host, states
        self._take_block, self._take_state = take_block, take_state
        self._forget_empty = forget_empty

    @property
    def num_pages(self) -> int:
        """Pages on disk."""
        return self._store.num_pages

    # ---- reading

    def begin_reading(
        self, keys: Sequence[tuple[bytes, bytes]], parent: Entry | None
    ) -> list[bytes]:
        """Reads the first pages of `keys`, which follow `parent`, as far as the disk has them.

        Returns the keys that are being read.
        """
        found: list[bytes] = []
        task: list[_Read] = []
        keys, last = self._usable(keys)
        for key, tokens in keys:
            entry = self._index.find(key, parent, tokens)
            if key in self._reads:
                if self._reads[key].entry is not entry:
                    break
                found.append(key)
            elif entry is None or (entry.page < 0 and entry.block < 0):
                if key not in self._store:
                    break
                read = self._prepare(key, parent, tokens, needs_state=key == last)
                if read is None:
                    break
                self._reads[key] = read
                found.append(key)
                task.append(read)
                self._arriving.append(read.entry)
                entry = read.entry
            if len(task) == PAGES_A_TASK:
                self._threads.submit(self._read_pages, task)
                task = []
            parent = entry
        if task:
            self._threads.submit(self._read_pages, task)
        return found

    def _usable(
        self, keys: Sequence[tuple[bytes, bytes]]
    ) -> tuple[Sequence[tuple[bytes, bytes]], bytes]:
        """The keys that are worth reading, and the key whose state is read.

        If sequences have a state of their own, a prefix ends at a page with a state.
        """
        if not self._store.has_states:
            return keys, b""
        last = -1
        for i, (key, _) in enumerate(keys):
            if key not in self._store:
                break
            if self._store.may_have_state(key):
                last = i
        return keys[: last + 1], keys[last][0] if last >= 0 else b""

    def is_reading(self, keys: Sequence[bytes]) -> bool:
        """Is one of these keys still being read?"""
        return any(key in self._reads for key in keys)

    def _prepare(
        self, key: bytes, parent: Entry | None, tokens: bytes, *, needs_state: bool
    ) -> _Read | None:
        """Takes the memory for a page and an entry for it. None: there is no memory."""
        if self._engine.pages.has_copies:  # a copy may still use a block that the read would fill
            self._engine.pages.wait_for_copies()
        self._host.is_calm = True
        block = self._take_block()
        if block < 0:
            return None
        if parent is not None and not parent.alive:  # the block was the parent's
            self._host.give(block)
            return None
        state = self._take_state() if needs_state else -1
        entry = self._index.add(key, parent, tokens)
        if entry is None:
            self._host.give(block)
            if state >= 0:
                self._states.give(state)
            return None
        entry.on_disk = True
        entry.locks += 1
        return _Read(entry, digest_of(parent), block, state)

    def _read_pages(self, reads: list[_Read]) -> None:
        """Runs in a thread."""
        for read in reads:
            entry = read.entry
            page = self._host.view(read.block)
            state = self._states.view(read.state) if read.state >= 0 else None
            try:
                read.found = self._store.read_found(
                    entry.key, read.parent, entry.tokens, page, state
                )
            except Exception:  # only a bug: if the disk fails, the store returns False
                logger.exception("prefix cache: a page could not be read")
            self._finished.append(read)
        if len(self._finished) >= len(self._reads):
            self._all_read.set()

    def wait(self, seconds: float) -> None:
        """Waits up to `seconds` until all reads under way are done."""
        if self._reads:
            self._all_read.wait(seconds)
            self._all_read.clear()
        else:
            time.sleep(seconds)

    def _finish_reads(self) -> None:
        while self._finished:
            read = self._finished.popleft()
            entry = read.entry
            del self._reads[entry.key]
            entry.locks -= 1
            good, has_state = read.found
            fits = good and entry.alive and entry.block < 0
            if fits:
                self._index.set_block(entry, read.block)
                self.num_read += 1
            else:
                self._host.give(read.block)
            if fits and has_state and entry.state < 0:
                self._index.set_state(entry, read.state)
            elif read.state >= 0:
                self._states.give(read.state)
            if not good and entry.alive:
                entry.on_disk = False
                self._forget_empty(entry)
        self._host.is_calm = bool(self._reads)

    def _load_early(self) -> None:
        """Copies pages that were read to free pages of the device, each behind its parent."""
        ready: dict[Entry, None] = {}  # entries that can be loaded, in order
        while self._arriving and self._arriving[0].key not in self._reads:
            entry = self._arriving.popleft()
            parent = entry.parent
            if (
                entry.alive
                and entry.page < 0 <= entry.block
                and (parent is None or parent.page >= 0 or parent in ready)
            ):
                ready[entry] = None
        wanted = min(len(ready), self._engine.num_free_pages - FREE_PAGES)
        if wanted > 0:
            # Fewer than `wanted` if steps in flight may still read some.
            pages = self._engine.pages.take(wanted)
            loaded = list(ready)[: len(pages)]
            self._engine.pages.load(pages, self._host.blocks, [entry.block for entry in loaded])
            for entry, page in zip(loaded, pages):
                self._index.set_page(entry, page)
            self._loaded += loaded
        if not self._arriving and self._loaded:  # the last page is evicted first
            alive = [entry for entry in self._loaded if entry.alive]
            self._index.use(alive)
            self._index.unuse(alive)
            self._loaded.clear()

    # ---- writing

    def wants(self, entry: Entry) -> None:
        """Adds a published page to those that will be written to disk."""
        if not entry.on_disk:
            self._wanted.append(entry)

    def tick(self, launched: int, collected: int) -> bool:
        """Advances reads and writes. `launched`, `collected`: numbers of steps since the start.

        True while it must be called again soon.
        """
        self._finish_reads()
        self._load_early()
        self._finish_writes()
        self._begin_copies(launched)
        idle = launched == collected
        if idle and self._copies:
            self._engine.pages.wait_for_copies()
        while self._copies and (idle or self._copies[0][1] < collected):
            entry = self._copies.popleft()[0]
            if entry.alive:
                self._begin_write(entry)
            else:
                self._unlock(entry)
        return bool(self._copies or self._reads or (self._wanted and not self._writes))

    def _begin_copies(self, launched: int) -> None:
        pages: list[int] = []
        blocks: list[int] = []
        while self._wanted and len(self._copies) + len(self._writes) < MOST_WRITES:
            entry = self._wanted.popleft()
            if not entry.alive or entry.on_disk or (entry.page < 0 and entry.block < 0):
                continue
            if entry.block < 0:
                block = self._take_block()
                if block < 0:
                    continue  # host memory is too small or in use: the page stays where it is
                pages.append(entry.page)
                blocks.append(block)
                self._index.set_block(entry, block)
            entry.locks += 1
            self._copies.append((entry, launched))
        if pages:
            self._engine.pages.save(pages, self._host.blocks, blocks)

    def _begin_write(self, entry: Entry) -> None:
        state = self._states.view(entry.state) if entry.state >= 0 else None
        view = self._host.view(entry.block)
        parent = digest_of(entry.parent)
        done = self._threads.submit(
            self._store.write,
            entry.key,
            parent,
            entry.tokens,
            view,
            state,
            generation=self._store.generation,
        )
        self._writes.append((entry, done))

    def _finish_writes(self) -> None:
        for entry, done in [write for write in self._writes if write[1].done()]:
            self._writes.remove((entry, done))
            entry.on_disk = done.exception() is None and done.result()
            self._unlock(entry)

    def _unlock(self, entry: Entry) -> None:
        """Ends the copy or write of an entry."""
        entry.locks -= 1
        if not entry.alive and entry.locks == 0 and entry.block >= 0 and entry.users == 0:
            self._host.give(entry.block)
            entry.block = -1

    # ---- the end

    def reset(self) -> None:
        """Forgets all pages on disk."""
        self._wanted.clear()
        self._store.remove_all()

    def close(self) -> None:
        """Writes the remaining pages and waits for the writes."""
        self._arriving.clear()
        while self.tick(0, 0) or self._writes:
            for _, done in list(self._writes):
                done.exception()
            if self._reads:
                self.wait(0.1)
        self._threads.shutdown()


def digest_of(entry: Entry | None) -> bytes:
    """BLAKE2b-128 of all tokens up to the end of the entry, chained over pages. b"" for None."""
    missing: list[Entry] = []
    while entry is not None and not entry.digest:
        missing.append(entry)
        entry = entry.parent
    digest = b"" if entry is None else entry.digest
    for found in reversed(missing):
        digest = hashlib.blake2b(digest + found.tokens, digest_size=16).digest()
        found.digest = digest
    return digest or bytes(16)
