"""The meeting of an engine's processes at the coordinator's port, before `jax.distributed` uses the port.

`jax.distributed` aborts a process that waits too long, without a word about who is missing, and aborts a
process that meets the service of an earlier start. So the processes meet here first. Process 0 listens until
all others hold a connection, and lets them go together.
"""

import contextlib
import errno
import socket
import struct
import time

from jaxflow.config import ConfigError
from jaxflow.parallel.launch import Launch

_MAGIC = b"JAXFLOW1"
_HELLO = struct.Struct(f"!{len(_MAGIC)}sI")  # and the rank
_GO = b"go"
_POLL_S = 0.2
_HELLO_S = 2.0


class MissingProcesses(RuntimeError):
    """Some processes of an engine did not come in time. The message names them."""


def meet(launch: Launch, timeout_s: float) -> None:
    """Return once all processes of the engine have come.

    Raises:
      ConfigError: in process 0, if the coordinator's port is taken. MissingProcesses: after the timeout.
    """
    if launch.process_id == 0:
        _receive(launch, timeout_s)
    else:
        _arrive(launch, timeout_s)


def _receive(launch: Launch, timeout_s: float) -> None:
    """Wait for all others, and let them go."""
    until = time.monotonic() + timeout_s
    waiting: dict[int, socket.socket] = {}
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        server = socket.create_server(
            ("", launch.port), family=family, backlog=launch.num_processes, dualstack_ipv6=dual
        )
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        accepted = f"a free port: {launch.port} is taken on this host"
        raise ConfigError("coordinator", launch.coordinator, accepted) from error
    with server, contextlib.ExitStack() as links:
        server.settimeout(_POLL_S)
        while len(waiting) < launch.num_processes - 1:
            if time.monotonic() > until:
                missing = ", ".join(str(i) for i in range(1, launch.num_processes) if i not in waiting)
                raise MissingProcesses(
                    f"of {launch.num_processes} processes, {missing} did not come to {launch.coordinator} "
                    f"within {timeout_s:g} s"
                )
            with contextlib.suppress(OSError, struct.error):
                link = links.enter_context(server.accept()[0])
                link.settimeout(_HELLO_S)
                magic, rank = _HELLO.unpack(link.recv(_HELLO.size, socket.MSG_WAITALL))
                if magic == _MAGIC and 0 < rank < launch.num_processes:
                    waiting[rank] = link  # a process that came again replaces its earlier self
            waiting = {rank: link for rank, link in waiting.items() if _is_open(link)}
        for link in waiting.values():
            with contextlib.suppress(OSError):
                link.setblocking(True)
                link.sendall(_GO)


def _is_open(link: socket.socket) -> bool:
    try:
        link.setblocking(False)
        return link.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def _arrive(launch: Launch, timeout_s: float) -> None:
    """Connect to process 0 until it lets this process go. Process 0 may start later, and start again."""
    until = time.monotonic() + timeout_s
    while (left := until - time.monotonic()) > 0:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((launch.host, launch.port), timeout=min(left, _HELLO_S)) as link,
        ):
            link.sendall(_HELLO.pack(_MAGIC, launch.process_id))
            link.settimeout(left)
            if link.recv(len(_GO), socket.MSG_WAITALL) == _GO:
                return
        time.sleep(_POLL_S)
    raise MissingProcesses(
        f"process {launch.process_id} did not meet process 0 and all others at {launch.coordinator} within "
        f"{timeout_s:g} s"
    )
