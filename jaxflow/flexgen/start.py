"""Start of an offloaded run: checks, compilation, placement of the weights, and reservation of memory."""

import concurrent.futures
import contextlib
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxflow.cli.progress import progress_of
from jaxflow.config import ConfigError, EngineConfig, check_has_heads
from jaxflow.engine.kernel_choice import choose_kernels, tell_kernels
from jaxflow.engine.settings import resolve
from jaxflow.engine.start import prepare_process
from jaxflow.flexgen.accounting import LIMITS, Account, DoesNotFit, account, check_fits, together
from jaxflow.flexgen.activation_store import ActivationStore
from jaxflow.flexgen.block_loop import BlockRunner, BlockSetup
from jaxflow.flexgen.config import GIGA, OffloadConfig
from jaxflow.flexgen.geometry import Geometry, PlacedWeights, place
from jaxflow.flexgen.host_attention import HostAttention
from jaxflow.flexgen.kv_store import KvStore
from jaxflow.flexgen.pinned_memory import PinnedPool, check_views, grow_pools
from jaxflow.flexgen.policy import TIERS, PolicyError
from jaxflow.flexgen.pool_limits import grown_bytes, host_pool_gib, pools_room, usable_bytes
from jaxflow.flexgen.programs import (
    Compiled,
    OffloadPrograms,
    attends_on_host,
    compile_programs,
    fetches_rows,
)
from jaxflow.flexgen.runtime import Runtime
from jaxflow.flexgen.scratch_files import DiskFolder, check_folder, free_bytes, sweep
from jaxflow.flexgen.stages import StagedRunner, split_layers
from jaxflow.flexgen.tiers import Tiers
from jaxflow.flexgen.weight_store import WeightStore
from jaxflow.kv.tiers.host_machine import bound, free_host_bytes, gpu_bus_ids, near_cpus
from jaxflow.model.checkpoints.checkpoint import Checkpoint
from jaxflow.model.op_registry import Context
from jaxflow.parallel.mesh import axis_of, on_gpu, stage_meshes

log = logging.getLogger(__name__)
_POOL = PinnedPool()
_POOL_GIB = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


