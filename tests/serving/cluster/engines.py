"""Replicas of real engines in this process, and pages that fail on their way where a test wants them to."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import paths
import toy
from replicas import until

from jaxflow import LLM
from jaxflow.config import EngineConfig
from serving.cluster.apart import ApartRule
from serving.cluster.driver import ClusterDriver
from serving.cluster.link import LinkLost
from serving.cluster.messages import EndLoan
from serving.cluster.model import ClusterModel
from serving.cluster.page_exchange import PageExchange, TransferConfig
from serving.cluster.page_transport import TransferFailed
from serving.cluster.replica import Replica
from serving.cluster.wanted import WantedReplicas

BLOCK = 16
CONFIG = EngineConfig(
    model=str(paths.MODELS / "stories260K"),
    max_num_batched_tokens=32,
    step_sizes="32",  # all steps are one program
    max_num_seqs=4,
    max_model_len=256,
    block_size=BLOCK,
    num_kv_pages=64,
    kv_offloading_size=0.02,
)
SOON_S = 0.3  # the timeout of a transfer that a fault lets fail
NEVER_S = 600.0  # the timeout of a transfer that must not fail, however busy the machine is


def make_engine() -> LLM:
    """An engine that always loads a page from its host tier."""
    llm = LLM.from_config(CONFIG, progress=False)
    llm.driver.call(lambda loop: setattr(loop.offload.policy, "costs", toy.ALWAYS_LOAD)).result()
    return llm


class Network:
    """The offers of all processes. `on_fetch` may raise, wait, or return other pages."""

    def __init__(self) -> None:
        self.offers: dict[int, list[np.ndarray]] = {}
        self.on_fetch: Callable = self.arrive

    async def arrive(self, number: int, timeout_s: float) -> list[np.ndarray]:
        if number not in self.offers:
            await asyncio.sleep(timeout_s)
            raise TransferFailed("no pages")
        return self.offers.pop(number)


class MemoryTransport:
    """`PageTransport` over a `Network`."""

    address = "here"

    def __init__(self, network: Network):
        self._network = network

    def offer(self, number: int, pages: Sequence[np.ndarray], keep_s: float) -> None:
        self._network.offers[number] = list(pages)

    async def fetch(self, address: str, number: int, lengths: Sequence[int], timeout_s: float):
        pages = await self._network.on_fetch(number, timeout_s)
        assert [len(page) for page in pages] == list(lengths)
        return pages


class EngineLink:
    """A link to an engine of this process. A killed engine aborts what runs, and serves the next link."""

    def __init__(self, llm: LLM, network: Network, timeout_s: float):
        self.llm, self.network = llm, network
        self.dead = False
        self.lose_acknowledgements = False
        transport = MemoryTransport(network)
        self.exchange = PageExchange(llm.driver, transport, TransferConfig(True, timeout_s))
        self._replica: Replica | None = None

    def die(self) -> None:
        self.dead = True

    def _check(self) -> None:
        if self.dead:
            raise LinkLost("the process died")

    async def describe(self):
        self._replica = Replica(self.llm, self.exchange)
        return self._replica.describe()

    async def take(self, orders, aborted) -> None:
        self._check()
        if self.lose_acknowledgements:
            orders = [order for order in orders if not isinstance(order, EndLoan)]
        self._replica.take(orders, aborted)
        self._check()

    async def poll(self, wait_s: float):
        self._check()
        report = await self._replica.poll(min(wait_s, 0.01))
        self._check()
        return report

    async def close(self) -> None:
        self._check()

    def kill(self) -> None:
        self.dead = True
        self.llm.driver.call(lambda loop: [loop.abort(name) for name in loop.request_ids])


class Engines:
    """The links of a driver: replica 0 answers, and replica 1 computes prompts."""

    def __init__(self, engines: Sequence[LLM], timeout_s: float):
        self.engines, self.network, self.timeout_s = engines, Network(), timeout_s
        self.links: dict[int, EngineLink] = {}

    def launch(self, config: EngineConfig, index: int) -> EngineLink:
        self.links[index] = EngineLink(self.engines[index], self.network, self.timeout_s)
        return self.links[index]


@contextlib.contextmanager
def apart(engines: Sequence[LLM], timeout_s: float = SOON_S) -> Iterator[tuple[ClusterModel, Engines]]:
    """A replica that answers, and a replica that computes all prompts. timeout_s: of a transfer."""
    links = Engines(engines, timeout_s)
    wanted = WantedReplicas(1, CONFIG, prefill_replicas=1)
    router = ClusterDriver(wanted, links.launch, stall_s=5.0, drain_s=5.0, rule=ApartRule.ALWAYS, seed=0)
    model = ClusterModel(router)
    try:
        until(lambda: [state.state for state in router.replicas()] == ["serving"] * 2)
        yield model, links
    finally:
        model.close()
