"""Reads what stands before the weights in a GGUF file: its metadata and where each tensor lies.

The `gguf` package's own reader keeps a numpy array for each of a vocabulary's strings, which takes seconds; this one
reads plain Python values in a tenth of a second, checks every length against the file, and says where a file is cut.
"""

import dataclasses
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# The format's numbers for the types of metadata values; 8 is a string, 9 an array.
_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9


class GgufError(ValueError):
    """The file is no GGUF file, or it is cut or damaged; the message names it and what is wrong."""


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies in the file."""

    name: str
    shape: tuple[int, ...]  # slowest dimension first, as numpy has it
    type: int  # of gguf.GGMLQuantizationType
    offset: int  # bytes from the start of the file


@dataclasses.dataclass(frozen=True)
class GgufHeader:
    """Metadata by key: str, int, float, bool, or a list of one of them (arrays of numbers are numpy arrays)."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    metadata_end: int  # bytes from the start of the file to the end of the metadata
    file_size: int


def read_gguf_header(path: str | Path) -> GgufHeader:
    """Raises: GgufError; OSError where the file cannot be opened."""
    path = Path(path)
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        if size < 24:
            raise GgufError(f"{path}: {size} bytes are too few for a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(path, data, size).header()


class _Cursor:
    """A place in the file that moves on with each value read, and never beyond its end."""

    def __init__(self, path: Path, data: mmap.mmap, size: int):
        self._path, self._data, self._size, self._at = path, data, size, 0

    def header(self) -> GgufHeader:
        magic = self._bytes(4)
        if magic != MAGIC:
            raise self._damage(f"it begins with {magic!r}, not {MAGIC!r}: not a GGUF file")
        version = self._unpack("<I")
        if version not in VERSIONS:
            detail = "; it may be of a big-endian machine" if version & 0xFFFF == 0 else ""
            raise self._damage(f"GGUF version {version}; supported are {VERSIONS}{detail}")
        num_tensors, num_values = self._count(least=24), self._count(least=13)
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._string()
            if key in metadata:
                raise self._damage(f"metadata key {key!r} twice")
            metadata[key] = self._value(self._unpack("<I"))
        metadata_end = self._at
        found = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._damage(f"general.alignment={alignment!r} is not a power of two")
        start = -(-self._at // alignment) * alignment
        tensors = {tensor.name: dataclasses.replace(tensor, offset=start + tensor.offset) for tensor in found}
        if len(tensors) != num_tensors:
            raise self._damage("two tensors of one name")
        return GgufHeader(metadata, tensors, metadata_end, self._size)

    def _damage(self, what: str) -> GgufError:
        return GgufError(f"{self._path}: {what} (near byte {self._at} of {self._size})")

    def _bytes(self, count: int) -> bytes:
        end = self._at + count
        if end > self._size:
            raise self._damage(f"cut short or damaged: {count} more bytes were to follow")
        data = self._data[self._at : end]
        self._at = end
        return data

    def _unpack(self, form: str) -> int:
        return struct.unpack(form, self._bytes(struct.calcsize(form)))[0]

    def _count(self, least: int) -> int:
        """A number of things to follow, each of at least `least` bytes: more than fit would never be read to their end."""
        count = self._unpack("<Q")
        if count * least > self._size - self._at:
            raise self._damage(f"cut short or damaged: {count} entries were to follow")
        return count

    def _string(self) -> str:
        return self._bytes(self._count(1)).decode("utf-8", "surrogateescape")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item = self._unpack("<I")
            if item == _STRING:
                return [self._string() for _ in range(self._count(8))]
            if item in _SCALARS:
                dtype = np.dtype(_SCALARS[item])
                return np.frombuffer(self._bytes(self._count(dtype.itemsize) * dtype.itemsize), dtype)
            raise self._damage(f"an array of metadata type {item}")
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind])
            value = np.frombuffer(self._bytes(dtype.itemsize), dtype)[0]
            # A float32 as its shortest decimal: 1e-05, where widening would give 9.999999747378752e-06.
            return float(str(value)) if dtype == np.float32 else value.item()
        raise self._damage(f"metadata type {kind}")

    def _tensor(self) -> GgufTensor:
        name, rank = self._string(), self._unpack("<I")
        if rank > 4:
            raise self._damage(f"tensor {name!r} of {rank} dimensions")
        shape = tuple(self._unpack("<Q") for _ in range(rank))[::-1]
        return GgufTensor(name, shape, self._unpack("<I"), self._unpack("<Q"))


def write_metadata_only(source: str | Path, target: str | Path) -> None:
    """Writes a GGUF file with all the metadata of another and none of its tensors. Raises: GgufError."""
    header = read_gguf_header(source)
    with open(source, "rb") as file:
        start = file.read(header.metadata_end)
    # magic and version, then 8 bytes of the number of tensors, then the number of metadata values and the values
    Path(target).write_bytes(start[:8] + struct.pack("<Q", 0) + start[16:])
