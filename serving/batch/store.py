"""The files and batches of `/v1/files` and `/v1/batches` on disk.

  FOLDER/files/ID/content, meta.json       an uploaded or written file; it exists once meta.json exists
  FOLDER/batches/ID/batch.json, journal/   a batch and the answers of an unfinished one
  FOLDER/uploads/                          incomplete uploads, deleted at the start

Every JSON file is replaced as a whole. One process at a time uses a folder.
"""

import asyncio
import contextlib
import dataclasses
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from jaxflow.config import ConfigError
from serving.batch.input_file import LineError
from serving.batch.journal import sync_folder, write_all
from serving.batch.leases import Leases
from serving.batch.runner import to_the_end

Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
ENDED = ("failed", "completed", "expired", "cancelled")


class StoredFile(msgspec.Struct, kw_only=True):
    """A file. The fields up to `status` are those of OpenAI's file object."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"
    owner: str = ""

    def public(self) -> dict[str, Any]:
        """Return OpenAI's file object."""
        fields = msgspec.to_builtins(self)
        del fields["owner"]
        return fields


class RequestCounts(msgspec.Struct):
    """The `request_counts` of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Errors(msgspec.Struct):
    """The `errors` of a batch: why its input file was refused."""

    data: list[LineError]
    object: str = "list"


class Batch(msgspec.Struct, kw_only=True):
    """A batch. All fields except the last two are those of OpenAI's batch object.

    Attributes:
      ending: the status after `finalizing`.
    """

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: Status = "validating"
    object: str = "batch"
    errors: Errors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None
    owner: str = ""
    ending: Status = "completed"

    def public(self) -> dict[str, Any]:
        """Return OpenAI's batch object."""
        fields = msgspec.to_builtins(self)
        del fields["owner"], fields["ending"]
        return fields

    def enter(self, status: Status) -> None:
        """Change the status, and note the time."""
        self.status = status
        setattr(self, f"{status}_at", int(time.time()))


class StoreFull(Exception):
    """A limit of the store is reached."""


@dataclasses.dataclass(frozen=True)
class StoreLimits:
    """The most files and batches of a store, and the most bytes of its files together."""

    files: int = 10_000
    batches: int = 10_000
    total_bytes: int = 100 * 1024**3


