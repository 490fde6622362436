"""The command `python -m serving.cluster` with a prefill replica on Ray, and
processes that die in the middle.

Law: the tokens are those of one engine, and no request is lost. Answering replicas that are stopped fetch no
pages, so a test can kill a process while pages are lent.
"""

import contextlib
import os
import signal
import subprocess

import pytest
from test_ray import MODEL, PROMPT, Cluster, in_threads, joined, pytestmark  # noqa: F401

from jaxflow import LLM, SamplingParams

PROMPTS = [(PROMPT["prompt_ids"] * 60)[i : i + 100 + 7 * i] for i in range(6)]
TOKENS = 200
FLAGS = ("--prefill_replicas=1", "--prefill_rule=always", "--kv_offloading_size=0.05", "--transfer_checksums")


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """The answers of one engine in this process."""
    settings = [
        SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=1.0, seed=i)
        for i in range(len(PROMPTS))
    ]
    with LLM(MODEL, max_model_len=512, block_size=16, num_kv_pages=128, max_num_batched_tokens=64) as llm:
        found = llm.generate(PROMPTS, settings, use_tqdm=False)
    return [list(each.outputs[0].token_ids) for each in found]


@pytest.fixture(scope="module")
def cluster():
    running = Cluster(*FLAGS, "--replicas=2", "--stall_s=120")
    try:
        running.serving(3)
        yield running
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.close()
        running.process.kill()


def ask_all(cluster, salt: str):
    def ask(i: int) -> list[int]:
        return cluster.ask(PROMPTS[i], TOKENS, temperature=1.0, seed=i, cache_salt=salt)

    return in_threads(ask, len(PROMPTS))


def processes(cluster, *, prefills: bool) -> list[int]:
    return [one["process_id"] for one in cluster.replicas() if one["prefills"] is prefills]


def transfers(cluster, result: str) -> float:
    return cluster.metric(f'jaxflow_kv_transfers_total{{result="{result}"}}')


def check_nothing_is_left(cluster) -> None:
    cluster.serving(3)
    cluster.until(lambda found: not any(one["open_loans"] or one["requests"] for one in found))
    assert cluster.metric("jaxflow_requests_interrupted_total") == 0


@contextlib.contextmanager
def pages_lent(cluster, salt: str):
    """Ask with stopped answering replicas, until the pages of all prompts are lent.

    Yield the running requests.
    """
    answering = processes(cluster, prefills=False)
    for process in answering:
        os.kill(process, signal.SIGSTOP)
    try:
        running = ask_all(cluster, salt)
        cluster.until(lambda found: sum(one["open_loans"] for one in found) == len(PROMPTS))
        yield running
    finally:
        for process in answering:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)


def test_prompts_computed_apart_have_the_tokens_of_one_engine(cluster, alone):
    assert joined(ask_all(cluster, "apart")) == alone
    assert (transfers(cluster, "done"), transfers(cluster, "failed")) == (len(PROMPTS), 0)
    assert cluster.metric("jaxflow_kv_transfer_bytes_total") > 0
    check_nothing_is_left(cluster)


def test_an_answering_replica_dies_while_pages_are_lent_to_it(cluster, alone):
    losses, moved = (cluster.metric(f"jaxflow_{name}_total") for name in ("replica_losses", "requests_moved"))
    with pages_lent(cluster, "borrower") as running:
        os.kill(processes(cluster, prefills=False)[0], signal.SIGKILL)
        cluster.until(lambda found: sum(one["restarts"] for one in found) == losses + 1)
    assert joined(running) == alone
    assert cluster.metric("jaxflow_requests_moved_total") > moved
    assert transfers(cluster, "failed") == 0
    check_nothing_is_left(cluster)


def test_an_answering_replica_dies_while_it_answers(cluster, alone):
    done = transfers(cluster, "done")
    running = ask_all(cluster, "answering")
    cluster.until(lambda found: all(one["requests"] for one in found if not one["prefills"]))
    os.kill(processes(cluster, prefills=False)[1], signal.SIGKILL)
    assert joined(running) == alone
    assert transfers(cluster, "done") > done
    check_nothing_is_left(cluster)


def test_the_prefill_replica_dies_while_it_computes_prompts(cluster, alone):
    """Prompts that are not lent yet go to the replicas that answer."""
    [prefill] = processes(cluster, prefills=True)
    os.kill(prefill, signal.SIGSTOP)
    running = ask_all(cluster, "computing")
    cluster.until(lambda found: any(len(PROMPTS) == one["requests"] for one in found if one["prefills"]))
    os.kill(prefill, signal.SIGKILL)
    assert joined(running) == alone
    assert transfers(cluster, "failed") == 0
    check_nothing_is_left(cluster)


def test_the_prefill_replica_dies_while_it_lends_pages(cluster, alone):
    """The fetches find no process. They fail, and the prompts are computed where they are answered."""
    done = transfers(cluster, "done")
    [prefill] = processes(cluster, prefills=True)
    with pages_lent(cluster, "lender") as running:
        os.kill(prefill, signal.SIGKILL)
        cluster.until(lambda found: prefill not in {one["process_id"] for one in found})
    assert joined(running) == alone
    assert (transfers(cluster, "done"), transfers(cluster, "failed")) == (done, len(PROMPTS))
    check_nothing_is_left(cluster)
    assert prefill not in processes(cluster, prefills=True)
