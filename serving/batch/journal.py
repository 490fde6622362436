"""The journal of a batch: the answers on disk, by the number of the line in the input file.

A journal is a folder. Each writer appends to a segment file of its own, so that several processes and
machines share a journal without shared offsets. A segment is a sequence of frames: the payload's length, a
CRC-32 of the length and the payload, and the payload. The first payload of a segment names the input; the
others are answers.

A line is finished when its answer is in a segment that was fsynced. A crash leaves at most an incomplete
frame at the end of a segment. Readers stop at the first incomplete frame. Nobody appends to the segment of a
writer that has ended, so an incomplete frame hides no later answer.
"""

import array
import contextlib
import logging
import os
import secrets
import shutil
import socket
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
SUFFIX = ".segment"
MAX_PAYLOAD_BYTES = 2**30
_FRAME = struct.Struct("<II")  # bytes of the payload, CRC-32 of that number and the payload
_LENGTH = struct.Struct("<I")


class JournalError(Exception):
    """A journal that cannot be used: of another input or another version."""


class Input(msgspec.Struct, frozen=True):
    """The work that a journal belongs to.

    Attributes:
      digest: SHA-256 of the input file, hexadecimal.
      lines: number of lines of the input file. Blank lines count.
      model: name of the model that answers.
    """

    digest: str
    lines: int
    model: str


class Opening(msgspec.Struct, frozen=True, tag="opening", array_like=True):
    """The first payload of a segment."""

    version: int
    input: Input


class AnsweredLine(msgspec.Struct, frozen=True, tag="answer", array_like=True):
    """The answer of one line.

    Attributes:
      line: number of the line in the input file; the first is 1.
      failed: True if `output` belongs into the file of errors.
      output: the line of the output file, without the line break.
    """

    line: int
    failed: bool
    output: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Opening | AnsweredLine).decode


def frame(payload: bytes) -> bytes:
    """Return the bytes of a frame with this payload."""
    length = _LENGTH.pack(len(payload))
    return _FRAME.pack(len(payload), zlib.crc32(payload, zlib.crc32(length))) + payload


def read_frames(file: BinaryIO, offset: int) -> Iterator[tuple[int, bytes]]:
    """Yield (offset after the frame, payload) of the complete frames from `offset` on.

    The end of the file, an incomplete frame and a wrong checksum end the iteration. Zeros are no frame,
    because a file system may leave them at the end of a file after a power failure.
    """
    file.seek(offset)
    while len(header := file.read(_FRAME.size)) == _FRAME.size:
        length, checksum = _FRAME.unpack(header)
        if not 0 < length <= MAX_PAYLOAD_BYTES:
            return
        payload = file.read(length)
        if len(payload) < length or zlib.crc32(payload, zlib.crc32(header[: _LENGTH.size])) != checksum:
            return
        offset += _FRAME.size + length
        yield offset, payload


