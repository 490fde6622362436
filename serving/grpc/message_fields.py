"""A bound on the fields of a large message, checked before the message is parsed.

protobuf holds Python's lock while it parses, so the event loop stops for this time. A message of 4 MiB that
is one long text takes 1 ms. The same bytes as two million empty submessages take 75 ms.
"""

import functools

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

LARGE_BYTES = 1 << 20  # at most 20 ms of parsing, whatever the message holds
MAX_FIELDS = 32_768  # of a larger message: those of 10,000 messages of a chat
_VARINT_BYTES = 10
_FIXED_BYTES = {1: 8, 5: 4}  # by wire type


def check_fields(message: bytes, kind: Descriptor) -> None:
    """Check the number of fields of a message and its submessages. A message of `LARGE_BYTES` or less passes.

    Raises:
      DecodeError: a large message has more than `MAX_FIELDS` fields, or cannot be read.
    """
    if len(message) <= LARGE_BYTES:
        return
    try:
        _count(message, kind)
    except IndexError:
        raise DecodeError("the message is cut off") from None


def _count(message: bytes, kind: Descriptor) -> None:
    left, fields = [(0, len(message), kind)], 0
    while left:
        at, end, kind = left.pop()
        inner = _submessages(kind)
        while at < end:
            fields += 1
            if fields > MAX_FIELDS:
                raise DecodeError(
                    f"more than {MAX_FIELDS} fields in a message of more than {LARGE_BYTES} bytes"
                )
            tag, at = _varint(message, at)
            wire_type = tag & 7
            if wire_type == 0:
                at = _varint(message, at)[1]
            elif wire_type == 2:
                size, at = _varint(message, at)
                if (found := inner.get(tag >> 3)) is not None:
                    left.append((at, min(at + size, end), found))
                at += size
            elif wire_type in _FIXED_BYTES:
                at += _FIXED_BYTES[wire_type]
            else:
                raise DecodeError(f"wire type {wire_type} in a message of more than {LARGE_BYTES} bytes")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return the number at a position, and the position after the number."""
    value = 0
    for i in range(_VARINT_BYTES):
        byte = message[at + i]
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return value, at + i + 1
    raise DecodeError("a number has more than 64 bits")


@functools.cache
def _submessages(kind: Descriptor) -> dict[int, Descriptor]:
    """Return the kinds of the submessages of a message, by the numbers of their fields."""
    return {field.number: field.message_type for field in kind.fields if field.message_type is not None}
