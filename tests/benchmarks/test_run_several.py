"""The measurements on several GPUs: every command has flags that exist, and a report of its own."""

import importlib.util

import pytest

from benchmarks import check_engine, run_several
from jaxflow.bench.engine import followers, throughput
from jaxflow.bench.pipeline import study
from jaxflow.cli.engine_flags import engine_config_from_flags, parse

BENCH = {"throughput": throughput, "followers": followers, "pipeline": study}
COMMANDS = [(devices, name) for devices in (2, 4) for name in run_several.commands(devices)]


@pytest.mark.parametrize(("devices", "name"), COMMANDS)
def test_a_command_has_flags_that_exist(no_flags, devices, name):
    _, module, *words = run_several.commands(devices)[name]
    if module == check_engine.__name__:
        given = check_engine.parse(words)
        assert given.pipeline_parallel_size == devices
    else:
        BENCH[words[0]].define_flags()
        parse(words)
        if words[0] != "pipeline":  # The command makes its own engine settings.
            engine_config_from_flags()
    assert importlib.util.find_spec(module)


@pytest.mark.parametrize("devices", [2, 4])
def test_each_command_has_a_report_of_its_own(devices):
    made = run_several.commands(devices).values()
    assert len({line[line.index("--output_json") + 1] for line in made}) == len(made)
