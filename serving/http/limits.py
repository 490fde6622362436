"""Limits of connections and requests of the HTTP server."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits. Times in seconds.

    Attributes:
      body_bytes, body_s: of a request's body, except on the routes of files.
      header_bytes, headers, header_s: of the request line and the headers together.
      keep_alive_s: a connection without a request ends.
      connections: a further connection is answered 503 and closed.
      write_stall_s: a caller that takes nothing for this time loses its connection.
      linger_s: a caller may send the rest of a refused body for this time, so that it can read the answer.
      ping_s: see `EventStream`.
    """

    body_bytes: int = 8 << 20
    body_s: float = 30.0
    header_bytes: int = 16 << 10
    headers: int = 100
    header_s: float = 10.0
    keep_alive_s: float = 75.0
    connections: int = 4096
    write_stall_s: float = 30.0
    linger_s: float = 2.0
    ping_s: float = 15.0
