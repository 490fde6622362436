"""The reference implementation of attention over paged latent vectors (absorbed MLA, DeepSeek-V2 §2.1).

A token has one key for all heads: its latent vector [R] and its rotary key [Hr]. The latent vector is also
its value. So attention has N query heads of R + Hr columns, one key/value head, and outputs of R columns. A
page of the cache is [1, S, Hr] of rotary keys and [1, S, R] of latent vectors.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.attention.reference import LOWEST, key_blocks, online_softmax, read_pages
from pallas_kernels.pointwise.rope_append import reference as rope_append

ROWS_PER_TILE = 128  # query tokens of a chunk that one step computes


def append(
    rope_pages: Shaped[Array, "P 1 S Hr"],
    latent_pages: Shaped[Array, "P 1 S R"],
    keys: Float[Array, "T 1 Hr"],
    vectors: Float[Array, "T 1 R"],
    slots: Int[Array, " T"],
) -> tuple[Array, Array]:
    """Write each token's rotary key and latent vector at its flat slot, page · S + place.

    Tokens with a slot outside the cache are padding and not written.
    """
    return rope_append.append(rope_pages, keys, slots), rope_append.append(latent_pages, vectors, slots)


def decode_attention(
    q: Float[Array, "T N A"],
    rope_pages: Shaped[Array, "P 1 S Hr"],
    latent_pages: Shaped[Array, "P 1 S R"],
    page_table: Int[Array, "B MP"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
    into: Float[Array, "T N R"] | None = None,
    sms: int | None = None,
    work: object = None,
) -> Float[Array, "T N R"]:
    """Return the attention of one new token a sequence over its pages.

    Args:
      q: [T, N, R + Hr]; the first B rows belong to the sequences.
      lengths: keys of each row, the new token included; 0 skips the row.
      into: results of rows without keys and of rows from B on; None: 0.
      sms, work: for the kernels; unused.
    """
    (t, n, _), b = q.shape, lengths.shape[0]
    pages, (per_block, table) = (rope_pages, latent_pages), _blocks(latent_pages, page_table)
    block, grouped = per_block * latent_pages.shape[2], q[:b].astype(jnp.float32) * scale

    def step(i, state):
        ids = lax.dynamic_slice_in_dim(table, i * per_block, per_block, axis=1)
        keys, vectors = _read(pages, ids)
        valid = i * block + jnp.arange(block) < lengths[:, None]
        return online_softmax(jnp.einsum("bna,bsa->bns", grouped, keys), valid[:, None], vectors, state)

    longest = jnp.max(lengths, initial=0)
    out = _finish(
        lax.fori_loop(0, -(-longest // block), step, _start((b, n), latent_pages.shape[3])), q.dtype
    )
    if into is None:
        return jnp.pad(out, ((0, t - b), (0, 0), (0, 0)))
    # Not by `.at[:b].set`: two such scatters under shard_map crash XLA's CPU compiler (jaxlib 0.11.2).
    own = jnp.where((lengths > 0)[:, None, None], out, into[:b])
    return lax.dynamic_update_slice_in_dim(into, own, 0, axis=0)


def list_decode_work(lengths: Int[Array, " B"], *, heads: int, sms: int | None = None) -> None:
    """Return None: the reference implementation has no work list. The kernel has one."""


def list_chunk_work(chunks: Int[Array, "C 4"], tokens: int, *, heads: int, sms: int | None = None) -> None:
    """Return None: the reference implementation has no work list. The kernel has one."""


def chunk_attention(
    q: Float[Array, "T N A"],
    rope_pages: Shaped[Array, "P 1 S Hr"],
    latent_pages: Shaped[Array, "P 1 S R"],
    page_table: Int[Array, "R MP"],
    chunks: Int[Array, "C 4"],
    *,
    scale: float,
    sms: int | None = None,
    work: object = None,
) -> Float[Array, "T N R"]:
    """Return the causal attention of prefill chunks over their sequences' pages.

    Args:
      chunks: one row a chunk: first token in q, tokens, row of page_table, position of the first token. The
        pages already hold the chunk's latent vectors. Chunks of 0 tokens are skipped.
      sms, work: for the kernels; unused.
    Returns:
      The outputs at the chunks' tokens, and 0 at all others.
    """
    pages, rank = (rope_pages, latent_pages), latent_pages.shape[3]

    def block(rows, ids, valid, state):
        keys, vectors = _read(pages, ids)
        return online_softmax(jnp.einsum("nta,sa->nts", rows, keys), valid, vectors, state)

    return _by_tiles(q, latent_pages, page_table, chunks, scale, rank, block)


def list_up_chunk_work(chunks: Int[Array, "C 4"], tokens: int) -> None:
    """Return None: the reference implementation has no work list. The kernel has one."""


def up_chunk_attention(
    q: Float[Array, "T N H"],
    rope_pages: Shaped[Array, "P 1 S Hr"],
    latent_pages: Shaped[Array, "P 1 S R"],
    key_up: Float[Array, "N Hp R"],
    value_up: Float[Array, "N Hv R"],
    page_table: Int[Array, "R MP"],
    chunks: Int[Array, "C 4"],
    *,
    scale: float,
    sms: int | None = None,
    work: object = None,
) -> Float[Array, "T N Hv"]:
    """Return the causal attention of prefill chunks with keys and values by head, made from latent vectors.

    Args:
      q: the queries of all heads, Hp columns and then Hr rotary ones.
      key_up, value_up: make a head's own part of the keys, and its values.
      chunks: as for `chunk_attention`. sms, work: for the kernel; unused.
    Returns:
      The outputs at the chunks' tokens, and 0 at all others.
    """
    pages, ups = (rope_pages, latent_pages), [x.astype(jnp.float32) for x in (key_up, value_up)]
    plain = key_up.shape[1]

    def block(rows, ids, valid, state):
        keys, vectors = _read(pages, ids)
        own, values = (jnp.einsum("sr,nhr->nsh", vectors, up) for up in ups)
        scores = jnp.einsum("nth,nsh->nts", rows[..., :plain], own)
        scores += jnp.einsum("nth,sh->nts", rows[..., plain:], keys[:, vectors.shape[1] :])
        return online_softmax(scores, valid, values, state)

    return _by_tiles(q, latent_pages, page_table, chunks, scale, value_up.shape[1], block)


def _by_tiles(
    q: Array,
    latent_pages: Array,
    page_table: Array,
    chunks: Array,
    scale: float,
    columns: int,
    add_block: Callable[..., tuple[Array, Array, Array]],
) -> Array:
    """Return the outputs [T, N, columns] of all chunks, computed by tiles of tokens and blocks of keys.

    add_block(rows [N, tile, H], page ids, valid [tile, keys], state) returns the state after a block.
    """
    t, n, _ = q.shape
    per_block, table = _blocks(latent_pages, page_table)
    tile = min(ROWS_PER_TILE, t)
    block, padded = per_block * latent_pages.shape[2], jnp.pad(q, ((0, tile), (0, 0), (0, 0)))

    def attend(tile_q, pages_of_row, position):
        """Return [tile, N, columns]. tile_q: [tile, N, H]. position: of its first token."""
        rows = tile_q.swapaxes(0, 1).astype(jnp.float32) * scale  # [N, tile, H]
        ends = position + 1 + jnp.arange(tile)

        def step(i, state):
            ids = lax.dynamic_slice_in_dim(pages_of_row, i * per_block, per_block)
            return add_block(rows, ids, i * block + jnp.arange(block) < ends[:, None], state)

        last = jnp.minimum((position + tile - 1) // block + 1, table.shape[1] // per_block)
        state = lax.fori_loop(0, last, step, _start((n, tile), columns))
        return _finish(state, q.dtype).swapaxes(0, 1)

    def one_chunk(c, out):
        first, tokens, row, position = chunks[c]

        def one_tile(j, out):
            start = first + j * tile
            new = attend(lax.dynamic_slice_in_dim(padded, start, tile), table[row], position + j * tile)
            old = lax.dynamic_slice_in_dim(out, start, tile)
            mine = jnp.arange(tile) < tokens - j * tile
            return lax.dynamic_update_slice_in_dim(
                out, jnp.where(mine[:, None, None], new, old), start, axis=0
            )

        return lax.fori_loop(0, -(-tokens // tile), one_tile, out)

    start = jnp.zeros((*padded.shape[:2], columns), q.dtype)
    return lax.fori_loop(0, chunks.shape[0], one_chunk, start)[:t]


def _blocks(latent_pages: Array, page_table: Array) -> tuple[int, Array]:
    return key_blocks(page_table, latent_pages.shape[0], latent_pages.shape[2])


def _read(pages: tuple[Array, Array], ids: Array) -> tuple[Array, Array]:
    """Return float32 keys [..., n · S, R + Hr] and latent vectors [..., n · S,
    R] of the pages `ids` [..., n].
    """
    turned, vectors = (read_pages(part, None, ids)[..., 0, :, :] for part in pages)
    return jnp.concatenate([vectors, turned], axis=-1), vectors


def _start(lead: tuple[int, ...], columns: int) -> tuple[Array, Array, Array]:
    """Return the first state of the online softmax."""
    return jnp.full(lead, LOWEST), jnp.zeros(lead), jnp.zeros((*lead, columns))


def _finish(state: tuple[Array, Array, Array], dtype) -> Array:
    _, total, out = state
    return (out / jnp.maximum(total, 1e-30)[..., None]).astype(dtype)
