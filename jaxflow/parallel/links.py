"""The links between process 0 and its followers: calls go one way, progress the other, and both ends watch.

JAX's heartbeats see a process that died or stopped. They do not see one that lives and is stuck (jax#38503).
So followers report how many calls they received, replayed and finished, and process 0 ends everything when a
step takes longer than `step_timeout_s`. When one process ends, all others end, too. Each of them writes one
line that names the lost process, and exits with `LOST`: a thread inside a collective operation cannot be
interrupted.
"""

import contextlib
import logging
import os
import queue
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

from jaxflow.parallel.frames import HANDSHAKE_S, FrameError, frame, greet, read_frame, send_frame, welcome
from jaxflow.parallel.launch import LOST
from jaxflow.parallel.processes import Processes, ProcessesError

log = logging.getLogger(__name__)

BEAT_S = 0.5
START_SILENCE_S = 60.0  # while programs compile: lowering holds the interpreter for seconds
SILENCE_S = 4.0  # while an engine serves; JAX's limit is 10 s, and its message names no reason
FAREWELL_S = 1.0
_SMALL_BYTES = 64 << 10  # most bytes of a follower's frame
_PROGRESS = struct.Struct("!QQQ")
_LIMIT = struct.Struct("!d")  # seconds of silence, in a beat of process 0
_CALL, _BEAT, _STOP, _END = b"C", b"B", b"S", b"E"  # from process 0
_PROGRESS_KIND, _FAULT, _LEAVE, _READY_TO_END, _ANSWER = b"P", b"F", b"L", b"R", b"A"  # from a follower


def say_and_exit(text: str, status: int = LOST) -> NoReturn:
    """Write one line and end this process at once."""
    with contextlib.suppress(OSError, ValueError):
        print(f"error: {text}", file=sys.stderr, flush=True)
    os._exit(status)


def fault_text(error: BaseException) -> str:
    """Return the first line of an error, with its type."""
    first = str(error).strip().partition("\n")[0][:500]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


class _Follower:
    """The link to one follower, in process 0."""

    def __init__(self, rank: int, link: socket.socket):
        self.rank, self.link, self.lock = rank, link, threading.Lock()
        self.received = self.replayed = self.finished = 0
        self.heard_s = time.monotonic()
        self.gone = threading.Event()


