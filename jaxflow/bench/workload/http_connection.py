"""A client of HTTP/1.1 servers that costs little for each received chunk, so that it loads a server fully."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from urllib.parse import urlsplit

import httptools

from jaxflow.config import ConfigError

IDLE_S = 2.0  # servers close idle connections after 5 s or more
PORTS = {"http": 80, "https": 443}


class HttpConnection(asyncio.Protocol):
    """One connection. It carries one request at a time."""

    def __init__(self):
        self.transport: asyncio.Transport | None = None
        self.freed_s = 0.0
        self._parser = httptools.HttpResponseParser(self)
        self._take: Callable[[bytes], object] = len
        self._done: asyncio.Future[int] | None = None

    async def request(self, data: bytes, take: Callable[[bytes], object]) -> int:
        """Send a request and return the status of the whole answer.

        Args:
          data: the head and the body.
          take: gets each part of the answer's body as soon as it arrives.

        Raises:
          ConnectionError: the connection ended before the answer, or the answer is not HTTP/1.1.
        """
        if self.transport is None or self.transport.is_closing():
            raise ConnectionResetError("the server closed the connection")
        self._take = take
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(data)
        try:
            return await self._done
        finally:
            self._done = None

    @property
    def reusable(self) -> bool:
        """Return True if a further request can be sent."""
        if self.transport is None or self.transport.is_closing():
            return False
        return asyncio.get_running_loop().time() - self.freed_s < IDLE_S

    def close(self) -> None:
        """Close the connection. An answer under way is lost."""
        if self.transport is not None:
            self.transport.abort()

    # ---- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"the answer is not HTTP/1.1: {error}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(exc or ConnectionResetError("the server closed the connection within an answer"))

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)

    # ---- httptools

    def on_body(self, body: bytes) -> None:
        self._take(body)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            return  # an interim response; the answer follows
        if not self._parser.should_keep_alive() and self.transport is not None:
            self.transport.close()
        if self._done is not None and not self._done.done():
            self._done.set_result(status)


class HttpClient:
    """Connections to one server, as many as there are requests at once.

    Args:
      url: http:// or https://, the host, the port, and a path before all routes.
      headers: of every request.
      tls: the settings of https; None for the system's authorities.

    Raises:
      ConfigError: the URL names no host.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None, tls: ssl.SSLContext | None = None):
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            host, port = parts.hostname, parts.port or PORTS.get(parts.scheme)
        except ValueError:
            host = port = None
        if not host or not port or parts.scheme not in PORTS:
            raise ConfigError("target", url, "host:port, or a URL as http://host:port")
        self._host, self._port = host, port
        self._prefix = parts.path.rstrip("/")
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        lines = {"host": parts.netloc.rpartition("@")[2], **(headers or {})}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._free: list[HttpConnection] = []

    async def get(self, path: str) -> tuple[int, bytes]:
        """Return the status and the body of the answer. Raises: OSError."""
        return await self._whole(f"GET {self._prefix}{path} HTTP/1.1\r\n{self._head}\r\n".encode())

    async def post(self, path: str, body: bytes, kind: str = "application/json") -> tuple[int, bytes]:
        """Return the status and the body of the answer to a body of a media type. Raises: OSError."""
        return await self._whole(self.encode(path, body, kind))

    async def stream(self, path: str, body: bytes, take: Callable[[bytes], object]) -> int:
        """Send a JSON body, give the parts of the answer to `take`, and return the status.

        Raises: OSError.
        """
        async with self._connection() as connection:
            return await connection.request(self.encode(path, body), take)

    def encode(self, path: str, body: bytes, kind: str = "application/json") -> bytes:
        """Return the bytes of a POST request with a body of a media type."""
        head = f"POST {self._prefix}{path} HTTP/1.1\r\n{self._head}content-type: {kind}\r\n"
        return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body

    async def _whole(self, data: bytes) -> tuple[int, bytes]:
        parts: list[bytes] = []
        async with self._connection() as connection:
            status = await connection.request(data, parts.append)
        return status, b"".join(parts)

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[HttpConnection]:
        """Yield a connection for one request. A request that does not end closes its connection."""
        loop = asyncio.get_running_loop()
        connection = None
        while self._free and connection is None:
            free = self._free.pop()
            if free.reusable:
                connection = free
            else:
                free.close()
        if connection is None:
            _, connection = await loop.create_connection(
                HttpConnection, self._host, self._port, ssl=self._tls
            )
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        connection.freed_s = loop.time()
        self._free.append(connection)

    def close(self) -> None:
        """Close the free connections."""
        for connection in self._free:
            connection.close()
        self._free.clear()