class _Phases:
    """Seconds of each phase of a start. `shown`: printed at the end of the phase, and otherwise logged."""

    def __init__(self, shown: bool) -> None:
        self.seconds: dict[str, float] = {}
        self._shown, self._since = shown, time.perf_counter()

    def ended(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self._since = now - self._since, now
        self.tell(f"{name} took {self.seconds[name]:.1f} s")

    def tell(self, text: str) -> None:
        if self._shown:
            print(f"offload: {text}", file=sys.stderr, flush=True)
        else:
            log.info("offload: %s", text)


def start(
    offload: OffloadConfig, config: EngineConfig, checkpoint: Checkpoint, *, progress: bool = True
) -> Runtime:
    """Load a model and place its weights. Invalid settings are refused before the first weight is read.

    Raises: ConfigError, PolicyError, CheckpointError, DiskError.
    """
    phases = _Phases(progress)
    geometries = make_geometries(offload, config, checkpoint)
    disk = check_folder(str(offload.disk_path)) if offload.on_disk else None
    if disk is not None:
        sweep(disk)  # first, because files of a killed run take space
    placed = [place(geometry) for geometry in geometries]
    mesh = geometries[0].mesh
    free_by_tier = _free_by_tier(mesh.devices.flat[0], disk)
    pools = 0 if free_by_tier["device"] is None else sum(one.mesh.size for one in geometries)
    known = _accounts(geometries, placed, [0] * len(placed))  # without the programs' memory on devices
    _check_fits(known, offload, free_by_tier, pools)
    resolved = resolve(config, checkpoint.model_config)
    kernels = choose_kernels(resolved, checkpoint.model_config)
    tell_kernels(kernels, {}, progress)  # without GEMM shapes, which are not known before the placement
    programs = [
        OffloadPrograms(geometry, Context(geometry.config, kernels, axis_of(geometry.mesh)))
        for geometry in geometries
    ]
    cpus = near_cpus(gpu_bus_ids(sum(one.mesh.size for one in geometries))) if on_gpu() else None
    grows = pools > 0 and _POOL.free_bytes < known.total("host")
    with _growing_pools(geometries, known, cpus) if grows else contextlib.nullcontext() as grown:
        with progress_of("Compiling", None, "program", shown=progress) as bar:
            compiled = [
                compile_programs(one, own, lambda _: bar.update())
                for one, own in zip(programs, placed, strict=True)
            ]
        phases.ended("compile")
        found = _accounts(geometries, placed, [one.working_bytes for one in compiled])
        _check_fits(found, offload, free_by_tier, pools)
        phases.tell(f"{_described(geometries[0])}\n{found.describe()}\n{_host_room(free_by_tier, pools)}")
        if grown is not None:
            grown()
            phases.ended("pin")
    limits = _limits(offload, free_by_tier, pools)
    tiers: list[Tiers] = []

    def undo() -> None:
        for one in tiers:
            one.close()

    try:
        with bound(cpus):  # pinned memory, and the threads that use it, belong on the GPUs' NUMA node
            for geometry in geometries:
                folder = DiskFolder(disk) if disk is not None else None
                tiers.append(Tiers(geometry.mesh, folder))
                check_views(geometry.mesh)
            # KV is reserved after the weights.
            most = len(placed) * max(map(_weight_bytes, placed))
            room = limits["host"] is None or most <= limits["host"]
            stores = [WeightStore(own, one) for own, one in zip(placed, tiers, strict=True)]
            _load(stores, geometries, checkpoint, resolved.seed, progress, wait_on_host=room)
            phases.ended("place")
            stages = zip(geometries, compiled, tiers, stores, strict=True)
            setups = [_setup(offload, *stage) for stage in stages]
            phases.ended("reserve")
            runner = BlockRunner(setups[0]) if len(setups) == 1 else StagedRunner(setups)
            hosts = [setup.host_attention for setup in setups if setup.host_attention is not None]
            ended = _POOL.take(found.total("host"))
            runtime = Runtime(offload, geometries[-1], found, tiers, runner, hosts, resolved.seed, ended)
            undo = runtime.close
            runtime.warm_up()
            phases.ended("warm_up")
    except jax.errors.JaxRuntimeError as error:
        undo()
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        tier = "host" if "host memory" in str(error) else "device"
        accepted = (
            f"more, or lower shares of the {tier}, or smaller batches: "
            f"{str(error).splitlines()[0]}\n{found.describe()}"
        )
        raise ConfigError(LIMITS[tier], getattr(offload, LIMITS[tier]), accepted) from None
    except BaseException:
        undo()
        raise
    runtime.start_s = phases.seconds
    return runtime


def _accounts(
    geometries: Sequence[Geometry], placed: Sequence[PlacedWeights], working_bytes: Sequence[int]
) -> Account:
    return together([account(*stage) for stage in zip(geometries, placed, working_bytes, strict=True)])


def make_geometries(offload: OffloadConfig, config: EngineConfig, checkpoint: Checkpoint) -> list[Geometry]:
    """Return the static shapes of each stage of a run. Raises: ConfigError, PolicyError."""
    policy, model = offload.policy, checkpoint.model_config
    check_has_heads(model, "an offloaded run")
    if policy.model not in (config.model, checkpoint.name):
        raise PolicyError(
            f"model={policy.model!r}, used for {checkpoint.name!r}; accepted is a policy of that model, "
            "which `python -m search placement` writes"
        )
    tp = config.tensor_parallel_size
    if model.hidden_size % tp:
        raise ConfigError(
            "tensor_parallel_size",
            tp,
            f"a divisor of the hidden size {model.hidden_size}, by which activations are sharded",
        )
    if config.quantization not in (None, "int4") or (config.quantization == "int4") > (
        policy.weight_bits == 4
    ):
        raise ConfigError(
            "quantization", config.quantization, "unset, because the policy's weight_bits apply, 16 or 4"
        )
    if config.kv_cache_dtype != "auto":
        raise ConfigError(
            "kv_cache_dtype", config.kv_cache_dtype, "auto, because the policy's kv_bits apply, 16 or 4"
        )
    if model.attention_sinks and (policy.host_attention or policy.sparse_values):
        field = "host_attention" if policy.host_attention else "value_top_k_percent"
        raise PolicyError(
            f"{field}={getattr(policy, field)}; accepted is {False if policy.host_attention else 100} for "
            f"{checkpoint.name}, which has attention sinks"
        )
    if policy.prompt_tokens + policy.output_tokens > model.max_position:
        tokens = f"{policy.prompt_tokens} + {policy.output_tokens}"
        raise PolicyError(
            f"prompt_tokens + output_tokens={tokens}; accepted is at most {model.max_position}, the context "
            f"of {checkpoint.name}"
        )
    if policy.kv_bits == 4 and model.head_dim % 2:
        raise PolicyError(
            f"kv_bits=4 with head_dim={model.head_dim}; accepted is kv_bits=16, for an odd head_dim"
        )
    if policy.pipeline_parallel_size > model.num_layers:
        raise PolicyError(
            f"pipeline_parallel_size={policy.pipeline_parallel_size}; accepted is at most "
            f"{model.num_layers}, the number of layers of {checkpoint.name}"
        )
    dtype, stages = jnp.dtype(resolve(config, model).dtype), policy.pipeline_parallel_size
    return [
        Geometry(part, policy, dtype, config.block_size, mesh)
        for part, mesh in zip(split_layers(model, stages), stage_meshes(tp, stages), strict=True)
    ]


def _free_by_tier(device: Any, disk: Path | None) -> dict[str, int | None]:
    """Return the free bytes of each tier of this machine; None is unknown."""
    stats = device.memory_stats()
    return {
        "device": int(stats["bytes_limit"]) if stats else None,
        "host": pools_room(free_host_bytes()) + _POOL.free_bytes if on_gpu() else free_host_bytes(),
        "disk": None if disk is None else free_bytes(disk),
    }


def _configured_bytes(offload: OffloadConfig, tier: str) -> int | None:
    """Return the configured limit of a tier in bytes."""
    limit = getattr(offload, LIMITS[tier])
    return None if limit is None else int(limit * GIGA)


def _limits(
    offload: OffloadConfig, free_by_tier: Mapping[str, int | None], pools: int
) -> dict[str, int | None]:
    """Return the usable bytes of each tier: the smaller of limit and free memory, without gaps."""
    known = {
        tier: [size for size in (_configured_bytes(offload, tier), free_by_tier[tier]) if size is not None]
        for tier in TIERS
    }
    limits = {tier: min(sizes, default=None) for tier, sizes in known.items()}
    if not pools:
        return limits
    return {tier: None if size is None else usable_bytes(tier, size, pools) for tier, size in limits.items()}


def _check_fits(
    found: Account, offload: OffloadConfig, free_by_tier: Mapping[str, int | None], pools: int
) -> None:
    """Raise DoesNotFit for a tier that is too small, with the configured and the free bytes."""
    try:
        check_fits(found, _limits(offload, free_by_tier, pools), pools)
    except DoesNotFit as error:
        limit, free = _configured_bytes(offload, error.tier), free_by_tier[error.tier]
        if limit is None or free is None or limit <= free:
            raise
        accepted = f"{limit / GIGA:g} GB are configured, and {free / GIGA:.6g} GB are free; {error.accepted}"
        raise DoesNotFit(error.tier, error.needed_bytes, error.limit_bytes, accepted) from None


def _weight_bytes(placed: PlacedWeights) -> int:
    """Return the bytes of all layers on all tiers."""
    return sum(placed.bytes_of(layer, tier) for layer in range(len(placed.layers)) for tier in TIERS)  # type: ignore[arg-type]


@contextlib.contextmanager
def _growing_pools(
    geometries: Sequence[Geometry], found: Account, cpus: set[int] | None
) -> Iterator[Callable[[], None]]:
    """Let the pinned pools of all stages grow to the account's bytes during a `with` block, near `cpus`.

    Yield a function that waits for them. A block that ends without it stops the growth.
    """
    stopped = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(len(geometries), thread_name_prefix="pin") as threads:
        with bound(cpus):
            growths = [
                threads.submit(grow_pools, one.mesh, grown_bytes(size), stopped)
                for one, size in zip(geometries, found.pinned(), strict=True)
            ]

        def wait() -> None:
            for growth in growths:
                growth.result()

        try:
            yield wait
        finally:
            stopped.set()
            concurrent.futures.wait(growths)
            held = sum(growth.result() for growth in growths if growth.exception() is None)
            _POOL.take(min(held, found.total("host")))()  # kept for the next run of the process


def _load(
    stores: Sequence[WeightStore],
    geometries: Sequence[Geometry],
    checkpoint: Checkpoint,
    seed: int,
    progress: bool,
    *,
    wait_on_host: bool,
) -> None:
    """Load each layer through a device to its stage and tiers, with one layer on the device at a time.

    The embedding and the head go to every stage. `wait_on_host`: tensors of the device tier wait on the host
    until the last layer is loaded.
    """
    g = geometries[0]
    groups = checkpoint.stream(g.dtype, g.mesh, seed=seed, quantization=g.quantization)

    def put(arrays: dict[str, Any], structs: dict[str, Any]) -> dict[str, Any]:
        return jax.device_put(arrays, jax.tree.map(lambda s: s.sharding, structs))

    ends = next(groups)
    for store in stores:
        store.ends = put(ends, store.placed.ends)
    layers = [(store, structs) for store in stores for structs in store.placed.layers]
    with progress_of("Placing", len(layers), "layer", shown=progress) as bar:
        for arrays, (store, structs) in zip(groups, layers, strict=True):
            store.add(put(arrays, structs), wait_on_host=wait_on_host)
            bar.update()
    for store in stores:
        if wait_on_host:
            store.settle()
        store.reserve_staging()


def _setup(
    offload: OffloadConfig, g: Geometry, compiled: Compiled, tiers: Tiers, weights: WeightStore
) -> BlockSetup:
    """Reserve the memory of a stage, and return what its blocks run on."""
    kv, activations = KvStore(g, tiers), ActivationStore(g, tiers)
    kv.reserve()
    activations.reserve()
    host = None
    if attends_on_host(g):
        rows = [split.rows for split in kv.away]
        host = HostAttention(g.config, max(rows), percent=g.policy.value_top_k_percent)
        tiers.staging.reserve(3 * [g.heads(r) for r in rows])
    if fetches_rows(g):
        kinds = itertools.product(set(g.config.layers), kv.away)
        values = [g.top_values(layer, split.rows) for layer, split in kinds]
        tiers.staging.reserve(3 * jax.tree.leaves(values))
    thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="host-attention-order")
    eos = frozenset(g.config.eos_token_ids)
    return BlockSetup(
        g, compiled, tiers, weights, kv, activations, host, thread, offload.order, offload.overlap, eos
    )


