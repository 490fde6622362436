"""Tokenization on a few threads, with a bound on the bytes of all prompts in work."""

import asyncio
import concurrent.futures
import contextvars
import time
from collections.abc import Callable

from serving.frontend.refusal import Code, Refusal

MAX_BYTES = 64 << 20  # of the prompts that are tokenized or wait for it, over all callers
SMALL_BYTES = 16 << 10  # larger prompts have threads of their own, so that small ones never wait behind them
THREADS = 2  # of either kind
RETRY_S = 1.0
QUICK_BYTES = 4 << 10
QUICK_S = 0.002  # CPU time of a quick prompt's work, below which the next one runs on the event loop's thread
SLOW_S = 0.010  # a quick prompt that took longer on this thread sends all prompts to the other threads
PAUSE_S = 1.0  # for this time; a garbage collection within the work looks like a slow prompt, too


class PromptWork:
    """Two small pools of threads for the work on prompts, used from the event loop's thread.

    A change of threads costs as much as the work on a short prompt. So quick prompts run on the event loop's
    thread itself, once one of them was measured to be short.

    Work whose caller is cancelled, or whose deadline passes, is dropped if it has not begun.
    """

    def __init__(self, max_bytes: int = MAX_BYTES):
        self._max_bytes = max_bytes
        self._bytes = 0
        self._quick = False
        self._paused_until_s = 0.0
        self._pools = {
            small: concurrent.futures.ThreadPoolExecutor(THREADS, thread_name_prefix="prompt")
            for small in (True, False)
        }

    @property
    def bytes_in_work(self) -> int:
        """Return the bytes of the prompts that are in work or wait."""
        return self._bytes

    async def run[T](self, size: int, work: Callable[[], T]) -> T:
        """Return the result of `work`, which may run on a thread. `size`: the bytes of the prompt.

        Raises:
          Refusal: the prompts of all callers in work have too many bytes.
        """
        quick = size <= QUICK_BYTES
        if quick and self._quick and time.monotonic() >= self._paused_until_s:
            begun_s = time.thread_time()
            try:
                return work()
            finally:
                if time.thread_time() - begun_s > SLOW_S:
                    self._paused_until_s = time.monotonic() + PAUSE_S
        if quick:
            work = self._measured(work)
        if self._bytes and self._bytes + size > self._max_bytes:
            raise Refusal(
                Code.QUEUE_FULL,
                f"prompts of {self._bytes} bytes are being tokenized, and {self._max_bytes} are the maximum",
                retry_after_s=RETRY_S,
            )
        self._bytes += size
        loop = asyncio.get_running_loop()
        future = self._pools[size <= SMALL_BYTES].submit(contextvars.copy_context().run, work)
        # A cancelled caller's work that has begun still holds its prompt until its end.
        future.add_done_callback(lambda _: _call_on(loop, self._release, size))
        return await asyncio.wrap_future(future)

    def _measured[T](self, work: Callable[[], T]) -> Callable[[], T]:
        def measured() -> T:
            begun_s = time.thread_time()
            try:
                return work()
            finally:
                self._quick = time.thread_time() - begun_s < QUICK_S

        return measured

    def _release(self, size: int) -> None:
        self._bytes -= size


def _call_on(loop: asyncio.AbstractEventLoop, function: Callable[[int], None], size: int) -> None:
    if not loop.is_closed():  # the process ends
        loop.call_soon_threadsafe(function, size)
