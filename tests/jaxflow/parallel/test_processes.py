"""One engine of several processes gives the tokens of one process, and any process's end is the end of all.

Each process takes seconds to start, so the tests with processes are slow. In the usual suite
`test_follow` compares the devices' state, `test_recorded_calls` the calls, and `test_links` and
`test_rendezvous` the connections.
"""

import concurrent.futures
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import paths
import pytest
from rank import FAULT_CALL

from jaxflow.model.checkpoints.checkpoint import convert
from jaxflow.parallel.launch import LOST
from jaxflow.parallel.processes import Processes, ProcessesError

RANK = paths.ROOT / "tests" / "jaxflow" / "parallel" / "rank.py"
SETTINGS = {"block_size": 16, "max_num_batched_tokens": 16, "max_num_seqs": 8, "num_kv_pages": 96}
WAIT_S = 240


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(rank: int, devices: int = 1, **given: Any) -> subprocess.Popen:
    """Start one process. given: see `rank.main`."""
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "PYTHONPATH": str(paths.ROOT)}
    given = SETTINGS | {"process_id": rank} | given
    return subprocess.Popen(
        [sys.executable, str(RANK), json.dumps(given)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def given(
    golden: dict[str, Any], model: str, processes: int = 2, devices: int = 1, **changes: Any
) -> dict[str, Any]:
    """Return the settings of every process that answers the prompts of a golden."""
    return {
        "model": str(paths.MODELS / model),
        "coordinator": f"127.0.0.1:{free_port()}",
        "num_processes": processes,
        "tensor_parallel_size": processes * devices,
        "devices": devices,
        "requests": [prompt["prompt_ids"] for prompt in golden["prompts"]],
        "sampling": {"max_tokens": len(golden["prompts"][0]["greedy_ids"])},
    } | changes


@contextlib.contextmanager
def running(*settings: dict[str, Any]) -> Iterator[list[subprocess.Popen]]:
    """Start the processes 0, 1, … with these settings, and leave none behind."""
    processes = [start(rank, **one) for rank, one in enumerate(settings)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def ends(processes: list[subprocess.Popen]) -> list[tuple[int, str, str]]:
    """Wait for all processes. Return the exit status and the outputs of each."""
    found = [(*process.communicate(timeout=WAIT_S), process) for process in processes]
    return [(process.returncode, out, error) for out, error, process in found]


def errors(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error: ")]


def check(golden: dict[str, Any], out: str) -> None:
    tokens = json.loads(out.splitlines()[-1])
    assert [each[0] for each in tokens] == [prompt["greedy_ids"] for prompt in golden["prompts"]]


class Store:
    """The key-value store of `jax.distributed`, for threads of this process."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def key_value_set(self, name: str, value: str) -> None:
        with self._changed:
            assert name not in self._values
            self._values[name] = value
            self._changed.notify_all()

    def blocking_key_value_get(self, name: str, timeout_ms: int) -> str:
        with self._changed:
            if not self._changed.wait_for(lambda: name in self._values, timeout_ms / 1000):
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {name}")
            return self._values[name]


def processes_of(store: Store, count: int) -> list[Processes]:
    made = [object.__new__(Processes) for _ in range(count)]
    for rank, one in enumerate(made):
        one.rank, one.count, one._store = rank, count, store  # type: ignore[assignment]
    return made


def test_all_wait_for_the_last():
    *first, last = processes_of(Store(), 3)
    came: list[int] = []

    def wait(one: Processes) -> list[int]:
        one.wait_for_all("compiled", 30.0)
        return came.copy()

    with concurrent.futures.ThreadPoolExecutor() as pool:
        found = [pool.submit(wait, one) for one in first]
        came.append(last.rank)
        found.append(pool.submit(wait, last))
        assert [each.result(30) for each in found] == [[last.rank]] * 3


def test_who_waits_in_vain_says_for_what():
    first, _ = processes_of(Store(), 2)
    with pytest.raises(ProcessesError, match="process 0 waited for 'compiled/1' in vain"):
        first.wait_for_all("compiled", 0.05)


class TestSameTokens:
    """Law: several processes give the tokens of one."""

    @pytest.mark.slow
    def test_goldens(self, goldens):
        golden = goldens("tiny-llama")
        ours = given(golden, "tiny-llama")
        with running(ours, ours) as processes:
            (status, out, _), (other, _, _) = ends(processes)
        assert (status, other) == (0, 0)
        check(golden, out)

    @pytest.mark.slow
    @pytest.mark.parametrize("model", sorted(path.name for path in paths.MODELS.iterdir()))
    def test_goldens_on_two_devices_a_process(self, model, goldens):
        golden = goldens(model)
        ours = given(golden, model, devices=2)
        with running(ours, ours) as processes:
            (status, out, _), (other, _, _) = ends(processes)
        assert (status, other) == (0, 0)
        check(golden, out)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("model", "stages", "devices"),
        [("tiny-llama", 2, 1), ("stories260K", 4, 2), ("tiny-gemma2", 2, 2)],
        ids=["a stage a process", "two stages a process", "two devices a stage"],
    )
    def test_goldens_over_pipeline_stages(self, model, stages, devices, goldens):
        golden = goldens(model)
        tp = 2 * devices // stages
        ours = given(golden, model, devices=devices, pipeline_parallel_size=stages, tensor_parallel_size=tp)
        with running(ours, ours) as processes:
            (status, out, error), (other, _, _) = ends(processes)
        assert (status, other) == (0, 0), error
        check(golden, out)

    @pytest.mark.slow
    @pytest.mark.parametrize("model", ["tiny-mixtral", "tiny-gpt_oss"])
    def test_goldens_with_experts_over_the_processes(self, model, goldens):
        golden = goldens(model)
        ours = given(golden, model, devices=2, enable_expert_parallel=True)
        with running(ours, ours) as processes:
            (status, out, error), (other, _, _) = ends(processes)
        assert (status, other) == (0, 0), error
        check(golden, out)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("model", "devices", "tp"),
        [("tiny-mixtral", 1, 1), ("tiny-gpt_oss", 2, 1), ("tiny-deepseek_v3", 2, 2)],
        ids=["a rank a process", "two ranks a process", "a rank of two devices a process"],
    )
    def test_goldens_of_data_parallel_ranks(self, model, devices, tp, goldens):
        golden = goldens(model)
        ranks = {"tensor_parallel_size": tp, "data_parallel_size": 2 * devices // tp}
        ours = given(golden, model, devices=devices, enable_expert_parallel=True, **ranks)
        with running(ours, ours) as processes:
            (status, out, error), (other, _, _) = ends(processes)
        assert (status, other) == (0, 0), error
        check(golden, out)

    @pytest.mark.slow
    @pytest.mark.parametrize("ranks", [1, 2])
    def test_goldens_while_experts_move_between_processes(self, ranks, goldens):
        golden = goldens("tiny-mixtral")
        moving = {"enable_eplb": True, "num_redundant_experts": 4, "eplb_step_interval": 2}
        sizes = {"tensor_parallel_size": 4 // ranks, "data_parallel_size": ranks, "repeat": 2}
        ours = given(golden, "tiny-mixtral", devices=2, enable_expert_parallel=True, **moving, **sizes)
        with running(ours, ours) as processes:
            (status, out, error), (other, _, _) = ends(processes)
        assert (status, other) == (0, 0), error
        check(golden, out)
        moved = [line for line in out.splitlines() if line.startswith("moved slots: ")]
        assert moved and int(moved[-1].partition(": ")[2]) > 0

    @pytest.mark.slow
    def test_draws_and_log_probabilities_of_data_parallel_ranks(self, goldens):
        golden = goldens("tiny-mixtral")
        sampling = {"temperature": 0.8, "seed": 3, "n": 2, "top_k": 20, "repetition_penalty": 1.2}
        sampling |= {"max_tokens": 12, "logprobs": 2, "prompt_logprobs": 1}
        ranks = {"tensor_parallel_size": 1, "data_parallel_size": 2, "enable_expert_parallel": True}
        ours = given(golden, "tiny-mixtral", sampling=sampling, **ranks)
        alone = ours | {"coordinator": None, "num_processes": None, "process_id": None, "devices": 2}
        with running(ours, ours) as processes, running(alone) as one:
            (status, out, error), (other, _, _) = ends(processes)
            ((single, expected, _),) = ends(one)
        assert (status, other, single) == (0, 0, 0), error
        assert json.loads(out.splitlines()[-1]) == json.loads(expected.splitlines()[-1])

    @pytest.mark.slow
    @pytest.mark.parametrize("stages", [1, 2])
    def test_goldens_of_a_converted_checkpoint(self, stages, goldens, tmp_path):
        golden = goldens("tiny-llama")
        convert(str(paths.MODELS / "tiny-llama"), tmp_path / "converted", "float32")
        ours = given(golden, "tiny-llama", pipeline_parallel_size=stages, tensor_parallel_size=2 // stages)
        ours |= {"model": str(tmp_path / "converted")}
        with running(ours, ours) as processes:
            (status, out, error), (other, _, _) = ends(processes)
        assert (status, other) == (0, 0), error
        check(golden, out)

    @pytest.mark.slow
    def test_draws_penalties_and_log_probabilities(self, goldens):
        """The full sampler's settings reach every process: `set_slot` is replayed, too."""
        golden = goldens("tiny-llama")
        sampling = {"temperature": 0.8, "seed": 3, "n": 2, "top_k": 20, "repetition_penalty": 1.2}
        sampling |= {"max_tokens": 12, "logprobs": 2, "prompt_logprobs": 1}
        ours = given(golden, "tiny-llama", sampling=sampling)
        alone = ours | {"coordinator": None, "num_processes": None, "process_id": None, "devices": 2}
        with running(ours, ours) as processes, running(alone) as one:
            (status, out, _), (other, _, _) = ends(processes)
            ((single, expected, _),) = ends(one)
        assert (status, other, single) == (0, 0, 0)
        assert json.loads(out.splitlines()[-1]) == json.loads(expected.splitlines()[-1])

    @pytest.mark.slow
    @pytest.mark.parametrize(("model", "stages"), [("tiny-llama", 1), ("tiny-gemma2", 1), ("tiny-gemma2", 2)])
    def test_pages_on_the_host(self, model, stages, goldens):
        """Every process keeps its part of the pages that leave the device, and brings it back.

        One stage of tiny-gemma2 has no layer with a window, so it has no part of such pages.
        """
        golden = goldens(model)
        few = {
            "num_kv_pages": 13,
            "max_model_len": 192,
            "max_num_seqs": 2,
            "kv_offloading_size": 0.01,
            "repeat": 3,
        }
        sizes = {"pipeline_parallel_size": stages, "tensor_parallel_size": 2 // stages}
        ours = given(golden, model, **sizes, **few)
        with running(ours, ours) as processes:
            (status, out, error), (other, _, _) = ends(processes)
        assert (status, other) == (0, 0), error
        check(golden, out)
        counters = json.loads(out.splitlines()[-2])
        assert counters["host_pages_stored"] > 0 and counters["host_pages_loaded"] > 0

    @pytest.mark.slow
    @pytest.mark.parametrize(("stages", "devices"), [(1, 2), (2, 1)])
    def test_pages_on_the_disks(self, stages, devices, goldens, tmp_path):
        """Every process keeps its part of a page on its disk.

        A damaged part costs its page alone, and is named.
        """
        golden = goldens("tiny-llama")
        sizes = {"pipeline_parallel_size": stages, "tensor_parallel_size": 2 * devices // stages}
        ours = given(golden, "tiny-llama", devices=devices, kv_offloading_size=0.01, **sizes)
        ours |= {"kv_disk_path": str(tmp_path), "kv_disk_size": 0.01}
        short = ours | {"sampling": {"max_tokens": 1}}  # so that every page belongs to a prompt
        with running(short, short) as processes:
            (status, _, error), (other, _, _) = ends(processes)
        assert (status, other) == (0, 0), error
        first, second = sorted(tmp_path.iterdir())
        files = {path.name for path in first.rglob("*.kv")}
        assert files and files == {path.name for path in second.rglob("*.kv")}
        damaged = next(second.rglob("*.kv"))
        damaged.write_bytes(damaged.read_bytes()[:-1])
        ours |= {"coordinator": f"127.0.0.1:{free_port()}"}
        with running(ours, ours) as processes:
            (status, out, error), (other, _, _) = ends(processes)
        assert (status, other) == (0, 0), error
        check(golden, out)
        assert json.loads(out.splitlines()[-2])["disk_hit_tokens"] > 0
        (line,) = [line for line in error.splitlines() if "is computed again" in line]
        assert damaged.stem in line and line.endswith("process 1")

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("at", "parallel"),
        [
            (None, {}),
            (None, {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}),
            (0, {}),
            (1, {}),
        ],
        ids=["every layout", "every layout of stages", "not in process 0", "not in process 1"],
    )
    def test_goldens_while_layouts_become_ready(self, at, parallel, goldens):
        """A layout is ready once every process has compiled it. Its compilation may fail in one of them."""
        golden, sizes = goldens("tiny-llama"), {"step_sizes": "4,16", "max_num_batched_tokens": 48}
        ours = given(golden, "tiny-llama", layouts_later=True, **sizes, **parallel)
        settings = [ours, ours]
        if at is not None:
            settings[at] = ours | {"fault": "layout"}
        with running(*settings) as processes:
            (status, out, error), (other, _, _) = ends(processes)
        assert (status, other) == (0, 0), error
        check(golden, out)
        left = int(out.splitlines()[-2].removeprefix("not ready: "))
        assert left == 0 if at is None else left >= 1

    @pytest.mark.slow
    def test_a_late_process_is_waited_for(self, goldens):
        golden = goldens("tiny-llama")
        ours = given(golden, "tiny-llama")
        with running(ours) as first:
            time.sleep(8)
            with running({**ours, "process_id": 1}) as second:
                (status, out, _), (other, _, _) = ends([*first, *second])
        assert (status, other) == (0, 0)
        check(golden, out)


@pytest.mark.slow
class TestOneEndEndsAll:
    @pytest.mark.parametrize(
        ("fault", "at", "reason"),
        [
            ("killed", 1, r"process 1 ended: .*"),
            ("killed", 0, r"process 0 ended: .*"),
            ("stopped", 1, r"process 1 is silent for [\d.]+ s: .*"),
            ("stopped", 0, r"process 0 is silent for [\d.]+ s: .*"),
            ("memory", 1, r"process 1 failed: JaxRuntimeError: RESOURCE_EXHAUSTED: .*"),
            ("memory", 0, r"process 0 failed: JaxRuntimeError: RESOURCE_EXHAUSTED: .*"),
            ("killed at load", 1, r"process 1 ended: .*"),
            ("killed at load", 0, r"process 0 ended: .*"),
            ("memory at load", 1, r"process 1 failed: JaxRuntimeError: RESOURCE_EXHAUSTED: .*"),
            ("stuck", 1, rf"process 1 is stuck at call {FAULT_CALL - 3} of \d+: a step takes .*"),
        ],
    )
    def test_with_one_line_that_names_the_process(self, fault, at, reason, goldens):
        ours = given(goldens("tiny-llama"), "tiny-llama", step_timeout_s=20.0, repeat=3)
        settings = [ours, ours]
        settings[at] = ours | {"fault": fault}
        with running(*settings) as processes:
            survivor = processes[1 - at]
            _, error = survivor.communicate(timeout=WAIT_S)
            if fault == "stopped":
                processes[at].send_signal(signal.SIGCONT)
            processes[at].wait(timeout=30)
        assert survivor.returncode == LOST
        (line,) = errors(error)
        assert re.fullmatch(f"error: {reason}", line)
        assert processes[at].returncode != 0

    @pytest.mark.parametrize(
        ("fault", "settings", "names"),
        [
            (
                "program",
                {"max_num_seqs": 4},
                (
                    "code is another in process 1 and",
                    "jax is 0.0 in process 1 and",
                    "max_num_seqs is 4 in process 1 and 8",
                ),
            ),
            ("weights", {}, (f"weights is {b'others'.hex()} in process 1 and",)),
        ],
    )
    def test_what_differs_is_named_before_a_weight_is_read(self, fault, settings, names, goldens):
        ours = given(goldens("tiny-llama"), "tiny-llama")
        with running(ours, ours | settings | {"fault": fault}) as processes:
            found = ends(processes)
        for status, _, error in found:
            assert status not in (0, LOST)
            assert all(name in error for name in names), error
            assert "a weight was read" not in error

    def test_a_taken_port_is_named(self, goldens):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            ours = given(goldens("tiny-llama"), "tiny-llama", coordinator=f"127.0.0.1:{port}")
            with running(ours) as processes:
                ((status, _, error),) = ends(processes)
        assert status != 0 and f"coordinator='127.0.0.1:{port}'" in error

    def test_processes_that_do_not_fill_the_mesh_are_refused(self, goldens):
        ours = given(goldens("tiny-llama"), "tiny-llama", devices=2, tensor_parallel_size=2)
        with running(ours, ours) as processes:
            found = ends(processes)
        assert all(status != 0 for status, _, _ in found)
        assert any("tensor_parallel_size=2" in error for _, _, error in found)

    def test_a_process_that_never_comes_is_not_waited_for_for_ever(self, goldens):
        ours = given(goldens("tiny-llama"), "tiny-llama", join_timeout_s=5.0)
        with running(ours) as processes:
            ((status, _, error),) = ends(processes)
        assert status != 0 and "of 2 processes, 1 did not come" in error
