"""Options of tasks: shares of SMs that fill a product's waves, and the rest for other tasks."""

import dataclasses
import math

import paths
import pytest
from search_toys import llama_setting

from search.nanobatch import stages as nanobatch
from search.nanobatch.cuts import make_tasks
from search.nanobatch.cyclic import SearchError
from search.nanobatch.layer_tasks import Task
from search.nanobatch.options import wave_filling_sms
from search.nanobatch.problem import SearchDeadline, SearchProblem
from search.nanobatch.stages import search, stage_two
from search.profile.share_times import TILE_COLUMNS, TILE_ROWS, ShareTimes

PROFILE = paths.ROOT / "search" / "profiles" / "h200-llama-3.1-8b.json"
SETTING = llama_setting(2048, 1024, 512)  # products were timed on 92 and 104 SMs, attention on 40 and 28
FILLING = dataclasses.replace(SETTING, full_waves=True)


def halves(setting: SearchProblem) -> list[Task]:
    """Return a layer's tasks, each on one half of the tokens."""
    return [task for task in make_tasks(setting, (1024,))[0] if (task.start, task.stop) != (0, 2048)]


def product_of(task: Task) -> str | None:
    return next((op.name for op in task.chain.ops if op.name in SETTING.shares.products), None)


def test_a_product_of_1024_tokens_has_those_on_which_it_has_fewer_halves_of_waves():
    """`qkv` has 192 tiles, two for each of 96 SMs.

    `up_gate` has 896 tiles, at most nine for each of 100 SMs.
    """
    shares, offered = SETTING.shares, {}
    for task in halves(SETTING):
        step = SETTING.load.part(task.start, task.stop)
        found, product = wave_filling_sms(shares, task, step), product_of(task)
        offered[task.chain.names[-1]] = found
        for sms in found:
            assert product is not None
            tiles = math.ceil(1024 / TILE_ROWS) * math.ceil(shares.products[product][1] / TILE_COLUMNS)
            assert math.ceil(2 * tiles / sms) < math.ceil(2 * tiles / (sms - 1))
            assert shares.fill(product, 1024, sms) > 0.985 > shares.fill(product, 1024, sms - 1)
    assert offered["qkv"] == (96,) and offered["up_gate"] == (95, 100) and offered["decode_attention"] == ()


def test_they_are_offered_with_what_they_leave():
    tasks = [task for task in halves(FILLING) if not task.start]  # decodes are in the first half
    shares = {
        task.chain.names[-1]: {option.share for option in own}
        for task, own in zip(tasks, offers(FILLING, tasks), strict=True)
    }
    assert {96, 132} <= shares["qkv"] <= {92, 96, 104, 132}
    assert shares["decode_attention"] <= {28, 32, 36, 37, 40, 132} and shares["decode_attention"] & {
        32,
        36,
        37,
    }
    before = {option.share for own in offers(SETTING, tasks) for option in own}
    assert before <= {28, 40, 92, 104, 132, 0}


def offers(setting: SearchProblem, tasks: list[Task]) -> tuple:
    """Return the options of stage II."""
    return stage_two(dataclasses.replace(setting, most_shares=6), tasks, None, 0.01)[0].options


def test_no_task_has_more_than_it_may_have():
    for own in stage_two(FILLING, halves(FILLING), None, 0.01)[0].options:
        assert len(own) <= FILLING.most_shares + 1
        assert [option.seconds for option in own] == sorted((option.seconds for option in own), reverse=True)


def test_where_shares_are_given_no_others_are_offered():
    base = SETTING.shares
    given = ShareTimes(base.profile, base.graph, base.products, base.card, memory_sms=(40,))
    assert not given.knows_waves and not ShareTimes(base.profile, base.graph).knows_waves
    tasks = halves(SETTING)
    assert not any(wave_filling_sms(given, task, SETTING.load.part(task.start, task.stop)) for task in tasks)


@pytest.mark.parametrize("shorter", [True, False])
def test_they_are_asked_for_last_and_taken_where_the_period_is_shorter(monkeypatch, shorter):
    asked, said = [], []
    alone = nanobatch._sequential(SETTING, None, SearchDeadline(math.inf, lambda: 0.0))

    def solved(setting, cuts, *rest):
        asked.append(setting.full_waves)
        if setting.full_waves and not shorter:
            raise SearchError("no schedule")
        return dataclasses.replace(alone, period_s=1e-6 if setting.full_waves else 2e-6, cuts=cuts)

    monkeypatch.setattr(nanobatch, "_solve", solved)
    setting = llama_setting(2048, 1024, 512, places=(512,), split=True)
    found = search(setting, time_limit_s=60.0, say=said.append)
    assert asked == [False, True] and found.cuts == (512,)
    assert (found.period_s == 1e-6) == shorter == said[-1].startswith("full waves: ")
