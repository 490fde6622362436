"""FlexGen's offline runtime: a model that does not fit the device, placed over device, host and disk as a
policy says (§4).

    runtime = start(OffloadConfig(policy, disk_path="/scratch"), engine_config, checkpoint)
    for events in runtime.generate(requests): ...

On several devices tensors are cut over them (`jaxflow.flexgen.shards`); FlexGen cuts the layers between them
(§4.4), which is not built.
"""

import contextlib
import dataclasses
import random
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from jaxflow.engine.live_request import HostLogprobs
from jaxflow.flexgen.accounting import Account
from jaxflow.flexgen.answers import Answers, check_request
from jaxflow.flexgen.block import Block, make_block
from jaxflow.flexgen.block_loop import Driver
from jaxflow.flexgen.compiled import compilations
from jaxflow.flexgen.config import OffloadConfig
from jaxflow.flexgen.geometry import Geometry
from jaxflow.flexgen.host_attention import HostAttention
from jaxflow.flexgen.policy import Policy
from jaxflow.flexgen.step_inputs import Drawn
from jaxflow.flexgen.tiers import Tiers
from jaxflow.flexgen.traffic import Moved
from jaxflow.request import Event, Request, SamplingParams


@dataclasses.dataclass(frozen=True)
class BlockStats:
    """What one block took. tokens: generated, of sequences that were there; seconds of the prompts, and of
    all other tokens.

    prefill_crossed: bytes to the device and from it that were asked for until the last prompt was done.
    """

    sequences: int
    tokens: int
    prefill_s: float
    decode_s: float
    traffic: Mapping[str, Moved]
    prefill_crossed: tuple[int, int] = (0, 0)

    @property
    def latency_s(self) -> float:
        return self.prefill_s + self.decode_s


class Runtime:
    """A model, placed and warm. `stats`: of each block that was run, in order."""

    def __init__(
        self,
        offload: OffloadConfig,
        geometry: Geometry,
        found: Account,
        tiers: Tiers,
        driver: Driver,
        host: HostAttention | None,
        seed: int,
    ):
        self.offload, self.geometry, self.account = offload, geometry, found
        self.stats: list[BlockStats] = []
        self.start_s: Mapping[str, float] = {}  # seconds of what came before the first request, by phase
        self._tiers, self._driver, self._host = tiers, driver, host
        self._random = random.Random(seed)
        self._fault: BaseException | None = None
        self._under_way = threading.Lock()  # held from the first events of a `generate` to its end
        self._compiled_at_start = 0

    def warm_up(self) -> None:
        """Two tokens of one batch: what is slow only the first time is done before the clock runs."""
        sampling = SamplingParams(
            temperature=0.0, max_tokens=min(2, self.policy.output_tokens), seed=0, ignore_eos=True
        )
        for _ in self.generate(
            [Request(f"warm-up-{i}", [0], sampling) for i in range(self.policy.gpu_batch_size)]
        ):
            pass
        self.stats.clear()
        self._compiled_at_start = compilations()

    @property
    def policy(self) -> Policy:
        return self.offload.policy

    @property
    def load_s(self) -> float:
        """Seconds of everything before the first request."""
        return sum(self.start_s.values())

    @property
    def device(self) -> Any:
        """The first of the JAX devices that compute."""
        return self.geometry.mesh.devices.flat[0]

    @property
    def compilations(self) -> int:
        """Backend compilations since the start; anything but 0 is a fault."""
        return compilations() - self._compiled_at_start

    def check(self, request: Request) -> None:
        """Refuses a request that no block can hold. Raises: InvalidRequest."""
        check_request(self.policy, request)

    def generate(
        self, requests: Sequence[Request], *, progress: bool = False
    ) -> Generator[list[Event], None, None]:
        """Runs requests, block after block; yields events as tokens become known. Who wants no more of them
        closes the iterator.

        Raises: InvalidRequest before anything runs. RuntimeError: another `generate` has not ended; it is not
        waited for, since this
          thread itself may be who must end it. DiskError: what was generated is lost, and the runtime must be
          closed.
        """
        for request in requests:
            self.check(request)
        if not self._under_way.acquire(blocking=False):
            raise RuntimeError(
                "an offloaded run is under way: another can begin when it has ended, or its iterator "
                "was closed"
            )
        try:
            yield from self._blocks(requests, progress)
        finally:
            self._under_way.release()

    def _blocks(self, requests: Sequence[Request], progress: bool) -> Iterator[list[Event]]:
        """`generate`, where no other is under way."""
        if self._fault is not None:
            raise RuntimeError("an offloaded run failed and cannot go on: close it") from self._fault
        g = self.geometry
        answers = Answers(requests, self.policy, g.config.eos_token_ids, self._random)
        size = self.policy.block_size
        blocks = [answers.sequences[i : i + size] for i in range(0, len(answers.sequences), size)]
        made = [make_block(g, sequences) for sequences in blocks]
        total = sum(block.batches for block in made) * g.config.num_layers * self.policy.output_tokens
        try:
            with tqdm(
                total=total, desc="Generating", unit="square", disable=not progress, smoothing=0.05
            ) as bar:
                for block in made:
                    yield from self._run(block, answers, bar)
        except GeneratorExit:  # the caller wants no more: the driver ended the block in order
            raise
        except BaseException as fault:
            self._fault = fault
            raise

    def close(self) -> None:
        """Ends threads, removes files, frees memory; may be called again."""
        self._tiers.staging.close()
        self._driver.close()
        if self._host is not None:
            self._host.close()
        self._tiers.close()
        self._driver.free()

    def __enter__(self) -> "Runtime":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, block: Block, answers: Answers, bar: tqdm) -> Iterator[list[Event]]:
        """One block. Tokens are read a whole step late, when they have long been drawn."""
        sequences = [seq for batch in block.sequences for seq in batch if seq is not None]
        answers.begin(sequences)
        self._tiers.traffic.take()
        started, late = time.perf_counter(), deque[Drawn]()
        width = block.batches if self.offload.schedule == "zigzag" else 1

        def finished(batches: Sequence[int]) -> bool:
            return all(seq is None or seq.finished for batch in batches for seq in block.sequences[batch])

        with contextlib.closing(self._driver.run(block, finished, lambda _: bar.update())) as under_way:
            for drawn in under_way:
                late.append(drawn)
                if len(late) > width:
                    yield self._tell(block, answers, late.popleft())
        jax.block_until_ready([drawn.tokens for drawn in late])
        elapsed_s = time.perf_counter() - started
        for drawn in late:
            yield self._tell(block, answers, drawn)
        tokens = sum(seq.num_known - seq.num_prompt for seq in sequences)
        prefill_s = self._driver.prefill_s
        decode_s, crossed = elapsed_s - prefill_s, self._driver.prefill_crossed
        self.stats.append(
            BlockStats(len(sequences), tokens, prefill_s, decode_s, self._tiers.traffic.take(), crossed)
        )

    def _tell(self, block: Block, answers: Answers, drawn: Drawn) -> list[Event]:
        tokens = np.asarray(drawn.tokens).tolist()
        found = None if drawn.logprobs is None else HostLogprobs.of(drawn.logprobs)
        told: list[Event] = []
        for row, seq in enumerate(block.sequences[drawn.batch]):
            if seq is not None:
                told += answers.tell(seq, tokens[row], found, row)
        return told
