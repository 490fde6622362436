"""`python -m serving.batch --engine ray` with real Ray: whole answers, and kills of
a replica, the command and Ray.
"""

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import paths
import pytest

from jaxflow import LLM, SamplingParams
from serving.batch.journal import AnsweredLine, _decode, read_frames

pytestmark = [
    pytest.mark.slow,  # minutes: Ray starts several times
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="ray is not installed: python3 run.py exec --extra cluster pytest -m slow <this file> has it",
    ),
]

HERE = Path(__file__).parent
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join(map(str, (paths.ROOT, paths.ROOT / "tests", HERE.parent, HERE))),
    "JAX_PLATFORMS": "cpu",
    "RAY_AUTH_MODE": "disabled",  # the cluster listens on loopback only
}
LINES = 240
TOKENS = 20


def write_lines(path: Path, count: int = LINES, tokens: int = TOKENS, **fields) -> Path:
    with open(path, "w") as file:
        for number in range(count):
            prompt = [3 + number % 250, 3 + number // 250]
            body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "seed": number} | fields
            line = {"custom_id": f"r-{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    return path


class Command:
    """The command with simulated engines, as a process."""

    def __init__(self, folder: Path, *, replicas: int = 2, address: str | None = None):
        self.folder, self.asked_file = folder, folder / f"asked-{time.monotonic_ns()}"
        arguments = [
            folder / "in",
            folder / "out",
            self.asked_file,
            replicas,
            *([address] if address else []),
        ]
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "ray_batch.py"), *map(str, arguments)],
            env=ENVIRONMENT, cwd=paths.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    @property
    def asked(self) -> list[tuple[int, int]]:
        """(process, line) of each line that began, in their order."""
        if not self.asked_file.exists():
            return []
        rows = [each.split() for each in self.asked_file.read_text().splitlines()]
        return [(int(process), int(line)) for process, line in rows]

    def until(self, finished: int) -> "Command":
        """Wait until so many lines are in the journal, and two replicas have lines."""
        deadline = time.monotonic() + 200
        while len(journal(self.folder)) < finished or len({process for process, _ in self.asked}) < 2:
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return self

    def end(self, timeout_s: float = 200) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, output


def journal(folder: Path) -> list[int]:
    """The lines whose answers are on disk, one entry an answer."""
    found = []
    for path in (folder / "out.journal").glob("*.segment"):
        with open(path, "rb") as file:
            records = [_decode(payload) for _, payload in read_frames(file, 0)]
        found += [record.line - 1 for record in records if isinstance(record, AnsweredLine)]
    return found


