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
from tests.engine.harness import sampling

PAGE = 64


class Job:
    """One request and what became of it."""

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
        self._room = C.HostBlocks(engine, engine.pages.page_bytes, 1, 1)
        self._room.grow()
        self._sums: dict[int, tuple[Entry, int]] = {}  # page -> what it must hold

    def _sum(self, page: int) -> int:
        self._engine.pages.save([page], self._room, [0])
        self._engine.pages.wait_for_copies()
        return xxhash.xxh3_64_intdigest(self._room.view(0))

    def publish(self, prefix: Any, slot: int, num_written: int, *, ended: bool = False) -> None:
        super().publish(prefix, slot, num_written, ended=ended)
        for entry in prefix.entries:
            known = self._sums.get(entry.page)
            if entry.page >= 0 and (known is None or known[0] is not entry):
                self._sums[entry.page] = (entry, self._sum(entry.page))

    def check(self) -> int:
        """Compares all cached pages with their published bytes. Returns the number of pages."""
        count = 0
        for page, (entry, expected) in list(self._sums.items()):
            if entry.page == page and entry.alive:
                assert self._sum(page) == expected, "a shared page was written to"
                count += 1
        return count


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
    blocks = [entry.block for entry in entries if entry.block >= 0]
    assert len(set(blocks)) == len(blocks)
    cache.reset()
    assert engine.num_free_pages == engine.num_pages
