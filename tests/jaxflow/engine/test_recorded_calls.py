"""A recorded call replays as the call that was made."""

import types
from collections.abc import Sequence
from typing import Any

import jax
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as drawn

from jaxflow.engine.layout import StepLayout
from jaxflow.engine.recorded_calls import CallRecorder, every_layout, replay
from jaxflow.kv.tiers.page import HOST_MEMORY, Parts
from jaxflow.model.slot_params import slot_values

LAYOUTS = {
    16: (StepLayout(16, 4, 4, 16), StepLayout(16, 4, 4, 16, plan="other")),
    64: (StepLayout(64, 4, 4, 16),),
}
INTS = st.integers(-(2**31), 2**31 - 1)


class Fake:
    """An executor that keeps its calls."""

    def __init__(self, ranks: int = 1) -> None:
        self.ranks, self.mask_words = ranks, 2
        self.layouts = LAYOUTS
        self.decode_layouts = {4: StepLayout(4, 4, 4, 16, decodes=True)}
        self.calls: list[Any] = []

    def run(self, *args: Any, **named: Any) -> None:
        self.calls.append((*args, *named.values()))

    def set_slot(self, *args: Any) -> None:
        self.calls.append(args)


def recorded(ranks: int = 1) -> tuple[Any, list[bytes], Any]:
    fake, sent = Fake(ranks), []
    return fake, sent, CallRecorder(fake, types.SimpleNamespace(send=sent.append))  # type: ignore[arg-type]


@given(st.data())
def test_steps(data):
    ranks = data.draw(st.integers(1, 3))
    fake, sent, recorder = recorded(ranks)
    layout = data.draw(st.sampled_from(every_layout(fake)))
    buffer = data.draw(drawn.arrays(np.int32, ranks * layout.size, elements=INTS))
    of_ranks = [] if ranks == 1 else [st.just(ranks)]
    shapes = st.tuples(*of_ranks, st.integers(0, 3), st.just(4))
    appends = data.draw(drawn.arrays(np.int32, shapes, elements=INTS))
    targets = data.draw(st.none() | drawn.arrays(np.int32, ranks * layout.tokens, elements=INTS))
    masks = data.draw(st.none() | drawn.arrays(np.int32, (ranks * layout.rows, 2), elements=INTS))
    full = data.draw(st.booleans())
    recorder.run(layout, buffer, appends, full, targets, masks)
    replay(fake, every_layout(fake), {}, sent[0])
    ((found, *given),) = fake.calls
    arrays, (is_full, found_targets, *found_masks) = given[:2], given[2:]
    assert (masks is None) == (not found_masks)
    for ours, theirs in zip([] if masks is None else [masks], found_masks, strict=True):
        np.testing.assert_array_equal(ours, theirs())
    assert (found, is_full) == (layout, full)
    for ours, theirs in zip([buffer, appends], arrays, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert (targets is None) == (found_targets is None)
    if targets is not None:
        np.testing.assert_array_equal(targets, found_targets)


@given(st.integers(0, 2**30), st.floats(0, 1, width=32), st.lists(st.integers(0, 2**30), max_size=9))
def test_slots(top_k, top_p, ids):
    fake, sent, recorder = recorded()
    values = slot_values(top_k=top_k, top_p=top_p, logit_bias={3: 0.5}, bad_words=[[1, 2]])
    recorder.set_slot(3, values, np.array(ids, np.int32), 2)
    replay(fake, every_layout(fake), {}, sent[0])
    ((slot, found, found_ids, num_prompt),) = fake.calls
    assert (slot, num_prompt, found_ids.tolist()) == (3, 2, ids)
    for ours, theirs in zip(jax.tree.leaves(values), jax.tree.leaves(found), strict=True):
        assert np.asarray(ours).dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


class FakePages(Fake):
    """An executor with a dict of pages as its cache."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[tuple[int, int], float] = {}

    def gather_pages(self, group: int, pages: Sequence[int]) -> list[jax.Array]:
        return [jax.numpy.full((1, 2), self.cache.get((group, page), -1.0)) for page in pages]

    def scatter_pages(self, group: int, pages: Sequence[int], data: Sequence[jax.Array]) -> None:
        self.cache |= {(group, page): float(one[0, 0]) for page, one in zip(pages, data, strict=True)}


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_pages_outside_the_cache(moves):
    """A follower has the pages of process 0 after gathers, copies, scatters and drops in any order."""
    ours, theirs, sent = FakePages(), FakePages(), []
    recorder = CallRecorder(ours, types.SimpleNamespace(send=sent.append))  # type: ignore[arg-type]
    ours.cache = {(group, page): 10.0 * group + page for group in range(2) for page in range(10)}
    theirs.cache, pages, held = dict(ours.cache), {}, []
    for kind, a, b in moves:
        if kind == 0 or not held:
            found = ours.gather_pages(a % 2, [a, b])
            recorder.gathered(a % 2, [a, b], found)
            held += found
        elif kind == 1:
            held += recorder.copy([held[a % len(held)], held[b % len(held)]], HOST_MEMORY if a % 2 else None)
        elif kind == 2:
            recorder.scatter_pages(a % 2, [b], [held[a % len(held)]])
            ours.scatter_pages(a % 2, [b], [held[a % len(held)]])
        else:
            del held[a % len(held)]
        found = None
        for call in sent:
            replay(theirs, every_layout(theirs), pages, call)  # type: ignore[arg-type]
        sent.clear()
        assert theirs.cache == ours.cache
    held.clear()
    recorder.gathered(0, [], [])
    for call in sent:
        replay(theirs, every_layout(theirs), pages, call)  # type: ignore[arg-type]
    assert not pages


def test_a_process_without_a_part_of_a_page_names_it_too():
    """Over pipeline stages a process may hold no part; the other processes hold theirs by the same names."""
    ours, theirs, sent = FakePages(), FakePages(), []
    recorder = CallRecorder(ours, types.SimpleNamespace(send=sent.append))  # type: ignore[arg-type]
    theirs.cache, pages = {(0, 3): 5.0, (0, 4): 6.0}, {}
    found = [Parts(()), Parts(())]
    recorder.gathered(0, [3, 4], found)
    on_host = recorder.copy(found, HOST_MEMORY)
    recorder.scatter_pages(0, [8, 9], on_host[::-1])
    assert all(isinstance(page, Parts) for page in on_host)
    del found, on_host
    recorder.gathered(0, [], [])
    for call in sent:
        replay(theirs, every_layout(theirs), pages, call)  # type: ignore[arg-type]
    assert not pages and theirs.cache == {(0, 3): 5.0, (0, 4): 6.0, (0, 8): 6.0, (0, 9): 5.0}


@pytest.mark.parametrize("call", [b"", b"\x01", msgspec.msgpack.encode([0, 0, False, b"1234", b"", None])])
def test_a_damaged_call_is_refused(call):
    fake, _, _ = recorded()
    with pytest.raises((ValueError, msgspec.MsgspecError)):
        replay(fake, every_layout(fake), {}, call)
    assert not fake.calls
