"""The gRPC client: a connection to a JaxFlow server, and the streamed answer of a request."""

import contextlib
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from jaxflow.request import InvalidRequest
from serving.grpc import generate_pb2 as pb
from serving.grpc import generate_pb2_grpc

DEFAULT_TARGET = "127.0.0.1:50051"
_MAX_TIMEOUT_S = 1e9

# Text, token ids, or chat messages {"role", "content"}.
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


class RequestFailed(RuntimeError):
    """A failed request.

    Attributes:
      code: the gRPC status.
      field: the field of the request that the server refused, if it named one.
      retry_after_s: the seconds after which the server suggests another try, if it named them.
      from_server: False if the server was not reached or the connection was lost.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        field: str | None = None,
        retry_after_s: float | None = None,
        from_server: bool = True,
    ):
        self.code, self.message, self.field, self.retry_after_s, self.from_server = (
            code,
            message,
            field,
            retry_after_s,
            from_server,
        )
        super().__init__(f"{code.name}: {message}")


class Answer:
    """The streamed answer of one request. It can be iterated once.

    Attributes:
      started: the server's message of this name.
      finished: the server's message of this name, by index of the n sequences.
      texts: the text received so far, by index.
      token_ids: the tokens received so far, by index.
      arrivals: (seconds since the request was sent, index, number of tokens) of each delta.
      total_s: seconds until the stream ended.
    """

    def __init__(self, call: grpc.aio.UnaryStreamCall, sequences: int):
        self._call = call
        self.sent_at = time.perf_counter()
        self.started: pb.Started | None = None
        self.finished: dict[int, pb.Finished] = {}
        self.texts = [""] * sequences
        self.token_ids: list[list[int]] = [[] for _ in range(sequences)]
        self.arrivals: list[tuple[float, int, int]] = []
        self.total_s: float | None = None

    @property
    def text(self) -> str:
        """Return the text of the first sequence."""
        return self.texts[0]

    @property
    def time_to_first_token_s(self) -> float | None:
        """Return the seconds until the first token, or None before it."""
        return self.arrivals[0][0] if self.arrivals else None

    async def __aiter__(self) -> AsyncIterator[pb.GenerateResponse]:
        """Yield the server's messages. Leaving the loop early cancels the request. Raises: RequestFailed."""
        try:
            async for message in self._call:
                self._note(message)
                yield message
        except grpc.aio.AioRpcError as error:
            raise _failure(error) from error
        finally:
            self.total_s = time.perf_counter() - self.sent_at
            self._call.cancel()

    async def read_all(self) -> "Answer":
        """Read the answer to its end and return it. Raises: RequestFailed."""
        async for _ in self:
            pass
        return self

    def cancel(self) -> None:
        """Cancel the request."""
        self._call.cancel()

    def _note(self, message: pb.GenerateResponse) -> None:
        match message.WhichOneof("event"):
            case "started":
                self.started = message.started
            case "delta":
                delta = message.delta
                self.arrivals.append((time.perf_counter() - self.sent_at, delta.index, len(delta.token_ids)))
                self.token_ids[delta.index] += delta.token_ids
                self.texts[delta.index] += delta.text
            case "finished":
                self.finished[message.finished.index] = message.finished
                self.texts[message.finished.index] += message.finished.text


def _is_chat(prompt: Any) -> bool:
    """Return True for a list of messages."""
    return isinstance(prompt, Sequence) and bool(prompt) and all(isinstance(m, Mapping) for m in prompt)


def _token_ids(prompt: Any) -> pb.TokenIds:
    """Return token ids as the proto has them. Raises: InvalidRequest."""
    if not isinstance(prompt, bytes | Mapping):
        with contextlib.suppress(TypeError, ValueError):
            return pb.TokenIds(ids=list(prompt))
    raise InvalidRequest("prompt", prompt, "a text, messages, or a list of token ids")


def _proto[M: Message](kind: type[M], fields: Mapping[str, Any], path: str = "") -> M:
    """Return a message of the proto with these fields. None leaves a field unset.

    path: of the message in the request, for an error.

    Raises:
      InvalidRequest: a field that does not exist, or a value that the field does not take.
    """
    made = kind()
    for name, value in fields.items():
        if value is None:
            continue
        try:
            made.MergeFrom(kind(**{name: value}))
        except UnicodeEncodeError:
            raise
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"{path}{name}", value, f"a value of the proto ({error})") from error
    return made


