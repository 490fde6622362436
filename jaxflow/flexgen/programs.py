"""Compiled functions of the block steps, one for each kind of layer and phase, made of the engine's ops.

    embed            token ids -> x
    prefill          weights, x, device KV, lengths -> x, device KV, pages of the other splits
    decode           weights, x, device KV, loaded KV, positions, live -> x, device KV, loaded KV, new rows
    before, after    the two halves of a decode, between which the host attends to KV off the device, or
                     reads the chosen rows of V (`jaxflow.flexgen.sparse_values`)
    hidden, sample   weights of the ends, x -> one token a row

`x` has one array for each tier of the activations. On several devices each device has its columns of `x` and
its heads (`jaxflow.flexgen.geometry`). KV is (keys, values), as stored. 4-bit KV is unpacked before the
attention, and this token's KV is packed on every tier, so that a placement does not change the computed
values. Loaded KV is returned only to be updated in place.
"""

import concurrent.futures
import dataclasses
import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jaxflow.config import Layer
from jaxflow.flexgen import sparse_values
from jaxflow.flexgen.geometry import (
    REPLICATED,
    SHARDED,
    Geometry,
    PlacedWeights,
    Split,
    device_sharding,
    halves,
    spec_of,
)
from jaxflow.kv.int4 import dequantize_kv, quantize_kv
from jaxflow.model import ops, sampling
from jaxflow.model.batch import Batch
from jaxflow.model.op_registry import KV, Context, Site, Weights, op_scope
from jaxflow.model.slot_params import SlotParams, empty_slots
from jaxflow.model.transformer import after_attention
from jaxflow.parallel.collectives import added
from jaxflow.parallel.mesh import axis_of, over_shards, sharded
from pallas_kernels.pointwise.rope_append.reference import append

Array = jax.Array
Pieces = tuple[Array, ...]
_NOWHERE = jnp.iinfo(jnp.int32).max  # a slot outside every cache


