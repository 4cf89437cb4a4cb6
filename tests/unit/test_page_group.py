"""Pages of layers with a window, against a slow and obvious model; how groups share the memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.reference.engines import extension_or_skip

extension_or_skip()

PAGE = 64
SLOTS = 3
MOST_AHEAD = 150  # entries that a step writes


def make_group(window: int, num_pages: int, num_slots: int = SLOTS) -> Any:
    from cpmcu import C

    return C.PageGroup(window, num_pages, num_slots)


def entries_read(window: int, length: int, end: int) -> set[int]:
    """The entries below `end` that tokens at positions `length` and later see."""
    return {
        entry
        for position in range(length, end)
        for entry in range(position + 1)
        if window == 0 or entry > position - window
    }


class GroupAndModel(RuleBasedStateMachine):
    """Sequences of one group. A step reads the pages that its slots have when it is launched."""

    @initialize(
        window=st.sampled_from([0, 1, 2, 63, 64, 65, 127, 128, 129, 300]),
        num_pages=st.integers(0, 12),
    )
    def start(self, window: int, num_pages: int) -> None:
        self.window, self.num_pages = window, num_pages
        self.group = make_group(window, num_pages)
        self.lengths = [0] * SLOTS
        self.held: list[dict[int, int]] = [{} for _ in range(SLOTS)]  # number -> page
        self.cached: list[int] = []  # pages that the cache owns, once or several times
        self.reads: list[set[int]] = []  # pages that each launched step reads
        self.done = 0

    def owners(self, page: int) -> int:
        return sum(page in held.values() for held in self.held) + self.cached.count(page)

    def busy(self) -> set[int]:
        return {page for read in self.reads[self.done :] for page in read}

    @rule(slot=st.integers(0, SLOTS - 1), ahead=st.integers(1, MOST_AHEAD))
    def reserve_and_launch(self, slot: int, ahead: int) -> None:
        length = self.lengths[slot]
        end = length + ahead
        numbers = {entry // PAGE for entry in entries_read(self.window, length, end)}
        before = dict(self.held[slot])
        self.group.pool.retire(self.done)
        if not self.group.reserve(slot, length, end, len(self.reads)):
            self.look(slot)  # pages before the window may be gone, but none is new
            assert self.held[slot].items() <= before.items()
            free = self.num_pages - sum(self.owners(page) > 0 for page in range(self.num_pages))
            lacking = len([n for n in numbers if n not in self.held[slot]]) - free
            assert self.group.num_missing(slot, length, end) == max(lacking, 0)
            return
        self.look(slot)
        assert self.group.num_missing(slot, length, end) == 0
        held = self.held[slot]
        assert numbers <= held.keys()
        if self.window:
            last = max(end, *(PAGE * (n + 1) for n in before), 0) if before else end
            assert min(held) == min(numbers)  # nothing before the window
            assert len(held) <= self.group.most_pages(last - length)
        assert all(before.get(number, page) == page for number, page in held.items())
        new = {page for number, page in held.items() if number not in before}
        assert not new & self.busy()
        self.reads.append(set(held.values()))

    def look(self, slot: int) -> None:
        first, pages = self.group.of_slot(slot)
        self.held[slot] = dict(enumerate(pages, first))

    @rule(slot=st.integers(0, SLOTS - 1), count=st.integers(1, MOST_AHEAD))
    def accept(self, slot: int, count: int) -> None:
        """The sequence grows within its pages."""
        if self.held[slot]:
            room = PAGE * (max(self.held[slot]) + 1) - self.lengths[slot]
            self.lengths[slot] += min(count, room)

    @rule(slot=st.integers(0, SLOTS - 1))
    def cache(self, slot: int) -> None:
        for page in self.held[slot].values():
            self.group.pool.share(page)
            self.cached.append(page)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.cached))
        self.group.pool.release(page, len(self.reads))
        self.cached.remove(page)

    @precondition(lambda self: self.cached)
    @rule(slot=st.integers(0, SLOTS - 1), data=st.data())
    def begin_with_cached_pages(self, slot: int, data: st.DataObject) -> None:
        self.release(slot)
        pages = sorted(set(data.draw(st.lists(st.sampled_from(self.cached), max_size=4))))
        first = data.draw(st.integers(0, 5)) if self.window else 0
        end = PAGE * (first + len(pages))
        if self.group.first_read(end) != first:
            return
        self.group.share(slot, first, pages)
        self.lengths[slot] = end
        self.held[slot] = dict(enumerate(pages, first))

    @rule(slot=st.integers(0, SLOTS - 1))
    def release(self, slot: int) -> None:
        self.group.release(slot, len(self.reads))
        self.held[slot], self.lengths[slot] = {}, 0

    @precondition(lambda self: self.done < len(self.reads))
    @rule()
    def finish_a_step(self) -> None:
        self.done += 1

    @invariant()
    def owners_agree(self) -> None:
        for page in range(self.num_pages):
            assert self.group.pool.num_owners(page) == self.owners(page)

    def teardown(self) -> None:
        for slot in range(SLOTS):
            self.release(slot)
        for page in self.cached:
            self.group.pool.release(page, len(self.reads))
        self.group.pool.retire(len(self.reads))
        assert self.group.pool.num_free == self.num_pages


GroupAndModel.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestPageGroup = GroupAndModel.TestCase


@pytest.mark.parametrize("window", [1, 64, 65, 1000])
def test_a_long_sequence_needs_few_pages(window: int) -> None:
    step = 17
    most = make_group(window, 0).most_pages(step)
    assert most <= math.ceil((window + step) / PAGE) + 1
    group = make_group(window, most)
    for length in range(0, 20 * (window + PAGE), step):
        if not group.reserve(0, length, length + step, length):
            group.pool.retire(length)  # the page before the window was read by earlier steps
            assert group.reserve(0, length, length + step, length)


@pytest.mark.parametrize("window", [0, 1, 2, 63, 64, 65, 130])
def test_first_read(window: int) -> None:
    group = make_group(window, 0)
    for length in (0, 1, 62, 63, 64, 65, 127, 128, 129, 200, 260):
        read = entries_read(window, length, length + 1)
        assert group.first_read(length) == min(read) // PAGE


COUNTS = st.integers(0, 60)
DEMANDS = st.lists(
    st.tuples(st.integers(1, 9), COUNTS, COUNTS, COUNTS, COUNTS).map(
        lambda t: (t[0], t[1], t[1] + t[2], t[1] + t[2] + t[3], t[1] + t[2] + t[3] + t[4])
    ),
    min_size=1,
    max_size=4,
)


@given(groups=DEMANDS, spare=st.integers(0, 2000))
@settings(deadline=None)
def test_groups_share_the_memory(groups: list[tuple[int, ...]], spare: int) -> None:
    from cpmcu import C

    rest = spare
    shares = [group[1] for group in groups]

    def give(i: int, wanted: int) -> None:
        """Gives one page after another, up to `wanted`, while memory lasts."""
        nonlocal rest
        while shares[i] < wanted and rest >= groups[i][0]:
            shares[i] += 1
            rest -= groups[i][0]

    def give_windows(column: int, most_bytes: int) -> None:
        pages = most_bytes // max(sum(group[0] for group in groups[1:]), 1)
        for i in range(1, len(groups)):
            give(i, min(groups[i][column], shares[i] + pages))

    give_windows(3, rest // 2)  # windows of running sequences
    give(0, groups[0][2])  # the longest sequence
    give_windows(3, rest)
    give_windows(4, rest // 4)  # windows of cached prompts
    give(0, groups[0][4])
    total = sum(group[0] * group[1] for group in groups) + spare
    assert C.divide_pages(groups, total) == shares
    assert shares[0] == groups[0][4] or rest < groups[0][0]  # no memory is lost


@given(size=st.integers(1, 9), least=COUNTS, more=COUNTS, spare=st.integers(0, 2000))
def test_one_group_takes_all(size: int, least: int, more: int, spare: int) -> None:
    from cpmcu import C

    total = size * least + spare
    group = (size, least, least + more // 2, least + more, least + more)
    assert C.divide_pages([group], total) == [min(total // size, least + more)]
