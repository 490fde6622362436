"""The files that start one engine on several hosts: a Slurm script and a LeaderWorkerSet."""

import os
import subprocess
import types
from pathlib import Path

import paths
import pytest
import yaml

from serving.operations import Operations, routes

SCRIPT = paths.ROOT / "deploy" / "slurm" / "jaxflow.sbatch"
MANIFEST = paths.ROOT / "deploy" / "leader-worker-set" / "engine.yaml"
# The fields of leaderworkerset.x-k8s.io/v1 that the manifest may use.
SPEC = {"replicas", "leaderWorkerTemplate", "rolloutStrategy", "startupPolicy", "networkConfig"}
TEMPLATE = {"size", "restartPolicy", "leaderTemplate", "workerTemplate", "subGroupPolicy"}
POD = {
    "automountServiceAccountToken",
    "terminationGracePeriodSeconds",
    "securityContext",
    "containers",
    "volumes",
    "nodeSelector",
    "tolerations",
}


def documents() -> tuple[dict, dict]:
    engine, service = yaml.safe_load_all(MANIFEST.read_text("utf-8"))
    return engine, service


def container(which: str) -> dict:
    engine, _ = documents()
    return engine["spec"]["leaderWorkerTemplate"][which]["spec"]["containers"][0]


def test_the_manifest_has_the_fields_of_its_kind():
    engine, service = documents()
    assert (engine["apiVersion"], engine["kind"]) == ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")
    template = engine["spec"]["leaderWorkerTemplate"]
    assert set(engine["spec"]) <= SPEC and set(template) <= TEMPLATE
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
    for which in ("leaderTemplate", "workerTemplate"):
        pod = template[which]["spec"]
        assert set(pod) <= POD
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == volumes
    assert service["spec"]["selector"].items() <= template["leaderTemplate"]["metadata"]["labels"].items()


def test_all_pods_run_the_same_program():
    leader, worker = container("leaderTemplate"), container("workerTemplate")
    assert {name: leader.get(name) for name in worker} == worker
    assert "--coordinator=auto" in worker["args"]
    engine, _ = documents()
    gpus = (
        int(worker["resources"]["limits"]["nvidia.com/gpu"]) * engine["spec"]["leaderWorkerTemplate"]["size"]
    )
    sizes = [arg.partition("=")[2] for arg in worker["args"] if "parallel_size" in arg]
    devices = 1
    for size in sizes:
        devices *= int(size)
    assert devices == gpus


def test_probes_ask_routes_that_exist():
    loading = types.SimpleNamespace(loaded=False, draining=False)
    served = {route.path for route in routes(Operations(loading))}
    leader = container("leaderTemplate")
    assert {leader[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness")} <= served


@pytest.mark.parametrize(
    ("statuses", "expected", "starts"),
    [([0], 0, 1), ([75, 0], 0, 2), ([137, 75, 0], 0, 3), ([1], 1, 1), ([75, 75, 75, 75, 75], 75, 4)],
)
def test_the_slurm_script_starts_a_lost_engine_again(tmp_path: Path, statuses, expected, starts):
    (tmp_path / "statuses").write_text("\n".join(map(str, statuses)) + "\n")
    for name, body in {
        "srun": 'echo "$@" >> calls; status=$(sed -n "$(wc -l < calls)p" statuses); exit "$status"',
        "sleep": "exit 0",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    found = subprocess.run(
        ["bash", str(SCRIPT), "a model", "--tensor_parallel_size=8"],
        cwd=tmp_path,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    calls = (tmp_path / "calls").read_text().splitlines()
    assert (found.returncode, len(calls)) == (expected, starts), found.stderr
    assert all("--coordinator=auto --model=a model --tensor_parallel_size=8" in call for call in calls)
