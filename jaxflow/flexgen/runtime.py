"""FlexGen's offline runtime (§4): generation with a model over device, host and disk.

runtime = start(OffloadConfig(policy, disk_path="/scratch"), engine_config, checkpoint)
for events in runtime.generate(requests): ...
"""

import contextlib
import dataclasses
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxflow.cli.progress import Progress, progress_of
from jaxflow.engine.live_request import HostLogprobs, LiveRequest
from jaxflow.flexgen.accounting import Account
from jaxflow.flexgen.block import Block, DrawnTokens, make_block
from jaxflow.flexgen.block_loop import BlockRunner
from jaxflow.flexgen.config import OffloadConfig
from jaxflow.flexgen.geometry import Geometry
from jaxflow.flexgen.host_attention import HostAttention
from jaxflow.flexgen.policy import Policy
from jaxflow.flexgen.programs import compilations
from jaxflow.flexgen.stages import StagedRunner
from jaxflow.flexgen.tiers import Tiers, VerbTraffic, added
from jaxflow.flexgen.waits import StageWaits
from jaxflow.kv.tiers.host_machine import free_host_bytes
from jaxflow.request import Event, Finished, FinishReason, InvalidRequest, Request, SamplingParams, with_limit
from jaxflow.scheduler.state import Sequence as Seq
from jaxflow.scheduler.state import sequences_of


def accept(policy: Policy, request: Request) -> Request:
    """Return a request with its limit. A request that has a limit is returned as it is.

    Raises:
      InvalidRequest: for a request that no block of the policy can hold.
    """
    if request.limit is not None:
        return request
    if request.sampling.prompt_logprobs is not None:
        asked = request.sampling.prompt_logprobs
        raise InvalidRequest(
            "prompt_logprobs", asked, "unset, because an offloaded run does not compute them"
        )
    if request.sampling.bad_words:
        accepted = "no words, because an offloaded run does not look back on its tokens"
        raise InvalidRequest("bad_words", request.sampling.bad_words, accepted)
    return with_limit(request, policy.prompt_tokens, policy.output_tokens)


class LiveRequests:
    """The sequences of accepted requests, and the events of their tokens, as the engine emits them."""

    def __init__(self, requests: Sequence[Request], eos: Iterable[int], seeds: random.Random):
        eos, now = frozenset(eos), time.perf_counter()
        self._live: dict[str, LiveRequest] = {}
        self.sequences: list[Seq] = []
        for arrival, request in enumerate(requests):
            assert request.limit is not None
            seed = seeds.getrandbits(64) if request.sampling.seed is None else request.sampling.seed
            made = sequences_of(request, seed=seed, limit=request.limit, arrival=arrival, salt=None)
            self._live[request.request_id] = LiveRequest(request, made, eos, now)
            self.sequences += made

    def start_block(self, sequences: Iterable[Seq]) -> None:
        """Record the start of the sequences' block."""
        now = time.perf_counter()
        for seq in sequences:
            seq.t_first_schedule = now

    def add_token(self, seq: Seq, token: int, found: HostLogprobs | None, row: int) -> list[Event]:
        """Return the events of a sequence's next token; no events for an ended sequence."""
        if seq.finished:
            return []
        seq.append(token)
        live = self._live[seq.request.request_id]
        return live.take(seq, token, found, row, time.perf_counter(), _end)


def _end(seq: Seq, reason: FinishReason) -> None:
    seq.finished = True


def generated(events: Iterable[Event]) -> int:
    """Return the number of tokens of ended sequences."""
    return sum(event.usage.completion_tokens for event in events if isinstance(event, Finished))


@dataclasses.dataclass(frozen=True)
class BlockStats:
    """Measurements of one block.

    Attributes:
      sequences, tokens: number of sequences, and of their generated tokens.
      prefill_s, decode_s: seconds of the prompts, and of all other tokens.
      prefill_crossed: bytes to the device and from the device until the last prompt was done.
      waits: of each stage.
    """

    sequences: int
    tokens: int
    prefill_s: float
    decode_s: float
    traffic: Mapping[str, VerbTraffic]
    prefill_crossed: tuple[int, int] = (0, 0)
    waits: Sequence[StageWaits] = ()

    @property
    def latency_s(self) -> float:
        """Seconds of the block."""
        return self.prefill_s + self.decode_s


