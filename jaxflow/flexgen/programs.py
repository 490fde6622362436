"""The compute of a square as jitted functions: one for each kind of layer and phase, made of the ops of
`jaxflow.model.ops`.

    embed            token ids -> x
    prefill          weights, x, device KV, lengths -> x, device KV, pages of the other parts
    decode           weights, x, device KV, loaded KV, positions, live -> x, device KV, loaded KV, this
    token's rows of the other parts before, after    a decode in two halves, between which the host attends to
    what is not on the device hidden, sample   the ends' weights, x -> one token a row

`x` comes and goes in pieces, one for each tier of the activations; of several devices each has its own
columns of it, and its own heads (`jaxflow.flexgen.geometry`). KV is as it is stored, (keys, values); of 4 bits
it is unpacked before it is attended to and this token's is packed, wherever it lives, so that a placement
does not change what is computed. Loaded KV is returned only so that it can be updated in place.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxflow.config import Layer
from jaxflow.flexgen.geometry import Geometry, Part
from jaxflow.kv.int4 import dequantize_kv, quantize_kv
from jaxflow.model import ops, sampling
from jaxflow.model.batch import Batch
from jaxflow.model.op_registry import KV, Context, Site, Weights, op_scope
from jaxflow.model.slot_params import SlotParams
from jaxflow.model.transformer import after_attention
from jaxflow.parallel.collectives import added
from pallas_kernels.pointwise.rope_append.reference import append

Array = jax.Array
Pieces = tuple[Array, ...]
_NOWHERE = jnp.iinfo(jnp.int32).max  # a slot outside every cache


@dataclasses.dataclass(frozen=True)
class Programs:
    """The functions for one geometry, not compiled; `context.config` is the geometry's."""

    geometry: Geometry
    context: Context

    # ---- the ends of the model

    def embed(self, ends: Weights, token_ids: Array, positions: Array) -> Pieces:
        """token_ids, positions: [T] int32, T tokens of all rows of a batch, row by row -> x in pieces."""
        return self._cut(ops.embed(Site(self.context, ends), token_ids, positions))

    def hidden(self, ends: Weights, x: Pieces, last: Array) -> Array:
        """The normed hidden state [b, D] that each row's next token is drawn from. last: [b] int32, its place
        in x.
        """
        return ops.final_norm(Site(self.context, ends), self._gathered(_whole(x)[last]), None)[1]

    def sample(
        self, ends: Weights, hidden: Array, temperature: Array, seeds: Array, positions: Array
    ) -> Array:
        """Greedy and temperature: one token a row, [b] int32; arguments as `sampling.plain`'s."""
        logits = self._logits(ends, hidden)
        with op_scope("sample"):
            return sampling.plain(logits, temperature, seeds, positions)

    def sample_full(
        self,
        ends: Weights,
        hidden: Array,
        temperature: Array,
        seeds: Array,
        positions: Array,
        slots: Array,
        params: SlotParams,
        counts: Array,
    ) -> tuple[Array, Array, Any]:
        """Every setting: tokens, counts (donated) and log-probabilities; arguments as `sampling.full`'s."""
        logits, search = self._logits(ends, hidden), self.context.kernels.token_limits
        with op_scope("sample"):
            return sampling.full(logits, temperature, seeds, positions, slots, params, counts, search=search)

    def _logits(self, ends: Weights, hidden: Array) -> Array:
        return ops.logits(Site(self.context, ends), hidden)

    # ---- layers

    def prefill(self, layer: Layer) -> Callable:
        """(w, x, home, lengths [b]) -> (x, home, pages of the away parts). home: the device's KV, () if it
        has none; donated.
        """
        g, c = self.geometry, self.context

        def run(w: Weights, x: Pieces, home: Any, lengths: Array) -> tuple[Pieces, Any, tuple]:
            stream, fused = self._before(w, x)
            outputs, kept, away = [], (), []
            for part in g.kv_parts:
                tokens = slice(part.start * g.prompt, part.stop * g.prompt)
                batch = self._prompts(part, lengths[part.start : part.stop])
                pages = _unpacked(home, g.dtype) if part.tier == "device" else self._empty(part.rows)
                site = Site(c, w, layer, batch, 0, batch.num_tokens)
                q, pages = ops.rope_append(site, fused[tokens], pages)
                outputs.append(ops.chunk_attention(site, q, pages))
                pages = self._packed(pages)
                if part.tier == "device":
                    kept = pages
                else:
                    away.append(pages)
            return self._after(w, layer, stream, _whole(outputs)), kept, tuple(away)

        return run

    def decode(self, layer: Layer) -> Callable:
        """(w, x, home, loaded, positions [b], live [b]) -> (x, home, loaded, rows). home and, of 16 bits,
        loaded are donated.
        """
        g = self.geometry

        def run(
            w: Weights, x: Pieces, home: Any, loaded: tuple, positions: Array, live: Array
        ) -> tuple[Pieces, Any, tuple, tuple]:
            stream, fused = self._before(w, x)
            outputs, updated, rows, left = [], [], [], list(loaded)
            for part in g.kv_parts:
                stored = home if part.tier == "device" else left.pop(0)
                o, stored, new = self._attend(layer, w, part, fused, stored, positions, live)
                outputs.append(o)
                if part.tier == "device":
                    home = stored
                else:
                    updated.append(stored)
                    rows.append(new)
            x = self._after(w, layer, stream, _whole(outputs))
            return x, home, () if g.policy.kv_bits == 4 else tuple(updated), tuple(rows)

        return run

    def before(self, layer: Layer) -> Callable:
        """(w, x, home, positions, live) -> (stream, o of the device's rows, home, queries and rows of the
        away parts). home is donated.
        """
        g, c = self.geometry, self.context

        def run(
            w: Weights, x: Pieces, home: Any, positions: Array, live: Array
        ) -> tuple[Array, Pieces, Any, Pieces, tuple]:
            stream, fused = self._before(w, x)
            outputs: Pieces = ()
            queries, rows = [], []
            for part in g.kv_parts:
                if part.tier == "device":
                    o, home, _ = self._attend(layer, w, part, fused, home, positions, live)
                    outputs = (o,)
                else:  # pages that hold a token of every row: what the op writes there is all that is wanted
                    few = -(-part.rows // g.page_size)
                    at = slice(part.start, part.stop)
                    batch = self._decodes(part, positions[at], live[at])
                    batch = dataclasses.replace(
                        batch, slots=jnp.broadcast_to(jnp.arange(part.rows), batch.slots.shape)
                    )
                    shape = (few, self._kv_heads, g.page_size, g.config.head_dim)
                    pages = (jnp.zeros(shape, g.dtype), jnp.zeros(shape, g.dtype))
                    site = Site(c, w, layer, batch, 0, part.rows)
                    q, pages = ops.rope_append(site, fused[at], pages)
                    queries.append(q)
                    rows.append(tuple(p.swapaxes(1, 2).reshape(-1, *shape[1::2])[: part.rows] for p in pages))
            return stream, outputs, home, tuple(queries), tuple(rows)

        return run

    def after(self, layer: Layer) -> Callable:
        """(w, stream, o of the device's rows, o of the away parts) -> x."""

        def run(w: Weights, stream: Array, outputs: Pieces, attended: Pieces) -> Pieces:
            return self._after(w, layer, stream, _whole((*outputs, *attended)))

        return run

    # ---- pieces of a layer

    def _before(self, w: Weights, x: Pieces) -> tuple[Array, Array]:
        """The residual stream and the fused projection."""
        site = Site(self.context, w)
        stream, h = ops.attn_norm(site, self._gathered(_whole(x)), None)
        return stream, ops.qkv(site, h)

    def _after(self, w: Weights, layer: Layer, x: Array, o: Array) -> Pieces:
        """Return x after a layer. The residual add is done at once: one array goes on to the next layer."""
        x, y = after_attention(Site(self.context, w, layer), x, o)
        return self._cut(x + added(y))

    def _attend(
        self, layer: Layer, w: Weights, part: Part, fused: Array, stored: Any, positions: Array, live: Array
    ) -> tuple[Array, Any, Any]:
        """(output, stored KV with this token in it, this token's rows as they are stored) of a part."""
        at = slice(part.start, part.stop)
        batch = self._decodes(part, positions[at], live[at])
        pages = _unpacked(stored, self.geometry.dtype)
        site = Site(self.context, w, layer, batch, 0, part.rows)
        q, pages = ops.rope_append(site, fused[at], pages)
        o = ops.decode_attention(site, q, pages)
        slots = batch.slots[0]
        page, place = slots // self.geometry.page_size, slots % self.geometry.page_size
        wide = tuple(p.at[page, :, place].get(mode="clip") for p in pages)
        if self.geometry.policy.kv_bits == 16:
            return o, pages, wide
        rows = self._packed(wide)
        return o, jax.tree.map(lambda p, new: append(p, new, slots), stored, rows), rows

    def _decodes(self, part: Part, positions: Array, live: Array) -> Batch:
        """One token of each row of a part; rows that are not live write and see nothing."""
        g, r = self.geometry, part.rows
        slots = jnp.where(live, jnp.arange(r) * g.pages * g.page_size + positions, _NOWHERE).astype(jnp.int32)
        lengths = jnp.where(live, positions + 1, 0)
        return self._batch(
            positions, slots, lengths, jnp.int32(r), jnp.zeros((1, 4), jnp.int32), jnp.arange(r)
        )

    def _prompts(self, part: Part, lengths: Array) -> Batch:
        """The prompts of a part, each padded to the same number of tokens."""
        g, r = self.geometry, part.rows
        row, position = jnp.repeat(jnp.arange(r), g.prompt), jnp.tile(jnp.arange(g.prompt), r)
        slots = jnp.where(position < lengths[row], row * g.pages * g.page_size + position, _NOWHERE).astype(
            jnp.int32
        )
        first, none = jnp.arange(r) * g.prompt, jnp.zeros(r, jnp.int32)
        chunks = jnp.stack([first, lengths, jnp.arange(r), none], axis=1).astype(jnp.int32)
        return self._batch(position, slots, lengths, jnp.int32(0), chunks, first + lengths - 1)

    def _batch(
        self, positions: Array, slots: Array, lengths: Array, decodes: Array, chunks: Array, last: Array
    ) -> Batch:
        groups, r, pages = len(self.geometry.config.windows), lengths.shape[0], self.geometry.pages
        table = jnp.arange(r * pages, dtype=jnp.int32).reshape(r, pages)
        return Batch(
            token_ids=jnp.zeros_like(positions),
            positions=positions,
            slots=jnp.broadcast_to(slots, (groups, *slots.shape)),
            page_table=jnp.broadcast_to(table, (groups, *table.shape)),
            lengths=lengths,
            num_decodes=decodes,
            chunks=chunks,
            sample_tokens=last,
        )

    def _empty(self, rows: int) -> KV:
        g = self.geometry
        shape = (rows * g.pages, self._kv_heads, g.page_size, g.config.head_dim)
        return jnp.zeros(shape, g.dtype), jnp.zeros(shape, g.dtype)

    @property
    def _kv_heads(self) -> int:
        """Those of one device."""
        return self.geometry.kv_heads // self.geometry.tp

    def _packed(self, kv: KV) -> Any:
        return tuple(map(quantize_kv, kv)) if self.geometry.policy.kv_bits == 4 else kv

    def _gathered(self, x: Array) -> Array:
        """All columns of what has this device's."""
        axis = self.context.axis
        return x if axis is None else lax.all_gather(x, axis, axis=1, tiled=True)

    def _cut(self, x: Array) -> Pieces:
        """x [T, D] in the pieces that the activations' tiers have, this device's columns of it."""
        g, axis = self.geometry, self.context.axis
        if axis is not None:
            width = x.shape[1] // g.tp
            x = lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * width, width, axis=1)
        tokens = x.shape[0] // g.batch
        return tuple(x[part.start * tokens : part.stop * tokens] for part in g.activation_parts)


def _whole(pieces: Sequence[Array]) -> Array:
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)


def _unpacked(kv: Any, dtype: Any) -> KV:
    """Pages that can be attended to, of what is stored."""
    return tuple(p if isinstance(p, jax.Array) else dequantize_kv(p, dtype) for p in kv)  # type: ignore[return-value]