class Journal:
    """The answers of one input, and the segment that this process appends to.

    Memory: 17 bytes a line of the input, whatever the length of the answers. Not thread-safe.

    Args:
      folder: the journal's folder. It is created if it is missing.

    Raises:
      JournalError: the folder has answers of another input, another model or another version.
      OSError
    """

    def __init__(self, folder: Path, input: Input):
        self.folder, self.input = folder, input
        self.num_finished = self.num_failed = 0
        self._offsets = array.array(
            "q", bytes(8 * (input.lines + 1))
        )  # offset of the answer's frame, by line
        self._segments = array.array("i", [-1]) * (input.lines + 1)  # index into `_paths`, -1: not finished
        self._failed = bytearray(input.lines + 1)
        self._paths: list[Path] = []
        self._read_to: list[int] = []  # by segment, the offset after the last frame read
        self._index: dict[str, int] = {}  # of the segments, by file name
        self._own: _Segment | None = None
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            sync_folder(folder.parent)
        self.refresh()

    def finished(self, line: int) -> bool:
        """Return True if the line's answer is on disk."""
        return self._segments[line] >= 0

    def failed(self, line: int) -> bool:
        """Return True if the line is finished and its answer belongs into the file of errors."""
        return bool(self._failed[line])

    def refresh(self) -> None:
        """Read the answers that other writers have added. Each segment is read from the last frame on."""
        for entry in os.scandir(self.folder):
            if entry.name.endswith(SUFFIX) and entry.name not in self._index:
                self._add_segment(Path(entry.path))
        own = self._own.index if self._own is not None else -1
        for index, path in enumerate(self._paths):
            if index != own and path.stat().st_size > self._read_to[index]:
                self._read_segment(index, path)

    def append(self, answers: Sequence[AnsweredLine]) -> None:
        """Write answers and wait until they are on disk. Then their lines are finished.

        Raises:
          OSError: for example a full disk. None of the answers is finished, and the journal stays usable.
        """
        try:
            if self._own is None:
                self._own = self._new_segment()
            offsets = self._own.append([_encode(answer) for answer in answers])
        except OSError:
            self._abandon()
            raise
        for answer, offset in zip(answers, offsets, strict=True):
            self._finish(answer, self._own.index, offset)

    def output(self, line: int) -> bytes:
        """Return the output of a finished line."""
        with open(self._paths[self._segments[line]], "rb") as file:
            return self._output(file, line)

    def outputs(self, *, failed: bool | None = None) -> Iterator[tuple[int, bytes]]:
        """Yield (line, output) of the finished lines, in the order of the input.

        `failed`: True for the outputs of the file of errors only, False for the others only, None for all.
        """
        with contextlib.ExitStack() as stack:
            files: dict[int, BinaryIO] = {}
            for line in range(1, self.input.lines + 1):
                segment = self._segments[line]
                if segment < 0 or (failed is not None and failed != self.failed(line)):
                    continue
                if segment not in files:
                    files[segment] = stack.enter_context(open(self._paths[segment], "rb"))
                yield line, self._output(files[segment], line)

    def close(self) -> None:
        """Close the files. The journal stays on disk."""
        if self._own is not None:
            self._own.close()
            self._own = None

    def remove(self) -> None:
        """Close the files and delete the folder."""
        self.close()
        shutil.rmtree(self.folder)

    # ---- segments

    def _new_segment(self) -> "_Segment":
        host = "".join(c if c.isalnum() else "-" for c in socket.gethostname())[:64]
        path = self.folder / f"{host}-{os.getpid()}-{secrets.token_hex(8)}{SUFFIX}"
        segment = _Segment(path)
        segment.index = self._add_segment(path)
        self._own = segment
        segment.append([_encode(Opening(SCHEMA_VERSION, self.input))])
        return segment

    def _add_segment(self, path: Path) -> int:
        self._paths.append(path)
        self._read_to.append(0)
        self._index[path.name] = len(self._paths) - 1
        return len(self._paths) - 1

    def _abandon(self) -> None:
        """Leave the segment after a failed write: the next append begins a new one."""
        segment, self._own = self._own, None
        if segment is not None:
            self._read_to[segment.index] = segment.end
            segment.close()

    def _read_segment(self, index: int, path: Path) -> None:
        with open(path, "rb", buffering=2**20) as file:
            size = os.fstat(file.fileno()).st_size
            os.fsync(file.fileno())  # the writer may have been killed between its write and its fsync
            for end, payload in read_frames(file, self._read_to[index]):
                if end > size:
                    return
                record = self._decode(payload, path)
                if isinstance(record, Opening):
                    self._check(record, path)
                else:
                    self._finish(record, index, self._read_to[index])
                self._read_to[index] = end

    def _decode(self, payload: bytes, path: Path) -> Opening | AnsweredLine:
        try:
            return _decode(payload)
        except msgspec.DecodeError as error:
            raise JournalError(f"{path} has a record that this program cannot read: {error}") from error

    def _check(self, opening: Opening, path: Path) -> None:
        if opening.version != SCHEMA_VERSION:
            raise JournalError(f"{path} has version {opening.version}; this program reads {SCHEMA_VERSION}")
        for field in self.input.__struct_fields__:
            theirs, ours = getattr(opening.input, field), getattr(self.input, field)
            if theirs != ours:
                raise JournalError(
                    f"the journal {self.folder} has answers of another {FIELD_NAMES[field]}: {theirs}, not "
                    f"{ours}. Delete the folder to begin again"
                )

    def _finish(self, answer: AnsweredLine, segment: int, offset: int) -> None:
        if not 1 <= answer.line <= self.input.lines:
            raise JournalError(f"{self._paths[segment]} answers line {answer.line} of {self.input.lines}")
        if self._segments[answer.line] < 0:
            self._segments[answer.line], self._offsets[answer.line] = segment, offset
            self._failed[answer.line] = answer.failed
            self.num_finished += 1
            self.num_failed += answer.failed

    def _output(self, file: BinaryIO, line: int) -> bytes:
        for _, payload in read_frames(file, self._offsets[line]):
            record = self._decode(payload, self._paths[self._segments[line]])
            if isinstance(record, AnsweredLine) and record.line == line:
                return record.output
            break
        raise JournalError(f"{file.name} lost the answer of line {line} after the answer was written")


FIELD_NAMES = {"digest": "input file", "lines": "number of lines", "model": "model"}


class _Segment:
    """A segment file that this process appends to.

    Attributes:
      index: the segment's number in its journal.
      end: offset after the last frame that is on disk.
    """

    def __init__(self, path: Path):
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self.index, self.end = -1, 0
        sync_folder(path.parent)

    def append(self, payloads: Sequence[bytes]) -> list[int]:
        """Write frames, fsync, and return their offsets. Raises: OSError; then nothing of them stays."""
        frames = [frame(payload) for payload in payloads]
        try:
            write_all(self._file, b"".join(frames))
            os.fsync(self._file)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self.end)
            raise
        offsets = []
        for written in frames:
            offsets.append(self.end)
            self.end += len(written)
        return offsets

    def close(self) -> None:
        os.close(self._file)


def write_all(file: int, data: bytes) -> None:
    """Write all bytes to a file descriptor. A full disk may take a part of them before it fails."""
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def sync_folder(folder: Path) -> None:
    """Wait until the names of a folder's new files are on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
