"""The lines of a batch over several replicas: each line is at one replica at a time,
and moves when that one is lost.

The unfinished lines of a lost replica run again elsewhere. A line may itself be what ends its engines, and
nobody can tell which of the lines of a lost replica it was. So lines that were lost twice or more run in
smaller and smaller groups (`most_lines`), until a line that ends its engines is alone. Its answer is then an
error.
"""

import asyncio
import collections
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import msgspec

from serving.batch_engine import BODY_BYTES, AnsweringModel, default_window
from serving.cluster.link import Launch, StartFailed
from serving.cluster.member import Member as AnyMember
from serving.cluster.member import Phase
from serving.cluster.messages import LineOrder, LineReport, ReplicaModel
from serving.cluster.wanted import WantedReplicas
from serving.frontend.line_endpoints import LineFailed
from serving.http.errors import HttpError
from serving.http.responses import builtins

log = logging.getLogger(__name__)

SHRINK_BITS = 3  # from the second loss of a line on, each loss leaves an eighth of the lines beside it
MAX_LOSSES = 5  # losses after which a line that was alone is the cause
MAX_FAILURES = 8  # losses of each replica, without an answer of any, that end the run
START_S = 1800.0
CLOSE_S = 15.0

type Member = AnyMember[LineOrder, LineReport]


def most_lines(window: int, losses: Iterable[int]) -> int:
    """Return the most lines of a replica that holds lines with these numbers of losses.

    window: the most lines without a loss.
    """
    return max(1, window >> (SHRINK_BITS * max(0, max(losses, default=0) - 1)))


@dataclasses.dataclass(slots=True, eq=False)
class _Line:
    """A line under way.

    Attributes:
      member: where it runs; `name`: its name there.
      moves: times that it left a replica; `losses`: of them, from a lost one.
    """

    number: int
    url: str
    body: bytes
    priority: int
    answer: asyncio.Future[tuple[int, dict[str, Any]]]
    member: Member | None = None
    name: str = ""
    moves: int = 0
    losses: int = 0


