"""The gRPC server: ports, certificates, start and stop."""

import asyncio
import contextlib
import socket

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from serving.frontend.access import BearerTokens
from serving.frontend.call import Observe, unobserved
from serving.frontend.config import ListenError, ServerConfig, read_certificates
from serving.frontend.served_model import ServedModel, State
from serving.grpc import generate_pb2, generate_pb2_grpc
from serving.grpc.interceptor import CallInterceptor
from serving.grpc.service import AdminService, GenerateService, ModelService

# Fits a prompt of a million tokens; a larger request is RESOURCE_EXHAUSTED. Parsing stops the event loop, so
# a message of more than 1 MiB also has a limit of its fields, see `message_fields`.
MAX_REQUEST_BYTES = 4 << 20

_NO_LIMIT = 2**31 - 1
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.so_reuseport", 0),  # with 1, a second server on the port would silently take half of the calls
    # A client whose machine vanished is detected within 40 s, and its pages are freed.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.server_handshake_timeout_ms", 10_000),  # limits a connection that never speaks HTTP/2
    # With more than 1,000 calls that the server has not taken up, gRPC's core answers some with
    # CANCELLED. The handlers never see these calls. The engine's own queue (--max_waiting)
    # refuses with a reason instead.
    ("grpc.server.max_pending_requests", _NO_LIMIT),
    ("grpc.server.max_pending_requests_hard_limit", _NO_LIMIT),
    # gRPC's core also cancels a call that was not taken up within 30 s.
    ("grpc.server_max_unrequested_time_in_server", 3_600),
)

_STOP_GRACE_S = 5.0  # for sending the last messages, after the last request has finished


class Server:
    """The gRPC server of a model, on the running event loop. The admin service has its own port.

    Args:
      observe: opens the record of a generating call.
    """

    def __init__(self, served: ServedModel, observe: Observe = unobserved):
        self.served, self.config, self._observe = served, served.config, observe
        self.port = self.admin_port = 0  # the bound ports, after `start`
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._listeners: list[grpc.aio.Server] = []

    async def start(self) -> None:
        """Open the ports. While the model loads, calls are answered UNAVAILABLE and health is NOT_SERVING.

        Raises:
          ListenError: a port is taken, or a certificate cannot be used.
        """
        config = self.config
        credentials = _credentials(config)
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        self.served.on_change(self._show)
        tokens = BearerTokens(config.auth_tokens)
        admin_tokens = BearerTokens(config.admin_tokens or config.auth_tokens)
        main, admin = (
            grpc.aio.server(interceptors=[CallInterceptor(accepted, self._observe)], options=_options(config))
            for accepted in (tokens, admin_tokens)
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, main)
        generate_pb2_grpc.add_GenerateServiceServicer_to_server(GenerateService(self.served), main)
        generate_pb2_grpc.add_ModelServiceServicer_to_server(ModelService(self.served), main)
        generate_pb2_grpc.add_AdminServiceServicer_to_server(AdminService(self.served), admin)
        reflection.enable_server_reflection(
            (*_MAIN_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), main
        )
        reflection.enable_server_reflection((_ADMIN_SERVICE, reflection.SERVICE_NAME), admin)
        self.port = _bind(main, config.host, config.port, credentials, "port")
        self.admin_port = _bind(admin, config.admin_host, config.admin_port, credentials, "admin_port")
        for listener in (main, admin):
            await listener.start()
            self._listeners.append(listener)

    async def stop(self) -> None:
        """Close the ports, after a grace period for messages that are being sent."""
        await asyncio.gather(*(listener.stop(_STOP_GRACE_S) for listener in self._listeners))

    async def _show(self, state: State) -> None:
        """Report a new state of the model as health."""
        if state is State.READY:
            await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        else:
            await self._health.enter_graceful_shutdown()

    async def show_ready(self, ready: bool) -> None:
        """Report as health whether steps advance. After draining began, health stays NOT_SERVING."""
        status = health_pb2.HealthCheckResponse
        await self._set_health(status.SERVING if ready else status.NOT_SERVING)

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for service in ("", *_MAIN_SERVICES):
            await self._health.set(service, status)


_NAMES = {name: service.full_name for name, service in generate_pb2.DESCRIPTOR.services_by_name.items()}
_MAIN_SERVICES = (_NAMES["GenerateService"], _NAMES["ModelService"])
_ADMIN_SERVICE = _NAMES["AdminService"]


def _options(config: ServerConfig) -> list[tuple[str, int]]:
    """Return the options of gRPC's core."""
    age_ms = int(config.connection_age_s * 1000)
    return [
        *_OPTIONS,
        # Idle clients cannot hold all descriptors: they connect again by themselves.
        ("grpc.max_connection_idle_ms", int(config.idle_timeout_s * 1000)),
        # A client that closes its flow-control window holds no pages, but its
        # connection, up to twice this age.
        ("grpc.max_connection_age_ms", age_ms),
        ("grpc.max_connection_age_grace_ms", age_ms),
    ]


def _bind(
    listener: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None, flag: str
) -> int:
    """Bind and return the port that `flag` gave.

    Raises: ListenError with the system's reason, which gRPC does not report.
    """
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
    raise ListenError(
        f"cannot listen on {address}: {reason}; accepted: another address, or --{flag} 0 for a free port"
    )


def _credentials(config: ServerConfig) -> grpc.ServerCredentials | None:
    files = read_certificates(config)
    if files is None:
        return None
    return grpc.ssl_server_credentials(
        [(files.key, files.chain)],
        root_certificates=files.authority,
        require_client_auth=files.authority is not None,
    )
