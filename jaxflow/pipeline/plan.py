"""A plan: the order, the token ranges and the streams of a layer's ops, as data in JSON.

A plan lists one layer's nano-ops in order of issue. A nano-op is an op of the graph on a range of the step's
tokens. The ranges of an op cover [0, T) once, and may differ from the ranges of other ops. The compiled step
repeats the list for every layer. `ahead` lets the list cross the layers' borders, as in a software pipeline:
in round i a nano-op works on layer i + ahead, where that layer exists.

A plan does not list the dependences of a nano-op. They follow from the values that it reads and from the
layer's cache (`jaxflow.pipeline.program`). `waits` adds joins of streams at the borders of phases.
"""

import hashlib
import os
from pathlib import Path
from typing import Literal

import msgspec

from jaxflow.config import ConfigError, ParallelConfig
from jaxflow.model.cost import find_device

SCHEMA_VERSION = 3
SHIPPED = Path(__file__).parent / "plans"


class PlanError(ValueError):
    """A plan that cannot be read or run. `entry` names the nano-op, field or file."""

    def __init__(self, entry: str, problem: str):
        self.entry = entry
        super().__init__(f"{entry}: {problem}")


class NanoOp(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One op on tokens [start, stop) of the step."""

    id: str
    op: str  # a name in `jaxflow.model.graph`
    start: int
    stop: int
    stream: int = 0  # 0: the main stream, which runs all appends and collectives
    sms: int | None = None  # streaming multiprocessors that it may fill; None: all
    ahead: int = 0  # its layer minus the round
    waits: tuple[str, ...] = ()  # ids of nano-ops; each must have ended its last run before this one


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The runs that a plan was searched for, by model, device, parallelism and dtypes.

    The last three fields are the composition of the step that the plan was searched for. Steps of other
    compositions run the plan too, because its ranges are of tokens. With fewer decodes than `decode_tokens`,
    prefill tokens fill the ranges meant for decodes. With more decodes, decodes fill the ranges meant for
    prefill. Chunks are split at `borders` wherever they lie.
    """

    model: str
    device: str
    parallel: ParallelConfig
    dtype: str  # of the GEMMs: float8_e4m3fn where weights are fp8
    kv_cache_dtype: str
    decode_tokens: int
    prefill_tokens: int
    mean_context_tokens: int  # the mean number of keys that a decode reads

    def fits(
        self, model: str | None, device: str, parallel: ParallelConfig, dtype: str, kv_cache_dtype: str
    ) -> bool:
        """Return whether runs of this kind may use the plan.

        model: None for any. device: the driver's name, or a name in `jaxflow.model.cost.DEVICES`.
        """
        known = find_device(device)
        same = (model is None or Path(self.model).name == Path(model).name) and self.device in (
            device,
            known.name if known else device,
        )
        return same and (self.parallel, self.dtype, self.kv_cache_dtype) == (parallel, dtype, kv_cache_dtype)


class Predictions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Predicted times of a step by its composition, under the plan and under the sequential plan.

    `step_s[i][j]` is the time of a step with `decode_tokens[i]` decodes, each of `mean_context_tokens[j]`
    keys in the mean. All other tokens are prefill: a step is filled to its bucket, and padding costs a GEMM
    the same. `margin`: the relative error by which a predicted gain may be too large. The default is the
    error of predictions that no measurement has corrected, of which the worst was 0.27.

    Raises: PlanError for a margin below 0, tables that do not fit the two axes, or axes that do not rise.
    """

    decode_tokens: tuple[int, ...]
    mean_context_tokens: tuple[int, ...]
    step_s: tuple[tuple[float, ...], ...]
    sequential_s: tuple[tuple[float, ...], ...]
    margin: float = 0.3

    def __post_init__(self) -> None:
        if not self.margin >= 0:
            raise PlanError("predictions", f"margin={self.margin}: a number of 0 or more is accepted")
        for name in ("decode_tokens", "mean_context_tokens"):
            axis = getattr(self, name)
            if not axis or list(axis) != sorted(set(axis)):
                raise PlanError("predictions", f"{name}={axis}: one or more rising numbers are accepted")
        rows, columns = len(self.decode_tokens), len(self.mean_context_tokens)
        for name in ("step_s", "sequential_s"):
            table = getattr(self, name)
            if len(table) != rows or any(len(row) != columns or min(row) <= 0 for row in table):
                raise PlanError(
                    "predictions",
                    f"{name}: {rows} rows of {columns} seconds above 0 are accepted, one for each number of "
                    "the axes",
                )


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The nano-ops of a layer for steps of `tokens` tokens, in order of issue.

    sums: the carrier of sums over devices. `kernels`: NCCL's kernels. `copies`: the copy engines, between two
    or four devices (`jaxflow.parallel.collectives`).
    stages: the number of layers of each pipeline stage, first stage first. Stage i runs on the i-th
    `target.parallel.tp` devices. Empty without stages.
    """

    name: str
    tokens: int
    nano_ops: tuple[NanoOp, ...]
    target: Target | None = None
    predictions: Predictions | None = None
    sums: Literal["kernels", "copies"] = "kernels"
    stages: tuple[int, ...] = ()
    schema_version: int = msgspec.field(default=SCHEMA_VERSION)


class _Version(msgspec.Struct):
    schema_version: int


def to_json(plan: Plan) -> bytes:
    """Return the plan as indented JSON, with one field of an entry per line."""
    fields = {"schema_version": SCHEMA_VERSION, **msgspec.to_builtins(plan)}
    return msgspec.json.format(msgspec.json.encode(fields), indent=1) + b"\n"


def from_json(text: bytes, where: str = "plan") -> Plan:
    """Return the plan of a text that `to_json` made.

    Raises:
      PlanError: naming `where` and the field, for an invalid text or another schema version.
    """
    try:
        version = msgspec.json.decode(text, type=_Version).schema_version
        if version != SCHEMA_VERSION:
            raise PlanError(
                where, f"schema_version={version} is not supported: this release reads {SCHEMA_VERSION}"
            )
        return msgspec.json.decode(text, type=Plan)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ConfigError) as error:
        raise PlanError(where, str(error)) from error


