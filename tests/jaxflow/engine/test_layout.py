"""`unpack` on the device reads the step's work that `pack` wrote on the host, position by position."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.engine.layout import SlotSampling, StepLayout, apply_page_appends, pack, unpack
from jaxflow.engine.programs import FULL, LOGPROBS, PLAIN
from jaxflow.scheduler.state import Chunk, StepWork

SLOTS, PAGES_A_ROW = 6, 8
LAYOUTS = (
    StepLayout(tokens=16, rows=6, slots=SLOTS, page_size=4),
    StepLayout(tokens=16, rows=6, slots=SLOTS, page_size=4, borders=(5, 6, 11), groups=2),
    StepLayout(tokens=4, rows=4, slots=SLOTS, page_size=8, borders=(3,)),
    StepLayout(tokens=24, rows=6, slots=SLOTS, page_size=1, borders=(1, 23), groups=3),
)


@functools.cache
def device_side(layout):
    """The device's half, compiled: its page table after the step's entries, and its batch."""

    def read(buffer, page_table, last_tokens):
        page_table = apply_page_appends(page_table, layout.field(buffer, "page_appends"))
        others = {
            name: layout.field(buffer, name) for name in ("row_slots", "samples", "temperature", "seeds")
        }
        return page_table, unpack(layout, buffer, page_table, last_tokens), others

    return jax.jit(read)


@st.composite
def steps(draw):
    """A layout, a step of no more than its tokens and rows, slot settings, and many changed page-table
    entries.
    """
    layout = draw(st.sampled_from(LAYOUTS))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = draw(st.integers(0, min(layout.rows, layout.slots)))
    num_decodes = draw(st.integers(0, rows))
    slots = rng.permutation(layout.slots)[:rows].astype(np.int32)
    longest = PAGES_A_ROW * layout.page_size
    positions = rng.integers(0, longest, num_decodes).astype(np.int32)
    left, chunks = layout.tokens - num_decodes, []
    for i, slot in enumerate(slots[num_decodes:]):
        behind = rows - num_decodes - i - 1
        tokens = draw(st.integers(1, min(longest, left - behind)))
        start = draw(st.integers(0, longest - tokens))
        ids = rng.integers(0, 1000, start + tokens).astype(np.int32)
        chunks.append(
            Chunk(types.SimpleNamespace(token_ids=ids), int(slot), start, tokens, draw(st.booleans()))
        )  # type: ignore[arg-type]
        left -= tokens
    entries = [
        (g, q, i) for g in range(layout.groups) for q in range(layout.slots) for i in range(PAGES_A_ROW)
    ]
    changed = rng.permutation(entries)[: draw(st.integers(0, len(entries)))]
    appends = np.concatenate([changed, rng.integers(0, 99, (len(changed), 1))], axis=1).astype(np.int32)
    table = SlotSampling.empty(layout.slots)
    for slot in range(layout.slots):
        table.set(
            slot,
            float(rng.random()),
            int(rng.integers(0, 2**64, dtype=np.uint64)),
            draw(st.sampled_from([PLAIN, FULL, LOGPROBS])),
        )
    work = StepWork(
        decodes=np.full(num_decodes, None, object),
        decode_slots=slots[:num_decodes],
        decode_positions=positions,
        chunks=tuple(chunks),
        admitted=(),
        num_tokens=layout.tokens - left,
        bucket=layout.tokens,
        page_appends=appends,
    )
    return layout, work, table, rng


@given(steps())
def test_round_trip(drawn):
    layout, work, table, rng = drawn
    before = rng.integers(0, 99, (layout.groups, layout.slots, PAGES_A_ROW)).astype(np.int32)
    last = rng.integers(1000, 2000, layout.slots).astype(np.int32)
    buffer, rest = pack(layout, work, table)
    assert buffer.shape == (layout.size,)
    assert buffer.dtype == rest.dtype == np.int32

    # Entries beyond the buffer are applied first. Together they are all entries, in any order, since no entry
    # occurs twice.
    assert len(rest) == max(0, len(work.page_appends) - layout.page_appends)
    told, batch, others = jax.tree.map(
        np.asarray, device_side(layout)(buffer, apply_page_appends(jnp.asarray(before), rest), last)
    )
    pages = before.copy()
    for group, slot, index, page in work.page_appends:
        pages[group, slot, index] = page
    np.testing.assert_array_equal(told, pages)

    n, place = len(work.decode_slots), 0
    expected = [
        ([last[slot]], [position], slot)
        for slot, position in zip(work.decode_slots, work.decode_positions, strict=True)
    ]
    expected += [
        (chunk.token_ids, np.arange(chunk.start, chunk.start + chunk.tokens), chunk.slot)
        for chunk in work.chunks
    ]
    assert batch.num_decodes == n
    for row, (ids, positions, slot) in enumerate(expected):
        span = slice(place, place + len(ids))
        np.testing.assert_array_equal(batch.token_ids[span], ids)
        np.testing.assert_array_equal(batch.positions[span], positions)
        for group in range(layout.groups):
            flat = [
                pages[group, slot, p // layout.page_size] * layout.page_size + p % layout.page_size
                for p in positions
            ]
            np.testing.assert_array_equal(batch.slots[group, span], flat)
        np.testing.assert_array_equal(batch.page_table[:, row], pages[:, slot])
        assert batch.lengths[row] == positions[-1] + 1
        assert batch.sample_tokens[row] == place + len(ids) - 1
        assert others["row_slots"][row] == slot
        assert others["temperature"][row] == table.temperature[slot]
        np.testing.assert_array_equal(others["seeds"][row], table.seeds[slot])
        samples = row < n or work.chunks[row - n].samples
        assert others["samples"][row] == (table.sampler[slot] if samples else 0)
        place += len(ids)
    check_chunks(layout, work, batch.chunks.tolist())

    # Nothing else is there: padding writes outside every cache, and rows beyond have no slot, no keys and
    # draw nothing.
    assert (batch.slots[:, place:] >= 99 * layout.page_size + layout.page_size).all()
    assert (batch.lengths[len(expected) :] == 0).all()
    assert (others["row_slots"][len(expected) :] == layout.slots).all()
    assert (others["samples"][len(expected) :] == 0).all()


def check_chunks(layout, work, pieces):
    """The pieces of each chunk follow each other, cross no border, and make the chunk."""
    pieces = [piece for piece in pieces if piece[1]]
    first = len(work.decode_slots)
    for row, chunk in enumerate(work.chunks, start=first):
        position = chunk.start
        while position < chunk.start + chunk.tokens:
            token, tokens, its_row, start = pieces.pop(0)
            assert (token, its_row, start) == (first, row, position)
            assert not any(token < border < token + tokens for border in layout.borders)
            first, position = first + tokens, position + tokens
        assert position == chunk.start + chunk.tokens
    assert not pieces


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.tokens}-tokens")
def test_fields_fill_the_buffer_without_overlap(layout):
    buffer = np.zeros(layout.size, np.int32)
    for view in layout.views(buffer).values():
        view.reshape(-1).view(np.int32)[:] += 1
    assert (buffer == 1).all()


@given(st.integers(0, 2**64 - 1))
def test_a_seed_is_told_whole(seed):
    table = SlotSampling.empty(2)
    table.set(1, 0.5, seed, PLAIN)
    assert int(table.seeds[1, 0]) << 32 | int(table.seeds[1, 1]) == seed
