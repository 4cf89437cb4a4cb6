"""The interface of a cache of pages, and a cache that holds nothing."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

from cpmcu.engine.prefix.host import HostMemory
from cpmcu.engine.prefix.index import Entry

if TYPE_CHECKING:
    from cpmcu import C


class Sequenced(Protocol):
    """The data of a sequence that the cache reads: tokens, and which others may share its pages."""

    prompt: list[int]
    tokens: list[int]
    cache_salt: str


@dataclasses.dataclass(slots=True)
class CacheCounters:
    """Counters of the cache since its start, in tokens and pages."""

    queries: int = 0  # prompt tokens that were looked up
    hits: int = 0  # tokens among `queries` that were cached
    host_hits: int = 0  # tokens among `hits` that came from host memory
    disk_hits: int = 0  # tokens among `hits` that came from disk
    evicted: int = 0  # pages that left the device
    pages: int = 0  # pages that are on the device now, used or idle
    host_pages: int = 0
    disk_pages: int = 0


@dataclasses.dataclass(slots=True, eq=False)
class Prefix:
    """The state of one sequence in the cache."""

    keys: list[tuple[bytes, bytes]]  # (key, token ids) of each full page of its tokens
    # The cache's entries of its first pages, in order.
    entries: list[Entry] = dataclasses.field(default_factory=list)
    num_cached: int = 0  # tokens that were found cached
    known: int = 0  # pages that were found cached, those behind the last checkpoint included
    pending_begin: int = 0  # first page whose key is pending: this sequence will publish it
    pending_end: int = 0
    # Key that another running sequence will publish, for which this one waits.
    waits_for: bytes = b""
    # Keys of pages that are being read from disk for it; None: it has not asked.
    reading: list[bytes] | None = None
    epoch: int = 0  # number of resets of the cache before it began
    # Another prefix has the key of the next page, so no more pages are published.
    collided: bool = False
    # Number of pages before a state -> the host block of the state.
    states: dict[int, int] = dataclasses.field(default_factory=dict)
    # Group of layers with a window -> number of a page -> page, of pages to be published.
    window_pages: dict[int, dict[int, int]] = dataclasses.field(default_factory=dict)
    # Group -> number of a page -> (entry, host block), of pages to be loaded.
    window_blocks: dict[int, dict[int, tuple[Entry, int]]] = dataclasses.field(default_factory=dict)
    num_kept: int = 0  # pages before this number are in `window_pages`, published or lost
    # Entries of `entries` whose page another sequence uses. This sequence has its own copy of these
    # pages. It does not count as their user, so that they can be evicted.
    elsewhere: set[Entry] = dataclasses.field(default_factory=set)

    @property
    def ends(self) -> tuple[int, int]:
        """Pages after which another prompt is likely to go on: up to a branch, up to the end."""
        return self.known, self.pending_end


class PageCache:
    """A cache that holds nothing; PrefixCache overrides its methods. For the engine thread only.

    It owns the host memory of pages. `swaps` are the tiers of sequences that wait for pages, one
    for each group of layers.
    """

    def __init__(
        self, engine: C.Engine, page_size: int, *, host_bytes: int = 0, swap_bytes: int = 0
    ) -> None:
        """Limits of host memory: `host_bytes` for cached pages, `swap_bytes` for swapped ones."""
        self._engine = engine
        self._page_size = page_size
        # One host memory for each group of layers: their pages differ in size.
        groups = range(len(engine.pages.windows))
        sizes = [engine.pages.group_page_bytes(group) for group in groups]
        on_device = [size * engine.pages.num_pages(group) for group, size in enumerate(sizes)]
        self._memories = [HostMemory(engine, size) for size in sizes]
        whole = max(sum(on_device), 1)
        self._hosts = [
            memory.tier(host_bytes * part // whole, "the prefix cache")
            for memory, part in zip(self._memories, on_device)
        ]
        self._host = self._hosts[0]
        self.swaps = [
            memory.tier(swap_bytes * part // whole, "the swap space")
            for memory, part in zip(self._memories, on_device)
        ]

    @property
    def has_states(self) -> bool:
        """Does a prefix need a checkpoint of per-slot tensors in addition to its pages?"""
        return False

    @property
    def num_idle_pages(self) -> int:
        """Pages that can be evicted."""
        return 0

    def prefix_of(self, tokens: list[int], salt: str) -> Prefix:
        """The keys of a sequence that begins with `tokens`."""
        return Prefix([])

    def match(self, prefix: Prefix, num_tokens: int) -> list[Entry]:
        """The cached pages of a prompt.

        Its last token is always computed, so the page of that token is left out. From the
        first page that is not on the device, all pages are copied from host memory.
        """
        return []

    def must_wait(self, prefix: Prefix, matched: list[Entry], num_tokens: int) -> bool:
        """Will the page behind `matched` be cached soon?

        Yes if a running sequence computes it, or if the disk has it. In the second case, reading
        begins here.
        """
        return False

    def still_waits(self, prefix: Prefix) -> bool:
        """Does the prefix wait for the same pages as when `must_wait` was last asked?"""
        return False

    def num_new_pages(self, matched: list[Entry], num_tokens: int) -> int:
        """Number of pages, free or idle, that a sequence beginning with `matched` must take."""
        in_use = sum(entry.users > 0 and entry.page >= 0 for entry in matched)
        return -(-num_tokens // self._page_size) - in_use

    def begin(
        self, prefix: Prefix, matched: list[Entry], num_tokens: int
    ) -> tuple[list[tuple[int, list[int]]], int]:
        """Starts a sequence with the entries `matched`.

        Returns the pages that it shares in each group of layers, as (number of the first page,
        pages), and the number of its cached tokens.
        """
        return [], 0

    def windows_end(self, prefix: Prefix) -> int:
        """Tokens up to which `restore` needs pages of layers with a window; 0: it needs none."""
        return 0

    def restore(self, prefix: Prefix, slot: int, num_tokens: int) -> None:
        """Copies cached pages from host memory to the slot's pages.

        `num_tokens`: length of the prompt. The slot has its pages already.
        """

    def sent(self, prefix: Prefix, slot: int, num_tokens: int) -> None:
        """A prefill step was launched that ends behind `num_tokens` tokens of the sequence."""

    def chunk_end(self, prefix: Prefix, begin: int, end: int, num_tokens: int) -> int:
        """Where a chunk of tokens [begin, end) ends, of a prompt of `num_tokens`.

        Returns `begin` if the chunk must be larger.
        """
        return end

    def publish(self, prefix: Prefix, slot: int, num_written: int, *, ended: bool = False) -> None:
        """Publishes the pages of the first `num_written` tokens, which prefill has written.

        While the sequence runs, pages to which the draft may still write are not published.
        """

    def end(self, prefix: Prefix, slot: int, num_read: int, request: Sequenced) -> None:
        """Ends a sequence of which prefill has read `num_read` tokens.

        Call it before the slot is released.
        """

    def release(self, prefix: Prefix) -> None:
        """Ends the sequence's use of the cache."""

    def make_room(self, slot: int, num_tokens: int, step_end: int) -> bool:
        """Evicts pages so that the slot may hold `num_tokens` tokens, and windows up to `step_end`.

        False: no page can be evicted.
        """
        return False

    def tick(self, launched: int, collected: int) -> bool:
        """Advances the copies that run beside the steps. `launched`, `collected`: numbers of steps.

        True: it must be called again soon.
        """
        return False

    def wait(self, seconds: float) -> None:
        """Waits up to `seconds` for reads of the disk. Call it only while no step runs."""

    def reset(self) -> None:
        """Forgets everything, on disk too. Running sequences keep their pages, unpublished."""

    def snapshot(self) -> CacheCounters | None:
        """The counters, and the pages of each tier now. None: nothing is ever cached."""
        return None

    def close(self) -> None:
        """Writes the pages that are not on disk yet, and frees the host memory."""
        for memory in self._memories:
            memory.close()
