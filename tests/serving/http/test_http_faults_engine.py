"""Faults 25, 31, 38 and 40 over HTTP, with a real checkpoint. After each fault the
server serves, and nothing is left.

Fault 40 runs salts, n, penalties, log-probabilities, stops, aborts and priorities together. LoRA, grammars
and speculation are no part of the server, so their traces cannot be tested.
"""

import concurrent.futures
import contextlib
import random
import threading
import time

import jax
import numpy as np
import paths
import pytest
from http_harness import COMPLETIONS, RunningServer, events, request_bytes, wait_for
from hurry import OFTEN, compiled_with

from jaxflow import LLM
from jaxflow.text.detokenizer import StopMatcher

PAGES = 24  # three long sequences fill the 24 pages of 16 tokens
PROMPT = [1, 5, 6, 7]
SHORT = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
SOLO = ("choices", "usage")


def load() -> LLM:
    with compiled_with(OFTEN):
        return LLM(
            str(paths.MODELS / "stories260K"),
            max_num_batched_tokens=32,
            step_sizes="32",  # all steps are one program
            max_num_seqs=8,
            max_model_len=128,
            block_size=16,
            num_kv_pages=PAGES,
            progress=False,
        )


class EngineServer(RunningServer):
    """A server of a real engine."""

    def check_idle(self) -> None:
        def idle() -> bool:
            stats = self.llm.driver.stats()
            return (
                not (stats.running_requests or stats.waiting_requests)
                and stats.kv_pages_free == stats.kv_pages
            )

        wait_for(idle)
        wait_for(lambda: not self.server._state.tasks)
        assert self.errors == []


@contextlib.contextmanager
def served(llm: LLM):
    opened = EngineServer(llm)
    opened.open()
    try:
        yield opened
    finally:
        opened.close()


@pytest.fixture(scope="module")
def opened():
    with served(load()) as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    """Ask the same request before and after the fault."""
    if "opened" not in request.fixturenames:
        yield
        return
    server = request.getfixturevalue("opened")
    before, compiled = answer(server, SHORT), server.llm.driver.stats().compilations_after_warmup
    yield
    assert answer(server, SHORT) == before
    assert server.llm.driver.stats().compilations_after_warmup == compiled
    server.check_idle()
    wait_for(lambda: server.connections() == 0)


def answer(opened: RunningServer, body: dict) -> dict:
    """Return what a request determines in its plain answer."""
    told = opened.post(COMPLETIONS, body)
    assert told.status_code == 200, told.text
    return {name: told.json()[name] for name in SOLO}


def check_server_error(opened: RunningServer, body: dict) -> None:
    """The request, plain and streamed, ends with an error that shows no inner text."""
    plain = opened.post(COMPLETIONS, body)
    assert plain.status_code == 500 and plain.json()["error"]["type"] == "server_error"
    streamed = opened.post(COMPLETIONS, body | {"stream": True}).text
    assert '"type":"server_error"' in streamed and "[DONE]" not in streamed
    assert "secret" not in plain.text + streamed


def test_25_a_stop_checker_that_raises_ends_its_request_alone(opened, monkeypatch):
    push, faulty = StopMatcher.push, "never said"

    def raising(self, text):
        if any(pattern == faulty for pattern, _ in self._stops):
            raise ZeroDivisionError("a secret of the stop checker")
        return push(self, text)

    monkeypatch.setattr(StopMatcher, "push", raising)
    others = SHORT | {"max_tokens": 100}
    expected = answer(opened, others)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        beside = pool.submit(answer, opened, others)
        check_server_error(opened, SHORT | {"stop": faulty})
        assert beside.result() == expected


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 1}, {"n": 2}, {"logprobs": 2}])
def test_31_logits_that_are_nan_end_the_request(opened, sampling):
    executor = opened.llm.executor
    whole = executor.weights
    norm = jax.tree.map(
        lambda a: jax.device_put(np.full(a.shape, np.nan, a.dtype), a.sharding), whole["final_norm"]
    )
    executor.weights = whole | {"final_norm": norm}
    try:
        check_server_error(opened, SHORT | sampling)
    finally:
        executor.weights = whole
    assert opened.get("/health/live").status_code == 200


def test_31_a_device_error_ends_the_engine(monkeypatch):
    with served(load()) as opened:
        answer(opened, SHORT)

        def failing(*given, **named):
            raise jax.errors.JaxRuntimeError("INTERNAL: a secret of the device")

        monkeypatch.setattr(opened.llm.executor, "run", failing)
        streamed = opened.post(COMPLETIONS, SHORT | {"stream": True}).text
        assert '"type":"server_error"' in streamed and "[DONE]" not in streamed and "secret" not in streamed
        for path in ("/health", "/health/live", "/health/ready"):
            assert opened.get(path).status_code == 503
        refused = opened.post(COMPLETIONS, SHORT)
        assert refused.status_code in (500, 503) and "secret" not in refused.text
        wait_for(lambda: not opened.server._state.tasks)


