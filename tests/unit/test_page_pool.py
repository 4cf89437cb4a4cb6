"""Page numbers with reference counts, against a slow and obvious model."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.reference.engines import extension_or_skip

extension_or_skip()


def make_pool(num_pages: int) -> Any:
    from cpmcu import C

    return C.PagePool(num_pages)


class PoolAndModel(RuleBasedStateMachine):
    """Steps read the pages that have an owner when they are launched, and end in order."""

    @initialize(num_pages=st.integers(0, 5))
    def start(self, num_pages: int) -> None:
        self.pool = make_pool(num_pages)
        self.num_pages = num_pages
        self.owners = [0] * num_pages
        self.free = set(range(num_pages))
        self.waiting: dict[int, int] = {}  # page -> steps that were launched before its release
        self.reads: list[set[int]] = []  # pages that each launched step reads
        self.done = 0  # number of steps that are done

    def owned(self) -> list[int]:
        return [page for page, count in enumerate(self.owners) if count]

    @precondition(lambda self: self.free)
    @rule()
    def take(self) -> None:
        page = self.pool.take()
        assert page in self.free and self.owners[page] == 0
        assert not any(page in read for read in self.reads[self.done :])
        self.free.remove(page)
        self.owners[page] = 1

    @precondition(lambda self: not self.free)
    @rule()
    def take_of_none(self) -> None:
        message = f"no page is free of {self.num_pages}, {len(self.waiting)} are retiring"
        with pytest.raises(RuntimeError, match=message):
            self.pool.take()

    @precondition(lambda self: self.owned())
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.owned()))
        self.pool.share(page)
        self.owners[page] += 1

    @precondition(lambda self: self.owned())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.release_page(data.draw(st.sampled_from(self.owned())))

    def release_page(self, page: int) -> None:
        self.pool.release(page, len(self.reads))
        self.owners[page] -= 1
        if not self.owners[page]:
            self.waiting[page] = len(self.reads)

    @precondition(lambda self: len(self.owned()) < self.num_pages)
    @rule(data=st.data())
    def use_without_an_owner(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.free | self.waiting.keys())))
        with pytest.raises(RuntimeError, match=f"page {page} is shared, but has no owner"):
            self.pool.share(page)
        with pytest.raises(RuntimeError, match=f"page {page} is released, but has no owner"):
            self.pool.release(page, len(self.reads))

    @rule()
    def launch(self) -> None:
        self.reads.append(set(self.owned()))

    @rule()
    def retire(self) -> None:
        self.pool.retire(self.done)
        ready = {page for page, launched in self.waiting.items() if launched <= self.done}
        self.free |= ready
        self.waiting = {page: n for page, n in self.waiting.items() if page not in ready}

    @precondition(lambda self: self.done < len(self.reads))
    @rule()
    def finish(self) -> None:
        self.done += 1

    @invariant()
    def counts_agree(self) -> None:
        pool = self.pool
        assert [pool.num_owners(page) for page in range(pool.num_pages)] == self.owners
        assert (pool.num_free, pool.num_retiring) == (len(self.free), len(self.waiting))

    def teardown(self) -> None:
        for page in self.owned():
            for _ in range(self.owners[page]):
                self.release_page(page)
        self.pool.retire(len(self.reads))
        assert (self.pool.num_free, self.pool.num_retiring) == (self.num_pages, 0)
        taken = sorted(self.pool.take() for _ in range(self.num_pages))
        assert taken == list(range(self.num_pages))


PoolAndModel.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestPagePool = PoolAndModel.TestCase


@pytest.mark.parametrize("page", [-1, 3])
def test_a_page_that_is_not_there(page: int) -> None:
    pool = make_pool(3)
    for call in (pool.num_owners, pool.share, lambda page: pool.release(page, 0)):
        with pytest.raises(RuntimeError, match=f"page {page} of 3"):
            call(page)


def test_steps_are_counted_upwards() -> None:
    pool = make_pool(2)
    first, second = pool.take(), pool.take()
    pool.release(first, 5)
    with pytest.raises(RuntimeError, match=r"released at step 4, an earlier one at step 5"):
        pool.release(second, 4)
    pool.release(second, 5)
    pool.retire(4)
    assert pool.num_free == 0
    pool.retire(5)
    assert pool.num_free == 2
