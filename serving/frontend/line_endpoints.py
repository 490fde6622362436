"""What answers the lines of a batch: one engine of this process, or several replicas."""

from typing import Any, Protocol


class LineEndpoints(Protocol):
    """The OpenAI endpoints of a loaded model, without a socket."""

    async def answer(self, path: str, body: bytes, *, priority: int = 0) -> tuple[int, dict[str, Any]]:
        """Return the HTTP status and the JSON body of a request. Cancellation ends the request.

        Raises: LineFailed.
        """
        ...

    def alive(self) -> bool:
        """Return False once the engine can answer no more."""
        ...


class LineFailed(Exception):
    """A line that must not be asked again. `status`, `body`: its answer."""

    def __init__(self, status: int, body: dict[str, Any]):
        super().__init__(f"status {status}")
        self.status, self.body = status, body
