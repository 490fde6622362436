"""Frames of bytes over TCP between the processes of an engine: bounded in length, after a handshake.

A frame is one byte of kind, four bytes of length, and the payload. Nothing that arrives is ever executed or
unpickled. Both ends prove in the handshake that they know a secret, which the key-value store holds. The
frames themselves are neither encrypted nor signed, as are JAX's own messages: the network must be trusted.
"""

import hmac
import socket
import struct

MOST_BYTES = 64 << 20  # the most bytes of a payload
_HEADER = struct.Struct("!cI")
_NONCE_BYTES = 32
_HELLO = struct.Struct(f"!I{_NONCE_BYTES}s{_NONCE_BYTES}s")  # rank, nonce, proof
HANDSHAKE_S = 10.0


class FrameError(ConnectionError):
    """The other end closed the connection, or sent something that is no frame."""


def frame(kind: bytes, payload: bytes = b"") -> bytes:
    """Return the bytes of a frame. `kind`: one byte."""
    return _header(kind, payload) + payload


def send_frame(link: socket.socket, kind: bytes, payload: bytes) -> None:
    """Send a frame without a copy of its payload. Raises: FrameError, OSError."""
    head = _header(kind, payload)
    sent = link.sendmsg((head, payload))
    if sent < len(head):
        link.sendall(head[sent:])
    if rest := memoryview(payload)[max(0, sent - len(head)) :]:
        link.sendall(rest)


def _header(kind: bytes, payload: bytes) -> bytes:
    if len(payload) > MOST_BYTES:
        raise FrameError(f"a payload of {len(payload)} bytes, and at most {MOST_BYTES} are sent")
    return _HEADER.pack(kind, len(payload))


def read_frame(link: socket.socket, most_bytes: int = MOST_BYTES) -> tuple[bytes, bytes]:
    """Return the kind and the payload of the next frame. Raises: FrameError, OSError."""
    kind, length = _HEADER.unpack(read_exactly(link, _HEADER.size))
    if length > most_bytes:
        raise FrameError(f"a frame of {length} bytes, and at most {most_bytes} are accepted")
    return kind, read_exactly(link, length)


def read_exactly(link: socket.socket, length: int) -> bytes:
    """Return `length` bytes. Raises: FrameError at the end of the stream, OSError."""
    found = bytearray(length)
    view, have = memoryview(found), 0
    while have < length:
        count = link.recv_into(view[have:])
        if count == 0:
            raise FrameError("the connection was closed")
        have += count
    return bytes(found)


def greet(link: socket.socket, secret: bytes, rank: int, nonce: bytes) -> None:
    """Prove to process 0 that this end knows the secret, and check the same of process 0.

    nonce: 32 fresh random bytes.

    Raises:
      FrameError: the other end does not know the secret. OSError.
    """
    link.settimeout(HANDSHAKE_S)
    challenge = read_exactly(link, _NONCE_BYTES)
    link.sendall(_HELLO.pack(rank, nonce, _proof(secret, b"follower", rank, challenge)))
    if not hmac.compare_digest(read_exactly(link, _NONCE_BYTES), _proof(secret, b"leader", rank, nonce)):
        raise FrameError("process 0 does not know the secret")
    link.settimeout(None)


def welcome(link: socket.socket, secret: bytes, nonce: bytes) -> int:
    """Return the rank of a process that connects to process 0, and prove the secret
    to it. Arguments: see `greet`.

    Raises:
      FrameError: the other end does not know the secret. OSError.
    """
    link.settimeout(HANDSHAKE_S)
    link.sendall(nonce)
    rank, challenge, proof = _HELLO.unpack(read_exactly(link, _HELLO.size))
    if not hmac.compare_digest(proof, _proof(secret, b"follower", rank, nonce)):
        raise FrameError("a caller that does not know the secret")
    link.sendall(_proof(secret, b"leader", rank, challenge))
    link.settimeout(None)
    return rank


def _proof(secret: bytes, role: bytes, rank: int, nonce: bytes) -> bytes:
    return hmac.digest(secret, role + rank.to_bytes(4, "big") + nonce, "sha256")
