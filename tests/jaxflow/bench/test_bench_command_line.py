"""What the bench's command line says before there is an engine."""

import paths
import pytest

from jaxflow.bench.__main__ import COMMANDS, main
from jaxflow.llm import LLM

MODEL = str(paths.MODELS / "stories260K")
TRACE = str(paths.TRACES / "azure2023_conv_1000.csv")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_lists_its_flags(no_flags, capsys, command):
    assert main(["bench", command, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"python -m jaxflow.bench {command}" in out and "--output_json" in out
    assert ("--max_num_batched_tokens" in out) == (command not in ("serve", "kernels", "decode_step"))


def test_help_of_the_bench_names_the_commands(capsys):
    assert main(["bench", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in COMMANDS)


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("throughput", ["--trace", "absent.csv"], "--trace absent.csv"),
        ("throughput", ["--input_len", "600"], "over the 512 tokens"),
        ("throughput", ["--input_len", "100", "--max_model_len", "128"], "over the 128 tokens"),
        ("hierarchy", ["--input_len", "600"], "over the 512 tokens"),
        ("hierarchy", ["--trace", TRACE, "--rounds", "3"], "--rounds 3"),
        ("hierarchy", ["--input_len", "8", "--output_len", "8", "--request_rate", "0"], "request_rate=0.0 is not"),
        ("sweep", ["--sweep", "rate", "--values", "4", "--trace", "absent.jsonl"], "--trace absent.jsonl"),
        ("trace", ["--workload", "foo"], "workload='foo'"),
    ],
)
def test_a_workload_is_refused_before_a_model_is_loaded_for_it(no_flags, monkeypatch, capsys, command, arguments, message):
    monkeypatch.setattr(LLM, "from_config", classmethod(lambda *_, **__: pytest.fail("a model was loaded")))
    assert main(["bench", command, "--model", MODEL, *arguments]) == 1
    assert message in capsys.readouterr().err
