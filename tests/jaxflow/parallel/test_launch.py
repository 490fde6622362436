"""A process finds its place from the settings and from what launchers say."""

from typing import Any

import pytest

from jaxflow.config import ConfigError, EngineConfig
from jaxflow.parallel.launch import Launch, first_node, launch_of

SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "gpu[003-010,012],login1",
    "SLURM_STEP_NUM_TASKS": "9",
    "SLURM_PROCID": "2",
}
LWS = {"LWS_LEADER_ADDRESS": "engine-0.engine.default", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}
TORCHRUN = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "4", "RANK": "0"}


def launch(environ: dict[str, str], **settings: Any) -> Launch | None:
    return launch_of(EngineConfig("a-model", **settings), environ)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (SLURM, Launch("gpu003:61441", 9, 2)),
        (LWS, Launch("engine-0.engine.default:8476", 2, 1)),
        (TORCHRUN, Launch("10.0.0.1:29500", 4, 0)),
        (SLURM | MPI, Launch("gpu003:61441", 4, 3)),  # mpirun inside a Slurm job numbers the processes
        ({"JAXFLOW_COORDINATOR": "h:1", **MPI}, Launch("h:1", 4, 3)),
    ],
    ids=["slurm", "lws", "torchrun", "mpi in slurm", "own coordinator"],
)
def test_from_a_launcher(environ, expected):
    assert launch(environ, coordinator="auto") == expected


@pytest.mark.parametrize("environ", [SLURM, LWS, MPI, TORCHRUN, {}])
def test_without_a_coordinator_there_is_one_process(environ):
    assert launch(environ) is None


def test_settings_come_first():
    found = launch(SLURM, coordinator="[::1]:5", num_processes=3, process_id=0)
    assert found == Launch("[::1]:5", 3, 0) and (found.host, found.port) == ("::1", 5)


def test_one_process_needs_no_other():
    assert launch({}, coordinator="h:1", num_processes=1, process_id=0) is None


@pytest.mark.parametrize(
    ("environ", "settings", "field"),
    [
        ({}, {"coordinator": "auto"}, "coordinator"),
        (MPI, {"coordinator": "auto"}, "coordinator"),
        ({}, {"coordinator": "h:1"}, "num_processes"),
        ({}, {"coordinator": "h:1", "num_processes": 2}, "process_id"),
        ({}, {"coordinator": "h:1", "num_processes": 2, "process_id": 2}, "process_id"),
        ({}, {"coordinator": "h:1", "num_processes": 0, "process_id": 0}, "num_processes"),
        ({}, {"coordinator": "host", "num_processes": 2, "process_id": 0}, "coordinator"),
        ({}, {"num_processes": 2}, "num_processes"),
        ({}, {"process_id": 1}, "process_id"),
    ],
)
def test_what_is_missing_or_wrong_is_named(environ, settings, field):
    with pytest.raises(ConfigError) as refused:
        launch(environ, **settings)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a,b", "a"), ("n[1-3]", "n1"), ("n[07,09-11],m", "n07"), ("r1n[2-3]-ib,x", "r1n2-ib")],
)
def test_first_node(nodes, first):
    assert first_node(nodes) == first
