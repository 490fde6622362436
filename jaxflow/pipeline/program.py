"""A plan as a program: the nano-ops of every layer in order of issue, and the checks of their order.

The order of a program must satisfy two rules. Data: the values that a nano-op reads are made before it, for
all of its tokens. The cache: attention over tokens [a, b) comes after the appends of all tokens [0, b) of its
layer, because the later part of a prefill chunk reads the keys that the earlier part appended. Appends stay
on the main stream, where the compiler orders them after the readers that were issued before them.
"""

import dataclasses
from collections.abc import Sequence

from jaxflow.config import ModelConfig
from jaxflow.model.graph import BFLOAT16, Graph, Op, Widths, model_graph
from jaxflow.pipeline.plan import NanoOp, Plan, PlanError
from pallas_kernels.hopper.limits import SMS

ATTENTION = ("decode_attention", "chunk_attention")
SENT_ROWS = ("router", "expert_dispatch", "expert_combine")  # ops on the tokens that a rank sends
RECEIVED_ROWS = ("expert_up_gate", "expert_down")  # ops on the rows that a device received
GATHERED_SUMS = "y2_sent"  # the value of `expert_down`, with the rows of all ranks that gather their tokens
MAIN = 0  # the main stream
LAST_STREAM = 31  # a GPU has 32 queues at most; XLA's compiler aborts on a number beyond int32
Value = tuple[int, str]  # a value by (layer, name in the graph); layer -1 is the embeddings


@dataclasses.dataclass(frozen=True)
class TokenRange:
    """Tokens [start, stop) of a step."""

    start: int
    stop: int

    def overlaps(self, other: "TokenRange") -> bool:
        """Return whether the ranges share a token."""
        return self.start < other.stop and other.start < self.stop

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"


@dataclasses.dataclass(frozen=True)
class LayerOp:
    """A nano-op of one layer: an entry of the program.

    reads: the values of its inputs, except the cache. cache: the layer whose cache it reads or writes.
    """

    nano: NanoOp
    layer: int
    op: Op
    reads: tuple[Value, ...]
    cache: int

    @property
    def tokens(self) -> TokenRange:
        """Return the token range of the nano-op."""
        return TokenRange(self.nano.start, self.nano.stop)

    @property
    def makes(self) -> tuple[str, ...]:
        """Return the names of the values that it makes, except the cache."""
        return tuple(name for name in self.op.outputs if name != "kv")

    @property
    def appends(self) -> bool:
        """Return whether it writes the cache."""
        return "kv" in self.op.outputs

    @property
    def attends(self) -> bool:
        """Return whether it is attention, which reads the cache."""
        return self.op.kind == "attention"

    @property
    def is_collective(self) -> bool:
        """Return whether it communicates with other devices."""
        return self.op.kind == "network"


def graph_of(
    plan: Plan, config: ModelConfig, tp: int = 1, widths: Widths = BFLOAT16, *, ranks: int = 1
) -> Graph:
    """Return the model's graph, with its sums over devices in the plan's form. ranks: data-parallel ranks.

    Raises: PlanError for a plan of two forms.
    """
    scattered, swapped = (
        any(nano.op.endswith(end) for nano in plan.nano_ops) for end in ("_scatter", "_swap")
    )
    if scattered and swapped:
        raise PlanError(plan.name, "has sums over devices both scattered and swapped: one form is accepted")
    scattered, swapped = tp > 1 and scattered, tp == 4 and swapped
    return model_graph(config, tp, widths, scattered=scattered, swapped=swapped, ranks=ranks)


def program(plan: Plan, graph: Graph) -> tuple[LayerOp, ...]:
    """Return every nano-op of every layer, in order of issue."""
    layers = [{op.name: op for op in ops} for ops in graph.layers]
    if not plan.nano_ops:
        return ()
    rounds = range(-max(n.ahead for n in plan.nano_ops), len(layers) - min(n.ahead for n in plan.nano_ops))
    return tuple(
        LayerOp(
            nano,
            layer,
            op,
            tuple(_value(graph, layer, name) for name in op.inputs if name != "kv"),
            graph.caches[layer],
        )
        for i in rounds
        for nano in plan.nano_ops
        if 0 <= (layer := i + nano.ahead) < len(layers) and (op := layers[layer].get(nano.op)) is not None
    )


