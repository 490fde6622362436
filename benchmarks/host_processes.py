"""Run a command of JaxFlow as several processes of this host. They share one engine, and each has one GPU.

    python -m benchmarks.host_processes --processes 2 -m jaxflow.bench throughput --model qwen3-30b-a3b
        --load_format dummy --data_parallel_size 2 --enable_expert_parallel

Each process runs Python with the arguments after --processes N, and gets --coordinator, --num_processes and
--process_id. Process 0 writes the report. The others end with it.
"""

import os
import subprocess
import sys
from collections.abc import Sequence

from jaxflow.bench.engine.followers import local_address, see_one_device

END_S = 60.0  # for the other processes, once process 0 has ended


def commands(line: Sequence[str], processes: int, coordinator: str) -> list[list[str]]:
    """Return the command of each process. line: the arguments of Python."""
    return [
        [
            *(sys.executable, *line),
            *(f"--coordinator={coordinator}", f"--num_processes={processes}", f"--process_id={rank}"),
        ]
        for rank in range(processes)
    ]


def run(line: Sequence[str], processes: int) -> int:
    """Run the processes until process 0 ends. Return its exit status, or that of another one that failed."""
    coordinator = local_address()
    started: list[subprocess.Popen] = []
    try:
        for rank, command in enumerate(commands(line, processes, coordinator)):
            environment = os.environ.copy()
            see_one_device(environment, rank, processes)
            started.append(subprocess.Popen(command, env=environment))
        status = started[0].wait()
        return status or max(process.wait(END_S) for process in started)
    finally:
        for process in started:
            process.kill()
            process.wait()


def main(arguments: Sequence[str]) -> int:
    if len(arguments) < 3 or arguments[0] != "--processes" or not arguments[1].isdecimal():
        print(__doc__)
        return 0 if {"--help", "-h"} & set(arguments[:1]) else 2
    if not 2 <= int(arguments[1]) <= 64:
        print(f"--processes {arguments[1]}: 2 to 64 processes are accepted", file=sys.stderr)
        return 2
    return run(arguments[2:], int(arguments[1]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
