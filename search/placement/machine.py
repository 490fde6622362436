"""Measure a machine for placement searches and fit its constants.

  python -m search machine --name here --disk_dir /scratch --output here.json
  python -m search machine --points there.json
  python -m search machine --measured there.json --output there.json
  python -m search machine --runs runs.json --output here.json

The command measures links and disk, products, and attention on device and host: each curve of
`search.placement.machine_curves` at several sizes, with the best of a few runs, on uncached random data. The
device is JAX's; on CPU it is the host itself, and its link is a copy. Files are read after their pages left
the cache.

--runs corrects a machine's rates by complete runs: blocks with a measured latency, against the cost model.
Curves are measured one at a time, but in a run they share caches, threads and links. Each rate gets a
factor, and so does the driver's time for a batch at a layer (`batch_layer_s`). The factors are fitted with
optax to the logarithms of the latencies. Factors far from 1 have a cost, so a rate without effect on the runs
stays as measured. From runs that are all in 4 bits, only `unpack_weights_per_s` is fitted.
"""

import functools
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from absl import flags, logging
from jax.sharding import SingleDeviceSharding

from jaxflow.cli.output_files import check_outputs
from jaxflow.config import ConfigError, Layer, ModelConfig
from jaxflow.flexgen.host_attention import HostAttention
from jaxflow.flexgen.policy import Policy
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from search.placement.cost_model import predict
from search.placement.machine_curves import (
    CURVES,
    CurvePoint,
    Machine,
    MachineError,
    MeasuredCurves,
    TimeCurve,
    errors,
    fit_machine,
    load_measured,
    save_machine,
)
from search.placement.workload import PlacementWorkload, workload

SCHEMA_VERSION = 1
_STEPS, _PRIOR, _NUDGE = 400, 0.02, 1e-3
_NEWTON_STEPS = 12
_BATCH_LAYER_S = 1e-3  # start value: about twenty Python calls that begin transfers


class BlockRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The measured latency of a block under `policy`."""

    policy: Policy
    latency_s: float
    wide_bytes: float = 2.0  # bytes of an element, see `PlacementWorkload`
    page_size: int | None = None


class BlockRuns(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The runs on a machine; `start`: its constants before these runs."""

    method: str
    start: Machine
    runs: tuple[BlockRun, ...]
    schema_version: int = SCHEMA_VERSION


