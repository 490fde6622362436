"""The parts of the router without a thread: the rest of an answer, sums of
counters, the file, pickled messages.
"""

import dataclasses
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.config import ConfigError, EngineConfig
from jaxflow.engine.loop import Stats
from jaxflow.request import (
    ContextLengthExceeded,
    Delta,
    Finished,
    FinishReason,
    InvalidRequest,
    Logprob,
    QueueFull,
    Request,
    SamplingParams,
    Started,
    StructuredOutputsParams,
    Timings,
    Usage,
    with_limit,
)
from serving.cluster.messages import Order
from serving.cluster.replica import Outstanding, RemoteFault, portable
from serving.cluster.resume import rest_of
from serving.cluster.totals import total
from serving.cluster.wanted import WantedReplicas, read_wanted

BASE = EngineConfig(model="m")
USAGE, TIMINGS = Usage(1, 2, 3), Timings(0.1, 0.2, 0.3, 4)


def request_of(prompt=(5, 6), **sampling) -> Request:
    settings = {"max_tokens": 10, "seed": 3} | sampling
    return with_limit(Request("r", prompt, SamplingParams(**settings)), 1000, 1000)


@given(st.lists(st.integers(0, 99), min_size=1, max_size=9), st.integers(0, 10))
def test_the_rest_of_the_rest_is_the_rest(ids, min_tokens):
    """It ends at the same token and position, with the same least tokens, however often it moves."""
    request = request_of(min_tokens=min_tokens, logprobs=2, prompt_logprobs=1)
    for cut in range(len(ids) + 1):
        first = rest_of(request, ids[:cut])
        rest = rest_of(dataclasses.replace(first, limit=request.limit), ids[cut:])
        whole = rest_of(request, ids)
        assert tuple(rest.prompt_token_ids) == tuple(whole.prompt_token_ids) == (5, 6, *ids)
        assert rest.sampling == whole.sampling and rest.limit == whole.limit
    assert whole.sampling.max_tokens == 10 - len(ids)
    assert whole.sampling.min_tokens == max(0, min_tokens - len(ids))
    assert whole.sampling.prompt_logprobs is None and whole.sampling.logprobs == 2


@pytest.mark.parametrize(
    "sampling",
    [
        {"n": 2},
        {"stop": ["x"]},
        {"bad_words": ["x"]},
        {"presence_penalty": 1},
        {"frequency_penalty": -1},
        {"structured_outputs": StructuredOutputsParams(regex="x+")},
    ],
)
def test_some_answers_have_no_rest(sampling):
    request = request_of(**sampling)
    assert rest_of(request, []) is request
    assert rest_of(request, [1]) is None


def test_a_whole_answer_has_no_rest():
    assert rest_of(request_of(), range(9)) is not None
    assert rest_of(request_of(), range(10)) is None


def stats(**values) -> Stats:
    names = Stats.__struct_fields__
    return Stats(**(dict.fromkeys(names, 0) | {"steps_by_plan": {}, "kv_tiers": {}} | values))


def test_counters_of_ended_replicas_stay():
    first = stats(
        steps=3, running_requests=2, kv_pages=10, steps_by_plan={"a": 3}, kv_tiers={"host_pages": 1}
    )
    second = stats(steps=4, running_requests=1, kv_pages=10, steps_by_plan={"a": 1, "b": 3})
    both = total([first, second], [])
    assert (both.steps, both.running_requests, both.kv_pages) == (7, 3, 20)
    assert (both.steps_by_plan, both.kv_tiers) == ({"a": 4, "b": 3}, {"host_pages": 1})
    one = total([second], [first])
    assert (one.steps, one.running_requests, one.kv_pages) == (7, 1, 10)
    assert (one.steps_by_plan, one.kv_tiers) == ({"a": 4, "b": 3}, {})
    assert total([], []) == stats()


def test_the_file(tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text(
        json.dumps({"replicas": 3, "version": "b", "engine": {"num_kv_pages": 9, "plan": "searched"}})
    )
    config = dataclasses.replace(BASE, num_kv_pages=9, plan="searched")
    assert read_wanted(path, BASE) == WantedReplicas(3, config, "b")
    path.write_text('{"replicas": 1}')
    assert read_wanted(path, BASE) == WantedReplicas(1, BASE)


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ("", "cluster_file"),
        ("[]", "cluster_file"),
        ("{}", "cluster_file"),
        ('{"replicas": "2"}', "cluster_file"),
        ('{"replicas": 1, "verison": "a"}', "cluster_file"),
        ('{"replicas": 0}', "replicas"),
        ('{"replicas": 1, "engine": {"modle": "a"}}', "engine"),
        ('{"replicas": 1, "engine": {"num_kv_pages": "9"}}', "engine"),
        ('{"replicas": 1, "engine": {"num_kv_pages": 0}}', "num_kv_pages"),
    ],
)
def test_bad_files_name_the_field(tmp_path, content, field):
    path = tmp_path / "cluster.json"
    path.write_text(content)
    with pytest.raises(ConfigError) as refused:
        read_wanted(path, BASE)
    assert refused.value.field == field
    with pytest.raises(ConfigError):
        read_wanted(tmp_path / "none.json", BASE)


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("top_p", 7, "less"),
        ContextLengthExceeded("prompt", "9 tokens", "8", 9, 2),
        QueueFull(3, 1.5),
    ],
)
def test_refusals_reach_the_router_whole(error):
    event = Finished("r", 0, FinishReason.ABORT, USAGE, TIMINGS, error=error)
    found = pickle.loads(pickle.dumps(portable(event))).error
    assert type(found) is type(error) and str(found) == str(error) and vars(found) == vars(error)


def test_faults_and_events_reach_the_router():
    class Local(Exception):
        """No other process has this class."""

    fault = Finished("r", 0, FinishReason.ABORT, USAGE, TIMINGS, error=Local("why"))
    found = pickle.loads(pickle.dumps(portable(fault))).error
    assert type(found) is RemoteFault and str(found) == "Local: why"
    for event in (
        Started("r", 3, 1, 2**64 - 1, (None, {4: Logprob(-1.0, 1)})),
        Delta("r", 1, (7,), ({7: Logprob(-0.5, 2)},), "text"),
        Finished("r", 0, FinishReason.STOP, USAGE, TIMINGS, stop_string="x", text="rest"),
    ):
        assert pickle.loads(pickle.dumps(portable(event))) == event
    order = Order("r", 1, (5, 6), request_of(logit_bias={3: 1.0}).sampling, 0, "salt", 9.0)
    assert pickle.loads(pickle.dumps(order)) == order


def test_outstanding_tokens_fall_to_nothing():
    books = Outstanding()
    for i, n in enumerate((1, 2)):
        sampling = SamplingParams(n=n, max_tokens=5)
        books.add(Order(str(i), i, (1, 2, 3), sampling, 0, "", 5.0 * n))
    assert books.total == 8 + 13
    for i in "01":
        books.take(Started(i, 3, 0, 0))
        books.take(Delta(i, 0, (1, 2)))
    assert books.total == 3 + 8
    for _ in range(9):
        books.take(Delta("0", 0, (1, 1)))
    assert books.total == 1 + 8  # a running sequence has a token to compute
    for name, index in (("0", 0), ("1", 1)):
        books.take(Finished(name, index, FinishReason.STOP, USAGE, TIMINGS))
    assert books.total == 8
    books.drop("1")
    books.take(Delta("1", 0, (1,)))
    assert books.total == 0
