"""Cancellation of a request whose caller has disconnected."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.types import Receive


class Disconnected(asyncio.CancelledError):
    """The caller has disconnected. The task itself is not cancelled."""


@contextlib.asynccontextmanager
async def cancel_on_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Cancel the block once the caller disconnects. The body of the request has been read.

    Raises:
      Disconnected: the caller disconnected before the end of the block.
    """
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
        if gone:  # the cancellation is on its way
            await asyncio.sleep(0)
    except asyncio.CancelledError:
        if gone and task.uncancel() == 0:
            raise Disconnected from None
        raise
    finally:
        watching.cancel()
