"""Compare two trees of weights."""

from typing import Any

import jax
import numpy as np


def same(one: Any, other: Any) -> None:
    """Equal in structure and in every number."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for (path, a), b in zip(jax.tree.leaves_with_path(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=str(path))
