"""The command of a batch: check the input file, load the model, run the lines, and write the output file."""

import asyncio
import dataclasses
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from jaxflow.cli.output_files import check_output
from jaxflow.config import ConfigError
from serving.batch.file_batch import FileBatch, open_batch, report_of
from serving.batch.input_file import InvalidInput
from serving.batch.journal import AnsweredLine, JournalError
from serving.batch.parquet import check_format, json_lines
from serving.batch.runner import EngineStopped
from serving.batch.window import Window
from serving.batch_engine import BatchEngine
from serving.cluster.link import StartFailed
from serving.frontend.config import ServerConfig
from serving.frontend.served_model import ServedModel
from serving.http.endpoints import Endpoints

CONTINUE = "run the same command again to continue"


@dataclasses.dataclass(frozen=True)
class Options:
    """The settings of the command.

    Attributes:
      input_file, output_file: JSON lines, or parquet if the name ends with `.parquet`.
      model: the value of --model. The journal keeps its last part, which is the same on every machine.
      served_model_names: accepted names of the model; empty for the model's own name.
      journal: folder of the finished answers; None for the output file's name with `.journal`.
      window: most requests under way at an engine; None for twice the sequences that run at once.
    """

    input_file: Path
    output_file: Path
    model: str
    served_model_names: tuple[str, ...] = ()
    journal: Path | None = None
    window: int | None = None
    progress: bool = True

    @property
    def journal_folder(self) -> Path:
        """Return the folder of the journal."""
        return self.journal or Path(f"{self.output_file}.journal")


def answer_file(options: Options, load: Callable[[], BatchEngine]) -> int:
    """Answer the input file's lines and return the exit status: 1 also if a line's answer is an error.

    `load`: returns the engine. The function is called once the input is checked, unless no line is left.
    """
    batch = None
    try:
        if not options.input_file.is_file():
            raise ConfigError("input_file", str(options.input_file), "a file that exists")
        check_output("output_file", str(options.output_file))
        if options.output_file.exists() and not options.output_file.is_file():
            raise ConfigError("output_file", str(options.output_file), "a regular file, or none yet")
        for name in ("input_file", "output_file"):
            check_format(name, getattr(options, name))
        with json_lines(options.input_file) as source:
            batch = _open(source, options)
            if batch.num_left and (status := _run_left(batch, options, load)):
                return status
            batch.write(options.output_file)
        finished, failed = batch.journal.num_finished, batch.journal.num_failed
    except InvalidInput as error:
        return _fail(f"{options.input_file} is refused:\n{report_of(error)}")
    except EngineStopped as error:
        return _fail(f"{error}; {CONTINUE}")
    except Exception as error:
        known = isinstance(error, JournalError | OSError | StartFailed)
        if not (known or type(error).__module__.startswith("jaxflow.")):
            raise
        if isinstance(error, OSError) and not error.filename:  # a full disk names no file
            error.filename = str(options.output_file)
        return _fail(str(error))
    finally:
        if batch is not None:
            batch.close()
    print(
        f"wrote {options.output_file}: {finished - failed} answers, {failed} errors. The "
        f"journal {options.journal_folder} may be deleted"
    )
    return 1 if failed else 0


def _open(source: Path, options: Options) -> FileBatch:
    """Check the input's lines and open the journal. Raises: InvalidInput, JournalError, OSError."""
    endpoints = Endpoints(ServedModel(ServerConfig()))
    batch = open_batch(source, options.journal_folder, Path(options.model).name, endpoints.check)
    if options.served_model_names:
        try:
            batch.check_models(options.served_model_names)
        except BaseException:
            batch.close()
            raise
    return batch


def _run_left(batch: FileBatch, options: Options, load: Callable[[], BatchEngine]) -> int:
    """Run the lines without an answer. Return 0, or the exit status after a signal."""
    engine = load()
    try:
        return asyncio.run(_run(batch, options, engine))
    finally:
        engine.close()


async def run_lines(
    batch: FileBatch,
    engine: BatchEngine,
    *,
    served_model_names: tuple[str, ...] = (),
    window: int | None = None,
    on_finished: Callable[[list[AnsweredLine]], None] = lambda answers: None,
) -> None:
    """Run the lines without an answer on an engine. `window`: see `Options`.

    Raises: EngineStopped, OSError, JournalError, StartFailed, InvalidInput for a line with another model.
    """
    async with engine.answering(window) as model:
        batch.check_models(served_model_names or (model.name,))
        await batch.run(model.endpoints, Window(model.lines, model.body_bytes), on_finished)


async def _run(batch: FileBatch, options: Options, engine: BatchEngine) -> int:
    signals: list[int] = []
    task = asyncio.current_task()
    assert task is not None

    def on_signal(number: int) -> None:
        if signals:
            os._exit(128 + number)  # the second signal ends the process at once
        signals.append(number)
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    total = batch.source.num_requests
    with tqdm(
        total=total, initial=batch.journal.num_finished, unit="line", disable=not options.progress
    ) as bar:

        def on_finished(answers: list[AnsweredLine]) -> None:
            bar.set_postfix(errors=batch.journal.num_failed, refresh=False)
            bar.update(batch.journal.num_finished - bar.n)

        try:
            await run_lines(
                batch,
                engine,
                served_model_names=options.served_model_names,
                window=options.window,
                on_finished=on_finished,
            )
        except asyncio.CancelledError:
            if not signals:
                raise
            task.uncancel()
    if not signals:
        return 0
    print(f"stopped: {batch.journal.num_finished} of {total} lines are finished; {CONTINUE}", file=sys.stderr)
    return 128 + signals[0]


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 1