class Followers:
    """The links of process 0 to all other processes.

    Args:
      step_timeout_s: longest time of a step.
      on_leave: called when a follower was asked to stop; the default sends this process the same signal.

    Attributes:
      on_answer: called with the rank and the payload of an answer to a call (`Leader.answer`), on any thread.
      sender: the thread that sends the calls.
    """

    def __init__(self, processes: Processes, step_timeout_s: float, on_leave: Callable[[int], None]):
        self.processes, self._step_timeout_s, self._on_leave = processes, step_timeout_s, on_leave
        self._silence_s = START_SILENCE_S
        self._stopping = threading.Event()
        self._ending = threading.Lock()
        self.sent = 0  # calls
        self.on_answer: Callable[[int, bytes], None] = lambda rank, payload: None
        self._without_progress_s: Callable[[], float] = lambda: 0.0
        self._fault: Callable[[], BaseException | None] = lambda: None
        self._links = _accept(processes)
        self._calls: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()  # None: no more calls
        self._lost: ProcessesError | None = None
        self.sender = threading.Thread(target=self._send_calls, name="sender", daemon=True)
        self.sender.start()
        for follower in self._links:
            threading.Thread(target=self._listen, args=(follower,), name="follower", daemon=True).start()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def send(self, call: bytes) -> None:
        """Send a call to every follower, in the order of the calls. Called by the engine's thread only.

        A thread sends, so the engine waits for no connection: the call travels while a step runs.

        Raises:
          ProcessesError: an earlier call did not reach a follower.
        """
        if self._lost is not None:
            raise self._lost
        self.sent += 1
        self._calls.put(call)

    def _send_calls(self) -> None:
        while (call := self._calls.get()) is not None:
            for follower in self._links:
                with follower.lock:
                    try:
                        send_frame(follower.link, _CALL, call)
                    except OSError as error:  # the thread that listens ends everything, with the reason
                        self._lost = ProcessesError(f"process {follower.rank} ended ({error})")
                        return

    def watch_engine(
        self, seconds_without_progress: Callable[[], float], fault: Callable[[], BaseException | None]
    ) -> None:
        """Begin to serve: a step may not take too long, and the end of the engine is that of all processes.

        Args:
          seconds_without_progress: since a step of this process was enqueued or read; 0 without work.
          fault: the fault that ended the engine of this process; None while it lives.
        """
        self._without_progress_s, self._fault = seconds_without_progress, fault

    def watch_closely(self) -> None:
        """Let a silent process be lost after `SILENCE_S`, in all processes, once none of them compiles."""
        self._silence_s = SILENCE_S
        self._beat()

    def _beat(self) -> None:
        """Send a beat with the limit of silence to each follower. A link that sends a call needs no beat."""
        for follower in self._links:
            if follower.lock.acquire(blocking=False):
                try:
                    with contextlib.suppress(OSError):
                        follower.link.sendall(frame(_BEAT, _LIMIT.pack(self._silence_s)))
                finally:
                    follower.lock.release()

    def stop(self) -> None:
        """Let every follower end in order, after the last call."""
        self._calls.put(None)
        self.sender.join()
        self._stopping.set()
        for follower in self._links:
            self._send_now(follower, frame(_STOP), FAREWELL_S)

    def end_all(self, reason: str, status: int = LOST) -> NoReturn:
        """End every process of the engine, each with one line."""
        self.dismiss(reason, status)
        say_and_exit(reason, status)

    def dismiss(self, reason: str, status: int) -> None:
        """Let every follower write its line and end after this process. Return
        once they have, or after a moment.

        They end last, because an operation of this process that they break off would hide the reason.
        """
        self._ending.acquire()  # for ever: the first reason is the cause, and later ones are consequences
        self._stopping.set()
        for follower in self._links:
            self._send_now(follower, frame(_END, bytes((status,)) + reason.encode()), 0.2)
        until = time.monotonic() + FAREWELL_S
        for follower in self._links:
            follower.gone.wait(max(0.0, until - time.monotonic()))

    def _send_now(self, follower: _Follower, whole: bytes, timeout_s: float) -> None:
        """Send a frame, or give up if the link is busy or full."""
        if follower.lock.acquire(timeout=timeout_s):
            try:
                follower.link.settimeout(timeout_s)
                follower.link.sendall(whole)
            except OSError:
                log.debug("process %d takes no more frames", follower.rank)
            finally:
                with contextlib.suppress(OSError):
                    follower.link.settimeout(None)
                follower.lock.release()

    def _listen(self, follower: _Follower) -> None:
        try:
            while True:
                kind, payload = read_frame(follower.link, _SMALL_BYTES)
                follower.heard_s = time.monotonic()
                if kind == _PROGRESS_KIND:
                    follower.received, follower.replayed, follower.finished = _PROGRESS.unpack(payload)
                elif kind == _FAULT:
                    self.end_all(f"process {follower.rank} failed: {payload[1:].decode()}", payload[0])
                elif kind == _LEAVE:
                    self._on_leave(follower.rank)
                elif kind == _ANSWER:
                    self.on_answer(follower.rank, payload)
                elif kind == _READY_TO_END:
                    follower.gone.set()
                else:
                    raise FrameError(f"a frame of the unknown kind {kind!r}")
        except (OSError, struct.error) as error:
            follower.gone.set()
            if not self._stopping.is_set():
                self.end_all(f"process {follower.rank} ended: {error}")

    def _watch(self) -> None:
        while not self._stopping.wait(BEAT_S):
            self._beat()
            if (fault := self._fault()) is not None:
                time.sleep(FAREWELL_S)  # the callers of the requests get their errors
                self.end_all(f"process 0 failed: {fault_text(fault)}")
            now = time.monotonic()
            silent = max(self._links, key=lambda follower: now - follower.heard_s)
            if now - silent.heard_s > self._silence_s:
                silent.gone.set()  # nobody waits for its farewell, or JAX would abort first
                self.end_all(
                    f"process {silent.rank} is silent for {now - silent.heard_s:.1f} s: it was stopped, or "
                    "its host or network is down"
                )
            if (waited_s := self._without_progress_s()) > self._step_timeout_s:
                self.end_all(self._stuck(waited_s))

    def _stuck(self, waited_s: float) -> str:
        """Return which process holds a step up: the one that replayed least, or else finished least."""
        slowest = min(self._links, key=lambda follower: (follower.replayed, follower.finished))
        text = f"a step takes {waited_s:.1f} s and step_timeout_s is {self._step_timeout_s:g}"
        if slowest.replayed < self.sent:
            return f"process {slowest.rank} is stuck at call {slowest.replayed} of {self.sent}: {text}"
        counts = ", ".join(f"{follower.finished} in process {follower.rank}" for follower in self._links)
        return f"process 0 or a device is stuck: {text}; finished of {self.sent} calls: {counts}"


