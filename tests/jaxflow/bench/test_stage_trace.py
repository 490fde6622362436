"""Bubbles of pipeline stages: arithmetic on made-up times, and a run of the engine under every policy."""

import itertools

import numpy as np
import paths
import pytest
import toy
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.bench.pipeline import engine
from jaxflow.bench.pipeline.stage_trace import StageTrace, stage_traces
from jaxflow.bench.workload.lengths import Item
from jaxflow.config import ConfigError, EngineConfig
from jaxflow.request import Request


def test_bubbles_of_known_times():
    """Two stages. The second step reaches stage 1 late, because it takes longer on stage 0."""
    trace = StageTrace(
        requests=(frozenset("a"), frozenset("b"), frozenset("ab")),
        enqueued_s=np.array([0.0, 0.0, 5.0]),
        ended_s=np.array([[1.0, 2.0], [4.0, 5.0], [6.0, 7.0]]),
    )
    np.testing.assert_allclose(trace.began_s, [[0, 1], [1, 4], [5, 6]])
    np.testing.assert_allclose(trace.idle_s, [[0, 0], [0, 2], [1, 1]])
    assert trace.bubble_s() == {"a": 2.0, "b": 4.0}
    np.testing.assert_allclose(trace.busy_share(), [5 / 7, 3 / 7])


def test_a_trace_has_every_step_on_every_stage():
    loop = toy.staged_loop("tiny-llama", 2)
    requests = [Request(f"r{i}", list(range(3, 10 + 5 * i)), toy.GREEDY) for i in range(6)]
    with stage_traces(loop.executor, loop.scheduler) as traces:
        toy.run(loop, requests)
    (trace,) = traces
    assert trace.ended_s.shape == (loop.stats(0).steps, 2)
    assert (np.diff(trace.ended_s, axis=0) >= 0).all() and (trace.ended_s >= trace.began_s).all()
    assert set(trace.bubble_s()) == {request.request_id for request in requests}
    assert "run" not in vars(loop.executor) and "schedule" not in vars(loop.scheduler)
    assert not [stage for stage in loop.executor.stages if "advance" in vars(stage)]


def test_every_policy_runs_every_request():
    config = EngineConfig(
        model=str(paths.MODELS / "tiny-llama"), pipeline_parallel_size=2, num_kv_pages=64, step_sizes="16"
    )
    items = [Item(20 + 3 * i, 4 + i % 3) for i in range(7)]
    kept: list[dict] = []
    report = engine.measure(config, items, slots=2, chunk=16, repeats=1, keep=kept.append)
    assert [len(each["policies"]) for each in kept] == list(range(len(engine.POLICIES) + 1))
    assert kept[-1] == report and report["compilations_after_warmup"] == 0
    assert list(report["policies"]) == list(engine.POLICIES) and report["layers"] == [1, 1]
    steps = {name: row["steps"] for name, row in report["policies"].items()}
    assert steps["sarathi"] > steps["orca-best"]  # its steps have at most 16 tokens
    assert all(len(row["busy_share"]) == 2 for row in report["policies"].values())
    assert all(name in engine.text(report) for name in engine.POLICIES)


@given(
    st.sets(st.integers(1, 90), min_size=1), st.lists(st.integers(1, 60), min_size=1),
    st.sets(st.sampled_from(list(engine.POLICIES)), min_size=1), st.integers(1, 20), st.integers(1, 60),
)  # fmt: skip
def test_steps_of_the_policies_run_at_the_same_sizes_with_the_reached_ones_only(
    sizes, prompts, policies, seqs, chunk
):
    every = sorted(sizes | {max(*prompts, chunk) + seqs})
    found = engine.reached(every, [Item(n, 1) for n in prompts], policies, seqs=seqs, chunk=chunk)
    tokens = [range(1, seqs + 1)]
    tokens += [range(1, chunk + 1)] if "sarathi" in policies else []
    tokens += [range(min(prompts), every[-1] + 1)] if policies != {"sarathi"} else []
    own = {n: min(size for size in every if size >= n) for n in itertools.chain(*tokens)}
    assert {n: min(size for size in found if size >= n) for n in own} == own
    assert set(found) == {*own.values(), every[-1]}


def test_one_stage_has_no_bubbles():
    config = EngineConfig(model=str(paths.MODELS / "tiny-llama"))
    with pytest.raises(ConfigError, match="pipeline_parallel_size=1 is not supported: at least 2"):
        engine.measure(config, [Item(4, 4)], slots=2, chunk=16, repeats=1)
