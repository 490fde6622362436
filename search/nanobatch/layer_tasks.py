"""The tasks of one layer: chains of ops on ranges of the step's tokens, with their dependences.

A chain holds the ops that stay together on one stream. A pointwise op joins the product that reads its
result, and a value of two arrays does not leave its stream. A task is a chain on a token range; in a plan
each of its ops becomes one nano-op. Tasks depend on each other through data on common tokens and through the
layer's KV cache (`jaxflow.pipeline.program`).
"""

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Sequence

from jaxflow.model.composition import Composition
from jaxflow.model.cost import Rates, work_times
from jaxflow.model.graph import Graph, Op, Work
from jaxflow.pipeline.program import ATTENTION
from search.nanobatch.cyclic import SearchError

APPEND = "rope_append"
RESOURCES = ("memory", "network")  # may run concurrently with compute
MAIN, MEMORY_STREAM, COMPUTE_STREAM = 0, 1, 2
_TWO_ARRAYS = {"routing"}  # values that stay on their stream
_TWO_ARRAYS_FP8 = _TWO_ARRAYS | {"h1", "h2", "a"}


@dataclasses.dataclass(frozen=True)
class StepShape:
    """The rows of a step: decodes first, then prefill chunks, with the mean context of each.

    padding: rows without a token. They count as prefill, since products compute them too in full.
    """

    tokens: int
    decode_tokens: int
    decode_keys: float
    chunk_keys: float
    padding: int = 0

    @classmethod
    def steady_state(
        cls, tokens: int, prompt_tokens: float, output_tokens: float, most_decodes: float = math.inf
    ) -> "StepShape":
        """Return the average step of `tokens` rows while requests of these lengths come and go (NanoFlow
        §3.1).

        most_decodes: the requests that memory holds (`search.nanobatch.memory_fit`). If fewer than the
        decodes of a full step, the step has the prefill that keeps them decoding, as in `bench plans`, and
        padding fills the rest.
        """
        step = Composition.steady_state(tokens, prompt_tokens, output_tokens)
        keys = step.count("chunk_pairs") / step.chunk_tokens if step.chunk_tokens else 0.0
        decodes, padding = round(step.decode_tokens), 0
        if decodes > most_decodes:
            decodes = int(most_decodes)
            padding = tokens - decodes - round(decodes * prompt_tokens / output_tokens)
        return cls(tokens, decodes, step.decode_keys, keys, padding)

    @property
    def real_tokens(self) -> int:
        """Return the tokens of decodes and prefill."""
        return self.tokens - self.padding

    def part(self, start: int, stop: int) -> Composition:
        """Return rows [start, stop) as a step of their own, with its prefill in the fewest chunks of that
        context.
        """
        decodes = max(0, min(stop, self.decode_tokens) - start)
        rest = stop - start - decodes
        pieces = (
            max(1, math.ceil((rest + 1) / 2 / self.chunk_keys - 0.01))
            if rest and self.chunk_keys
            else min(1, rest)
        )
        edges = [rest * i // pieces for i in range(pieces + 1)] if pieces else [0]
        chunks = tuple(
            (b - a, max(0.0, self.chunk_keys - (b - a + 1) / 2)) for a, b in itertools.pairwise(edges)
        )
        return Composition(decodes, self.decode_keys if decodes else 0.0, chunks)


@dataclasses.dataclass(frozen=True)
class Chain:
    """Ops of a layer that stay together, in order."""

    ops: tuple[Op, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(op.name for op in self.ops)

    @property
    def reads(self) -> set[str]:
        return {value for op in self.ops for value in op.inputs}

    @property
    def makes(self) -> set[str]:
        return {value for op in self.ops for value in op.outputs if value != "kv"}

    @property
    def is_attention(self) -> bool:
        return self.ops[0].name in ATTENTION

    @property
    def is_append(self) -> bool:
        return self.ops[0].name == APPEND

    @property
    def is_network(self) -> bool:
        return any(op.kind == "network" for op in self.ops)

    @property
    def computes(self) -> bool:
        """Return whether the chain has ops that occupy their stream.

        A norm of scattered rows stays between its collectives.
        """
        return any(op.kind != "network" for op in self.ops)


@dataclasses.dataclass(frozen=True)
class Task:
    """A chain on tokens [start, stop), the resource that binds it, and its stream."""

    chain: Chain
    start: int
    stop: int
    resource: str  # compute, memory or network
    stream: int
    side_streams: bool = False  # the plan has side streams

    def meets(self, other: "Task") -> bool:
        return self.start < other.stop and other.start < self.stop


def repeated_layer(graph: Graph) -> tuple[Op, ...]:
    """Return the ops of the last layer, which stands for all layers.

    Raises: SearchError if layers have different ops, since a plan repeats the nano-ops of one layer.
    """
    last = graph.layers[-1]
    for index, ops in enumerate(graph.layers):
        if [op.name for op in ops] != [op.name for op in last]:
            raise SearchError(
                f"layer {index} has other ops than the last layer: a plan repeats one layer's nano-ops"
            )
    return last


def chains(ops: Iterable[Op], quantized: bool = False) -> tuple[Chain, ...]:
    """Return the chains of a layer. quantized: the inputs of products are two arrays, values and scales."""
    kept, together, found = [], _TWO_ARRAYS_FP8 if quantized else _TWO_ARRAYS, []
    for op in ops:
        if op.kind == "other" and op.name != APPEND:
            kept.append(op)
        elif kept and kept[0].local_rows:  # norms of scattered rows stay between collectives
            if found and found[-1][0].kind == "network":
                found[-1] += [*kept, op]
            else:
                found.append([*kept, op])
            kept = []
        elif (
            found
            and not kept
            and not Chain(tuple(found[-1])).is_network
            and together & set(op.inputs) & Chain(tuple(found[-1])).makes
        ):
            found[-1].append(
                op
            )  # a collective's result is on the main stream, which values of two arrays may leave
        else:
            if kept and op.kind != "dense":
                found.append(kept)
                kept = []
            found.append([*kept, op])
            kept = []
    if kept and (found[-1][-1].kind == "dense" or kept[0].local_rows):
        found[-1] += kept
    elif kept:
        found.append(kept)
    return tuple(Chain(tuple(chain)) for chain in found)


def resource(chain: Chain, step: Composition, rates: Rates | None, dtype: str) -> str:
    """Return the resource that the chain needs longest; without known rates, the usual one of its kind."""
    if chain.is_network:
        return "network"
    times = (
        None if rates is None else work_times(sum((op.work(step) for op in chain.ops), Work()), rates, dtype)
    )
    if times is None or not times.longest_s:
        return "memory" if chain.ops[0].name in ("decode_attention", APPEND) else "compute"
    return "memory" if times.memory_s > times.compute_s else "compute"


def make_task(
    chain: Chain, start: int, stop: int, load: StepShape, rates: Rates | None, dtype: str,
    overlap: Collection[str], moe: bool, scattered: bool = False,
) -> Task:  # fmt: skip
    """Return the task of a chain on tokens [start, stop).

    overlap: the resources that may run concurrently with compute. moe: experts' products stay on the main
    stream. scattered: the main stream holds collectives and the norms between collectives. Attention without
    work stays with the products that follow, since a stream of its own would wait for other attention.
    """
    bound = resource(chain, load.part(start, stop), rates, dtype)
    side_streams = has_side_streams(overlap, scattered)
    if not side_streams or chain.is_append or chain.is_network:
        stream = MAIN
    elif "memory" not in overlap:
        stream = MAIN if moe else COMPUTE_STREAM
    elif (
        bound == "memory"
        and chain.is_attention
        and any(op.work(load.part(start, stop)).memory_bytes for op in chain.ops)
    ):
        stream = MEMORY_STREAM
    else:
        stream = MAIN if moe else COMPUTE_STREAM
    return Task(chain, start, stop, bound if bound in overlap else "compute", stream, side_streams)


def has_side_streams(overlap: Collection[str], scattered: bool = False) -> bool:
    """Return whether plans that overlap these resources with compute issue ops on side streams."""
    return "memory" in overlap or (scattered and "network" in overlap)


def follows(tasks: Sequence[Task]) -> tuple[tuple[int, int, int], ...]:
    """Return (i, j, layers between them): data dependences, and for attention the appends of all earlier
    tokens.

    Tasks are in the order of their chains in the layer.
    """
    found = []
    leaves_x = next(task.chain for task in tasks if "mlp_norm" in task.chain.names)
    leaves_y = tasks[-1].chain
    for (i, one), (j, other) in itertools.permutations(enumerate(tasks), 2):
        if other.chain.is_attention and one.chain.is_append and one.start < other.stop:
            found.append((i, j, 0))
        elif one.meets(other) and one.chain is not other.chain:
            if one.chain.makes & other.chain.reads - {"x", "y", "kv"}:
                found.append((i, j, 0))
            elif other.chain.reads & {"x", "y"} and one.chain in (leaves_x, leaves_y):
                found.append((i, j, 1))
    return tuple(found)


def apart(one: Task, other: Task) -> bool:
    """Return whether two tasks may never run at the same time: by resource, stream or cache."""
    cache = {one.chain.is_append, other.chain.is_append} == {True, False} and (
        one.chain.is_attention or other.chain.is_attention
    )
    return (
        cache
        or one.resource == other.resource
        or (one.stream == other.stream and one.chain.computes and other.chain.computes)
    )


def starts_outside(one: Task, other: Task) -> bool:
    """Return whether `other` is a collective on the stream of `one`; it then starts after `one` has ended."""
    return other.chain.is_network and not one.chain.is_network and one.stream == other.stream
