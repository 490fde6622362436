"""The lines of a batch over several replicas of a fake engine: each line ends once,
whatever happens to a replica.
"""

import asyncio
import json
import random
import shutil
import threading
import time

import pytest
from fake_llm import FakeLLM
from hypothesis import given
from hypothesis import strategies as st
from replicas import CONFIG, BatchLink, DrawingDriver, Replicas, until

from serving.batch_command import Options, answer_file
from serving.batch_engine import LocalEngine
from serving.cluster import member
from serving.cluster.batch_replicas import MAX_LOSSES, ReplicaEngine, most_lines
from serving.cluster.wanted import WantedReplicas

POISON = 299  # ends the process that is asked
STALL_S = 2.0  # in tests of hung replicas: a busy machine must not look hung
NEVER_S = 60.0


def write_lines(path, count: int, tokens: int = 4, poison: tuple[int, ...] = ()):
    lines = []
    for number in range(count):
        prompt = [3 + number % 250, 3 + number // 250] + [POISON] * (number in poison)
        body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "seed": number}
        lines.append({"custom_id": f"r-{number}", "method": "POST", "url": "/v1/completions", "body": body})
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


class PoisonedLink(BatchLink):
    """A process that dies when it gets the poisoned line."""

    async def take(self, orders, aborted) -> None:
        if any(b"%d" % POISON in order.body for order in orders):
            self.die()
        await super().take(orders, aborted)


