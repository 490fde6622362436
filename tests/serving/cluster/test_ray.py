"""The command `python -m serving.cluster` with real replicas on Ray: answers, faults, updates and the end."""

import contextlib
import importlib.util
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import paths
import pytest

from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.pipeline.handwritten import two_nano_batch_plan
from jaxflow.pipeline.plan import save

pytestmark = [
    pytest.mark.slow,  # minutes: Ray and four engines start
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="ray is not installed: python3 run.py exec --extra cluster pytest -m slow <this file> has it",
    ),
]

MODEL = str(paths.MODELS / "stories260K")
PROMPT = paths.golden("stories260K")["prompts"][1]
SMALL = (
    "--max_num_batched_tokens=16",
    "--step_sizes=16",
    "--max_num_seqs=4",
    "--max_model_len=512",
    "--num_kv_pages=128",
    "--block_size=16",
)
STALL_S = 5.0
LONG = 400


class Cluster:
    """The command as a process, and what it says over HTTP."""

    def __init__(self, *arguments: str, **environment: str):
        command = [sys.executable, "-m", "serving.cluster", "--model", MODEL, *SMALL]
        command += ["--port=0", "--admin_port=0", "--http_port=0", "--cpus_per_replica=0.1", *arguments]
        self.process = subprocess.Popen(
            command,
            cwd=paths.ROOT,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self.url = self.target = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._ready.wait(400) and self.url, "".join(self.lines)

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.fullmatch(r"ready on (\S+) and (http://\S+)\n", line):
                self.target, self.url = found[1], found[2]
                self._ready.set()
        self._ready.set()

    def replicas(self) -> list[dict]:
        with httpx.stream("GET", f"{self.url}/status/events", timeout=30) as answer:
            line = next(line for line in answer.iter_lines() if line.startswith("data: "))
        return json.loads(line.removeprefix("data: "))["replicas"]

    def until(self, condition, timeout_s: float = 200) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition(self.replicas()):
            assert time.monotonic() < deadline, (self.replicas(), "".join(self.lines[-40:]))
            time.sleep(0.2)

    def serving(self, number: int) -> None:
        self.until(lambda found: [one["state"] for one in found] == ["serving"] * number)

    def ask(self, prompt=None, tokens: int = 16, **fields) -> list[int]:
        body = {"prompt": prompt or PROMPT["prompt_ids"], "max_tokens": tokens, "ignore_eos": True, "seed": 7}
        body |= {"return_token_ids": True} | fields
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=200)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["token_ids"]

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))

    def close(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=120)
        self._reader.join(30)
        return self.process.returncode


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    file = tmp_path_factory.mktemp("cluster") / "cluster.json"
    file.write_text('{"replicas": 2, "version": "a"}')
    running = Cluster(f"--cluster_file={file}", f"--stall_s={STALL_S}")
    running.file = file
    try:
        running.serving(2)
        yield running
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.close()
        running.process.kill()


def in_threads(work, number: int) -> list:
    results = [None] * number

    def run(i: int) -> None:
        results[i] = work(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(number)]
    for thread in threads:
        thread.start()
    return [threads, results]


def joined(running) -> list:
    threads, results = running
    for thread in threads:
        thread.join(200)
    return results


def test_both_doors_answer_with_the_models_tokens(cluster):
    number = len(PROMPT["greedy_ids"])
    assert cluster.ask(tokens=number, temperature=0) == PROMPT["greedy_ids"]
    asked = subprocess.run(
        [sys.executable, "-m", "serving.client", f"--target={cluster.target}", "--temperature=0",
         f"--max_tokens={number}", "--ignore_eos", PROMPT["text"]],
        cwd=paths.ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (asked.returncode, asked.stdout) == (0, PROMPT["greedy_text"] + "\n"), asked.stderr
    assert httpx.get(f"{cluster.url}/health/ready").status_code == 200
    bad = httpx.post(f"{cluster.url}/v1/completions", json={"prompt": "a", "top_p": 7})
    assert bad.status_code == 400


def exhaust(process: int) -> None:
    """Give a process no more memory than it has."""
    size = 4096 * int(Path(f"/proc/{process}/statm").read_text().split()[0])
    resource.prlimit(process, resource.RLIMIT_AS, (size, size))


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(lambda process: os.kill(process, signal.SIGKILL), id="killed"),
        pytest.param(lambda process: os.kill(process, signal.SIGSTOP), id="stopped"),
        pytest.param(exhaust, id="out of memory"),
    ],
)
def test_streams_of_a_lost_replica_go_on_with_the_same_tokens(cluster, fault):
    cluster.serving(2)
    plain = [cluster.ask(tokens=LONG, temperature=1.0, seed=i) for i in range(6)]
    losses, moved = (
        cluster.metric("jaxflow_replica_losses_total"),
        cluster.metric("jaxflow_requests_moved_total"),
    )
    running = in_threads(lambda i: cluster.ask(tokens=LONG, temperature=1.0, seed=i), 6)
    cluster.until(lambda found: all(one["requests"] for one in found))
    time.sleep(0.3)
    victim = max(cluster.replicas(), key=lambda one: one["requests"])
    fault(victim["process_id"])
    found = joined(running)
    equal = sum(one == two for one, two in zip(plain, found, strict=True))
    assert all(len(one) == LONG for one in found) and equal >= 5, (
        plain,
        found,
    )  # a rounding may change a draw
    lost = cluster.metric("jaxflow_replica_losses_total") - losses
    assert lost == 1 or (fault is exhaust and lost == 0)  # a process that needs no more memory lives on
    assert cluster.metric("jaxflow_requests_moved_total") > moved or not lost
    assert cluster.metric("jaxflow_requests_interrupted_total") == 0
    cluster.serving(2)
    assert not lost or victim["process_id"] not in {one["process_id"] for one in cluster.replicas()}


