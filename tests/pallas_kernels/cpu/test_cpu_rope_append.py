"""Law of the rotation and append on a CPU: they equal the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cpu.rope_append import rope_append
from pallas_kernels.pointwise.rope_append import reference

PAGES, KV, S, H, GROUP, TOKENS = 4, 2, 16, 16, 3, 9


@pytest.mark.parametrize("rotated", [True, False])
def test_it_equals_the_reference(rotated):
    rng = np.random.default_rng(0)
    fused = jnp.asarray(rng.standard_normal((TOKENS, KV * (GROUP + 2) * H)), jnp.float32)
    k, v = jnp.asarray(rng.standard_normal((2, PAGES, KV, S, H)), jnp.float32)
    given = jnp.arange(5000, 5000 + TOKENS), jnp.asarray(rng.permutation(PAGES * S)[:TOKENS])
    inv_freq = jnp.asarray(10.0 ** -np.arange(H // 2), jnp.float32) if rotated else None
    got, want = (
        jax.jit(lambda *args, fn=fn: fn(*args, head_dim=H, inv_freq=inv_freq))(fused, k, v, *given)
        for fn in (rope_append, reference.rope_append)
    )
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=2e-6, atol=2e-6)
