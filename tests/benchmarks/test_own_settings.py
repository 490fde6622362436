"""Settings files that compare JaxFlow with itself: equal work on all sides, and flags that exist."""

import copy
import json

import paths
import pytest
from absl import flags
from own_flags import own_flags

import serving.__main__ as server_command
from jaxflow.bench.engine import serve, throughput
from jaxflow.bench.workload.flags import items_from_flags
from jaxflow.cli.engine_flags import define_engine_flags, engine_config_from_flags

SETTINGS = paths.ROOT / "benchmarks/settings"
DEFAULTS = sorted(SETTINGS.glob("defaults-*.json"))
SERVED = sorted(SETTINGS.glob("serve-*.json"))
LIMITS = ("max_num_batched_tokens", "max_num_seqs")


def settings_of(command):
    """Return the engine's settings, the requests and the compilation cache of a `bench throughput`."""
    assert command[:3] == ["-m", "jaxflow.bench", "throughput"]
    with own_flags():
        throughput.define_flags()
        flags.FLAGS(command[2:])
        engine = engine_config_from_flags()
        items, described = items_from_flags(engine.max_model_len)
        assert not described["left_out"]
        return engine, (items, flags.FLAGS.workload_seed)


@pytest.mark.parametrize("path", DEFAULTS, ids=lambda path: path.stem)
def test_sides_differ_only_in_their_limits_and_the_first_has_none(monkeypatch, path):
    monkeypatch.chdir(paths.ROOT)
    found = [settings_of(side["command"]) for side in json.loads(path.read_text())["sides"]]
    (first, work), *others = found
    assert all(getattr(first, name) is None for name in LIMITS)
    for engine, same_work in others:
        assert same_work == work
        changed = {name for name in vars(first) if getattr(first, name) != getattr(engine, name)}
        assert changed and changed <= set(LIMITS)
    assert len({tuple(getattr(engine, name) for name in LIMITS) for engine, _ in found}) == len(found)


def server_settings(command):
    """Return the engine's settings of a server, whose other flags are those of its command's module."""
    assert command[:2] == ["-m", "serving"] and server_command.PORT.name in flags.FLAGS
    others = copy.deepcopy(flags.FLAGS)
    with own_flags():
        define_engine_flags()
        for name in set(others) & set(flags.FLAGS):
            delattr(others, name)
        flags.FLAGS.append_flag_values(others)
        assert flags.FLAGS(command[1:]) == ["serving"]
        return engine_config_from_flags()


def load_flags(command):
    """Return the flags of a `bench serve` by name."""
    assert command[:3] == ["-m", "jaxflow.bench", "serve"]
    with own_flags():
        serve.define_flags()
        flags.FLAGS(command[2:])
        return flags.FLAGS.flag_values_dict()


@pytest.mark.parametrize("path", SERVED, ids=lambda path: path.stem)
def test_servers_and_loads_have_flags_that_exist_and_sides_differ_in_rates_only(path):
    sides = json.loads(path.read_text())["sides"]
    engines = [server_settings(side["server"]) for side in sides]
    loads = [load_flags(side["command"]) for side in sides]
    rates = [load.pop("request_rate") for load in loads]
    assert len(set(rates)) == len(rates)
    for engine, load in zip(engines, loads, strict=True):
        assert engine == engines[0] and load == loads[0]
        assert load["model"] == engine.model and load["backend"] == "openai"
        assert load["input_len"] + load["output_len"] <= engine.max_model_len
