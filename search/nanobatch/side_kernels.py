"""The kernels of a step beside its nano-ops: additions of received parts, and copies of rows.

An exchange of a sum over devices leaves two arrays, and the reader adds them. A norm reads one more array.
Before the second exchange of four devices, a kernel of its own adds the two arrays. An op reads a copy if its
tokens are not exactly one piece of its input: a copy of a part of a piece, or of several pieces put together.
These kernels move bytes of device memory on the op's stream. A sequential step with NCCL's sums has none.
"""

import dataclasses
from collections.abc import Sequence

from jaxflow.model.composition import Composition
from jaxflow.model.graph import Op, Work
from jaxflow.pipeline.plan import Plan
from jaxflow.pipeline.program import LayerOp, TokenRange, Value
from search.nanobatch.layer_tasks import APPEND, StepShape

ADDITION = "addition"
_ADDED, _COPIED = 3, 2  # arrays that an addition and a copy read and write
_HEADS = "o_decode"  # the compiler keeps the heads of both attentions in the array of the other one


@dataclasses.dataclass(frozen=True)
class SideKernels:
    """The number of kernels beside an op, and their bytes of device memory."""

    kernels: int = 0
    moved: float = 0.0

    def seconds(self, bytes_per_s: float, kernel_s: float) -> float:
        """Return the seconds at a rate of device memory, with the start and end of each kernel."""
        return self.kernels * kernel_s + self.moved / bytes_per_s


def with_additions(runs: Sequence[LayerOp], plan: Plan) -> tuple[LayerOp, ...]:
    """Return the runs, with an addition before each exchange that reads the result of an exchange.

    The addition has the nano-op of the exchange and its stream. Its op has no work of its own.
    """
    exchanged = {name for run in runs if run.is_collective for name in run.makes}
    found: list[LayerOp] = []
    for run in runs:
        if plan.sums == "copies" and run.is_collective and {name for _, name in run.reads} & exchanged:
            ((layer, name),) = run.reads
            whole = f"{name}_{ADDITION}"
            found.append(dataclasses.replace(run, op=Op(ADDITION, "other", (name,), (whole,), ())))
            run = dataclasses.replace(run, reads=((layer, whole),))
        found.append(run)
    return tuple(found)


def side_kernels(runs: Sequence[LayerOp], plan: Plan, load: StepShape) -> list[SideKernels]:
    """Return the side kernels of each run of `with_additions`. An op's values are taken as equally long."""
    works: dict[tuple, Work] = {}
    made: dict[Value, list[LayerOp]] = {}
    found = []

    def work(op: Op, tokens: TokenRange) -> Work:
        key = op.name, op.window, tokens
        if key not in works:
            works[key] = op.work(load.part(tokens.start, tokens.stop))
        return works[key]

    for run in runs:
        arrays = [value for value in run.reads if value[1] != _HEADS]
        kernels, moved = 0, 0.0
        for value in arrays:
            pieces = [maker for maker in made.get(value, []) if maker.tokens.overlaps(run.tokens)]
            exchanged = plan.sums == "copies" and any(maker.is_collective for maker in pieces)
            if exchanged:
                sent = work(pieces[0].op, run.tokens).network_bytes
                kernels += run.op.name == ADDITION
                moved += _ADDED * sent if run.op.name == ADDITION else sent
            if pieces and not _is_whole(pieces, run.tokens) and run.op.name not in (APPEND, ADDITION):
                value_bytes = work(run.op, run.tokens).activation_bytes / (len(arrays) + len(run.makes))
                kernels += 1 + exchanged
                moved += _COPIED * (1 + exchanged) * value_bytes
        found.append(SideKernels(kernels, moved))
        for name in run.makes:
            made.setdefault((run.layer, name), []).append(run)
    return found


def exchange_work(op: Op, step: Composition) -> Work:
    """Return the work of an op in a plan with exchanges.

    A copy engine reads the sent bytes, and another one writes the received bytes. Side kernels add.
    """
    work = op.work(step)
    if op.kind != "network":
        return work
    return Work(activation_bytes=_COPIED * work.network_bytes, network_bytes=work.network_bytes)


def _is_whole(pieces: Sequence[LayerOp], tokens: TokenRange) -> bool:
    """Return whether the tokens are exactly one piece. Appends and additions take pieces as they are."""
    return [piece.tokens for piece in pieces] == [tokens]