class Store:
    """The files and batches in a folder. Used on one event loop; writes run on other threads.

    Raises:
      ConfigError: the folder cannot be used, or another process uses the folder.
    """

    def __init__(self, folder: Path, limits: StoreLimits | None = None):
        self.folder, self.limits = folder, limits or StoreLimits()
        self.files: dict[str, StoredFile] = {}  # oldest first
        self.batches: dict[str, Batch] = {}
        self._turn = asyncio.Lock()
        try:
            for name in ("files", "batches", "uploads"):
                (folder / name).mkdir(parents=True, exist_ok=True)
            self._lock = Leases(folder / "lock")
            if not self._lock.take(0):
                raise ConfigError("batch_dir", str(folder), "a folder that no other server uses")
            for part in (folder / "uploads").iterdir():
                part.unlink()
            self.files = self._read("files", "meta.json", StoredFile)
            self.batches = self._read("batches", "batch.json", Batch)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError("batch_dir", str(folder), f"a folder of batches ({error})") from error

    def close(self) -> None:
        """Let another process use the folder."""
        self._lock.close()

    # ---- files

    def check_room(self, coming_bytes: int = 0) -> None:
        """Check that another file may be added, beside uploads under way of `coming_bytes`.

        Raises: StoreFull.
        """
        used = sum(file.bytes for file in self.files.values()) + coming_bytes
        if len(self.files) >= self.limits.files or used >= self.limits.total_bytes:
            raise StoreFull(
                f"the server keeps {len(self.files)} files of {used} bytes; accepted: fewer than "
                f"{self.limits.files} files and {self.limits.total_bytes} bytes. Delete files first"
            )

    def path(self, file: StoredFile) -> Path:
        """Return the path of a file's content."""
        return self.folder / "files" / file.id / "content"

    def upload_path(self) -> Path:
        """Return a new path for an incomplete upload."""
        return self.folder / "uploads" / secrets.token_hex(16)

    async def add_file(self, content: Path, filename: str, purpose: str, owner: str) -> StoredFile:
        """Move a complete file into the store, and return it once it is on disk. Raises: OSError."""
        file = StoredFile(
            id=new_file_id(),
            bytes=content.stat().st_size,
            created_at=int(time.time()),
            filename=filename,
            purpose=purpose,
            owner=owner,
        )

        def move() -> None:
            self.path(file).parent.mkdir()
            with open(content, "rb") as data:
                os.fsync(data.fileno())
            os.replace(content, self.path(file))

        await asyncio.to_thread(move)
        await self.save_file(file)
        return file

    async def write_file(
        self, file_id: str, write: Callable[[Path], int], filename: str, owner: str
    ) -> StoredFile:
        """Write a file of this id, again after a crash, and return it once it is on disk.

        `write`: writes the content to a path and returns the number of lines. Raises: OSError.
        """
        path = self.folder / "files" / file_id / "content"

        def make() -> int:
            path.parent.mkdir(exist_ok=True)
            write(path)
            return path.stat().st_size

        file = StoredFile(
            id=file_id,
            bytes=await asyncio.to_thread(make),
            created_at=int(time.time()),
            filename=filename,
            purpose="batch_output",
            owner=owner,
        )
        await self.save_file(file)
        return file

    async def save_file(self, file: StoredFile) -> None:
        """Write the description of a file. Then the file exists. Raises: OSError."""
        await self._write(self.path(file).with_name("meta.json"), file)
        self.files[file.id] = file

    async def delete_file(self, file: StoredFile) -> None:
        """Delete a file. Raises: OSError."""
        del self.files[file.id]
        folder = self.path(file).parent
        (folder / "meta.json").unlink(missing_ok=True)  # from here on the file does not exist
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    # ---- batches

    def batch_folder(self, batch: Batch) -> Path:
        """Return the folder of a batch."""
        return self.folder / "batches" / batch.id

    async def save_batch(self, batch: Batch) -> None:
        """Write a batch to disk. Raises: OSError, StoreFull for one batch too many."""
        if batch.id not in self.batches and len(self.batches) >= self.limits.batches:
            raise StoreFull(f"the server keeps at most {self.limits.batches} batches")
        self.batch_folder(batch).mkdir(exist_ok=True)
        await self._write(self.batch_folder(batch) / "batch.json", batch)
        self.batches[batch.id] = batch

    # ---- JSON files

    async def _write(self, path: Path, value: StoredFile | Batch) -> None:
        """Replace a JSON file. The writes of one store run one after another."""
        async with self._turn:
            await to_the_end(asyncio.to_thread(replace_file, path, msgspec.json.encode(value)))

    def _read[T: StoredFile | Batch](self, kind: str, name: str, type_: type[T]) -> dict[str, T]:
        """Return what the folder of a kind holds, oldest first. Folders without a description are deleted."""
        found: list[T] = []
        for folder in (self.folder / kind).iterdir():
            try:
                found.append(msgspec.json.decode((folder / name).read_bytes(), type=type_))
            except FileNotFoundError:
                shutil.rmtree(folder, ignore_errors=True)
        return {one.id: one for one in sorted(found, key=lambda one: (one.created_at, one.id))}


def new_file_id() -> str:
    """Return a new id of a file, which nobody can guess."""
    return f"file-{secrets.token_hex(16)}"


def new_batch_id() -> str:
    """Return a new id of a batch, which nobody can guess."""
    return f"batch_{secrets.token_hex(16)}"


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file as a whole: after a crash the file is the old or the new one. Raises: OSError."""
    part = path.with_name(f".{path.name}.part")
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        write_all(file, data)
        os.fsync(file)
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    finally:
        os.close(file)
    sync_folder(path.parent)


def page[T: StoredFile | Batch](
    items: Iterable[T], owner: str, *, after: str | None, limit: int, newest_first: bool = True
) -> tuple[list[T], bool]:
    """Return one page of an owner's items, and whether more follow. `after`: the id before the page."""
    mine = [item for item in items if item.owner == owner]
    if newest_first:
        mine.reverse()
    if after is not None:
        ids = [item.id for item in mine]
        mine = mine[ids.index(after) + 1 :] if after in ids else []
    return mine[:limit], len(mine) > limit
