"""The measurements of 70B: every command's plans are there, and fit what the command says of them."""

import itertools
import json

import paths
import pytest

from benchmarks import check_plan, plan_windows, run_70b
from jaxflow.bench.engine import throughput
from jaxflow.cli.engine_flags import parse
from jaxflow.pipeline.plan import load
from pallas_kernels.measure.provenance import COMMIT_VARIABLE, KEYS

COMMANDS = list(itertools.product(run_70b.WHAT, run_70b.PRECISIONS, (2, 4)))


@pytest.mark.parametrize(("precision", "devices"), itertools.product(run_70b.PRECISIONS, (2, 4)))
def test_plans_are_there_and_of_one_size(precision, devices):
    setting = run_70b.SETTINGS[devices, precision]
    plans = [load(paths.ROOT / run_70b.PLANS / name) for name in (setting.found, *setting.hand)]
    assert len({plan.tokens for plan in plans}) == 1
    assert plans[0].tokens in setting.sizes and setting.other_tokens < plans[0].tokens
    assert set(setting.checked) <= {setting.found, *setting.hand}


@pytest.mark.parametrize(("precision", "devices"), itertools.product(run_70b.PRECISIONS, (2, 4)))
def test_the_found_plan_has_the_largest_step(precision, devices):
    setting = run_70b.SETTINGS[devices, precision]
    plan = load(paths.ROOT / run_70b.PLANS / setting.found)
    assert all(int(size) < plan.tokens for size in setting.decode_sizes.split(","))
    assert plan.target.parallel.tp == devices
    assert (plan.target.kv_cache_dtype == "float8_e4m3fn") == (precision == "fp8")
    if setting.shipped is not None:
        shipped = load(paths.ROOT / setting.shipped)
        assert shipped.tokens == plan.tokens and shipped.predictions is not None
        for field in ("model", "parallel", "dtype", "kv_cache_dtype"):
            assert getattr(shipped.target, field) == getattr(plan.target, field)


@pytest.mark.parametrize(("what", "precision", "devices"), COMMANDS)
def test_a_command_names_its_report_and_flags_that_exist(no_flags, what, precision, devices):
    line = run_70b.command(what, precision, devices)
    module, *words = line[1:]
    if what == "check":
        check_plan.parse(words)
    else:
        bench = words.pop(0) == "throughput" if module == "jaxflow.bench" else False
        (throughput if bench else plan_windows).define_flags()
        parse([module, *words])
    assert line[line.index("--output_json") + 1].endswith(f"llama-3-70b/{what}-tp{devices}-{precision}.json")


def test_the_check_reads_its_flags():
    line = run_70b.command("check", "fp8", 4)
    given = check_plan.parse(line[2:])
    assert given.fp8 and given.tensor_parallel_size == 4 and len(given.plans.split(",")) == 2


def test_a_check_writes_a_report_with_every_key(monkeypatch, tmp_path):
    body = {"passes": {"plan": True}, "same_bits_twice": True}
    monkeypatch.setattr(check_plan, "executor_of", lambda *_: None)
    monkeypatch.setattr(check_plan, "measured", lambda *_: body)
    monkeypatch.setattr(check_plan, "table", lambda report: "")
    monkeypatch.setenv(COMMIT_VARIABLE, "abc")
    out = tmp_path / "check.json"
    words = run_70b.command("check", "fp8", 2)[2:]
    words[words.index("--output_json") + 1] = str(out)
    monkeypatch.chdir(paths.ROOT)
    assert check_plan.main(words) == 0
    report = json.loads(out.read_text("utf-8"))
    assert set(KEYS) <= set(report) and report["commit"] == "abc" and report["passes"] == body["passes"]
