"""The layouts compiled before serving, and those that become ready while the engine serves.

Law: a step gives the same tokens on every layout that can run the step, so an engine gives the same tokens
whatever is ready.
"""

import dataclasses
import functools
import itertools
import logging
import random
import re
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any
from unittest import mock

import hurry
import jax
import paths
import pytest
import toy
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.bench.engine import latency, throughput
from jaxflow.bench.workload import lengths
from jaxflow.bench.workload.drive import drive, greedy_requests
from jaxflow.config import EngineConfig
from jaxflow.engine import first_layouts, heap, stage_programs
from jaxflow.engine.deferred import DeferredProgram, wait_until_compiled
from jaxflow.engine.driver import Driver
from jaxflow.engine.executor import Executor
from jaxflow.engine.executor_start import make_executor, make_staged_executor
from jaxflow.engine.first_layouts import between_steps, first_sizes, make_ready, prepare_in_background
from jaxflow.engine.loop import larger_layouts
from jaxflow.engine.loop_start import make_loop
from jaxflow.engine.settings import resolve
from jaxflow.engine.staged_executor import StagedExecutor
from jaxflow.engine.step_plans import choose_plans, make_layouts
from jaxflow.llm import LLM
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.request import Request, SamplingParams

MODEL = str(paths.MODELS / "tiny-llama")
SETTINGS = EngineConfig(
    MODEL, block_size=16, max_num_batched_tokens=48, max_num_seqs=6, num_kv_pages=40, step_sizes="4,16"
)
CHECKPOINT = open_checkpoint(MODEL)
Made = tuple[EngineConfig, Executor | StagedExecutor]


@functools.cache
def prepared(stages: int) -> Made:
    """Return an executor with layouts of decodes alone.

    The largest layout was compiled first, then the others.
    """
    config = resolve(dataclasses.replace(SETTINGS, pipeline_parallel_size=stages), CHECKPOINT.model_config)
    plans = choose_plans(config, CHECKPOINT.model_config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            stage_programs,
            "make_layouts",
            lambda *args, **how: make_layouts(*args, **how | {"decodes_alone": True}),
        )
        make = make_executor if stages == 1 else make_staged_executor
        made = make(config, CHECKPOINT, plans, progress=False)
    made.warm_up(first=[made.layouts[48][0]])
    return config, made


def warm(stages: int) -> Made:
    """Return the executor with all layouts ready."""
    config, made = prepared(stages)
    for layout in made.unready():
        made.compile_layout(layout)
        make_ready(made, layout)
    return config, made


def cold(stages: int) -> Made:
    """Return the executor as after a start, with only the largest layout ready.

    A compilation takes no time.
    """
    config, made = warm(stages)
    for stage in stages_of(made):
        for table in tables_of(stage):
            for key, program in table.items():
                if not stage.compiler._is_first(table, key):
                    table[key] = DeferredProgram(lambda program=program: program)
    return config, made


def stages_of(made: Executor | StagedExecutor) -> Sequence[Executor]:
    return made.stages if isinstance(made, StagedExecutor) else (made,)


def tables_of(stage: Executor) -> list[dict[Any, Any]]:
    return [stage.compiler.steps, stage.compiler.samplers, stage.compiler.prompt]


def requests(seed: int) -> list[Request]:
    """Return requests of several lengths: greedy, drawn, with penalties, with
    log-probabilities of the prompt.
    """
    draw = random.Random(seed)
    kinds = [
        SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0.9, max_tokens=9, ignore_eos=True, seed=3),
        SamplingParams(
            temperature=0.8, top_k=20, presence_penalty=0.5, max_tokens=9, ignore_eos=True, seed=4
        ),
        SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=2, prompt_logprobs=2),
    ]
    return [
        Request(f"r{i}", [draw.randrange(3, 90) for _ in range(draw.choice((2, 7, 20, 60)))], kinds[i % 4])
        for i in range(8)
    ]


