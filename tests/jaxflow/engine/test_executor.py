"""The executor's device state: a step changes only the slots and pages of its batch."""

import jax
import numpy as np
import pytest
import toy
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxflow.engine.layout import SlotSampling, pack
from jaxflow.engine.program_compiler import ProgramCompiler
from jaxflow.engine.program_memory import together
from jaxflow.engine.programs import FULL, LOGPROBS, PLAIN
from jaxflow.model.slot_params import COUNT, IN_PROMPT, slot_values
from jaxflow.scheduler.state import StepWork

MODEL = "tiny-llama"


@pytest.fixture(scope="module")
def executor():
    """Return a new executor with untouched state."""
    made = toy.executor(MODEL, budget=8, seqs=3, pages=12)[1]
    made.warm_up()
    return made


def decodes(slots, positions, appends=()):
    """A step of decodes only."""
    return StepWork(
        decodes=np.full(len(slots), None, object),
        decode_slots=np.array(slots, np.int32),
        decode_positions=np.array(positions, np.int32),
        chunks=(),
        admitted=(),
        num_tokens=len(slots),
        bucket=8,
        page_appends=np.array(appends, np.int32).reshape(-1, 4),
    )


def test_rehearsal_writes_nothing(executor):
    assert not any(np.asarray(a).any() for a in jax.tree.leaves(executor.kv))
    assert not np.asarray(executor.page_table).any()
    assert not np.asarray(executor.last_tokens).any()
    assert executor.compilations == 0


def test_a_step_writes_its_own_rows_only(executor):
    """Two decodes on pages 3 and 5: their keys and their slots' last tokens change, and nothing else."""
    (layout,), table = executor.layouts[8], SlotSampling.empty(3)
    for slot in range(3):
        table.set(slot, 0.0, slot, PLAIN)
    before = [np.asarray(a) for a in jax.tree.leaves(executor.kv)]
    work = decodes([0, 2], [1, 17], [(0, 0, 0, 3), (0, 2, 0, 4), (0, 2, 1, 5)])
    pending = executor.run(layout, *pack(layout, work, table), full=False)
    assert pending.logprobs is None
    assert pending.prompt is None
    for a, b in zip(before, map(np.asarray, jax.tree.leaves(executor.kv)), strict=True):
        changed = {(int(page), int(place)) for page, _, place, _ in zip(*np.nonzero(a != b), strict=True)}
        assert changed == {(3, 1), (5, 1)}
    tokens = np.asarray(pending.tokens)
    np.testing.assert_array_equal(np.asarray(executor.last_tokens), [tokens[0], 0, tokens[1]])
    np.testing.assert_array_equal(np.asarray(executor.page_table)[0, :, :2], [[3, 0], [0, 0], [4, 5]])


@settings(max_examples=20)
@given(st.data())
def test_page_table_entries_beyond_the_buffer(executor, data):
    """The page table follows the entries of a step, for any number of entries."""
    groups, slots, pages = executor.page_table.shape
    every = [(g, q, i) for g in range(groups) for q in range(slots) for i in range(pages)]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    chosen = rng.permutation(every)[: data.draw(st.integers(0, len(every)))]
    appends = np.concatenate([chosen, rng.integers(0, 12, (len(chosen), 1))], axis=1).astype(np.int32)
    expected = np.asarray(executor.page_table).copy()
    for group, slot, index, page in appends:
        expected[group, slot, index] = page
    (layout,) = executor.layouts[8]
    executor.run(layout, *pack(layout, decodes([], [], appends), SlotSampling.empty(slots)), full=False)
    np.testing.assert_array_equal(np.asarray(executor.page_table), expected)


@pytest.mark.parametrize(("prompt", "answer"), [(0, 0), (7, 0), (5, 9), (4096, 0), (4090, 4200)])
def test_a_slot_remembers_the_tokens_that_penalties_look_back_on(executor, prompt, answer):
    """Also a history longer than one call takes; another slot's counts stay."""
    rng = np.random.default_rng(prompt)
    vocab = executor.programs.context.config.vocab_size
    others = np.asarray(executor.counts)[[0, 2]]
    ids = rng.integers(0, vocab, prompt + answer).astype(np.int32)
    executor.set_slot(1, slot_values(top_k=prompt), ids, prompt)
    counts = np.asarray(executor.counts)
    expected = np.minimum(np.bincount(ids[prompt:], minlength=counts.shape[1]), COUNT)
    expected |= np.where(np.bincount(ids[:prompt], minlength=counts.shape[1]) > 0, IN_PROMPT, 0)
    np.testing.assert_array_equal(counts[1], expected)
    np.testing.assert_array_equal(counts[[0, 2]], others)
    assert np.asarray(executor.params.top_k)[1] == prompt


@pytest.mark.parametrize("asks", [FULL, LOGPROBS])
def test_the_full_sampler_counts_what_it_draws_for_those_who_ask(executor, asks):
    (layout,), table = executor.layouts[8], SlotSampling.empty(3)
    for slot, sampler in enumerate((asks, PLAIN, FULL)):
        table.set(slot, 0.0, slot, sampler)
        executor.set_slot(slot, slot_values(), np.zeros(0, np.int32), 0)
    pending = executor.run(layout, *pack(layout, decodes([0, 1], [0, 0]), table), full=True)
    counts, tokens = np.asarray(executor.counts), np.asarray(pending.tokens)
    assert counts[0].sum() == counts[0, tokens[0]] == 1
    assert counts[1:].sum() == 0
    assert pending.logprobs.chosen.shape == (layout.rows,)
    assert np.asarray(pending.logprobs.rank).any() == (asks == LOGPROBS)


def test_memory_it_asks_for(executor):
    held = (executor.page_table, executor.params, executor.counts)
    assert executor.state_bytes() == sum(a.nbytes for a in jax.tree.leaves(held))
    widest = max(executor.layouts)
    logits = executor.layouts[widest][0].rows * executor.counts.shape[1] * 4
    needs = executor.compiler.temporary_needs(widest)
    assert needs["plain"].temporary > logits
    assert needs["full"].results < executor.counts.nbytes, "counts are updated in place"
    # Programs run one after another: the sampler may use the memory of the step.
    results = 2 * sum(need.results for need in needs.values())
    assert together(needs.values()) == max(need.temporary for need in needs.values()) + results


def test_a_step_that_was_measured_with_the_right_pages_is_not_compiled_again(executor, monkeypatch):
    compiled = []
    compile_one = ProgramCompiler._compile

    def record(self, lowered, options=None):
        compiled.append(compile_one(self, lowered, options))
        return compiled[-1]

    monkeypatch.setattr(ProgramCompiler, "_compile", record)
    widest, before = max(executor.layouts), executor.num_pages
    (layout, *_) = executor.layouts[widest]
    for pages, kept in ((before, True), (tuple(n + 1 for n in before), False)):
        compiled.clear()
        needs = executor.compiler.temporary_needs(widest, pages)
        assert needs["plain"] == executor.compiler.temporary_needs(widest)["plain"]
        measured = list(compiled)
        executor.compile()
        assert (executor.compiler.program(layout) in measured) == kept
