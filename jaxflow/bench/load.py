"""Sends requests to a running server at their times and notes when their tokens come."""

import asyncio
import time
from collections.abc import Sequence

import numpy as np
from tqdm import tqdm

from jaxflow.bench.report import Record
from jaxflow.bench.workload import Item
from serving.client import Client, RequestFailed


async def load(
    client: Client, items: Sequence[Item], token_ids: Sequence[np.ndarray], *, timeout_s: float | None = None, progress: bool = False
) -> tuple[list[Record], float]:
    """Each item at its arrival time, greedy and past end tokens. Returns the records in order and the seconds it all took.

    A request is sent when it is due, however many are under way. One that the server refuses or breaks off is a failed record.
    """
    start = time.perf_counter()
    with tqdm(total=len(items), disable=not progress, unit="request", mininterval=1.0) as bar:

        async def one(item: Item, ids: np.ndarray) -> Record:
            await asyncio.sleep(max(0.0, start + item.arrival_s - time.perf_counter()))
            record = Record(item.prompt_tokens, time.perf_counter())
            settings = {"temperature": 0.0, "max_tokens": item.output_tokens, "ignore_eos": True, "seed": 0}
            answer = client.generate(ids.tolist(), timeout_s=timeout_s, **settings)
            try:
                await answer.read_all()
                record.finished_s = time.perf_counter()
            except RequestFailed as failure:
                record.error = str(failure)
            record.deliveries = [(answer.sent_at + seconds, number) for seconds, _, number in answer.arrivals]
            record.cached_prompt_tokens = answer.started.cached_prompt_tokens if answer.started else 0
            bar.update()
            return record

        records = await asyncio.gather(*(one(item, ids) for item, ids in zip(items, token_ids, strict=True)))
    return list(records), time.perf_counter() - start