def tokens_of(results: dict[str, toy.Result]) -> dict[str, list[int]]:
    return {name: result.tokens for name, result in results.items()}


def logprobs_of(results: dict[str, toy.Result]) -> list:
    return [result.started.prompt_logprobs for result in results.values() if result.started is not None]


@pytest.fixture(scope="module", params=[1, 2], ids=["whole", "stages"])
def expected(request):
    """Return the number of stages, and the results where each step runs its own layout."""
    config, made = warm(request.param)
    assert not made.unready() and made.substitutes
    loop = make_loop(config, CHECKPOINT.model_config, made)
    return request.param, toy.run(loop, requests(0), at_step={5: requests_late()}, preempt_at={7, 11})


def requests_late() -> list[Request]:
    return [dataclasses.replace(one, request_id=f"late-{one.request_id}") for one in requests(1)[:3]]


def test_a_start_that_read_its_first_layouts_early_makes_all_programs(monkeypatch):
    monkeypatch.setattr(hurry, "shares", False)  # the programs below are none
    config = resolve(SETTINGS, CHECKPOINT.model_config)
    plans = choose_plans(config, CHECKPOINT.model_config)
    made = make_executor(config, CHECKPOINT, plans, progress=False)
    made.compiler.defers = False
    made.lower._lower = made.lower._lower_small = made.compiler._compile = lambda *_: mock.Mock()
    made.compiler.compile_early(made.num_pages, first=[made.layouts[48][0]])
    assert made.unready()
    made.compile()
    assert not made.unready()


@pytest.mark.parametrize("seed", [0, 1])
def test_layouts_that_become_ready_in_any_order_change_no_token(expected, seed):
    stages, wanted = expected
    config, made = cold(stages)
    draw, waiting = random.Random(seed), made.unready()
    draw.shuffle(waiting)
    loop = make_loop(config, CHECKPOINT.model_config, made)
    ran, step = [], loop.step

    def run_and_prepare():
        if waiting and draw.random() < 0.3:
            layout = waiting.pop()
            made.compile_layout(layout)
            make_ready(made, layout)
        return step()

    loop.step = run_and_prepare
    choose = loop._choose
    loop._choose = lambda *given: ran.append(choose(*given)) or ran[-1]
    found = toy.run(loop, requests(0), at_step={5: requests_late()}, preempt_at={7, 11})
    assert tokens_of(found) == tokens_of(wanted) and logprobs_of(found) == logprobs_of(wanted)
    assert made.compilations == 0
    assert len({layout.key for layout in ran}) > 2 and ran[0].tokens == 48


def test_a_step_runs_the_smallest_layout_that_is_ready_for_its_samplers_and_none_compiles(expected):
    stages, _ = expected
    config, made = cold(stages)
    small = made.layouts[4][0]
    for stage in stages_of(made):  # all of the small layout except the full sampler
        for table, key in zip(tables_of(stage), (small.key, (small.rows, "plain"), 4), strict=True):
            if key in table:
                table[key] = table[key].ready()
    loop = make_loop(config, CHECKPOINT.model_config, made)
    ran, choose = [], loop._choose
    loop._choose = lambda *given: ran.append(choose(*given)) or ran[-1]
    plain, drawn, long = (requests(0)[i] for i in (1, 2, 3))
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeferredProgram, "ready", lambda program: pytest.fail("a step waits for a compilation"))
        for one in (plain, drawn, long):
            ran.clear()
            toy.run(loop, [dataclasses.replace(one, prompt_token_ids=one.prompt_token_ids[:3])])
            found.append({layout.tokens for layout in ran})
    assert found == [{4}, {48}, {48}] and made.compilations == 0


