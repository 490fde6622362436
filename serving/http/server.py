"""The HTTP server: port, certificates, start and stop, on the running event loop."""

import asyncio
import contextlib
import socket
import ssl
import time
from email.utils import formatdate

from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.server import ServerState

from serving.frontend.config import ListenError, ServerConfig, read_certificates
from serving.http.limits import Limits
from serving.http.protocol import LimitedProtocol

BACKLOG = 2048
STOP_GRACE_S = 5.0  # for sending the last bytes, after the last request has finished
_TICK_S = 0.01


class HttpServer:
    """A server of an ASGI application.

    Args:
      config: its address, certificates and authority; `port` is not used.
      port: 0 selects a free port.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, port: int, limits: Limits | None = None):
        self._app, self._config, self._wanted_port = app, config, port
        self._limits = limits or Limits()
        self.port = 0  # the bound port, after `start`
        self._state = ServerState()
        self._server: asyncio.Server | None = None
        self._ticking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open the port. Raises: ListenError."""
        context = _tls(self._config)
        listener = _bind(self._config.host, self._wanted_port)
        self.port = listener.getsockname()[1]
        limits = self._limits
        uvicorn = Config(
            self._app,
            http=LimitedProtocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="critical",  # a fault is logged by the application, under its id
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=limits.keep_alive_s,  # type: ignore[arg-type]  # a float will do
        )
        uvicorn.load()
        self._tick()
        self._ticking = asyncio.create_task(self._tick_forever())
        self._server = await asyncio.get_running_loop().create_server(
            lambda: LimitedProtocol(uvicorn, self._state, {}, limits=limits),
            sock=listener,
            ssl=context,
            backlog=BACKLOG,
            ssl_handshake_timeout=limits.header_s if context is not None else None,
        )

    async def stop(self) -> None:
        """Close the port, after a grace period for answers that are being sent."""
        if self._server is None or self._ticking is None:
            return
        self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_GRACE_S):
                while self._state.tasks or self._state.connections:
                    await asyncio.sleep(_TICK_S)
        for task in list(self._state.tasks):
            task.cancel()
        for connection in list(self._state.connections):
            connection.transport.abort()
        await asyncio.gather(*self._state.tasks, return_exceptions=True)
        self._ticking.cancel()

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self._tick()

    def _tick(self) -> None:
        self._state.default_headers = [(b"date", formatdate(time.time(), usegmt=True).encode())]


def _bind(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises: ListenError."""
    try:
        family, kind, protocol, _, name = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(name)
            listener.listen(BACKLOG)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
    except (OSError, OverflowError) as error:
        shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        reason = getattr(error, "strerror", None) or error
        accepted = "another address, or --http_port 0 for a free port"
        raise ListenError(f"cannot listen on {shown}: {reason}; accepted: {accepted}") from error
    return listener


def _tls(config: ServerConfig) -> ssl.SSLContext | None:
    """Return the TLS settings, or None without TLS. Raises: ListenError."""
    if read_certificates(config) is None or config.tls_cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(config.tls_cert, config.tls_key)
    if config.tls_client_ca:
        context.load_verify_locations(config.tls_client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
