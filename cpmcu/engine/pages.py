"""Pages that sequences have in the engine, the prefix cache and the swap space.

`Leases` is the only caller of the cache and of the swap space. A sequence has a `Lease` from the
moment that it holds a slot: begin, reserve, sent, wrote, swap_out, swap_in, end.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from cpmcu.engine.prefix.base import CacheCounters, PageCache, Prefix
from cpmcu.engine.prefix.index import Entry
from cpmcu.engine.swap_space import Swapped, SwapSpace

if TYPE_CHECKING:
    from cpmcu import C
    from cpmcu.engine.request import Request


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """The cached part of a request's tokens."""

    tokens: list[int]  # tokens to prefill: the prompt; after a preemption also the output so far
    prefix: Prefix
    entries: list[Entry]


class Lease:
    """The pages and the slot of one sequence."""

    __slots__ = ("_cache", "_engine", "_found", "_leases", "_request", "_swapped", "cached", "slot")

    def __init__(self, leases: Leases, request: Request, found: Found) -> None:
        """Takes a slot that shares the cached pages. If the engine raises, nothing is held.

        `reserve` gives the slot its other pages.
        """
        self._leases, self._engine, self._cache = leases, leases.engine, leases.cache
        self._request = request
        self._found: Found | None = found
        # The sequence's pages in the swap space, if they are there.
        self._swapped: Swapped | None = None
        pages, cached = self._cache.begin(found.prefix, found.entries, len(found.tokens))
        try:
            self.slot = self._engine.add_sequence(
                request.sampling, request.prompt, request.tokens, pages, cached
            )
        except Exception:
            self._cache.release(found.prefix)
            raise
        self.cached = cached  # number of tokens that were found cached

    def reserve(self, num_tokens: int, step_end: int = 0) -> bool:
        """Takes pages for `num_tokens` tokens in all. Idle pages of the cache are evicted for them.

        `step_end`: tokens after the next step. Layers with a window get pages only for this step
        and for its window; the pages before the window are given back.

        False: too few pages can be had.
        """
        has_windows = self._leases.has_windows
        while not (
            self._engine.reserve(self.slot, num_tokens)
            and (not has_windows or self._engine.reserve_windows(self.slot, step_end))
        ):
            if not self._cache.make_room(self.slot, num_tokens, step_end):
                return False
        return True

    def reserve_windows(self, step_end: int) -> bool:
        """Takes the pages of the next step in layers with a window. The others are there already.

        False: too few pages can be had.
        """
        return not self._leases.has_windows or self.reserve(0, step_end)

    def reserve_prompt(self, num_tokens: int) -> bool:
        """Takes pages for a prompt and for what `restore` loads. False: too few can be had."""
        found = self._found
        end = 0 if found is None else self._cache.windows_end(found.prefix)
        return self.reserve(num_tokens, end)

    def restore(self) -> None:
        """Copies the cached pages that are in host memory. The slot has its pages already."""
        if self._found is not None:
            self._cache.restore(self._found.prefix, self.slot, len(self._found.tokens))

    def chunk_end(self, begin: int, end: int) -> int:
        """Where a prefill chunk of tokens [begin, end) ends: the cache may want it shorter."""
        if self._found is None:
            return end
        return self._cache.chunk_end(self._found.prefix, begin, end, len(self._found.tokens))

    def sent(self, num_tokens: int) -> None:
        """A prefill step was launched that ends behind `num_tokens` tokens of the sequence."""
        if self._found is not None:
            self._cache.sent(self._found.prefix, self.slot, num_tokens)

    def wrote(self, num_tokens: int) -> None:
        """Tells the cache that prefill steps have written the first `num_tokens` tokens."""
        if self._found is not None:
            self._cache.publish(self._found.prefix, self.slot, num_tokens)

    def swap_out(self, num_read: int) -> bool:
        """Moves the pages to the swap space. No step of the sequence may be in flight.

        False: they do not fit. The cache has forgotten the sequence in any case.
        """
        self._end_prefix(num_read)
        self._swapped = self._leases.swap.save(self.slot)
        return self._swapped is not None

    @property
    def num_swapped(self) -> int:
        """Pages of layers without a window in the swap space."""
        return 0 if self._swapped is None else self._swapped.num_pages

    def swap_in(self, num_tokens: int) -> bool:
        """Brings the pages back, with room for `num_tokens` tokens. False: too few are free."""
        if not self.reserve(num_tokens, num_tokens):
            return False
        assert self._swapped is not None
        self._leases.swap.load(self.slot, self._swapped)
        self._swapped = None
        return True

    def end(self, num_read: int) -> None:
        """Gives the slot and all pages back. Prefill has read `num_read` tokens."""
        if self._swapped is not None:
            self._leases.swap.forget(self._swapped)
            self._swapped = None
        self._end_prefix(num_read)
        self._engine.release(self.slot)

    def _end_prefix(self, num_read: int) -> None:
        """Lets the cache keep pages of a sequence that gives its pages up."""
        if self._found is not None:
            self._cache.end(self._found.prefix, self.slot, num_read, self._request)
        self._found = None


class Leases:
    """Makes leases. Used by the engine thread only."""

    def __init__(self, engine: C.Engine, page_size: int, cache: PageCache) -> None:
        self.engine, self.page_size, self.cache = engine, page_size, cache
        self.swap = SwapSpace(engine, cache.swaps)
        # Are there groups of layers with a window?
        self.has_windows = len(engine.pages.windows) > 1

    @property
    def num_spare(self) -> int:
        """Pages that are free or can be evicted."""
        return self.engine.num_free_pages + self.cache.num_idle_pages

    @property
    def chunk_unit(self) -> int:
        """Every chunk of a prompt but the last one has a multiple of this many tokens."""
        whole_pages = self.cache.has_states and self.engine.chunk_length >= self.page_size
        return self.page_size if whole_pages else 1

    def look_up(self, request: Request) -> Found | None:
        """The cached part of a request's tokens. None: wait, since more will be cached soon.

        If prompt scores are requested, no page is reused.
        """
        if request.lookup is not None and self.cache.still_waits(request.lookup):
            return None
        tokens = request.prompt + request.tokens
        if request.lookup is None:
            request.lookup = self.cache.prefix_of(tokens, request.cache_salt)
        prefix = request.lookup
        scored = request.num_prompt_logprobs is not None and not request.tokens
        entries = [] if scored else self.cache.match(prefix, len(tokens))
        if self.cache.must_wait(prefix, entries, len(tokens)):
            return None
        return Found(tokens, prefix, entries)

    def num_new(self, found: Found) -> int:
        """Spare pages that a sequence needs to begin."""
        return self.cache.num_new_pages(found.entries, len(found.tokens))

    def begin(self, request: Request, found: Found) -> Lease:
        """A lease for a request. Raises the errors of the engine."""
        request.lookup = None
        return Lease(self, request, found)

    def tick(self, launched: int, collected: int) -> bool:
        """Advances the copies that run beside the steps. True: it must be called again soon."""
        return self.cache.tick(launched, collected)

    def wait(self, seconds: float) -> None:
        """Waits up to `seconds` for reads of the disk. Call it only while no step runs."""
        self.cache.wait(seconds)

    def reset_cache(self) -> None:
        """Forgets all cached prompts."""
        self.cache.reset()

    def snapshot(self) -> CacheCounters | None:
        """Counters of the cache; None without one."""
        return self.cache.snapshot()

    def close(self) -> None:
        """Writes the pages that are not on disk yet, and frees the host memory."""
        self.cache.close()
