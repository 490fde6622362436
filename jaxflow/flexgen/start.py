"""Starts an offloaded run: what cannot work is refused, programs are compiled, the model is placed, what a
block needs is reserved.
"""

import concurrent.futures
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

from jaxflow.config import ConfigError, EngineConfig
from jaxflow.engine.kernel_choice import choose_kernels, tell_kernels
from jaxflow.engine.start import resolve
from jaxflow.flexgen.accounting import LIMITS, Account, DoesNotFit, account, check_fits
from jaxflow.flexgen.activation_store import ActivationStore
from jaxflow.flexgen.block_loop import Driver
from jaxflow.flexgen.compiled import Compiled, attends_on_host, compile_programs
from jaxflow.flexgen.config import GIGA, OffloadConfig
from jaxflow.flexgen.geometry import Geometry, PlacedWeights, place
from jaxflow.flexgen.host_attention import HostAttention
from jaxflow.flexgen.kv_store import KvStore
from jaxflow.flexgen.pinned_memory import check_views
from jaxflow.flexgen.policy import TIERS, PolicyError
from jaxflow.flexgen.process import host_pool_gib
from jaxflow.flexgen.programs import Programs
from jaxflow.flexgen.running_block import Setup
from jaxflow.flexgen.runtime import Runtime
from jaxflow.flexgen.scratch_files import DiskFolder, check_folder, free_bytes, sweep
from jaxflow.flexgen.tiers import Tiers
from jaxflow.flexgen.weight_store import WeightStore
from jaxflow.kv.tiers.host_machine import bound, free_host_bytes, gpu_bus_ids, near_cpus
from jaxflow.model.checkpoints.checkpoint import Checkpoint
from jaxflow.model.ops import Context
from jaxflow.parallel.mesh import axis_of, make_mesh, on_gpu

log = logging.getLogger(__name__)
# Of a GPU's memory, in which what comes and goes leaves gaps, and of its pool of pinned memory, whose regions
# end in gaps smaller than a tensor: of 100.9 GB on an H200's host 98.3 were had and 99.2 were not
# (benchmarks/settings/h200-offload-out-of-pinned-memory.json).
_SPARE, _POOL_SPARE = 0.06, 0.025


