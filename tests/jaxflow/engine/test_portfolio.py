"""An engine with several plans for one bucket: each step runs the one for its composition, and answers are
the golden ones.
"""

import msgspec
import pytest
import toy

from jaxflow.config import ParallelConfig
from jaxflow.pipeline.handwritten import phased_plan, two_nano_batch_plan
from jaxflow.pipeline.plan import Predictions, Target, save
from jaxflow.request import Request

MODEL, TOKENS = "tiny-llama", 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two plans for steps of 64 tokens: one for steps with decodes, one for those without that gains only
    where contexts are long.
    """
    config, where = (
        toy.open_checkpoint(str(toy.paths.MODELS / MODEL)).model_config,
        tmp_path_factory.mktemp("plans"),
    )
    target = Target(MODEL, "cpu", ParallelConfig(), "float32", "float32", 8, 56, 100)
    decoding = Predictions((0, 1), (0,), ((1.0,), (1.0,)), ((0.5,), (2.0,)))
    never = Predictions((0, 1), (0, 10_000), ((1.0, 1.0),) * 2, ((0.9, 9.0),) * 2)
    for plan, predicted in (
        (two_nano_batch_plan(config, TOKENS, 24), decoding),
        (phased_plan(config, TOKENS, 20), never),
    ):
        save(msgspec.structs.replace(plan, target=target, predictions=predicted), where / f"{plan.name}.json")
    return where


def test_each_step_runs_the_plan_for_its_composition(folder, goldens):
    golden = goldens(MODEL)
    loop = toy.loop(MODEL, plan=str(folder))
    loop.executor.warm_up()
    cut, phased = (layout.plan for layout in loop.executor.layouts[TOKENS][1:])
    assert [layout.borders for layout in loop.executor.layouts[TOKENS]] == [(), (24,), (20,)]
    seen, run = [], loop.executor.run

    def watched(layout, buffer, *args, **kwargs):
        seen.append((layout.tokens, layout.plan, int(layout.views(buffer)["num_decodes"])))
        return run(layout, buffer, *args, **kwargs)

    loop.executor.run = watched
    try:
        prompts = toy.prompts(golden)
        first, second = (
            [Request(f"{which}{i}", prompt, toy.GREEDY) for i, prompt in enumerate(prompts)] for which in "ab"
        )
        results = toy.run(loop, first, at_step={4: second})  # the second half comes while the first decodes
    finally:
        del loop.executor.run
    for i, prompt in enumerate(golden["prompts"]):
        assert results[f"a{i}"].tokens == results[f"b{i}"].tokens == prompt["greedy_ids"][:32]
    assert {plan for tokens, plan, _ in seen if tokens != TOKENS} == {"sequential"}
    assert {(decodes > 0, plan) for tokens, plan, decodes in seen if tokens == TOKENS} == {
        (False, "sequential"),
        (True, cut),
    }
    picked = loop.stats(0).steps_by_plan
    assert (
        picked == {plan: sum(one == plan for _, one, _ in seen) for plan in ("sequential", cut)}
        and phased not in picked
    )
    assert loop.executor.compilations == 0
