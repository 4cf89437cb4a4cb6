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
    """Steps read the pages that have an owner when they are launched. They end in order."""

    @initialize(num_pages=st.integers(0, 5))
    def start(self, num_pages: int) -> None:
        self.pool = make_pool(num_pages)
        self.num_pages = num_pages
        self.owners = dict.fromkeys(range(num_pages), 0)
        self.unowned = set(self.owners)
        self.retired = set(self.owners)  # of the unowned: seen free by the last `retire`
        self.steps: list[set[int]] = []  # in flight: what each reads
        self.launched = self.done = 0

    def read_by_steps(self) -> set[int]:
        return set().union(*self.steps)

    def owned(self) -> list[int]:
        return [page for page, count in self.owners.items() if count]

    @precondition(lambda self: self.retired)
    @rule()
    def take(self) -> None:
        page = self.pool.take()
        assert page in self.retired and not self.owners[page]
        assert page not in self.read_by_steps()
        self.owners[page] = 1
        self.unowned.remove(page)
        self.retired.remove(page)

    @precondition(lambda self: not self.retired)
    @rule()
    def take_of_none(self) -> None:
        message = f"no page is free of {self.num_pages}, {len(self.unowned)} are retiring"
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
        self.pool.release(page, self.launched)
        self.owners[page] -= 1
        if not self.owners[page]:
            self.unowned.add(page)

    @precondition(lambda self: self.unowned)
    @rule(data=st.data())
    def use_without_an_owner(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.unowned)))
        with pytest.raises(RuntimeError, match=f"page {page} is shared, but has no owner"):
            self.pool.share(page)
        with pytest.raises(RuntimeError, match=f"page {page} is released, but has no owner"):
            self.pool.release(page, self.launched)

    @rule()
    def launch(self) -> None:
        self.steps.append(set(self.owned()))
        self.launched += 1

    @precondition(lambda self: self.steps)
    @rule()
    def finish(self) -> None:
        self.steps.pop(0)
        self.done += 1

    @rule()
    def retire(self) -> None:
        before = set(self.retired)
        self.pool.retire(self.done)
        # A page waits for all steps that were launched before its release, at least for those that
        # read it. Once nothing is in flight, none is left waiting.
        self.retired = {page for page in self.unowned if page not in self.read_by_steps()}
        waiting = self.pool.num_retiring
        assert len(self.unowned) - waiting >= len(before)
        assert waiting == 0 or self.steps

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        assert [pool.num_owners(page) for page in range(pool.num_pages)] == list(
            self.owners.values()
        )
        assert pool.num_free + pool.num_retiring == len(self.unowned)

    def teardown(self) -> None:
        for page, count in self.owners.items():
            for _ in range(count):
                self.release_page(page)
        self.pool.retire(self.launched)
        assert (self.pool.num_free, self.pool.num_retiring) == (self.num_pages, 0)
        assert sorted(self.pool.take() for _ in range(self.num_pages)) == list(
            range(self.num_pages)
        )


PoolAndModel.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPagePool = PoolAndModel.TestCase
