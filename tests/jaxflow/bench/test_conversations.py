"""Conversations: each prompt is the full history, sent when due; reusable and reused tokens."""

import threading
import time

import numpy as np
import paths
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.bench.report import reuse
from jaxflow.bench.report.requests import Record
from jaxflow.bench.workload import lengths as workload
from jaxflow.bench.workload.conversations import Conversation, Round, of_items, shared_blocks, synthetic
from jaxflow.bench.workload.drive import converse
from jaxflow.bench.workload.lengths import Item, WorkloadError
from jaxflow.request import Delta, Finished, FinishReason, QueueFull, Started, Timings, Usage


class Counting:
    """Answers with how long its prompt was, token for token; from a thread for
    each request, after `delay_s`.
    """

    def __init__(self, delay_s=0.01, refuse=(), break_off=()):
        self.delay_s, self.refuse, self.break_off = delay_s, refuse, break_off
        self.prompts: dict[str, tuple[float, list[int]]] = {}

    def submit(self, request, mailbox):
        name = request.request_id
        self.prompts[name] = time.perf_counter(), list(request.prompt_token_ids)
        if name in self.refuse:
            raise QueueFull(7, 1.0)
        threading.Thread(target=self.answer, args=(request, mailbox)).start()

    def answer(self, request, mailbox):
        name, prompt, number = request.request_id, len(request.prompt_token_ids), request.sampling.max_tokens
        time.sleep(self.delay_s)
        mailbox.post([Started(name, prompt, prompt // 2, 0)])
        for _ in range(number):
            mailbox.post([Delta(name, 0, (prompt,))])
        error = RuntimeError("boom") if name in self.break_off else None
        mailbox.post(
            [
                Finished(
                    name, 0, FinishReason.LENGTH, Usage(prompt, 0, number), Timings(0, 0, 0, 0), error=error
                )
            ]
        )


def talk(*lengths, arrival_s=0.0, think_s=0.0):
    rounds = [
        Round(np.full(text, 1000 + i, np.int32), output, think_s if i else 0.0)
        for i, (text, output) in enumerate(lengths)
    ]
    return Conversation(arrival_s, tuple(rounds))


def test_a_prompt_is_the_conversation_and_the_new_text():
    engine = Counting()
    [records, one], duration_s = converse(engine, [talk((3, 2), (1, 1), (2, 4)), talk((5, 1))])
    said = [1000] * 3 + [3] * 2 + [1001] + [6] + [1002] * 2
    assert [engine.prompts[f"bench-0-{i}"][1] for i in range(3)] == [said[:3], said[:6], said]
    assert [(r.prompt_tokens, r.output_tokens, r.round, r.known_tokens) for r in records] == [
        (3, 2, 1, 0),
        (6, 1, 2, 5),
        (9, 4, 3, 7),
    ]
    assert [(r.prompt_tokens, r.cached_prompt_tokens) for r in one] == [(5, 2)] and all(
        r.completed for r in [*records, *one]
    )
    assert duration_s >= 0.03, "one round after the other"


def test_a_round_is_sent_after_the_previous_answer():
    engine, begun_s = Counting(delay_s=0.02), time.perf_counter()
    [[first, second], [late]], _ = converse(
        engine, [talk((2, 1), (2, 1), think_s=0.1), talk((2, 1), arrival_s=0.05)]
    )
    assert first.finished_s is not None and second.sent_s >= first.finished_s + 0.1
    assert late.sent_s >= begun_s + 0.05, "the first may be sent a little after it arrived"
    assert late.sent_s < second.sent_s, "nobody waits for another's pause"


def test_a_failed_round_ends_its_conversation():
    engine = Counting(refuse={"bench-0-1"}, break_off={"bench-1-0"})
    [refused, broken, whole], _ = converse(engine, [talk((2, 1), (2, 1), (2, 1))] * 3)
    assert [r.completed for r in refused] == [True, False] and "QueueFull" in str(refused[1].error)
    assert [r.error for r in broken] == ["RuntimeError: boom"]
    assert [r.completed for r in whole] == [True] * 3


@given(st.integers(1, 5), st.integers(1, 4), st.integers(20, 80), st.integers(0, 2**32))
def test_synthetic_conversations_keep_their_lengths_and_the_limit(number, rounds, limit, seed):
    openings = [Item(8, 4, arrival_s=float(i)) for i in range(number)]
    later = workload.constant(number * (rounds - 1), 6, 3)
    talks = synthetic(openings, later, 100, think_s=2.0, max_tokens=limit, seed=seed)
    assert [one.arrival_s for one in talks] == [float(i) for i in range(number)]
    for one in talks:
        assert len(one.rounds) == min(rounds, 1 + (limit - 12) // 9)
        assert [(len(turn.text), turn.output_tokens) for turn in one.rounds] == [
            (8, 4),
            (6, 3),
            (6, 3),
            (6, 3),
        ][: len(one.rounds)]
        assert one.rounds[0].think_s == 0 and all(
            turn.text.max() < 100 and turn.text.min() >= 0 for turn in one.rounds
        )
    again = synthetic(openings, later, 100, think_s=2.0, max_tokens=limit, seed=seed)
    assert all(
        np.array_equal(a.text, b.text) and a.think_s == b.think_s
        for x, y in zip(talks, again, strict=True)
        for a, b in zip(x.rounds, y.rounds, strict=True)
    )


def test_pauses_have_their_mean():
    talks = synthetic([Item(1, 1)] * 2000, [Item(1, 1)] * 4000, 10, think_s=3.0)
    assert np.mean([turn.think_s for one in talks for turn in one.rounds[1:]]) == pytest.approx(3.0, rel=0.05)


def test_unequal_numbers_of_rounds_are_refused():
    with pytest.raises(WorkloadError, match="3 later rounds for 2"):
        synthetic([Item(1, 1)] * 2, [Item(1, 1)] * 3, 10)


@given(st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=8))
def test_shared_blocks_are_the_longest_common_prefixes(every):
    items = [Item(max(1, 512 * len(blocks)), 1, blocks=tuple(blocks)) for blocks in every]

    def common(a, b):
        return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

    naive = [
        max((common(blocks, before) for before in every[:i]), default=0) for i, blocks in enumerate(every)
    ]
    assert shared_blocks(items) == naive


def test_rounds_of_a_trace():
    items = workload.read_trace(paths.TRACES / "mooncake_conversation_200.jsonl")
    talks = of_items(items, workload.prompts(items, 100))
    assert {one.opening for one in talks} == {1, 2}
    seen = set()
    for item, one in zip(items, talks, strict=True):
        whole = {item.blocks[: i + 1] for i in range(len(item.blocks))}
        assert one.known_tokens == min(item.prompt_tokens, 512 * len(whole & seen))
        assert one.opening == 1 + (len(whole & seen) > 1), "all have the system's block in common"
        assert len(one.rounds) == 1 and len(one.rounds[0].text) == item.prompt_tokens
        seen |= whole


def test_a_trace_shrinks_with_its_blocks():
    items = workload.read_trace(paths.TRACES / "mooncake_conversation_200.jsonl")
    small = workload.shrink(items, 64)
    assert shared_blocks(small) == shared_blocks(items)
    prompts = workload.prompts(small, 1000)
    for item, less, ids in zip(items, small, prompts, strict=True):
        assert (less.prompt_tokens, less.output_tokens) == (
            -(-item.prompt_tokens // 64),
            -(-item.output_tokens // 64),
        )
        assert len(ids) == less.prompt_tokens and less.block_tokens == 8
    assert np.array_equal(prompts[0][:8], prompts[1][:8]), "equal ids, equal tokens"
    for factor in (0, 3, 1024):
        with pytest.raises(WorkloadError, match="divisors"):
            workload.shrink(items, factor)


def record(prompt, cached, number, known, ttft_s, error=None):
    return Record(prompt, 10.0, [(10.0 + ttft_s, 1)], 11.0, error, cached, number, known)


def test_figures_of_reuse():
    records = [
        record(100, 0, 1, 0, 0.2),
        record(200, 120, 2, 150, 0.1),
        record(300, 240, 3, 250, 0.3),
        record(9, 9, 2, 9, 0.1, "lost"),
    ]
    found = reuse.figures(records, {"host": 160, "disk": 80})
    assert (found["reused_input_tokens"], found["computed_input_tokens"], found["reusable_input_tokens"]) == (
        360,
        240,
        400,
    )
    assert (found["compute_saved"], found["reuse_hit_rate"]) == (0.6, 0.9)
    assert found["reused_input_tokens_by_tier"] == {"device": 120, "host": 160, "disk": 80}
    assert found["reuse_hit_rate_by_tier"] == {"device": 0.3, "host": 0.4, "disk": 0.2}
    assert found["compute_saved_by_tier"] == {"device": 0.2, "host": 160 / 600, "disk": 80 / 600}
    assert (
        found["first_round"]["mean_ttft_ms"] == pytest.approx(200) and found["first_round"]["completed"] == 1
    )
    assert (
        found["later_rounds"]["median_ttft_ms"] == pytest.approx(200)
        and found["later_rounds"]["total_input_tokens"] == 500
    )
    text = reuse.text(found)
    assert "360 (60.00%)" in text and "from the disk:" in text and "Later rounds:" in text


def test_figures_without_any_reuse():
    found = reuse.figures([record(100, 0, 1, 0, 0.2)])
    assert found["reuse_hit_rate"] is None and found["compute_saved"] == 0 and "later_rounds" not in found
    assert "First rounds:" in reuse.text(found)
    assert reuse.figures([])["compute_saved"] == 0