@dataclasses.dataclass(frozen=True)
class OffloadPrograms:
    """The functions of one geometry, not compiled. `context.config` is the geometry's model."""

    geometry: Geometry
    context: Context

    # ---- the ends of the model

    def embed(self, ends: Weights, token_ids: Array, positions: Array) -> Pieces:
        """Return x of token_ids, positions: [T] int32, the T tokens of all rows of a batch, row by row."""
        return self._cut(ops.embed(Site(self.context, ends), token_ids, positions))

    def hidden(self, ends: Weights, x: Pieces, last: Array) -> Array:
        """Return the normed hidden states [b, D] for the draw. `last`: [b] int32, each row's index in x."""
        return ops.final_norm(Site(self.context, ends), self._gathered(_whole(x)[last]), None)[1]

    def sample(
        self, ends: Weights, hidden: Array, temperature: Array, seeds: Array, positions: Array
    ) -> Array:
        """Draw by greedy or temperature sampling: [b] int32, one token a row.

        Arguments: see `sampling.plain`.
        """
        logits = self._logits(ends, hidden)
        with op_scope("sample"):
            return sampling.plain(logits, temperature, seeds, positions, draw=self.context.kernels.draw)

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
        asked: Array,
    ) -> tuple[Array, Array, Any]:
        """Draw with all settings: tokens, counts (donated) and log-probabilities.

        Arguments: see `sampling.full`.
        """
        logits, kernels = self._logits(ends, hidden), self.context.kernels
        with op_scope("sample"):
            return sampling.full(
                logits,
                temperature,
                seeds,
                positions,
                slots,
                params,
                counts,
                asked,
                draw_filtered=kernels.draw_filtered,
            )

    def _logits(self, ends: Weights, hidden: Array) -> Array:
        return ops.logits(Site(self.context, ends), hidden)

    # ---- layers

    def prefill(self, layer: Layer) -> Callable:
        """Return a function (w, x, home, lengths [b]) -> (x, home, pages of the other splits).

        `home`: the device's KV, donated; () without a device split.
        """
        g, c = self.geometry, self.context

        def run(w: Weights, x: Pieces, home: Any, lengths: Array) -> tuple[Pieces, Any, tuple]:
            stream, fused = self._before(w, x)
            outputs, kept, away = [], (), []
            for split in g.kv_splits:
                tokens = slice(split.start * g.prompt, split.stop * g.prompt)
                batch = self._prompts(split, lengths[split.start : split.stop])
                pages = _unpacked(home, g.dtype) if split.tier == "device" else self._empty(split.rows)
                site = Site(c, w, layer, batch, 0, batch.num_tokens)
                q, pages = ops.rope_append(site, fused[tokens], pages)
                outputs.append(ops.chunk_attention(site, q, pages))
                pages = self._packed(pages)
                if split.tier == "device":
                    kept = pages
                else:
                    away.append(pages)
            return self._after(w, layer, stream, _whole(outputs)), kept, tuple(away)

        return run

    def decode(self, layer: Layer) -> Callable:
        """Return a function (w, x, home, loaded, positions [b], live [b]) -> (x, home, loaded, rows).

        `home` and, for 16-bit KV, `loaded` are donated.
        """
        g = self.geometry

        def run(
            w: Weights, x: Pieces, home: Any, loaded: tuple, positions: Array, live: Array
        ) -> tuple[Pieces, Any, tuple, tuple]:
            stream, fused = self._before(w, x)
            outputs, updated, rows, left = [], [], [], list(loaded)
            for split in g.kv_splits:
                stored = home if split.tier == "device" else left.pop(0)
                o, stored, new = self._attend(layer, w, split, fused, stored, positions, live)
                outputs.append(o)
                if split.tier == "device":
                    home = stored
                else:
                    updated.append(stored)
                    rows.append(new)
            x = self._after(w, layer, stream, _whole(outputs))
            return x, home, () if g.policy.kv_bits == 4 else tuple(updated), tuple(rows)

        return run

    def before(self, layer: Layer) -> Callable:
        """Return a function (w, x, home, loaded, positions, live) -> (stream, o, home, asked, kept, rows).

        `home` is donated. `o` is the attention of the device's rows; the others are by split of the other
        tiers. For attention on the host, `loaded` is () and `asked` are the queries. Otherwise
        `loaded` are the keys, `asked` the positions of the chosen V rows, and `kept` their
        weights with the new token's V row.
        """
        g = self.geometry

        def run(
            w: Weights, x: Pieces, home: Any, loaded: tuple, positions: Array, live: Array
        ) -> tuple[Array, Pieces, Any, Pieces, tuple, tuple]:
            stream, fused = self._before(w, x)
            outputs: Pieces = ()
            asked, kept, rows, left = [], [], [], list(loaded)
            for split in g.kv_splits:
                if split.tier == "device":
                    o, home, _ = self._attend(layer, w, split, fused, home, positions, live)
                    outputs = (o,)
                    continue
                q, new = self._new_token(layer, w, split, fused, positions, live)
                if loaded:
                    keys = _wide(left.pop(0)[0], g.dtype)
                    chosen, weights = self._choose(layer, split, q, keys, new[0], positions, live)
                    asked.append(chosen)
                    kept.append((weights, new[1]))
                    rows.append(self._packed(new))
                else:
                    asked.append(q)
                    rows.append(new)
            return stream, outputs, home, tuple(asked), tuple(kept), tuple(rows)

        return run

    def after(self, layer: Layer) -> Callable:
        """Return a function (w, stream, o of the device's rows, kept, arrived) -> x.

        `kept`: as `before` returns it. `arrived`, by split of the other tiers: the host's
        output, or the chosen rows of V.
        """
        dtype = self.geometry.dtype

        def run(w: Weights, stream: Array, outputs: Pieces, kept: tuple, arrived: tuple) -> Pieces:
            if kept:
                with op_scope("decode_attention"):
                    arrived = tuple(
                        sparse_values.attend(weights, _wide(values, dtype), new)
                        for (weights, new), values in zip(kept, arrived, strict=True)
                    )
            return self._after(w, layer, stream, _whole((*outputs, *arrived)))

        return run

    # ---- parts of a layer

    def _before(self, w: Weights, x: Pieces) -> tuple[Array, Array]:
        """Return the residual stream and the fused projection."""
        site = Site(self.context, w)
        stream, h = ops.attn_norm(site, self._gathered(_whole(x)), None)
        return stream, ops.qkv(site, h)

    def _after(self, w: Weights, layer: Layer, x: Array, o: Array) -> Pieces:
        """Return x after a layer.

        The residual add is done at once, so that one array goes on to the next layer.
        """
        x, y = after_attention(Site(self.context, w, layer), x, o)
        return self._cut(x + added(y))

    def _attend(
        self, layer: Layer, w: Weights, split: Split, fused: Array, stored: Any, positions: Array, live: Array
    ) -> tuple[Array, Any, Any]:
        """Return (output, stored KV with this token, this token's rows as stored) of a split."""
        at = slice(split.start, split.stop)
        batch = self._decodes(split, positions[at], live[at])
        pages = _unpacked(stored, self.geometry.dtype)
        site = Site(self.context, w, layer, batch, 0, split.rows)
        q, pages = ops.rope_append(site, fused[at], pages)
        slots = batch.slots[0]
        page, place = slots // self.geometry.page_size, slots % self.geometry.page_size
        wide = tuple(p.at[page, :, place].get(mode="clip") for p in pages)
        if self.geometry.policy.sparse_values:
            chosen, weights = self._choose(layer, split, q, pages[0], wide[0], positions, live)
            with op_scope("decode_attention"):
                values = sparse_values.take_rows(self._by_row(pages[1], split), chosen)
                o = sparse_values.attend(weights, values, wide[1])
        else:
            o = ops.decode_attention(site, q, pages)
        if self.geometry.policy.kv_bits == 16:
            return o, pages, wide
        rows = self._packed(wide)
        return o, jax.tree.map(lambda p, new: append(p, new, slots), stored, rows), rows

    def _new_token(
        self, layer: Layer, w: Weights, split: Split, fused: Array, positions: Array, live: Array
    ) -> tuple[Array, KV]:
        """Return the queries [R, N, H], and the keys and values [R, K, H], of a split's new tokens."""
        g = self.geometry
        # pages for one token of every row: only the op's writes are used
        few = -(-split.rows // g.page_size)
        at = slice(split.start, split.stop)
        batch = self._decodes(split, positions[at], live[at])
        batch = dataclasses.replace(batch, slots=jnp.broadcast_to(jnp.arange(split.rows), batch.slots.shape))
        shape = (few, self._kv_heads, g.page_size, g.config.head_dim)
        pages = (jnp.zeros(shape, g.dtype), jnp.zeros(shape, g.dtype))
        q, pages = ops.rope_append(Site(self.context, w, layer, batch, 0, split.rows), fused[at], pages)
        k, v = (p.swapaxes(1, 2).reshape(-1, *shape[1::2])[: split.rows] for p in pages)
        return q, (k, v)

    def _choose(
        self, layer: Layer, split: Split, q: Array, keys: Array, new: Array, positions: Array, live: Array
    ) -> tuple[Array, Array]:
        """Return the positions and the weights of the V rows that a split's new tokens attend to."""
        g, at = self.geometry, slice(split.start, split.stop)
        with op_scope("decode_attention"):
            return sparse_values.choose(
                q,
                self._by_row(keys, split),
                new,
                positions[at],
                live[at],
                percent=g.policy.value_top_k_percent,
                most=g.top_rows(layer),
                scale=g.config.scale,
                window=layer.window,
                soft_cap=g.config.attention_soft_cap,
            )

    def _by_row(self, pages: Array, split: Split) -> Array:
        """Return pages as [R, K, MP · S, H]."""
        heads, size, width = pages.shape[1:]
        by_row = pages.reshape(split.rows, -1, heads, size, width).swapaxes(1, 2)
        return by_row.reshape(split.rows, heads, -1, width)

    def _decodes(self, split: Split, positions: Array, live: Array) -> Batch:
        """Return the batch of one token of each row of a split.

        Rows that are not live write and see nothing.
        """
        g, r = self.geometry, split.rows
        slots = jnp.where(live, jnp.arange(r) * g.pages * g.page_size + positions, _NOWHERE).astype(jnp.int32)
        lengths = jnp.where(live, positions + 1, 0)
        return self._batch(
            positions, slots, lengths, jnp.int32(r), jnp.zeros((1, 4), jnp.int32), jnp.arange(r)
        )

    def _prompts(self, split: Split, lengths: Array) -> Batch:
        """Return the batch of a split's prompts, each padded to the same number of tokens."""
        g, r = self.geometry, split.rows
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
        """The KV heads of one device."""
        return self.geometry.kv_heads // self.geometry.tp

    def _packed(self, kv: KV) -> Any:
        return tuple(map(quantize_kv, kv)) if self.geometry.policy.kv_bits == 4 else kv

    def _gathered(self, x: Array) -> Array:
        """Return all columns of x, by an all-gather."""
        axis = self.context.axis
        return x if axis is None else lax.all_gather(x, axis, axis=1, tiled=True)

    def _cut(self, x: Array) -> Pieces:
        """Return x [T, D] split over the activations' tiers, with this device's columns."""
        g, axis = self.geometry, self.context.axis
        if axis is not None:
            width = x.shape[1] // g.tp
            x = lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * width, width, axis=1)
        tokens = x.shape[0] // g.batch
        return tuple(x[split.start * tokens : split.stop * tokens] for split in g.activation_splits)


