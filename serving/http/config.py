"""Settings of the HTTP server beside those that all servers share, and the server that they describe."""

import dataclasses

from serving.batch.batches import Batches
from serving.frontend.access import BearerTokens
from serving.http.app import HttpApp
from serving.http.batch_mount import BatchConfig, batch_routes
from serving.http.endpoints import Endpoints
from serving.http.limits import Limits
from serving.http.server import HttpServer
from serving.operations import Operations


@dataclasses.dataclass(frozen=True)
class HttpConfig:
    """Settings. Arguments of `HttpApp` and `HttpServer`. `batch`: None for a server without batches."""

    port: int = 8000
    allowed_origins: tuple[str, ...] = ()
    root_path: str = ""
    limits: Limits = dataclasses.field(default_factory=Limits)
    batch: BatchConfig | None = None

    def server(
        self, endpoints: Endpoints, operations: Operations, batches: Batches | None = None
    ) -> HttpServer:
        """Return the server of a model."""
        config = endpoints.served.config
        app = HttpApp(
            endpoints,
            operations,
            BearerTokens(config.auth_tokens),
            limits=self.limits,
            more_routes=batch_routes(batches),
            allowed_origins=self.allowed_origins,
            root_path=self.root_path,
        )
        return HttpServer(app, config, self.port, self.limits)