@given(st.lists(st.floats(1.0, 1000.0), min_size=1, max_size=10), st.integers(1, 4))
def test_no_other_first_sizes_have_a_smaller_slowdown(times, count):
    seconds = {2**i: time for i, time in enumerate(sorted(times))}
    first = first_sizes(seconds, count)
    assert first == sorted(first, reverse=True) and first[0] == max(seconds)
    assert len(set(first)) == min(count, len(seconds))

    def slowdown(sizes) -> float:
        return max(seconds[min(one for one in sizes if one >= size)] / own for size, own in seconds.items())

    others = (some for some in itertools.combinations(seconds, len(first)) if max(seconds) in some)
    assert slowdown(first) <= min(map(slowdown, others))


def test_an_engine_prepares_its_layouts_while_it_serves(monkeypatch, caplog):
    """One layout does not fit next to others at first, and is compiled alone in the end.

    Another one fails.
    """
    monkeypatch.setattr(first_layouts, "on_gpu", lambda: True)
    monkeypatch.setattr(first_layouts, "first_sizes", lambda seconds: [max(seconds)])
    monkeypatch.setattr(first_layouts, "MOST_WORKERS", 1)
    compiled, tried = Executor.compile_layout, []

    def failing(executor, layout):
        tried.append(layout.tokens)
        if tried == [2]:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        if layout.tokens == 4:
            raise ValueError("a bug of the compiler\nand its second line")
        compiled(executor, layout)

    monkeypatch.setattr(Executor, "compile_layout", failing)
    config = dataclasses.replace(SETTINGS, max_num_batched_tokens=16, max_num_seqs=4, step_sizes="2,4")
    with LLM.from_config(config, progress=False) as llm:
        items = lengths.constant(4, 8, 24)
        prompts = lengths.prompts(items, llm.model_config.vocab_size, 0)
        serving = threading.Thread(target=drive, args=(llm.driver, greedy_requests(items, prompts)))
        serving.start()
        wait_until_compiled()
        assert tried == [2, 4, 2]
        assert isinstance(llm.executor, Executor) and llm.executor.substitutes
        assert [layout.tokens for layout in llm.executor.unready()] == [4]
        (warning,) = (record for record in caplog.records if record.levelno >= logging.WARNING)
        assert warning.exc_info is None and "\n" not in warning.getMessage()
        assert {"4", "ValueError"} <= set(re.findall(r"\w+", warning.getMessage()))
        serving.join()
        found = throughput.time_start(llm)
        assert llm.driver.alive and llm.driver.stats().compilations_after_warmup == 0
        assert found["until_first_token_s"] > found["total_s"] > found["lowering_s"] > 0
        assert latency.measure(llm, 2, 8, 6, iterations=2)["completed"] == 4


def test_the_preparation_ends_with_the_engine():
    config, made = cold(1)
    driver = Driver(make_loop(config, CHECKPOINT.model_config, made))
    driver.start()
    driver.close()
    tried = threading.Event()

    def call(work) -> Future:
        tried.set()
        return driver.call(work)

    prepare_in_background(made, between_steps(made, call))
    wait_until_compiled()
    assert tried.is_set() and made.unready()


def test_the_layouts_after_a_bucket_can_run_its_steps():
    config, made = cold(1)
    loop = make_loop(config, CHECKPOINT.model_config, made)
    loop.add(requests(0)[0], 0.0)
    work = loop.scheduler.schedule(0.0)
    assert work is not None and work.chunks
    found = list(larger_layouts(made, work.bucket, alone=not work.chunks))
    assert [layout.tokens for layout in found] == [size for size in (4, 16, 48) if size >= work.bucket]
    assert not any(layout.decodes for layout in found)
    assert {layout.tokens for layout in larger_layouts(made, 4, alone=True) if layout.decodes} == {4, 16}


def test_objects_of_later_compilations_are_frozen_where_the_heap_is(monkeypatch):
    frozen, thresholds = [], (700, 10, 10)
    monkeypatch.setattr(heap.gc, "freeze", lambda: frozen.append(1))
    monkeypatch.setattr(heap.gc, "get_threshold", lambda: thresholds)
    heap.freeze_later_objects()
    assert not frozen
    thresholds = heap.COLLECTOR_THRESHOLDS
    heap.freeze_later_objects()
    assert frozen == [1]