def test_updates_and_scaling_fail_no_request(cluster, tmp_path):
    """One update starts the replicas with another plan. Every plan computes the same tokens."""
    stop, asked, greedy = threading.Event(), [], PROMPT["greedy_ids"]
    save(two_nano_batch_plan(open_checkpoint(MODEL).model_config, 16, 8), tmp_path / "plan.json")

    def ask(i: int) -> None:
        while not stop.is_set():
            asked.append(cluster.ask(tokens=len(greedy), temperature=0))

    running = in_threads(ask, 3)
    for replicas, version in ((3, "a"), (3, "b"), (1, "b")):
        engine = {"plan": str(tmp_path / "plan.json")} if version == "b" else {}
        cluster.file.write_text(json.dumps({"replicas": replicas, "version": version, "engine": engine}))
        wanted = [("serving", version)] * replicas
        cluster.until(lambda found, wanted=wanted: [(r["state"], r["version"]) for r in found] == wanted)
    cluster.file.write_text('{"replicas": 0}')
    time.sleep(2)
    stop.set()
    joined(running)
    assert len(cluster.replicas()) == 1 and any("replicas=0" in line for line in cluster.lines)
    assert len(asked) > 10 and all(ids == greedy for ids in asked)


def test_a_second_router_needs_ports_of_its_own(cluster):
    port = cluster.url.rpartition(":")[2]
    ended = refused(f"--model={MODEL}", "--port=0", "--admin_port=0", f"--http_port={port}")
    assert f"127.0.0.1:{port}" in ended.stderr and "0 for a free port" in ended.stderr
    assert len(cluster.ask()) == 16


def refused(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command that must end with one line."""
    command = [sys.executable, "-m", "serving.cluster", "--cpus_per_replica=0.1", *arguments]
    ended = subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr, ended.stderr
    return ended


def test_the_end_is_clean(cluster):
    processes = [one["process_id"] for one in cluster.replicas()]
    assert cluster.close() == 0
    output = "".join(cluster.lines)
    assert "drained, 0 aborted" in output
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, 0)
            time.sleep(10)
            os.kill(process, 0)
            raise AssertionError(f"process {process} is left")


def test_settings_that_cannot_work_end_the_command():
    ports = ("--port=0", "--admin_port=0", "--http_port=0")
    assert "/no/such/model" in refused("--model=/no/such/model", "--replicas=2", *ports).stderr
    several = ("--tensor_parallel_size=4", "--processes_per_replica=3")
    assert "a divisor of 4" in refused(f"--model={MODEL}", *several, *ports).stderr
    assert "processes_per_replica" in refused(f"--model={MODEL}", "--coordinator=auto", *ports).stderr
    ranks = ("--data_parallel_size=2", "--enable_expert_parallel", "--processes_per_replica=2")
    tiers = refused(f"--model={MODEL}", *ranks, "--kv_offloading_size=1", "--enable_prefix_caching", *ports)
    assert "kv_offloading_size" in tiers.stderr
    none = refused(f"--model={MODEL}", "--replicas=0", *ports)
    assert "replicas" in none.stderr and "1 or more" in none.stderr


def test_a_replica_of_several_processes_answers_and_outlives_one():
    """Tensor parallelism over two processes, of which one is killed."""
    processes = ("--tensor_parallel_size=2", "--processes_per_replica=2", "--replicas=1")
    running = Cluster(*processes, JAX_NUM_CPU_DEVICES="1")
    try:
        number = len(PROMPT["greedy_ids"])
        assert running.ask(tokens=number, temperature=0) == PROMPT["greedy_ids"]
        [first] = running.replicas()
        parent = Path(f"/proc/{first['process_id']}/stat").read_text().rpartition(")")[2].split()[1]
        workers = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        actors = [int(each) for each in workers if b"_Actor" in Path(f"/proc/{each}/cmdline").read_bytes()]
        [other] = set(actors) - {first["process_id"]}
        os.kill(other, signal.SIGKILL)
        running.until(lambda found: found[0]["restarts"] == 1)
        assert running.ask(tokens=number, temperature=0) == PROMPT["greedy_ids"]
        running.serving(1)
        assert running.close() == 0, "".join(running.lines)
    finally:
        running.process.kill()
