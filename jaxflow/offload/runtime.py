"""FlexGen's offline runtime: a model that does not fit the device, placed over device, host and disk as a policy says (§4).

    runtime = start(OffloadConfig(policy, disk_path="/scratch"), engine_config, checkpoint)
    for events in runtime.generate(requests): ...

On several devices tensors are cut over them (`jaxflow.offload.shards`); FlexGen cuts the layers between them (§4.4), which is not built.
"""

import concurrent.futures
import dataclasses
import logging
import random
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxflow.config import ConfigError, EngineConfig
from jaxflow.engine.build import choose_kernels, resolve
from jaxflow.engine.outputs import HostLogprobs
from jaxflow.engine.request import Event, Request, SamplingParams
from jaxflow.mesh import axis_of, make_mesh
from jaxflow.model.checkpoint import Checkpoint
from jaxflow.model.ops import Context
from jaxflow.offload.accounting import Account, account, check_fits
from jaxflow.offload.activation_store import ActivationStore
from jaxflow.offload.answers import Answers, check_request
from jaxflow.offload.block import Block, make_block
from jaxflow.offload.compiled import Compiled, attends_on_host, compilations, compile_programs
from jaxflow.offload.disk_tier import DiskFolder, check_folder, free_bytes
from jaxflow.offload.driver import Driver
from jaxflow.offload.geometry import Geometry, PlacedWeights, place
from jaxflow.offload.host_attention import HostAttention
from jaxflow.offload.host_tier import check_views
from jaxflow.offload.inputs import Drawn
from jaxflow.offload.kv_store import KvStore
from jaxflow.offload.policy import Policy, PolicyError
from jaxflow.offload.process import free_host_bytes
from jaxflow.offload.programs import Programs
from jaxflow.offload.run import Setup
from jaxflow.offload.settings import GIGA, OffloadConfig
from jaxflow.offload.tiers import Tiers
from jaxflow.offload.traffic import Moved
from jaxflow.offload.weight_store import WeightStore

log = logging.getLogger(__name__)
_SPARE = 0.06  # of a GPU's memory: what comes and goes leaves gaps in it


@dataclasses.dataclass(frozen=True)
class BlockStats:
    """What one block took. tokens: generated, of sequences that were there; seconds of the prompts, and of all other tokens."""

    sequences: int
    tokens: int
    prefill_s: float
    decode_s: float
    traffic: Mapping[str, Moved]

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
        self.load_s = 0.0  # of everything before the first request
        self._tiers, self._driver, self._host = tiers, driver, host
        self._random = random.Random(seed)
        self._fault: BaseException | None = None
        self._compiled_at_start = 0

    def warm_up(self) -> None:
        """Two tokens of one batch: what is slow only the first time is done before the clock runs."""
        sampling = SamplingParams(temperature=0.0, max_tokens=min(2, self.policy.output_tokens), seed=0, ignore_eos=True)
        for _ in self.generate([Request(f"warm-up-{i}", [0], sampling) for i in range(self.policy.gpu_batch_size)]):
            pass
        self.stats.clear()
        self._compiled_at_start = compilations()

    @property
    def policy(self) -> Policy:
        return self.offload.policy

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

    def generate(self, requests: Sequence[Request], *, progress: bool = False) -> Iterator[list[Event]]:
        """Runs requests, block after block; yields events as tokens become known.

        Raises: InvalidRequest before anything runs. DiskError: what was generated is lost, and the runtime must be closed.
        """
        for request in requests:
            self.check(request)
        if self._fault is not None:
            raise RuntimeError("an offloaded run failed and cannot go on: close it") from self._fault
        g = self.geometry
        answers = Answers(requests, self.policy, g.config.eos_token_ids, self._random)
        size = self.policy.block_size
        blocks = [answers.sequences[i : i + size] for i in range(0, len(answers.sequences), size)]
        made = [make_block(g, sequences) for sequences in blocks]
        total = sum(block.batches for block in made) * g.config.num_layers * self.policy.output_tokens
        try:
            with tqdm(total=total, desc="Generating", unit="square", disable=not progress, smoothing=0.05) as bar:
                for block in made:
                    yield from self._run(block, answers, bar)
        except GeneratorExit:  # the caller wants no more: the block was ended in order
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

        for drawn in self._driver.run(block, finished, lambda _: bar.update()):
            late.append(drawn)
            if len(late) > width:
                yield self._tell(block, answers, late.popleft())
        jax.block_until_ready([drawn.tokens for drawn in late])
        elapsed_s = time.perf_counter() - started
        for drawn in late:
            yield self._tell(block, answers, drawn)
        tokens = sum(seq.num_known - seq.num_prompt for seq in sequences)
        prefill_s = self._driver.prefill_s
        self.stats.append(BlockStats(len(sequences), tokens, prefill_s, elapsed_s - prefill_s, self._tiers.traffic.take()))

    def _tell(self, block: Block, answers: Answers, drawn: Drawn) -> list[Event]:
        tokens = np.asarray(drawn.tokens).tolist()
        found = None if drawn.logprobs is None else HostLogprobs.of(drawn.logprobs)
        told: list[Event] = []
        for row, seq in enumerate(block.sequences[drawn.batch]):
            if seq is not None:
                told += answers.tell(seq, tokens[row], found, row)
        return told


