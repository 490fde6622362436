"""The bench's command line before an engine exists."""

import grpc
import paths
import pytest

from jaxflow.bench.__main__ import COMMANDS, main
from jaxflow.bench.engine import host
from jaxflow.bench.plans import bed
from jaxflow.bench.report.trace_events import TraceError
from jaxflow.bench.workload.lengths import WorkloadError
from jaxflow.config import ConfigError
from jaxflow.llm import LLM
from jaxflow.model.checkpoints.source import CheckpointError
from serving.client import RequestFailed

MODEL = str(paths.MODELS / "stories260K")
TRACE = str(paths.TRACES / "azure2023_conv_1000.csv")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_lists_its_flags(no_flags, capsys, command):
    assert main(["bench", command, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"python -m jaxflow.bench {command}" in out and "--output_json" in out
    assert ("--max_num_batched_tokens" in out) == (
        command
        not in (
            "serve",
            "tokenizer",
            "transport",
            "kernels",
            "decode_step",
            "pipeline",
            "decode_fleet",
            "expert_balance",
            "collectives",
        )
    )


@pytest.mark.parametrize(
    ("command", "old", "new"),
    [
        ("throughput", "--beside_sequential", "--compare_sequential"),
        ("decode_step", "--smallest=8", "--min_bucket"),
    ],
)
def test_the_error_of_a_renamed_flag_gives_the_new_name(no_flags, capsys, command, old, new):
    assert main(["bench", command, *(["--model", MODEL] if command == "throughput" else []), old]) == 2
    assert f"{old.partition('=')[0]} is now {new}" in capsys.readouterr().err


def test_help_of_the_bench_names_the_commands(capsys):
    assert main(["bench", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in COMMANDS)


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("throughput", ["--trace", "absent.csv"], "--trace absent.csv"),
        ("throughput", ["--input_len", "600"], "a sum of at most 512 tokens"),
        ("throughput", ["--input_len", "100", "--max_model_len", "128"], "a sum of at most 128 tokens"),
        ("hierarchy", ["--input_len", "600"], "a sum of at most 512 tokens"),
        ("hierarchy", ["--trace", TRACE, "--rounds", "3"], "--rounds 3"),
        (
            "hierarchy",
            ["--input_len", "8", "--output_len", "8", "--request_rate", "0"],
            "request_rate=0.0 is not",
        ),
        ("sweep", ["--sweep", "rate", "--values", "4", "--trace", "absent.jsonl"], "--trace absent.jsonl"),
        ("trace", ["--workload", "foo"], "workload='foo'"),
        ("trace", ["--workload", "400/200"], "workload='400/200' is not supported: at most 512 tokens"),
        (
            "trace",
            ["--workload", "40/20", "--tokens", "16", "--num_kv_pages", "3"],
            "num_kv_pages=3 is not supported: at least 5",
        ),
        (
            "link",
            ["--workload", "400/200", "--kv_offloading_size", "1"],
            "workload='400/200' is not supported: at most 512 tokens",
        ),
        (
            "plans",
            ["--workloads", "40/20,400/200"],
            "workloads='400/200' is not supported: at most 512 tokens",
        ),
        ("plans", ["--workloads", "4x513"], "workloads='4x513' is not supported: at most 512 tokens"),
        (
            "plans",
            ["--workloads", "8x100", "--max_model_len", "64"],
            "max_model_len=64 is not supported: at least 100",
        ),
        (
            "plans",
            ["--workloads", "9/4", "--tokens", "16", "--max_num_seqs", "1"],
            "max_num_seqs=1 is not supported: at least 3",
        ),
        (
            "plans",
            ["--workloads", "4/0", "--tokens", "64", "--max_num_seqs", "2"],
            "max_num_seqs=2 is not supported: at least 16",
        ),
        (
            "plans",
            ["--workloads", "40/20", "--tokens", "16", "--num_kv_pages", "3"],
            "num_kv_pages=3 is not supported: at least 5",
        ),
        ("plans", ["--workloads="], "workloads='' is not supported"),
        ("plans", ["--workloads", "40/20", "--graphs="], "graphs='' is not supported"),
    ],
)
def test_an_impossible_workload_is_refused_before_a_model_is_loaded(
    no_flags, monkeypatch, capsys, command, arguments, message
):
    monkeypatch.setattr(LLM, "from_config", classmethod(lambda *_, **__: pytest.fail("a model was loaded")))
    monkeypatch.setattr(bed, "make_executor", lambda *_, **__: pytest.fail("a model was loaded"))
    assert main(["bench", command, "--model", MODEL, *arguments]) == 1
    assert message in capsys.readouterr().err


def broken(raised):
    def run():
        raise raised

    return run


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("seed", -1, "at least 0"),
        WorkloadError("no request"),
        CheckpointError("no weights"),
        TraceError("no kernels"),
        RequestFailed(grpc.StatusCode.UNAVAILABLE, "no server"),
        FileNotFoundError("absent.json"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_user_error_is_one_line(no_flags, monkeypatch, capsys, error):
    monkeypatch.setattr(host, "run", broken(error))
    assert main(["bench", "host"]) == 1
    assert capsys.readouterr().err == f"error: {error}\n"


@pytest.mark.parametrize("error", [ValueError("shapes differ"), KeyError("row"), RuntimeError("no memory")])
def test_another_error_keeps_its_traceback(no_flags, monkeypatch, error):
    monkeypatch.setattr(host, "run", broken(error))
    with pytest.raises(type(error)) as caught:
        main(["bench", "host"])
    assert caught.value is error