def load_runs(path: str | os.PathLike) -> BlockRuns:
    """Read a file of runs. Raises: MachineError naming the file and the field."""
    try:
        found = msgspec.json.decode(Path(path).read_bytes(), type=BlockRuns)
    except OSError as error:
        raise MachineError(f"{path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MachineError(f"{path}: {error}") from error
    if found.schema_version != SCHEMA_VERSION:
        raise MachineError(
            f"{path}: schema_version={found.schema_version} is not supported: this release reads "
            f"{SCHEMA_VERSION}"
        )
    if not found.runs:
        raise MachineError(f"{path}: runs=[]: at least one run")
    return found


def fit_runs(measured: BlockRuns) -> Machine:
    """Return the machine with the predictions nearest to the runs."""
    import optax  # an extra that only the fit needs

    works = [_workload(run) for run in measured.runs]
    start = msgspec.structs.replace(
        measured.start, batch_layer_s=measured.start.batch_layer_s or _BATCH_LAYER_S
    )

    def loss(factors: np.ndarray) -> float:
        machine = _scaled(start, factors)
        return float(
            np.mean(np.square(_off(machine, measured.runs, works))) + _PRIOR * np.mean(np.square(factors))
        )

    factors: Any = jnp.zeros(len(CURVES) + 1)
    optimizer = optax.adam(optax.cosine_decay_schedule(0.05, _STEPS))
    state = optimizer.init(factors)
    for _ in range(_STEPS):
        # The model is a few maxima of sums over a policy's numbers: differences are as good as
        # derivatives here.
        around = [
            (loss(here + nudge) - loss(here - nudge)) / (2 * _NUDGE)
            for here in (np.asarray(factors),)
            for nudge in _nudges()
        ]
        updates, state = optimizer.update(jnp.array(around), state, factors)
        factors = optax.apply_updates(factors, updates)
    return msgspec.structs.replace(_scaled(start, np.asarray(factors)), method=measured.method)


def fit_unpacking(measured: BlockRuns) -> Machine:
    """Return the machine with the `unpack_weights_per_s` that comes nearest to runs in 4 bits.

    Gauss-Newton steps on the logarithms of rate and latencies; all other constants stay.
    """
    works = [_workload(run) for run in measured.runs]

    def machine(log: float) -> Machine:
        return msgspec.structs.replace(measured.start, unpack_weights_per_s=float(f"{np.exp(log):.6g}"))

    def off(log: float) -> np.ndarray:
        return np.array(_off(machine(log), measured.runs, works))

    log = float(np.log(measured.start.device_memory.units_per_s / 16))  # a dozen bytes an element
    for _ in range(_NEWTON_STEPS):
        here = off(log)
        slope = (off(log + _NUDGE) - here) / _NUDGE
        log -= float(np.clip(slope @ here / max(slope @ slope, 1e-12), -1.0, 1.0))
    return msgspec.structs.replace(machine(log), method=measured.method)


def run_errors(machine: Machine, runs: Sequence[BlockRun]) -> list[float]:
    """Return predicted over measured latency, less 1."""
    return [float(np.exp(off) - 1) for off in _off(machine, runs, [_workload(run) for run in runs])]


def _off(machine: Machine, runs: Sequence[BlockRun], works: Sequence[PlacementWorkload]) -> list[float]:
    return [
        float(np.log(predict(work, machine, run.policy).latency_s / run.latency_s))
        for run, work in zip(runs, works, strict=True)
    ]


def _workload(run: BlockRun) -> PlacementWorkload:
    policy = run.policy
    config = open_checkpoint(policy.model, load_format="dummy").model_config
    lengths = policy.prompt_tokens, policy.output_tokens
    return workload(policy.model, config, *lengths, wide_bytes=run.wide_bytes, page_size=run.page_size)


def _nudges() -> np.ndarray:
    return _NUDGE * np.eye(len(CURVES) + 1)


def _scaled(machine: Machine, factors: np.ndarray) -> Machine:
    """Return the machine with each rate, and `batch_layer_s`, times the exponential of its factor."""
    *rates, batch_layer = np.exp(factors)
    curves = {}
    for name, factor in zip(CURVES, rates, strict=True):
        curve = getattr(machine, name)
        curves[name] = TimeCurve(curve.fixed_s, float(f"{curve.units_per_s * factor:.6g}"))
    return msgspec.structs.replace(
        machine, batch_layer_s=float(f"{machine.batch_layer_s * batch_layer:.6g}"), **curves
    )


MEGA = 1 << 20
_HEADS, _HEAD_DIM, _KEYS, _PAGE = 32, 128, 512, 64
_TRAIN = 4


def define_flags() -> None:
    flags.DEFINE_string("name", "here", "Name of the machine in the file of --output.")
    flags.DEFINE_string("disk_dir", ".", "A folder on the disk for tensors.")
    flags.DEFINE_integer("largest_mb", 256, "The largest transfer, in MB.", lower_bound=1)
    flags.DEFINE_enum(
        "dtype",
        "auto",
        ["auto", "bfloat16", "float32"],
        "dtype of the measured products and of attention; auto: that of models on this machine.",
    )
    flags.DEFINE_integer("repeats", 5, "Runs of each size; the best one counts.", lower_bound=1)
    flags.DEFINE_string(
        "output", None, "File for the constants of the machine, which --machine of other commands reads."
    )
    flags.DEFINE_string("points", None, "File for the measured points; without --output nothing is fitted.")
    flags.DEFINE_string(
        "measured", None, "A file of --points from another machine; fits it and measures nothing."
    )
    flags.DEFINE_string(
        "runs",
        None,
        (
            "Measures nothing: corrects a machine by the latencies of whole blocks, a file of "
            "search.placement.machine."
        ),
    )


def run() -> None:
    """Run the command."""
    f = flags.FLAGS
    check_outputs("output", "points")
    if f.runs:
        _correct(load_runs(f.runs), f.output)
        return
    if f.measured:
        _fit(load_measured(f.measured), f.output)
        return
    if not os.path.isdir(f.disk_dir):
        raise ConfigError("disk_dir", f.disk_dir, "a folder that exists")
    measured = measure(f.name, Path(f.disk_dir), largest_mb=f.largest_mb, repeats=f.repeats, dtype=f.dtype)
    if f.points:
        Path(f.points).write_bytes(msgspec.json.format(msgspec.json.encode(measured), indent=1) + b"\n")
    if f.output or not f.points:
        _fit(measured, f.output)


def _fit(measured: MeasuredCurves, output: str | None) -> None:
    """Fit the curves and print the error of each."""
    machine = fit_machine(measured)
    off = errors(measured, machine)
    print(f"{'curve':20}{'fixed (us)':>12}{'G units/s':>12}{'error':>8}")
    for name in CURVES:
        print(f"{_line(name, machine)}{off[name]:>8.1%}")
    if output:
        save_machine(machine, output)


def _correct(runs: BlockRuns, output: str | None) -> None:
    """Fit the rates to runs and print each run's measured latency and error."""
    packed = all(run.policy.weight_bits == run.policy.kv_bits == 4 for run in runs.runs)
    machine = fit_unpacking(runs) if packed else fit_runs(runs)
    print(
        *(_line(name, machine) for name in CURVES),
        f"{'batch_layer_s':20}{1e6 * machine.batch_layer_s:>12.1f}",
        sep="\n",
    )
    if machine.unpack_weights_per_s is not None:
        print(f"{'unpack_weights':20}{'':12}{machine.unpack_weights_per_s / 1e9:>12.2f}")
    print(f"{'model':12}{'batch':>9}{'weights':>14}{'KV':>14}{'measured (s)':>14}{'error':>8}")
    for run, error in zip(runs.runs, run_errors(machine, runs.runs), strict=True):
        policy = run.policy
        shares = ["/".join(f"{share:.0f}" for share in kind) for kind in (policy.weights, policy.kv)]
        batch = f"{policy.gpu_batch_size}x{policy.num_gpu_batches}"
        print(f"{policy.model:12}{batch:>9}{shares[0]:>14}{shares[1]:>14}{run.latency_s:>14.1f}{error:>8.1%}")
    if output:
        save_machine(machine, output)


def _line(name: str, machine: Machine) -> str:
    curve = getattr(machine, name)
    return f"{name:20}{1e6 * curve.fixed_s:>12.1f}{curve.units_per_s / 1e9:>12.2f}"


def measure(
    name: str, disk_dir: Path, *, largest_mb: int = 256, repeats: int = 5, dtype: str = "auto"
) -> MeasuredCurves:
    """Measure every curve at sizes that grow by fours up to the largest."""
    device = jax.devices()[0]
    sizes = [largest_mb * MEGA >> shift for shift in (6, 4, 2, 0)]
    points: dict[str, list[CurvePoint]] = {curve: [] for curve in CURVES}

    def add(curve: str, units: float, works: Sequence[Callable[[], Any]], train: int = _TRAIN) -> None:
        points[curve].append(CurvePoint(float(units), _best(works, repeats, train)))
        logging.info("%s: %.3g in %.3g s", curve, units, points[curve][-1].seconds)

    on_cpu = device.platform == "cpu"
    wide = jnp.dtype(("float32" if on_cpu else "bfloat16") if dtype == "auto" else dtype)
    width = 1024 if on_cpu else 4096
    here, away = SingleDeviceSharding(device), SingleDeviceSharding(device, memory_kind="pinned_host")
    product = jax.jit(functools.partial(jnp.einsum, "tk,nk->tn"))
    pool = np.random.default_rng(0).integers(0, 256, 2 * sizes[-1], np.uint8)
    for size in sizes:
        chunks = np.split(pool, 2 * sizes[-1] // size)[: repeats + 1]
        on_device = [jax.device_put(chunk, here) for chunk in chunks]
        on_host = [jax.device_put(x, away) for x in on_device]
        add("host_to_device", size, [functools.partial(jax.device_put, x, here) for x in on_host])
        add("device_to_host", size, [functools.partial(jax.device_put, x, away) for x in on_device])
        del on_device, on_host
        # The usual way to read memory: the weights of a product with few rows.
        rows, tall = _random(0, (8, width), wide), size // (wide.itemsize * width)
        weights = [_random(i, (tall, width), wide) for i in range(2)]
        add("device_memory", weights[0].nbytes, [functools.partial(product, rows, w) for w in weights])
    with tempfile.TemporaryDirectory(dir=disk_dir) as folder:
        for size in sizes:
            path = Path(folder) / "tensor"
            data = np.random.default_rng(size).bytes(size)
            add("host_to_disk", size, [functools.partial(_write, path, data)], 1)
            add("disk_to_host", size, [functools.partial(_read, path)], 1)
    for rows in (width // 16, width // 4, width, 2 * width):
        x, w = (_random(rows, shape, wide) for shape in ((rows, width), (width, width)))
        add("device_products", 2 * rows * width * width, [functools.partial(product, x, w)])
    for tokens in (64, 128, 256, 512):
        q, k, v = (_random(seed, (1, tokens, _HEADS, _HEAD_DIM), wide) for seed in range(3))
        add(
            "device_attention",
            4 * _HEADS * _HEAD_DIM * tokens * tokens,
            [functools.partial(_prompt_attention, q, k, v)],
        )
    points["host_attention"] = host_attention_points(largest_mb, repeats, wide)
    method = (
        f"best of {repeats} runs, JAX {jax.__version__}, {wide} on {device.device_kind}, "
        f"{os.cpu_count()} host cores"
    )
    return MeasuredCurves(name=name, method=method, points=points, one_processor=on_cpu)


def host_attention_points(largest_mb: int, repeats: int, dtype: Any) -> list[CurvePoint]:
    """Return the seconds of the host's attention by bytes of uncached KV, as in a decode: pages of 64, a
    sequence a row.
    """
    config = _attention_config()
    points: list[CurvePoint] = []
    most = max(2, min(32, largest_mb * MEGA // (4 * _KEYS * _HEADS * _HEAD_DIM)))
    for sequences in sorted({max(1, most >> shift) for shift in (3, 2, 1, 0)}):
        attention = HostAttention(config, sequences)
        q = np.asarray(_random(0, (sequences, _HEADS, _HEAD_DIM), dtype))
        pages = (sequences * _KEYS // _PAGE, _HEADS, _PAGE, _HEAD_DIM)
        once = [np.asarray(_random(i, (_KEYS // _PAGE, *pages[1:]), dtype)) for i in range(2)]
        caches = [[np.tile(a, (sequences, 1, 1, 1)) for a in once] for _ in range(min(repeats, 2))]
        rest = np.full(sequences, _KEYS, np.int32), np.empty_like(q)
        works = [functools.partial(attention, config.layers[0], q, *cache, *rest) for cache in caches]
        points.append(CurvePoint(float(sum(a.nbytes for a in caches[0])), _best(works, repeats, 1)))
        logging.info("host_attention: %.3g in %.3g s", points[-1].units, points[-1].seconds)
        attention.close()
    return points


def _random(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


@jax.jit
def _prompt_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def _attention_config() -> ModelConfig:
    """Return the model config fields that the host's attention reads."""
    return ModelConfig("", 0, 0, _HEADS, _HEADS, _HEAD_DIM, 0, (Layer(),), _KEYS)


def _write(path: Path, data: bytes) -> None:
    """Write to the disk itself, past the page cache."""
    with path.open("wb") as file:
        file.write(data)
        os.fsync(file.fileno())


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return file.read()


def _best(works: Sequence[Callable[[], Any]], repeats: int, train: int) -> float:
    """Return the seconds of a run in the fastest train, after one warm-up run.

    train: the number of runs in flight before the last is awaited, as in the runtime.
    """
    jax.block_until_ready(works[0]())
    found = []
    for run in range(1, repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready([works[(run * train + i) % len(works)]() for i in range(train)])
        found.append((time.perf_counter() - start) / train)
    return min(found)
