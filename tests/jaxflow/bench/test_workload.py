"""Workloads have the requested lengths and are equal for equal seeds."""

import numpy as np
import paths
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxflow.bench.workload import lengths as workload
from jaxflow.bench.workload.lengths import NANOFLOW, UNLIMITED, Item, WorkloadError

DATA, TRACES = paths.TRACES, paths.SHARED / "traces"


def test_constant():
    assert workload.constant(3, 10, 5) == [Item(10, 5)] * 3


@settings(max_examples=30)
@given(st.floats(1, 1000), st.floats(1, 700), st.integers(0, 2**32))
def test_lognormal_has_the_mean_and_keeps_the_limits(prompt_mean, output_mean, seed):
    items = workload.lognormal(500, prompt_mean, output_mean, seed=seed)
    assert np.mean([item.prompt_tokens for item in items]) == pytest.approx(prompt_mean, abs=1)
    assert np.mean([item.output_tokens for item in items]) == pytest.approx(output_mean, abs=1)
    assert all(NANOFLOW.admit(item) and item.prompt_tokens >= 1 and item.output_tokens >= 1 for item in items)
    assert items == workload.lognormal(500, prompt_mean, output_mean, seed=seed)


def test_lognormal_has_the_requested_spread():
    items = workload.lognormal(20000, 100, 100, prompt_cv=0.5, output_cv=1.0, limits=UNLIMITED, seed=1)
    assert np.std([i.prompt_tokens for i in items]) == pytest.approx(50, rel=0.05)
    assert np.std([i.output_tokens for i in items]) == pytest.approx(100, rel=0.1)
    assert workload.lognormal(20000, 100, 100, prompt_cv=0.5, limits=UNLIMITED, seed=2) != items


def test_a_mean_over_the_limit_is_refused():
    with pytest.raises(WorkloadError, match="3500"):
        workload.lognormal(10, 3500, 10)


def test_nanoflows_filter_of_a_trace():
    every = workload.read_csv(DATA / "sharegpt_1000.csv", UNLIMITED)
    kept = workload.read_csv(DATA / "sharegpt_1000.csv")
    assert len(every) == 1000
    assert kept == [
        i
        for i in every
        if i.prompt_tokens <= 3072 and i.output_tokens <= 1024 and i.prompt_tokens + i.output_tokens <= 4096
    ]
    assert 0 < len(kept) < len(every)


@pytest.mark.parametrize(
    ("name", "rows", "prompt_mean", "output_mean"),
    [
        ("lmsys", 99_831, 91.9, 205.5),
        ("sharegpt", 57_557, 223.5, 318.0),
        ("azure2023_conv", 17_563, 849.9, 225.4),
    ],
)
@pytest.mark.skipif(not TRACES.exists(), reason="the whole traces are not kept in the repository")
def test_nanoflows_filter_of_the_whole_traces(name, rows, prompt_mean, output_mean):
    items = workload.read_trace(TRACES / f"{name}.csv")
    assert len(items) == rows
    assert np.mean([i.prompt_tokens for i in items]) == pytest.approx(prompt_mean, abs=0.06)
    assert np.mean([i.output_tokens for i in items]) == pytest.approx(output_mean, abs=0.06)


def test_a_trace_keeps_its_arrival_times():
    items = workload.read_csv(DATA / "azure2023_conv_1000.csv", UNLIMITED)
    assert items[0].arrival_s == 0 and items[1].arrival_s == pytest.approx(4.314579)
    arriving = workload.trace_arrivals(items[100:300])
    assert arriving[0].arrival_s == 0
    assert arriving[-1].arrival_s == pytest.approx(items[299].arrival_s - items[100].arrival_s)
    stretched = workload.trace_arrivals(items[100:300], rate=10.0)
    assert stretched[-1].arrival_s == pytest.approx(19.9)
    ratio = {b.arrival_s / a.arrival_s for a, b in zip(arriving[1:], stretched[1:], strict=True)}
    assert max(ratio) == pytest.approx(min(ratio))


def test_poisson_arrivals():
    items = workload.poisson_arrivals(workload.constant(20_000, 1, 1), rate=50.0, seed=3)
    gaps = np.diff([item.arrival_s for item in items])
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.03)  # exponential: as wide as its mean
    at_once = workload.poisson_arrivals(items, float("inf"))
    assert {item.arrival_s for item in at_once} == {0.0}
    with pytest.raises(WorkloadError, match="rate=0"):
        workload.poisson_arrivals(items, 0)


def test_mooncake_blocks_of_equal_ids_are_equal_tokens():
    items = workload.read_trace(DATA / "mooncake_conversation_200.jsonl")
    assert len(items) == 200 and items[0].prompt_tokens == 6758 and items[0].output_tokens == 500
    ids = workload.prompts(items[:40], 32000, seed=7)
    blocks: dict[int, np.ndarray] = {}
    repeated = 0
    for item, tokens in zip(items[:40], ids, strict=True):
        assert tokens.shape == (item.prompt_tokens,) and tokens.dtype == np.int32
        for place, block in enumerate(item.blocks):
            part = tokens[place * 512 : (place + 1) * 512]
            if block in blocks:
                shared = min(len(part), len(blocks[block]))
                np.testing.assert_array_equal(part[:shared], blocks[block][:shared])
                repeated += 1
            else:
                assert not any(len(part) > 8 and np.array_equal(part, other) for other in blocks.values())
                blocks[block] = part
    assert repeated > 30


def test_prompts_are_random_ids_of_the_vocabulary():
    items = [Item(5, 1), Item(1000, 1), Item(1000, 1)]
    a, b, c = workload.prompts(items, 100, seed=1)
    assert len(a) == 5 and b.min() >= 0 and b.max() < 100 and len(set(b.tolist())) > 90
    assert not np.array_equal(b, c)
    np.testing.assert_array_equal(b, workload.prompts(items, 100, seed=1)[1])
    assert not np.array_equal(b, workload.prompts(items, 100, seed=2)[1])


def test_sample_draws_without_replacement_while_it_can():
    items = [Item(i + 1, 1) for i in range(50)]
    assert sorted(workload.sample(items, 50), key=lambda i: i.prompt_tokens) == items
    assert len(workload.sample(items, 120)) == 120
    assert (
        workload.sample(items, 20, seed=1)
        == workload.sample(items, 20, seed=1)
        != workload.sample(items, 20, seed=2)
    )
    with pytest.raises(WorkloadError, match="no request"):
        workload.sample([], 5)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "prompt,output\n1,2\n", "missing column output_tokens and prompt_tokens"),
        ("a.csv", "prompt_tokens,output_tokens\n1,2\n1,x\n", "line 3"),
        ("a.csv", "prompt_tokens,output_tokens\n1\n", "line 2"),
        (
            "a.jsonl",
            '{"timestamp":0,"input_length":5,"output_length":1,"hash_ids":[1]}\n{"timestamp":0}\n',
            "line 2",
        ),
        ("a.jsonl", "not json\n", "line 1"),
        (
            "a.jsonl",
            '{"timestamp":0,"input_length":513,"output_length":1,"hash_ids":[1]}\n',
            "1 hash_ids are too few for 513",
        ),
        ("a.txt", "", "not a trace"),
    ],
)
def test_a_malformed_trace_file_is_refused(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(WorkloadError, match=message) as caught:
        workload.read_trace(path)
    assert name in str(caught.value)
