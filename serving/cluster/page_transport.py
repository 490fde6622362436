"""The way of KV pages between two processes, by `jax.experimental.transfer`.

Tried with JAX 0.11.2 on CPUs (docs/prefill-apart.md): a sender that dies fails the pull at
once, and a receiver that dies costs the sender nothing. But a pull from an address without a process, from a
stopped process, or of a number that was pulled before never ends, and its `timeout` does not end it. So
`fetch` has a limit of its own, and gives up the arrays of a pull that did not end. An offer that nobody pulls
leaves the sender's memory at the first call after its end.
"""

import asyncio
import datetime
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

POLL_S = 0.0005


class TransferFailed(RuntimeError):
    """Pages did not arrive, or not as they were sent. The message is one line."""


class PageTransport(Protocol):
    """Sends and receives the bytes of pages. One event loop uses it."""

    @property
    def address(self) -> str:
        """The address of this process, for `fetch` in another one."""
        ...

    def offer(self, number: int, pages: Sequence[np.ndarray], keep_s: float) -> None:
        """Let another process fetch pages, uint8 [length] each, once and within `keep_s`."""
        ...

    async def fetch(
        self, address: str, number: int, lengths: Sequence[int], timeout_s: float
    ) -> list[np.ndarray]:
        """Return the pages of an offer, uint8 [length] each. Raises: TransferFailed."""
        ...


class JaxTransport:
    """`PageTransport` over JAX's transfer server, between the CPU memories of the processes.

    Args:
      host: the address at which other processes reach this one.
    """

    def __init__(self, host: str):
        import jax
        from jax.experimental import transfer

        self._jax = jax
        self._device = jax.devices("cpu")[0]
        address = f"[{host}]:0" if ":" in host else f"{host}:0"
        self._server = transfer.start_transfer_server(self._device.client, address, [address])
        self._connections: dict[str, Any] = {}

    @property
    def address(self) -> str:
        """See `PageTransport.address`."""
        return self._server.address()

    def offer(self, number: int, pages: Sequence[np.ndarray], keep_s: float) -> None:
        """See `PageTransport.offer`."""
        end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=keep_s)
        self._server.await_pull(number, self._jax.device_put(list(pages), self._device), timeout=end)

    async def fetch(
        self, address: str, number: int, lengths: Sequence[int], timeout_s: float
    ) -> list[np.ndarray]:
        """See `PageTransport.fetch`."""
        sharding = self._jax.sharding.SingleDeviceSharding(self._device)
        shapes = [self._jax.ShapeDtypeStruct((n,), np.uint8, sharding=sharding) for n in lengths]
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        try:
            if address not in self._connections:
                self._connections[address] = self._server.connect(address)
            arrays = self._connections[address].pull(number, shapes)
            while not all(array.is_ready() for array in arrays):
                if loop.time() > end_s:
                    raise TransferFailed(f"no pages from {address} within {timeout_s:g} s")
                await asyncio.sleep(POLL_S)
            return [np.asarray(array) for array in arrays]
        except TransferFailed:
            self._connections.pop(address, None)
            raise
        except Exception as error:  # jaxlib's errors have no common type of their own
            self._connections.pop(address, None)
            raise TransferFailed(f"pages from {address}: {str(error).splitlines()[0]}") from error
