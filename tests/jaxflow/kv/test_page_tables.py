"""Page tables against a model of the device's copy and of the charged pages."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxflow.config import Span, Window
from jaxflow.kv import prefix, visible
from jaxflow.kv.page_tables import PageTables

SIZE, SLOTS = 4, 3
WINDOWS = (None, 6)
TEXT = np.arange(
    100, dtype=np.int32
)  # all sequences say the same, so that pages are shared whenever they are named
CHAIN = [prefix.root(b"")]
prefix.extend(CHAIN, TEXT, 12, SIZE)
NAMES = CHAIN[1:]


class Tables(RuleBasedStateMachine):
    """Rows grow, share pages and shrink; each release frees the charged pages."""

    windows: tuple[Window, ...] = WINDOWS

    def __init__(self):
        super().__init__()
        self.tables = PageTables((14, 9), self.windows, SIZE, SLOTS, keep=True)
        self.length = [0] * SLOTS
        self.copy: dict[tuple[int, int, int], int] = {}

    slots = st.integers(0, SLOTS - 1)

    @rule(slot=slots, tokens=st.integers(1, 9))
    def grow(self, slot, tokens):
        planned = [0, 0]
        end = self.length[slot]
        available = self.tables.available()
        fits = self.tables.fit(slot, end, tokens, planned)
        assert 0 <= fits <= tokens
        if fits < tokens:  # not one more token would have fitted
            needs = [-(-(end + fits + 1) // SIZE) - int(self.tables.count[g, slot]) for g in range(2)]
            assert any(need > have for need, have in zip(needs, available, strict=True))
        if fits and end + fits <= len(NAMES) * SIZE:
            self.tables.grow(slot, end + fits)
            assert self.tables.available() == [a - p for a, p in zip(available, planned, strict=True)]
            self.length[slot] = end + fits

    @rule(slot=slots, tokens=st.integers(1, 5), more=st.integers(1, 5))
    def promise_in_two_parts(self, slot, tokens, more):
        end = self.length[slot]
        once, twice = [0, 0], [0, 0]
        whole = self.tables.fit(slot, end, tokens + more, once)
        first = self.tables.fit(slot, end, tokens, twice)
        second = self.tables.fit(slot, end + first, tokens + more - first, twice)
        assert (first + second, twice) == (whole, once)

    @rule()
    def decode(self):
        slots = np.array(
            [slot for slot in range(SLOTS) if 0 < self.length[slot] < len(NAMES) * SIZE], np.int32
        )
        positions = np.array([self.length[slot] for slot in slots], np.int32)
        crossing = self.tables.crossing(slots, positions)
        if (crossing.sum(axis=1) > self.tables.available()).any():
            return
        self.tables.grow_crossing(slots, crossing)
        for slot in slots.tolist():
            self.length[slot] += 1

    @rule(slot=slots, pages=st.integers(0, 8))
    def publish(self, slot, pages):
        self.tables.register(slot, NAMES[: min(pages, self.length[slot] // SIZE)], 0)

    @rule(slot=slots, most=st.integers(0, 12))
    def adopt(self, slot, most):
        if self.length[slot] == 0:
            hit = self.tables.hit(NAMES[:most])
            in_use = [pool.num_pages - pool.available for pool in self.tables.pools]
            payers = self.tables.payers(0, NAMES[:hit])
            common = self.tables.common(0)
            self.tables.adopt(slot, NAMES[:hit])
            self.length[slot] = hit * SIZE
            assert self.tables.common(0) == common + len(payers) - payers.count(-1)
            assert self.tables.pools[0].num_pages - self.tables.pools[0].available == in_use[0] + hit - len(
                payers
            )
            assert all(len(row) == hit for row in self.tables.rows[slot])

    @rule()
    def drop(self):
        slots = np.arange(SLOTS)
        self.tables.drop_unseen(slots, np.array(self.length))
        for slot in range(SLOTS):
            gone = visible.unseen(self.length[slot], self.windows[1], SIZE)
            row = self.tables.rows[slot][1]
            assert [i for i, page in enumerate(row) if page < 0] == [i for i in gone if i < len(row)]

    @precondition(lambda self: any(self.length))
    @rule(slot=slots)
    def release(self, slot):
        before, charged = self.tables.available(), self.tables.charged[:, slot].copy()
        self.tables.release(slot)
        self.length[slot] = 0
        freed = [a - b for a, b in zip(self.tables.available(), before, strict=True)]
        assert all(f >= c for f, c in zip(freed, charged, strict=True))

    @invariant()
    def consistent(self):
        for group, slot, index, page in self.tables.take_appends().tolist():
            self.copy[group, slot, index] = page
        for slot in range(SLOTS):
            for group, row in enumerate(self.tables.rows[slot]):
                assert all(self.copy[group, slot, i] == page for i, page in enumerate(row) if page >= 0)
                assert self.tables.count[group, slot] == len(row)
        for group, pool in enumerate(self.tables.pools):
            held = [page for slot in range(SLOTS) for page in self.tables.rows[slot][group] if page >= 0]
            assert [pool.references(page) for page in range(pool.num_pages)] == [
                held.count(p) for p in range(pool.num_pages)
            ]
            assert self.tables.common(group) == len(set(held)) - self.tables.charged[group].sum() >= 0


class TablesOfSpans(Tables):
    """The same with a group of heads that see sink tokens and a window that grows."""

    windows = (None, Span(sinks=5, alpha=3, beta=256))


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=150, stateful_step_count=40)
TestTablesOfSpans = TablesOfSpans.TestCase
TestTablesOfSpans.settings = settings(max_examples=75, stateful_step_count=40)


def test_window_groups_release_pages_and_full_groups_keep_them():
    tables = PageTables((10, 10), WINDOWS, SIZE, 1, keep=True)
    tables.grow(0, 20)
    tables.drop_unseen(np.array([0]), np.array([20]))
    # The query at 20 sees 15..20: the page of 12..15 is still needed.
    assert [page >= 0 for page in tables.rows[0][1]] == [False, False, False, True, True]
    assert all(page >= 0 for page in tables.rows[0][0])
    assert tables.available() == [5, 8]


def test_a_hit_in_a_window_group_references_the_visible_pages_only():
    tables = PageTables((10, 10), WINDOWS, SIZE, 2, keep=True)
    tables.grow(0, 20)
    tables.register(0, NAMES[:5], 0)
    tables.drop_unseen(np.array([0]), np.array([20]))
    assert tables.hit(NAMES[:7]) == 5
    assert tables.hit(NAMES[:2]) == 2  # dropped pages are cached, not gone
    tables.take_appends()
    tables.adopt(1, NAMES[:5])
    assert tables.rows[1] == [tables.rows[0][0], [-1, -1, -1, *tables.rows[0][1][3:]]]
    assert tables.take_appends()[:, 0].tolist() == [0] * 5 + [1] * 2
