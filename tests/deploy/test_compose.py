"""The compose file of a router and two engines: its schema, and its commands as processes of this machine."""

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import paths
import pytest
import yaml

FILES = (paths.ROOT / "deploy" / "compose.yaml", paths.ROOT / "deploy" / "compose-cluster.yaml")
UV = shutil.which("uv") or shutil.which(str(paths.ROOT / ".cache" / "launcher" / "bin" / "uv"))
SERVICES = yaml.safe_load(FILES[1].read_text("utf-8"))["services"]
ENGINES = ("engine-0", "engine-1")
PROMPT = paths.golden("stories260K")["prompts"][1]
TOKEN = {"authorization": "Bearer s3cret"}
HERE = (
    "--host=127.0.0.1 --port=0 --http_port=0 --admin_port=0 --max_num_batched_tokens=16 --step_sizes=16 "
    "--max_num_seqs=4 --max_model_len=512 --num_kv_pages=128 --block_size=16"
)


def test_every_engine_has_the_place_that_a_replica_asks_for():
    flags = dict(re.findall(r"--(\w+)=(\S+)", SERVICES["router"]["command"][2]))
    assert int(flags["replicas"]) == len(ENGINES) and set(SERVICES) == {"router", *ENGINES}
    devices = []
    for name in ENGINES:
        offered = dict(re.findall(r"--(num-\w+)=(\d+)", " ".join(SERVICES[name]["command"])))
        [device] = SERVICES[name]["deploy"]["resources"]["reservations"]["devices"]
        devices += device["device_ids"]
        assert float(flags["cpus_per_replica"]) <= float(offered["num-cpus"])
        assert float(flags["gpus_per_replica"]) == float(offered["num-gpus"]) == len(device["device_ids"])
        assert "ports" not in SERVICES[name]
    assert len(set(devices)) == len(ENGINES)
    assert all(port.startswith("127.0.0.1:") for port in SERVICES["router"]["ports"])


@pytest.mark.slow  # installs check-jsonschema, which has the schema
@pytest.mark.skipif(UV is None, reason="uv is not installed")
def test_the_files_keep_the_schema_of_compose():
    command = [
        UV,
        "tool",
        "run",
        "check-jsonschema",
        "--builtin-schema",
        "vendor.compose-spec",
        *map(str, FILES),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr


class Containers:
    """The services as processes: a container's processes are those with its name in their environment."""

    def __init__(self, folder: Path):
        self.folder, self.lines, self.url = folder, [], ""
        self._ready, self._ended = threading.Event(), threading.Event()
        (folder / "tokens").write_text("s3cret\n")
        (folder / "ray_token").write_text("0123456789abcdef" * 2)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.places = {
            "router:6379": f"127.0.0.1:{port}",
            "--port=6379": f"--port={port}",
            "/run/secrets": str(folder),
            "--host=0.0.0.0": HERE,
            "$$": "$",
        }

    def _here(self, text: str) -> str:
        for there, here in self.places.items():
            text = text.replace(there, here)
        return text

    def start(self, name: str) -> subprocess.Popen[str]:
        service = SERVICES[name]
        environment = {key: self._here(value) for key, value in service["environment"].items()}
        environment |= {"MODEL": str(paths.MODELS / "stories260K"), "CONTAINER": f"{self.folder}/{name}"}
        environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"}
        process = subprocess.Popen(
            [self._here(word) for word in service["command"]],
            cwd=paths.ROOT,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        threading.Thread(target=self._read, args=(process,), daemon=True).start()
        return process

    def _read(self, process: subprocess.Popen[str]) -> None:
        for line in process.stdout:
            self.lines.append(line)
            if found := re.fullmatch(r"ready on \S+ and (http://\S+)\n", line):
                self.url = found[1]
                self._ready.set()

    def keep(self, name: str) -> None:
        """Start a container, and start it again whenever it ends, as its restart policy says."""
        assert SERVICES[name]["restart"] == "unless-stopped"

        def run() -> None:
            while not self._ended.is_set():
                self.start(name).wait()
                time.sleep(1)

        threading.Thread(target=run, daemon=True).start()

    def close(self) -> None:
        self._ended.set()
        for name in SERVICES:
            self.kill(name)

    def wait_ready(self) -> None:
        assert self._ready.wait(400), "".join(self.lines)

    def kill(self, name: str) -> None:
        """End all processes of a container, as the end of a container does."""
        mark = f"CONTAINER={self.folder}/{name}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    os.kill(int(folder.name), signal.SIGKILL)

    def ask(self) -> list[int]:
        body = {"prompt": PROMPT["prompt_ids"], "max_tokens": len(PROMPT["greedy_ids"]), "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, headers=TOKEN, timeout=200)
        return answer.raise_for_status().json()["choices"][0]["token_ids"]

    def until_serving(self, number: int) -> None:
        deadline_s = time.monotonic() + 240
        line = f'jaxflow_replicas{{state="serving"}} {number:.1f}'
        while line not in httpx.get(f"{self.url}/metrics", headers=TOKEN, timeout=30).text:
            assert time.monotonic() < deadline_s, "".join(self.lines[-60:])
            time.sleep(0.5)


@pytest.mark.slow  # minutes: Ray and three engines start
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_the_commands_serve_and_outlive_the_end_of_a_container(tmp_path):
    containers = Containers(tmp_path)
    try:
        router = containers.start("router")
        for name in ENGINES:
            containers.keep(name)
        containers.wait_ready()
        containers.until_serving(2)
        assert containers.ask() == PROMPT["greedy_ids"]
        containers.kill("engine-0")
        containers.until_serving(1)
        assert containers.ask() == PROMPT["greedy_ids"]
        assert httpx.get(f"{containers.url}/health/ready").status_code == 200
        containers.until_serving(2)
        assert containers.ask() == PROMPT["greedy_ids"]
        router.send_signal(signal.SIGTERM)
        assert router.wait(timeout=120) == 0, "".join(containers.lines[-60:])
    finally:
        containers.close()
