"""A plan: in what order, in which pieces and on which streams the ops of a layer run. Data, read from and
written to JSON.

A plan is one layer's nano-ops in the order they are issued. A nano-op is an op of the graph on a range of the
step's tokens; the ranges of an op cover [0, T) once, and may differ from those of other ops. The compiled
step repeats the list for every layer. `ahead` lets the list reach over the layers' borders, as a software
pipeline does: in the i-th round a nano-op works on layer i + ahead, where there is such a layer.

What a nano-op must follow is not written down: it follows from the values it reads and from the layer's cache
(`jaxflow.pipeline.program`). `waits` adds to that: joins of streams at the borders of phases.
"""

import hashlib
import os
from pathlib import Path
from typing import Literal

import msgspec

from jaxflow.model.cost import find_device

SCHEMA_VERSION = 2
SHIPPED = Path(__file__).parent / "plans"


class PlanError(ValueError):
    """A plan that cannot be read or run; `entry` names the nano-op, field or file."""

    def __init__(self, entry: str, problem: str):
        self.entry = entry
        super().__init__(f"{entry}: {problem}")


class NanoOp(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One op on tokens [start, stop) of the step."""

    id: str
    op: str  # its name in `jaxflow.model.graph`
    start: int
    stop: int
    stream: int = 0  # 0 is the main stream, where appends and collectives are
    sms: int | None = None  # streaming multiprocessors it may fill; None: all
    ahead: int = 0  # rounds that its layer is ahead of the list's
    waits: tuple[str, ...] = ()  # ids whose last run before this one must have ended


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a plan was searched for: it is offered to runs of this model, device, parallelism and dtypes.

    The last three say of which composition the step is that it was made for. Others run it too: the plan's
    ranges are of tokens, whatever these are, so with fewer decodes than `decode_tokens` prefill moves up into
    the ranges meant for decodes, and with more, decodes move into those of prefill; chunks are cut at
    `borders` wherever they come to lie.
    """

    model: str
    device: str
    tensor_parallel_size: int
    dtype: str  # of the products: float8_e4m3fn where weights are fp8
    kv_cache_dtype: str
    decode_tokens: int
    prefill_tokens: int
    mean_context_tokens: int  # keys that a decode reads, the mean

    def fits(
        self, model: str | None, device: str, tensor_parallel_size: int, dtype: str, kv_cache_dtype: str
    ) -> bool:
        """Whether runs of this kind may use the plan. model: None is any. device: as the driver or
        `jaxflow.model.cost.DEVICES` has it.
        """
        known = find_device(device)
        same = (model is None or Path(self.model).name == Path(model).name) and self.device in (
            device,
            known.name if known else device,
        )
        return same and (self.tensor_parallel_size, self.dtype, self.kv_cache_dtype) == (
            tensor_parallel_size,
            dtype,
            kv_cache_dtype,
        )


class Predictions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long a step takes by what it is made of, under its plan and under the sequential one: what plans
    are chosen by.

    `step_s[i][j]` is of a step with `decode_tokens[i]` decodes, each of `mean_context_tokens[j]` keys in the
    mean. What does not decode is prefill: a step is filled to its bucket, and padding costs products the
    same. `margin`: by how much of itself a gain may be predicted too large; plans that do not say were
    predicted before any was measured, and those were up to 0.27 too good.

    Raises: ValueError for a margin below 0, tables that do not fit the two axes, or axes that do not rise.
    """

    decode_tokens: tuple[int, ...]
    mean_context_tokens: tuple[int, ...]
    step_s: tuple[tuple[float, ...], ...]
    sequential_s: tuple[tuple[float, ...], ...]
    margin: float = 0.3

    def __post_init__(self) -> None:
        if not self.margin >= 0:
            raise ValueError(f"margin={self.margin}: 0 or more")
        for name in ("decode_tokens", "mean_context_tokens"):
            axis = getattr(self, name)
            if not axis or list(axis) != sorted(set(axis)):
                raise ValueError(f"{name}={axis}: one or more rising numbers")
        rows, columns = len(self.decode_tokens), len(self.mean_context_tokens)
        for name in ("step_s", "sequential_s"):
            table = getattr(self, name)
            if len(table) != rows or any(len(row) != columns or min(row) <= 0 for row in table):
                raise ValueError(
                    f"{name}: {rows} rows of {columns} seconds above 0, as many as the axes have numbers"
                )


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The nano-ops of a layer for steps of `tokens` tokens, in order of issue.

    sums: who carries what is summed over devices: NCCL's kernels, or of two or four devices the copy engines
    (`jaxflow.parallel.collectives`).
    """

    name: str
    tokens: int
    nano_ops: tuple[NanoOp, ...]
    target: Target | None = None
    predictions: Predictions | None = None
    sums: Literal["kernels", "copies"] = "kernels"
    schema_version: int = msgspec.field(default=SCHEMA_VERSION)


class _Version(msgspec.Struct):
    schema_version: int


def to_json(plan: Plan) -> bytes:
    """The plan as indented JSON, a line an entry's field."""
    fields = {"schema_version": SCHEMA_VERSION, **msgspec.to_builtins(plan)}
    return msgspec.json.format(msgspec.json.encode(fields), indent=1) + b"\n"


def from_json(text: bytes, where: str = "plan") -> Plan:
    """Reads `to_json`'s output.

    Raises:
      PlanError: naming `where` and the field, for what is no plan or of another schema version.
    """
    try:
        version = msgspec.json.decode(text, type=_Version).schema_version
        if version != SCHEMA_VERSION:
            raise PlanError(
                where, f"schema_version={version} is not supported: this release reads {SCHEMA_VERSION}"
            )
        return msgspec.json.decode(text, type=Plan)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PlanError(where, str(error)) from error


def save(plan: Plan, path: str | os.PathLike) -> None:
    """Writes the plan to a file."""
    Path(path).write_bytes(to_json(plan))


def load(path: str | os.PathLike) -> Plan:
    """Reads a plan from a file. Raises: PlanError naming the file, also where there is none."""
    try:
        return from_json(Path(path).read_bytes(), str(path))
    except OSError as error:
        raise PlanError(str(path), error.strerror or str(error)) from error


def fitting(folder: str | os.PathLike, *kind: str | int | None) -> tuple[Plan, ...]:
    """The plans of a folder that were searched for runs of a kind (the arguments of `Target.fits`), in order
    of file names.

    Several, for steps of different composition, or none. Raises: PlanError for a file that is no plan.
    """
    plans = (load(path) for path in sorted(Path(folder).glob("*.json")))
    return tuple(plan for plan in plans if plan.target is not None and plan.target.fits(*kind))  # pyright: ignore[reportArgumentType]


def digest(plan: Plan) -> str:
    """What tells plans apart that do different things: 16 hexadecimal digits of the nano-ops, the tokens and
    who carries the sums.

    Not of its name, which many may have, nor of what is predicted of it and whom it is offered to, which
    change while it stays as it is.
    """
    does = msgspec.json.encode((plan.tokens, plan.sums, plan.nano_ops))
    return hashlib.sha256(does).hexdigest()[:16]


def borders(plan: Plan) -> tuple[int, ...]:
    """Token positions, rising, at which prefill chunks must be cut so that each lies in one nano-op of
    `chunk_attention`.
    """
    return tuple(sorted({nano.start for nano in plan.nano_ops if nano.op == "chunk_attention"} - {0}))
