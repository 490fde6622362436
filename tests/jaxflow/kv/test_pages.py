"""Page pool against a model with an explicit state of each page."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from jaxflow.kv.pages import OutOfPages, PagePool, held

PAGES = 6
NAMES = [bytes([i]) for i in range(5)]


class PoolAgainstModel(RuleBasedStateMachine):
    """The pool next to the model."""

    keep = True

    def __init__(self):
        super().__init__()
        self.pool = PagePool(PAGES, keep=self.keep)
        self.holds: list[int] = []  # one entry a holder
        self.named: dict[bytes, int] = {}
        self.cached: list[int] = []  # oldest first

    @rule(count=st.integers(0, PAGES + 1))
    def allocate(self, count):
        free = set(range(PAGES)) - set(self.holds) - set(self.cached)
        if count > len(free) + len(self.cached):
            with pytest.raises(OutOfPages):
                self.pool.allocate(count)
            return
        evicted = self.cached[: max(0, count - len(free))]
        self.cached = self.cached[len(evicted) :]
        self.named = {name: page for name, page in self.named.items() if page not in evicted}
        pages = self.pool.allocate(count)
        assert len(set(pages)) == count
        assert set(pages) <= free | set(evicted)
        assert set(evicted) <= set(pages)
        self.holds += pages

    @rule(data=st.data())
    def reference(self, data):
        candidates = sorted({*self.holds, *self.cached})
        pages = data.draw(st.lists(st.sampled_from(candidates), unique=True)) if candidates else []
        self.pool.reference(pages)
        self.cached = [page for page in self.cached if page not in pages]
        self.holds += pages

    @rule(data=st.data())
    def release(self, data):
        pages = (
            data.draw(st.lists(st.sampled_from(sorted(set(self.holds))), unique=True)) if self.holds else []
        )
        self.pool.release(pages)
        for page in pages:
            self.holds.remove(page)
            if page not in self.holds and page in self.named.values():
                if self.keep:
                    self.cached.append(page)
                else:
                    self.named = {name: p for name, p in self.named.items() if p != page}

    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def register(self, data, name):
        if self.holds:
            page = data.draw(st.sampled_from(sorted(set(self.holds))))
            self.pool.register(page, name)
            if name not in self.named and page not in self.named.values():
                self.named[name] = page

    @invariant()
    def agrees(self):
        assert [self.pool.references(page) for page in range(PAGES)] == [
            self.holds.count(page) for page in range(PAGES)
        ]
        assert self.pool.available == PAGES - len(set(self.holds))
        assert len(self.pool._cached) == len(self.cached)
        assert {name: self.pool.find(name) for name in NAMES} == {
            name: self.named.get(name, -1) for name in NAMES
        }


class PoolThatForgets(PoolAgainstModel):
    keep = False


TestPool = PoolAgainstModel.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=40)
TestPoolThatForgets = PoolThatForgets.TestCase
TestPoolThatForgets.settings = settings(max_examples=50, stateful_step_count=40)


def test_cached_pages_are_evicted_in_the_order_of_release():
    pool = PagePool(4)
    pages = pool.allocate(4)
    for page in pages:
        pool.register(page, bytes([page]))
    for page in (pages[2], pages[0], pages[3], pages[1]):
        pool.release([page])
    pool.reference([pages[0]])  # used again: now the youngest
    pool.release([pages[0]])
    assert [pool.allocate(1)[0] for _ in range(4)] == [pages[2], pages[3], pages[1], pages[0]]


def test_a_released_row_is_evicted_from_its_tail():
    pool = PagePool(3)
    row = pool.allocate(3)
    for page in row:
        pool.register(page, bytes([page]))
    pool.release(held(row))
    assert [pool.allocate(1)[0] for _ in range(3)] == row[::-1]


def test_held_skips_released_pages():
    assert held([-1, -1, 4, 2]) == [2, 4]


def test_a_release_without_holder_is_an_error():
    pool = PagePool(2)
    [page] = pool.allocate(1)
    pool.release([page])
    with pytest.raises(ValueError, match=f"page {page} is released, but no sequence holds the page"):
        pool.release([page])


def test_an_impossible_allocation_changes_nothing():
    pool = PagePool(3)
    [page] = pool.allocate(1)
    pool.register(page, b"a")
    pool.release([page])
    with pytest.raises(OutOfPages, match="1 pages more than available were allocated from 3"):
        pool.allocate(4)
    assert (pool.available, pool.find(b"a")) == (3, page)