def _whole(pieces: Sequence[Array]) -> Array:
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)


def _unpacked(kv: Any, dtype: Any) -> KV:
    """Return stored keys and values in 16 bits or more."""
    k, v = kv
    return _wide(k, dtype), _wide(v, dtype)


def _wide(stored: Any, dtype: Any) -> Array:
    """Return stored pages or rows in 16 bits or more."""
    return stored if isinstance(stored, jax.Array) else dequantize_kv(stored, dtype)


_compiled = 0  # backend compilations of this process
_programs: dict[tuple[bytes, Any], Any] = {}


def _count_compilation(event: str, duration_secs: float, **kwargs: str | int) -> None:
    global _compiled
    _compiled += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(_count_compilation)


def compilations() -> int:
    """Return the number of backend compilations of this process."""
    return _compiled


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Compiled functions of `OffloadPrograms`, by layer, or by phase: True for prompts and False for decodes.

    Attributes:
      vocabulary: V', with padding.
      working_bytes: device memory of the largest program beyond its inputs.
    """

    embed: dict[bool, Callable]
    prefill: dict[Layer, Callable]
    decode: dict[Layer, Callable]
    before: dict[Layer, Callable]
    after: dict[Layer, Callable]
    hidden: dict[bool, Callable]
    sample: Callable
    sample_full: Callable
    vocabulary: int
    working_bytes: int


def attends_on_host(g: Geometry) -> bool:
    """Return True if decodes attend on the host to a split of their KV."""
    return g.policy.host_attention and any(split.tier != "device" for split in g.kv_splits)


def fetches_rows(g: Geometry) -> bool:
    """Return True if decodes on the device fetch rows of V after they have chosen the rows."""
    away = any(split.tier != "device" for split in g.kv_splits)
    return away and g.policy.sparse_values and not g.policy.host_attention


def compile_programs(
    programs: OffloadPrograms, placed: PlacedWeights, on_progress: Callable[[str], object]
) -> Compiled:
    """Compile all programs of a run.

    `on_progress`: called with the name of each program when it is submitted.
    """
    # Lowering holds Python's lock, so it runs on this thread. XLA compiles concurrently on the pool.
    with concurrent.futures.ThreadPoolExecutor(max(1, min(8, os.cpu_count() or 1))) as pool:
        begun = _begin(programs, placed, pool, on_progress)
        fields = {name: _finished(value) for name, value in begun.items()}
    working = [
        _working_bytes(one)
        for value in fields.values()
        for one in (value.values() if isinstance(value, dict) else [value])
    ]
    return Compiled(**fields, vocabulary=_vocabulary(placed), working_bytes=max(working))


def _begin(
    programs: OffloadPrograms,
    placed: PlacedWeights,
    pool: concurrent.futures.Executor,
    on_progress: Callable[[str], object],
) -> dict[str, Any]:
    """Return the programs of `Compiled` as futures, or dicts of futures."""
    g, b = programs.geometry, programs.geometry.batch

    def build(
        name: str, function: Callable, made: Any, *arguments: Any, donate: tuple[int, ...] = ()
    ) -> concurrent.futures.Future:
        """Submit a program. `made`: the partition of its results."""
        on_progress(name)
        jitted, arguments = _over_devices(function, g.mesh, arguments, made, donate)
        return pool.submit(_compile, jitted.lower(*arguments), g.mesh)

    def vector(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def pieces(tokens: int) -> tuple:
        return tuple(g.activation(split.rows, tokens) for split in g.activation_splits)

    def by_phase(make: Callable[[bool], Any]) -> dict[bool, Any]:
        return {prompt: make(prompt) for prompt in (True, False)}

    away = [split for split in g.kv_splits if split.tier != "device"]
    home = next((g.kv_pages(split.rows) for split in g.kv_splits if split.tier == "device"), ())
    loaded = tuple(g.loaded_pages(split.rows) for split in away)
    kinds = dict(zip(g.config.layers, placed.layers, strict=True))
    tokens = {True: g.prompt, False: 1}
    embed = by_phase(
        lambda p: build(
            "embed", programs.embed, SHARDED, placed.ends, vector(b * tokens[p]), vector(b * tokens[p])
        )
    )
    prefill = {
        layer: build(
            "prefill",
            programs.prefill(layer),
            (SHARDED, SHARDED, SHARDED),
            w,
            pieces(g.prompt),
            home,
            vector(b),
            donate=(2,),
        )
        for layer, w in kinds.items()
    }
    decode, before, after = {}, {}, {}
    live = vector(b, dtype=jnp.bool_)
    for layer, w in kinds.items():
        if attends_on_host(g) or fetches_rows(g):
            first, second = ({key: w[key] for key in keys} for keys in halves(w))
            made = (REPLICATED, SHARDED, SHARDED, SHARDED, SHARDED, SHARDED)
            keys = loaded if fetches_rows(g) else ()
            given = (first, pieces(1), home, keys, vector(b), live)
            before[layer] = build("before", programs.before(layer), made, *given, donate=(2,))
            stream = vector(b, g.config.hidden_size, dtype=g.dtype)
            own = tuple(g.heads(split.rows) for split in g.kv_splits if split.tier == "device")
            if fetches_rows(g):
                kept = tuple(g.kept(layer, split.rows) for split in away)
                others = tuple(g.top_values(layer, split.rows) for split in away)
            else:
                kept, others = (), tuple(g.heads(split.rows) for split in away)
            after[layer] = build("after", programs.after(layer), SHARDED, second, stream, own, kept, others)
        else:
            donate = (2, 3) if g.policy.kv_bits == 16 else (2,)
            made = (SHARDED, SHARDED, SHARDED, SHARDED)
            decode[layer] = build(
                "decode",
                programs.decode(layer),
                made,
                w,
                pieces(1),
                home,
                loaded,
                vector(b),
                live,
                donate=donate,
            )
    slots = jax.eval_shape(lambda: empty_slots(b, _vocabulary(placed)))
    rows = (vector(b, dtype=jnp.float32), vector(b, 2, dtype=jnp.uint32), vector(b))
    states = jax.ShapeDtypeStruct((b, g.config.hidden_size), g.dtype)
    return {
        "embed": embed,
        "prefill": prefill,
        "decode": decode,
        "before": before,
        "after": after,
        "hidden": by_phase(
            lambda p: build("hidden", programs.hidden, REPLICATED, placed.ends, pieces(tokens[p]), vector(b))
        ),
        "sample": build("sample", programs.sample, REPLICATED, placed.ends, states, *rows),
        "sample_full": build(
            "sample_full",
            programs.sample_full,
            REPLICATED,
            placed.ends,
            states,
            *rows,
            vector(b),
            *slots,
            vector(b, dtype=jnp.bool_),
            donate=(7,),
        ),
    }


def _finished(value: Any) -> Any:
    return {key: one.result() for key, one in value.items()} if isinstance(value, dict) else value.result()


def _working_bytes(compiled: Any) -> int:
    """Return the memory of a program beyond its inputs: temporary space and new outputs."""
    found = compiled.memory_analysis()
    return (
        0
        if found is None
        else found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    )


def _vocabulary(placed: PlacedWeights) -> int:
    """Return V', with padding."""
    return ops.head_table(placed.ends).shape[0]


def _over_devices(
    function: Callable, mesh: Mesh, arguments: tuple, made: Any, donate: tuple[int, ...]
) -> tuple[Any, tuple]:
    """Return the jitted function over the mesh, and its arguments' shapes with shardings."""

    def placed(a: Any) -> Any:
        sharding = getattr(a, "sharding", None) or device_sharding(mesh)
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

    arguments = jax.tree.map(placed, arguments)
    if axis_of(mesh) is None:
        return jax.jit(function, donate_argnums=donate), arguments
    run = over_shards(function, mesh, jax.tree.map(spec_of, arguments), made)
    lie = jax.tree.map(lambda spec: sharded(mesh, spec), made)
    return jax.jit(run, donate_argnums=donate, out_shardings=lie), arguments


def _compile(lowered: Any, mesh: Mesh) -> Any:
    """Compile a new program. The runs of a sweep share most programs."""
    # the program text does not show unused arguments
    text = f"{lowered.args_info}\n{lowered.as_text()}"
    key = hashlib.sha256(text.encode()).digest(), mesh
    if key not in _programs:
        _programs[key] = lowered.compile()
    return _programs[key]
