"""Runs requests through the engine thread with a prefix cache, and watches its pages."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import xxhash

from cpmcu.engine.detokenizer import Detokenizer
from cpmcu.engine.prefix.cache import PrefixCache
from cpmcu.engine.prefix.index import Entry
from cpmcu.engine.request import Request
from cpmcu.engine.runner import Runner
from cpmcu.engine.stopping import StopStrings, StopTokens
from cpmcu.spec_metrics import AcceptanceCounter
from tests.engine.drafted import SAMPLINGS, Models
from tests.engine.harness import sampling

PAGE = 64


class Job:
    """One request and its results."""

    def __init__(
        self,
        prompt: Sequence[int],
        count: int,
        salt: str = "",
        scores: int | None = None,
        acceptance: AcceptanceCounter | None = None,
        **fields: Any,
    ) -> None:
        self.items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.before_item: Callable[[], object] = lambda: None  # on the engine thread
        self.request = Request(
            list(prompt),
            sampling(max_tokens=count, **fields),
            detokenizer=Detokenizer(lambda ids: "x" * len(ids), list(prompt)),
            stop_strings=StopStrings(()),
            stop_tokens=StopTokens((), (), count),
            max_tokens=count,
            emit=self._emit,
            cache_salt=salt,
            prompt_logprobs=scores,
            acceptance=acceptance,
        )

    def _emit(self, item: Any) -> None:
        self.before_item()
        self.items.put(item)

    def wait(self) -> list[int]:
        while True:
            item = self.items.get(timeout=60)
            if isinstance(item, Exception):
                raise item
            if item.finish_reason is not None:
                return list(self.request.tokens)


class Watched(PrefixCache):
    """A prefix cache that records the bytes of published pages.

    Tests check that no step changes them.
    """

    def __init__(self, engine: Any, **options: Any) -> None:
        from cpmcu import C

        super().__init__(engine, PAGE, **options)
        self._rooms = []
        for group in range(len(engine.pages.windows)):
            size = max(engine.pages.group_page_bytes(group), 1)
            self._rooms.append(C.HostBlocks(engine, size, 1, 1))
            self._rooms[-1].grow()
        self._sums: dict[tuple[int, int], tuple[Entry, int]] = {}  # group, page -> what it holds

    def _sum(self, group: int, page: int) -> int:
        self._engine.pages.save([page], self._rooms[group], [0], group)
        self._engine.pages.wait_for_copies()
        return xxhash.xxh3_64_intdigest(self._rooms[group].view(0))

    def _page(self, entry: Entry, group: int) -> int:
        return self._windows.page_of(entry, group) if group else entry.page

    def publish(self, prefix: Any, slot: int, num_written: int, *, ended: bool = False) -> None:
        super().publish(prefix, slot, num_written, ended=ended)
        for entry in prefix.entries:
            for group in range(len(self._rooms)):
                page = self._page(entry, group)
                known = self._sums.get((group, page))
                if page >= 0 and (known is None or known[0] is not entry):
                    self._sums[group, page] = (entry, self._sum(group, page))

    def check(self) -> int:
        """Compares all cached pages with their published bytes. Returns the number of pages."""
        count = 0
        for (group, page), (entry, expected) in list(self._sums.items()):
            if entry.alive and self._page(entry, group) == page:
                assert self._sum(group, page) == expected, "a shared page was written to"
                count += 1
        return count

    def window_pages(self, group: int) -> list[int]:
        """Returns the pages of a group that belong to entries of the index."""
        pages = [self._page(entry, group) for entry in self._index]
        return [page for page in pages if page >= 0]


@contextmanager
def running(engine: Any, swap_bytes: int = 0, **options: Any) -> Iterator[tuple[Runner, Watched]]:
    """A runner with a watched cache. At the end, checks that no page is lost."""
    cache = Watched(engine, swap_bytes=swap_bytes, **options)
    runner = Runner(engine, page_size=PAGE, cache=cache)
    try:
        yield runner, cache
        runner.call(lambda e: check_idle(e, cache))
    finally:
        runner.close()


def check_idle(engine: Any, cache: Watched) -> None:
    """No sequence runs: every page is free or idle in the cache, and none has changed."""
    cache.check()
    entries = list(cache._index)
    assert all(entry.users == 0 for entry in entries)
    pages = [entry.page for entry in entries if entry.page >= 0]
    assert len(set(pages)) == len(pages) == cache.num_idle_pages
    assert engine.num_free_pages == engine.num_pages - len(pages)
    assert not cache._pending
    idle = engine.pages.num_pages(0) - engine.num_pages  # pages of the idle slot
    blocks = [entry.block for entry in entries if entry.block >= 0]
    assert len(set(blocks)) == len(blocks)
    for group in range(1, len(engine.pages.windows)):
        pages = cache.window_pages(group)
        assert len(set(pages)) == len(pages)
        assert num_free(engine, group) == engine.pages.num_pages(group) - idle - len(pages)
    cache.reset()
    assert engine.num_free_pages == engine.num_pages
    for group in range(1, len(engine.pages.windows)):
        assert num_free(engine, group) == engine.pages.num_pages(group) - idle


def num_free(engine: Any, group: int) -> int:
    """Free pages of a group of layers with a window. No step is in flight."""
    pages = engine.pages.take(engine.pages.num_pages(group), group)
    engine.pages.drop(pages, group)
    return len(pages)


def check_batch(
    engine: Any, models: Models, family: str, prompts: Sequence[list[int]], count: int
) -> None:
    """Requests side by side, with all kinds of sampling, have the tokens of plain decoding."""
    names = list(SAMPLINGS)
    cases = [(ids, SAMPLINGS[names[i % len(names)]]) for i, ids in enumerate(prompts)]
    with running(engine) as (runner, _):
        jobs = [Job(ids, count, **fields) for ids, fields in cases]
        runner.submit(*(job.request for job in jobs))
        for job, (ids, fields) in zip(jobs, cases, strict=True):
            assert job.wait() == models.plain(family, ids, count, **fields)