class _Phases:
    """Seconds of each phase of a start, told as it ends."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def ended(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self._since = now - self._since, now
        log.info("offload: %s took %.1f s", name, self.seconds[name])


def start(
    offload: OffloadConfig, config: EngineConfig, checkpoint: Checkpoint, *, progress: bool = True
) -> Runtime:
    """Places and loads a model. What cannot work is refused before the first weight is read.

    Raises: ConfigError, PolicyError, CheckpointError, DiskError.
    """
    phases = _Phases()
    geometry = make_geometry(offload, config, checkpoint)
    disk = check_folder(str(offload.disk_path)) if offload.on_disk else None
    if disk is not None:
        sweep(disk)  # first, since what a killed run left there is not free
    placed = place(geometry)
    mesh = geometry.mesh
    there = _there(mesh.devices.flat[0], disk)
    _check_fits(account(geometry, placed, 0), offload, there)
    resolved = resolve(config, checkpoint.model_config)
    kernels = choose_kernels(resolved, geometry.config)
    tell_kernels(
        kernels, {}, progress
    )  # of products there is nothing to tell before their weights are placed
    context = Context(geometry.config, kernels, axis_of(mesh))
    with tqdm(desc="Compiling", disable=not progress, unit="program", delay=1.0) as bar:
        compiled = compile_programs(Programs(geometry, context), placed, lambda _: bar.update())
    phases.ended("compile")
    found = account(geometry, placed, compiled.working_bytes)
    _check_fits(found, offload, there)
    log.info("offload: %s\n%s", _described(geometry), found.describe())
    cpus = near_cpus(gpu_bus_ids(mesh.size)) if on_gpu() else None
    limits = _limits(offload, there)
    folder = DiskFolder(disk) if disk is not None else None
    tiers = Tiers(mesh, folder)
    undo = tiers.close
    try:
        with bound(
            cpus
        ):  # what is pinned lies near the GPUs, and so do the threads that fill it and attend to it
            check_views(mesh)
            room = (
                limits["host"] is None or _weight_bytes(placed) <= limits["host"]
            )  # KV is reserved behind the weights
            weights = _load(placed, tiers, geometry, checkpoint, resolved.seed, progress, wait_on_host=room)
            phases.ended("place")
            driver, host = _driver(offload, geometry, compiled, tiers, weights)
            phases.ended("reserve")
            runtime = Runtime(offload, geometry, found, tiers, driver, host, resolved.seed)
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


def make_geometry(offload: OffloadConfig, config: EngineConfig, checkpoint: Checkpoint) -> Geometry:
    """Raises: ConfigError, PolicyError: settings that an offloaded run cannot have."""
    policy, model = offload.policy, checkpoint.model_config
    if policy.model not in (config.model, checkpoint.name):
        raise PolicyError(
            f"model={policy.model!r}, but it is used for {checkpoint.name!r}: `python -m search "
            f"placement` makes one for that"
        )
    tp = config.tensor_parallel_size
    if model.hidden_size % tp:
        raise ConfigError(
            "tensor_parallel_size",
            tp,
            f"a divisor of the hidden size {model.hidden_size}: what passes between layers is cut",
        )
    if config.quantization not in (None, "int4") or (config.quantization == "int4") > (
        policy.weight_bits == 4
    ):
        raise ConfigError(
            "quantization", config.quantization, "unset: an offloaded run's policy says weight_bits, 16 or 4"
        )
    if config.kv_cache_dtype != "auto":
        raise ConfigError(
            "kv_cache_dtype", config.kv_cache_dtype, "auto: an offloaded run's policy says kv_bits, 16 or 4"
        )
    if policy.prompt_tokens + policy.output_tokens > model.max_position:
        tokens = f"{policy.prompt_tokens} + {policy.output_tokens}"
        raise PolicyError(
            f"prompt_tokens + output_tokens={tokens}: at most {model.max_position}, what "
            f"{checkpoint.name} was made for"
        )
    if policy.kv_bits == 4 and model.head_dim % 2:
        raise PolicyError(f"kv_bits=4 with head_dim={model.head_dim}: 16, two numbers of 4 bits make a byte")
    return Geometry(model, policy, jnp.dtype(resolve(config, model).dtype), config.block_size, make_mesh(tp))


def _there(device: Any, disk: Path | None) -> dict[str, int | None]:
    """Bytes by tier that this machine still has; None: not known."""
    stats = device.memory_stats()
    return {
        "device": int(stats["bytes_limit"]) if stats else None,
        "host": free_host_bytes(),
        "disk": None if disk is None else free_bytes(disk),
    }


def _told(offload: OffloadConfig, tier: str) -> int | None:
    """Bytes of a tier that the run may use, as far as somebody said."""
    limit = getattr(offload, LIMITS[tier])
    return None if limit is None else int(limit * GIGA)


def _limits(offload: OffloadConfig, there: Mapping[str, int | None]) -> dict[str, int | None]:
    """Bytes by tier: of what is told and what is there the smaller, where a GPU is less what gaps take."""
    known = {
        tier: [size for size in (_told(offload, tier), there[tier]) if size is not None] for tier in TIERS
    }
    limits = {tier: min(sizes, default=None) for tier, sizes in known.items()}
    device, host = limits["device"], limits["host"]
    if there["device"] is not None and device and host:
        limits["device"] = int(device * (1 - _SPARE))
        limits["host"] = min(host, int(host_pool_gib(host) * 2**30 * (1 - _POOL_SPARE)))
    return limits


def _check_fits(found: Account, offload: OffloadConfig, there: Mapping[str, int | None]) -> None:
    """Raises: DoesNotFit, which names both where more is told than is there."""
    try:
        check_fits(found, _limits(offload, there))
    except DoesNotFit as error:
        told, free = _told(offload, error.tier), there[error.tier]
        if told is None or free is None or told <= free:
            raise
        accepted = (
            f"{told / GIGA:g} GB are asked for, of which {free / GIGA:.6g} GB are free; {error.accepted}"
        )
        raise DoesNotFit(error.tier, error.needed_bytes, error.limit_bytes, accepted) from None


def _weight_bytes(placed: PlacedWeights) -> int:
    """Of all layers, wherever they live."""
    return sum(placed.bytes_of(layer, tier) for layer in range(len(placed.layers)) for tier in TIERS)  # type: ignore[arg-type]


def _load(
    placed: PlacedWeights,
    tiers: Tiers,
    g: Geometry,
    checkpoint: Checkpoint,
    seed: int,
    progress: bool,
    *,
    wait_on_host: bool,
) -> WeightStore:
    """Each layer goes through the device to its tiers; no more than one is there at a time beside what stays.

    wait_on_host: what stays comes back from the host when the last layer was made.
    """
    weights = WeightStore(placed, tiers)
    groups = checkpoint.stream(g.dtype, g.mesh, seed=seed, quantization=g.quantization)

    def put(arrays: dict[str, Any], structs: dict[str, Any]) -> dict[str, Any]:
        return jax.device_put(arrays, jax.tree.map(lambda s: s.sharding, structs))

    weights.ends = put(next(groups), placed.ends)
    bar = tqdm(
        groups,
        total=g.config.num_layers,
        desc="Placing layers",
        unit="layer",
        delay=1.0,
        disable=not progress,
    )
    for arrays, structs in zip(bar, placed.layers, strict=True):
        weights.add(put(arrays, structs), wait_on_host=wait_on_host)
    if wait_on_host:
        weights.settle()
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
    return Driver(
        Setup(
            g, compiled, tiers, weights, kv, activations, host, thread, offload.schedule, offload.overlap, eos
        )
    ), host


def _described(g: Geometry) -> str:
    p = g.policy
    shares = ", ".join(
        f"{kind} {'/'.join(f'{share:g}' for share in getattr(p, kind))}"
        for kind in ("weights", "kv", "activations")
    )
    rows = "/".join(
        str(sum(part.rows for part in g.kv_parts if part.tier == tier)) for tier in ("device", "host", "disk")
    )
    attention = "host" if attends_on_host(g) else "device"
    return (
        f"blocks of {p.num_gpu_batches} x {p.gpu_batch_size}, device/host/disk: {shares} % (KV of {rows} sequences a batch), "
        f"weights of {p.weight_bits} bits, KV of {p.kv_bits}, decodes attend on the {attention}"
    )
