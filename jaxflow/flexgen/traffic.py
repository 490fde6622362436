"""What crossed, by verb and tier: a run's I/O as the search's cost model counts it."""

import threading
from collections import defaultdict

import msgspec

VERBS = (
    "fetch_layer",
    "load_kv",
    "store_kv",
    "load_activation",
    "store_activation",
    "host_attention",
    "compute",
)


class Moved(msgspec.Struct):
    """times: layers, parts of a batch or batches that were moved. link_down, link_up: bytes to and from the
    device.

    seconds: known of runs without overlap alone.
    """

    times: int = 0
    link_down_bytes: int = 0
    link_up_bytes: int = 0
    disk_read_bytes: int = 0
    disk_write_bytes: int = 0
    host_kv_bytes: int = 0  # read by attention on the host
    seconds: float = 0.0


class Traffic:
    """Counters of one run, added to from several threads."""

    def __init__(self) -> None:
        self._moved: defaultdict[str, Moved] = defaultdict(Moved)
        self._lock = threading.Lock()

    def add(
        self,
        verb: str,
        *,
        times: int = 0,
        down: int = 0,
        up: int = 0,
        read: int = 0,
        written: int = 0,
        host_kv: int = 0,
        seconds: float = 0.0,
    ) -> None:
        with self._lock:
            one = self._moved[verb]
            one.times += times
            one.link_down_bytes += down
            one.link_up_bytes += up
            one.disk_read_bytes += read
            one.disk_write_bytes += written
            one.host_kv_bytes += host_kv
            one.seconds += seconds

    def crossed(self) -> tuple[int, int]:
        """Bytes to the device and from it since the last `take`."""
        with self._lock:
            return sum(one.link_down_bytes for one in self._moved.values()), sum(
                one.link_up_bytes for one in self._moved.values()
            )

    def take(self) -> dict[str, Moved]:
        """The counts since the last call, by verb."""
        with self._lock:
            found, self._moved = self._moved, defaultdict(Moved)
        return {verb: found[verb] for verb in VERBS if verb in found}
