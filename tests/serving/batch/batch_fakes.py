"""Endpoints that answer from the request alone, and input files for them."""

import asyncio
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from jaxflow.request import InvalidRequest
from serving.batch.input_file import InputFile, open_input
from serving.batch.journal import Input, Journal
from serving.batch.leases import Leases

URL = "/v1/completions"


def check(url: str, body: bytes) -> None:
    """Accept a JSON object with a prompt."""
    if "prompt" not in json.loads(body):
        raise InvalidRequest("prompt", None, "a text")


def request(i: int, **body) -> dict:
    return {
        "custom_id": f"r-{i}",
        "method": "POST",
        "url": URL,
        "body": {"model": "fake", "prompt": f"p{i}", **body},
    }


def write_input(path: Path, count: int, **body) -> Path:
    path.write_text("".join(json.dumps(request(i, **body)) + "\n" for i in range(count)), "utf-8")
    return path


def open_journal(source: InputFile, folder: Path) -> tuple[Journal, Leases]:
    journal = Journal(folder, Input(source.digest, source.num_lines, "fake"))
    return journal, Leases(folder / "leases")


class FakeEndpoints:
    """Answers after `seconds`. `asked` holds the prompts in the order of their requests.

    faults: statuses by prompt, each given once before the answer.
    """

    def __init__(self, seconds: float = 0.0, faults: dict[str, list[int]] | None = None):
        self.seconds, self.faults = seconds, {k: list(v) for k, v in (faults or {}).items()}
        self.asked: list[str] = []
        self.running = self.most = 0
        self.alive: Callable[[], bool] = lambda: True

    def check(self, url: str, body: bytes) -> None:
        check(url, body)

    async def answer(self, path: str, body: bytes, *, priority: int = 0) -> tuple[int, dict]:
        request = json.loads(body)
        prompt = request["prompt"]
        self.asked.append(prompt)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.seconds)
            if self.faults.get(prompt):
                status = self.faults[prompt].pop(0)
                return status, {"error": {"message": "a fault", "code": status}}
            return 200, {
                "id": f"cmpl-{prompt}",
                "choices": [{"text": text_of(prompt)}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
            }
        finally:
            self.running -= 1


def text_of(prompt: str) -> str:
    return hashlib.sha256(prompt.encode()).hexdigest()[:16]


def opened(path: Path) -> InputFile:
    return open_input(path, check)
