"""Scratch files of an offloaded run: a folder for one process, removed when the run ends.

A file is a header and its bytes. The full size is reserved at creation, so a full disk causes an error at the
start and not in the middle of a block. Data that was written at an offset is read back in one piece, and its
checksum is compared: a corrupt bit ends the run instead of changing tokens. The checksums stay in memory,
because no later run reads the files. The folder holds a lock while its process lives. A killed run leaves its
folder behind, and the next run on the same disk removes the folder (`sweep`).
"""

import concurrent.futures
import contextlib
import errno
import fcntl
import itertools
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
_HEADER = struct.Struct("<8sIIQ")  # magic, version, bytes of the header, bytes of the data
_MAGIC, _VERSION = b"JAXFLOWO", 1
HEADER_BYTES = 4096  # a page of the file system, so that the data is aligned
_MOST_PIECES = 512  # limit of a vectored call; Linux allows 1024
_CHUNK = 8 << 20  # bytes of a call; the checksum of the last call's bytes is computed concurrently
_GIGA = 1e9


class DiskError(OSError):
    """A failure of the disk tier. The message names the file and a remedy."""


class DiskFolder:
    """A new folder under `path` for this process only.

    Raises:
      ConfigError: `disk_path` is no writable folder.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=check_folder(path)))
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._files: list[DiskFile] = []
        self._sums = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checksum")

    def create(self, name: str, size: int) -> "DiskFile":
        """Create a file of `size` bytes after its header. Raises: DiskError."""
        file = DiskFile(self.path / name, size, self._sums)
        self._files.append(file)
        return file

    def close(self) -> None:
        """Close and remove all files, after the last read and write. A second call does nothing."""
        self._sums.shutdown()
        for file in self._files:
            file.close()
        self._files.clear()
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class DiskFile:
    """A file that is read and written in pieces at offsets, by any number of threads.

    Args:
      sums: a single thread that computes checksums concurrently with the transfers.
    """

    def __init__(self, path: Path, size: int, sums: concurrent.futures.ThreadPoolExecutor):
        self.path, self.size, self._sums = path, size, sums
        self._written: dict[int, tuple[int, int]] = {}  # (bytes, checksum) by offset
        self._row_sums: dict[int, np.ndarray] = {}  # checksums of rows, by the offset of the first row
        self._fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(self._fd, 0, HEADER_BYTES + size)
            os.pwrite(self._fd, _HEADER.pack(_MAGIC, _VERSION, HEADER_BYTES, size), 0)
        except OSError as error:
            self.close()
            raise self._fault("reserve", size, error) from error
        self._checked = False

    def write(self, offset: int, pieces: Sequence[np.ndarray]) -> int:
        """Write consecutive arrays from `offset` on, and return the number of bytes. Raises: DiskError."""
        self._written.pop(offset, None)
        total, crc = self._move(os.pwritev, "write", offset, pieces)
        self._written[offset] = total, crc
        return total

    def read(self, offset: int, pieces: Sequence[np.ndarray]) -> int:
        """Fill arrays with the data last written at `offset`, and return the number of bytes.

        Raises:
          DiskError: a failed read, a truncated file, or other bytes than the written ones.
          ValueError: another number of bytes than the written one.
        """
        if not self._checked:
            self._check_header()
        size, expected = self._written.get(offset, (0, 0))
        total, crc = self._move(os.preadv, "read", offset, pieces)
        if total != size:
            raise ValueError(
                f"{self.path}: {total} bytes are read at {offset}; accepted are the {size} written bytes"
            )
        if crc != expected:
            raise DiskError(
                errno.EIO,
                f"{self.path}: bytes {offset} to {offset + size} differ from the written bytes",
            )
        return total

    def write_rows(self, offset: int, pieces: Sequence[np.ndarray], width: int) -> int:
        """Write like `write`, and keep a checksum for each row of `width` bytes. Raises: DiskError."""
        self._row_sums.pop(offset, None)
        total = self.write(offset, pieces)
        self._row_sums[offset] = np.concatenate([_row_sums(_rows(piece, width)) for piece in pieces])
        return total

    def read_rows(self, offset: int, rows: np.ndarray, out: np.ndarray) -> int:
        """Fill `out` with rows of the data that `write_rows` wrote at `offset`,
        and return the number of bytes.

        Adjacent rows take one call. Single rows of a few hundred bytes cost a call each.

        Args:
          rows: [n] numbers of the rows.
          out: [n, width] bytes.

        Raises: DiskError, as `read`.
        """
        if not self._checked:
            self._check_header()
        width = out.shape[1]
        starts = np.flatnonzero(np.diff(rows, prepend=-2) != 1).tolist()
        for start, stop in itertools.pairwise([*starts, len(rows)]):
            self._read_at(offset + int(rows[start]) * width, out[start:stop])
        wrong = np.flatnonzero(_row_sums(out) != self._row_sums[offset][rows])
        if len(wrong):
            at = offset + int(rows[wrong[0]]) * width
            raise DiskError(
                errno.EIO, f"{self.path}: bytes {at} to {at + width} differ from the written bytes"
            )
        return out.nbytes

    def _read_at(self, offset: int, out: np.ndarray) -> None:
        """Fill a contiguous array. Raises: DiskError."""
        left, at = memoryview(out.reshape(-1)), HEADER_BYTES + offset
        while len(left):
            try:
                done = os.preadv(self._fd, [left], at)
            except OSError as error:
                raise self._fault("read", out.nbytes, error) from error
            if not done:
                raise DiskError(errno.EIO, _truncated(self.path, at, self.size))
            at, left = at + done, left[done:]

    def drop_cache(self) -> None:
        """Release the file's pages in the system's cache, because the run has a memory limit."""
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _move(self, call, verb: str, offset: int, pieces: Sequence[np.ndarray]) -> tuple[int, int]:
        """Return the number of moved bytes and their checksum."""
        buffers = [memoryview(piece.reshape(-1).view(np.uint8)) for piece in pieces if piece.nbytes]
        total = sum(len(buffer) for buffer in buffers)
        if offset < 0 or offset + total > self.size:
            raise ValueError(
                f"{self.path}: bytes {offset} to {offset + total} are not within its {self.size} bytes"
            )
        at, left = HEADER_BYTES + offset, buffers
        summed: concurrent.futures.Future[int] | None = None
        while left:
            try:
                done = call(self._fd, _first(left[:_MOST_PIECES], _CHUNK), at)
            except OSError as error:
                raise self._fault(verb, total, error) from error
            if not done:
                raise DiskError(errno.EIO, _truncated(self.path, at, self.size))
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
                f"{self.path}: the header differs from the written header",
            )
        self._checked = True

    def _fault(self, verb: str, size: int, error: OSError) -> DiskError:
        help_ = "look at the system's log, or use another disk_path"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            help_ = "lower the policy's disk shares, or use another disk_path"
            with contextlib.suppress(DiskError):
                help_ = f"{free_bytes(self.path.parent) / _GIGA:.3f} GB are free; {help_}"
        return DiskError(
            error.errno, f"{self.path}: cannot {verb} {size / _GIGA:.3f} GB: {error.strerror}; {help_}"
        )


def check_folder(path: str | os.PathLike) -> Path:
    """Return the folder of the disk tier, with `~` expanded. Raises: ConfigError."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ConfigError("disk_path", str(path), "an existing folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError("disk_path", str(path), "a writable folder")
    return folder


