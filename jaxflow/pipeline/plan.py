"""A plan: in what order, in which pieces and on which streams the ops of a layer run. Data, read from and written to JSON.

A plan is one layer's nano-ops in the order they are issued. A nano-op is an op of the graph on a range of the step's
tokens; the ranges of an op cover [0, T) once, and may differ from those of other ops. The compiled step repeats the
list for every layer. `ahead` lets the list reach over the layers' borders, as a software pipeline does: in the i-th
round a nano-op works on layer i + ahead, where there is such a layer.

What a nano-op must follow is not written down: it follows from the values it reads and from the layer's cache
(`jaxflow.pipeline.order`). `waits` adds to that: joins of streams at the borders of phases.
"""

import os
from pathlib import Path

import msgspec

SCHEMA_VERSION = 1
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
    """What a plan was searched for: it is offered to runs of this model, device, parallelism and dtypes."""

    model: str
    device: str
    tensor_parallel_size: int
    dtype: str
    kv_cache_dtype: str
    decode_tokens: int  # of the step that it was made for
    prefill_tokens: int
    mean_context_tokens: int


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The nano-ops of a layer for steps of `tokens` tokens, in order of issue."""

    name: str
    tokens: int
    nano_ops: tuple[NanoOp, ...]
    target: Target | None = None
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
            raise PlanError(where, f"schema_version={version} is not supported: this release reads {SCHEMA_VERSION}")
        return msgspec.json.decode(text, type=Plan)
    except msgspec.DecodeError as error:
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


def shipped(
    model: str, device: str, tensor_parallel_size: int, dtype: str, kv_cache_dtype: str, folder: Path = SHIPPED
) -> tuple[Plan, ...]:
    """The plans that were searched for this model on this device; several, for steps of different composition, or none."""
    plans = (load(path) for path in sorted(folder.glob("*.json")))
    wanted = (model, device, tensor_parallel_size, dtype, kv_cache_dtype)
    return tuple(plan for plan in plans if plan.target is not None and msgspec.structs.astuple(plan.target)[:5] == wanted)


def borders(plan: Plan) -> tuple[int, ...]:
    """Token positions, rising, at which prefill chunks must be cut so that each lies in one nano-op of `chunk_attention`."""
    return tuple(sorted({nano.start for nano in plan.nano_ops if nano.op == "chunk_attention"} - {0}))
