"""The files of deploy/ agree with the program and with their own schemas."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import types
from pathlib import Path

import paths
import pytest
import yaml

from serving.operations import Operations, routes

DEPLOY = paths.ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
UV = shutil.which("uv") or shutil.which(str(paths.ROOT / ".cache" / "launcher" / "bin" / "uv"))


def deployment() -> dict:
    return yaml.safe_load((DEPLOY / "kubernetes" / "deployment.yaml").read_text("utf-8"))["spec"]["template"]


def container() -> dict:
    return deployment()["spec"]["containers"][0]


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Containerfile, with continued lines joined and without comments."""
    text = (DEPLOY / "Containerfile").read_text("utf-8")
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def test_probes_ask_routes_that_exist():
    loading = types.SimpleNamespace(loaded=False, draining=False)
    served = {route.path for route in routes(Operations(loading))}
    asked = {container()[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    health = next(text for name, text in instructions() if name == "HEALTHCHECK")
    asked.add(re.search(r"8000(/\S+)", health)[1])
    assert asked <= served


def test_the_pod_has_time_to_drain():
    sleep_s = int(container()["lifecycle"]["preStop"]["exec"]["command"][1])
    drain = next(arg for arg in container()["args"] if arg.startswith("--drain_timeout_s="))
    assert sleep_s + float(drain.partition("=")[2]) < deployment()["spec"]["terminationGracePeriodSeconds"]


def test_flags_exist():
    used = set()
    for path in DEPLOY.rglob("*"):
        if path.suffix in (".yaml", ".service", ".sbatch") or path.name == "Containerfile":
            text = path.read_text("utf-8")
            used |= set(re.findall(r"--([a-z]+_[a-z_]+)", text)) & set(re.findall(r"--(\w+)", text))
    help_text = subprocess.run(
        [sys.executable, "-m", "serving.cluster", "--helpfull"],  # it has the flags of `serving`, too
        cwd=paths.ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout
    assert {"request_log", "auth_token_file"} <= used
    assert [flag for flag in used if not re.search(rf"--(\[no\])?{flag}\b", help_text)] == []


def kuberay() -> dict[str, dict]:
    """The documents of the KubeRay manifest, by kind."""
    text = (DEPLOY / "kuberay" / "cluster.yaml").read_text("utf-8")
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def test_the_replicas_of_kuberay_find_their_gpus():
    documents = kuberay()
    job, spec = documents["RayJob"]["spec"], documents["RayJob"]["spec"]["rayClusterSpec"]
    wanted = json.loads(documents["ConfigMap"]["data"]["cluster.json"])
    [workers] = spec["workerGroupSpecs"]
    [replica] = workers["template"]["spec"]["containers"]
    flags = dict(re.findall(r"--(\w+)=(\S+)", job["entrypoint"]))
    assert wanted["replicas"] <= workers["replicas"] <= workers["maxReplicas"]
    assert float(flags["gpus_per_replica"]) == float(replica["resources"]["limits"]["nvidia.com/gpu"])
    assert float(flags["cpus_per_replica"]) <= float(replica["resources"]["requests"]["cpu"])
    head = spec["headGroupSpec"]["template"]
    [router] = head["spec"]["containers"]
    mounted = {mount["mountPath"] for mount in router["volumeMounts"]}
    files = [value for value in flags.values() if value.startswith(("/etc", "/run"))]
    assert len(files) == 2 and all(str(Path(file).parent) in mounted for file in files)
    selector = documents["Service"]["spec"]["selector"]
    assert selector.items() <= head["metadata"]["labels"].items()
    ports = {port["name"]: port["containerPort"] for port in router["ports"]}
    assert {port["targetPort"]: port["port"] for port in documents["Service"]["spec"]["ports"]} == ports


def test_the_container_runs_without_privileges():
    names = [name for name, _ in instructions()]
    user = next(text for name, text in instructions() if name == "USER")
    assert int(user) > 0 and names.index("USER") < names.index("ENTRYPOINT")
    assert deployment()["spec"]["securityContext"]["runAsUser"] == int(user)
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
    assert all(
        port.startswith("127.0.0.1:") for service in compose["services"].values() for port in service["ports"]
    )


def test_kustomization_lists_all_manifests():
    listed = yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text("utf-8"))["resources"]
    assert {*listed, "kustomization.yaml"} == {path.name for path in MANIFESTS}


@pytest.mark.slow  # 20 s: the program is built and installed
@pytest.mark.skipif(UV is None, reason="uv is not installed")
def test_the_copied_files_make_a_program_that_starts(tmp_path):
    """Run the Containerfile's copies in an empty folder, install the program
    without its packages, and start it.
    """
    source, site, home = tmp_path / "source", tmp_path / "site", tmp_path / "home"
    source.mkdir()
    home.mkdir()
    for name, text in instructions():
        if name == "COPY":
            *paths_copied, target = shlex.split(text)
            for copied in paths_copied:
                origin = paths.ROOT / copied
                if origin.is_dir():
                    shutil.copytree(origin, source / target, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(origin, source / target)
    subprocess.run(
        [UV, "pip", "install", "-q", "--python", sys.executable, "--no-deps", "--target", site, source],
        check=True,
        timeout=300,
    )
    assert (site / "serving" / "operations" / "status.html").is_file()
    entry = yaml.safe_load(next(text for name, text in instructions() if name == "ENTRYPOINT"))
    started = subprocess.run(
        [sys.executable, *entry[1:], "--helpshort"],
        cwd=home,
        env={"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", "HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "--stall_s" in started.stdout, started.stderr


@pytest.mark.slow  # installs kubernetes-validate
@pytest.mark.skipif(UV is None, reason="uv is not installed")
def test_manifests_keep_the_schema_of_kubernetes(tmp_path):
    checked = [path for path in MANIFESTS if path.name != "kustomization.yaml"]
    cluster = kuberay()["RayJob"]["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for number, group in enumerate(groups):  # the schema of Kubernetes has no RayJob, but the pods of one
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "ray"},
            "spec": group["template"]["spec"],
        }
        checked.append(tmp_path / f"pod{number}.json")
        checked[-1].write_text(json.dumps(pod))
    result = subprocess.run(
        [UV, "tool", "run", "kubernetes-validate", "--strict", *map(str, checked)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_the_unit_is_valid(tmp_path):
    unit = (DEPLOY / "systemd" / "jaxflow.service").read_text("utf-8")
    path = tmp_path / "jaxflow.service"
    path.write_text(unit.replace("/opt/jaxflow/venv/bin/python", sys.executable))  # it must exist
    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stderr) == (0, "")
