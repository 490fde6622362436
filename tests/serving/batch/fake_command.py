"""`python fake_command.py INPUT OUTPUT [ASKED]`: the command of a batch, with a fake engine of 64 sequences.

The file ASKED gets the first token of each request that begins. The last line of standard output says how
much the peak of this process's memory grew, in bytes.
"""

import collections
import dataclasses
import os
import resource
import sys
from pathlib import Path

from fake_llm import FakeLLM

from serving.batch_command import Options, answer_file
from serving.batch_engine import LocalEngine


class Recording(collections.deque):
    """The submitted requests. The file descriptor gets their first tokens; none is kept."""

    def __init__(self, file: int | None):
        super().__init__(maxlen=1)
        self._file = file

    def append(self, request) -> None:
        if self._file is not None:
            os.write(self._file, b"%d\n" % request.prompt_token_ids[0])


def peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(source: str, output: str, asked: str | None = None) -> int:
    file = None if asked is None else os.open(asked, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def load() -> LocalEngine:
        llm = FakeLLM(fault_token=None, step_s=0.001 if file is None else 0.03)  # slow enough to be killed
        llm.engine_config = dataclasses.replace(llm.engine_config, max_num_seqs=64)
        llm.driver.submitted = Recording(file)
        print("loaded", flush=True)
        return LocalEngine(llm)

    before = peak_bytes()
    status = answer_file(Options(Path(source), Path(output), "models/fake", progress=False), load)
    print(peak_bytes() - before)
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
