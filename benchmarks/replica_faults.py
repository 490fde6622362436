"""Break a replica behind the router while it answers, and measure what a client sees.

  python -m benchmarks.replica_faults --output_json benchmarks/cpu/smollm2-135m/replica-faults.json

The script runs `python -m serving.cluster` on this machine, asks for streams on all replicas, and breaks one
replica. It then reads the ports of the router alone: streams, /metrics and /health/ready. Each fault runs
`--runs` times with a warm cache of compiled programs. A report of the same commit and settings keeps its
runs, and gets more. Needs pip install "jaxflow[cluster]".
"""

import argparse
import contextlib
import http.client
import json
import os
import re
import resource
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxflow.config import ModelConfig
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.pipeline.handwritten import two_nano_batch_plan
from jaxflow.pipeline.plan import save
from pallas_kernels.measure.provenance import provenance
from serving.default_model import default_model

ROOT = Path(__file__).resolve().parents[1]
STEP_TOKENS, SLOTS, PROMPT_TOKENS = 32, 8, 24
SAMPLE_S = 0.1
WATCH_S = 180.0  # the longest observation of a fault
SLOW_S, STOPPED_S, RUNNING_S = 12.0, 0.45, 0.05  # a slow replica runs a tenth of the time
LIMITS = {"served_s": 10.0, "again_s": 60.0}  # --stall_s bounds seen_s
SETTINGS = ("replicas", "streams", "tokens", "stall_s")
OUTCOMES = re.compile(r'jaxflow_requests_total\{outcome="\w+"\}')


