"""Several processes of one host run one command, and end together."""

import json
import os

import paths
import pytest

from benchmarks import host_processes

TELL = (
    "import os, sys, time\n"
    "values = dict(one.lstrip('-').split('=') for one in sys.argv[1:])\n"
    "rank = int(values['process_id'])\n"
    "assert os.environ['CUDA_VISIBLE_DEVICES'] == str(3 + rank)\n"
    "assert os.environ['JAXFLOW_ENGINE_GPUS'] == '3,4'\n"
    "assert values['num_processes'] == '2' and values['coordinator'].startswith('127.0.0.1:')\n"
)


@pytest.fixture(autouse=True)
def three_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,5")


@pytest.mark.parametrize(
    ("end", "status"),
    [("", 0), ("sys.exit(3 * (rank == 0))", 3), ("sys.exit(4 * rank)", 4)],
    ids=["all succeed", "process 0 fails", "another fails"],
)
def test_the_exit_status_is_that_of_the_process_that_fails(end, status):
    assert host_processes.main(["--processes", "2", "-c", TELL + end]) == status


def test_the_others_do_not_outlive_process_0():
    line = TELL + "sys.exit(7) if rank == 0 else time.sleep(600)"
    assert host_processes.main(["--processes", "2", "-c", line]) == 7


@pytest.mark.parametrize("given", [[], ["-m", "x"], ["--processes", "one", "-m"], ["--processes", "1", "-m"]])
def test_bad_arguments(given):
    assert host_processes.main(given) == 2


@pytest.mark.slow
def test_throughput_of_two_ranks(tmp_path, monkeypatch):
    report = tmp_path / "report.json"
    monkeypatch.chdir(paths.ROOT)
    monkeypatch.setitem(os.environ, "PYTHONPATH", str(paths.ROOT))
    line = ["-m", "jaxflow.bench", "throughput", "--model", str(paths.MODELS / "tiny-mixtral")]
    sizes = ["--num_requests=6", "--input_len=20", "--output_len=8", "--max_num_seqs=4", "--num_kv_pages=64"]
    ranks = ["--data_parallel_size=2", "--enable_expert_parallel", "--max_num_batched_tokens=32"]
    out = ["--output_json", str(report)]
    assert host_processes.main(["--processes", "2", *line, *sizes, *ranks, *out]) == 0
    found = json.loads(report.read_text())
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (6, 0, 48)