def drawn(rng: random.Random, tokens: int) -> list[int]:
    return [1, *(rng.randrange(3, 500) for _ in range(tokens))]


@pytest.mark.slow  # 12 s: each sequence runs to the context's end twice
def test_38_a_storm_of_preemptions_changes_no_answer(opened):
    """Short answers teach the engine to admit many sequences; then all grow to the
    limit and pre-empt one another.
    """
    rng = random.Random(38)
    eos = opened.llm.tokenizer.eos_token_id
    long = SHORT | {"max_tokens": 110, "ignore_eos": False}
    for i in range(40):
        answer(opened, long | {"prompt": drawn(rng, 8), "logit_bias": {str(eos): 100}, "seed": i})
    bodies = [
        long | {"prompt": drawn(rng, 8), "logit_bias": {str(eos): -100}, "temperature": i % 2, "seed": i}
        for i in range(12)
    ]
    alone = [answer(opened, body) for body in bodies]
    before = opened.llm.driver.stats().preemptions
    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        together = list(pool.map(lambda body: answer(opened, body), bodies))
    assert opened.llm.driver.stats().preemptions > before
    assert [texts(each) for each in together] == [texts(each) for each in alone]


def texts(told: dict) -> list[tuple[str, str]]:
    return [(choice["text"], choice["finish_reason"]) for choice in told["choices"]]


def trace(rng: random.Random, shared: list[int]) -> dict:
    """Return a request of any kind. Many begin with the same tokens."""
    body = {
        "prompt": (shared if rng.random() < 0.6 else [1]) + drawn(rng, rng.randrange(1, 30)),
        "max_tokens": rng.randrange(1, 24),
        "seed": rng.randrange(1000),
        "temperature": rng.choice([0, 0.7, 1.0]),
        "ignore_eos": rng.random() < 0.7,
    }
    more = (
        {"n": 3},
        {"logprobs": 3},
        {"stop": [" the", "."]},
        {"top_p": 0.8, "top_k": 20},
        {"presence_penalty": 0.7, "frequency_penalty": 0.3},
        {"cache_salt": rng.choice("abc")},
        {"priority": rng.randrange(1, 5)},
        {"logit_bias": {"7": 3}},
        {"min_tokens": 1},
    )
    for each in more:
        if rng.random() < 0.3:
            body |= each
    return body


def check_same(found: dict, expected: dict) -> None:
    assert texts(found) == texts(expected)
    assert found["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
    for ours, theirs in zip(found["choices"], expected["choices"], strict=True):
        if theirs["logprobs"] is not None:
            assert ours["logprobs"]["tokens"] == theirs["logprobs"]["tokens"]
            both = (ours["logprobs"]["token_logprobs"], theirs["logprobs"]["token_logprobs"])
            assert both[0] == pytest.approx(both[1], abs=1e-4)


def leave(opened: RunningServer, body: dict, after_s: float) -> None:
    """Close the connection of a stream after a time."""
    with opened.connect() as connection:
        connection.sendall(request_bytes(COMPLETIONS, body | {"stream": True, "max_tokens": 60}))
        time.sleep(after_s)


@pytest.mark.parametrize("seed", range(2))
def test_40_concurrent_traces_answer_as_alone(opened, seed):
    """Plain and streamed requests arrive at drawn times, while other callers leave."""
    rng = random.Random(seed)
    shared = drawn(rng, 35)
    bodies = [trace(rng, shared) for _ in range(24)]
    alone = [answer(opened, body) for body in bodies]
    starts = sorted(rng.uniform(0.0, 0.6) for _ in bodies)
    leaving = [(trace(rng, shared), rng.uniform(0.0, 0.6), rng.uniform(0.0, 0.1)) for _ in range(15)]
    begin = threading.Event()

    def ask(body: dict, at_s: float, stream: bool):
        begin.wait()
        time.sleep(at_s)
        if not stream:
            return answer(opened, body)
        told = opened.post(COMPLETIONS, body | {"stream": True})
        assert told.status_code == 200 and told.text.endswith("data: [DONE]\n\n")
        parts = [""] * body.get("n", 1)
        for event in events(told.text):
            for choice in event["choices"]:
                parts[choice["index"]] += choice["text"]
        return parts

    def abandon(body: dict, at_s: float, after_s: float) -> None:
        begin.wait()
        time.sleep(at_s)
        leave(opened, body, after_s)

    with concurrent.futures.ThreadPoolExecutor(len(bodies) + len(leaving)) as pool:
        asked = [
            pool.submit(ask, body, at, i % 2 == 1)
            for i, (body, at) in enumerate(zip(bodies, starts, strict=True))
        ]
        left = [pool.submit(abandon, *each) for each in leaving]
        begin.set()
        for i, (future, expected) in enumerate(zip(asked, alone, strict=True)):
            found = future.result()
            if i % 2 == 1:
                assert found == [text for text, _ in texts(expected)]
            else:
                check_same(found, expected)
        for future in left:
            future.result()
