"""The report of llama.cpp's own benchmark, made from the output of a stand-in for its program."""

import json
import stat

import pytest

from benchmarks import llama_bench
from benchmarks.in_turns import figures

RESULT = {
    "build_commit": "abc",
    "build_number": 1,
    "cpu_info": "a CPU",
    "model_type": "llama 135M all F32",
    "model_size": 5,
    "n_threads": 2,
    "n_prompt": 0,
    "n_gen": 16,
    "avg_ts": 50.5,
    "samples_ts": [50.0, 51.0],
}


@pytest.fixture
def program(tmp_path):
    """Write a program that prints its arguments to a file and `found` to its output, and return its path."""

    def written(found, status=0):
        path, said = tmp_path / "llama-bench", tmp_path / "said.json"
        said.write_text(json.dumps(found))
        path.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\ncat {said}\nexit {status}\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return written


def run(program, tmp_path):
    return llama_bench.main(
        [
            "--binary",
            program,
            "--model",
            "m.gguf",
            "--output_len",
            "16",
            "--output_json",
            f"{tmp_path}/r.json",
        ]
    )


def test_the_report_has_the_figure_that_is_compared(program, tmp_path):
    assert run(program([RESULT]), tmp_path) == 0
    words = (tmp_path / "arguments").read_text().split()
    assert words[words.index("-m") + 1] == "m.gguf"
    assert words[words.index("-p") + 1] == "0" and words[words.index("-n") + 1] == "16"
    found = json.loads((tmp_path / "r.json").read_text())
    assert (
        figures([{"side": "llama.cpp", "report": found}], "output_throughput")["llama.cpp"]["median"] == 50.5
    )
    assert found["samples_ts"] == RESULT["samples_ts"]


@pytest.mark.parametrize(
    "found", [[], [RESULT, RESULT], [RESULT | {"n_gen": 17}], [RESULT | {"n_prompt": 4}]]
)
def test_results_of_other_work_are_refused(program, tmp_path, found):
    with pytest.raises(ValueError, match="accepted is 1"):
        run(program(found), tmp_path)
    assert not (tmp_path / "r.json").exists()


def test_a_failed_program_ends_the_command_with_its_status(program, tmp_path):
    assert run(program([RESULT], status=3), tmp_path) == 3
    assert not (tmp_path / "r.json").exists()
