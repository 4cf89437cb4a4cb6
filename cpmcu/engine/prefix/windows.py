"""Cached pages of layers with a window, of one model.

A hit of L tokens needs all pages before L of layers without a window, but only the last ones of
layers with a window. So a prompt's other pages of such layers are evicted first, the oldest
ones before others. A hit is shortened to a length whose pages exist.

A running sequence gives pages before its window back before prefill has written the last token of
its chunk. So the cache becomes an owner of a page as soon as the step that writes it is launched.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cpmcu import C
    from cpmcu.engine.prefix.base import Prefix
    from cpmcu.engine.prefix.index import Entry

EVICTED_AT_ONCE = 8  # pages


class WindowPages:
    """The pages of entries in the groups of layers with a window. For the engine thread only.

    An engine without such layers has no groups: then all methods do nothing.
    """

    def __init__(self, engine: C.Engine, page_size: int) -> None:
        self._pages = engine.pages
        self._page_size = page_size
        self._groups = range(1, len(engine.pages.windows))
        # Pages by group and entry, the oldest first: those to be evicted first, and those before
        # the end of a prompt or before a place where prompts branched.
        self._inner: list[OrderedDict[Entry, int]] = [OrderedDict() for _ in engine.pages.windows]
        self._ends: list[OrderedDict[Entry, int]] = [OrderedDict() for _ in engine.pages.windows]

    # ---- hits

    def hit_ends(self, entries: Sequence[Entry]) -> list[bool]:
        """Item n: do the first n entries have all pages that a hit of n entries needs?"""
        can_end = [True] * (len(entries) + 1)
        for group in self._groups:
            begin = 0  # the first of the adjacent entries that have a page
            for count, entry in enumerate(entries, 1):
                if self.page_of(entry, group) < 0:
                    begin = count
                can_end[count] &= begin <= self._first_read(group, count)
        return can_end

    def begin(self, entries: Sequence[Entry]) -> list[tuple[int, list[int]]]:
        """The pages of each group that a sequence behind `entries` reads: (first entry, pages)."""
        found = []
        for group in self._groups:
            first = self._first_read(group, len(entries))
            found.append((first, [self.page_of(entry, group) for entry in entries[first:]]))
            for entry in entries[first:]:
                self._inner[group].pop(entry, None)
                self._ends[group].pop(entry, None)
            self._ends[group].update(zip(entries[first:], found[-1][1]))
        return found

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
        """Gives the entries their pages. `entries`: by their number within the prefix."""
        for group in self._groups:
            kept = prefix.window_pages.setdefault(group, {})
            first = self._pages.first_of_slot(slot, group)
            held = self._pages.of_slot(slot, group)
            likely = (*prefix.ends, len(prefix.keys))  # the last end: of published answers
            ends = [range(self._first_read(group, end), end) for end in likely]
            dropped = []
            for i, entry in entries.items():
                page = kept.pop(i, -1)
                if page < 0 and 0 <= i - first < len(held):  # written by decode steps
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
        """Nothing more is published of a prefix."""
        for group, kept in prefix.window_pages.items():
            self._pages.drop(list(kept.values()), group)
        prefix.window_pages.clear()

    # ---- room

    def forget(self, entries: Sequence[Entry]) -> None:
        """The entries have left the index."""
        for group in self._groups:
            found = [(self._ends[group].pop(e, -1), self._inner[group].pop(e, -1)) for e in entries]
            self._pages.drop([max(pages) for pages in found if max(pages) >= 0], group)

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
            for entry in list(itertools.islice(idle, max(wanted - len(found), 0))):
                found.append(pages.pop(entry))
        self._pages.drop(found, group)
        return len(found)

    def _first_read(self, group: int, num_entries: int) -> int:
        return self._pages.first_read(group, num_entries * self._page_size)