def start(offload: OffloadConfig, config: EngineConfig, checkpoint: Checkpoint, *, progress: bool = True) -> Runtime:
    """Places and loads a model. What cannot work is refused before the first weight is read.

    Raises: ConfigError, PolicyError, CheckpointError, DiskError.
    """
    began = time.perf_counter()
    geometry = make_geometry(offload, config, checkpoint)
    if offload.on_disk:
        check_folder(str(offload.disk_path))
    placed = place(geometry)
    mesh = geometry.mesh
    limits = _limits(offload, mesh.devices.flat[0])
    check_fits(account(geometry, placed, 0), limits)
    resolved = resolve(config, checkpoint.model_config)
    context = Context(geometry.config, choose_kernels(resolved, geometry.config), axis_of(mesh))
    with tqdm(desc="Compiling", disable=not progress, unit="program", delay=1.0) as bar:
        compiled = compile_programs(Programs(geometry, context), placed, lambda _: bar.update())
    found = account(geometry, placed, compiled.working_bytes)
    check_fits(found, limits)
    log.info("offload: %s\n%s", _described(geometry), found.describe())
    folder = DiskFolder(str(offload.disk_path)) if offload.on_disk else None
    tiers = Tiers(mesh, folder)
    undo = tiers.close
    try:
        check_views(mesh)
        driver, host = _driver(offload, geometry, compiled, tiers, _load(placed, tiers, geometry, checkpoint, resolved.seed, progress))
        runtime = Runtime(offload, geometry, found, tiers, driver, host, resolved.seed)
        undo = runtime.close
        runtime.warm_up()
    except BaseException:
        undo()
        raise
    runtime.load_s = time.perf_counter() - began
    return runtime


