"""Settings of the servers, and the check of their certificate files."""

import dataclasses
import ssl
from pathlib import Path


class ListenError(RuntimeError):
    """An address, port or certificate that a server cannot use. The message is one line."""


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """Addresses, certificates, tokens and limits of the servers. Port 0 selects a free port.

    Raises:
      ListenError: settings that contradict each other.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    admin_host: str = "127.0.0.1"
    admin_port: int = 50052
    tls_cert: str | None = None  # PEM files
    tls_key: str | None = None
    tls_client_ca: str | None = None  # if set, clients must show a certificate of this authority
    auth_tokens: tuple[str, ...] = ()
    admin_tokens: tuple[str, ...] = ()  # tokens of the admin service; empty: the auth_tokens
    served_model_names: tuple[str, ...] = ()  # accepted as `model`; empty: the model's own name
    reasoning_parser: str = "auto"  # auto, or a key of `answer_reader.PARSERS`
    tool_call_parser: str = "auto"  # one of `answer_reader.TOOL_CALL_PARSERS`
    drain_timeout_s: float = 30.0
    max_pending_tokens: int = 1024  # most unread tokens of a sequence
    idle_timeout_s: float = 300.0  # a connection without a call ends
    connection_age_s: float = (
        3600.0  # a connection ends, once its calls have finished or after the same time again
    )
    allow_priority: bool = False  # callers may raise their priority above the default 0
    isolate_tokens: bool = True  # requests of different bearer tokens share no prefixes
    max_requests_per_token: int = 0  # requests of a token at once; 0: no limit
    max_tokens_per_token: int = 0  # prompt and output tokens of the requests at once; 0: no limit

    def __post_init__(self) -> None:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ListenError("--tls_cert and --tls_key must be given together")
        if self.tls_client_ca and not self.tls_cert:
            raise ListenError("--tls_client_ca needs --tls_cert and --tls_key")


@dataclasses.dataclass(frozen=True)
class Certificates:
    """The contents of the PEM files of a server.

    `authority` is None unless clients must show a certificate.
    """

    key: bytes
    chain: bytes
    authority: bytes | None


def read_certificates(config: ServerConfig) -> Certificates | None:
    """Return the certificates of `config`, or None without TLS.

    Raises:
      ListenError: a file is missing, or the files cannot be used together.
    """
    if not config.tls_cert or not config.tls_key:
        return None
    try:
        # gRPC reports an unusable certificate only in its log, so Python's ssl module reads the files first.
        check = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        check.load_cert_chain(config.tls_cert, config.tls_key, password="")  # no prompt at the terminal
        if config.tls_client_ca:
            check.load_verify_locations(config.tls_client_ca)
        authority = Path(config.tls_client_ca).read_bytes() if config.tls_client_ca else None
        return Certificates(Path(config.tls_key).read_bytes(), Path(config.tls_cert).read_bytes(), authority)
    except OSError as error:  # ssl.SSLError is a subclass
        raise ListenError(
            f"cannot use the certificate {config.tls_cert} with the key {config.tls_key}: {error}"
        ) from error
