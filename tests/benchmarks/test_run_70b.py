"""The measurements of 70B: every command's plans are there, and fit what the command says of them."""

import itertools

import paths
import pytest

from benchmarks import check_plan, run_70b
from jaxflow.pipeline.plan import load

COMMANDS = list(itertools.product(run_70b.WHAT, run_70b.PRECISIONS, (2, 4)))


@pytest.mark.parametrize(("precision", "devices"), itertools.product(run_70b.PRECISIONS, (2, 4)))
def test_plans_are_there_and_of_one_size(precision, devices):
    setting = run_70b.SETTINGS[devices, precision]
    plans = [load(paths.ROOT / run_70b.PLANS / name) for name in (setting.found, *setting.hand)]
    assert len({plan.tokens for plan in plans}) == 1
    assert plans[0].tokens in setting.sizes and setting.other_tokens < plans[0].tokens
    assert set(setting.checked) <= {setting.found, *setting.hand}


@pytest.mark.parametrize(("what", "precision", "devices"), COMMANDS)
def test_a_command_names_its_report_and_its_commit(what, precision, devices):
    line = run_70b.command(what, precision, devices, "abc")
    assert line[line.index("--commit") + 1] == "abc"
    assert line[line.index("--output_json") + 1].endswith(f"llama-3-70b/{what}-tp{devices}-{precision}.json")


def test_the_check_reads_its_flags():
    line = run_70b.command("check", "fp8", 4, None)
    given = check_plan.parse(line[3:])
    assert given.fp8 and given.tensor_parallel_size == 4 and len(given.plans.split(",")) == 2
