"""Cancellation of a request whose caller has disconnected."""

import asyncio
from types import TracebackType

from serving.http.exchange import Exchange


class Disconnected(asyncio.CancelledError):
    """The caller has disconnected. The task itself is not cancelled."""


class CancelOnDisconnect:
    """A block that is cancelled once the caller disconnects. The body of the request has been read.

    Raises:
      Disconnected: the caller disconnected before the end of the block.
    """

    def __init__(self, exchange: Exchange):
        self._exchange = exchange
        self._task: asyncio.Task | None = None
        self._gone = False

    async def __aenter__(self) -> None:
        self._task = asyncio.current_task()
        self._exchange.on_lost(self._cancel)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exchange.on_lost(None)
        if not self._gone:
            return
        if error is None:
            try:
                await asyncio.sleep(0)  # the cancellation is on its way
            except asyncio.CancelledError as cancelled:
                error = cancelled
        if not isinstance(error, asyncio.CancelledError):
            return
        assert self._task is not None
        if self._task.uncancel() == 0:
            raise Disconnected from None
        raise error

    def _cancel(self) -> None:
        assert self._task is not None
        self._gone = True
        self._task.cancel()
