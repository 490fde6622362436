"""Corrects a machine's rates by whole runs: blocks whose latency was measured, against what the cost model
says of their policies.

Curves are measured one at a time; in a run they share caches, threads and links. Each rate gets a factor, and
so does what a square takes the driver (`square_s`, which no curve has), fitted with optax to the logarithms
of the latencies; factors far from 1 are paid for, so that a rate that no run depends on stays as measured.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import msgspec
import numpy as np

from jaxflow.flexgen.policy import Policy
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from search.placement.cost import predict
from search.placement.machine_curves import CURVES, Curve, Machine, MachineError
from search.placement.workload import Workload, workload

SCHEMA_VERSION = 1
_STEPS, _PRIOR, _NUDGE = 400, 0.02, 1e-3
_SQUARE_S = 1e-3  # of a driver that nothing is known of: some twenty calls of Python that begin transfers


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A block of `policy` took so long."""

    policy: Policy
    latency_s: float
    wide_bytes: float = 2.0  # as `Workload` has them
    page_size: int | None = None


class Runs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was run on a machine; `start`: its constants as known without these runs."""

    method: str
    start: Machine
    runs: tuple[Run, ...]
    schema_version: int = SCHEMA_VERSION


def load_runs(path: str | os.PathLike) -> Runs:
    """Raises: MachineError naming the file and the field."""
    try:
        found = msgspec.json.decode(Path(path).read_bytes(), type=Runs)
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


def fit_runs(measured: Runs) -> Machine:
    """The machine whose predictions are nearest to the runs."""
    import optax  # who runs policies reads this module's files and fits nothing

    works = [_workload(run) for run in measured.runs]
    start = msgspec.structs.replace(measured.start, square_s=measured.start.square_s or _SQUARE_S)

    def loss(factors: np.ndarray) -> float:
        machine = _scaled(start, factors)
        return float(
            np.mean(np.square(_off(machine, measured.runs, works))) + _PRIOR * np.mean(np.square(factors))
        )

    factors: Any = jnp.zeros(len(CURVES) + 1)
    optimizer = optax.adam(optax.cosine_decay_schedule(0.05, _STEPS))
    state = optimizer.init(factors)
    for _ in range(_STEPS):
        # The model is a few maxima of sums over a policy's own numbers: differences are as good as
        # derivatives here.
        around = [
            (loss(here + nudge) - loss(here - nudge)) / (2 * _NUDGE)
            for here in (np.asarray(factors),)
            for nudge in _nudges()
        ]
        updates, state = optimizer.update(jnp.array(around), state, factors)
        factors = optax.apply_updates(factors, updates)
    return msgspec.structs.replace(_scaled(start, np.asarray(factors)), method=measured.method)


def run_errors(machine: Machine, runs: Sequence[Run]) -> list[float]:
    """Predicted over measured latency, less 1."""
    return [float(np.exp(off) - 1) for off in _off(machine, runs, [_workload(run) for run in runs])]


def _off(machine: Machine, runs: Sequence[Run], works: Sequence[Workload]) -> list[float]:
    return [
        float(np.log(predict(work, machine, run.policy).latency_s / run.latency_s))
        for run, work in zip(runs, works, strict=True)
    ]


def _workload(run: Run) -> Workload:
    policy = run.policy
    config = open_checkpoint(policy.model, load_format="dummy").model_config
    lengths = policy.prompt_tokens, policy.output_tokens
    return workload(policy.model, config, *lengths, wide_bytes=run.wide_bytes, page_size=run.page_size)


def _nudges() -> np.ndarray:
    return _NUDGE * np.eye(len(CURVES) + 1)


def _scaled(machine: Machine, factors: np.ndarray) -> Machine:
    """With each rate, and then the seconds of a square, times the exponential of its factor."""
    *rates, square = np.exp(factors)
    curves = {}
    for name, factor in zip(CURVES, rates, strict=True):
        curve = getattr(machine, name)
        curves[name] = Curve(curve.fixed_s, float(f"{curve.units_per_s * factor:.6g}"))
    return msgspec.structs.replace(machine, square_s=float(f"{machine.square_s * square:.6g}"), **curves)
