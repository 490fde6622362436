"""Replicas of a fake engine in this process, whose links fail where a test wants them to."""

import asyncio
import contextlib
import hashlib
import threading
import time
from collections.abc import Iterator, Sequence

from fake_llm import FakeDriver, FakeLLM

from jaxflow.config import EngineConfig
from jaxflow.request import Delta, Finished, Request, SamplingParams, Started
from serving.batch_engine import served_endpoints
from serving.cluster.batch_replica import BatchReplica
from serving.cluster.driver import ClusterDriver
from serving.cluster.link import LinkLost, StartFailed
from serving.cluster.model import ClusterModel
from serving.cluster.replica import Replica
from serving.cluster.wanted import WantedReplicas

CONFIG = EngineConfig(model="fake", plan="sequential")


def token_at(seed: int, position: int) -> int:
    """The draw of the fake engine: a function of seed and position, as law 5 asks."""
    return 3 + int.from_bytes(hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=4).digest()) % 290


def answer(request: Request, index: int = 0) -> list[int]:
    """The answer to a request without an end token."""
    sampling, begin = request.sampling, len(request.prompt_token_ids)
    return [token_at(sampling.seed + index, begin + i) for i in range(sampling.max_tokens)]


class DrawingDriver(FakeDriver):
    """A fake driver that draws by position. Only `slots` sequences run at once."""

    def __init__(self, *args, slots: int = 1000, **driver):
        self.slots = slots
        super().__init__(*args, **driver)

    def stats(self):
        found = super().stats()
        found.waiting_requests = max(0, len(self._running) - self.slots)
        return found

    def _step(self, run) -> list:
        return super()._step(run) if run in self._running[: self.slots] else []

    def token(self, run) -> int:
        return token_at(run.request.sampling.seed + run.index, len(run.request.prompt_token_ids) + run.sent)


class FakeLink:
    """A link to a fake engine of this process. `die`, `hang` and `fail` break it."""

    def __init__(self, config: EngineConfig, index: int, **driver):
        self.config, self.index = config, index
        self.llm = FakeLLM()
        self.llm.driver.close()
        self.llm.driver = DrawingDriver(self.llm.max_model_len, self.llm.tokenizer.eos_token_id, **driver)
        self.broken: asyncio.Future | None = None
        self.killed = self.dead = self.hung = False
        self.start_error: str | None = None
        self.start_gate = threading.Event()
        self.start_gate.set()
        self._replica: Replica | None = None

    def die(self) -> None:
        """End the process, as SIGKILL does."""
        self.dead = True

    def hang(self) -> None:
        """Stop the process, as SIGSTOP does."""
        self.hung = True
        self.llm.driver.gate.clear()

    async def _check(self) -> None:
        while self.hung and not self.killed:
            await asyncio.sleep(0.01)
        if self.dead or self.killed:
            self.llm.driver.gate.clear()
            raise LinkLost("the process died")

    async def describe(self):
        await asyncio.to_thread(self.start_gate.wait)
        await self._check()
        if self.start_error is not None:
            raise StartFailed(self.start_error)
        self._replica = await self.served()
        return self._replica.describe()

    async def served(self):
        return Replica(self.llm)

    async def take(self, orders, aborted) -> None:
        await self._check()
        self._replica.take(orders, aborted)
        await self._check()

    async def poll(self, wait_s: float):
        await self._check()
        polling = asyncio.ensure_future(self._replica.poll(wait_s))
        while not polling.done():
            await asyncio.wait({polling}, timeout=0.01)
            if self.dead or self.hung:
                polling.cancel()
                await self._check()
        return polling.result()

    async def close(self) -> None:
        await self._check()

    def kill(self) -> None:
        if not self.killed:
            self.killed = True
            threading.Thread(target=self.llm.driver.close, daemon=True).start()


class BatchLink(FakeLink):
    """A link to a fake engine that answers lines."""

    async def served(self):
        return BatchReplica(self.llm, await served_endpoints(self.llm, ()))


class Replicas:
    """The links of a driver, the running ones by replica."""

    def __init__(self, link: type[FakeLink] = FakeLink, **driver):
        self._link, self._driver = link, driver
        self.started: list[FakeLink] = []
        self.prepare = lambda link: None

    def launch(self, config: EngineConfig, index: int) -> FakeLink:
        link = self._link(config, index, **self._driver)
        self.prepare(link)
        self.started.append(link)
        return link

    def running(self, index: int) -> FakeLink:
        return next(link for link in reversed(self.started) if link.index == index)


@contextlib.contextmanager
def cluster(replicas: int = 2, *, stall_s: float = 1.0, drain_s: float = 5.0, **driver) -> Iterator[tuple]:
    """A running model behind a router, and the links."""
    links = Replicas(**driver)
    router = ClusterDriver(
        WantedReplicas(replicas, CONFIG), links.launch, stall_s=stall_s, drain_s=drain_s, start_s=3.0, seed=0
    )
    model = ClusterModel(router)
    try:
        until(lambda: sum(state.state == "serving" for state in router.replicas()) == replicas)
        yield model, links
    finally:
        model.close()


class Box:
    """The events of one request."""

    def __init__(self, n: int = 1):
        self.events: list = []
        self._left = n
        self._ended = threading.Event()
        self.first = threading.Event()

    def post(self, events) -> None:
        self.events += events
        if any(isinstance(event, Delta) for event in events):
            self.first.set()
        for event in events:
            if isinstance(event, Finished):
                self._left -= 1
                if not self._left:
                    self._ended.set()

    def wait(self) -> "Box":
        assert self._ended.wait(30), "a request was lost"
        return self

    def ids(self, index: int = 0) -> list[int]:
        deltas = [event for event in self.events if isinstance(event, Delta) and event.index == index]
        return [token for event in deltas for token in event.token_ids]

    @property
    def ends(self) -> list[Finished]:
        return [event for event in self.events if isinstance(event, Finished)]

    @property
    def starts(self) -> list[Started]:
        return [event for event in self.events if isinstance(event, Started)]


def submit(
    model: ClusterModel, name: str, prompt: Sequence[int] = (5, 6, 7), **sampling
) -> tuple[Request, Box]:
    """Submit a request that runs to its last token."""
    settings = {"max_tokens": 20, "ignore_eos": True, "seed": 1} | sampling
    request = model.request(list(prompt), SamplingParams(**settings), request_id=name)
    box = Box(request.sampling.n)
    model.driver.submit(request, box)
    return request, box


def until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)