class Stream(threading.Thread):
    """One request and its answer. times: of each chunk, with the tokens so far."""

    def __init__(self, url: str, seed: int, args: argparse.Namespace):
        super().__init__(daemon=True)
        self.url, self.seed, self.tokens, self.vocab_size = url, seed, args.tokens, args.vocab_size
        self.sent_s = time.monotonic()
        self.ids: list[int] = []
        self.times: list[tuple[float, int]] = []
        self.fault = ""
        self.start()

    def run(self) -> None:
        """Read the stream to its end."""
        prompt = [5 + (self.seed * 7919 + i * 104729) % (self.vocab_size - 5) for i in range(PROMPT_TOKENS)]
        body = {"prompt": prompt, "max_tokens": self.tokens, "seed": self.seed, "ignore_eos": True}
        body |= {"temperature": 1.0, "stream": True, "return_token_ids": True}
        headers = {"content-type": "application/json"}
        asked = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(asked, timeout=WATCH_S) as answer:
                for line in answer:
                    if line.startswith(b"data: {"):
                        self._read(json.loads(line.removeprefix(b"data: ")))
        except (OSError, http.client.HTTPException) as error:
            self.fault = f"{type(error).__name__}: {error}"

    def _read(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.fault = str(chunk["error"])
        elif ids := [token for choice in chunk["choices"] for token in choice.get("token_ids") or ()]:
            self.ids += ids
            self.times.append((time.monotonic(), len(self.ids)))

    def next_token_s(self, after_s: float) -> float | None:
        """Return the time of the first token after a moment; None for a stream without one."""
        return next((at for at, _ in self.times if at > after_s), None)


class Router:
    """The cluster command as a process, with the answers of its ports."""

    def __init__(self, model: str, folder: Path, programs: Path, stall_s: float):
        self.file, self.replicas = folder / "cluster.json", 0
        self._log: list[str] = []
        command = [sys.executable, "-m", "serving.cluster", f"--model={model}", f"--cluster_file={self.file}"]
        command += [
            "--port=0",
            "--admin_port=0",
            "--http_port=0",
            "--cpus_per_replica=0.1",
            "--block_size=16",
        ]
        command += [f"--max_num_batched_tokens={STEP_TOKENS}", f"--step_sizes={STEP_TOKENS}", "--nogrpc"]
        command += [f"--max_num_seqs={SLOTS}", "--max_model_len=512", "--num_kv_pages=256"]
        command += [f"--stall_s={stall_s}", "--drain_timeout_s=1"]
        environ = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": str(programs),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        self._command, self._environ = command, environ

    def start(self, replicas: int) -> None:
        """Start the command, and wait for its first replica. Raises: RuntimeError."""
        self.want(replicas)
        self._process = subprocess.Popen(
            self._command,
            cwd=ROOT,
            env=self._environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._log.append(line)
            if found := re.search(r"^ready on .*(http://\S+)", line):
                self.url = found[1]
                break
        else:
            raise RuntimeError("".join(self._log))
        threading.Thread(target=self._log.extend, args=(self._process.stdout,), daemon=True).start()

    def want(self, replicas: int, version: str = "sequential", **engine: Any) -> None:
        """Write the wanted replicas, at once."""
        self.replicas = replicas
        following = self.file.with_suffix(".next")
        following.write_text(json.dumps({"replicas": replicas, "version": version, "engine": engine}))
        following.replace(self.file)

    def metrics(self) -> dict[str, float]:
        """Return the values of /metrics by name and labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            lines = [line for line in answer.read().decode().splitlines() if line[:1] not in "#"]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def ready(self) -> bool:
        """Return the answer of /health/ready."""
        try:
            with urllib.request.urlopen(f"{self.url}/health/ready", timeout=30) as answer:
                return answer.status == 200
        except urllib.error.HTTPError:
            return False

    def states(self) -> list[dict[str, Any]]:
        """Return the replicas of /status."""
        with urllib.request.urlopen(f"{self.url}/status/events", timeout=30) as answer:
            line = next(line for line in answer if line.startswith(b"data: "))
        return json.loads(line.removeprefix(b"data: "))["replicas"]

    def until_serving(self, version: str) -> None:
        """Wait until all replicas serve a version. Raises: TimeoutError, with the log."""
        deadline_s = time.monotonic() + 300
        while [(one["state"], one["version"]) for one in self.states()] != [
            ("serving", version)
        ] * self.replicas:
            if time.monotonic() > deadline_s:
                raise TimeoutError("".join(self._log[-40:]))
            time.sleep(0.2)

    def close(self) -> None:
        """End the command in order, else at once."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(120)
        except subprocess.TimeoutExpired:
            self._process.kill()


def serving(metrics: dict[str, float]) -> int:
    """Return the number of replicas that serve."""
    return int(metrics.get('jaxflow_replicas{state="serving"}', 0))


def tokens_at(metrics: dict[str, float], replica: int) -> float:
    """Return the tokens that a replica has to compute."""
    return metrics.get(f'jaxflow_replica_tokens{{replica="{replica}"}}', 0.0)


class Watch(threading.Thread):
    """Samples of the metrics and of readiness until `stop`. samples: (time, ready, metrics)."""

    def __init__(self, router: Router):
        super().__init__(daemon=True)
        self._router, self._stopped = router, threading.Event()
        self.samples: list[tuple[float, bool, dict[str, float]]] = []
        self.start()

    def run(self) -> None:
        """Sample."""
        while not self._stopped.wait(SAMPLE_S):
            ready, metrics = self._router.ready(), self._router.metrics()
            self.samples.append((time.monotonic(), ready, metrics))

    def until(self, condition: Callable[[bool, dict[str, float]], bool], after_s: float) -> float:
        """Return the time of the first sample after a moment that meets a condition. Raises: TimeoutError."""
        seen = 0
        while time.monotonic() < after_s + WATCH_S:
            for at, ready, metrics in self.samples[seen:]:
                seen += 1
                if at > after_s and condition(ready, metrics):
                    return at
            time.sleep(SAMPLE_S / 4)
        raise TimeoutError(f"not seen within {WATCH_S} s: {self.samples[-1:]}")

    def stop(self) -> None:
        """End the samples."""
        self._stopped.set()
        self.join()


def kill(process: int) -> None:
    """End a process at once."""
    os.kill(process, signal.SIGKILL)


def stop(process: int) -> None:
    """Stop a process, which keeps its memory and its connections."""
    os.kill(process, signal.SIGSTOP)


def exhaust(process: int) -> None:
    """Give a process no more memory than it has. A process that needs no more lives on, and the run fails."""
    size = 4096 * int(Path(f"/proc/{process}/statm").read_text().split()[0])
    resource.prlimit(process, resource.RLIMIT_AS, (size, size))


def slow(process: int) -> None:
    """Let a process run a tenth of the time, for `SLOW_S`."""

    def run() -> None:
        end_s = time.monotonic() + SLOW_S
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < end_s:
                os.kill(process, signal.SIGSTOP)
                time.sleep(STOPPED_S)
                os.kill(process, signal.SIGCONT)
                time.sleep(RUNNING_S)

    threading.Thread(target=run, daemon=True).start()


BREAK = {"killed": kill, "stopped": stop, "out of memory": exhaust, "slow": slow}
FAULTS = (*BREAK, "another plan", "all killed")


def run_once(
    router: Router, fault: str, plan: Path, args: argparse.Namespace, expected: dict
) -> dict[str, Any]:
    """Break a replica while it answers. Return what was seen, in seconds from the fault, and the counts."""
    version = router.states()[0]["version"]
    router.until_serving(version)
    before = router.metrics()
    watch = Watch(router)
    streams = [Stream(router.url, seed, args) for seed in range(args.streams - 2)]
    while not all(len(stream.ids) > 4 for stream in streams):
        time.sleep(0.02)
    states = router.states()
    victim = max(states, key=lambda one: one["requests"])
    streams += [Stream(router.url, seed, args) for seed in range(args.streams - 2, args.streams)]
    time.sleep(0.05)  # the streams of these two faults have no token yet
    other = next(one["index"] for one in states if one is not victim)
    broken_s = time.monotonic()
    if fault == "another plan":
        version = "plan" if version == "sequential" else "sequential"
        router.want(router.replicas, version, plan=str(plan) if version == "plan" else "sequential")
    else:
        for one in states if fault == "all killed" else [victim]:
            BREAK["killed" if fault == "all killed" else fault](one["process_id"])
    if fault == "slow":
        index = victim["index"]
        sight = lambda _, found: tokens_at(found, index) > tokens_at(found, other) + args.tokens / 4
    else:
        sight = lambda _, found: serving(found) < router.replicas
    seen_s = watch.until(sight, broken_s)
    waited = [stream for stream in streams if len(stream.ids) < args.tokens]
    if fault == "slow":
        waited = [Stream(router.url, seed, args) for seed in range(args.streams, args.streams + 2)]
        streams += waited
    for stream in streams:
        stream.join()
    again_s = None
    if fault != "slow":
        again_s = watch.until(lambda _, found: serving(found) == router.replicas, seen_s)
    router.until_serving(version)
    watch.stop()
    after = router.metrics()
    following = [stream.next_token_s(seen_s) for stream in waited]
    answered = sum(value - before.get(name, 0) for name, value in after.items() if OUTCOMES.match(name))
    done = [stream for stream in streams if len(stream.ids) == args.tokens and not stream.fault]
    return {
        "seen_s": seen_s - broken_s,
        "served_s": max((at - seen_s for at in following if at is not None), default=0.0),
        "again_s": None if again_s is None else again_s - broken_s,
        "requests": len(streams),
        "lost": len(streams) - len(done),
        "doubled": max(0, int(answered) - len(streams)) + sum(len(s.ids) > args.tokens for s in streams),
        "same_tokens": sum(stream.ids == expected.get(stream.seed, stream.ids) for stream in streams),
        "moved": int(after["jaxflow_requests_moved_total"] - before["jaxflow_requests_moved_total"]),
        "samples": len(watch.samples),
        "wrong_samples": wrong_samples(watch, min(seen_s, broken_s + args.stall_s), again_s, router.replicas),
        "faults_told": sorted({stream.fault for stream in streams if stream.fault}),
    }


def wrong_samples(watch: Watch, late_s: float, again_s: float | None, replicas: int) -> int:
    """Return how many samples reported a wrong state.

    The state ready is correct if at least one replica serves. A lost replica does not serve
    from `late_s` until `again_s`.
    """
    wrong, before = 0, None
    for at, ready, found in watch.samples:  # readiness was asked for between two looks at the metrics
        untrue = before is not None and ready not in (serving(before) > 0, serving(found) > 0)
        lost = again_s is not None and late_s < at < again_s
        wrong += untrue or (lost and serving(found) >= replicas)
        before = found
    return wrong


def summary(fault: str, runs: Sequence[dict[str, Any]], stall_s: float) -> dict[str, Any]:
    """Return the medians of the times, the sums of the counts, and if each limit was kept.

    Where all replicas are lost, no other one can serve their requests.
    """
    found: dict[str, Any] = {}
    for name in ("seen_s", "served_s", "again_s"):
        values = [run[name] for run in runs if run[name] is not None]
        found[name] = statistics.median(values) if values else None
    for name in ("requests", "lost", "doubled", "moved", "same_tokens", "samples", "wrong_samples"):
        found[name] = sum(run[name] for run in runs)
    limits = LIMITS | {"seen_s": stall_s}
    if fault == "all killed":
        del limits["served_s"]
    found["kept"] = all(found[name] is None or found[name] <= limit for name, limit in limits.items())
    found["kept"] = found["kept"] and not (found["lost"] or found["doubled"] or found["wrong_samples"])
    return found | {"runs": list(runs)}


def expected_tokens(router: Router, args: argparse.Namespace) -> dict[int, list[int]]:
    """Return the tokens of each stream without a fault."""
    streams = [Stream(router.url, seed, args) for seed in range(args.streams + 2)]
    for stream in streams:
        stream.join()
    return {stream.seed: stream.ids for stream in streams}


@contextlib.contextmanager
def running(args: argparse.Namespace, config: ModelConfig) -> Iterator[tuple[Router, Path]]:
    """Start the replicas, with programs of both plans in the cache.

    Yield the router and the file of the other plan.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan = folder / "two-nano-batches.json"
        save(two_nano_batch_plan(config, STEP_TOKENS, STEP_TOKENS // 2), plan)
        router = Router(args.model, folder, args.programs or folder / "programs", args.stall_s)
        router.start(args.replicas)
        try:
            router.until_serving("sequential")
            other = (
                [("plan", str(plan)), ("sequential", "sequential")] if "another plan" in args.faults else []
            )
            for version, which in other:
                router.want(args.replicas, version, plan=which)
                router.until_serving(version)
            yield router, plan
        finally:
            router.close()


def kept_runs(path: Path | None, report: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the runs of an earlier report of the same commit and settings, by fault."""
    if path is None or not path.exists():
        return {}
    earlier = json.loads(path.read_text())
    same = all(earlier.get(name) == report[name] for name in ("commit", "model", *SETTINGS))
    return {name: one["runs"] for name, one in earlier["faults"].items()} if same else {}


def main() -> None:
    """Measure every fault, and write the report after each run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=None, help="Default: the model of run.py.")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--streams", type=int, default=SLOTS, help="At once; at most the slots of a replica.")
    parser.add_argument("--tokens", type=int, default=120, help="Of each answer.")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--stall_s", type=float, default=10.0, help="As of the command.")
    parser.add_argument("--faults", nargs="*", choices=FAULTS, default=FAULTS)
    parser.add_argument("--programs", type=Path, help="Folder of compiled programs. Default: a new one.")
    parser.add_argument("--output_json", type=Path, help="File of the report.")
    args = parser.parse_args()
    args.model = args.model or str(default_model())
    checkpoint = open_checkpoint(args.model)
    args.vocab_size = checkpoint.model_config.vocab_size
    command = shlex.join(["python", "-m", "benchmarks.replica_faults", *sys.argv[1:]])
    report = {"command_name": "replica_faults"} | provenance(command)
    report |= {"model": checkpoint.name, "cpu_cores": os.cpu_count()}
    report |= {name: getattr(args, name) for name in SETTINGS} | {"limits": LIMITS | {"seen_s": args.stall_s}}
    found = kept_runs(args.output_json, report)
    with running(args, checkpoint.model_config) as (router, plan):
        expected = expected_tokens(router, args)
        for _ in range(args.runs):
            for fault in args.faults:
                one = run_once(router, fault, plan, args, expected)
                one |= {"load_average": os.getloadavg()[0]}
                found.setdefault(fault, []).append(one)
                print(fault, one, flush=True)
                report |= {
                    "faults": {name: summary(name, runs, args.stall_s) for name, runs in found.items()}
                }
                if args.output_json:
                    args.output_json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
