"""Prompts are tokenized on few threads, within a bound of bytes, and dropped with their callers."""

import asyncio
import threading
import time
import types

import pytest

from serving.frontend import prompt_work
from serving.frontend.prompt_work import QUICK_BYTES, QUICK_S, SLOW_S, SMALL_BYTES, THREADS, PromptWork
from serving.frontend.refusal import Code, Refusal

LARGE = SMALL_BYTES + 1


def test_the_bytes_in_work_are_bounded_and_given_back():
    async def scenario():
        gate, work = threading.Event(), PromptWork(max_bytes=2 * LARGE)
        first = [asyncio.create_task(work.run(LARGE, gate.wait)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Refusal) as refused:
            await work.run(1, gate.wait)
        assert refused.value.code is Code.QUEUE_FULL and refused.value.retry_after_s
        gate.set()
        await asyncio.gather(*first)
        await asyncio.sleep(0)
        assert work.bytes_in_work == 0
        assert await work.run(10 * LARGE, lambda: 7) == 7  # alone, a prompt of any size is accepted

    asyncio.run(scenario())


def test_work_that_has_not_begun_is_dropped_with_its_caller():
    async def scenario():
        gate, begun, work = threading.Event(), [], PromptWork()
        busy = [asyncio.create_task(work.run(LARGE, gate.wait)) for _ in range(THREADS)]
        waiting = [asyncio.create_task(work.run(LARGE, lambda: begun.append(1))) for _ in range(40)]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.sleep(0)
        assert work.bytes_in_work == THREADS * LARGE
        assert await work.run(1, lambda: "a small prompt") == "a small prompt"  # while large ones wait
        gate.set()
        await asyncio.gather(*busy)
        assert begun == []

    asyncio.run(scenario())


def test_an_error_of_the_work_reaches_its_caller():
    async def scenario():
        work = PromptWork()
        with pytest.raises(ZeroDivisionError):
            await work.run(1, lambda: 1 / 0)
        await asyncio.sleep(0)
        assert work.bytes_in_work == 0

    asyncio.run(scenario())


def spin(seconds: float):
    """Return work of this CPU time. Its result is the thread that did it."""

    def work() -> str:
        end_s = time.thread_time() + seconds
        while time.thread_time() < end_s:
            pass
        return threading.current_thread().name

    return work


def test_quick_prompts_stay_on_the_event_loops_thread_until_one_is_slow():
    async def scenario():
        here, work = threading.current_thread().name, PromptWork()
        assert await work.run(10, spin(0)) != here  # not measured yet
        assert await work.run(10, spin(0)) == here
        assert await work.run(QUICK_BYTES + 1, spin(0)) != here
        assert await work.run(10, spin(2 * SLOW_S)) == here
        for _ in range(2):
            assert await work.run(10, spin(0)) != here
        assert work.bytes_in_work == 0

    asyncio.run(scenario())


def test_the_event_loops_thread_takes_quick_prompts_again_after_a_pause(monkeypatch):
    """One long garbage collection must not cost every later prompt a change of threads."""
    now_s = 1000.0
    clock = types.SimpleNamespace(monotonic=lambda: now_s, thread_time=time.thread_time)
    monkeypatch.setattr(prompt_work, "time", clock)

    async def scenario():
        nonlocal now_s
        here, work = threading.current_thread().name, PromptWork()
        await work.run(10, spin(0))
        assert await work.run(10, spin(2 * SLOW_S)) == here
        assert await work.run(10, spin(0)) != here
        now_s += prompt_work.PAUSE_S
        assert await work.run(10, spin(0)) == here

    asyncio.run(scenario())


def test_a_first_slow_prompt_keeps_the_next_one_on_a_thread():
    async def scenario():
        here, work = threading.current_thread().name, PromptWork()
        for _ in range(2):
            assert await work.run(10, spin(2 * QUICK_S)) != here

    asyncio.run(scenario())
