"""Reader of the key-value section of a GGUF file, version 2 or 3, through a memory map.

The reader of the `gguf` package makes several numpy arrays a string and takes seconds for a vocabulary. This
reader takes tens of milliseconds. It checks every length against the file size, so that a corrupt file
cannot cause a huge allocation.
"""

import mmap
import struct
from pathlib import Path

import numpy as np

Value = bool | int | float | str | list[str] | np.ndarray

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: dict[int, np.dtype] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}


class GgufError(ValueError):
    """A file that cannot be read as a GGUF file."""


def read_metadata(path: str | Path) -> dict[str, Value]:
    """Return the values of the file by key, in the order of the file.

    An array of strings is a list. An array of numbers is a numpy array of the file's dtype. A bool array is
    uint8.

    Raises:
      GgufError: not a GGUF file, another version or byte order, truncated, or not UTF-8. The error names the
        file and the key.
      OSError: the file cannot be opened.
    """
    return read_metadata_section(path)[0]


def read_metadata_section(path: str | Path) -> tuple[dict[str, Value], int]:
    """Return the result of `read_metadata` and the byte offset of the end of the section."""
    path = Path(path)
    with path.open("rb") as file:
        if path.stat().st_size < 24:
            raise GgufError(
                f"{path}: {path.stat().st_size} bytes are too few for a GGUF file; at least 24 are needed"
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(path, data)


def _read(path: Path, data: mmap.mmap) -> tuple[dict[str, Value], int]:
    magic, version, _tensors, keys = struct.unpack_from("<4sIQQ", data)
    if magic != b"GGUF":
        raise GgufError(f"{path}: starts with {magic!r}; a GGUF file starts with b'GGUF'")
    if version not in (2, 3):
        kind = "a big-endian file" if version in (2 << 24, 3 << 24) else f"version {version}"
        raise GgufError(f"{path}: {kind} is not supported; accepted: little-endian GGUF 2 or 3")
    values: dict[str, Value] = {}
    at, key = 24, "the first key"
    try:
        for _ in range(keys):
            name, at = _string(data, at)
            key = name
            (kind,) = struct.unpack_from("<I", data, at)
            value, at = _value(data, at + 4, kind)
            if name in values:
                raise GgufError(f"the key {name!r} occurs twice")
            values[name] = value
    except struct.error as error:
        raise GgufError(f"{path}: ends in the middle of {key!r}, at byte {at} of {len(data)}") from error
    except (GgufError, UnicodeDecodeError) as error:
        raise GgufError(f"{path}: {key!r}: {error}") from error
    return values, at


def _value(data: mmap.mmap, at: int, kind: int) -> tuple[Value, int]:
    if kind == _STRING:
        return _string(data, at)
    if kind == _ARRAY:
        return _array(data, at)
    dtype = _SCALARS.get(kind)
    if dtype is None:
        raise GgufError(f"value type {kind} is unknown")
    _need(data, at, dtype.itemsize)
    return np.frombuffer(data[at : at + dtype.itemsize], dtype)[0].item(), at + dtype.itemsize


def _array(data: mmap.mmap, at: int) -> tuple[Value, int]:
    kind, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if kind == _STRING:
        _need(data, at, 8 * count)
        strings: list[str] = []
        for _ in range(count):
            string, at = _string(data, at)
            strings.append(string)
        return strings, at
    dtype = _SCALARS.get(kind)
    if dtype is None:
        raise GgufError(f"an array of type {kind} is not supported")
    end = at + count * dtype.itemsize
    _need(data, at, end - at)
    return np.frombuffer(data[at:end], np.dtype("<u1") if kind == _BOOL else dtype), end


def _string(data: mmap.mmap, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", data, at)
    at += 8
    _need(data, at, length)
    return data[at : at + length].decode(), at + length


def _need(data: mmap.mmap, at: int, length: int) -> None:
    if at + length > len(data):
        raise GgufError(f"needs {length} bytes at byte {at}; the file has {len(data)} bytes")