def make_geometry(offload: OffloadConfig, config: EngineConfig, checkpoint: Checkpoint) -> Geometry:
    """Raises: ConfigError, PolicyError: settings that an offloaded run cannot have."""
    policy, model = offload.policy, checkpoint.model_config
    if policy.model not in (config.model, checkpoint.name):
        raise PolicyError(
            f"model={policy.model!r}, but it is used for {checkpoint.name!r}: `python -m search placement` makes one for that"
        )
    tp = config.tensor_parallel_size
    if model.hidden_size % tp:
        raise ConfigError(
            "tensor_parallel_size", tp, f"a divisor of the hidden size {model.hidden_size}: what passes between layers is cut"
        )
    if config.quantization not in (None, "int4") or (config.quantization == "int4") > (policy.weight_bits == 4):
        raise ConfigError("quantization", config.quantization, "unset: an offloaded run's policy says weight_bits, 16 or 4")
    if config.kv_cache_dtype != "auto":
        raise ConfigError("kv_cache_dtype", config.kv_cache_dtype, "auto: an offloaded run's policy says kv_bits, 16 or 4")
    if policy.prompt_tokens + policy.output_tokens > model.max_position:
        tokens = f"{policy.prompt_tokens} + {policy.output_tokens}"
        raise PolicyError(f"prompt_tokens + output_tokens={tokens}: at most {model.max_position}, what {checkpoint.name} was made for")
    if policy.kv_bits == 4 and model.head_dim % 2:
        raise PolicyError(f"kv_bits=4 with head_dim={model.head_dim}: 16, two numbers of 4 bits make a byte")
    return Geometry(model, policy, jnp.dtype(resolve(config, model).dtype), config.block_size, make_mesh(tp))


def _limits(offload: OffloadConfig, device: Any) -> dict[str, int | None]:
    """Bytes by tier: as told, or what is there."""

    def told(limit: float | None, there: int | None) -> int | None:
        return there if limit is None else int(limit * GIGA)

    stats = device.memory_stats()
    limit = told(offload.gpu_memory_limit, int(stats["bytes_limit"]) if stats else None)
    return {
        "device": int(limit * (1 - _SPARE)) if stats and limit else limit,
        "host": told(offload.host_memory_limit, free_host_bytes()),
        "disk": told(offload.disk_limit, free_bytes(str(offload.disk_path)) if offload.on_disk else None),
    }


def _load(placed: PlacedWeights, tiers: Tiers, g: Geometry, checkpoint: Checkpoint, seed: int, progress: bool) -> WeightStore:
    """Each layer goes through the device to its tiers; no more than one is there at a time beside what stays."""
    weights = WeightStore(placed, tiers)
    groups = checkpoint.stream(g.dtype, g.mesh, seed=seed, quantization=g.quantization)

    def put(arrays: dict[str, Any], structs: dict[str, Any]) -> dict[str, Any]:
        return jax.device_put(arrays, jax.tree.map(lambda s: s.sharding, structs))

    weights.ends = put(next(groups), placed.ends)
    bar = tqdm(groups, total=g.config.num_layers, desc="Placing layers", unit="layer", delay=1.0, disable=not progress)
    for arrays, structs in zip(bar, placed.layers, strict=True):
        weights.add(put(arrays, structs))
    weights.reserve_staging()
    return weights


def _driver(
    offload: OffloadConfig, g: Geometry, compiled: Compiled, tiers: Tiers, weights: WeightStore
) -> tuple[Driver, HostAttention | None]:
    kv, activations = KvStore(g, tiers), ActivationStore(g, tiers)
    kv.reserve()
    activations.reserve()
    host = None
    if attends_on_host(g):
        rows = [part.rows for part in kv.away]
        host = HostAttention(g.config, max(rows))
        tiers.staging.reserve(3 * [g.heads(r) for r in rows])
    thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="host-attention-order")
    eos = frozenset(g.config.eos_token_ids)
    return Driver(Setup(g, compiled, tiers, weights, kv, activations, host, thread, offload.schedule, offload.overlap, eos)), host


def _described(g: Geometry) -> str:
    p = g.policy
    shares = ", ".join(f"{kind} {'/'.join(f'{share:g}' for share in getattr(p, kind))}" for kind in ("weights", "kv", "activations"))
    rows = "/".join(str(sum(part.rows for part in g.kv_parts if part.tier == tier)) for tier in ("device", "host", "disk"))
    attention = "host" if attends_on_host(g) else "device"
    return (
        f"blocks of {p.num_gpu_batches} x {p.gpu_batch_size}, device/host/disk: {shares} % (KV of {rows} sequences a batch), "
        f"weights of {p.weight_bits} bits, KV of {p.kv_bits}, decodes attend on the {attention}"
    )
