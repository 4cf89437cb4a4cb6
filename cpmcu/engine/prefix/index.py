"""The index of cached pages: their places and the order of eviction. Uses no device and no threads.

An entry is a full page of tokens; its parent is the page before it. The entry's bytes may lie on
the device (`page`), in host memory (`block`) and on disk at the same time. The index finds an entry
by its key, then compares token ids and parent: equal keys of unequal prefixes never match.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator


@dataclasses.dataclass(slots=True, eq=False)
class Entry:
    """A full page of one prefix."""

    key: bytes
    parent: Entry | None  # the entry of the page before; None: this page is the first
    tokens: bytes  # its token ids as bytes
    page: int = -1  # number of its page on the device; -1: it is not there
    block: int = -1  # number of its block in host memory; -1: it is not there
    state: int = -1  # host block of the per-slot state behind its last token; -1: there is none
    on_disk: bool = False
    users: int = 0  # number of sequences whose prefix it belongs to
    locks: int = 0  # number of reads and writes of the disk that need its block
    # Digest of all tokens up to its last: a chain of BLAKE2b, made when asked for.
    digest: bytes = b""
    alive: bool = True  # False: the index no longer has it
    children: set[Entry] = dataclasses.field(default_factory=set)


class PrefixIndex:
    """Entries by key, and the order in which idle entries are evicted.

    The last page of a prefix counts as older than the pages before it, so prefixes shrink from
    their end.
    """

    def __init__(self) -> None:
        self._entries: dict[bytes, Entry] = {}
        # Entries that no sequence uses and that are on the device, the oldest first.
        self._idle_pages: OrderedDict[bytes, Entry] = OrderedDict()
        self._blocks: OrderedDict[bytes, Entry] = OrderedDict()
        # Entries with a state: those within prompts are evicted before those at a prompt's end.
        self._inner_states: OrderedDict[bytes, Entry] = OrderedDict()
        self._end_states: OrderedDict[bytes, Entry] = OrderedDict()
        self.num_pages = 0  # number of entries that are on the device

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    @property
    def num_idle_pages(self) -> int:
        """Device pages that no sequence uses: they can be evicted."""
        return len(self._idle_pages)

    def find(self, key: bytes, parent: Entry | None, tokens: bytes) -> Entry | None:
        """Returns the entry of these tokens behind `parent`."""
        entry = self._entries.get(key)
        if entry is None or entry.parent is not parent or entry.tokens != tokens:
            return None
        return entry

    def match(self, keys: Iterable[tuple[bytes, bytes]]) -> list[Entry]:
        """The longest known prefix: its entries in order."""
        found: list[Entry] = []
        parent: Entry | None = None
        for key, tokens in keys:
            entry = self.find(key, parent, tokens)
            if entry is None:
                break
            found.append(entry)
            parent = entry
        return found

    def add(self, key: bytes, parent: Entry | None, tokens: bytes) -> Entry | None:
        """Returns the entry of these tokens, which is made if there is none.

        Returns None if other tokens have the same key.
        """
        entry = self.find(key, parent, tokens)
        if entry is None and key not in self._entries:
            entry = Entry(key, parent, tokens)
            self._entries[key] = entry
            if parent is not None:
                parent.children.add(entry)
        return entry

    def use(self, entries: Iterable[Entry]) -> None:
        """Marks the entries as used by one more sequence; their pages are not idle."""
        for entry in entries:
            entry.users += 1
            self._idle_pages.pop(entry.key, None)

    def unuse(self, entries: list[Entry]) -> list[Entry]:
        """Ends the use of `entries` by a sequence.

        Returns entries that left the index meanwhile and have no user; the caller frees their
        pages.
        """
        dropped: list[Entry] = []
        for entry in reversed(entries):  # the last page is evicted first
            entry.users -= 1
            if entry.users > 0:
                continue
            if not entry.alive:
                dropped.append(entry)
            elif entry.page >= 0:
                self._idle_pages[entry.key] = entry
            if entry.alive and entry.block >= 0:
                self._blocks.move_to_end(entry.key)
        for entry in entries:  # the last state becomes the newest
            for states in (self._inner_states, self._end_states):
                if entry.key in states:
                    states.move_to_end(entry.key)
        return dropped

    def set_page(self, entry: Entry, page: int) -> None:
        """Sets the device page that holds the entry's data; -1: none."""
        if entry.alive:
            self.num_pages += (page >= 0) - (entry.page >= 0)
        entry.page = page
        if page < 0:
            self._idle_pages.pop(entry.key, None)
        elif entry.users == 0:
            self._idle_pages[entry.key] = entry

    def set_block(self, entry: Entry, block: int) -> None:
        """Sets the host block that holds the entry's data; -1: none."""
        entry.block = block
        if block < 0:
            self._blocks.pop(entry.key, None)
        else:
            self._blocks[entry.key] = entry

    def set_state(self, entry: Entry, state: int, *, at_end: bool = False) -> None:
        """Sets the host block of the entry's per-slot state; -1: none.

        `at_end`: a longer prompt is likely to begin here, as at the end of a prompt.
        """
        entry.state = state
        self._inner_states.pop(entry.key, None)
        self._end_states.pop(entry.key, None)
        if state >= 0 and entry.alive:
            (self._end_states if at_end else self._inner_states)[entry.key] = entry

    def oldest_state(self, own: Iterable[Entry], *, at_end: bool) -> Entry | None:
        """The entry whose state goes first. None: all are in use, or more valuable.

        `at_end`: a state at the end of a prompt asks for the room. It may replace those within its
        prompt, whose entries are `own`, and the oldest of its kind.
        """
        idle = (e for e in self._inner_states.values() if e.users == 0 and e.locks == 0)
        found = next(idle, None)
        if found is None and at_end:
            mine = (e for e in own if e.users == 1 and e.locks == 0 and e.key in self._inner_states)
            ends = (e for e in self._end_states.values() if e.users == 0 and e.locks == 0)
            found = next(itertools.chain(mine, ends), None)
        return found

    def oldest_pages(self, count: int) -> list[Entry]:
        """Up to `count` idle entries with device pages, the oldest first."""
        found: list[Entry] = []
        for entry in self._idle_pages.values():
            if len(found) == count:
                break
            found.append(entry)
        return found

    def oldest_unsaved(self, count: int) -> list[Entry]:
        """Up to `count` idle entries that have no host block, the oldest first."""
        unsaved = (entry for entry in self._idle_pages.values() if entry.block < 0)
        return list(itertools.islice(unsaved, count))

    def oldest_block(self) -> Entry | None:
        """The oldest entry whose host block is not in use."""
        for entry in self._blocks.values():
            if entry.locks == 0 and (entry.users == 0 or entry.page >= 0):
                return entry
        return None

    def remove(self, entry: Entry) -> list[Entry]:
        """Removes an entry and all entries that follow it. Returns them, the entry first."""
        removed = [entry]
        for found in removed:
            removed.extend(found.children)
            found.children.clear()
            self.num_pages -= found.alive and found.page >= 0
            found.alive = False
            if self._entries.get(found.key) is found:
                del self._entries[found.key]
                self._idle_pages.pop(found.key, None)
                self._blocks.pop(found.key, None)
                self._inner_states.pop(found.key, None)
                self._end_states.pop(found.key, None)
        if entry.parent is not None:
            entry.parent.children.discard(entry)
        return removed
