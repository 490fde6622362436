"""The run of a batch: unfinished lines are asked, a window of lines at a time, and answers go to the journal.

A line is finished once its answer is in the journal and on disk. Many answers share one fsync: while one
fsync runs, further answers collect for the next one. A run that ends early, by a crash or by cancellation, is
resumed by a new run over the same journal: finished lines do not run again.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from serving.batch.input_file import InputFile, Line
from serving.batch.journal import AnsweredLine, Journal, JournalError, sync_folder
from serving.batch.leases import Leases
from serving.batch.window import Window
from serving.frontend.line_endpoints import LineEndpoints, LineFailed

log = logging.getLogger(__name__)

LINES_A_LEASE = 256
COMMIT_INTERVAL_S = 0.02  # least time between two fsyncs of a run
POLL_S = 1.0  # seconds between two looks at the lines that other writers hold
RETRY_S = 0.1  # first pause before a refused line is asked again; it doubles up to MAX_RETRY_S
MAX_RETRY_S = 5.0
MAX_FAULTS = 3  # faults of the engine after which the fault is a line's answer
RETRIED = (429, 503)  # statuses of a server that has no room at the moment


class EngineStopped(Exception):
    """The engine cannot answer any more."""


class Runner:
    """One run over the unfinished lines of a batch. Used on one event loop.

    Args:
      journal, leases: of the batch; `run` is their only user while it runs.
      window: limit of the requests under way. Runs may share a window.
      priority: of the requests; a higher number is later.
      on_finished: called after each commit with its answers, which are on disk.
    """

    def __init__(
        self,
        source: InputFile,
        journal: Journal,
        leases: Leases,
        endpoints: LineEndpoints,
        window: Window,
        *,
        priority: int = 0,
        on_finished: Callable[[list[AnsweredLine]], None] = lambda answers: None,
    ):
        self._source, self._journal, self._leases = source, journal, leases
        self._endpoints, self._window, self._priority = endpoints, window, priority
        self._on_finished = on_finished
        self._answers: list[AnsweredLine] = []  # not on disk yet
        self._waiters: list[asyncio.Future[None]] = []  # of the lines of `_answers`
        self._has_answers = asyncio.Event()
        self._journal_turn = asyncio.Lock()

    async def run(self) -> None:
        """Run until every line is finished, here or by another writer.

        Cancellation ends the requests under way, and writes the answers that have come.

        Raises:
          EngineStopped
          OSError: the journal cannot be written, or the input cannot be read.
          JournalError
        """
        try:
            async with asyncio.TaskGroup() as commits:
                committing = commits.create_task(self._commit_forever())
                async with asyncio.TaskGroup() as lines:
                    async for line in self._unfinished():
                        size = self._source.size(line)
                        await self._window.enter(size)
                        task = lines.create_task(self._run_line(line))
                        task.add_done_callback(lambda _, size=size: self._window.leave(size))
                committing.cancel()
        except BaseExceptionGroup as failures:
            raise first_of(failures) from None
        finally:
            if self._answers:
                # A failure of the disk has been raised by the commit that met it first.
                with contextlib.suppress(OSError):
                    self._journal.append(self._answers)
                    self._on_finished(self._answers)

    # ---- which lines

    async def _unfinished(self) -> AsyncIterator[int]:
        """Yield the lines to run, of one leased range after another, until no line is left.

        A range is read again after its lease is taken, so that the answers of its last writer are seen.
        """
        source, lines = self._source, self._source.num_lines
        while True:
            others = False
            for index, first in enumerate(range(1, lines + 1, LINES_A_LEASE)):
                numbers = range(first, min(first + LINES_A_LEASE, lines + 1))
                if self._leases.holds(index) or not self._any_left(numbers):
                    continue
                if not self._leases.take(index):
                    others = True
                    continue
                await self._refresh()
                for number in numbers:
                    if source.has_request(number) and not self._journal.finished(number):
                        yield number
            if not others:
                return
            await asyncio.sleep(POLL_S)
            await self._refresh()

    def _any_left(self, numbers: range) -> bool:
        return any(
            self._source.has_request(number) and not self._journal.finished(number) for number in numbers
        )

    async def _refresh(self) -> None:
        async with self._journal_turn:
            await to_the_end(asyncio.to_thread(self._journal.refresh))

    # ---- one line

    async def _run_line(self, number: int) -> None:
        line = self._source.read(number)
        status, body = await self._ask(line)
        self._answers.append(
            AnsweredLine(
                number, not 200 <= status < 300, output_line(self._journal, number, line, status, body)
            )
        )
        durable = asyncio.get_running_loop().create_future()
        self._waiters.append(durable)
        self._has_answers.set()
        del body
        await durable

    async def _ask(self, line: Line) -> tuple[int, dict[str, Any]]:
        """Return the answer of a line. A refusal for lack of room and a fault of the engine are tried again.

        Raises: EngineStopped.
        """
        pause_s, faults = RETRY_S, 0
        body = bytes(line.body)
        while True:
            try:
                status, answer = await self._endpoints.answer(line.url, body, priority=self._priority)
            except LineFailed as failure:
                return failure.status, failure.body
            except Exception:  # a fault of one line must not stop the others
                log.exception("a line with the url %s failed", line.url)
                status, answer = 500, {"error": {"message": "internal error", "code": "internal_error"}}
            if status < 500 and status not in RETRIED:
                return status, answer
            if not self._endpoints.alive():
                raise EngineStopped("the engine stopped")
            faults += status not in RETRIED
            if faults >= MAX_FAULTS:
                return status, answer
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_RETRY_S)

    # ---- the journal

    async def _commit_forever(self) -> None:
        while True:
            await self._has_answers.wait()
            self._has_answers.clear()
            answers, waiters = self._answers, self._waiters
            async with self._journal_turn:
                self._answers, self._waiters = [], []
                await to_the_end(asyncio.to_thread(self._journal.append, answers))
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self._on_finished(answers)
            await asyncio.sleep(COMMIT_INTERVAL_S)


async def to_the_end[T](work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. A cancellation waits for the end of `work`, and is raised then."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


def first_of(failures: BaseExceptionGroup) -> BaseException:
    """Return the first exception in a group of groups."""
    failure: BaseException = failures
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return failure


def output_line(journal: Journal, number: int, line: Line, status: int, body: dict[str, Any]) -> bytes:
    """Return the line of the output file for an answer, in OpenAI's format."""
    name = request_name(journal, number)
    response = {"status_code": status, "request_id": body.get("id", name), "body": body}
    return msgspec.json.encode({"id": name, "custom_id": line.custom_id, "response": response, "error": None})