class BatchReplicas:
    """Several engines as the endpoints of one model, see
    `serving.frontend.line_endpoints`. Used on one event loop.

    Args:
      wanted: the replicas.
      launch: starts a process.
      window: most lines under way at a replica; None for twice its sequences.
      stall_s, start_s: see `Member`.
    """

    def __init__(
        self,
        wanted: WantedReplicas,
        launch: Launch,
        window: int | None = None,
        *,
        stall_s: float | None = None,
        start_s: float = START_S,
    ):
        self.window = window or 1
        self._window = window
        self._model: ReplicaModel | None = None
        self._fault = ""
        self._failures = self._numbers = 0  # losses since the last answer; lines so far
        self._waiting: collections.deque[_Line] = collections.deque()
        self._lines: dict[str, _Line] = {}  # the lines at replicas, by their names there
        self._suspects: set[_Line] = set()  # the lines with a loss
        self._first: list[Exception | None] = []
        self._first_ready = asyncio.Event()
        self._members: list[Member] = [
            AnyMember(
                index,
                wanted.config,
                wanted.version,
                launch=launch,
                owner=self,
                stall_s=stall_s,
                start_s=start_s,
            )
            for index in range(wanted.replicas)
        ]
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> ReplicaModel:
        """Start the replicas, and return the model of the first one that is ready.

        Raises:
          StartFailed: no replica could load the model.
        """
        self._tasks = [asyncio.create_task(member.run(self._tell_first)) for member in self._members]
        await self._first_ready.wait()
        if self._model is None:
            error = next(error for error in self._first if error is not None)
            raise StartFailed(str(error)) from error
        return self._model

    async def answer(self, path: str, body: bytes, *, priority: int = 0) -> tuple[int, dict[str, Any]]:
        """Return the HTTP status and the JSON body of a line. Cancellation ends the request.

        Raises:
          LineFailed: the line ends the engines that it runs on.
        """
        if self._fault:
            return 503, _error(503, self._fault)
        self._numbers += 1
        line = _Line(self._numbers, path, body, priority, asyncio.get_running_loop().create_future())
        self._waiting.append(line)
        self._send()
        try:
            return await line.answer
        except asyncio.CancelledError:
            with contextlib.suppress(ValueError):
                self._waiting.remove(line)
            if line.member is not None:
                line.member.abort(line.name)
                self._detach(line)
            raise
        finally:
            self._suspects.discard(line)

    def alive(self) -> bool:
        """Return False once the replicas are lost again and again, and none of them answers a line."""
        return not self._fault

    @property
    def process_ids(self) -> list[int]:
        """Return the processes of the replicas that serve, each on its own machine."""
        serving = [member for member in self._members if member.phase is Phase.SERVING]
        return [member.description.process_id for member in serving if member.description is not None]

    async def close(self) -> None:
        """End all replicas."""
        for member in self._members:
            member.stop()
        if self._tasks:
            _, slow = await asyncio.wait(self._tasks, timeout=CLOSE_S)
            for task in slow:  # tasks of a hung process, which is killed
                task.cancel()
            await asyncio.gather(*slow, return_exceptions=True)

    # ---- what members tell, see `serving.cluster.member.Owner`

    def _tell_first(self, error: Exception | None) -> None:
        self._first.append(error)
        if error is None or len(self._first) >= len(self._members):
            self._first_ready.set()

    def joined(self, member: Member, description: ReplicaModel) -> None:
        """Let a replica with the model of the others take lines. Raises: StartFailed."""
        if self._model is None:
            self._model = description
            self.window = self._window or default_window(description.engine_config)
        for field in ("name", "model_config", "max_model_len"):
            ours, theirs = getattr(self._model, field), getattr(description, field)
            if ours != theirs:
                raise StartFailed(f"replica {member.index}: {field} is {theirs}, and the batch has {ours}")
        asyncio.get_running_loop().call_soon(self._send)

    def heard(self, member: Member, report: LineReport) -> None:
        """Take the answers of a replica."""
        for answer in report.answers:
            line = self._lines.get(answer.name)
            if line is None or line.member is not member:
                continue
            if report.fault and answer.status >= 500:
                continue  # the fault of the engine, not of the line: the line moves
            self._failures = 0
            self._detach(line)
            if not line.answer.done():
                line.answer.set_result((answer.status, msgspec.json.decode(answer.body)))
        self._send()

    def lost(self, member: Member, reason: str) -> None:
        """Let the lines of a lost replica run again."""
        lines = [self._lines[name] for name in member.names]
        for line in sorted(lines, key=lambda line: line.number, reverse=True):
            self._detach(line)
            line.moves += 1
            if reason:
                line.losses += 1
                self._suspects.add(line)
            if reason and len(lines) == 1 and line.losses >= MAX_LOSSES:
                message = (
                    f"{line.losses} engines were lost with this line, the last one with it alone: {reason}"
                )
                self._failures = 0
                if not line.answer.done():
                    line.answer.set_exception(LineFailed(500, _error(500, message)))
            else:
                self._waiting.appendleft(line)
        self._failures += bool(reason)
        if self._failures >= MAX_FAILURES * len(self._members):
            self._fault = f"the replicas were lost {self._failures} times in a row; the last reason: {reason}"
            log.error("%s", self._fault)
            for line in [*self._waiting, *self._lines.values()]:
                if not line.answer.done():
                    line.answer.set_result((503, _error(503, self._fault)))
            self._waiting.clear()
        self._send()

    # ---- lines

    def _send(self) -> None:
        """Hand out waiting lines, oldest first, as long as a replica has room."""
        while self._waiting:
            member = self._with_room(self._waiting[0])
            if member is None:
                return
            line = self._waiting.popleft()
            line.member, line.name = member, f"{line.number}~{line.moves}"
            self._lines[line.name] = line
            member.send(LineOrder(line.name, line.url, line.body, line.priority))

    def _with_room(self, line: _Line) -> Member | None:
        """Return the replica with the fewest lines that may take another one, or None."""

        def fits(member: Member) -> bool:
            held = [self._lines[name].losses for name in member.names] if self._suspects else []
            return len(member.names) < most_lines(self.window, [line.losses, *held])

        serving = [member for member in self._members if member.phase is Phase.SERVING]
        return min(filter(fits, serving), key=lambda member: len(member.names), default=None)

    def _detach(self, line: _Line) -> None:
        """Note that a line is no longer at its replica."""
        if line.member is not None:
            del self._lines[line.name]
            line.member.done(line.name)
            line.member = None


class ReplicaEngine:
    """Several replicas as the engine of a batch, see `serving.batch_engine.BatchEngine`.

    Args:
      close: ends what `launch` needs.
      stall_s, start_s: see `Member`.
    """

    def __init__(
        self,
        wanted: WantedReplicas,
        launch: Launch,
        *,
        close: Callable[[], None] = lambda: None,
        stall_s: float | None = None,
        start_s: float = START_S,
    ):
        self._wanted, self._launch, self._close = wanted, launch, close
        self._stall_s, self._start_s = stall_s, start_s

    @contextlib.asynccontextmanager
    async def answering(self, window: int | None) -> AsyncIterator[AnsweringModel]:
        """See `BatchEngine.answering`."""
        replicas = BatchReplicas(
            self._wanted, self._launch, window, stall_s=self._stall_s, start_s=self._start_s
        )
        try:
            model = await replicas.start()
            number = self._wanted.replicas
            yield AnsweringModel(model.name, replicas, number * replicas.window, number * BODY_BYTES)
        finally:
            await replicas.close()

    def close(self) -> None:
        """See `BatchEngine.close`."""
        self._close()


def _error(status: int, message: str) -> dict[str, Any]:
    return builtins(HttpError(status, message, code="replica_lost").body)
