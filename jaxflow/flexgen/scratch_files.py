"""Files that stand for memory: a folder of them for one run, gone when the run is.

A file is a header and the bytes, reserved in full when it is made, so that a full disk is met at the start
and not in the middle of a block. Whatever is written at an offset is read back whole, and its checksum must
be that of what was written: a bit that the disk changed ends the run, where it would have made other tokens.
Checksums are kept in memory, since nothing is kept for a next run. The folder holds a lock as long as its
process lives: a run that was killed leaves its folder behind, and the next one on the same disk removes it
(`sweep`).
"""

import concurrent.futures
import contextlib
import errno
import fcntl
import os
import shutil
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxflow.config import ConfigError
from jaxflow.kv.tiers.page_file import checksum

PREFIX = "jaxflow-offload-"
_LOCK = "lock"
_HEADER = struct.Struct("<8sIIQ")  # magic, version, bytes of the header, bytes behind it
_MAGIC, _VERSION = b"JAXFLOWO", 1
HEADER_BYTES = 4096  # a header takes a page of the file system, so that what follows is aligned
_MOST_PIECES = 512  # of one vectored call; POSIX allows 1024 on Linux
_CHUNK = 8 << 20  # bytes of one call: what was read before is summed beside it
_GIGA = 1e9


class DiskError(OSError):
    """The disk tier failed; the message names the file and what would help."""


class DiskFolder:
    """A folder of its own under `path`, for this process alone.

    Raises:
      ConfigError: `disk_path` is no folder that can be written to.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=check_folder(path)))
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._files: list[DiskFile] = []
        self._sums = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checksum")

    def create(self, name: str, size: int) -> "DiskFile":
        """A file of `size` bytes behind its header. Raises: DiskError."""
        file = DiskFile(self.path / name, size, self._sums)
        self._files.append(file)
        return file

    def close(self) -> None:
        """Closes and removes everything; may be called again. Nobody reads or writes any more."""
        self._sums.shutdown()
        for file in self._files:
            file.close()
        self._files.clear()
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class DiskFile:
    """Bytes of one file, read and written in pieces at offsets. Reads and writes of different threads do not
    disturb each other.

    sums: a single thread, on which checksums are made beside the transfers.
    """

    def __init__(self, path: Path, size: int, sums: concurrent.futures.ThreadPoolExecutor):
        self.path, self.size, self._sums = path, size, sums
        self._written: dict[int, tuple[int, int]] = {}  # by offset: bytes, and their checksum
        self._fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(self._fd, 0, HEADER_BYTES + size)
            os.pwrite(self._fd, _HEADER.pack(_MAGIC, _VERSION, HEADER_BYTES, size), 0)
        except OSError as error:
            self.close()
            raise self._fault("reserve", size, error) from error
        self._checked = False

    def write(self, offset: int, pieces: Sequence[np.ndarray]) -> int:
        """Puts arrays one behind the other, the first at `offset`; returns the bytes written. Raises:
        DiskError.
        """
        self._written.pop(offset, None)
        total, crc = self._move(os.pwritev, "write", offset, pieces)
        self._written[offset] = total, crc
        return total

    def read(self, offset: int, pieces: Sequence[np.ndarray]) -> int:
        """Fills arrays with what was last written at `offset`, as many bytes; returns how many.

        Raises:
          DiskError: also for a file that was cut, and for bytes that are not those that were written.
        """
        if not self._checked:
            self._check_header()
        size, expected = self._written.get(offset, (0, 0))
        total, crc = self._move(os.preadv, "read", offset, pieces)
        if total != size:
            raise ValueError(f"{self.path}: {total} bytes are read at {offset}, where {size} were written")
        if crc != expected:
            raise DiskError(
                errno.EIO,
                (
                    f"{self.path}: bytes {offset} to {offset + size} are not what was written: the disk, "
                    f"or something else, changed them"
                ),
            )
        return total

    def drop_cache(self) -> None:
        """The system need not keep this file's pages: a run's memory is what it was given."""
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _move(self, call, verb: str, offset: int, pieces: Sequence[np.ndarray]) -> tuple[int, int]:
        """Bytes that were moved, and their checksum."""
        buffers = [memoryview(piece.reshape(-1).view(np.uint8)) for piece in pieces if piece.nbytes]
        total = sum(len(buffer) for buffer in buffers)
        if offset < 0 or offset + total > self.size:
            raise ValueError(f"{self.path}: [{offset}, {offset + total}) of {self.size} bytes")
        at, left = HEADER_BYTES + offset, buffers
        summed: concurrent.futures.Future[int] | None = None
        while left:
            try:
                done = call(self._fd, _first(left[:_MOST_PIECES], _CHUNK), at)
            except OSError as error:
                raise self._fault(verb, total, error) from error
            if not done:
                raise DiskError(
                    errno.EIO,
                    (
                        f"{self.path}: ends at {at} of {HEADER_BYTES + self.size} bytes: something cut "
                        f"it while it was in use"
                    ),
                )
            at += done
            summed = self._sums.submit(_sum_on, _first(left, done), summed)
            left = _behind(left, done)
        return total, 0 if summed is None else summed.result()

    def _check_header(self) -> None:
        try:
            head = os.pread(self._fd, _HEADER.size, 0)
        except OSError as error:
            raise self._fault("read", _HEADER.size, error) from error
        if len(head) < _HEADER.size or _HEADER.unpack(head) != (_MAGIC, _VERSION, HEADER_BYTES, self.size):
            raise DiskError(
                errno.EIO,
                f"{self.path}: its header is not the one that was written: something else wrote to it",
            )
        self._checked = True

    def _fault(self, verb: str, size: int, error: OSError) -> DiskError:
        help_ = "the disk reported it: look at the system's log, or use another disk_path"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            help_ = "lower the policy's disk shares, or use another disk_path"
            with contextlib.suppress(DiskError):
                help_ = f"{free_bytes(self.path.parent) / _GIGA:.3f} GB are free there; {help_}"
        return DiskError(
            error.errno, f"{self.path}: cannot {verb} {size / _GIGA:.3f} GB: {error.strerror}; {help_}"
        )


def check_folder(path: str | os.PathLike) -> Path:
    """The folder that the disk tier may use, `~` in its path expanded. Raises: ConfigError."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ConfigError("disk_path", str(path), "a folder that exists")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError("disk_path", str(path), "a folder that this process may write to")
    return folder


