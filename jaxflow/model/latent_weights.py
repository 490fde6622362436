"""The weights of latent attention, in the place of `qkv`.

    {"latent_down": [Rq + R + Hr, D], "latent_down_bias": [Rq + R + Hr], "query_norm": [Rq], "latent_norm":
     [R], "query_up": [N · (Hp + Hr), Rq], "key_up": [N, Hp, R], "value_up": [N, Hv, R]}

Rq, R, Hp, Hr and Hv are the widths of `Latent`. `latent_down` makes the vector of the queries, the latent
vector and the rotary key. `key_up` and `value_up` are the two parts of a checkpoint's `kv_b_proj`. Queries
are multiplied by `key_up`, and outputs of attention by `value_up`, so that attention reads the latent vectors
themselves. The planes of a rotary embedding have their halves Hr / 2 columns apart.
"""

from collections.abc import Mapping

import numpy as np

from jaxflow.config import Latent, ModelConfig
from jaxflow.model.weight_spec import Init, Leaf, Piece


def latent_leaves(config: ModelConfig, latent: Latent, names: Mapping[str, str]) -> dict[str, Leaf]:
    """Return the leaves of one layer. names: of the tensors, by their roles."""
    heads, rank, queries = config.num_heads, latent.rank, latent.query_rank
    key, value = latent.plain_dim, latent.value_dim
    up = (heads * (key + value), rank)
    rows = np.arange(up[0]).reshape(heads, key + value)
    rotary = _rotary(latent)
    query_rows = np.concatenate([np.arange(key), key + rotary])
    of_heads = np.arange(heads)[:, None] * config.head_dim + query_rows
    tree = {
        "latent_down": _down(config, latent, names, ".weight", config.hidden_size),
        "query_norm": _one("query_norm", names["query_norm"], (queries,), "norm"),
        "latent_norm": _one("latent_norm", names["latent_norm"], (rank,), "norm"),
        "query_up": _one(
            "query_up", names["query_up"], (heads * config.head_dim, queries), "matrix", of_heads.reshape(-1)
        ),
        "key_up": _part("key_up", names["latent_up"], up, rows[:, :key]),
        "value_up": _part("value_up", names["latent_up"], up, rows[:, key:]),
    }
    if config.qkv_bias:
        tree["latent_down_bias"] = _down(config, latent, names, ".bias")
    return tree


def _rotary(latent: Latent) -> np.ndarray:
    """Return the checkpoint's column of each of our rotary columns."""
    columns = np.arange(latent.rope_dim)
    return columns.reshape(-1, 2).T.reshape(-1) if latent.interleaved else columns


def _down(config: ModelConfig, latent: Latent, names: Mapping[str, str], suffix: str, *tail: int) -> Leaf:
    """Return the rows of both down-projections. `tail` is (D,) for the weight, () for the bias."""
    queries, stored = latent.query_rank, latent.rank + latent.rope_dim
    order = np.concatenate([np.arange(latent.rank), latent.rank + _rotary(latent)])
    first, second = (queries, *tail), (stored, *tail)
    pieces = (
        Piece(names["query_down"] + suffix, first, first, lambda out: out[:queries]),
        Piece(names["latent_down"] + suffix, second, second, lambda out: out[queries:], order),
    )
    key, init = ("latent_down", "matrix") if tail else ("latent_down_bias", "zero")
    return Leaf(key, (queries + stored, *tail), pieces, init)


def _one(key: str, name: str, shape: tuple[int, ...], init: Init, order: np.ndarray | None = None) -> Leaf:
    return Leaf(key, shape, (Piece(f"{name}.weight", shape, shape, lambda out: out, order),), init)


def _part(key: str, name: str, whole: tuple[int, int], rows: np.ndarray) -> Leaf:
    """Return some rows [N, H] of a matrix as [N, H, R]."""
    shape = (*rows.shape, whole[1])
    return Leaf(
        key, shape, (Piece(f"{name}.weight", whole, shape, lambda out: out, rows.reshape(-1)),), "matrix"
    )
