"""Parquet files of a batch: a row is a line. The rest of a batch knows JSON lines only.

Input columns: `custom_id` and `url` are strings; `body` is a string of JSON, or a struct. `method` may be
left out.
Output columns: `id`, `custom_id`, `status_code`, `request_id`, and `body` as a string of JSON.
"""

import contextlib
import importlib.util
import itertools
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from jaxflow.config import ConfigError
from serving.batch.input_file import MAX_ERRORS, FileLimits, InvalidInput, LineError
from serving.batch.journal import sync_folder

SUFFIX = ".parquet"
NEEDED = ("custom_id", "url", "body")
ROWS_AT_ONCE = 1024  # rows in memory


def is_parquet(path: Path) -> bool:
    """Return True for a file that is read or written as parquet."""
    return path.suffix.lower() == SUFFIX


def check_format(field: str, path: Path) -> None:
    """Check that the format of a file can be read and written here. Raises: ConfigError for `field`."""
    if is_parquet(path) and importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(
            field, str(path), 'a file of JSON lines, or parquet after pip install "jaxflow[cluster]"'
        )


@contextlib.contextmanager
def json_lines(path: Path, limits: FileLimits | None = None) -> Iterator[Path]:
    """Give an input file as JSON lines: itself, or a temporary file with the rows of a parquet file.

    Raises:
      ConfigError: the file is not parquet, or lacks a column.
      InvalidInput: with the number of each row whose body is not JSON. The first row is 1.
      OSError
    """
    if not is_parquet(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="jaxflow-batch-") as folder:
        lines = Path(folder) / "input.jsonl"
        _convert(path, lines, limits or FileLimits())
        yield lines


def _convert(path: Path, lines: Path, limits: FileLimits) -> None:
    """Write the rows of a parquet file as JSON lines."""
    import pyarrow.parquet  # pyright: ignore[reportMissingImports]

    try:
        source = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ConfigError("input_file", str(path), f"a parquet file ({error})") from error
    errors: list[LineError] = []
    count = size = 0
    with source, open(lines, "wb", buffering=2**20) as file:
        _check_columns(path, source.schema_arrow)
        if source.metadata.num_rows > limits.lines:
            message = f"the file has {source.metadata.num_rows} requests; accepted: at most {limits.lines}"
            raise InvalidInput([LineError("too_many_tasks", message)])
        columns = [name for name in (*NEEDED, "method") if name in source.schema_arrow.names]
        batches = source.iter_batches(batch_size=ROWS_AT_ONCE, columns=columns)
        for number, row in enumerate(itertools.chain.from_iterable(b.to_pylist() for b in batches), 1):
            try:
                line = _line(row)
            except msgspec.MsgspecError as error:
                count += 1
                if len(errors) < MAX_ERRORS:
                    message = f"body is not JSON: {error}"
                    errors.append(LineError("invalid_json_line", message, number, "body"))
                continue
            size += file.write(line)
            if size > limits.file_bytes:
                message = f"the file has more than {limits.file_bytes} bytes as JSON lines"
                raise InvalidInput([LineError("file_too_large", message)])
    if errors:
        raise InvalidInput(errors, count)


def _check_columns(path: Path, schema: Any) -> None:
    import pyarrow.types as types  # pyright: ignore[reportMissingImports]

    def is_text(kind: Any) -> bool:
        return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)

    for name in NEEDED:
        if name not in schema.names:
            found = f"{path} with the columns {', '.join(schema.names)}"
            raise ConfigError("input_file", found, f"a parquet file with the columns {', '.join(NEEDED)}")
        kind = schema.field(name).type
        if not (is_text(kind) or (name == "body" and types.is_struct(kind))):
            accepted = "string of JSON, or struct" if name == "body" else "string"
            raise ConfigError(f"column {name} of {path}", str(kind), accepted)


def _line(row: dict[str, Any]) -> bytes:
    """Return the JSON line of a row. Raises: MsgspecError."""
    body = row["body"]
    if isinstance(body, str):
        msgspec.json.decode(body)
        raw = msgspec.Raw(msgspec.json.format(body.encode(), indent=-1))
    else:
        raw = msgspec.Raw(msgspec.json.encode(_without_nulls(body)))
    return msgspec.json.encode({"method": "POST", **row, "body": raw}) + b"\n"


def _without_nulls(value: Any) -> Any:
    """Return a struct's value without fields that are null: in parquet every
    row has all fields of the file.
    """
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Output(msgspec.Struct):
    """A line of the output file."""

    id: str
    custom_id: str
    response: _Response


_decode = msgspec.json.Decoder(_Output).decode


def write_parquet(outputs: Iterable[bytes], path: Path) -> None:
    """Write lines of the output file as parquet. The file appears whole or not at all. Raises: OSError."""
    import pyarrow  # pyright: ignore[reportMissingImports]
    import pyarrow.parquet  # pyright: ignore[reportMissingImports]

    text = pyarrow.string()
    fields = {"id": text, "custom_id": text, "status_code": pyarrow.int32(), "request_id": text, "body": text}
    schema = pyarrow.schema(list(fields.items()))
    path = path.resolve()  # a link stays a link
    part = path.with_name(f".{path.name}.part")
    try:
        with open(part, "wb") as file:
            with pyarrow.parquet.ParquetWriter(file, schema) as writer:
                for lines in itertools.batched(outputs, ROWS_AT_ONCE):
                    rows = [_row(line) for line in lines]
                    writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def _row(line: bytes) -> dict[str, Any]:
    output = _decode(line)
    response = output.response
    return {
        "id": output.id,
        "custom_id": output.custom_id,
        "status_code": response.status_code,
        "request_id": response.request_id,
        "body": bytes(response.body).decode(),
    }