class Client:
    """A connection to one server.

    Args:
      target: the server's host:port.
      tls_ca, tls_cert, tls_key: PEM files. With any of them the connection uses TLS.
      auth_token: the bearer token, if the server requires one.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        tls_ca: str | os.PathLike | None = None,
        tls_cert: str | os.PathLike | None = None,
        tls_key: str | os.PathLike | None = None,
        auth_token: str | None = None,
    ):
        # A local pool gives each client of a process its own connection.
        options = (("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1))
        files = [Path(path).read_bytes() if path else None for path in (tls_ca, tls_key, tls_cert)]
        if any(files):
            self._channel = grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(*files), options)
        else:
            self._channel = grpc.aio.insecure_channel(target, options)
        self.target = target
        self._metadata = (("authorization", f"Bearer {auth_token}"),) if auth_token else ()
        self._generate = generate_pb2_grpc.GenerateServiceStub(self._channel)
        self._model = generate_pb2_grpc.ModelServiceStub(self._channel)
        self._admin = generate_pb2_grpc.AdminServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_exception) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    def generate(
        self,
        prompt: Prompt,
        *,
        request_id: str = "",
        model: str = "",
        priority: int = 0,
        cache_salt: str = "",
        session: str = "",
        continue_final_message: bool = False,
        timeout_s: float | None = None,
        **sampling,
    ) -> Answer:
        """Send one request and return its answer.

        Args:
          sampling: fields of the proto's SamplingParams. None leaves a field unset. `stop` may be one string.

        Raises:
          InvalidRequest: a field that does not exist, or a value that the proto does not take.
        """
        if isinstance(sampling.get("stop"), str):  # the proto would read each character as a stop string
            sampling["stop"] = [sampling["stop"]]
        settings = _proto(pb.SamplingParams, sampling)
        request = pb.GenerateRequest(
            request_id=request_id,
            model=model,
            priority=priority,
            cache_salt=cache_salt,
            session=session,
            sampling=settings,
        )
        if isinstance(prompt, str):
            request.text = prompt
        elif _is_chat(prompt):
            messages = [_proto(pb.ChatMessage, m, f"messages[{i}].") for i, m in enumerate(prompt)]  # type: ignore[arg-type]
            request.chat.CopyFrom(pb.Chat(messages=messages, continue_final_message=continue_final_message))
        else:
            request.token_ids.CopyFrom(_token_ids(prompt))  # type: ignore[arg-type]
        return Answer(
            self._generate.Generate(request, timeout=_deadline(timeout_s), metadata=self._metadata),
            settings.n or 1,
        )

    async def model(self, timeout_s: float | None = 10.0) -> pb.GetModelResponse:
        """Return the description of the served model. Raises: RequestFailed."""
        try:
            return await self._model.GetModel(
                pb.GetModelRequest(), timeout=timeout_s, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise _failure(error) from error

    async def stats(self, timeout_s: float | None = 10.0) -> pb.GetStatsResponse:
        """Return the engine's counters.

        The client must be connected to the admin port. Raises: RequestFailed.
        """
        try:
            return await self._admin.GetStats(
                pb.GetStatsRequest(), timeout=timeout_s, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise _failure(error) from error

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Return once the server is ready. Raises: RequestFailed if that takes longer than `timeout_s`."""
        request = health_pb2.HealthCheckRequest()
        watch = self._health.Watch(  # type: ignore[attr-defined]
            request, timeout=_deadline(timeout_s), wait_for_ready=True
        )
        try:
            async for reply in watch:
                if reply.status == health_pb2.HealthCheckResponse.SERVING:
                    return
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                raise _failure(error) from error
        finally:
            watch.cancel()
        message = f"no server was ready at {self.target} within {timeout_s:g} s"
        raise RequestFailed(grpc.StatusCode.DEADLINE_EXCEEDED, message, from_server=False)


def _deadline(timeout_s: float | None) -> float | None:
    """Return the timeout, capped: gRPC treats a timeout beyond the end of its clock as expired."""
    return None if timeout_s is None else min(_MAX_TIMEOUT_S, timeout_s)


def _failure(error: grpc.aio.AioRpcError) -> RequestFailed:
    field, retry_after_s = None, None
    try:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]  # has the three methods it calls
    except ValueError:  # the caller's deadline ended the call while the status of the server arrived
        status = None
    for detail in status.details if status is not None else ():
        bad, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(bad) and bad.field_violations:
            field = bad.field_violations[0].field
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
    return RequestFailed(
        error.code(),
        error.details() or "",
        field=field,
        retry_after_s=retry_after_s,
        from_server=status is not None,
    )