def _described(g: Geometry) -> str:
    p = g.policy
    shares = ", ".join(
        f"{kind} {'/'.join(f'{share:g}' for share in getattr(p, kind))}"
        for kind in ("weights", "kv", "activations")
    )
    rows = "/".join(
        str(sum(split.rows for split in g.kv_splits if split.tier == tier))
        for tier in ("device", "host", "disk")
    )
    attention = "host" if attends_on_host(g) else "device"
    return (
        f"blocks of {p.num_gpu_batches} x {p.gpu_batch_size}, device/host/disk: {shares} % (KV of {rows} "
        f"sequences a batch), weights of {p.weight_bits} bits, KV of {p.kv_bits}, attention of decodes on "
        f"the {attention} to {p.value_top_k_percent:g} % of the V rows, {p.schedule} schedule"
    )


def _host_room(free_by_tier: Mapping[str, int | None], pools: int) -> str:
    """Return what a run that is killed for its memory leaves in a log."""
    size = f"in {pools} pinned pools of at most {os.environ.get(_POOL_GIB, '64')} GiB, " if pools else ""
    return f"host memory {size}{(free_by_tier['host'] or 0) / GIGA:.6g} GB free for it"


def prepare(offload: OffloadConfig, config: EngineConfig) -> None:
    """Apply the settings for JAX's first use. On a GPU the limits go to XLA's allocators."""
    total = device_memory_bytes()
    if offload.gpu_memory_limit is not None and total is not None:
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = (
            f"{min(1.0, offload.gpu_memory_limit * GIGA / total):.4f}"
        )
    limits = [pools_room(free_host_bytes()), _configured_bytes(offload, "host")]
    pools = offload.policy.pipeline_parallel_size * config.tensor_parallel_size
    pool_gib = host_pool_gib(min(limit for limit in limits if limit is not None), pools)
    os.environ.setdefault(_POOL_GIB, str(pool_gib))
    prepare_process(config)


def device_memory_bytes() -> int | None:
    """Return the memory of the first visible NVIDIA GPU, or None without a GPU."""
    with contextlib.suppress(Exception):  # without a runner there is no GPU
        import pynvml

        from pallas_kernels.nvml import first_visible

        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetMemoryInfo(first_visible()).total)
        finally:
            pynvml.nvmlShutdown()
    return None