def final_values(graph: Graph) -> tuple[Value, Value]:
    """Return the residual stream after the last layer, and the sum that is still to be added to it."""
    layers = len(graph.layers)
    return _value(graph, layers, "x"), _value(graph, layers, "y")


def _value(graph: Graph, layer: int, name: str) -> Value:
    """Return the value that a layer reads under this name: `x` and `y` are the predecessor's."""
    if name not in ("x", "y"):
        return layer, name
    return (layer - 1, graph.leaves(layer - 1)[name == "y"]) if layer else (-1, name)


class Reads:
    """The reads of each value, in a program and after its end."""

    def __init__(self, entries: tuple[LayerOp, ...], final: tuple[Value, ...]):
        self.entries = entries
        self._reads: dict[Value, list[tuple[int, TokenRange]]] = {}
        for index, entry in enumerate(entries):
            for value in entry.reads:
                self._reads.setdefault(value, []).append((index, entry.tokens))
        for value in final:
            all_tokens = TokenRange(0, max(entry.nano.stop for entry in entries))
            self._reads.setdefault(value, []).append((len(entries), all_tokens))

    def later(self, index: int, value: Value, tokens: TokenRange) -> bool:
        """Return whether the entry at `index`, or one after it, reads a row of these tokens."""
        return any(at >= index and other.overlaps(tokens) for at, other in self._reads.get(value, []))


def check(plan: Plan, graph: Graph) -> None:
    """Refuse a plan that does not compute this graph.

    Raises:
      PlanError: naming the nano-op and its fault.
    """
    _check_entries(plan, graph)
    _check_cover(plan, graph)
    if graph.scattered:
        _check_local_rows(plan, graph)
    _check_sent_rows(plan, graph)
    everything = [TokenRange(0, plan.tokens)]
    made: dict[Value, list[TokenRange]] = {(-1, "x"): everything}
    made |= {(layer, "layer_input"): everything for layer in range(len(graph.layers))}
    appended: dict[int, list[TokenRange]] = {}
    for entry in program(plan, graph):
        for layer, name in entry.reads:
            if missing := _missing(entry.tokens, made.get((layer, name), [])):
                raise PlanError(
                    entry.nano.id, f"reads {name} of tokens {missing} of layer {layer} before it is made"
                )
        needed = TokenRange(0, entry.nano.stop)
        if entry.attends and (missing := _missing(needed, appended.get(entry.cache, []))):
            where = "the same layer" if entry.cache == entry.layer else f"layer {entry.cache}"
            raise PlanError(entry.nano.id, f"reads keys before rope_append of tokens {missing} of {where}")
        for name in entry.makes:
            made.setdefault((entry.layer, name), []).append(entry.tokens)
        if entry.appends:
            appended.setdefault(entry.layer, []).append(entry.tokens)


def check_sums(plan: Plan, graph: Graph, tp: int) -> None:
    """Refuse sums over devices in a form that `tp` devices cannot run. Raises: PlanError."""
    if any(
        (nano.stop - nano.start) % tp
        for nano in plan.nano_ops
        if graph.scattered and nano.op == "attn_scatter"
    ):
        raise PlanError(plan.name, f"scatters rows over {tp} devices that do not divide among them")
    swaps = any(op.name.endswith("_swap") for op in graph.layers[0])
    if plan.sums == "copies" and not swaps and (tp != 2 or graph.scattered):
        form = "scattered" if graph.scattered else "all-reduces"
        raise PlanError(
            plan.name,
            f"sums='copies': accepted are all-reduces over two devices and swaps over four; these are {form} "
            f"over {tp}",
        )
    if swaps and plan.sums != "copies":
        raise PlanError(plan.name, f"sums={plan.sums!r}: swaps need sums='copies'")


def check_sms(plan: Plan) -> None:
    """Refuse more SMs than a kernel takes. Plans for a larger device may ask for more. Raises: PlanError."""
    for nano in plan.nano_ops:
        if nano.sms is not None and nano.sms > SMS:
            raise PlanError(nano.id, f"sms={nano.sms}: the kernels take 1 to {SMS}, or absent for all")