class Runtime:
    """A placed and warm model. `stats`: measurements of each block, in order.

    `geometry`: of the stage that draws the tokens, the last one. `ended`: called when the memory is released.
    """

    def __init__(
        self,
        offload: OffloadConfig,
        geometry: Geometry,
        found: Account,
        tiers: Sequence[Tiers],
        runner: BlockRunner | StagedRunner,
        hosts: Sequence[HostAttention],
        seed: int,
        ended: Callable[[], None] = lambda: None,
    ):
        self.offload, self.geometry, self.account = offload, geometry, found
        self.stats: list[BlockStats] = []
        self.start_s: Mapping[str, float] = {}  # seconds of the start, by phase
        self._tiers, self._runner, self._hosts, self._ended = tiers, runner, hosts, ended
        self._random = random.Random(seed)
        self._fault: BaseException | None = None
        self._under_way = threading.Lock()  # held from the first events of `generate` to its end
        self._compiled_at_start = self._free_at_start = 0
        self.warm_up_waits: Sequence[StageWaits] = ()  # of each stage

    def warm_up(self) -> None:
        """Generate two tokens of one batch, so that the first-use costs are not measured."""
        sampling = SamplingParams(
            temperature=0.0, max_tokens=min(2, self.policy.output_tokens), seed=0, ignore_eos=True
        )
        for _ in self.generate(
            [Request(f"warm-up-{i}", [0], sampling) for i in range(self.policy.gpu_batch_size)]
        ):
            pass
        self.warm_up_waits = self.stats[-1].waits
        self.stats.clear()
        self._compiled_at_start, self._free_at_start = compilations(), free_host_bytes()

    @property
    def policy(self) -> Policy:
        """The policy of the run."""
        return self.offload.policy

    @property
    def load_s(self) -> float:
        """Seconds of the start."""
        return sum(self.start_s.values())

    @property
    def devices(self) -> list[Any]:
        """The JAX devices of all stages."""
        return [device for tiers in self._tiers for device in tiers.mesh.devices.flat]

    @property
    def compilations(self) -> int:
        """The number of backend compilations since the start. Any number except 0 is an error."""
        return compilations() - self._compiled_at_start

    @property
    def host_taken_bytes(self) -> int:
        """The host memory that this machine has lost since the start. Pinned pools that grow show here."""
        return max(0, self._free_at_start - free_host_bytes())

    def accept(self, request: Request) -> Request:
        """Return a request with its limit. Raises: InvalidRequest, for a request that no block can hold."""
        return accept(self.policy, request)

    def generate(
        self, requests: Sequence[Request], *, progress: bool = False
    ) -> Generator[list[Event], None, None]:
        """Run requests block after block, and yield events when tokens are known.

        A caller that stops early closes the iterator.

        Raises:
          InvalidRequest: before anything runs.
          RuntimeError: another `generate` has not ended. There is no wait, because this thread may be the one
            that has to end it.
          DiskError: the generated tokens are lost, and the runtime must be closed.
        """
        requests = [self.accept(request) for request in requests]
        if not self._under_way.acquire(blocking=False):
            raise RuntimeError(
                "an offloaded run is under way; accepted is a call after its end, or after its iterator "
                "was closed"
            )
        try:
            yield from self._blocks(requests, progress)
        finally:
            self._under_way.release()

    def _blocks(self, requests: Sequence[Request], progress: bool) -> Iterator[list[Event]]:
        """Run the blocks of `generate`."""
        if self._fault is not None:
            raise RuntimeError("an offloaded run failed; close the runtime") from self._fault
        g = self.geometry
        live = LiveRequests(requests, g.config.eos_token_ids, self._random)
        size = max(1, len(live.sequences)) if self.offload.order == "diagonal" else self.policy.block_size
        blocks = [live.sequences[i : i + size] for i in range(0, len(live.sequences), size)]
        made = [make_block(g, sequences) for sequences in blocks]
        total = sum(block.batches for block in made) * g.config.num_layers * self.policy.output_tokens
        try:
            with progress_of("Generating", total, "step", shown=progress) as bar:
                for block in made:
                    yield from self._run(block, live, bar)
        except GeneratorExit:  # the caller stops: the block was ended in order
            raise
        except BaseException as fault:
            self._fault = fault
            raise

    def close(self) -> None:
        """Stop the threads, remove the files and release the memory. A second call does nothing."""
        for tiers in self._tiers:
            tiers.staging.close()
        self._runner.close()
        for host in self._hosts:
            host.close()
        for tiers in self._tiers:
            tiers.close()
        self._runner.free()
        self._ended()

    def __enter__(self) -> "Runtime":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, block: Block, live: LiveRequests, bar: Progress) -> Iterator[list[Event]]:
        """Run one block. Tokens are read one step late, when they have been drawn."""
        sequences = [seq for batch in block.sequences for seq in batch if seq is not None]
        live.start_block(sequences)
        self._take_traffic()
        for tiers in self._tiers:
            tiers.waits.take()
        started, late = time.perf_counter(), deque[DrawnTokens]()
        width = 1 if self.offload.order == "row" else min(block.batches, self.geometry.places)

        def finished(batches: Sequence[int]) -> bool:
            return all(seq is None or seq.finished for batch in batches for seq in block.sequences[batch])

        with contextlib.closing(self._runner.run(block, finished, lambda _: bar.update())) as under_way:
            for drawn in under_way:
                late.append(drawn)
                if len(late) > width:
                    yield self._events(block, live, late.popleft())
        jax.block_until_ready([drawn.tokens for drawn in late])
        elapsed_s = time.perf_counter() - started
        for drawn in late:
            yield self._events(block, live, drawn)
        tokens = sum(seq.num_known - seq.num_prompt for seq in sequences)
        prefill_s = self._runner.prefill_s
        decode_s, crossed = elapsed_s - prefill_s, self._runner.prefill_crossed
        traffic, waits = self._take_traffic(), [tiers.waits.take() for tiers in self._tiers]
        self.stats.append(BlockStats(len(sequences), tokens, prefill_s, decode_s, traffic, crossed, waits))

    def _take_traffic(self) -> dict[str, VerbTraffic]:
        """Return the traffic of all stages since the last call."""
        return added(tiers.traffic.take() for tiers in self._tiers)

    def _events(self, block: Block, live: LiveRequests, drawn: DrawnTokens) -> list[Event]:
        tokens = np.asarray(drawn.tokens).tolist()
        found = None if drawn.logprobs is None else HostLogprobs.of(drawn.logprobs)
        events: list[Event] = []
        for row, seq in enumerate(block.sequences[drawn.batch]):
            if seq is not None:
                events += live.add_token(seq, tokens[row], found, row)
        return events
