"""Host store against a model of plain lists."""

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxflow.kv.tiers.host_store import HostStore, key_of

SIZES = (3, 5)
KEYS = [key_of(group, bytes([i])) for group in range(2) for i in range(6)]


class Model:
    """A slow model of the store: a list of [key, data, pins], least recently used first."""

    def __init__(self, capacity):
        self.capacity, self.rows = capacity, []

    def bytes(self):
        return sum(SIZES[key[0]] for key, *_ in self.rows)

    def row(self, key):
        return next((row for row in self.rows if row[0] == key), None)

    def reserve(self, key):
        free = self.capacity - self.bytes()
        can_go = [row for row in self.rows if row[1] is not None and not row[2]]
        gone = []
        while free < SIZES[key[0]] and can_go:
            gone.append(can_go.pop(0))
            free += SIZES[gone[-1][0][0]]
        if free < SIZES[key[0]]:
            return None
        self.rows = [row for row in self.rows if row not in gone]
        self.rows.append([key, None, 0])
        return [(row[0], row[1]) for row in gone]


class Lower:
    """A lower tier that records the evicted pages."""

    def __init__(self):
        self.evicted = []

    def put(self, key, page, *, opportunistic):
        if not opportunistic:
            self.evicted.append((key, page))

    def touch(self, keys):
        pass


steps = st.lists(
    st.tuples(
        st.sampled_from(["store", "arrive", "fail", "get", "pin", "unpin", "touch"]), st.sampled_from(KEYS)
    ),
    max_size=60,
)


@settings(max_examples=200)
@given(st.integers(3, 40), steps)
def test_eviction_is_least_recently_used_in_bytes(capacity, sequence):
    lower = Lower()
    store, model, evicted = HostStore(capacity, SIZES, lower), Model(capacity), lower.evicted
    for number, (what, key) in enumerate(sequence):
        row = model.row(key)
        if what == "store" and row is None:
            expected = model.reserve(key)
            assert store.reserve(key) == (expected is not None)
            assert evicted == (expected or [])
            evicted.clear()
        elif what == "arrive" and row and row[1] is None:
            store.arrive(key, number)
            row[1] = number
        elif what == "fail" and row and row[1] is None:
            store.arrive(key, None)
            model.rows.remove(row)
        elif what == "get" and row and row[1] is not None:
            assert store.get(key) == row[1]
            model.rows.remove(row)
            model.rows.append(row)
        elif what == "pin" and row and row[1] is not None:
            store.pin([key])
            row[2] += 1
        elif what == "unpin" and row and row[2]:
            store.unpin([key])
            row[2] -= 1
        elif what == "touch":
            store.touch([key, KEYS[0]])
            for touched in (row, model.row(KEYS[0])):
                if touched:
                    model.rows.remove(touched)
                    model.rows.append(touched)
        assert store.bytes == model.bytes() <= capacity
        assert len(store) == len(model.rows)
        for k in KEYS:
            row = model.row(k)
            assert (store.contains(k), store.is_stored(k)) == (
                row is not None,
                row is not None and row[1] is not None,
            )


def test_counters():
    store = HostStore(6, (3,))
    keys = [key_of(0, bytes([i])) for i in range(4)]
    assert all(store.reserve(key) for key in keys[:2])
    assert not store.reserve(keys[2])  # nothing has arrived, so nothing can go
    store.arrive(keys[0], "page")
    assert store.reserve(keys[3])
    counters = store.counters
    assert (counters.stored, counters.refused, counters.evicted) == (1, 1, 1)
    store.close()
    assert (len(store), store.bytes) == (0, 0)