def save(plan: Plan, path: str | os.PathLike) -> None:
    """Write the plan to a file."""
    Path(path).write_bytes(to_json(plan))


def load(path: str | os.PathLike) -> Plan:
    """Return the plan of a file. Raises: PlanError naming the file, if it is missing or invalid."""
    try:
        return from_json(Path(path).read_bytes(), str(path))
    except OSError as error:
        raise PlanError(str(path), error.strerror or str(error)) from error


def fitting(folder: str | os.PathLike, *kind: str | ParallelConfig | None) -> tuple[Plan, ...]:
    """Return the plans of a folder that fit runs of a kind, in order of file names.

    kind: the arguments of `Target.fits`. Raises: PlanError for a file that is no plan.
    """
    plans = (load(path) for path in sorted(Path(folder).glob("*.json")))
    return tuple(plan for plan in plans if plan.target is not None and plan.target.fits(*kind))  # pyright: ignore[reportArgumentType]


def digest(plan: Plan) -> str:
    """Return 16 hexadecimal digits that identify the plan's function: tokens, sums, nano-ops and stages.

    The name, the predictions and the target may change while the digest stays the same.
    """
    stages = (plan.stages,) if plan.stages else ()
    does = msgspec.json.encode((plan.tokens, plan.sums, plan.nano_ops, *stages))
    return hashlib.sha256(does).hexdigest()[:16]


def borders(plan: Plan) -> tuple[int, ...]:
    """Return the rising token positions where prefill chunks are split.

    Each chunk then lies in one nano-op of `chunk_attention`.
    """
    return tuple(sorted({nano.start for nano in plan.nano_ops if nano.op == "chunk_attention"} - {0}))
