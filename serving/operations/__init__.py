"""Operation of the server: health, metrics, request log, traces and the status page."""

from serving.operations.http_routes import routes
from serving.operations.operations import Operations

__all__ = ["Operations", "routes"]