class Run:
    """A run of the command over replicas, on a thread of its own."""

    def __init__(
        self, folder, links: Replicas, replicas: int = 3, *, window: int = 8, stall_s: float = NEVER_S
    ):
        self.links, self.status = links, None
        self._out = folder / "out"
        options = Options(folder / "in", self._out, "models/fake", window=window, progress=False)
        wanted = WantedReplicas(replicas, CONFIG)

        def load() -> ReplicaEngine:
            return ReplicaEngine(wanted, links.launch, stall_s=stall_s, start_s=NEVER_S)

        def run() -> None:
            self.status = answer_file(options, load)

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def busy(self, index: int) -> BatchLink:
        """Wait until a replica runs lines, and return its link."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            link = next((one for one in reversed(self.links.started) if one.index == index), None)
            if link is not None and not link.killed and link.llm.driver._running:
                return link
            time.sleep(0.002)
        raise AssertionError(f"replica {index} has no lines")

    def wait(self) -> "Run":
        self._thread.join(60)
        assert not self._thread.is_alive(), "the run does not end"
        return self

    @property
    def outputs(self) -> list[dict]:
        return [json.loads(each) for each in self._out.read_text().splitlines()]

    @property
    def asked(self) -> list[int]:
        """The lines that engines got, as often as they got them."""
        requests = [request for link in self.links.started for request in link.llm.driver.submitted]
        return sorted(request.sampling.seed for request in requests)


@pytest.fixture(autouse=True)
def on_a_thread(monkeypatch):
    """Let the command run on a thread, without signals, and start lost replicas at once."""
    monkeypatch.setattr(member, "LONGEST_WAIT_S", 0.01)
    monkeypatch.setattr(asyncio.unix_events._UnixSelectorEventLoop, "add_signal_handler", lambda *_: None)


def answers(outputs: list[dict]) -> list[tuple]:
    return [
        (each["id"], each["custom_id"], each["response"]["status_code"], choices(each)) for each in outputs
    ]


def choices(output: dict) -> list:
    return output["response"]["body"].get("choices", [])


def plain(folder, count: int, left: int | None = None) -> list[tuple]:
    """The answers of one engine of this process, which has `left` lines to run; None for all."""
    llm = FakeLLM()
    llm.driver.close()
    llm.driver = DrawingDriver(llm.max_model_len, llm.tokenizer.eos_token_id)
    options = Options(folder / "in", folder / "plain", "models/fake", progress=False)
    assert answer_file(options, lambda: LocalEngine(llm)) == 0
    assert len(llm.driver.submitted) == (count if left is None else left)
    found = answers([json.loads(each) for each in (folder / "plain").read_text().splitlines()])
    assert [name for _, name, _, _ in found] == [f"r-{i}" for i in range(count)]
    return found


@given(st.integers(1, 5000), st.lists(st.integers(0, 9)), st.integers(0, 9))
def test_the_group_of_a_line_shrinks_to_one(window, losses, more):
    most = most_lines(window, losses)
    assert 1 <= most <= window
    assert most_lines(window, [*losses, more]) <= most
    assert most_lines(window, [0, *losses]) == most
    assert most_lines(window, [max([0, *losses]) + 2]) < most or most == 1
    assert most_lines(window, [0, 1]) == window
    assert most_lines(512, [MAX_LOSSES - 1]) == 1


def test_replicas_answer_as_one_engine_does(tmp_path):
    write_lines(tmp_path / "in", 90)
    run = Run(tmp_path, Replicas(BatchLink)).wait()
    assert run.status == 0
    assert answers(run.outputs) == plain(tmp_path, 90)
    assert run.asked == list(range(90))
    assert all(len(link.llm.driver.submitted) >= 10 for link in run.links.started)


@pytest.mark.parametrize("fault", ["die", "hang", "stop"])
def test_a_lost_replica_costs_only_its_unfinished_lines(tmp_path, fault):
    write_lines(tmp_path / "in", 120, tokens=10)
    run = Run(tmp_path, Replicas(BatchLink, step_s=0.02), stall_s=STALL_S if fault == "hang" else NEVER_S)
    victim = run.busy(1)
    while len(victim.llm.driver.submitted) <= 8:  # until it has finished a line
        time.sleep(0.002)
    run.busy(1)
    if fault == "stop":
        victim.llm.driver.die(MemoryError("the engine is out of memory"))
    else:
        getattr(victim, fault)()
    run.wait()
    assert run.status == 0
    assert answers(run.outputs) == plain(tmp_path, 120)
    twice = [line for line in range(120) if run.asked.count(line) > 1]
    assert set(run.asked) == set(range(120)) and 1 <= len(twice) <= 8
    assert set(twice) <= {request.sampling.seed for request in victim.llm.driver.submitted}


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_line_that_ends_its_engines_is_the_only_error(tmp_path, replicas):
    write_lines(tmp_path / "in", 60, poison=(17,))
    run = Run(tmp_path, Replicas(PoisonedLink), replicas).wait()
    assert run.status == 1
    statuses = [each["response"]["status_code"] for each in run.outputs]
    assert statuses == [200] * 17 + [500] + [200] * 42
    assert run.outputs[17]["response"]["body"]["error"]["code"] == "replica_lost"
    assert sum(link.dead for link in run.links.started) == MAX_LOSSES


def test_the_run_ends_when_no_replica_answers_any_more(tmp_path, capsys):
    write_lines(tmp_path / "in", 200, tokens=20)
    links = Replicas(BatchLink, step_s=0.005)
    run = Run(tmp_path, links, replicas=2)
    until(lambda: len(run.asked) > 40)  # 200 lines, 8 at once on each replica: some are finished

    def broken(link: BatchLink) -> None:
        link.start_error = "no GPU is left"

    links.prepare = broken
    for link in list(links.started):
        link.die()
    run.wait()
    assert run.status == 1 and "run the same command again" in capsys.readouterr().err
    shutil.copytree(tmp_path / "out.journal", tmp_path / "plain.journal")
    links.prepare = lambda link: None
    before = len(links.started)
    again = Run(tmp_path, links, replicas=2).wait()
    assert again.status == 0 and len(again.outputs) == 200
    later = [request for link in links.started[before:] for request in link.llm.driver.submitted]
    assert 0 < len(later) < 200
    assert answers(again.outputs) == plain(tmp_path, 200, len(later))  # the local command continues, too


def test_a_model_that_no_replica_can_load_ends_the_run(tmp_path, capsys):
    write_lines(tmp_path / "in", 3)
    links = Replicas(BatchLink)
    links.prepare = lambda link: setattr(link, "start_error", "model /no/such: accepted: a folder")
    run = Run(tmp_path, links, replicas=2).wait()
    assert run.status == 1 and "/no/such" in capsys.readouterr().err


def test_a_replica_that_comes_late_gets_waiting_lines(tmp_path):
    write_lines(tmp_path / "in", 120, tokens=10)
    gate = threading.Event()
    links = Replicas(BatchLink, step_s=0.005)
    links.prepare = lambda link: setattr(link, "start_gate", gate) if link.index else None
    run = Run(tmp_path, links, replicas=2)
    run.busy(0)
    gate.set()
    run.wait()
    assert run.status == 0 and run.asked == list(range(120))
    assert all(len(link.llm.driver.submitted) > 8 for link in links.started)


@pytest.mark.parametrize("seed", [1, 2])
def test_any_faults_lose_and_double_no_answer(tmp_path, seed):
    """Replicas die, hang and break at random."""
    draw = random.Random(seed)
    write_lines(tmp_path / "in", 150, tokens=20)
    run = Run(tmp_path, Replicas(BatchLink, step_s=0.004), window=64, stall_s=STALL_S)
    for _ in range(4):
        victim = run.busy(draw.randrange(3))
        time.sleep(draw.uniform(0, 0.1))
        match draw.choice(["die", "hang", "stop"]):
            case "stop":
                victim.llm.driver.die(MemoryError("the engine is out of memory"))
            case fault:
                getattr(victim, fault)()
    run.wait()
    assert run.status == 0
    assert answers(run.outputs) == plain(tmp_path, 150)
