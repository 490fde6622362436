"""The limit of a batch's requests under way: their number, and the bytes of their bodies."""

import asyncio
import collections


class Window:
    """The requests under way, of all batches of an engine. Waiting requests enter in their order.

    A request larger than the whole window enters alone. Used on one event loop.

    Args:
      requests: maximum number of requests.
      body_bytes: maximum number of bytes of their bodies.
    """

    def __init__(self, requests: int, body_bytes: int = 64 * 1024 * 1024):
        self._requests, self._bytes = requests, body_bytes
        self._used = self._used_bytes = 0
        self._waiting: collections.deque[tuple[asyncio.Future[None], int]] = collections.deque()

    async def enter(self, size: int) -> None:
        """Wait for a place for a body of `size` bytes, and take the place."""
        if not self._waiting and self._fits(size):
            self._take(size)
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((place, size))
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.leave(size)
            raise

    def leave(self, size: int) -> None:
        """Give a place back."""
        self._used -= 1
        self._used_bytes -= size
        while self._waiting:
            place, size = self._waiting[0]
            if not place.done():
                if not self._fits(size):
                    return
                self._take(size)
                place.set_result(None)
            self._waiting.popleft()

    def _fits(self, size: int) -> bool:
        return not self._used or (self._used < self._requests and self._used_bytes + size <= self._bytes)

    def _take(self, size: int) -> None:
        self._used += 1
        self._used_bytes += size
