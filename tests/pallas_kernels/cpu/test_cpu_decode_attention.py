"""Laws of decode attention on a CPU: it equals the reference implementation,
whatever the rows beside a row.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention.decode import reference
from pallas_kernels.cpu.decode_attention import decode_attention, einsum_by_query

PAGES, S, H = 40, 16, 32
LENGTHS = np.array([1, 0, 100, 311], np.int32)


def drawn(kv, queries, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((len(LENGTHS) + 2, kv * queries, H), np.float32)
    pages = rng.standard_normal((2, PAGES, kv, S, H), np.float32)
    table = rng.integers(0, PAGES, (len(LENGTHS), 20)).astype(np.int32)
    return jnp.asarray(q, dtype), *jnp.asarray(pages, dtype), jnp.asarray(table), jnp.asarray(LENGTHS)


@pytest.mark.parametrize("settings", [{}, {"window": 50}, {"soft_cap": 3.0}], ids=str)
@pytest.mark.parametrize("kv, queries", [(3, 3), (2, 1), (1, 5)])
def test_it_equals_the_reference(kv, queries, settings):
    given = drawn(kv, queries)
    into = jnp.full_like(given[0], 7.0)
    one, other = (
        np.asarray(f(*given, scale=0.2, into=into, **settings))
        for f in (decode_attention, reference.decode_attention)
    )
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_a_row_does_not_depend_on_the_rows_beside_it():
    q, k, v, table, lengths = drawn(3, 3)
    together = np.asarray(decode_attention(q, k, v, table, lengths, scale=0.2))
    for row in (0, 2, 3):
        alone = decode_attention(
            q[row : row + 1], k, v, table[row : row + 1], lengths[row : row + 1], scale=0.2
        )
        np.testing.assert_allclose(np.asarray(alone)[0], together[row], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", ["bkgh,bksh->bkgs", "...gh,...sh->...gs"])
def test_each_query_is_multiplied_by_its_own_keys(form):
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((2, 3, 4, 8), np.float32), rng.standard_normal((2, 3, 9, 8), np.float32)
    want = np.einsum(form, np.float64(x), np.float64(y))
    np.testing.assert_allclose(np.asarray(einsum_by_query(form, x, y)), want, rtol=1e-5, atol=1e-5)