def descendants(process: int) -> list[int]:
    """The processes that a process started, and theirs."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(entry.name))
    found = list(parents.get(process, []))
    for child in found:
        found += parents.get(child, [])
    return found


def check_whole(folder: Path, count: int = LINES) -> None:
    """The output has each line once, in the order of the input, and each has its own answer."""
    outputs = [json.loads(each) for each in (folder / "out").read_text().splitlines()]
    assert [each["custom_id"] for each in outputs] == [f"r-{i}" for i in range(count)]
    assert {each["response"]["status_code"] for each in outputs} == {200}
    assert all(each["response"]["body"]["usage"]["completion_tokens"] == TOKENS for each in outputs)


def test_a_killed_replica_costs_its_unfinished_lines(tmp_path):
    write_lines(tmp_path / "in")
    command = Command(tmp_path).until(finished=40)
    victim = command.asked[0][0]
    finished = set(journal(tmp_path))
    os.kill(victim, signal.SIGKILL)
    status, output = command.end()
    assert status == 0, output
    assert "was lost" in output and f"{LINES}/{LINES}" in output
    check_whole(tmp_path)
    lines = [line for _, line in command.asked]
    twice = {line for line in lines if lines.count(line) > 1}
    assert 1 <= len(twice) <= 8 and not twice & finished
    assert twice <= {line for process, line in command.asked if process == victim}
    assert sorted(journal(tmp_path)) == list(range(LINES))
    assert len({process for process, _ in command.asked}) == 3  # the replica itself came back


def test_a_killed_command_continues(tmp_path):
    write_lines(tmp_path / "in")
    command = Command(tmp_path).until(finished=40)
    replicas = {process for process, _ in command.asked}
    command.process.kill()
    command.process.wait()
    finished = set(journal(tmp_path))
    assert 40 <= len(finished) < LINES
    deadline = time.monotonic() + 60
    while left := [replica for replica in replicas if Path(f"/proc/{replica}").exists()]:
        assert time.monotonic() < deadline, f"replicas of the killed command are left: {left}"
        time.sleep(0.2)
    again = Command(tmp_path)
    status, output = again.end()
    assert status == 0, output
    check_whole(tmp_path)
    assert {line for _, line in again.asked} == set(range(LINES)) - finished


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class RayHead:
    """A Ray cluster of this machine. `kill` ends all its processes."""

    def __init__(self, folder: str):
        self.address = f"127.0.0.1:{free_port()}"
        flags = ["--head", "--block", "--node-ip-address=127.0.0.1", f"--port={self.address.split(':')[1]}"]
        flags += ["--num-cpus=4", "--object-store-memory=100000000", "--include-dashboard=false"]
        flags += [f"--temp-dir={folder}", f"--ray-client-server-port={free_port()}"]
        environment = ENVIRONMENT | {"RAY_agent_register_timeout_ms": "120000"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", *flags],
            env=environment, cwd=paths.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        line = next((each for each in self.process.stdout if "Ray runtime started" in each), None)
        assert line is not None, "Ray does not start"

    def kill(self) -> None:
        for process in [self.process.pid, *descendants(self.process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.process.wait()


def test_a_killed_cluster_ends_the_command_which_continues_on_another(tmp_path):
    write_lines(tmp_path / "in")
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as one:
        head = RayHead(one)
        try:
            command = Command(tmp_path, address=head.address).until(finished=40)
        finally:
            head.kill()
        status, output = command.end()
        assert status != 0, output
        finished = set(journal(tmp_path))
        assert 40 <= len(finished) < LINES and not (tmp_path / "out").exists()
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as other:
        head = RayHead(other)
        try:
            again = Command(tmp_path, address=head.address)
            status, output = again.end()
        finally:
            head.kill()
        assert status == 0, output
        check_whole(tmp_path)
        assert {line for _, line in again.asked} == set(range(LINES)) - finished


def run_command(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "serving.batch", *map(str, arguments)]
    return subprocess.run(
        command, env=ENVIRONMENT, cwd=paths.ROOT, capture_output=True, text=True, timeout=500
    )


def test_real_engines_answer_as_a_local_one_and_in_parquet(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    source = write_lines(tmp_path / "in.jsonl", 24, tokens=8)
    rows = [json.loads(each) for each in source.read_text().splitlines()]
    for row in rows:
        row["body"] = json.dumps(row["body"], indent=1)
        del row["method"]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "in.parquet")
    small = ["--model", paths.MODELS / "stories260K", "--max_num_seqs=4", "--max_num_batched_tokens=64"]
    small += ["--max_model_len=128", "--num_kv_pages=64"]
    local = run_command(*small, "-i", source, "-o", tmp_path / "local.jsonl")
    assert local.returncode == 0, local.stderr
    over_ray = ["--engine=ray", "--replicas=2", "--cpus_per_replica=0.1"]
    ray = run_command(*small, *over_ray, "-i", tmp_path / "in.parquet", "-o", tmp_path / "out.parquet")
    assert ray.returncode == 0, ray.stderr
    assert "24/24" in ray.stderr and "24 answers, 0 errors" in ray.stdout
    expected = [json.loads(each) for each in (tmp_path / "local.jsonl").read_text().splitlines()]
    found = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["custom_id"] for row in found] == [f"r-{i}" for i in range(24)]
    assert [row["status_code"] for row in found] == [200] * 24
    for row, one in zip(found, expected, strict=True):
        body, local_body = json.loads(row["body"]), one["response"]["body"]
        assert body["usage"] == local_body["usage"]
        assert body["choices"] == local_body["choices"]


def test_real_engines_give_the_tokens_of_llm_generate_also_after_a_kill(tmp_path):
    lines, tokens = 48, 200
    write_lines(tmp_path / "in", lines, tokens, return_token_ids=True)
    flags = ["--max_num_seqs=4", "--max_num_batched_tokens=64", "--max_model_len=512", "--num_kv_pages=64"]
    flags += ["--engine=ray", "--replicas=2", "--cpus_per_replica=0.1"]
    model = str(paths.MODELS / "stories260K")
    command = subprocess.Popen(
        [sys.executable, "-m", "serving.batch", "--model", model, *flags,
         "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")],
        env=ENVIRONMENT, cwd=paths.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 200
    while len(journal(tmp_path)) < 8:
        assert command.poll() is None, command.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    replicas = [each for each in descendants(command.pid) if b"_Actor" in command_line(each)]
    assert len(replicas) == 2
    os.kill(replicas[0], signal.SIGKILL)
    output, _ = command.communicate(timeout=400)
    assert command.returncode == 0 and "was lost" in output, output
    assert sorted(journal(tmp_path)) == list(range(lines))
    found = [json.loads(each) for each in (tmp_path / "out").read_text().splitlines()]
    assert [each["custom_id"] for each in found] == [f"r-{i}" for i in range(lines)]
    asked = [json.loads(each)["body"] for each in (tmp_path / "in").read_text().splitlines()]
    sampling = [SamplingParams(max_tokens=tokens, ignore_eos=True, seed=each["seed"]) for each in asked]
    with LLM(model, max_model_len=512, max_num_seqs=16, max_num_batched_tokens=64) as llm:
        expected = llm.generate([each["prompt"] for each in asked], sampling, use_tqdm=False)
    answers = [each["response"]["body"]["choices"][0]["token_ids"] for each in found]
    assert answers == [list(each.outputs[0].token_ids) for each in expected]


def command_line(process: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes()
    return b""
