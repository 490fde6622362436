"""The packed int32 buffer of a step's host inputs, which crosses to the device in one copy.

`StepLayout` fixes the shapes of a token bucket. `pack` fills a buffer on the host, and `unpack` reads it on
the device, both by the same table of fields.
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxflow.model.batch import Batch, cache_slots
from jaxflow.pipeline.choice import Gain
from jaxflow.scheduler.state import StepWork

_KINDS = {"i": np.int32, "f": np.float32, "u": np.uint32}


@dataclasses.dataclass(frozen=True)
class StepLayout:
    """The fixed shapes of a step: T tokens, R rows, C chunks, A page-table entries; Q slots, G layer groups.

    Attributes:
      borders: token positions between the plan's nano-batches. No chunk crosses a border.
      plan: the plan's name, unique in its bucket.
      gain: the predicted gain that decides between the bucket's plans; None if there is no decision.
      decodes: True for steps of decodes only. Their program has no chunks and no chunk kernels.
      full: False for steps that never run the full sampler.
    """

    tokens: int
    rows: int
    slots: int
    page_size: int
    borders: tuple[int, ...] = ()
    groups: int = 1
    plan: str = "sequential"  # a name that is unique among the bucket's
    gain: Gain | None = None
    decodes: bool = False
    full: bool = True

    @property
    def key(self) -> tuple[int, str, bool]:
        """The key of the layout's program among the engine's programs."""
        return self.tokens, self.plan, self.decodes

    @property
    def chunks(self) -> int:
        return 0 if self.decodes else self.rows + len(self.borders)

    @property
    def page_appends(self) -> int:
        """Page-table entries in the buffer: a row may cross a page border, and prefill fills pages."""
        return self.groups * (2 * self.rows + self.tokens // self.page_size)

    @functools.cached_property
    def fields(self) -> dict[str, tuple[int, tuple[int, ...], str]]:
        """name -> (offset in the buffer, shape, kind: i int32, f float32, u uint32)."""
        shapes = {
            "num_decodes": ((), "i"),
            "token_ids": ((self.tokens,), "i"),  # -1: gather the sequence's last sampled token on the device
            "positions": ((self.tokens,), "i"),
            "token_rows": ((self.tokens,), "i"),  # -1: padding
            "row_slots": ((self.rows,), "i"),  # Q: not there
            "lengths": ((self.rows,), "i"),
            "sample_tokens": ((self.rows,), "i"),
            "samples": (
                (self.rows,),
                "i",
            ),  # the row's sampler, `programs.PLAIN`, FULL or LOGPROBS; 0 without a sample
            "chunks": ((self.chunks, 4), "i"),
            "page_appends": ((self.page_appends, 4), "i"),  # group (G: not there), slot, index, page
            "temperature": ((self.rows,), "f"),
            "seeds": ((self.rows, 2), "u"),
        }
        out, offset = {}, 0
        for name, (shape, kind) in shapes.items():
            out[name] = (offset, shape, kind)
            offset += math.prod(shape)
        return out

    @functools.cached_property
    def size(self) -> int:
        """The number of int32 words in the buffer."""
        return max(offset + math.prod(shape) for offset, shape, _ in self.fields.values())

    def views(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        """Return the fields of a host buffer as writable views."""
        return {
            name: np.ndarray(shape, dtype, buffer, start) for name, start, shape, dtype in self._host_fields
        }

    @functools.cached_property
    def _host_fields(self) -> list[tuple[str, int, tuple[int, ...], np.dtype]]:
        """Name, offset in bytes, shape and dtype of each field.

        Every step reads the list, so it is made once.
        """
        return [
            (name, offset * 4, shape, np.dtype(_KINDS[kind]))
            for name, (offset, shape, kind) in self.fields.items()
        ]

    def field(self, buffer: jax.Array, name: str) -> jax.Array:
        """Return one field of a device buffer."""
        offset, shape, kind = self.fields[name]
        flat = lax.slice_in_dim(buffer, offset, offset + math.prod(shape)).reshape(shape)
        return flat if kind == "i" else lax.bitcast_convert_type(flat, _KINDS[kind])


@dataclasses.dataclass(frozen=True)
class SlotSampling:
    """The sampling settings of each slot, [Q] each, which `pack` reads."""

    temperature: np.ndarray
    seeds: np.ndarray  # [Q, 2] uint32, high word first
    sampler: np.ndarray  # int32, PLAIN, FULL or LOGPROBS

    @classmethod
    def empty(cls, slots: int) -> "SlotSampling":
        return cls(np.zeros(slots, np.float32), np.zeros((slots, 2), np.uint32), np.zeros(slots, np.int32))

    def set(self, slot: int, temperature: float, seed: int, sampler: int) -> None:
        self.temperature[slot] = temperature
        self.sampler[slot] = sampler
        self.seeds[slot] = (seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF


def empty_buffer(layout: StepLayout) -> np.ndarray:
    """Return the buffer of a step without work, [layout.size] int32."""
    buffer = np.zeros(layout.size, np.int32)
    fields = layout.views(buffer)
    fields["token_rows"][:] = -1
    fields["row_slots"][:] = layout.slots
    fields["page_appends"][:, 0] = layout.groups
    return buffer


def pack(layout: StepLayout, work: StepWork, table: SlotSampling) -> tuple[np.ndarray, np.ndarray]:
    """Return the step's buffer, [layout.size] int32, and the page appends beyond it, [n, 4] int32.

    The rows are the decodes in order, then one for each prefilling sequence.
    """
    buffer = np.zeros(layout.size, np.int32)
    f = layout.views(buffer)
    n = len(work.decode_slots)
    f["num_decodes"][...] = n
    f["token_ids"][:n] = -1
    f["positions"][:n] = work.decode_positions
    f["token_rows"][:n] = np.arange(n)
    f["token_rows"][n:] = -1
    f["row_slots"][:n] = work.decode_slots
    f["row_slots"][n:] = layout.slots
    f["lengths"][:n] = work.decode_positions + 1
    f["sample_tokens"][:n] = np.arange(n)
    f["samples"][:n] = table.sampler[work.decode_slots]
    f["page_appends"][:, 0] = layout.groups
    token, piece = n, 0
    for row, chunk in enumerate(work.chunks, start=n):
        stop = token + chunk.tokens
        # A pre-empted sequence waits until the host knows its last token, so all tokens here are known.
        f["token_ids"][token:stop] = chunk.token_ids
        f["positions"][token:stop] = np.arange(chunk.start, chunk.start + chunk.tokens)
        f["token_rows"][token:stop] = row
        f["row_slots"][row] = chunk.slot
        f["lengths"][row] = chunk.start + chunk.tokens
        f["sample_tokens"][row] = stop - 1
        f["samples"][row] = table.sampler[chunk.slot] if chunk.samples else 0
        for first, last in _cut(token, stop, layout.borders):
            f["chunks"][piece] = first, last - first, row, chunk.start + first - token
            piece += 1
        token = stop
    rows = n + len(work.chunks)
    slots = f["row_slots"][:rows]
    f["temperature"][:rows] = table.temperature[slots]
    f["seeds"][:rows] = table.seeds[slots]
    appends = work.page_appends
    fits = min(len(appends), layout.page_appends)
    f["page_appends"][:fits] = appends[:fits]
    return buffer, appends[fits:]


def _cut(start: int, stop: int, borders: tuple[int, ...]) -> list[tuple[int, int]]:
    """Split [start, stop) at the borders in it."""
    cuts = [start, *(b for b in borders if start < b < stop), stop]
    return list(itertools.pairwise(cuts))


def apply_page_appends(page_table: jax.Array, appends: jax.Array) -> jax.Array:
    """Write entries (group, slot, index, page) into page_table [G, Q, MP]. Entries outside are dropped."""
    group, slot, index, page = (appends[:, i] for i in range(4))
    return page_table.at[group, slot, index].set(page, mode="drop", wrap_negative_indices=False)


def unpack(
    layout: StepLayout, buffer: jax.Array, page_table: jax.Array, last_tokens: jax.Array | None
) -> Batch:
    """Return the `Batch` of a buffer, the page table [G, Q, MP] and each slot's last sampled token [Q].

    last_tokens: None for a pipeline stage that reads no token ids.
    """
    f = functools.partial(layout.field, buffer)
    slots = f("row_slots")
    rows = f("token_rows")
    positions = f("positions")
    token_ids = f("token_ids")
    if last_tokens is not None:
        sampled = jnp.take(last_tokens, jnp.take(slots, jnp.maximum(rows, 0), mode="clip"), mode="clip")
        token_ids = jnp.where(token_ids < 0, sampled, token_ids)
    table = jnp.take(page_table, slots, axis=1, mode="clip")
    return Batch(
        token_ids=token_ids,
        positions=positions,
        slots=cache_slots(table, rows, positions, layout.page_size),
        page_table=table,
        lengths=f("lengths"),
        num_decodes=f("num_decodes"),
        chunks=f("chunks"),
        sample_tokens=f("sample_tokens"),
    )
