"""The number of pages that a start guesses before it measures a program:
nearly all that fit, and never more.
"""

import dataclasses
import types
from typing import Any

import hurry
import paths
import pytest
import toy
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxflow.config import EngineConfig
from jaxflow.engine import first_layouts, page_count
from jaxflow.engine.deferred import wait_until_compiled
from jaxflow.engine.executor import Executor
from jaxflow.engine.program_compiler import ProgramCompiler
from jaxflow.kv.device_cache import page_bytes
from jaxflow.llm import LLM
from jaxflow.request import SamplingParams

CONFIG = EngineConfig(
    str(paths.MODELS / "tiny-llama"), dtype="float32", block_size=16, max_model_len=64, max_num_seqs=3,
    max_num_batched_tokens=8,
)  # fmt: skip


@pytest.fixture(scope="module")
def executor():
    return toy.executor("tiny-llama", budget=8, seqs=3, pages=12)[1]


def guessed(executor, free: int) -> tuple[int, ...] | None:
    return page_count._guessed_pages(CONFIG, executor.programs.context.config, [executor], [free])


def pages_of(executor, free: int, need: int, first=()) -> tuple[tuple[int, ...] | None, list]:
    """Return the guess of an engine with processes, and what these were asked.

    need: the bytes that are measured.
    """
    asked, later, withdrawn = [], [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_count, "first_layouts", lambda *_: first)
        lowering = types.SimpleNamespace(withdraw=withdrawn.append, guess=None)
        patch.setattr(executor.compiler, "lowering", lowering)
        patch.setattr(executor.compiler, "prepare_first", lambda layouts, pages: asked.append(pages))
        patch.setattr(executor.compiler, "prepare_later", lambda pages: later.append(pages))
        patch.setattr(executor.compiler, "temporary_bytes", lambda pages: need)
        found = guessed(executor, free)
    assert later == asked and withdrawn == [pages for pages in asked if pages != found]
    return found, asked


@settings(max_examples=40, deadline=None)
@given(st.integers(300, 3000), st.floats(0.0, 3.0))
def test_a_guess_loses_at_most_a_hundredth_of_the_pages_that_fit(executor, megabytes, share):
    free = megabytes << 20
    guess = page_count._guessed_temporary_bytes(CONFIG, executor.programs.context.config)
    need = int(guess * share)
    found, asked = pages_of(executor, free, need)
    fit = page_count._fitting_pages(CONFIG, executor, free - need)
    assert found is not None
    assert all(page_count.GOOD_GUESS * most <= pages <= most for pages, most in zip(found, fit, strict=True))
    if found not in asked:
        assert found == fit  # the second round is exact


def test_processes_get_the_pages_of_a_good_guess_before_the_measurement(executor):
    guess = page_count._guessed_temporary_bytes(CONFIG, executor.programs.context.config)
    found, asked = pages_of(executor, 4000 << 20, guess // 2)
    assert asked == [found]


@pytest.mark.parametrize(
    ("pages", "is_used"), [(1000, True), (995, True), (1004, True), (900, False), (1200, False)]
)
def test_pages_of_programs_that_are_prepared_already_are_used_if_they_are_close(pages, is_used):
    withdrawn: list = []
    lowering: Any = types.SimpleNamespace(guess=(pages, 50), withdraw=withdrawn.append)
    assert page_count._early_guess(lowering, (1000, 50)) == ((pages if is_used else 1000), 50)
    assert withdrawn == ([] if is_used else [(pages, 50)])


def test_without_a_guess_the_memory_is_measured_as_before(executor):
    assert pages_of(executor, 4000 << 20, 0, None) == (None, [])  # all layouts are compiled at once
    assert pages_of(executor, 1, 0) == (None, [])  # not even one sequence fits beside the guess
    assert guessed(executor, 4000 << 20) is None  # no processes


@pytest.mark.parametrize("more_pages", [0, 3], ids=["good", "bad"])
def test_an_engine_draws_the_same_tokens_after_any_guess(more_pages, monkeypatch):
    """With a process, which prepares the first programs for the guess and later the others for the result."""
    settings = EngineConfig(
        str(paths.MODELS / "tiny-llama"), block_size=16, max_num_batched_tokens=16, max_num_seqs=4,
        plan="sequential", step_sizes="4,8", lowering_processes=1, max_model_len=64,
    )  # fmt: skip
    prompts, sampling = [[3, 5, 7, 9], [11, 13]], SamplingParams(temperature=0.0, max_tokens=5)
    monkeypatch.setattr(hurry, "shares", False)
    with LLM.from_config(
        dataclasses.replace(settings, num_kv_pages=64, lowering_processes=0), progress=False
    ) as llm:
        alone = [out.outputs[0].token_ids for out in llm.generate(prompts, sampling)]
    monkeypatch.setattr(first_layouts, "on_gpu", lambda: True)
    asked = []
    prepare_first = ProgramCompiler.prepare_first

    def own_num_pages(config, model, stages, team):
        (executor,) = stages
        guess = page_count._guessed_temporary_bytes(config, model)
        page = sum(page_bytes(executor.page_groups, config.block_size, 1))
        need = guess + more_pages * page
        monkeypatch.setattr(
            executor.compiler,
            "temporary_bytes",
            lambda pages: executor.compiler.temporary_needs(16, pages) and need,
        )
        return page_count._guessed_pages(config, model, stages, [guess + 12 * page])

    def record(executor, first, num_pages):
        asked.append(num_pages)
        prepare_first(executor, first, num_pages)

    monkeypatch.setattr(page_count, "_own_num_pages", own_num_pages)
    monkeypatch.setattr(ProgramCompiler, "prepare_first", record)
    with LLM.from_config(settings, progress=False) as llm:
        assert isinstance(llm.executor, Executor)
        assert ([llm.executor.num_pages] == asked) == (more_pages == 0)
        assert [out.outputs[0].token_ids for out in llm.generate(prompts, sampling)] == alone
        wait_until_compiled()
        assert not llm.executor.unready() and llm.executor.compiler.lowering is None
        assert [out.outputs[0].token_ids for out in llm.generate(prompts, sampling)] == alone