class Leader:
    """The link of a follower to process 0."""

    def __init__(self, processes: Processes):
        self.processes = processes
        self.received = self.replayed = self.finished = 0
        self._link = _connect(processes)
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()  # None: the end
        self._heard_s, self._silence_s = time.monotonic(), START_SILENCE_S
        self._stopping = threading.Event()
        self._ending = threading.Lock()  # held for ever by the first thread that ends the process
        threading.Thread(target=self._listen, name="leader", daemon=True).start()
        threading.Thread(target=self._beat, name="watch", daemon=True).start()

    @property
    def own_host(self) -> str:
        """Return the address of this process on the network to process 0."""
        return self._link.getsockname()[0]

    def calls(self) -> Iterator[bytes]:
        """Yield the calls of process 0, until it stops."""
        while (call := self._calls.get()) is not None:
            yield call
            self.replayed += 1

    def fail(self, error: BaseException, status: int) -> NoReturn:
        """Tell process 0 a fault of this process. All processes then end, this one too."""
        text = fault_text(error)
        self._send(frame(_FAULT, bytes((status,)) + text.encode()))
        time.sleep(2 * FAREWELL_S)  # process 0 answers with the end of all
        self._ending.acquire()
        say_and_exit(f"process {self.processes.rank} failed: {text}", status)

    def answer(self, payload: bytes) -> None:
        """Send the answer to a call to process 0. Any thread may call this method."""
        self._send(frame(_ANSWER, payload))

    def ask_to_stop(self) -> None:
        """Tell process 0 that this process was asked to stop. Safe in a signal handler's thread."""
        self._send(frame(_LEAVE))

    def _send(self, whole: bytes) -> None:
        with self._lock, contextlib.suppress(OSError):  # `_listen` sees the same end of the link
            self._link.sendall(whole)

    def _listen(self) -> None:
        try:
            while True:
                kind, payload = read_frame(self._link)
                self._heard_s = time.monotonic()
                if kind == _CALL:
                    self.received += 1
                    self._calls.put(payload)
                elif kind == _STOP:
                    self._stopping.set()
                    self._calls.put(None)
                    return
                elif kind == _END:
                    self._end(payload[1:].decode(), payload[0])
                elif kind == _BEAT:
                    (self._silence_s,) = _LIMIT.unpack(payload)
                else:
                    raise FrameError(f"a frame of the unknown kind {kind!r}")
        except (OSError, struct.error) as error:
            self._ending.acquire()
            say_and_exit(f"process 0 ended: {error}")

    def _end(self, reason: str, status: int) -> NoReturn:
        """Write the reason, and end once process 0 has."""
        self._ending.acquire()
        self._stopping.set()
        with contextlib.suppress(OSError, ValueError):
            print(f"error: {reason}", file=sys.stderr, flush=True)
        self._send(frame(_READY_TO_END))
        with contextlib.suppress(OSError):
            self._link.settimeout(FAREWELL_S)
            while self._link.recv(_SMALL_BYTES):
                pass
        os._exit(status)

    def _beat(self) -> None:
        while not self._stopping.wait(BEAT_S):
            self._send(frame(_PROGRESS_KIND, _PROGRESS.pack(self.received, self.replayed, self.finished)))
            silent_s = time.monotonic() - self._heard_s
            if silent_s > self._silence_s:
                self._ending.acquire()
                say_and_exit(
                    f"process 0 is silent for {silent_s:.1f} s: it was stopped, or its host or network is "
                    "down"
                )


def _accept(processes: Processes) -> list[_Follower]:
    """Return the links of all followers. Callers without the secret are turned away."""
    secret = secrets.token_bytes(32)
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    with socket.create_server(("", 0), family=family, backlog=processes.count, dualstack_ipv6=dual) as server:
        processes.publish("calls", f"{server.getsockname()[1]} {secret.hex()}")
        found: dict[int, _Follower] = {}
        server.settimeout(START_SILENCE_S)
        while len(found) < processes.count - 1:
            try:
                link, _ = server.accept()
            except TimeoutError as error:
                missing = sorted({*range(1, processes.count)} - set(found))
                raise ProcessesError(f"processes {missing} did not connect to process 0") from error
            try:
                rank = welcome(link, secret, secrets.token_bytes(32))
                if rank in found or not 0 < rank < processes.count:
                    raise FrameError(f"a second process {rank}, or one outside 1 to {processes.count - 1}")
            except OSError as error:
                log.warning("a connection was refused: %s", error)
                link.close()
                continue
            _tune(link)
            found[rank] = _Follower(rank, link)
    return [found[rank] for rank in sorted(found)]


def _connect(processes: Processes) -> socket.socket:
    """Return the link to process 0."""
    port, _, secret = processes.read("calls").partition(" ")
    try:
        link = socket.create_connection((processes.launch.host, int(port)), timeout=HANDSHAKE_S)
        greet(link, bytes.fromhex(secret), processes.rank, secrets.token_bytes(32))
    except OSError as error:
        raise ProcessesError(
            f"process {processes.rank} cannot connect to process 0 at {processes.launch.host}:{port}: {error}"
        ) from error
    _tune(link)
    return link


def _tune(link: socket.socket) -> None:
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
