"""The disk tier with an engine that records its calls: what is read when, and where it goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cpmcu.engine.prefix.disk_tier import FREE_PAGES, DiskTier, digest_of
from cpmcu.engine.prefix.index import Entry, PrefixIndex
from tests.unit.prefix_pages import PAGE, file_of, identity, open_store, pattern


class Engine:
    """Records the calls of the tier. Pages are numbers from 100 on; `pages` is itself."""

    def __init__(self, num_pages: int) -> None:
        self.free = list(range(100, 100 + num_pages))
        self.has_copies = False
        self.calls: list[str] = []
        self.contents: dict[int, bytes] = {}

    @property
    def num_free_pages(self) -> int:
        return len(self.free)

    @property
    def pages(self) -> Engine:
        return self

    def take(self, most: int) -> list[int]:
        taken, self.free = self.free[:most], self.free[most:]
        return taken

    def load(self, pages: list[int], blocks: dict[int, bytearray], places: list[int]) -> None:
        self.calls.append("load")
        self.has_copies = True
        for page, block in zip(pages, places):
            self.contents[page] = bytes(blocks[block])

    def wait_for_copies(self) -> None:
        self.calls.append("wait")
        self.has_copies = False


class Host:
    """Host memory of `count` blocks."""

    def __init__(self, count: int) -> None:
        self.blocks = {number: bytearray(PAGE) for number in range(count)}
        self.free = list(self.blocks)
        self.is_calm = False

    def take(self) -> int:
        return self.free.pop(0) if self.free else -1

    def give(self, block: int) -> None:
        self.free.append(block)

    def view(self, block: int) -> memoryview:
        return memoryview(self.blocks[block])


class Tier(DiskTier):
    """A tier behind a fake engine, and the chain of pages 1 to `count` on its disk."""

    def __init__(self, folder: Path, count: int, num_pages: int, num_blocks: int = 100) -> None:
        super().__init__(open_store(folder, state_bytes=0))
        self.engine, self.host, self.index = Engine(num_pages), Host(num_blocks), PrefixIndex()
        self.keys = [(identity(number)[0], identity(number)[2]) for number in range(1, count + 1)]
        engine: Any = self.engine
        host: Any = self.host
        none: Any = Host(0)
        self.bind(engine, self.index, host, none, host.take, none.take, lambda entry: None)
        chain: Entry | None = None
        for number, (key, tokens) in enumerate(self.keys, 1):
            self._store.write(key, digest_of(chain), tokens, pattern(number, PAGE))
            chain = Entry(key, chain, tokens)

    def read_all(self) -> list[Entry]:
        """Reads the chain. Returns its entries."""
        found = self.begin_reading(self.keys, None)
        while self.tick(0, 0):
            self.wait(0.1)
        assert len(found) <= len(self.keys)
        return self.index.match(self.keys)

    def holds(self, entry: Entry, number: int) -> bool:
        """Has the entry the bytes of page `number`, wherever it says that it has them?"""
        expected = bytes(pattern(number, PAGE))
        return (entry.block < 0 or self.host.blocks[entry.block] == expected) and (
            entry.page < 0 or self.engine.contents[entry.page] == expected
        )


@pytest.mark.parametrize("count", [1, 3, 4, 5, 23])
def test_pages_go_on_to_the_device(tmp_path: Path, count: int) -> None:
    tier = Tier(tmp_path, count, num_pages=count + FREE_PAGES)
    entries = tier.read_all()
    assert len(entries) == tier.num_read == count
    assert all(entry.page >= 0 and entry.block >= 0 and entry.locks == 0 for entry in entries)
    assert all(tier.holds(entry, number) for number, entry in enumerate(entries, 1))
    assert tier.index.oldest_pages(count) == entries[::-1]  # prefixes shrink from their end
    tier.close()


@pytest.mark.parametrize("free", [0, 5, FREE_PAGES, FREE_PAGES + 7])
def test_a_full_device_keeps_its_pages(tmp_path: Path, free: int) -> None:
    tier = Tier(tmp_path, 20, num_pages=free)
    entries = tier.read_all()
    on_device = max(0, free - FREE_PAGES)
    assert [entry.page >= 0 for entry in entries] == [True] * on_device + [False] * (20 - on_device)
    assert all(tier.holds(entry, number) for number, entry in enumerate(entries, 1))
    assert tier.engine.num_free_pages == free - on_device
    tier.close()


@pytest.mark.parametrize("bad", [1, 7, 20])
def test_nothing_goes_to_the_device_behind_a_damaged_page(
    tmp_path: Path, bad: int, caplog: pytest.LogCaptureFixture
) -> None:
    tier = Tier(tmp_path, 20, num_pages=100)
    path = file_of(tmp_path, bad)
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    entries = tier.read_all()
    assert [entry.page >= 0 for entry in entries] == [True] * (bad - 1) + [False] * (21 - bad)
    assert entries[bad - 1].block < 0 and not entries[bad - 1].on_disk
    assert "checksum of the page" in caplog.text
    tier.close()


def test_later_pages_wait_for_earlier_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are read in any order, but a page on the device has its parent there."""
    tier = Tier(tmp_path, 8, num_pages=100)
    tasks: list[Any] = []
    monkeypatch.setattr(tier._threads, "submit", lambda function, reads: tasks.append(reads))
    tier.begin_reading(tier.keys, None)
    first, second = tasks
    assert tier.host.is_calm
    tier._read_pages(second)
    assert tier.tick(0, 0)
    entries = tier.index.match(tier.keys)
    assert [entry.block >= 0 for entry in entries] == [False] * 4 + [True] * 4
    assert all(entry.page < 0 for entry in entries)
    tier._read_pages(first)
    assert not tier.tick(0, 0)
    assert all(entry.page >= 0 for entry in entries)
    assert tier.index.oldest_pages(8) == entries[::-1]
    assert not tier.host.is_calm
    tier.close()


def test_copies_are_done_before_a_read_fills_host_memory(tmp_path: Path) -> None:
    tier = Tier(tmp_path, 6, num_pages=100)
    entries = tier.read_all()
    assert tier.engine.calls[-1] == "load"
    for entry in entries:  # other prompts take the memory
        tier.index.set_page(entry, -1)
        tier.host.give(entry.block)
        tier.index.set_block(entry, -1)
    tier.engine.calls.clear()
    tier.begin_reading(tier.keys, None)
    assert tier.engine.calls == ["wait"]
    tier.close()


def test_too_little_host_memory_reads_the_first_pages(tmp_path: Path) -> None:
    tier = Tier(tmp_path, 20, num_pages=100, num_blocks=6)
    assert len(tier.read_all()) == 6
    tier.close()


def test_an_error_of_a_thread_is_a_page_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = Tier(tmp_path, 5, num_pages=100)
    read_found = tier._store.read_found

    def fail_at_the_third(key: bytes, *rest: Any) -> tuple[bool, bool]:
        if key == tier.keys[2][0]:
            raise KeyError("a bug")
        return read_found(key, *rest)

    monkeypatch.setattr(tier._store, "read_found", fail_at_the_third)
    entries = tier.read_all()
    assert [entry.page >= 0 for entry in entries] == [True, True, False, False, False]
    assert "a page could not be read" in caplog.text
    tier.close()
