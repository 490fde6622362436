"""The order of a plan: what every nano-op must follow, and whether it does.

Two rules. Data: a nano-op reads values made earlier, all of its tokens' pieces of them. The cache: attention
of tokens [a, b) follows the appends of all tokens [0, b) of its layer, since the later part of a prefill
chunk reads what the earlier part appended; and appends stay on the main stream, where the compiler orders
them after the readers that were issued before them.
"""

import dataclasses

from jaxflow.config import ModelConfig
from jaxflow.model.graph import BFLOAT16, Graph, Op, Widths, model_graph
from jaxflow.pipeline.plan import NanoOp, Plan, PlanError
from pallas_kernels.hopper.limits import SMS

ATTENTION = ("decode_attention", "chunk_attention")
MAIN = 0  # the main stream
LAST_STREAM = 31  # a GPU has 32 queues at most; of a number that is no int32 XLA's compiler ends the process
Source = tuple[int, str]  # (layer, value); layer -1 is what comes before the layers


@dataclasses.dataclass(frozen=True)
class Run:
    """A nano-op on a layer: one entry of the step's program."""

    nano: NanoOp
    layer: int
    op: Op
    reads: tuple[Source, ...]  # where each input is found, but for the cache

    @property
    def span(self) -> "Span":
        return Span(self.nano.start, self.nano.stop)

    @property
    def makes(self) -> tuple[str, ...]:
        """The values of its layer that it makes, but for the cache."""
        return tuple(value for value in self.op.outputs if value != "kv")


@dataclasses.dataclass(frozen=True)
class Span:
    """Tokens [start, stop)."""

    start: int
    stop: int

    def meets(self, other: "Span") -> bool:
        return self.start < other.stop and other.start < self.stop


def graph_of(plan: Plan, config: ModelConfig, tp: int = 1, widths: Widths = BFLOAT16) -> Graph:
    """The model's graph with its sums over devices in the form that the plan has them.

    Raises: PlanError for a plan of two forms.
    """
    scattered, swapped = (
        any(nano.op.endswith(end) for nano in plan.nano_ops) for end in ("_scatter", "_swap")
    )
    if scattered and swapped:
        raise PlanError(plan.name, "has its sums over devices both scattered and swapped: one or the other")
    return model_graph(config, tp, widths, scattered=tp > 1 and scattered, swapped=tp == 4 and swapped)


def program(plan: Plan, graph: Graph) -> tuple[Run, ...]:
    """Every nano-op of every layer, in order of issue.

    The embeddings are `x` of layer -1.
    """
    layers = [{op.name: op for op in ops} for ops in graph.layers]
    if not plan.nano_ops:
        return ()
    rounds = range(-max(n.ahead for n in plan.nano_ops), len(layers) - min(n.ahead for n in plan.nano_ops))
    return tuple(
        Run(nano, layer, op, tuple(_source(graph, layer, value) for value in op.inputs if value != "kv"))
        for i in rounds
        for nano in plan.nano_ops
        if 0 <= (layer := i + nano.ahead) < len(layers) and (op := layers[layer].get(nano.op)) is not None
    )


def final_values(graph: Graph) -> tuple[Source, Source]:
    """Where the residual stream is after the last layer, and what is still to be added to it."""
    layers = len(graph.layers)
    return _source(graph, layers, "x"), _source(graph, layers, "y")


def _source(graph: Graph, layer: int, value: str) -> Source:
    """Where layer `layer` finds a value it reads: `x` and `y` are those that its predecessor leaves."""
    if value not in ("x", "y"):
        return layer, value
    return (layer - 1, graph.leaves(layer - 1)[value == "y"]) if layer else (-1, value)


class Reads:
    """Who reads which value when, in a program and after it."""

    def __init__(self, runs: tuple[Run, ...], final: tuple[Source, ...]):
        self.runs = runs
        self._reads: dict[Source, list[tuple[int, Span]]] = {}
        for index, run in enumerate(runs):
            for source in run.reads:
                self._reads.setdefault(source, []).append((index, run.span))
        for source in final:
            self._reads.setdefault(source, []).append(
                (len(runs), Span(0, max(run.nano.stop for run in runs)))
            )

    def later(self, index: int, source: Source, span: Span) -> bool:
        """Whether the run of this index, or one after it, reads some of the span."""
        return any(at >= index and other.meets(span) for at, other in self._reads.get(source, []))


