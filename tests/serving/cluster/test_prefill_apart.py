"""Prompts computed by another engine: the tokens stay the same, whatever
happens to the pages on their way.
"""

import asyncio
import itertools
import threading

import numpy as np
import pytest
from engines import BLOCK, NEVER_S, MemoryTransport, Network, apart, make_engine
from hurry import OFTEN, compiled_with
from replicas import Box, until

from jaxflow.request import FinishReason, InvalidRequest, SamplingParams, StructuredOutputsParams
from serving.cluster.page_exchange import PageExchange, TransferConfig
from serving.cluster.page_transport import TransferFailed

WRONG = StructuredOutputsParams(regex="a(")
salts = itertools.count()
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(3, 500, length).tolist() for length in (BLOCK, 40, 64, 65, 90, 120)]
KINDS = [{"temperature": 0.0}, {"temperature": 0.9}, {"temperature": 0.8, "top_k": 20, "logprobs": 2}]


@pytest.fixture(scope="module")
def engines():
    made = [make_engine(), make_engine()]
    yield made
    for llm in made:
        llm.close()


def settings_of(i: int) -> SamplingParams:
    return SamplingParams(max_tokens=12, ignore_eos=True, seed=i, **KINDS[i % len(KINDS)])


def submit(model, salt: str, prompts=PROMPTS) -> list[Box]:
    boxes = []
    for i, prompt in enumerate(prompts):
        box = Box()
        request = model.request(prompt, settings_of(i), request_id=f"{salt}/{i}", cache_salt=salt)
        model.driver.submit(request, box)
        boxes.append(box)
    return boxes


@pytest.fixture(scope="module")
def together(engines):
    """The tokens of one engine."""
    return [box.wait().ids() for box in submit(engines[0], "together")]


def computed(llm) -> int:
    return llm.driver.stats().prompt_tokens


def free(engines) -> list[int]:
    return [llm.driver.stats().kv_pages_free for llm in engines]


def check(model, links, boxes, together) -> None:
    """Check the tokens, one end of each request, and that nothing is left of a loan or a page."""
    assert [box.wait().ids() for box in boxes] == together
    for box in boxes:
        assert [end.reason for end in box.ends] == [FinishReason.LENGTH] and len(box.starts) == 1
    until(lambda: all(state.open_loans == 0 for state in model.driver.replicas()))
    until(lambda: all(link.exchange.open_loans == 0 for link in links.links.values()))
    until(lambda: free(links.engines) == [64, 64])
    assert not any(model.driver._queued_tokens.values())
    assert not any(state.requests for state in model.driver.replicas())


