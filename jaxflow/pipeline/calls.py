"""A nano-op as a call of its op: what each op of `jaxflow.model.ops` is given beside the values that it
reads.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax

from jaxflow.model import ops
from jaxflow.model.batch import Batch
from jaxflow.model.ops import KV, Context, Weights
from jaxflow.pipeline import streams
from jaxflow.pipeline.order import ATTENTION, Run
from jaxflow.pipeline.regions import ADD_NORMS


def call(
    c: Context,
    w: Weights,
    batch: Batch,
    kv: KV,
    run: Run,
    inputs: list[Any],
    work: Any,
    awaited: list[jax.Array],
) -> tuple:
    """One op on its inputs; its outputs in the graph's order, `kv` last.

    w, kv: of the run's layer. work: what an attention kernel is to do, None for other ops. awaited: what the
    op comes after by the plan alone. That is made data (`streams.behind`) for the ops that plans begin with
    after a wait and that read something small.
    """
    c, layer = dataclasses.replace(c, sms=run.nano.sms), c.config.layers[run.layer]
    name, start, stop = run.nano.op, run.nano.start, run.nano.stop
    op = _traced_once(name)
    if name == "rope_append":
        batch = dataclasses.replace(batch, slots=streams.behind(awaited, batch.slots))
        return op(c, layer, w, batch, start, stop, *inputs, kv)
    if name in ATTENTION:
        q, *into = inputs
        return (op(c, layer, w, batch, start, stop, q, kv, *into, work=streams.behind(awaited, work)),)
    if run.op.kind == "network":
        return (op(c, *inputs),)
    if name in ADD_NORMS:  # without a second input there is nothing to add
        return op(
            c,
            {**w, name: streams.behind(awaited, w[name])},
            inputs[0],
            inputs[1] if len(inputs) > 1 else None,
        )
    if name == "out_proj" and len(inputs) > 1:
        return (op(c, w, *inputs, start=start),)
    return (op(c, w, *inputs),)


@functools.cache
def _traced_once(name: str) -> Callable[..., Any]:
    """An op as a jitted function, so that layers of equal shapes share one tracing and one lowering."""
    op = getattr(ops, name)
    fixed = [p for p in inspect.signature(op).parameters if p in ("c", "layer", "start", "stop")]
    return jax.jit(op, static_argnames=fixed)
