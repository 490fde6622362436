"""A batch over Ray with engines whose steps take a fixed time by sleeping.

  python ray_batch.py INPUT OUTPUT ASKED REPLICAS [ADDRESS]

runs the command. The file ASKED gets a line for each line of the batch that
begins: the process, and the number.
"""

import collections
import dataclasses
import functools
import os
import sys
from pathlib import Path

from fake_llm import FakeDriver, FakeLLM

from jaxflow.config import EngineConfig
from serving.batch_command import Options, answer_file
from serving.batch_engine import served_endpoints
from serving.cluster.batch_replica import BatchReplica
from serving.cluster.batch_replicas import ReplicaEngine
from serving.cluster.ray_link import RayCluster, RayConfig
from serving.cluster.wanted import WantedReplicas

CONFIG = EngineConfig(model="fake", plan="sequential")
STEP_S = 0.05
SEQUENCES = 8


class Recording(collections.deque):
    """The submitted requests. The file gets the process and the request's seed; none is kept."""

    def __init__(self, path: str):
        super().__init__(maxlen=1)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def append(self, request) -> None:
        os.write(self._file, b"%d %d\n" % (os.getpid(), request.sampling.seed))


class SimulatedDriver(FakeDriver):
    """An engine of `sequences` slots. A request beyond waits for a slot."""

    sequences = SEQUENCES

    def _step(self, run):
        in_slot = any(run is one for one in self._running[: self.sequences])
        return super()._step(run) if in_slot else []


async def load(config, *, step_s: float = STEP_S, sequences: int = SEQUENCES, asked: str | None = None):
    """Return the replica of a simulated engine."""
    llm = FakeLLM()
    llm.driver.close()
    llm.driver = SimulatedDriver(
        llm.max_model_len, llm.tokenizer.eos_token_id, fault_token=None, step_s=step_s
    )
    llm.driver.sequences = sequences
    llm.engine_config = dataclasses.replace(config, max_num_seqs=sequences)
    if asked is not None:
        llm.driver.submitted = Recording(asked)
    return BatchReplica(llm, await served_endpoints(llm, ()))


def connect(replicas: int, loading, address: str | None = None) -> RayCluster:
    """Start or join Ray. Each replica reserves few cores, so that they fit this machine."""
    return RayCluster(RayConfig(address, cpus=0.1, gpus=0), replicas, 1, loading)


def main(source: str, output: str, asked: str, replicas: str, address: str | None = None) -> int:
    def start() -> ReplicaEngine:
        cluster = connect(int(replicas), functools.partial(load, asked=asked), address)
        return ReplicaEngine(WantedReplicas(int(replicas), CONFIG), cluster.launch, close=cluster.close)

    options = Options(Path(source), Path(output), "models/fake", window=SEQUENCES)
    return answer_file(options, start)


if __name__ == "__main__":
    # The functions travel to the replicas by the name of their module, which must not be __main__.
    import ray_batch

    sys.exit(ray_batch.main(*sys.argv[1:]))
