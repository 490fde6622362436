"""The file of one KV page: its format, its atomic write, and its checks; and the folder of the files.

    magic, schema version, fingerprint, key, length, CRC-32 of the payload | BLAKE2b of the fields | payload

A file is written under a temporary name and then renamed. A process that dies during the write leaves no
partial file under a page's name. The file is not flushed to the disk (`fsync`) before the rename: the files
are a cache, and a flush for every page would cost more than the pages that a power failure loses. A power
failure may leave an empty file or a file of zeros; the length and the checksums detect both. The checksum of
the payload is CRC-32, because it runs at the speed of the disk (4 GB/s on a core; a cryptographic hash runs
at a tenth to a half of this rate). CRC-32 detects every error of one or two bits or of 32 adjacent bits, and
misses one in four billion of the other errors.
"""

import fcntl
import hashlib
import os
import struct
import zlib
from collections.abc import Buffer, Callable, Sequence
from pathlib import Path

import numpy as np

from jaxflow.config import ConfigError

MAGIC = b"jaxflowK"
SCHEMA = 1
MAX_KEY_BYTES = 33  # a layer group and a digest of up to 32 bytes
FINGERPRINT_BYTES = 16
FOLDER = "jaxflow-kv"  # the folder of the pages inside the configured folder
SUFFIX, TEMPORARY = ".kv", ".tmp"

_FIELDS = struct.Struct(f"<8sHB{FINGERPRINT_BYTES}s{MAX_KEY_BYTES}sQI")
_CHECK_BYTES = 16
HEADER_BYTES = _FIELDS.size + _CHECK_BYTES

PageData = Callable[[], Sequence[Buffer]]  # returns the bytes of a page as consecutive buffers


class BadFile(ValueError):
    """A file without a valid copy of its page; the message gives the reason."""


def name_of(key: bytes) -> str:
    """Return the file name of a key, in hexadecimal, so that no key leads out of the folder.

    Raises: ValueError for a key without bytes or with more than MAX_KEY_BYTES.
    """
    if not 0 < len(key) <= MAX_KEY_BYTES:
        raise ValueError(f"a key of {len(key)} bytes; accepted are 1 to {MAX_KEY_BYTES} bytes")
    return key.hex() + SUFFIX


def key_of(name: str) -> bytes | None:
    """Return the key of a file name, or None for a name that no page's file has."""
    stem = name.removesuffix(SUFFIX)
    try:
        key = bytes.fromhex(stem)
    except ValueError:
        return None
    return key if 0 < len(key) <= MAX_KEY_BYTES and name_of(key) == name else None


def digest(fingerprint: bytes) -> bytes:
    """Return the digest of a fingerprint that the header holds."""
    return hashlib.blake2b(fingerprint, digest_size=FINGERPRINT_BYTES, person=b"jaxflow.kvfile").digest()


def header(fingerprint: bytes, key: bytes, parts: Sequence[memoryview]) -> bytes:
    """Return the HEADER_BYTES of a page's file. `fingerprint`: see `digest`; `parts`: see `page_parts`."""
    length = sum(part.nbytes for part in parts)
    fields = _FIELDS.pack(MAGIC, SCHEMA, len(key), fingerprint, key, length, checksum(parts))
    return fields + _fields_digest(fields)


def page_parts(data: PageData, length: int) -> list[memoryview]:
    """Return the bytes of a page as consecutive views.

    Raises: ValueError for another number of bytes than `length`; every exception of `data`.
    """
    parts = [memoryview(part).cast("B") for part in data()]
    found = sum(part.nbytes for part in parts)
    if found != length:
        raise ValueError(f"a page of {found} bytes; accepted is a page of {length} bytes")
    return parts


def write(path: Path, fingerprint: bytes, key: bytes, parts: Sequence[memoryview]) -> None:
    """Write the file of a page, with mode 0600. After an error no file is left, if it can be removed.

    Raises: OSError.
    """
    temporary = path.with_suffix(TEMPORARY)
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            for part in (memoryview(header(fingerprint, key, parts)), *parts):
                _write_all(fd, part)
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except BaseException:
        remove(temporary)
        raise