def free_bytes(folder: str | os.PathLike) -> int:
    """Return the bytes that an unprivileged process can still write in a folder. Raises: DiskError."""
    try:
        found = os.statvfs(folder)
    except OSError as error:
        raise DiskError(
            error.errno, f"{folder}: the free space is unknown: {error.strerror}; use another disk_path"
        ) from error
    return found.f_bavail * found.f_frsize


def row_sum_bytes(size: int, width: int) -> int:
    """Return the bytes of the checksums that `write_rows` keeps in memory for `size` bytes."""
    return size // width * np.dtype(np.uint32).itemsize


def _rows(piece: np.ndarray, width: int) -> np.ndarray:
    """Return an array as rows of bytes [n, width]."""
    return np.ascontiguousarray(piece).reshape(-1).view(np.uint8).reshape(-1, width)


def _row_sums(rows: np.ndarray) -> np.ndarray:
    """Return a checksum of each row [n, width] of bytes, uint32 [n].

    A sum of a row's bytes times odd numbers. A flipped bit changes the sum,
    because an odd number has an inverse.
    """
    factors = (np.arange(rows.shape[1], dtype=np.uint32) * np.uint32(0x9E3779B2)) | np.uint32(1)
    return rows.astype(np.uint32) @ factors


def _truncated(path: Path, at: int, size: int) -> str:
    return f"{path}: the file ends at {at} of {HEADER_BYTES + size} bytes: it was truncated"


def _sum_on(buffers: list[memoryview], before: concurrent.futures.Future[int] | None) -> int:
    """Return the checksum of buffers that continue the checksum of `before`."""
    return checksum(buffers, 0 if before is None else before.result())


def _first(buffers: list[memoryview], size: int) -> list[memoryview]:
    """Return the first `size` bytes of buffers, or all bytes."""
    found = []
    for buffer in buffers:
        if size <= 0:
            break
        found.append(buffer[:size])
        size -= len(buffer)
    return found


def _behind(buffers: list[memoryview], done: int) -> list[memoryview]:
    """Return the rest of buffers after their first `done` bytes."""
    for i, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[i + 1 :]]
        done -= len(buffer)
    return []


def sweep(parent: Path) -> None:
    """Remove the folders of runs that ended without closing their folder: the folders without a lock."""
    for folder in parent.glob(f"{PREFIX}*"):
        if folder.is_symlink() or not folder.is_dir():
            continue
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # a folder of another user, or a folder under construction
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass
        finally:
            os.close(lock)
