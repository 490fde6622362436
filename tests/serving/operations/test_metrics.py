"""Metrics of a fake engine, and of the real loop, as Prometheus reads them."""

import asyncio
import math
import shutil
import subprocess

import httpx
import pytest
from fake_llm import FakeLLM
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from served_state import State, submit, wait_for
from starlette.applications import Starlette

from jaxflow.engine.step_log import StepLog, StepRecord
from serving.operations import Operations, routes
from serving.operations.histogram import Histogram

VLLM = {
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries"),
    *("prefix_cache_hits", "prompt_tokens", "generation_tokens", "request_success", "num_preemptions"),
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds"),
    *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"),
    *("request_decode_time_seconds", "request_inference_time_seconds", "request_prompt_tokens"),
    *("request_generation_tokens", "iteration_tokens_total"),
}
REMOVED = {"gpu_cache_usage_perc", "time_per_output_token_seconds"}


@pytest.fixture(scope="module")
def state():
    state = State(FakeLLM())
    for _ in range(3):
        assert submit(state.llm).ended.wait(10)
    wait_for(lambda: state.llm.driver.seconds_without_progress() == 0)
    yield state
    state.llm.close()


@pytest.fixture(scope="module")
def operations(state) -> Operations:
    return Operations(state)


def families(operations: Operations) -> dict:
    return {family.name: family for family in text_string_to_metric_families(operations.metrics().decode())}


def ask(operations: Operations, path: str) -> httpx.Response:
    async def get() -> httpx.Response:
        transport = httpx.ASGITransport(Starlette(routes=routes(operations)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get(path)

    return asyncio.run(get())


def test_metrics_count_what_ran(operations):
    found = families(operations)
    value = {
        (s.name, tuple(v for _, v in sorted(s.labels.items()))): s.value
        for family in found.values()
        for s in family.samples
    }
    assert value["jaxflow_requests_total", ("length",)] == 3
    assert value["vllm:request_success_total", ("length", "fake")] == 3
    assert value["jaxflow_generation_tokens_total", ()] == 6
    assert value["jaxflow_steps_total", ("sequential",)] == 6
    assert value["jaxflow_ttft_seconds_count", ()] == value["jaxflow_e2e_seconds_count", ()] == 3
    assert value["jaxflow_inter_token_seconds_count", ()] == 3  # the second token of each request
    assert value["jaxflow_step_seconds_count", ()] == 6
    assert value["vllm:kv_cache_usage_perc", ("fake",)] == 0
    assert (value["jaxflow_max_num_seqs", ()], value["jaxflow_max_num_batched_tokens", ()]) == (64, 256)


def test_names_of_vllm(operations, state):
    found = families(operations)
    ours = {name.removeprefix("vllm:") for name in found if name.startswith("vllm:")}
    assert ours == VLLM
    assert all(
        sample.labels["model_name"] == "fake"
        for name, family in found.items()
        if name.startswith("vllm:")
        for sample in family.samples
    )
    legacy = set(families(Operations(state, legacy_metric_names=True)))
    assert {f"vllm:{name}" for name in VLLM | REMOVED} == {
        name for name in legacy if name.startswith("vllm:")
    }


def test_metrics_while_the_model_loads(state):
    found = families(Operations(State(state.llm, loaded=False)))
    assert {name: family.samples[0].value for name, family in found.items()} == {
        "jaxflow_ready": 0,
        "jaxflow_live": 1,
    }


def test_routes(operations, state):
    assert ask(operations, "/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")
    draining = Operations(State(state.llm, draining=True))
    for path, code in {"": 503, "/ready": 503, "/live": 200, "/startup": 200}.items():
        assert ask(operations, f"/health{path}").json() == {"status": "ok"}
        answer = ask(draining, f"/health{path}")
        assert (answer.status_code, "reason" in answer.json()) == (code, code == 503)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus' promtool is not installed")
def test_promtool_finds_nothing(operations):
    lines = operations.metrics().decode().splitlines(keepends=True)
    # promtool allows no colon in a name, and vLLM's names have one.
    ours = "".join(line for line in lines if "vllm:" not in line)
    check = subprocess.run(
        ["promtool", "check", "metrics"], input=ours, text=True, capture_output=True, timeout=60
    )
    assert (check.returncode, check.stdout + check.stderr) == (0, "")


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 50)), max_size=20))
def test_histogram_counts_as_prometheus_does(observations):
    bounds = (0.5, 1.0, 10.0)
    histogram = Histogram(bounds)
    for value, count in observations:
        histogram.observe(value, count)
    expected = [sum(n for v, n in observations if v <= bound) for bound in (*bounds, math.inf)]
    assert [count for _, count in histogram.cumulative()] == expected
    assert histogram.count == expected[-1]
    assert histogram.sum == pytest.approx(sum(v * n for v, n in observations))


def test_a_full_log_drops_its_oldest_records():
    log = StepLog(limit=2)
    for step in range(3):
        log.steps.append(StepRecord(str(step), 1, 0, 0, 0, 0, 0.0, 0.0, 0.0))
    assert [record.plan for record in log.take()[0]] == ["1", "2"]
    assert log.take() == ([], [])