def unanswered_line(journal: Journal, number: int, line: Line, code: str, message: str) -> bytes:
    """Return the line of the file of errors for a line that got no answer."""
    error = {"code": code, "message": message}
    return msgspec.json.encode(
        {
            "id": request_name(journal, number),
            "custom_id": line.custom_id,
            "response": None,
            "error": error,
        }
    )


def request_name(journal: Journal, number: int) -> str:
    """Return the id of a line's request: the same one in every run."""
    return f"batch_req_{journal.input.digest[:16]}_{number}"


def write_output(journal: Journal, path: Path, *, failed: bool | None = None) -> int:
    """Write the finished lines of a journal to a file, in the order of the input. Return their number.

    The file appears whole or not at all. `failed`: see `Journal.outputs`.

    Raises:
      OSError: for example a full disk. No file is left.
      JournalError
    """
    return write_lines((output for _, output in journal.outputs(failed=failed)), path)


def error_lines(journal: Journal, source: InputFile, code: str, message: str) -> Iterator[bytes]:
    """Yield the file of errors, in the order of the input: failed lines, and
    `code` for lines without an answer.
    """
    failed = journal.outputs(failed=True)
    number, output = next(failed, (0, b""))
    for line in range(1, source.num_lines + 1):
        if line == number:
            yield output
            number, output = next(failed, (0, b""))
        elif source.has_request(line) and not journal.finished(line):
            yield unanswered_line(journal, line, source.read(line), code, message)


def write_lines(lines: Iterable[bytes], path: Path) -> int:
    """Write lines to a file that appears whole or not at all. Return their number. Raises: OSError."""
    path = path.resolve()  # a link stays a link
    part = path.with_name(f".{path.name}.part")
    count = 0
    try:
        with open(part, "wb", buffering=2**20) as file:
            for line in lines:
                file.write(line)
                file.write(b"\n")
                count += 1
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        sync_folder(path.parent)
    except (OSError, JournalError):
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    return count
