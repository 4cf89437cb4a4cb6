"""Cached pages of layers with a window, of one model.

A hit of L tokens needs all pages before L of layers without a window, but only the last ones of
layers with a window. So a prompt's other pages of such layers are evicted first, the oldest
ones before others. A hit is shortened to a length whose pages exist.

A running sequence gives pages before its window back before prefill has written the last token of
its chunk. So the cache becomes an owner of a page as soon as the step that writes it is launched.

If a page before the end of a prompt or before a branch is evicted, it moves to host memory.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cpmcu import C
    from cpmcu.engine.prefix.base import Prefix
    from cpmcu.engine.prefix.host import HostTier
    from cpmcu.engine.prefix.index import Entry

EVICTED_AT_ONCE = 8  # pages that are evicted together


class WindowPages:
    """The pages of entries in the groups of layers with a window. For the engine thread only.

    An engine without such layers has no groups: then all methods do nothing.
    """

    def __init__(self, engine: C.Engine, page_size: int, hosts: Sequence[HostTier]) -> None:
        """`hosts`: host memory of each group; that of group 0 is not used."""
        self._pages = engine.pages
        self._page_size = page_size
        self._groups = range(1, len(engine.pages.windows))
        # Pages by group and entry, the oldest first: those to be evicted first, and those before
        # the end of a prompt or before a place where prompts branched.
        self._inner: list[OrderedDict[Entry, int]] = [OrderedDict() for _ in engine.pages.windows]
        self._ends: list[OrderedDict[Entry, int]] = [OrderedDict() for _ in engine.pages.windows]
        self._hosts = hosts
        # Host blocks by group and entry, the oldest first.
        self._blocks: list[OrderedDict[Entry, int]] = [OrderedDict() for _ in engine.pages.windows]

    # ---- hits

    def hit_ends(self, entries: Sequence[Entry]) -> list[bool]:
        """Item n: do the first n entries have all pages that a hit of n entries needs?

        From the first page that is not on the device, all must be in host memory.
        """
        can_end = [True] * (len(entries) + 1)
        for group in self._groups:
            # `absent`: the last entry so far that is not on the device. `missing`: the value of
            # `absent` when an entry was last missing in host memory.
            absent = missing = -1
            for count, entry in enumerate(entries, 1):
                if self.page_of(entry, group) < 0:
                    absent = count - 1
                if entry not in self._blocks[group]:
                    missing = absent
                can_end[count] &= missing < self._first_read(group, count)
        return can_end

    def begin(self, prefix: Prefix, entries: Sequence[Entry]) -> list[tuple[int, list[int]]]:
        """The pages of each group that a sequence behind `entries` reads: (first entry, pages).

        Only pages before the first that is not on the device. `restore` loads the others.
        """
        found = []
        for group in self._groups:
            first = self._first_read(group, len(entries))
            read = entries[first:]
            pages = [self.page_of(entry, group) for entry in read]
            count = pages.index(-1) if -1 in pages else len(pages)
            for entry, page in zip(read, pages):
                if page >= 0:
                    self._inner[group].pop(entry, None)
                    self._ends[group].pop(entry, None)
                    self._ends[group][entry] = page
            if count < len(read):
                # Until they are loaded, no other page may take their blocks.
                taken = self._blocks[group]
                prefix.window_blocks[group] = {
                    first + i: (read[i], taken.pop(read[i])) for i in range(count, len(read))
                }
            found.append((first, pages[:count]))
        return found

    def restore(self, prefix: Prefix, slot: int) -> set[Entry]:
        """Copies pages of host memory to the slot's own pages. Returns their entries."""
        restored: set[Entry] = set()
        for group, blocks in prefix.window_blocks.items():
            first = self._pages.first_of_slot(slot, group)
            held = self._pages.of_slot(slot, group)
            pages = [held[i - first] for i in blocks]
            host = self._hosts[group].blocks
            self._pages.load(pages, host, [block for _, block in blocks.values()], group)
            for (entry, _), page in zip(blocks.values(), pages):
                restored.add(entry)
                if self.page_of(entry, group) < 0:
                    self._pages.hold([page], group)
                    self._ends[group][entry] = page
        self._return_blocks(prefix)
        return restored

    def page_of(self, entry: Entry, group: int) -> int:
        """The page of an entry; -1: none."""
        return self._ends[group].get(entry, self._inner[group].get(entry, -1))

    # ---- a sequence's life

    def keep(self, prefix: Prefix, slot: int, num_tokens: int) -> None:
        """A prefill step was launched: after it, `num_tokens` tokens of the slot are written."""
        end = min(num_tokens // self._page_size, len(prefix.keys))
        for group in self._groups:
            kept = prefix.window_pages.setdefault(group, {})
            first = self._pages.first_of_slot(slot, group)
            begin = max(first, prefix.num_kept)
            pages = self._pages.of_slot(slot, group)[begin - first : max(end - first, 0)]
            self._pages.hold(pages, group)
            kept.update(enumerate(pages, begin))
        prefix.num_kept = max(prefix.num_kept, end)

    def publish(self, prefix: Prefix, slot: int, entries: dict[int, Entry]) -> None:
        """Gives the entries their pages. Keys are numbers of entries within the prefix."""
        for group in self._groups:
            kept = prefix.window_pages.setdefault(group, {})
            first = self._pages.first_of_slot(slot, group)
            held = self._pages.of_slot(slot, group)
            likely = (*prefix.ends, len(prefix.keys))  # published answers end with the prefix
            ends = [range(self._first_read(group, end), end) for end in likely]
            dropped = []
            for i, entry in entries.items():
                page = kept.pop(i, -1)
                if page < 0 and 0 <= i - first < len(held):  # decode steps wrote the page
                    page = held[i - first]
                    self._pages.hold([page], group)
                known = self.page_of(entry, group)
                if known >= 0 and page >= 0:  # the page was computed again: one copy is enough
                    dropped.append(page)
                page = page if known < 0 else known
                if page < 0:
                    continue
                is_end = entry in self._ends[group] or any(i in end for end in ends)
                self._inner[group].pop(entry, None)
                self._ends[group].pop(entry, None)
                (self._ends if is_end else self._inner)[group][entry] = page
            self._pages.drop(dropped, group)

    def end(self, prefix: Prefix) -> None:
        """Drops the pages of a prefix that are not published yet; they never will be."""
        for group, kept in prefix.window_pages.items():
            self._pages.drop(list(kept.values()), group)
        prefix.window_pages.clear()
        self._return_blocks(prefix)

    # ---- room

    def forget(self, entries: Sequence[Entry]) -> None:
        """Drops the pages of entries that have left the index."""
        for group in self._groups:
            found = [(self._ends[group].pop(e, -1), self._inner[group].pop(e, -1)) for e in entries]
            self._pages.drop([max(pages) for pages in found if max(pages) >= 0], group)
            for entry in entries:
                if entry in self._blocks[group]:
                    self._hosts[group].give(self._blocks[group].pop(entry))

    def evict(self, group: int, count: int) -> int:
        """Evicts `count` pages that no sequence has, or all if there are fewer.

        Evicting waits for the steps in flight. So at least EVICTED_AT_ONCE pages inside prompts are
        evicted, if there are so many.
        Returns the number of evicted pages.
        """
        found: list[int] = []
        most = max(count, EVICTED_AT_ONCE)
        for pages, wanted in ((self._inner[group], most), (self._ends[group], count)):
            idle = (e for e, page in pages.items() if self._pages.num_owners(page, group) == 1)
            chosen = list(itertools.islice(idle, max(wanted - len(found), 0)))
            if pages is self._ends[group]:
                self._save(group, chosen)
            found.extend(pages.pop(entry) for entry in chosen)
        self._pages.drop(found, group)
        return len(found)

    def _save(self, group: int, entries: Sequence[Entry]) -> None:
        """Copies pages to host blocks while there are blocks.

        The pages of later ends follow: a hit loads all pages from the first that the device lacks.
        """
        if self._hosts[group].limit == 0:
            return
        ends, known = self._ends[group], self._blocks[group]
        wanted = dict.fromkeys(entries)
        queue = list(entries)
        for entry in queue:  # the loop appends to it
            behind = [e for e in entry.children if e in ends and e not in wanted]
            wanted.update(dict.fromkeys(behind))
            queue.extend(behind)
        saved: dict[Entry, int] = {}
        for entry in wanted:
            if entry in known:
                known.move_to_end(entry)
        for entry in wanted:
            if entry not in known:
                block = self._take_block(group)
                if block < 0:
                    break
                saved[entry] = block
        if saved:
            blocks = self._hosts[group].blocks
            self._pages.save([ends[e] for e in saved], blocks, list(saved.values()), group)
        known.update(saved)

    def _take_block(self, group: int) -> int:
        """A host block: if none is free, that of the oldest page. -1: none."""
        block = self._hosts[group].take()
        if block < 0 and self._blocks[group]:
            block = self._blocks[group].popitem(last=False)[1]
        return block

    def _return_blocks(self, prefix: Prefix) -> None:
        """The blocks that `begin` took belong to their entries again."""
        for group, blocks in prefix.window_blocks.items():
            for entry, block in blocks.values():
                if entry.alive and entry not in self._blocks[group]:
                    self._blocks[group][entry] = block
                else:
                    self._hosts[group].give(block)
        prefix.window_blocks.clear()

    def _first_read(self, group: int, num_entries: int) -> int:
        return self._pages.first_read(group, num_entries * self._page_size)
