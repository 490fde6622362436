"""Test the command-line flags of EngineConfig."""

import dataclasses
import math

import pytest
from absl import flags

import jaxflow.cli.engine_flags as engine_flags
from jaxflow.cli.float_flags import check_floats
from jaxflow.config import ConfigError, EngineConfig

DEFINE = {
    name: getattr(flags, name) for name in ("DEFINE_integer", "DEFINE_float", "DEFINE_bool", "DEFINE_string")
}


@pytest.fixture
def parse(monkeypatch):
    """Return a function that parses a command line into separate flags and returns the settings."""

    def parse(*arguments, model=None):
        values = flags.FlagValues()
        for name, define in DEFINE.items():
            monkeypatch.setattr(flags, name, with_values(define, values))
        monkeypatch.setattr(flags, "FLAGS", values)
        engine_flags.define_engine_flags(model)
        values(["program", *arguments])
        return engine_flags.engine_config_from_flags()

    def with_values(define, values):
        return lambda name, default, text: define(name, default, text, flag_values=values)

    return parse


def test_defaults_are_those_of_engine_config(parse):
    assert parse("--model=m") == EngineConfig(model="m")
    assert parse(model="embedded") == EngineConfig(model="embedded")


def test_model_is_required(parse):
    with pytest.raises(flags.IllegalFlagValueError, match="give a model, as --model PATH") as refused:
        parse("/a/path/without/its/flag")
    assert "None" not in str(refused.value)


@pytest.mark.parametrize(
    ("argument", "accepted"),
    [
        *((f"--plain={value}", False) for value in ("nan", "inf", "-inf")),
        ("--plain=1.5", True),
        ("--rate=inf", True),
        ("--rate=nan", False),
        ("--rate=-inf", False),
        ("--several=1,nan", False),
        ("--several=1,2", True),
        ("--timeout_s=inf", True),
        ("--timeout_s=nan", False),
    ],
)
def test_numbers_that_are_not_finite_are_refused(argument, accepted):
    values = flags.FlagValues()
    flags.DEFINE_float("plain", 1.0, "A bounded number.", lower_bound=0, flag_values=values)
    flags.DEFINE_float("timeout_s", 1.0, "Seconds.", flag_values=values)
    flags.DEFINE_float("rate", math.inf, "A rate.", flag_values=values)
    flags.DEFINE_multi_float("several", [], "Several numbers.", flag_values=values)
    name, _, value = argument.partition("=")
    given = [f"{name}={one}" for one in value.split(",")]
    try:
        values(["program", *given])
        check_floats(values, infinite=("timeout_s",))
    except flags.Error as error:
        assert not accepted and name in str(error)
    else:
        assert accepted


def test_every_field_has_a_flag(parse):
    given = EngineConfig(
        model="m",
        tokenizer="t",
        dtype="bfloat16",
        load_format="dummy",
        quantization="fp8",
        kv_cache_dtype="float32",
        block_size=32,
        tensor_parallel_size=2,
        enable_expert_parallel=True,
        eplb_step_interval=20,
        max_model_len=100,
        max_num_batched_tokens=512,
        step_sizes="8,256",
        max_num_seqs=7,
        max_waiting=9,
        lowering_processes=4,
        batch_tpot_ms=12.5,
        gpu_memory_utilization=0.5,
        num_kv_pages=10,
        enable_prefix_caching=False,
        kv_offloading_size=1.5,
        kv_disk_path="pages",
        kv_disk_size=2.5,
        seed=3,
        coordinator="host:1",
        num_processes=3,
        process_id=2,
        join_timeout_s=5.5,
        step_timeout_s=6.5,
        calibration="softmax.json",
        plan="searched",
        kernels="reference",
        compilation_cache_dir="",
    )
    shown = dataclasses.asdict(given)
    untouched = {
        name for name, value in shown.items() if value == getattr(EngineConfig(model="another"), name)
    }
    assert untouched == {
        "data_parallel_size",
        "pipeline_parallel_size",
        "attention_spans",
        "enable_eplb",
        "num_redundant_experts",
        "enforce_eager",
    }  # exclude other values of these settings
    assert parse(*(f"--{name}={value}" for name, value in shown.items() if value is not None)) == given
    assert parse("--model=m", "--pipeline_parallel_size=2") == EngineConfig("m", pipeline_parallel_size=2)
    ranks = {"enable_expert_parallel": True, "data_parallel_size": 2}
    assert parse("--model=m", *(f"--{name}={value}" for name, value in ranks.items())) == EngineConfig(
        "m", **ranks
    )
    assert parse("--model=m", "--enforce_eager") == EngineConfig("m", enforce_eager=True)
    eplb = {"enable_expert_parallel": True, "enable_eplb": True, "num_redundant_experts": 4}
    assert parse("--model=m", *(f"--{name}={value}" for name, value in eplb.items())) == EngineConfig(
        "m", **eplb
    )
    assert parse("--model=m", "--attention_spans=spans.json") == EngineConfig(
        "m", attention_spans="spans.json"
    )


