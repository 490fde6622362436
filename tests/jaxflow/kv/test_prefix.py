"""Names of pages, and the longest hit."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.config import Span
from jaxflow.kv import prefix
from jaxflow.kv.pages import PagePool

windows = (
    st.none()
    | st.integers(1, 12)
    | st.builds(Span, st.integers(0, 6), st.integers(1, 6), st.integers(0, 1024))
)
tokens = st.lists(st.integers(0, 2), max_size=14).map(lambda t: np.array(t, np.int32))


def names(salt: bytes, content: np.ndarray, size: int) -> list[bytes]:
    chain = [prefix.root(salt)]
    prefix.extend(chain, content, len(content) // size, size)
    return chain[1:]


def seen(position, window):
    """Return the keys that a query sees."""
    if not isinstance(window, Span):
        return [p for p in range(position + 1) if window is None or position - p < window]
    last_keys = window.window(position)
    return [p for p in range(position + 1) if p < window.sinks or position - p < last_keys]


@given(tokens, tokens, st.sampled_from([b"", b"a"]), st.sampled_from([b"", b"a"]), st.integers(1, 4))
def test_names_are_equal_exactly_for_equal_tokens_and_salts(a, b, salt_a, salt_b, size):
    for i, x in enumerate(names(salt_a, a, size)):
        for j, y in enumerate(names(salt_b, b, size)):
            same = i == j and salt_a == salt_b and (a[: (i + 1) * size] == b[: (i + 1) * size]).all()
            assert (x == y) == same


@given(tokens, st.integers(1, 4), st.lists(st.integers(0, 14)))
def test_a_chain_grows_piece_by_piece_to_the_same_names(content, size, cuts):
    chain = [prefix.root(b"")]
    for cut in sorted(cuts):
        prefix.extend(chain, content, min(cut, len(content)) // size, size)
    prefix.extend(chain, content, len(content) // size, size)
    assert chain[1:] == names(b"", content, size)


@given(
    st.lists(windows, min_size=1, max_size=3, unique=True),
    st.integers(1, 4),
    st.integers(0, 6),
    st.data(),
)
def test_the_longest_hit_has_all_visible_pages_of_every_group(windows, size, pages, data):
    chain = names(b"", np.arange(pages * size, dtype=np.int32), size)
    pools = []
    for _ in windows:
        pool = PagePool(max(1, pages))
        present = data.draw(st.sets(st.sampled_from(range(pages)))) if pages else set()
        for i in sorted(present):
            pool.register(pool.allocate(1)[0], chain[i])
        pools.append(pool)

    def enough(m: int) -> bool:
        visible = [[p // size for p in seen(m * size, w) if p < m * size] for w in windows]
        return all(pool.find(chain[i]) >= 0 for pool, seen in zip(pools, visible, strict=True) for i in seen)

    expected = max(m for m in range(pages + 1) if enough(m))
    assert prefix.longest_hit(pools, windows, chain, size) == expected
