"""The gRPC server: ports, certificates, start, draining and stop."""

import asyncio
import contextlib
import dataclasses
import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from serving.grpc import generate_pb2, generate_pb2_grpc
from serving.grpc.event_queue import EventRouter
from serving.grpc.interceptor import CallInterceptor
from serving.grpc.service import AdminService, GenerateService, ModelService, Served

if TYPE_CHECKING:
    from jaxflow.llm import LLM

MAX_REQUEST_BYTES = 8 << 20  # fits a prompt of a million tokens; a larger request is RESOURCE_EXHAUSTED

_NO_LIMIT = 2**31 - 1
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.so_reuseport", 0),  # with 1, a second server on the port would silently take half of the calls
    # A client whose machine vanished is detected within 40 s, and its pages are freed.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    # gRPC's core answers calls beyond 1,000 that its server has not yet taken up with CANCELLED, at random, and
    # the handlers never see these calls. The engine's own queue (--max_waiting) refuses with a reason instead.
    ("grpc.server.max_pending_requests", _NO_LIMIT),
    ("grpc.server.max_pending_requests_hard_limit", _NO_LIMIT),
)

_HEARTBEAT_S = 1.0
_STOP_GRACE_S = 5.0  # for sending the last messages, after the last request has finished


class ListenError(RuntimeError):
    """An address, port or certificate that the server cannot use. The message is one line."""


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """Addresses, certificates and tokens of the server. Port 0 selects a free port.

    Raises:
      ListenError: settings that contradict each other.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    admin_host: str = "127.0.0.1"
    admin_port: int = 50052
    tls_cert: str | None = None  # PEM files
    tls_key: str | None = None
    tls_client_ca: str | None = None  # if set, clients must show a certificate of this authority
    auth_tokens: tuple[str, ...] = ()
    drain_timeout_s: float = 30.0
    max_pending_tokens: int = 1024

    def __post_init__(self) -> None:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ListenError("--tls_cert and --tls_key must be given together")
        if self.tls_client_ca and not self.tls_cert:
            raise ListenError("--tls_client_ca needs --tls_cert and --tls_key")


class Server:
    """The gRPC server of one model, on the running event loop. The admin service has its own port."""

    def __init__(self, config: ServerConfig):
        self.config = config
        self.port = self.admin_port = 0  # the bound ports, after `start`
        self._served = Served()
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._drained: asyncio.Task[int] | None = None
        self._listeners: list[grpc.aio.Server] = []

    async def start(self) -> None:
        """Open the ports. Until `serve` is called, calls are answered UNAVAILABLE and health is NOT_SERVING.

        Raises:
          ListenError: a port is taken, or a certificate cannot be used.
        """
        config = self.config
        credentials = _credentials(config)
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        router = EventRouter(asyncio.get_running_loop())
        main, admin = (
            grpc.aio.server(interceptors=[CallInterceptor(config.auth_tokens)], options=_OPTIONS)
            for _ in range(2)
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, main)
        generate_pb2_grpc.add_GenerateServiceServicer_to_server(
            GenerateService(self._served, router, config.max_pending_tokens), main
        )
        generate_pb2_grpc.add_ModelServiceServicer_to_server(ModelService(self._served), main)
        generate_pb2_grpc.add_AdminServiceServicer_to_server(AdminService(self._served, self.drain), admin)
        reflection.enable_server_reflection(
            (*_MAIN_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), main
        )
        reflection.enable_server_reflection((_ADMIN_SERVICE, reflection.SERVICE_NAME), admin)
        self.port = _bind(main, config.host, config.port, credentials)
        self.admin_port = _bind(admin, config.admin_host, config.admin_port, credentials)
        for listener in (main, admin):
            await listener.start()
            self._listeners.append(listener)

    async def serve(self, llm: "LLM") -> None:
        """Accept requests for `llm`, which is warm.

        Raises:
          ConfigError: a generation config that cannot be used.
        """
        self._served.set(llm)
        if not self._served.draining:
            await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    async def drain(self, timeout_s: float | None = None) -> int:
        """Refuse new requests, finish the running ones, and return the number aborted after `timeout_s`.

        Draining cannot be undone. A second call waits for the same result.
        """
        if self._drained is None:
            seconds = self.config.drain_timeout_s if timeout_s is None else timeout_s
            self._drained = asyncio.create_task(self._drain(seconds))
        return await asyncio.shield(self._drained)

    async def _drain(self, timeout_s: float) -> int:
        self._served.draining = True
        await self._health.enter_graceful_shutdown()
        if not self._served.loaded:
            return 0
        return await asyncio.to_thread(self._served.llm.driver.drain, timeout_s)

    async def engine_failure(self) -> None:
        """Return if the engine's thread ends by a fault. Health is then NOT_SERVING."""
        while self._served.llm.driver.alive:
            await asyncio.sleep(_HEARTBEAT_S)
        await self._health.enter_graceful_shutdown()

    async def stop(self) -> None:
        """Close the ports, after a grace period for messages that are being sent."""
        await asyncio.gather(*(listener.stop(_STOP_GRACE_S) for listener in self._listeners))

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for service in ("", *_MAIN_SERVICES):
            await self._health.set(service, status)


_NAMES = {name: service.full_name for name, service in generate_pb2.DESCRIPTOR.services_by_name.items()}
_MAIN_SERVICES = (_NAMES["GenerateService"], _NAMES["ModelService"])
_ADMIN_SERVICE = _NAMES["AdminService"]


def _bind(listener: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None) -> int:
    """Bind and return the port. Raises: ListenError with the system's reason, which gRPC does not report."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        family, kind, protocol, _, name = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
            probe.bind(name)
            probe.listen()  # bind without listen may succeed on a port that is in use
        return (
            listener.add_secure_port(address, credentials)
            if credentials
            else listener.add_insecure_port(address)
        )
    except OSError as error:
        reason = error.strerror or str(error)
    except (RuntimeError, OverflowError) as error:
        reason = str(error)
    raise ListenError(f"cannot listen on {address}: {reason}")


def _credentials(config: ServerConfig) -> grpc.ServerCredentials | None:
    if not config.tls_cert or not config.tls_key:
        return None
    try:
        # gRPC reports an unusable certificate only in its log, so Python's ssl module reads the files first.
        check = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        check.load_cert_chain(
            config.tls_cert, config.tls_key, password=""
        )  # prevents a prompt at the terminal
        if config.tls_client_ca:
            check.load_verify_locations(config.tls_client_ca)
        authority = Path(config.tls_client_ca).read_bytes() if config.tls_client_ca else None
        pair = (Path(config.tls_key).read_bytes(), Path(config.tls_cert).read_bytes())
    except OSError as error:  # ssl.SSLError is a subclass
        raise ListenError(
            f"cannot use the certificate {config.tls_cert} with the key {config.tls_key}: {error}"
        ) from error
    return grpc.ssl_server_credentials(
        [pair], root_certificates=authority, require_client_auth=authority is not None
    )
