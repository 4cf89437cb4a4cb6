"""The prefix cache, as the engine thread uses it: match, begin, publish, release, evict.

A page is published once prefill has written all its tokens and the sequence has gone beyond it. No
step writes to a published page. So a sequence that shares it gets the same bits as without the
cache. Pages that decoding wrote differ in the last bits; they are published only with `decoded`.

Pages that no sequence uses are ordered by their last use. If memory is short, the oldest pages move
to host memory or are dropped. The stream orders the copies, so no thread waits for them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from typing import TYPE_CHECKING

from cpmcu.engine.prefix.base import CacheCounters, PageCache, Prefix, Sequenced
from cpmcu.engine.prefix.host import HostMemory
from cpmcu.engine.prefix.index import Entry, PrefixIndex
from cpmcu.engine.prefix.keys import Hash, page_keys, root_key, xxh3_128
from cpmcu.engine.prefix.windows import WindowPages

if TYPE_CHECKING:
    from cpmcu import C
    from cpmcu.engine.prefix.disk_tier import DiskTier


EVICTED_AT_ONCE = 8  # pages that are evicted together, since evicting waits for the steps in flight
FEWEST_STATES = 8  # minimum number of checkpoints of per-slot state
SAVED_AT_ONCE = 8  # pages that are saved together; a request that arrives meanwhile waits for them


class PrefixCache(PageCache):
    """Used by the engine thread only."""

    def __init__(
        self,
        engine: C.Engine,
        page_size: int,
        *,
        seed: str = "",
        host_bytes: int = 0,
        swap_bytes: int = 0,
        decoded: bool = False,
        disk: DiskTier | None = None,
        hash_bytes: Hash = xxh3_128,
    ) -> None:
        # Checkpoints of per-slot state get half of the host memory, at least room for a few.
        slot_bytes = engine.pages.slot_bytes
        half = host_bytes // 2 if slot_bytes > 0 else 0
        super().__init__(engine, page_size, host_bytes=host_bytes - half, swap_bytes=swap_bytes)
        state_bytes = max(half, FEWEST_STATES * slot_bytes)
        self._states = HostMemory(engine, slot_bytes).tier(state_bytes, "the prefix cache")
        self._seed = seed
        self._decoded = decoded
        self._hash = hash_bytes
        self._index = PrefixIndex()
        self._windows = WindowPages(engine, page_size, self._hosts)
        self._epoch = 0  # number of resets so far
        self._pending: dict[bytes, int] = {}  # keys that running sequences will publish
        self._disk = disk
        if disk is not None:
            self._host.grow()  # a first request may find its pages on disk
            disk.bind(
                engine,
                self._index,
                self._host,
                self._states,
                self._take_block,
                lambda: self._take_state(Prefix([]), at_end=True),
                self._forget_empty,
            )
        self.counters = CacheCounters()

    # ---- what the scheduler asks

    @property
    def has_states(self) -> bool:
        return self._engine.pages.slot_bytes > 0

    @property
    def num_idle_pages(self) -> int:
        return self._index.num_idle_pages

    def prefix_of(self, tokens: list[int], salt: str) -> Prefix:
        from cpmcu import C

        root = root_key(self._seed, salt, self._hash)
        return Prefix(page_keys(C.token_bytes(tokens), self._page_size, root, self._hash))

    def match(self, prefix: Prefix, num_tokens: int) -> list[Entry]:
        most = (num_tokens - 1) // self._page_size
        found = self._index.match(prefix.keys[:most])
        usable = 0
        while usable < len(found) and found[usable].page >= 0:
            usable += 1
        while usable < len(found) and found[usable].page < 0 <= found[usable].block:
            usable += 1
        prefix.known = usable
        can_end = self._windows.hit_ends(found[:usable])
        if self.has_states:
            can_end[1:] = [can and e.state >= 0 for can, e in zip(can_end[1:], found)]
        return found[: max(count for count, can in enumerate(can_end) if can)]

    def must_wait(self, prefix: Prefix, matched: list[Entry], num_tokens: int) -> bool:
        if self.is_reading(prefix):
            return True
        most = (num_tokens - 1) // self._page_size
        behind = prefix.keys[len(matched) : most]
        if not behind:
            return False
        if behind[0][0] in self._pending:
            pending = itertools.takewhile(lambda pair: pair[0] in self._pending, behind)
            prefix.waits_for = deque(pending, maxlen=1)[0][0]
            return True
        if self._disk is None:
            return False
        if prefix.reading is None:
            for entry in matched:
                entry.locks += 1  # so that reading does not take their host blocks
            prefix.reading = self._disk.begin_reading(behind, matched[-1] if matched else None)
            for entry in matched:
                entry.locks -= 1
        return self._disk.is_reading(prefix.reading)

    def still_waits(self, prefix: Prefix) -> bool:
        return prefix.waits_for in self._pending or self.is_reading(prefix)

    # ---- a sequence's life

    def begin(
        self, prefix: Prefix, matched: list[Entry], num_tokens: int
    ) -> tuple[list[tuple[int, list[int]]], int]:
        self._index.use(matched)
        prefix.entries = list(matched)
        prefix.num_kept = len(matched)
        prefix.num_cached = len(matched) * self._page_size
        prefix.epoch = self._epoch
        most = (num_tokens - 1) // self._page_size
        prefix.pending_begin, prefix.pending_end = len(matched), max(len(matched), most)
        for key, _ in prefix.keys[len(matched) : most]:
            self._pending[key] = self._pending.get(key, 0) + 1
        pages = [entry.page for entry in matched if entry.page >= 0]
        return [(0, pages), *self._windows.begin(prefix, matched)], prefix.num_cached

    def windows_end(self, prefix: Prefix) -> int:
        return prefix.num_cached if prefix.window_blocks else 0

    def restore(self, prefix: Prefix, slot: int, num_tokens: int) -> None:
        missing = [entry for entry in prefix.entries if entry.page < 0]
        if missing:
            begin = len(prefix.entries) - len(missing)
            pages = self._engine.pages.of_slot(slot)[begin : len(prefix.entries)]
            blocks = [entry.block for entry in missing]
            self._engine.pages.load(pages, self._host.blocks, blocks)
            self._engine.pages.hold(pages)
            for entry, page in zip(missing, pages):
                self._index.set_page(entry, page)
        loaded = self._windows.restore(prefix, slot).union(missing)
        if self.has_states and prefix.entries:
            self._engine.pages.load_slot(slot, self._states.blocks, prefix.entries[-1].state)
        self.counters.queries += num_tokens
        self.counters.hits += prefix.num_cached
        self.counters.host_hits += len(loaded) * self._page_size

    def sent(self, prefix: Prefix, slot: int, num_tokens: int) -> None:
        if not prefix.collided and prefix.epoch == self._epoch:
            self._windows.keep(prefix, slot, num_tokens)
        index, rest = divmod(num_tokens, self._page_size)
        if not self.has_states or rest > 0 or index == 0 or index in prefix.states:
            return
        block = self._take_state(prefix, at_end=index in prefix.ends)
        if block >= 0:
            self._engine.pages.save_slot(slot, self._states.blocks, block)
            prefix.states[index] = block

    def chunk_end(self, prefix: Prefix, begin: int, end: int, num_tokens: int) -> int:
        """Where a chunk of tokens [begin, end) ends, of a prompt of `num_tokens`.

        Chunks end with pages, so that their states are checkpoints. The last full page ends a
        chunk: a longer prompt can begin there. The last page that was known before ends a chunk,
        too: prompts branch there. Returns `begin` if no full page fits.
        """
        size = self._page_size
        if not self.has_states or self._engine.chunk_length < size:
            return end
        if begin < prefix.known * size < end:
            return prefix.known * size
        last = (num_tokens - 1) // size * size
        if end == num_tokens:
            return last if begin < last else end
        return max(begin, end // size * size)

    def publish(self, prefix: Prefix, slot: int, num_written: int, *, ended: bool = False) -> None:
        rewritten = 0 if ended else max(self._engine.num_rewritten, 1)
        count = min(num_written - rewritten, len(prefix.keys) * self._page_size)
        count //= self._page_size
        if prefix.collided or prefix.epoch != self._epoch:
            self._windows.end(prefix)
            return
        if count <= len(prefix.entries):
            return
        pages = self._engine.pages.of_slot(slot)
        held: list[int] = []
        published: dict[int, Entry] = {}
        parent = prefix.entries[-1] if prefix.entries else None
        for i in range(len(prefix.entries), count):
            key, tokens = prefix.keys[i]
            if i < prefix.pending_end:
                self._forget_pending(key)
                prefix.pending_begin = i + 1
            if parent is not None and not parent.alive:
                prefix.collided = True
                break
            entry = self._index.add(key, parent, tokens)
            if entry is None:
                prefix.collided = True
                break
            prefix.entries.append(entry)
            published[i] = entry
            if entry.page >= 0 and entry.users == 0:  # computed again: one copy is enough
                self._engine.pages.drop([entry.page])
                self._index.set_page(entry, -1)
            if entry.page >= 0:
                prefix.elsewhere.add(entry)
            else:
                self._index.use([entry])
                held.append(pages[i])
                self._index.set_page(entry, pages[i])
            state = prefix.states.pop(i + 1, -1)
            if state >= 0 and entry.state < 0:
                self._index.set_state(entry, state, at_end=i + 1 in prefix.ends)
            elif state >= 0:
                self._states.give(state)
            if self._disk is not None:
                self._disk.wants(entry)
            parent = entry
        self._engine.pages.hold(held)
        self._windows.publish(prefix, slot, published)
        if self._pages_are_scarce:
            self._host.grow()

    def end(self, prefix: Prefix, slot: int, num_read: int, request: Sequenced) -> None:
        if self._decoded and not self.has_states and num_read >= len(request.prompt):
            tokens = (request.prompt + request.tokens)[:-1]  # the last token is not in the cache
            prefix.keys = self.prefix_of(tokens, request.cache_salt).keys
            num_read = max(num_read, len(tokens))
        self.publish(prefix, slot, num_read, ended=True)
        self.release(prefix)

    def release(self, prefix: Prefix) -> None:
        if prefix.epoch == self._epoch:
            for key, _ in prefix.keys[prefix.pending_begin : prefix.pending_end]:
                self._forget_pending(key)
        prefix.pending_end = 0
        for block in prefix.states.values():
            self._states.give(block)
        prefix.states.clear()
        self._windows.end(prefix)
        used = [entry for entry in prefix.entries if entry not in prefix.elsewhere]
        self._give_back(self._index.unuse(used))
        prefix.entries = []
        prefix.elsewhere.clear()

    @property
    def _pages_are_scarce(self) -> bool:
        return 2 * self._engine.num_free_pages < self._engine.num_pages

    def make_room(self, slot: int, num_tokens: int, step_end: int) -> bool:
        missing = self._engine.num_missing(slot, num_tokens, step_end)
        evicted = self.evict(max(EVICTED_AT_ONCE, missing[0])) if missing[0] else 0
        for group, count in enumerate(missing[1:], 1):
            if count:
                evicted += self._windows.evict(group, count)
        return evicted > 0

    def evict(self, count: int = EVICTED_AT_ONCE) -> int:
        """Evicts up to `count` idle pages. Returns their number."""
        entries = self._index.oldest_pages(count)
        self._save([entry for entry in entries if entry.block < 0])
        dropped = [entry.page for entry in entries]
        for entry in entries:
            self._index.set_page(entry, -1)
        self._engine.pages.drop(dropped)
        for entry in entries:
            self._forget_empty(entry)
        self.counters.evicted += len(dropped)
        return len(dropped)

    def _save_ahead(self) -> bool:
        """Copies the oldest pages to host memory while no step runs and pages are scarce.

        Their eviction then needs no copy. Returns whether a page was copied.
        """
        if self._host.limit == 0 or not self._pages_are_scarce:
            return False
        return self._save(self._index.oldest_unsaved(SAVED_AT_ONCE), spare_saved=True) > 0

    def _save(self, entries: list[Entry], *, spare_saved: bool = False) -> int:
        """Copies pages to host blocks while there are blocks. Returns the number of copies.

        With `spare_saved`, a page that is on the device, too, does not lose its block.
        """
        blocks: list[int] = []
        while len(blocks) < len(entries):
            oldest = self._index.oldest_block()
            if spare_saved and not self._host.has_room and (oldest is None or oldest.page >= 0):
                break
            block = self._take_block()
            if block < 0:
                break
            blocks.append(block)
        saved = entries[: len(blocks)]
        if saved:
            self._engine.pages.save([entry.page for entry in saved], self._host.blocks, blocks)
        for entry, block in zip(saved, blocks):
            self._index.set_block(entry, block)
        return len(saved)

    def wait(self, seconds: float) -> None:
        if self._disk is not None:
            self._disk.wait(seconds)

    def is_reading(self, prefix: Prefix) -> bool:
        """Are pages of this prefix being read from disk?"""
        return self._disk is not None and self._disk.is_reading(prefix.reading or [])

    def reset(self) -> None:
        self._epoch += 1
        for entry in self._index:
            if entry.alive and entry.parent is None:
                self._give_back(self._index.remove(entry))
        self._pending.clear()
        if self._disk is not None:
            self._disk.reset()

    def tick(self, launched: int, collected: int) -> bool:
        busy = self._disk is not None and self._disk.tick(launched, collected)
        if launched == collected:
            busy = self._save_ahead() or busy
        return busy

    def close(self) -> None:
        """Writes the pages that are not on disk yet, and frees the host memory."""
        if self._disk is not None:
            self._disk.close()
        self._states.memory.close()
        super().close()

    def snapshot(self) -> CacheCounters:
        self.counters.host_pages = self._host.num_used
        self.counters.pages = self._index.num_pages
        if self._disk is not None:
            self.counters.disk_pages = self._disk.num_pages
            self.counters.disk_hits = self._disk.num_read * self._page_size
        return dataclasses.replace(self.counters)

    # ---- details

    def _forget_pending(self, key: bytes) -> None:
        left = self._pending.get(key, 0) - 1
        if left > 0:
            self._pending[key] = left
        else:
            self._pending.pop(key, None)

    def _take_block(self) -> int:
        """Returns a host block.

        If none is free, the oldest page on the host loses its block. -1: none left.
        """
        block = self._host.take()
        if block >= 0 or self._host.limit == 0:
            return block
        entry = self._index.oldest_block()
        if entry is None:
            return -1
        block = entry.block
        self._index.set_block(entry, -1)
        self._forget_empty(entry)
        return block

    def _forget_empty(self, entry: Entry | None) -> None:
        """Forgets an entry without bytes that nobody uses.

        The disk finds its pages by their keys. So an entry that is only on disk is kept only while
        other entries follow it.
        """
        while entry is not None and entry.alive and not entry.users and not entry.locks:
            if entry.page >= 0 or entry.block >= 0 or (entry.on_disk and entry.children):
                return
            self._give_back(self._index.remove(entry))
            entry = entry.parent

    def _take_state(self, prefix: Prefix, *, at_end: bool) -> int:
        """A host block for a checkpoint of `prefix`; -1: none left.

        A checkpoint at the end of a prompt may take the block of one within the same prompt.
        """
        block = self._states.take()
        if block >= 0:
            return block
        if at_end:
            inner = [pages for pages in prefix.states if pages not in prefix.ends]
            if inner:
                return prefix.states.pop(inner[0])
        entry = self._index.oldest_state(prefix.entries, at_end=at_end)
        if entry is not None:
            block = entry.state
            self._index.set_state(entry, -1)
        return block

    def _give_back(self, removed: list[Entry]) -> None:
        """Frees the pages, host blocks and states of entries that left the index, unless in use."""
        self._windows.forget(removed)
        free = [entry for entry in removed if entry.users == 0]
        self._engine.pages.drop([entry.page for entry in free if entry.page >= 0])
        for entry in free:
            entry.page = -1
            if entry.block >= 0 and entry.locks == 0:
                self._host.give(entry.block)
                entry.block = -1
            if entry.state >= 0:
                self._states.give(entry.state)
                self._index.set_state(entry, -1)