def test_another_engine_computes_the_full_pages(engines, together):
    with apart(engines, NEVER_S) as (model, links):
        before = [computed(llm) for llm in engines]
        boxes = submit(model, "apart")
        check(model, links, boxes, together)
        here, there = (computed(llm) - was for llm, was in zip(engines, before, strict=True))
        full = [(len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS]
        assert there == sum(full) and here == sum(map(len, PROMPTS)) - sum(full)
        moved = sum(tokens > 0 for tokens in full)
        assert (model.driver.transfers.done, model.driver.transfers.failed) == (moved, 0)
        assert [box.starts[0].cached_prompt_tokens for box in boxes] == [0] * len(PROMPTS)
        answered = engines[0].driver.stats().completion_tokens
        until(lambda: model.driver.stats().completion_tokens == answered)
        again = submit(model, "apart")  # both engines have the prompts now, and no page moves
        check(model, links, again, together)
        assert model.driver.transfers.done == moved
        assert [box.starts[0].cached_prompt_tokens for box in again] == full


def test_an_answer_has_its_form_at_another_engine(engines):
    form = StructuredOutputsParams(regex="[a-z]{4,9}")
    wanted = SamplingParams(max_tokens=12, seed=3, structured_outputs=form)

    def ids(model, prompt, name):
        box = Box()
        model.driver.submit(model.request(prompt, wanted, request_id=name, cache_salt=name), box)
        return box.wait().ids()

    prompts = (PROMPTS[0], PROMPTS[3])  # no page moves, and pages move
    with compiled_with(OFTEN):
        alone = [ids(engines[0], prompt, f"form alone {i}") for i, prompt in enumerate(prompts)]
        with apart(engines, NEVER_S) as (model, _):
            assert [ids(model, prompt, f"form apart {i}") for i, prompt in enumerate(prompts)] == alone
            with pytest.raises(InvalidRequest, match="unclosed"):
                model.request([5], SamplingParams(structured_outputs=WRONG), request_id="wrong")


class Fault:
    """A fault that strikes each transfer."""

    def __init__(self, model, links):
        self.model, self.links, self.network = model, links, links.network
        self.arrive = links.network.on_fetch

    async def changed_bytes(self, number, timeout_s):
        pages = await self.arrive(number, timeout_s)
        pages[-1][7] ^= 1
        return pages

    async def late(self, number, timeout_s):
        await asyncio.sleep(timeout_s)
        raise TransferFailed("no pages")

    async def refused(self, number, timeout_s):
        raise TransferFailed("the connection is closed")

    async def program_error(self, number, timeout_s):
        raise ZeroDivisionError

    async def sender_dies(self, number, timeout_s):
        self.links.links[1].die()
        raise TransferFailed("the connection is closed")

    async def sender_dies_after_sending(self, number, timeout_s):
        self.links.links[1].die()
        return await self.arrive(number, timeout_s)

    async def receiver_dies(self, number, timeout_s):
        self.network.on_fetch = self.arrive
        self.links.links[0].die()
        return await self.arrive(number, timeout_s)

    async def receiver_dies_after_receiving(self, number, timeout_s):
        self.network.on_fetch = self.arrive
        pages = await self.arrive(number, timeout_s)
        self.links.links[0].die()
        return pages


@pytest.mark.parametrize("name", [name for name in vars(Fault) if not name.startswith("_")])
def test_the_tokens_outlive_a_fault_of_a_transfer(engines, together, name):
    with apart(engines) as (model, links):
        links.network.on_fetch = getattr(Fault(model, links), name)
        check(model, links, submit(model, f"{name}{next(salts)}", PROMPTS[:4]), together[:4])
        transfers = model.driver.transfers
        if name in ("changed_bytes", "late", "refused", "program_error", "sender_dies"):
            assert transfers.failed > 0 and transfers.done == 0
        if "dies" in name:
            until(lambda: model.driver.replicas()["receiver" not in name].restarts > 0)
        assert model.driver.interrupted == 0


def test_lent_pages_outlive_their_places(engines, together):
    """The prefill engine gives all places of the pages, on the device and on the host, to others."""
    with apart(engines, NEVER_S) as (model, links):
        arrive, waiting, go = links.network.on_fetch, [], threading.Event()

        async def wait(number, timeout_s):
            waiting.append(number)
            while not go.is_set():
                await asyncio.sleep(0.01)
            return await arrive(number, timeout_s)

        links.network.on_fetch = wait
        boxes = submit(model, "reused")
        until(lambda: len(waiting) == 5)
        others = [RNG.integers(3, 500, 120).tolist() for _ in range(12)]  # 96 pages, and the device has 64
        for box in submit(engines[1], "others", others):
            box.wait()
        engines[1].driver.call(evict_all).result()
        go.set()
        check(model, links, boxes, together)
        assert model.driver.transfers.done == 5


def evict_all(loop) -> None:
    store = loop.offload.policy.store
    assert store._evict(store.capacity_bytes) and not len(store)


def test_a_sender_that_dies_before_it_lends(engines, together):
    with apart(engines) as (model, links):
        sender = links.links[1]
        boxes = submit(model, "before")
        until(lambda: sender.exchange.open_loans or model.driver.replicas()[1].requests)
        sender.die()
        check(model, links, boxes, together)


def test_a_lost_acknowledgement_ends_with_the_lease(engines, together):
    with apart(engines, timeout_s=1.0) as (model, links):
        links.links[1].lose_acknowledgements = True
        boxes = submit(model, "lost")
        check(model, links, boxes, together)
        assert links.links[1].exchange._loans.expired == model.driver.transfers.done == 5


def test_the_first_loans_open_together(engines):
    """A loan ends by its acknowledgement, also if another prompt's loan opens at the same time."""
    lender = engines[1]
    prompts = [RNG.integers(3, 500, 40).tolist() for _ in range(4)]
    for box in submit(lender, "first", prompts):
        box.wait()
    exchange = PageExchange(lender.driver, MemoryTransport(Network()), TransferConfig())

    async def lend():
        return await asyncio.gather(*(exchange.lend(prompt, "first", 0) for prompt in prompts))

    loans = asyncio.run(lend())
    assert exchange.open_loans == len(prompts)
    for loan in loans:
        exchange.end(loan.number)
    assert exchange.open_loans == 0


def test_a_request_that_ends_while_its_pages_move_leaves_nothing(engines):
    with apart(engines, NEVER_S) as (model, links):
        fetching = []

        async def wait(number, timeout_s):
            fetching.append(number)
            await asyncio.sleep(100)

        links.network.on_fetch = wait
        boxes = submit(model, "aborted")[1:]
        until(lambda: len(fetching) == len(boxes))
        for i in range(len(boxes)):
            model.driver.abort(f"aborted/{i + 1}")
        assert {end.reason for box in boxes for end in box.wait().ends} == {FinishReason.ABORT}
        until(lambda: all(link.exchange.open_loans == 0 for link in links.links.values()))
        until(lambda: free(engines) == [64, 64])
        assert all(box.ids() == [] for box in boxes)


def test_after_a_failure_prompts_stay_together_for_a_while(engines, together):
    with apart(engines) as (model, links):
        arrive, links.network.on_fetch = links.network.on_fetch, Fault(model, links).refused
        check(model, links, submit(model, "failing"), together)
        failed = model.driver.transfers.failed
        links.network.on_fetch = arrive
        check(model, links, submit(model, "paused"), together)
        assert (model.driver.transfers.failed, model.driver.transfers.done) == (failed, 0)
