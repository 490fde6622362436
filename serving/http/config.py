"""Settings of the HTTP server beside those that all servers share, and the server that they describe."""

import dataclasses
from collections.abc import Sequence

from starlette.routing import BaseRoute

from serving.frontend.access import BearerTokens
from serving.frontend.served_model import ServedModel
from serving.http.app import HttpApp
from serving.http.endpoints import Endpoints
from serving.http.limits import Limits
from serving.http.server import HttpServer
from serving.operations import Operations


@dataclasses.dataclass(frozen=True)
class HttpConfig:
    """Settings. Arguments of `HttpApp` and `HttpServer`."""

    port: int = 8000
    allowed_origins: tuple[str, ...] = ()
    root_path: str = ""
    limits: Limits = dataclasses.field(default_factory=Limits)

    def server(
        self, served: ServedModel, operations: Operations, more_routes: Sequence[BaseRoute] = ()
    ) -> HttpServer:
        """Return the server of a model. `more_routes`: further routes, behind the same authentication."""
        app = HttpApp(
            Endpoints(served),
            operations,
            BearerTokens(served.config.auth_tokens),
            limits=self.limits,
            more_routes=more_routes,
            allowed_origins=self.allowed_origins,
            root_path=self.root_path,
        )
        return HttpServer(app, served.config, self.port, self.limits)
