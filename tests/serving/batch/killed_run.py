"""A process that runs a batch with a fake engine: `killed_run.py INPUT JOURNAL ASKED`.

The file ASKED gets a line for each request that begins. A test kills the process at any time.
"""

import asyncio
import os
import random
import sys
from pathlib import Path

from batch_fakes import FakeEndpoints, open_journal, opened

from serving.batch import runner
from serving.batch.runner import Runner
from serving.batch.window import Window


class Recorded(FakeEndpoints):
    def __init__(self, file: int):
        super().__init__()
        self._file, self._random = file, random.Random(os.getpid())

    async def answer(self, path, body, *, priority=0):
        self.seconds = self._random.uniform(0, 0.01)
        result = asyncio.ensure_future(super().answer(path, body, priority=priority))
        await asyncio.sleep(0)
        os.write(self._file, self.asked[-1].encode() + b"\n")
        return await result


def main(path: str, folder: str, asked: str) -> None:
    runner.LINES_A_LEASE, runner.POLL_S = 16, 0.02
    source = opened(Path(path))
    journal, leases = open_journal(source, Path(folder))
    file = os.open(asked, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    print("begun", flush=True)
    asyncio.run(Runner(source, journal, leases, Recorded(file), Window(8)).run())


if __name__ == "__main__":
    main(*sys.argv[1:])
