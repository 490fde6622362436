"""Programs that run a collective many times on all devices, for `search.profile.measure`.

The collectives are those of `jaxflow.model.ops`, on the rows of one layer. They are called in a chain: each
waits for the previous one, as in a sequential step, and XLA cannot merge them. `concurrent` runs a collective
concurrently with a product, as nano-batches do.
"""

import functools
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxflow.model.op_registry import Context, Site
from jaxflow.model.ops import find_op
from jaxflow.parallel.collectives import exchange
from jaxflow.parallel.mesh import TP, axis_of, over_shards, sharded
from jaxflow.pipeline import streams
from search.profile.op_bench import PHASES, LayerBench, OpCase, TimedProgram
from search.profile.op_times import EXCHANGE, ProfileError

_BODY_S, _MOST_CALLS = (
    3e-4,
    8,
)  # seconds of a loop's body, and its most calls; a round costs a GPU microseconds
_LATENCY_S, _BYTES_PER_S, _PROGRAM_S = (
    2e-5,
    2e11,
    5e-3,
)  # guesses of a call's latency and bandwidth, and the seconds of a program


def equal_ops(layer: LayerBench) -> dict[str, tuple[str, ...]]:
    """Return each collective of the layer's first block with its equals: the second block's, if as large."""
    found = {}
    for name, op in layer.ops.items():
        if name == EXCHANGE:
            found[name] = (name,)
        elif op.kind == "network" and name.startswith("attn_"):
            other = layer.ops.get(f"mlp_{name.removeprefix('attn_')}")
            found[name] = (name, other.name) if other is not None and other.demand == op.demand else (name,)
    return found


def collective(layer: LayerBench, case: OpCase, mesh: Mesh) -> TimedProgram:
    """Return a program that calls a collective in a chain on all devices of a mesh.

    case.tokens: of the step, over all devices.

    Raises: ProfileError for scattered or gathered rows that do not divide among the devices.
    """
    if case.op.endswith(("_scatter", "_gather")) and case.tokens % layer.tp:
        raise ProfileError(
            f"tokens={case.tokens}: {case.op} cuts rows over {layer.tp} devices, of which that is no multiple"
        )
    guess_s = _LATENCY_S + layer.ops[case.op].work(case.composition).network_bytes / _BYTES_PER_S
    calls = max(1, min(_MOST_CALLS, round(_BODY_S / guess_s)))
    rounds = max(1, round(_PROGRAM_S / calls / guess_s))
    (sent,) = layer.inputs(case.op, case.tokens)
    call, spec = (
        functools.partial(_call, case.op, Context(layer.config, layer.kernels, axis_of(mesh))),
        PartitionSpec(TP),
    )

    def local(given: Any, kept: Any) -> Any:
        def body(_: Any, state: Any) -> Any:
            (given, _), made = state, []
            for _ in range(calls):
                given, made = streams.together(
                    [given, [*made, call(given)]]
                )  # all results are kept: else XLA would run one call
            return given, made

        return lax.fori_loop(0, rounds, body, (given, kept))[1]

    given, rows = (
        _everywhere(sent, layer.tp),
        {"scatter": 1 / layer.tp, "gather": layer.tp}.get(case.op.partition("_")[2], 1),
    )
    made = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((int(a.shape[0] * rows), *a.shape[1:]), a.dtype), given
    )
    function, copies = over_shards(local, mesh, (spec, spec), spec), _copies(layer, case.op)
    return TimedProgram(function, given, [made] * calls, calls * rounds, copies, sharded(mesh, spec))


def concurrent(
    layer: LayerBench, product: OpCase, case: OpCase, mesh: Mesh, phases: int = PHASES
) -> TimedProgram:
    """Return a program with a product on each device and a concurrent collective.

    Both are joined after each call, as XLA places them in a plan's step.
    """
    (sent,), weights = layer.inputs(case.op, case.tokens), layer.read(product.op)
    copies, spec = min(phases, layer.copies(weights)), PartitionSpec(TP)
    send = functools.partial(_call, case.op, Context(layer.config, layer.kernels, axis_of(mesh)))
    multiply = functools.partial(
        layer.call, product.op, batch=layer.batch(product), kv=None, c=layer.context(product.sms)
    )

    def local(given: Any, kept: None) -> Any:
        x, y, made = given["inputs"], given["sent"], []
        for phase in range(phases):
            leaves, tree = jax.tree.flatten((x, y))
            joined = streams.together(
                [*leaves, *made]
            )  # the join holds the later reads, so every result is passed to the end
            (x, y), made = jax.tree.unflatten(tree, joined[: len(leaves)]), joined[len(leaves) :]
            y = send(y)  # passed on, so that XLA makes no copy of its old value
            made = [*made, *jax.tree.leaves(multiply(given["weights"][phase % copies], inputs=x))]
        return [y, *made]

    given = {"inputs": layer.inputs(product.op, product.tokens), "sent": sent, "weights": [weights] * copies}
    options = (
        streams.xla_options("whole", side_streams=False, collectives=True) if layer.platform == "gpu" else {}
    )
    function = over_shards(local, mesh, (spec, spec), spec)
    return TimedProgram(
        function,
        _everywhere(given, layer.tp),
        None,
        phases,
        options | _copies(layer, case.op),
        sharded(mesh, spec),
    )


def _call(op: str, c: Context, given: Any) -> Any:
    """Return the result of a collective; for an exchange, the rows that the other device sent."""
    return exchange(given, TP).received if op == EXCHANGE else find_op(op)(Site(c, {}), given)


def _copies(layer: LayerBench, op: str) -> dict[str, Any]:
    """Return the options that make an exchange use the copy engines."""
    return dict(streams.COPIES) if op == EXCHANGE and layer.platform == "gpu" else {}


def _everywhere(tree: Any, tp: int) -> Any:
    """Return the shapes of all devices, concatenated."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct((a.shape[0] * tp, *a.shape[1:]), a.dtype), tree)