@pytest.mark.parametrize(
    ("flag", "field"),
    [
        ("--quantization=int3", "quantization"),
        ("--kv_cache_dtype=fp4", "kv_cache_dtype"),
        ("--block_size=0", "block_size"),
    ],
)
def test_an_invalid_value_names_its_field(parse, flag, field):
    with pytest.raises(ConfigError) as caught:
        parse("--model=m", flag)
    assert caught.value.field == field


def test_a_value_that_is_not_a_number(parse):
    with pytest.raises(flags.IllegalFlagValueError, match="block_size"):
        parse("--model=m", "--block_size=many")


def test_every_field_has_one_sentence_of_help():
    for field in dataclasses.fields(EngineConfig):
        assert field.metadata["help"].endswith("."), field.name


def test_a_removed_flag_names_its_replacement():
    for argument in ("--scheduling_policy=hybrid", "--chunk_size", "-chunk_size=64"):
        name = argument.lstrip("-").partition("=")[0]
        with pytest.raises(flags.Error, match=f"flag --{name} was removed: .*(sweep|max_num_batched_tokens)"):
            engine_flags.parse(["program", argument])


@pytest.mark.parametrize("argument", ["--enable-lora", "--trust_remote_code", "--swap-space=4"])
def test_a_flag_of_vllm_names_what_takes_its_place(argument, capsys):
    with pytest.raises(SystemExit) as ended:
        engine_flags.engine_arguments(["program", argument])
    assert ended.value.code == 2
    assert "is not supported: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "line", ["m --port 1 --on", "--port 1 m --on", "--port=1 m --on", "--port 1 --on m", "--on m --port 1"]
)
def test_the_first_word_that_is_no_value_is_the_model(line, monkeypatch):
    values = server_flags(monkeypatch)
    rest = values(engine_flags.engine_arguments(["program", *line.split()]))
    assert (rest, values.model, values.port, values.on) == (["program"], "m", 1, True)


def server_flags(monkeypatch):
    """Put a few flags in the place of absl's, and return them."""
    values = flags.FlagValues()
    flags.DEFINE_integer("port", 0, "", flag_values=values)
    flags.DEFINE_bool("on", False, "", flag_values=values)
    flags.DEFINE_string("model", None, "", flag_values=values)
    monkeypatch.setattr(flags, "FLAGS", values)
    return values


@pytest.mark.parametrize("line", ["", "--model m", "--model=m other", "--seed=1", "-- m"])
def test_other_command_lines_stay_as_they_are(line, monkeypatch):
    server_flags(monkeypatch)
    same = ["program", *line.split()]
    assert engine_flags.engine_arguments(same) == same


def test_a_word_beside_the_models_flag_is_left_over(monkeypatch):
    values = server_flags(monkeypatch)
    assert values(engine_flags.engine_arguments(["program", "m", "--model", "x", "--on"])) == ["program", "m"]
    assert values.model == "x" and values.on
