"""X.509 certificates for tests, made with the standard library: an authority and signed certificates, on
P-256.
"""

import dataclasses
import hashlib
import ipaddress
import secrets
from base64 import encodebytes
from datetime import UTC, datetime, timedelta
from pathlib import Path

# The curve P-256 (FIPS 186-4, D.1.2.3): y² = x³ - 3x + B over the field of P, with a base point of order N.
P = 2**256 - 2**224 + 2**192 + 2**96 - 1
N = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
BASE = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)

EC_PUBLIC_KEY, P256, ECDSA_SHA256 = "1.2.840.10045.2.1", "1.2.840.10045.3.1.7", "1.2.840.10045.4.3.2"
COMMON_NAME, BASIC_CONSTRAINTS, SUBJECT_ALT_NAME = "2.5.4.3", "2.5.29.19", "2.5.29.17"

Point = tuple[int, int] | None  # None: the point at infinity


def add(a: Point, b: Point) -> Point:
    if a is None or b is None:
        return a or b
    if a[0] == b[0] and (a[1] + b[1]) % P == 0:
        return None
    slope = (
        (3 * a[0] * a[0] - 3) * pow(2 * a[1], -1, P) if a == b else (b[1] - a[1]) * pow(b[0] - a[0], -1, P)
    )
    x = (slope * slope - a[0] - b[0]) % P
    return x, (slope * (a[0] - x) - a[1]) % P


def times(k: int, point: Point) -> Point:
    result: Point = None
    while k:
        if k & 1:
            result = add(result, point)
        point, k = add(point, point), k >> 1
    return result


def der(tag: int, *parts: bytes) -> bytes:
    body = b"".join(parts)
    size = len(body).to_bytes((len(body).bit_length() + 7) // 8 or 1)
    return bytes([tag]) + (size if len(body) < 128 else bytes([0x80 | len(size)]) + size) + body


def sequence(*parts: bytes) -> bytes:
    return der(0x30, *parts)


def integer(value: int) -> bytes:
    return der(0x02, value.to_bytes(value.bit_length() // 8 + 1))


def bits(value: bytes) -> bytes:
    return der(0x03, b"\0", value)


def oid(dotted: str) -> bytes:
    first, second, *rest = map(int, dotted.split("."))
    out = bytes([first * 40 + second])
    for value in rest:
        groups = [value & 0x7F]
        while value := value >> 7:
            groups.append(value & 0x7F | 0x80)
        out += bytes(reversed(groups))
    return der(0x06, out)


def name(common: str) -> bytes:
    return sequence(der(0x31, sequence(oid(COMMON_NAME), der(0x0C, common.encode()))))


def pem(kind: str, data: bytes) -> str:
    return f"-----BEGIN {kind}-----\n{encodebytes(data).decode()}-----END {kind}-----\n"


@dataclasses.dataclass(frozen=True)
class Identity:
    """A private key and its certificate."""

    common: str
    secret: int
    cert: Path
    key: Path


def issue(folder: Path, common: str, signer: Identity | None = None) -> Identity:
    """A new identity for this machine, signed by `signer`; an authority, signed by itself, without one."""
    secret = secrets.randbelow(N - 1) + 1
    x, y = times(secret, BASE)
    public = bits(b"\4" + x.to_bytes(32) + y.to_bytes(32))
    now = datetime.now(UTC)
    validity = [
        der(0x17, (now + timedelta(days=days)).strftime("%y%m%d%H%M%SZ").encode()) for days in (-1, 1)
    ]
    constraints = sequence(der(0x01, b"\xff")) if signer is None else sequence()
    names = sequence(der(0x82, b"localhost"), der(0x87, ipaddress.ip_address("127.0.0.1").packed))
    body = sequence(
        der(0xA0, integer(2)),
        integer(secrets.randbits(64)),
        sequence(oid(ECDSA_SHA256)),
        name(signer.common if signer else common),
        sequence(*validity),
        name(common),
        sequence(sequence(oid(EC_PUBLIC_KEY), oid(P256)), public),
        der(
            0xA3,
            sequence(
                sequence(oid(BASIC_CONSTRAINTS), der(0x01, b"\xff"), der(0x04, constraints)),
                sequence(oid(SUBJECT_ALT_NAME), der(0x04, names)),
            ),
        ),
    )
    certificate = sequence(
        body, sequence(oid(ECDSA_SHA256)), bits(sign(signer.secret if signer else secret, body))
    )
    private = sequence(integer(1), der(0x04, secret.to_bytes(32)), der(0xA0, oid(P256)), der(0xA1, public))
    cert, key = folder / f"{common}.crt", folder / f"{common}.key"
    cert.write_text(pem("CERTIFICATE", certificate))
    key.write_text(pem("EC PRIVATE KEY", private))
    return Identity(common, secret, cert, key)


def sign(secret: int, message: bytes) -> bytes:
    """ECDSA with SHA-256 (FIPS 186-4, 6.4)."""
    digest = int.from_bytes(hashlib.sha256(message).digest())
    nonce = secrets.randbelow(N - 1) + 1
    r = times(nonce, BASE)[0] % N
    s = pow(nonce, -1, N) * (digest + r * secret) % N
    return sequence(integer(r), integer(s))
