"""One page of KV as a file: what it holds, how it is written whole or not at all, and how a bad one is told.

    magic, schema version, fingerprint, key, length, CRC-32 of the payload | BLAKE2b of all these | payload

A file is written under a temporary name and renamed, so a process that dies midway leaves no half page under
a real name. It is not flushed to the disk before (`fsync`): this is a cache, and to wait for the disk at
every page would cost more than the pages that a power failure loses. What such a failure leaves, an empty
file or one of zeros, the length and the checksums tell, like every other damage. The payload's checksum is
CRC-32, which runs at the speed of the disk (4 GB/s a core, a cryptographic hash a tenth of it to a half); it
finds every damage of one or two bits or of 32 neighbouring ones, and misses one in four billion of the
others.
"""

import hashlib
import os
import struct
import zlib
from collections.abc import Buffer, Callable, Sequence
from pathlib import Path

import numpy as np

MAGIC = b"jaxflowK"
SCHEMA = 1
MAX_KEY_BYTES = 33  # a layer group and a digest of up to 32 bytes
FINGERPRINT_BYTES = 16
SUFFIX, TEMPORARY = ".kv", ".tmp"

_FIELDS = struct.Struct(f"<8sHB{FINGERPRINT_BYTES}s{MAX_KEY_BYTES}sQI")
_CHECK_BYTES = 16
HEADER_BYTES = _FIELDS.size + _CHECK_BYTES


Parts = Callable[[], Sequence[Buffer]]  # gives the bytes of a page, one piece after the other


class BadFile(ValueError):
    """A file that does not hold the page it should; the message says why."""


def name_of(key: bytes) -> str:
    """A key's file name: hexadecimal, so that no key leads out of the folder. Raises: ValueError for a key of
    no or too many bytes.
    """
    if not 0 < len(key) <= MAX_KEY_BYTES:
        raise ValueError(f"a key of {len(key)} bytes: 1 to {MAX_KEY_BYTES} are possible")
    return key.hex() + SUFFIX


def key_of(name: str) -> bytes | None:
    """The key whose file would have this name; None if it is no page's."""
    stem = name.removesuffix(SUFFIX)
    try:
        key = bytes.fromhex(stem)
    except ValueError:
        return None
    return key if 0 < len(key) <= MAX_KEY_BYTES and name_of(key) == name else None


def digest(fingerprint: bytes) -> bytes:
    """What the header holds of a fingerprint of any length."""
    return hashlib.blake2b(fingerprint, digest_size=FINGERPRINT_BYTES, person=b"jaxflow.kvfile").digest()


def header(fingerprint: bytes, key: bytes, parts: Sequence[memoryview]) -> bytes:
    """The first HEADER_BYTES of the file of a page of these `pieces`. fingerprint: a `digest`."""
    length = sum(part.nbytes for part in parts)
    fields = _FIELDS.pack(MAGIC, SCHEMA, len(key), fingerprint, key, length, checksum(parts))
    return fields + _check(fields)


def pieces(parts: Parts, length: int) -> list[memoryview]:
    """A page's bytes. Raises: ValueError, if they are not `length`, and whatever `parts` does."""
    given = [memoryview(part).cast("B") for part in parts()]
    found = sum(piece.nbytes for piece in given)
    if found != length:
        raise ValueError(f"a page of {found} bytes, {length} are expected")
    return given


def write(path: Path, fingerprint: bytes, key: bytes, parts: Sequence[memoryview]) -> None:
    """Makes the file of a page of these `pieces`, of mode 0600. Raises: OSError; nothing is left then, if it
    can be removed.
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
    """The payload of a page's file, uint8 [length].

    Raises:
      BadFile: for anything but a whole file of this fingerprint, key and length. OSError: if it cannot be
      read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        if size != HEADER_BYTES + length:
            raise BadFile(f"it has {size} bytes, {HEADER_BYTES + length} are expected")
        head, payload = np.empty(HEADER_BYTES, np.uint8), np.empty(length, np.uint8)
        _read_all(fd, memoryview(head))
        crc = _examine(head.tobytes(), fingerprint, key, length)
        _read_all(fd, memoryview(payload))
    finally:
        os.close(fd)
    if checksum([payload]) != crc:
        raise BadFile("its payload is not what was written")
    return payload


def checksum(parts: Sequence[Buffer], before: int = 0) -> int:
    """CRC-32 of some bytes, one piece behind the other, that follow those whose checksum is `before`."""
    for part in parts:
        before = zlib.crc32(part, before)
    return before


def remove(path: Path) -> bool:
    """Removes a file if it is there and can be removed; returns whether it is gone."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _examine(head: bytes, fingerprint: bytes, key: bytes, length: int) -> int:
    """The payload's checksum, from a header that is what it should be. Raises: BadFile."""
    fields = head[: _FIELDS.size]
    magic, schema, key_bytes, written_by, padded_key, written_length, crc = _FIELDS.unpack(fields)
    if magic != MAGIC:
        raise BadFile("it is no page of a KV cache")
    if schema != SCHEMA:
        raise BadFile(f"it is of format {schema}, {SCHEMA} is read")
    if head[_FIELDS.size :] != _check(fields):
        raise BadFile("its header is not what was written")
    if written_by != fingerprint:
        raise BadFile("another model or another layout of pages wrote it")
    if padded_key[:key_bytes] != key or written_length != length:
        raise BadFile("it is another page's")
    return crc


def _check(fields: bytes) -> bytes:
    return hashlib.blake2b(fields, digest_size=_CHECK_BYTES, person=b"jaxflow.kvfile").digest()


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _read_all(fd: int, into: memoryview) -> None:
    """Fills `into`, however little each read gives. Raises: BadFile at an early end."""
    while into:
        got = os.readv(fd, [into])
        if not got:
            raise BadFile(f"it ends {len(into)} bytes early")
        into = into[got:]
