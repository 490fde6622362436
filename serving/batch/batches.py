"""The batches of a server: each goes from `validating` to its end, also over restarts of the server."""

import asyncio
import contextvars
import dataclasses
import errno
import logging
import shutil
import time
from pathlib import Path

from serving.batch.input_file import CheckBody, FileLimits, InputFile, InvalidInput, LineError, open_input
from serving.batch.journal import Input, Journal, JournalError
from serving.batch.leases import Leases
from serving.batch.runner import EngineStopped, Runner, error_lines, write_lines
from serving.batch.store import ENDED, Batch, Errors, RequestCounts, Status, Store, new_file_id
from serving.batch.window import Window
from serving.frontend.access import CALLER, Caller
from serving.frontend.line_endpoints import LineEndpoints

log = logging.getLogger(__name__)

MAX_RUNNING = 8  # batches that run at the same time and share the window
RETRY_DISK_S = 10.0
PAUSE_S = 0.001  # a validation pauses after every few lines, so that streams run
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
UNANSWERED = {
    "expired": ("batch_expired", "the completion window of the batch ended before this request ran"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before this request ran"),
}


@dataclasses.dataclass(frozen=True)
class BatchModel:
    """The model that answers batches.

    Attributes:
      check_body: checks the body of a line as the endpoint does.
    """

    name: str
    endpoints: LineEndpoints
    check_body: CheckBody


class Batches:
    """The batches of a store. Used on one event loop.

    Args:
      window: the requests under way, of all batches together.
      priority: of the requests.
    """

    def __init__(
        self,
        store: Store,
        model: BatchModel,
        window: Window,
        *,
        priority: int,
        limits: FileLimits | None = None,
    ):
        self.store, self._model, self._window = store, model, window
        self._priority, self._limits = priority, limits or FileLimits()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._journals: dict[str, Journal] = {}  # journals of the running batches
        self._running = asyncio.Semaphore(MAX_RUNNING)
        self._started = self._closed = False

    def start(self) -> None:
        """Run the batches that have not ended, oldest first, and later ones.

        Batches only wait before the start.
        """
        self._started = True
        for batch in self.store.batches.values():
            if batch.status not in ENDED:
                self._begin(batch)
            else:  # the last process may have ended between the end of the batch and the removal
                shutil.rmtree(self.store.batch_folder(batch) / "journal", ignore_errors=True)

    async def close(self) -> None:
        """Stop. What is finished stays on disk, and `start` of the next process continues."""
        if self._closed:
            return
        self._closed = True
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self.store.close()

    async def create(self, batch: Batch) -> None:
        """Add a batch. Raises: OSError, StoreFull."""
        await self.store.save_batch(batch)
        self._begin(batch)

    async def cancel(self, batch: Batch) -> None:
        """Begin to cancel a batch that has not ended. Finished lines keep their answers. Raises: OSError."""
        if batch.status in ("validating", "in_progress"):
            batch.enter("cancelling")
            await self.store.save_batch(batch)
            task = self._tasks.get(batch.id)
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
            self._begin(batch)

    def shown(self, batch: Batch) -> Batch:
        """Return the batch with its present counts."""
        journal = self._journals.get(batch.id)
        if journal is not None:
            batch.request_counts = counts_of(batch, journal)
        return batch

    def uses(self, file_id: str) -> bool:
        """Return True if a batch that has not ended needs a file."""
        return any(
            file_id == batch.input_file_id and batch.status not in ENDED
            for batch in self.store.batches.values()
        )

    # ---- one batch

    def _begin(self, batch: Batch) -> None:
        if self._started and not self._closed:
            # The requests count as the owner's, also after a restart. They belong to no HTTP request.
            context = contextvars.Context()
            context.run(CALLER.set, Caller(batch.owner))
            self._tasks[batch.id] = asyncio.create_task(self._live(batch), context=context)

    async def _live(self, batch: Batch) -> None:
        """Take a batch to its end. A full disk is waited for; a lost input or journal fails the batch."""
        async with self._running:
            while True:
                try:
                    await self._advance(batch)
                    break
                except EngineStopped:
                    log.error("batch %s stopped with the engine; a new server continues it", batch.id)
                    break
                except OSError as error:
                    if error.errno not in FULL:
                        await self._fail(batch, [LineError("internal_error", f"{error.strerror or error}")])
                        break
                    log.error("batch %s: %s; trying again in %g s", batch.id, error, RETRY_DISK_S)
                    await asyncio.sleep(RETRY_DISK_S)
                except JournalError as error:
                    await self._fail(batch, [LineError("internal_error", str(error))])
                    break
                except Exception:
                    log.exception("batch %s stopped; a new server continues it", batch.id)
                    break
        self._tasks.pop(batch.id, None)

    async def _advance(self, batch: Batch) -> None:
        input_file = self.store.files.get(batch.input_file_id)
        if input_file is None:
            await self._fail(batch, [LineError("file_not_found", "the input file was deleted")])
            return
        try:
            source = await asyncio.to_thread(
                open_input,
                self.store.path(input_file),
                self._model.check_body,
                self._limits,
                urls=(batch.endpoint,),
                pause=lambda: time.sleep(PAUSE_S),
            )
        except InvalidInput as error:
            await self._fail(batch, error.errors)
            return
        folder = self.store.batch_folder(batch) / "journal"
        work = Input(source.digest, source.num_lines, self._model.name)
        journal = await asyncio.to_thread(Journal, folder, work)
        leases = Leases(folder / "leases")
        self._journals[batch.id] = journal
        try:
            if batch.status == "validating":
                batch.request_counts.total = source.num_requests
                batch.enter("in_progress")
                await self.store.save_batch(batch)
            if batch.status == "in_progress":
                await self._finalize(batch, await self._run(batch, source, journal, leases))
            elif batch.status == "cancelling":
                await self._finalize(batch, "cancelled")
            await self._write(batch, source, journal)
        finally:
            batch.request_counts = counts_of(batch, journal)
            del self._journals[batch.id]
            journal.close()
            leases.close()
            source.close()
        batch.enter(batch.ending)
        await self.store.save_batch(batch)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _run(self, batch: Batch, source: InputFile, journal: Journal, leases: Leases) -> Status:
        """Run the unfinished lines, and return the status that the batch ends with."""
        runner = Runner(
            source,
            journal,
            leases,
            self._model.endpoints,
            self._window,
            priority=self._priority,
        )
        # The wall clock is read once, so that a jump of the clock expires no batch that runs.
        try:
            async with asyncio.timeout(batch.expires_at - time.time()) as window:
                await runner.run()
        except TimeoutError:
            if not window.expired():
                raise
            return "expired"
        return "completed"

    async def _finalize(self, batch: Batch, ending: Status) -> None:
        """Choose the ids of the files before they are written: after a crash the same files are written."""
        batch.ending = ending
        batch.enter("finalizing")
        batch.output_file_id, batch.error_file_id = new_file_id(), new_file_id()
        await self.store.save_batch(batch)

    async def _write(self, batch: Batch, source: InputFile, journal: Journal) -> None:
        """Write the files of the answers and of the errors. A file without lines is not made."""
        missing = source.num_requests - journal.num_finished
        if journal.num_finished > journal.num_failed and batch.output_file_id is not None:

            def outputs(path: Path) -> int:
                return write_lines((output for _, output in journal.outputs(failed=False)), path)

            await self.store.write_file(
                batch.output_file_id, outputs, f"{batch.id}_output.jsonl", batch.owner
            )
        else:
            batch.output_file_id = None
        if (journal.num_failed or missing) and batch.error_file_id is not None:
            code, message = UNANSWERED.get(batch.ending, ("internal_error", "this request has no answer"))

            def failures(path: Path) -> int:
                return write_lines(error_lines(journal, source, code, message), path)

            await self.store.write_file(batch.error_file_id, failures, f"{batch.id}_error.jsonl", batch.owner)
        else:
            batch.error_file_id = None

    async def _fail(self, batch: Batch, errors: list[LineError]) -> None:
        batch.errors = Errors(errors)
        batch.enter("failed")
        try:
            await self.store.save_batch(batch)
        except OSError as error:
            log.error("batch %s failed, which could not be written: %s", batch.id, error)


def counts_of(batch: Batch, journal: Journal) -> RequestCounts:
    """Return the counts of a batch, from its journal."""
    completed = journal.num_finished - journal.num_failed
    return RequestCounts(batch.request_counts.total, completed, journal.num_failed)
