"""Load generator for a running server, with the times of the received tokens."""

import asyncio
import time
from collections.abc import Sequence

import numpy as np
from tqdm import tqdm

from jaxflow.bench.report.requests import Record
from jaxflow.bench.workload.backend import ServerBackend
from jaxflow.bench.workload.conversations import Conversation


async def converse(
    backend: ServerBackend,
    conversations: Sequence[Conversation],
    *,
    timeout_s: float | None = None,
    progress: bool = False,
) -> tuple[list[list[Record]], float]:
    """Run each conversation from its arrival time, with greedy sampling that ignores end tokens.

    Returns the records of each conversation, and the total seconds.

    A round is sent at its due time, regardless of the number of running rounds. A round that the server
    refuses or aborts is a failed record, and the last record of its conversation.
    """
    start = time.perf_counter()
    rounds = sum(len(one.rounds) for one in conversations)
    with tqdm(total=rounds, disable=not progress, unit="request", mininterval=1.0) as bar:

        async def one(talk: Conversation) -> list[Record]:
            await asyncio.sleep(max(0.0, start + talk.arrival_s - time.perf_counter()))
            records: list[Record] = []
            history, known = np.zeros(0, np.int32), talk.known_tokens
            for number, turn in enumerate(talk.rounds, start=talk.opening):
                await asyncio.sleep(turn.think_s)
                history = np.concatenate([history, turn.text])
                record = Record(len(history), time.perf_counter(), round=number, known_tokens=known)
                records.append(record)
                ids = await backend.ask(record, history, turn.output_tokens, timeout_s)
                bar.update()
                if record.error:
                    break
                history = np.concatenate([history, np.array(ids, np.int32)])
                known = len(history)
            return records

        records = await asyncio.gather(*(one(talk) for talk in conversations))
    return list(records), time.perf_counter() - start