def free_bytes(folder: str | os.PathLike) -> int:
    """What an unprivileged process may still write there. Raises: DiskError."""
    try:
        found = os.statvfs(folder)
    except OSError as error:
        raise DiskError(
            error.errno, f"{folder}: cannot tell what is free: {error.strerror}; use another disk_path"
        ) from error
    return found.f_bavail * found.f_frsize


def _sum_on(buffers: list[memoryview], before: concurrent.futures.Future[int] | None) -> int:
    """The checksum of buffers that follow what `before`, done by now, is that of."""
    return checksum(buffers, 0 if before is None else before.result())


def _first(buffers: list[memoryview], size: int) -> list[memoryview]:
    """The first `size` bytes of buffers, or all."""
    found = []
    for buffer in buffers:
        if size <= 0:
            break
        found.append(buffer[:size])
        size -= len(buffer)
    return found


def _behind(buffers: list[memoryview], done: int) -> list[memoryview]:
    """What is left of buffers once their first `done` bytes are dealt with."""
    for i, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[i + 1 :]]
        done -= len(buffer)
    return []


def sweep(parent: Path) -> None:
    """Removes folders of runs that ended without closing theirs: those whose lock nobody holds."""
    for folder in parent.glob(f"{PREFIX}*"):
        if folder.is_symlink() or not folder.is_dir():
            continue
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # another user's, or one that is just being made
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass
        finally:
            os.close(lock)
