"""The measurements on several GPUs: every command has flags that exist, and a report of its own."""

import importlib.util
from pathlib import Path

import pytest

from benchmarks import check_engine, host_processes, run_several
from jaxflow.bench.engine import followers, skewed_experts, throughput
from jaxflow.bench.kernels import collectives
from jaxflow.bench.pipeline import study
from jaxflow.cli.engine_flags import engine_config_from_flags, parse
from jaxflow.config import EngineConfig
from jaxflow.flexgen.accounting import account, check_fits, together
from jaxflow.flexgen.config import OffloadConfig
from jaxflow.flexgen.geometry import place
from jaxflow.flexgen.policy import load_policy
from jaxflow.flexgen.pool_limits import host_pool_gib, pools_room, usable_bytes
from jaxflow.flexgen.start import make_geometries
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.pipeline.plan import load
from search.placement import offload

BENCH = {
    "throughput": throughput,
    "followers": followers,
    "pipeline": study,
    "collectives": collectives,
    "skewed_experts": skewed_experts,
    "offload": offload,
}
WITHOUT_ENGINE = ("pipeline", "collectives", "offload")  # commands with settings of their own
COMMANDS = [(devices, name) for devices in (2, 4) for name in run_several.commands(devices)]


@pytest.mark.parametrize(("devices", "name"), COMMANDS)
def test_a_command_has_flags_that_exist(no_flags, devices, name):
    _, module, *words = run_several.commands(devices)[name]
    assert importlib.util.find_spec(module)
    if module == host_processes.__name__:
        assert words[:2] == ["--processes", str(devices)]
        _, module, *words = words[2:]
    if module == check_engine.__name__:
        given = check_engine.parse(words)
        assert given.pipeline_parallel_size == devices
    else:
        BENCH[words[0]].define_flags()
        parse(words)
        if words[0] not in WITHOUT_ENGINE:
            config = engine_config_from_flags()
            if Path(config.plan).is_dir() and "--compare_sequential" in words:
                assert all(load(path).predictions for path in Path(config.plan).glob("*.json"))
        if words[0] == "offload":
            stages = load_policy(words[words.index("--policies") + 1], model="opt-30b").pipeline_parallel_size
            assert stages in (1, devices)
    assert importlib.util.find_spec(module)


@pytest.mark.parametrize(("devices", "host_gib"), [(1, 128), (2, 256), (4, 512)])
def test_an_offloaded_policy_fits_the_pinned_pools_of_its_host(devices, host_gib):
    asked = load_policy(f"benchmarks/settings/opt-30b-of-{devices}.json", model="opt-30b")
    engine = EngineConfig(model="opt-30b", load_format="dummy", dtype="bfloat16")
    checkpoint = open_checkpoint("opt-30b", load_format="dummy")
    found = together(
        [account(g, place(g), 0) for g in make_geometries(OffloadConfig(asked), engine, checkpoint)]
    )
    limit = int(run_several.HOST_GB[devices] * 1e9)
    check_fits(found, {"host": usable_bytes("host", limit, devices)}, devices)
    assert devices * host_pool_gib(limit, devices) * 2**30 <= pools_room(host_gib * 2**30)


@pytest.mark.parametrize("devices", [2, 4])
def test_nano_batches_of_ranks_differ_from_their_rival_by_the_plan_alone(devices):
    made = run_several.commands(devices)
    plans, sequential = made["qwen3-ranks-nano-batches"], made["qwen3-ranks-sequential"]
    differs = [at for at, pair in enumerate(zip(plans, sequential, strict=True)) if len(set(pair)) == 2]
    assert [plans[at - 1] for at in differs] == ["--plan", "--output_json"]


@pytest.mark.parametrize("devices", [2, 4])
def test_each_command_has_a_report_of_its_own(devices):
    made = run_several.commands(devices).values()
    assert len({line[line.index("--output_json") + 1] for line in made}) == len(made)
