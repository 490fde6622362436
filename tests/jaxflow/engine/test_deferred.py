"""Programs that are compiled after the start: once each, by the thread or by the first caller."""

import dataclasses
import gc
import threading
import time

import paths
import pytest
import toy

from jaxflow.config import EngineConfig
from jaxflow.engine.deferred import (
    DeferredProgram,
    Turns,
    compile_in_background,
    is_compiling,
    is_deferred,
    wait_until_compiled,
    while_it_lives,
)
from jaxflow.engine.executor_start import make_executor
from jaxflow.engine.loop_start import make_loop
from jaxflow.engine.settings import resolve
from jaxflow.engine.step_plans import choose_plans
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.request import Request

MODEL = str(paths.MODELS / "tiny-llama")


def test_callers_and_the_thread_compile_a_program_once():
    made, begun, may_end = [], threading.Event(), threading.Event()

    def make():
        made.append(is_deferred())
        begun.set()
        may_end.wait(10)
        return lambda x: x + 1

    programs = [DeferredProgram(make) for _ in range(2)]
    compiling = compile_in_background([program.ready for program in programs])
    begun.wait(10)
    results = []
    callers = [threading.Thread(target=lambda i=i: results.append(programs[0](i))) for i in range(4)]
    for caller in callers:
        caller.start()
    assert not results
    may_end.set()
    for thread in (*callers, compiling):
        thread.join(10)
    assert sorted(results) == [1, 2, 3, 4]
    assert made == [True, True] and not is_deferred()


def test_a_program_that_nobody_holds_is_not_compiled():
    made = []
    kept, dropped = (DeferredProgram(lambda name=name: made.append(name) or len) for name in "ab")
    jobs = [while_it_lives(program.ready) for program in (dropped, kept)]
    del dropped
    gc.collect()
    compile_in_background(jobs).join(10)
    assert made == ["a"]
    assert kept("xyz") == 3


def test_a_delay_ends_when_somebody_waits():
    made = []
    compile_in_background([DeferredProgram(lambda: made.append(is_deferred()) or len).ready], delay_s=3600)
    assert is_compiling()
    wait_until_compiled()
    assert made == [True] and not is_compiling()


def test_a_wait_ends_at_its_limit():
    may_end = threading.Event()
    thread = compile_in_background([may_end.wait])
    with pytest.raises(TimeoutError, match="0 s"):
        wait_until_compiled(limit_s=0.05)
    may_end.set()
    thread.join(10)
    wait_until_compiled()


def test_turns_let_one_thread_in_and_all_while_somebody_waits():
    """Two threads meet inside, which takes two at once."""
    turns, inside, meeting = Turns(), [], threading.Barrier(2)

    def work():
        with turns.take():
            inside.append(1)
            meeting.wait(10)

    jobs = [threading.Thread(target=work) for _ in range(2)]

    def work_all():
        for job in jobs:
            job.start()
        for job in jobs:
            job.join(10)

    compile_in_background([work_all])
    time.sleep(0.3)
    assert len(inside) == 1
    wait_until_compiled()
    assert len(inside) == 2 and not meeting.broken


def test_a_fault_reaches_the_caller_and_the_next_caller_tries_again():
    faults = [MemoryError("no room")]

    def make():
        if faults:
            raise faults.pop()
        return lambda: "ran"

    program = DeferredProgram(make)
    with pytest.raises(MemoryError):
        program()
    assert not is_deferred()
    assert program() == "ran"


def test_the_first_request_may_need_every_deferred_program():
    """The thread does not run here, so the request compiles. An engine that defers nothing gives the same."""
    settings = EngineConfig(
        MODEL, block_size=16, max_num_batched_tokens=16, max_num_seqs=4, num_kv_pages=32, step_sizes="16"
    )
    checkpoint = open_checkpoint(MODEL)
    config = resolve(settings, checkpoint.model_config)
    plans = choose_plans(config, checkpoint.model_config)
    sampling = dataclasses.replace(toy.GREEDY, max_tokens=6, logprobs=3, prompt_logprobs=2)
    drawn = []
    for defers in (True, False):
        executor = make_executor(config, checkpoint, plans, progress=False)
        executor.compiler.defers = defers
        executor.warm_up()
        assert isinstance(executor.compiler.prompt[16], DeferredProgram) == defers
        assert isinstance(executor.compiler.samplers[4, "full"], DeferredProgram) == defers
        request = Request("a", list(range(3, 24)), sampling)
        drawn.append(toy.run(make_loop(config, checkpoint.model_config, executor), [request])["a"])
        assert executor.compilations == 0
    assert (drawn[0].tokens, drawn[0].logprobs) == (drawn[1].tokens, drawn[1].logprobs)
    assert drawn[0].started.prompt_logprobs == drawn[1].started.prompt_logprobs
