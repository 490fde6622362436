"""A batch of files: an input file, its journal, and the output file that the journal gives in the end."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from jaxflow.request import InvalidRequest
from serving.batch.input_file import CheckBody, FileLimits, InputFile, InvalidInput, LineError, open_input
from serving.batch.journal import AnsweredLine, Input, Journal
from serving.batch.leases import Leases
from serving.batch.parquet import is_parquet, write_parquet
from serving.batch.runner import Runner, write_output
from serving.batch.window import Window
from serving.frontend.line_endpoints import LineEndpoints


class _Named(msgspec.Struct):
    """The part of a body that names the model."""

    model: str | None = None


_model_of = msgspec.json.Decoder(_Named).decode


class FileBatch:
    """A checked input file and its open journal. Several processes may share a
    journal; each runs other lines.

    Attributes:
      models: the names of models in the bodies.
    """

    def __init__(self, source: InputFile, journal: Journal, leases: Leases, models: set[str]):
        self.source, self.journal, self.models = source, journal, models
        self._leases = leases

    @property
    def num_left(self) -> int:
        """Return the number of lines without an answer."""
        return self.source.num_requests - self.journal.num_finished

    def check_models(self, names: tuple[str, ...]) -> None:
        """Check that every line names a served model, or none.

        Raises: InvalidInput, with the lines that do not.
        """
        if self.models <= {"", *names}:
            return

        def check(url: str, body: bytes) -> None:
            if (name := _model_of(body).model or "") and name not in names:
                raise InvalidRequest("model", name, " or ".join(names))

        open_input(self.source.path, check).close()

    async def run(
        self,
        endpoints: LineEndpoints,
        window: Window,
        on_finished: Callable[[list[AnsweredLine]], None] = lambda answers: None,
    ) -> None:
        """Run the lines without an answer, see `Runner`. Raises: EngineStopped, OSError, JournalError."""
        runner = Runner(self.source, self.journal, self._leases, endpoints, window, on_finished=on_finished)
        await runner.run()

    def write(self, path: Path) -> None:
        """Write the output file: all lines in the order of the input. Raises: OSError, JournalError."""
        if is_parquet(path):
            write_parquet((output for _, output in self.journal.outputs()), path)
        else:
            write_output(self.journal, path)

    def close(self) -> None:
        """Close the files. The journal stays on disk."""
        self.journal.close()
        self._leases.close()
        self.source.close()


def open_batch(
    path: Path, journal: Path, model: str, check_body: CheckBody, limits: FileLimits | None = None
) -> FileBatch:
    """Check a whole input file and open its journal.

    Args:
      journal: the journal's folder.
      model: name of the model, which the journal keeps.
      check_body: checks the body of a line as the endpoint does.

    Raises:
      InvalidInput: with the number of each line that is refused.
      JournalError: the journal has answers of another input or model.
      OSError
    """
    models: set[str] = set()

    def check(url: str, body: bytes) -> None:
        check_body(url, body)
        models.add(_model_of(body).model or "")

    source = open_input(path, check, limits)
    try:
        opened = Journal(journal, Input(source.digest, source.num_lines, model))
        return FileBatch(source, opened, Leases(journal / "leases"), models)
    except BaseException:
        source.close()
        raise


def report_of(error: InvalidInput) -> str:
    """Return the errors of an input file, one a line."""
    lines = [_text(each) for each in error.errors]
    if error.count > len(error.errors):
        lines.append(f"and {error.count - len(error.errors)} more errors")
    return "\n".join(lines)


def _text(error: LineError) -> str:
    return error.message if error.line is None else f"line {error.line}: {error.message}"
