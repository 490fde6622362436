"""Calls of one offloaded model: stopped early, nested, and from several threads."""

import gc
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import paths
import pytest
from offloaded import DEVICE, DISK, HOST, MIXED, OUTPUT, changed, goldens, policy, requests, run, runtime

from jaxflow import LLM, SamplingParams
from jaxflow import prompt as prompt_module
from jaxflow.flexgen.block_loop import Verbs
from jaxflow.flexgen.config import OffloadConfig
from jaxflow.flexgen.kv_store import KvStore
from jaxflow.flexgen.scratch_files import DiskError
from jaxflow.flexgen.tiers import Traffic
from jaxflow.flexgen.waits import Waits
from jaxflow.llm import RequestFailed

PATIENCE_S = 60.0
OTHERS = [[7 + i] * 20 for i in range(6)]  # prompts of a stopped block, different from the later prompts


def within(work: Callable[[], Any]) -> Any:
    """Return the result of `work`, or fail after a timeout."""
    told: list[Any] = []
    thread = threading.Thread(target=lambda: told.append(_told(work)), daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert told, "it does not return"
    if isinstance(told[0], BaseException):
        raise told[0]
    return told[0]


def _told(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except BaseException as error:
        return error


PLACES = {
    "device": {},
    "host": {"weights": HOST, "kv": HOST, "activations": HOST},
    "KV on the host, which attends": {"kv": HOST, "host_attention": True},
    "disk": {"weights": DISK, "kv": DISK, "activations": DISK},
    "KV on disk, the host attends": {"kv": DISK, "host_attention": True},
    "mixed": {"weights": DISK, "kv": MIXED, "activations": MIXED},
    "mixed, the host attends": {"weights": MIXED, "kv": MIXED, "activations": DISK, "host_attention": True},
}


@pytest.mark.parametrize("changes", PLACES.values(), ids=PLACES.keys())
def test_the_run_after_a_stopped_run_gets_its_tokens(changes, tmp_path):
    prompts, expected = goldens("tiny-opt")
    with runtime(
        "tiny-opt", tmp_path, **{"weights": DEVICE, "kv": DEVICE, "activations": DEVICE} | changes
    ) as made:

        def leave(steps: int) -> list[list[int]]:
            left = made.generate(requests(OTHERS))
            for _ in range(steps):
                next(left)
            left.close()
            return run(made, requests(prompts))

        steps_of_all = sum(1 for _ in made.generate(requests(OTHERS)))
        some = (
            0,
            1,
            2,
            3,
            *range(4, steps_of_all + 1, 3),
        )  # all were left once, which took three times as long
        for schedule, overlap, stops in (
            ("zigzag", True, some),
            ("row", True, (1, 8)),
            ("zigzag", False, (5,)),
        ):
            changed(made, schedule=schedule, overlap=overlap)
            for steps in stops:
                assert within(lambda steps=steps: leave(steps)) == expected, (schedule, overlap, steps)


def test_a_second_run_at_once_is_refused(tmp_path):
    prompts, expected = goldens("tiny-opt")
    with runtime("tiny-opt", tmp_path, kv=HOST) as made:
        first = made.generate(requests(OTHERS))
        next(first)
        with pytest.raises(
            RuntimeError,
            match="under way; accepted is a call after its end, or after its iterator was closed",
        ):
            within(lambda: run(made, requests(prompts)))
        first.close()
        assert run(made, requests(prompts)) == expected
        first = made.generate(requests(OTHERS))
        next(first)
        del first  # nobody has it any more: it is closed
        assert run(made, requests(prompts)) == expected


def test_an_error_at_the_end_of_a_stopped_run_is_raised_and_ends_the_runtime(tmp_path, monkeypatch):
    def failing(self):
        raise DiskError(5, "a store failed")

    with runtime("tiny-opt", tmp_path, kv=DISK) as made:
        left = made.generate(requests(OTHERS))
        next(left)
        monkeypatch.setattr(KvStore, "rest", failing)
        with pytest.raises(DiskError, match="a store failed"):
            within(left.close)
        with pytest.raises(RuntimeError, match="close the runtime"):
            run(made, requests(OTHERS))


@pytest.mark.parametrize(
    "host_attention", [True, False], ids=["attends on the host", "attends on the device"]
)
def test_a_runtime_can_be_closed_before_its_stopped_run(host_attention, tmp_path):
    with runtime("tiny-opt", tmp_path, kv=DISK, host_attention=host_attention) as made:
        left = made.generate(requests(OTHERS))
        next(left)
    within(left.close)


def test_cancelled_futures_are_not_waited_for():
    """A runtime's close cancels stores and calls of the host's attention that wait for another."""
    pool, gate = ThreadPoolExecutor(1), threading.Event()
    first, behind = pool.submit(gate.wait), pool.submit(list)
    verbs = Verbs(True, Traffic(), Waits())
    verbs.store("store_kv", lambda: [first, behind])
    pool.shutdown(wait=False, cancel_futures=True)
    gate.set()
    within(verbs.rest)
    assert behind.cancelled() and first.done()


class Faulty:
    """A stop checker that fails at its first token."""

    def __init__(self, *_, **__):
        pass

    def push(self, _):
        raise RuntimeError("no such string")


def test_an_offloaded_llm_that_nobody_closed_removes_its_files(tmp_path):
    def open_files() -> list[str]:
        links = (link for link in Path("/proc/self/fd").iterdir() if link.is_symlink())
        return [file for link in links if str(tmp_path) in (file := os.readlink(link))]

    settings = OffloadConfig(policy("stories260K", kv=DISK, host_attention=True), disk_path=str(tmp_path))
    llm = LLM(str(paths.MODELS / "stories260K"), offload=settings, block_size=16, progress=False)
    within(lambda: llm.generate([[1, 5, 6]], SamplingParams(max_tokens=2), use_tqdm=False))
    assert list(tmp_path.iterdir()) and open_files()
    del llm
    gc.collect()
    assert not list(tmp_path.iterdir()) and not open_files()


def test_concurrent_calls_of_an_offloaded_llm_run_in_turn(tmp_path, monkeypatch):
    prompts, expected = goldens("stories260K", copies=1)
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
    settings = OffloadConfig(policy("stories260K", kv=DISK, host_attention=True), disk_path=str(tmp_path))
    with LLM(str(paths.MODELS / "stories260K"), offload=settings, block_size=16, progress=False) as llm:

        def ask(asked: list[list[int]]) -> list[list[int]]:
            return [one.outputs[0].token_ids for one in llm.generate(asked, sampling, use_tqdm=False)]

        assert within(lambda: ask(prompts)) == expected
        with monkeypatch.context() as patch:
            patch.setattr(prompt_module, "detokenizer", lambda *_: Faulty())
            with pytest.raises(RequestFailed):
                stopped = SamplingParams(temperature=0.0, max_tokens=OUTPUT, stop=["zzzz"])
                within(
                    lambda: llm.generate(["Once upon a time there was a dog"] * 6, stopped, use_tqdm=False)
                )
        assert within(lambda: ask(prompts)) == expected
        others = within(lambda: ask(OTHERS))
        together, found = threading.Barrier(3, timeout=PATIENCE_S), {}

        def often(caller: int, asked: list[list[int]]) -> None:
            together.wait()
            found[caller] = _told(lambda: [ask(asked) for _ in range(2)])

        callers = [
            threading.Thread(target=often, args=(i, asked), daemon=True)
            for i, asked in enumerate((prompts, OTHERS, prompts))
        ]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(PATIENCE_S)
        assert found == {0: [expected] * 2, 1: [others] * 2, 2: [expected] * 2}
