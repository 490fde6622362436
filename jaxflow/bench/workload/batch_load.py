"""A batch of `/v1/batches` that runs on a server beside the measured load."""

import asyncio
import itertools
import re
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np

from jaxflow.bench.workload.backend import text_of
from jaxflow.bench.workload.http_connection import HttpClient
from jaxflow.bench.workload.lengths import Item

POLL_S = 0.25
START_S = 60.0  # a server checks the file and starts the first requests in this time
BOUNDARY = "jaxflow-bench-batch-file"
GENERATED = re.compile(rb"^vllm:generation_tokens_total(?:\{[^}]*\})? ([0-9.e+]+)$", re.M)


class BatchLoad:
    """A batch on the server, from its start to the end of the `async with` block, which cancels it.

    Args:
      lines: the batch file, see `batch_file`.

    Raises:
      OSError: the connection fails, or the server refuses the file or the batch, or does not start it.
    """

    def __init__(self, http: HttpClient, lines: bytes):
        self._http, self._lines = http, lines
        self._id = ""
        self._begun = (0.0, 0.0)  # time, generated tokens

    async def __aenter__(self) -> Self:
        before = await self._generated()
        uploaded = await self._made(
            "/v1/files", multipart(self._lines), f"multipart/form-data; boundary={BOUNDARY}"
        )
        wanted = {
            "input_file_id": uploaded["id"],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        self._id = str((await self._made("/v1/batches", msgspec.json.encode(wanted)))["id"])
        end_s = time.perf_counter() + START_S
        while await self._generated() <= before:
            status = (await self._state())["status"]
            if status not in ("validating", "in_progress") or time.perf_counter() > end_s:
                await self.__aexit__(None, None, None)
                raise ConnectionError(
                    f"batch {self._id} made no token within {START_S:g} s; its status is {status}"
                )
            await asyncio.sleep(POLL_S)
        self._begun = (time.perf_counter(), await self._generated())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.post(f"/v1/batches/{self._id}/cancel", b"{}")

    async def figures(self, online_tokens: int) -> dict[str, Any]:
        """Return the batch's output tokens per second since its start, and whether it ran until now.

        online_tokens: output tokens of the measured load, which the server counts too.
        """
        elapsed_s, generated = time.perf_counter() - self._begun[0], await self._generated() - self._begun[1]
        status = (await self._state())["status"]
        return {
            "batch_output_throughput": max(0.0, generated - online_tokens) / elapsed_s,
            "batch_status": status,
        }

    async def _state(self) -> dict[str, Any]:
        return _object(f"/v1/batches/{self._id}", *await self._http.get(f"/v1/batches/{self._id}"))

    async def _made(self, path: str, body: bytes, kind: str = "application/json") -> dict[str, Any]:
        return _object(path, *await self._http.post(path, body, kind))

    async def _generated(self) -> float:
        """Return the tokens that the server has generated since its start."""
        status, text = await self._http.get("/metrics")
        counts = GENERATED.findall(text) if status == 200 else []
        if not counts:
            raise ConnectionError(f"/metrics: HTTP {status} without vllm:generation_tokens_total")
        return sum(map(float, counts))


def _object(path: str, status: int, data: bytes) -> dict[str, Any]:
    """Return the answer's JSON object. Raises: ConnectionError."""
    try:
        found = msgspec.json.decode(data)
    except msgspec.DecodeError:
        found = None
    if status != 200 or not isinstance(found, dict):
        raise ConnectionError(f"{path}: HTTP {status}: {data[:200].decode('utf-8', 'replace')}")
    return found


def batch_file(
    model: str, items: Sequence[Item], prompts: Sequence[np.ndarray], count: int, *, text: bool
) -> bytes:
    """Return a batch file of `count` completions, which repeat the items in turn.

    text: prompts as text instead of token ids, see `text_of`.
    """
    encoder = msgspec.json.Encoder()
    lines = []
    for i, (item, prompt) in zip(
        range(count), itertools.cycle(zip(items, prompts, strict=True)), strict=False
    ):
        body = {
            "model": model,
            "prompt": text_of(prompt) if text else prompt.tolist(),
            "max_tokens": item.output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        lines.append(
            encoder.encode({"custom_id": f"{i}", "method": "POST", "url": "/v1/completions", "body": body})
        )
    return b"\n".join(lines) + b"\n"


def multipart(data: bytes) -> bytes:
    """Return the form of /v1/files with a file for batches."""
    return (
        f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="file"; filename="batch.jsonl"\r\n'
        "content-type: application/jsonl\r\n\r\n"
    ).encode() + b"%s\r\n--%s--\r\n" % (data, BOUNDARY.encode())
