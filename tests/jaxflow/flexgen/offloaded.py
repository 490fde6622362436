"""Offloaded runs of the toy checkpoints, and their results."""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import paths

from jaxflow.config import EngineConfig
from jaxflow.flexgen.config import OffloadConfig
from jaxflow.flexgen.policy import Policy, Shares
from jaxflow.flexgen.runtime import Runtime
from jaxflow.flexgen.start import start
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.request import Delta, Finished, Request, SamplingParams

DEVICE, HOST, DISK = Shares(device=100.0), Shares(host=100.0), Shares(disk=100.0)
MIXED = Shares(34.0, 34.0, 32.0)
PROMPT, OUTPUT = 40, 6


def policy(model: str, **changes: Any) -> Policy:
    fields: dict[str, Any] = {
        "model": model,
        "prompt_tokens": PROMPT,
        "output_tokens": OUTPUT,
        "gpu_batch_size": 3,
        "num_gpu_batches": 2,
    }
    return Policy(**(fields | {"weights": DEVICE, "kv": DEVICE, "activations": DEVICE} | changes))


@contextlib.contextmanager
def runtime(
    model: str, folder: Any, *, page_size: int = 16, tp: int = 1, **changes: Any
) -> Iterator[Runtime]:
    """Yield a warm runtime of a toy checkpoint, and check that no thread or file is left.

    `changes`: fields of the policy.
    """
    before = {thread for thread in threading.enumerate() if not thread.daemon}
    made = start(
        OffloadConfig(policy(model, **changes), disk_path=str(folder)),
        EngineConfig(model=str(paths.MODELS / model), block_size=page_size, tensor_parallel_size=tp),
        open_checkpoint(str(paths.MODELS / model)),
        progress=False,
    )
    try:
        yield made
        assert made.compilations == 0
    finally:
        made.close()
    assert {thread for thread in threading.enumerate() if not thread.daemon} <= before
    assert list(folder.iterdir()) == []


def changed(made: Runtime, **settings: Any) -> None:
    """Change the schedule or the overlap of the runtime's next blocks."""
    made._runner._setup = dataclasses.replace(made._runner._setup, **settings)
    made.offload = dataclasses.replace(made.offload, **settings)


def requests(prompts: Sequence[Sequence[int]], tokens: int = OUTPUT) -> list[Request]:
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return [Request(f"r{i}", prompt, sampling) for i, prompt in enumerate(prompts)]


def run(made: Runtime, asked: Sequence[Request]) -> list[list[int]]:
    """Return the tokens of each request's only sequence."""
    tokens: dict[str, list[int]] = {request.request_id: [] for request in asked}
    ended = set()
    for events in made.generate(asked):
        for event in events:
            if isinstance(event, Delta):
                tokens[event.request_id].extend(event.token_ids)
            elif isinstance(event, Finished):
                ended.add(event.request_id)
    assert ended == set(tokens)
    return list(tokens.values())


def goldens(model: str, copies: int = 2) -> tuple[list[list[int]], list[list[int]]]:
    """Return prompts that fit the policy, and their continuations by the engine, for more rows than a block
    has.
    """
    found = [p for p in paths.golden(model)["prompts"] if p["prompt_len"] <= PROMPT]
    return [p["prompt_ids"] for p in found] * copies, [p["greedy_ids"][:OUTPUT] for p in found] * copies
