"""KV pages from the host memory of one engine to the host memory of another one.

The prefill engine copies the pages of a prompt out of its host tier and lends the copies. The decode engine
fetches them, puts them into its own host tier, and finds them there by their names as if it had computed
them. A page that is missing, late or damaged is therefore computed. Pages of the cache are never lent: an
engine may use them for another sequence at any time.
"""

import asyncio
import secrets
import time
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from jaxflow.kv.prefix import page_names
from jaxflow.kv.tiers.host_store import Key, key_of
from jaxflow.request import Request, SamplingParams
from jaxflow.scheduler.config import prefix_salt
from serving.cluster.loans import Loans
from serving.cluster.messages import Loan
from serving.cluster.page_transport import PageTransport, TransferFailed

if TYPE_CHECKING:
    from jaxflow.engine.driver import Driver
    from jaxflow.engine.loop import Loop

STORE_S = 1.0  # wait for pages on their way to the host memory
STORE_POLL_S = 0.001
LENT_SHARE = 0.5  # the limit of all open loans, as a share of the host tier's size
LEASE_TIMEOUTS = 3  # the lease, in timeouts: the loan waits at the router before the fetch begins


class TransferConfig(msgspec.Struct, frozen=True):
    """How replicas exchange pages.

    Attributes:
      checksums: compare each page with a CRC-32 of the sender.
      timeout_s: seconds until a transfer has failed.
    """

    checksums: bool = False
    timeout_s: float = 10.0


class PageExchange:
    """Lends and borrows the pages of one engine, which has a host tier. One event loop uses it.

    Args:
      driver: of the engine.
    """

    def __init__(self, driver: "Driver", transport: PageTransport, config: TransferConfig):
        self._driver, self._transport, self._config = driver, transport, config
        self._shapes: list[Any] | None = None
        self._loans: Loans | None = None

    @property
    def open_loans(self) -> int:
        """Return the number of loans that are neither acknowledged nor over."""
        if self._loans is None:
            return 0
        self._loans.expire(time.monotonic())
        return len(self._loans)

    def seconds_per_token(self) -> float:
        """Return the measured time of a token's prefill."""
        return self._driver.call(lambda loop: _tier(loop).policy.costs.seconds_per_token).result()

    # ---- lend

    async def lend(self, prompt: Sequence[int], cache_salt: str, skip_pages: int) -> Loan:
        """Lend the pages of a computed prompt, without the first ones. Raises: TransferFailed."""
        scheduling = self._driver.scheduling
        salt = prefix_salt(scheduling, Request("", tuple(prompt), SamplingParams(), cache_salt=cache_salt), 0)
        assert salt is not None
        names = page_names(prompt, salt, scheduling.block_size)[skip_pages:]
        keys = [key_of(group, name) for name in names for group in range(len(scheduling.windows))]
        found = await self._stored(keys)
        if not found:
            raise TransferFailed("no page of the prompt reached the host memory")
        payloads = await asyncio.to_thread(lambda: [_payload(page) for page in found.values()])
        checksums = await asyncio.to_thread(self._checksums, payloads)
        lengths = tuple(len(payload) for payload in payloads)
        number = secrets.randbits(63)
        if self._loans is None:
            capacity = await self._call(lambda loop: _tier(loop).policy.store.capacity_bytes)
            if self._loans is None:  # another prompt's loan may be the first one by now
                lease_s = LEASE_TIMEOUTS * self._config.timeout_s
                self._loans = Loans(int(LENT_SHARE * capacity), lease_s)
        if not self._loans.open(number, sum(lengths), time.monotonic()):
            raise TransferFailed(f"{self._loans.bytes} bytes are lent already")
        self._transport.offer(number, payloads, self._loans.lease_s)
        return Loan(number, self._transport.address, tuple(found), lengths, checksums)

    def end(self, number: int) -> None:
        """Take the acknowledgement of a loan."""
        if self._loans is not None:
            self._loans.end(number)

    async def _stored(self, keys: list[Key]) -> dict[Key, Any]:
        """Return the pages that reach the host memory. A page on its way arrives soon after the last step."""
        end_s = time.monotonic() + STORE_S
        while True:
            found, busy = await self._call(lambda loop: (_tier(loop).find(keys), _tier(loop).busy))
            if len(found) == len(keys) or not busy or time.monotonic() > end_s:
                return found
            await asyncio.sleep(STORE_POLL_S)

    # ---- borrow

    async def borrow(self, loan: Loan) -> None:
        """Put the pages of a loan into the host memory of this engine. Raises: TransferFailed."""
        shapes = self._shapes = self._shapes or await self._call(lambda loop: loop.executor.page_shapes())
        timeout_s = self._config.timeout_s
        payloads = await self._transport.fetch(loan.address, loan.number, loan.lengths, timeout_s)
        pages = await asyncio.to_thread(self._pages, loan, payloads, shapes)
        await self._call(lambda loop: _tier(loop).give(pages))

    def _pages(self, loan: Loan, payloads: Sequence[np.ndarray], shapes: list[Any]) -> dict[Key, Any]:
        """Return the pages of the bytes. Raises: TransferFailed."""
        from jaxflow.kv.tiers.page import from_bytes, page_size

        if loan.checksums and self._checksums(payloads) != loan.checksums:
            raise TransferFailed("the bytes of a page changed on their way")
        if any(len(one) != page_size(shapes[key[0]]) for key, one in zip(loan.keys, payloads, strict=True)):
            raise TransferFailed("the sender has pages of another size")
        return {key: from_bytes(one, shapes[key[0]]) for key, one in zip(loan.keys, payloads, strict=True)}

    # ----

    def _checksums(self, payloads: Sequence[np.ndarray]) -> tuple[int, ...]:
        return tuple(zlib.crc32(one) for one in payloads) if self._config.checksums else ()

    async def _call(self, work: Callable[["Loop"], Any]) -> Any:
        return await asyncio.wrap_future(self._driver.call(work))


def _tier(loop: "Loop") -> Any:
    assert loop.offload is not None, "replicas that exchange pages have a host tier"
    return loop.offload


def _payload(page: Any) -> np.ndarray:
    """Return the bytes of a page, uint8 [length], as a copy."""
    from jaxflow.kv.tiers.page import to_bytes

    return np.concatenate([words.reshape(-1).view(np.uint8) for words in to_bytes(page)])