def check(plan: Plan, graph: Graph) -> None:
    """Refuses a plan that is not one for this graph.

    Raises:
      PlanError: naming the nano-op and what is wrong with it.
    """
    _check_entries(plan, graph)
    _check_cover(plan, graph)
    if graph.scattered:
        _check_own_rows(plan, graph)
    made: dict[Source, list[Span]] = {(-1, "x"): [Span(0, plan.tokens)]}
    appended: dict[int, list[Span]] = {}
    for run in program(plan, graph):
        nano, span = run.nano, run.span
        for layer, value in run.reads:
            missing = _missing(span, made.get((layer, value), []))
            if missing:
                raise PlanError(
                    nano.id, f"reads {value} of tokens {_shown(missing)} of layer {layer} before it is made"
                )
        if nano.op in ATTENTION and (missing := _missing(Span(0, nano.stop), appended.get(run.layer, []))):
            raise PlanError(
                nano.id, f"reads keys before rope_append of tokens {_shown(missing)} of the same layer"
            )
        for value in run.makes:
            made.setdefault((run.layer, value), []).append(span)
        if nano.op == "rope_append":
            appended.setdefault(run.layer, []).append(span)


def check_sums(plan: Plan, graph: Graph, tp: int) -> None:
    """Refuses sums over devices that so many devices cannot do so. Raises: PlanError."""
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
            (
                f"sums='copies': for two devices and all-reduces, or swapped over four; these are {form} "
                f"over {tp}"
            ),
        )
    if swaps and plan.sums != "copies":
        raise PlanError(plan.name, f"sums={plan.sums!r}: what is swapped is copied")


def check_sms(plan: Plan) -> None:
    """Refuses what no kernel takes; plans that are searched for a device of more SMs may ask for it. Raises:
    PlanError.
    """
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
        refuse(abs(nano.ahead) <= most, f"ahead={nano.ahead}: at most the model's {most} layers, either way")
        refuse(0 <= nano.stream <= LAST_STREAM, f"stream={nano.stream}: 0 to {LAST_STREAM}")
        refuse(nano.sms is None or nano.sms > 0, f"sms={nano.sms}: a positive number, or absent for all")
        main = nano.op == "rope_append" or known[nano.op].kind == "network" or known[nano.op].own_rows
        refuse(not main or nano.stream == MAIN, f"stream={nano.stream}: {nano.op} runs on the main stream, 0")
        for wait in nano.waits:
            refuse(wait in ids and wait != nano.id, f"waits for {wait!r}, which is no other nano-op's id")


def _check_cover(plan: Plan, graph: Graph) -> None:
    for name in dict.fromkeys(op.name for ops in graph.layers for op in ops):
        pieces = sorted((nano for nano in plan.nano_ops if nano.op == name), key=lambda nano: nano.start)
        if not pieces:
            raise PlanError(name, "no nano-op runs this op of the model's layers")
        at = 0
        for nano in pieces:
            if nano.start != at:
                twice, tokens = nano.start < at, sorted((nano.start, at))
                raise PlanError(
                    nano.id,
                    (
                        f"{name} of tokens [{tokens[0]}, {tokens[1]}) runs "
                        f"{'more than once' if twice else 'nowhere'}"
                    ),
                )
            at = nano.stop
        if at != plan.tokens:
            raise PlanError(pieces[-1].id, f"{name} of tokens [{at}, {plan.tokens}) runs nowhere")


def _check_own_rows(plan: Plan, graph: Graph) -> None:
    """A device's own rows of some tokens are not those of a part of them: all that make or read such rows are
    cut alike.
    """
    known = {op.name: op for ops in graph.layers for op in ops}
    ranges = {}
    for nano in plan.nano_ops:
        if known[nano.op].own_rows or known[nano.op].kind == "network":
            ranges.setdefault(nano.op, []).append((nano.start, nano.stop))
    wanted = sorted(next(iter(ranges.values())))
    for name, own in ranges.items():
        if sorted(own) != wanted:
            raise PlanError(
                name,
                (
                    f"is cut at {sorted(own)}, but {next(iter(ranges))} at {wanted}: scattered rows need "
                    f"the same cuts"
                ),
            )


def _missing(wanted: Span, pieces: list[Span]) -> Span | None:
    """The first tokens of `wanted` that no piece has."""
    at = wanted.start
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if piece.start > at:
            return Span(at, min(piece.start, wanted.stop)) if at < wanted.stop else None
        at = max(at, piece.stop)
    return Span(at, wanted.stop) if at < wanted.stop else None


def _shown(span: Span) -> str:
    return f"[{span.start}, {span.stop})"