def _check_entries(plan: Plan, graph: Graph) -> None:
    known = {op.name: op for ops in graph.layers for op in ops}
    ids = [nano.id for nano in plan.nano_ops]
    for nano in plan.nano_ops:

        def refuse(ok: bool, problem: str, nano: NanoOp = nano) -> None:
            if not ok:
                raise PlanError(nano.id, problem)

        refuse(ids.count(nano.id) == 1, "another nano-op has this id")
        refuse(nano.op in known, f"op={nano.op!r} is not in this model's layers: {', '.join(known)}")
        refuse(
            0 <= nano.start < nano.stop <= plan.tokens,
            f"tokens [{nano.start}, {nano.stop}) are not within [0, {plan.tokens})",
        )
        most = len(graph.layers)
        refuse(abs(nano.ahead) <= most, f"ahead={nano.ahead}: -{most} to {most}, the model's layers")
        refuse(0 <= nano.stream <= LAST_STREAM, f"stream={nano.stream}: 0 to {LAST_STREAM}")
        refuse(nano.sms is None or nano.sms > 0, f"sms={nano.sms}: a positive number, or absent for all")
        main = nano.op == "rope_append" or known[nano.op].kind == "network" or known[nano.op].local_rows
        refuse(not main or nano.stream == MAIN, f"stream={nano.stream}: {nano.op} runs on the main stream, 0")
        for wait in nano.waits:
            refuse(wait in ids and wait != nano.id, f"waits for {wait!r}, which is no other nano-op's id")


def _check_cover(plan: Plan, graph: Graph) -> None:
    for name in dict.fromkeys(op.name for ops in graph.layers for op in ops):
        nanos = sorted((nano for nano in plan.nano_ops if nano.op == name), key=lambda nano: nano.start)
        if not nanos:
            raise PlanError(name, "no nano-op runs this op of the model's layers")
        at = 0
        for nano in nanos:
            if nano.start != at:
                fault = TokenRange(*sorted((nano.start, at)))
                times = "more than once" if nano.start < at else "nowhere"
                raise PlanError(nano.id, f"{name} of tokens {fault} runs {times}")
            at = nano.stop
        if at != plan.tokens:
            raise PlanError(nanos[-1].id, f"{name} of tokens [{at}, {plan.tokens}) runs nowhere")


def _check_local_rows(plan: Plan, graph: Graph) -> None:
    """Refuse ops on local rows with different token ranges.

    A device's local rows of some tokens are not its local rows of a subset of these tokens.
    """
    known = {op.name: op for ops in graph.layers for op in ops}
    local = [name for name, op in known.items() if op.local_rows or op.kind == "network"]
    _check_same_cuts(plan, local, "scattered rows")


def _check_sent_rows(plan: Plan, graph: Graph) -> None:
    """Refuse token ranges that the experts of data-parallel ranks cannot have.

    The rows that ranks send for some tokens are not the rows of a subset of these tokens. Rows of several
    gathers lie one after the other, so one range of the experts may take them together.
    """
    known = {op.name for ops in graph.layers for op in ops}
    if "expert_dispatch" not in known:
        return
    if not graph.gathers:
        return _check_same_cuts(plan, (*SENT_ROWS, *RECEIVED_ROWS), "rows for other ranks")
    _check_same_cuts(plan, SENT_ROWS, "rows for other ranks")
    _check_same_cuts(plan, RECEIVED_ROWS, "rows of other ranks")
    sent = {nano.start for nano in plan.nano_ops if nano.op == "expert_dispatch"}
    for nano in plan.nano_ops:
        if nano.op in RECEIVED_ROWS and nano.start not in sent:
            raise PlanError(
                nano.id, f"begins at {nano.start}, inside a range of expert_dispatch, which it cannot cut"
            )


def _check_same_cuts(plan: Plan, names: Sequence[str], what: str) -> None:
    """Refuse ops whose token ranges differ. Raises: PlanError."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    for nano in plan.nano_ops:
        if nano.op in names:
            ranges.setdefault(nano.op, []).append((nano.start, nano.stop))
    first, *others = ranges
    wanted = sorted(ranges[first])
    for name in others:
        if (cuts := sorted(ranges[name])) != wanted:
            raise PlanError(name, f"is cut at {cuts}, but {first} at {wanted}: {what} need the same cuts")


def _missing(wanted: TokenRange, ranges: list[TokenRange]) -> TokenRange | None:
    """Return the first tokens of `wanted` that no range covers, or None."""
    at = wanted.start
    for one in sorted(ranges, key=lambda one: one.start):
        if one.start > at:
            return TokenRange(at, min(one.start, wanted.stop)) if at < wanted.stop else None
        at = max(at, one.stop)
    return TokenRange(at, wanted.stop) if at < wanted.stop else None
