"""Where the tensors of a GGUF file lie in it, checked against its size; and files of the metadata alone."""

import dataclasses
import math
import mmap
import struct
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxflow.model.checkpoints.source import CheckpointError
from jaxflow.text.gguf_metadata import GgufError, read_metadata_section

TYPES = {
    GGMLQuantizationType[name]: name
    for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
}


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """One tensor in the file."""

    name: str
    shape: tuple[int, ...]  # slowest dimension first, as numpy has it
    kind: GGMLQuantizationType
    start: int  # bytes from the start of the file
    stop: int


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """Metadata by key (arrays of numbers as numpy arrays) and tensors by name.

    Raises:
      CheckpointError: no GGUF file, cut short or damaged, or a tensor of a type that is not supported; it
      names file and tensor.
    """
    metadata, at = _metadata(path)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(f"{path}: general.alignment={alignment!r} is not a power of two")
    found: list[tuple[str, tuple[int, ...], int, int]] = []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        size = len(data)
        (count,) = struct.unpack_from("<Q", data, 8)
        try:
            for _ in range(count):
                description, at = _description(data, at)
                found.append(description)
        except (struct.error, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{path}: cut short or damaged: {len(found)} of {count} tensors are described ({size} bytes)"
            ) from error
    data_start = -(-at // alignment) * alignment
    tensors = {
        name: _tensor(path, size, name, shape, kind, data_start + offset)
        for name, shape, kind, offset in found
    }
    if len(tensors) != count:
        raise CheckpointError(f"{path}: two tensors have one name")
    return metadata, tensors


def write_metadata_only(source: Path, target: Path) -> None:
    """Writes a GGUF file with all the metadata of another and none of its tensors."""
    end = _metadata(source)[1]
    with source.open("rb") as file:
        section = file.read(end)
    # magic and version, then 8 bytes of the number of tensors, then the number of metadata values and the
    # values
    target.write_bytes(section[:8] + struct.pack("<Q", 0) + section[16:])


def _metadata(path: Path) -> tuple[dict[str, Any], int]:
    try:
        return read_metadata_section(path)
    except GgufError as error:
        raise CheckpointError(f"{error}: cut short or damaged, or no GGUF file") from error
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error


def _description(data: mmap.mmap, at: int) -> tuple[tuple[str, tuple[int, ...], int, int], int]:
    """(name, shape, type, offset) of the tensor described at byte `at`, and the byte after it."""
    (length,) = struct.unpack_from("<Q", data, at)
    name = data[at + 8 : at + 8 + length].decode()
    at += 8 + length
    (rank,) = struct.unpack_from("<I", data, at)
    *dims, kind, offset = struct.unpack_from(f"<{min(rank, 64)}QIQ", data, at + 4)
    return (name, tuple(dims[::-1]), kind, offset), at + 4 + 8 * rank + 12


def _tensor(path: Path, size: int, name: str, shape: tuple[int, ...], kind: int, start: int) -> GgufTensor:
    if kind not in TYPES:
        known = {known.value: known.name for known in GGMLQuantizationType}
        raise CheckpointError(
            f"{path}: tensor {name!r} is of type {known.get(kind, kind)}; supported are "
            f"{', '.join(TYPES.values())}"
        )
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    if not shape or shape[-1] % block:
        raise CheckpointError(
            f"{path}: tensor {name!r} is {list(shape)}, and {TYPES[GGMLQuantizationType(kind)]} has "
            f"blocks of {block}"
        )
    stop = start + math.prod(shape) // block * block_bytes
    if stop > size:
        raise CheckpointError(
            f"{path}: cut short: tensor {name!r} ends at byte {stop}, the file at byte {size}"
        )
    return GgufTensor(name, shape, GGMLQuantizationType(kind), start, stop)