def read(path: Path, fingerprint: bytes, key: bytes, length: int) -> np.ndarray:
    """Return the payload of a page's file, uint8 [length].

    Raises:
      BadFile: the file is not a complete file of this fingerprint, key and length.
      OSError: the file cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        if size != HEADER_BYTES + length:
            raise BadFile(f"the file has {size} bytes instead of {HEADER_BYTES + length}")
        head, payload = np.empty(HEADER_BYTES, np.uint8), np.empty(length, np.uint8)
        _read_all(fd, memoryview(head))
        crc = _checked_crc(head.tobytes(), fingerprint, key, length)
        _read_all(fd, memoryview(payload))
    finally:
        os.close(fd)
    if checksum([payload]) != crc:
        raise BadFile("the checksum of the payload is wrong")
    return payload


def checksum(parts: Sequence[Buffer], before: int = 0) -> int:
    """Return the CRC-32 of consecutive buffers that follow bytes with the checksum `before`."""
    for part in parts:
        before = zlib.crc32(part, before)
    return before


def remove(path: Path) -> bool:
    """Remove a file if it exists. Return False if the file cannot be removed."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


class Lock:
    """A locked file. The lock ends with `close` or with the process.

    Raises: BlockingIOError if another process holds the lock.
    """

    def __init__(self, path: Path):
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(self._fd)
            raise

    def close(self) -> None:
        os.close(self._fd)


def open_folder(parent: Path) -> tuple[Path, Lock, list[tuple[bytes, int]]]:
    """Open FOLDER inside `parent`, with mode 0700, for one server at a time.

    Returns the folder, its lock, and its pages (see `find_pages`). Raises: ConfigError.
    """

    def refused(accepted: str) -> ConfigError:
        return ConfigError("kv_disk_path", str(parent), accepted)

    if not parent.is_dir():
        raise refused("an existing folder")
    folder = parent / FOLDER
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink() or folder.lstat().st_uid != os.geteuid():
            raise refused(f"a folder in which {FOLDER} is a folder of this user")
        folder.chmod(0o700)
        lock = Lock(folder / "lock")
        try:
            return folder, lock, find_pages(folder)
        except BaseException:
            lock.close()
            raise
    except BlockingIOError:
        raise refused("a folder that no other server uses") from None
    except OSError as error:
        raise refused(f"a folder with read and write permission ({error.strerror})") from None


def find_pages(folder: Path) -> list[tuple[bytes, int]]:
    """Return (key, bytes of its file) of every page in a folder, the least recently used first.

    No file is opened. Temporary files of a killed process are removed. Other files stay. Raises: OSError.
    """
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(TEMPORARY):
                remove(Path(entry.path))
                continue
            key = key_of(entry.name)
            if key is not None and entry.is_file(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                found.append((status.st_mtime_ns, key, status.st_size))
    return [(key, size) for _, key, size in sorted(found)]


def _checked_crc(head: bytes, fingerprint: bytes, key: bytes, length: int) -> int:
    """Return the checksum of the payload from a valid header. Raises: BadFile."""
    fields = head[: _FIELDS.size]
    magic, schema, key_bytes, written_by, padded_key, written_length, crc = _FIELDS.unpack(fields)
    if magic != MAGIC:
        raise BadFile("the file is no page of a KV cache")
    if schema != SCHEMA:
        raise BadFile(f"the file has format {schema}; accepted is {SCHEMA}")
    if head[_FIELDS.size :] != _fields_digest(fields):
        raise BadFile("the checksum of the header is wrong")
    if written_by != fingerprint:
        raise BadFile("the file belongs to another model or another page layout")
    if padded_key[:key_bytes] != key or written_length != length:
        raise BadFile("the file belongs to another page")
    return crc


def _fields_digest(fields: bytes) -> bytes:
    return hashlib.blake2b(fields, digest_size=_CHECK_BYTES, person=b"jaxflow.kvfile").digest()


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _read_all(fd: int, into: memoryview) -> None:
    """Fill `into` by one or more reads. Raises: BadFile if the file ends early."""
    while into:
        got = os.readv(fd, [into])
        if not got:
            raise BadFile(f"the file ends {len(into)} bytes early")
        into = into[got:]
