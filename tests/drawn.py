"""Random plans and random steps for the tests of the compiler."""

import dataclasses
import functools
import itertools
import json
from collections.abc import Sequence
from typing import Any, Literal
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import paths
from hypothesis import strategies as st

from jaxflow.config import ModelConfig
from jaxflow.kv.device_cache import cache_shapes, cache_spec, page_groups
from jaxflow.model import ops, transformer, weights
from jaxflow.model.architectures.hf_config import model_config_from_hf
from jaxflow.model.batch import Batch, cache_slots
from jaxflow.model.graph import Graph, model_graph
from jaxflow.model.op_registry import Context, Site
from jaxflow.parallel.mesh import TP, axis_of, make_mesh, over_shards
from jaxflow.pipeline import streams
from jaxflow.pipeline.compiler import compile_plan
from jaxflow.pipeline.plan import NanoOp, Plan
from pallas_kernels.kernel_set import REFERENCE

ROWS, PAGE, PAGES_A_ROW = 10, 4, 8


def config_of(name: str) -> ModelConfig:
    """Return the config of a small checkpoint. tiny-gemma4_e2b keeps a layer of each kind."""
    config = model_config_from_hf(json.loads((paths.MODELS / name / "config.json").read_text()))
    if name != "tiny-gemma4_e2b":
        return config
    _, sliding, full, _, shared = config.layers
    return dataclasses.replace(config, layers=(sliding, full, shared))


def ready(nano: NanoOp, issued: list[NanoOp], ops_by_name: dict, makers: dict[str, set[str]]) -> bool:
    """Return whether all values that the nano-op reads of its layer were issued, by brute force over tokens.

    makers: the ops that make each value, over all kinds of layers.
    """

    def tokens(op: str) -> set[int]:
        return {t for other in issued if other.op == op for t in range(other.start, other.stop)}

    needs = set().union(*(makers.get(value, set()) for value in ops_by_name[nano.op].inputs if value != "kv"))
    data = all(set(range(nano.start, nano.stop)) <= tokens(maker) for maker in needs)
    return data and (not nano.op.endswith("attention") or set(range(nano.stop)) <= tokens("rope_append"))


@st.composite
def plans(
    draw,
    graph: Graph,
    tokens: int,
    streams: bool = False,
    sums: Literal["kernels", "copies"] = "kernels",
    places: Sequence[int] | None = None,
    sms: tuple[int | None, ...] = (None, 40, 92),
) -> Plan:
    """Draw a plan with separate split points for some ops, in any order that data allows.

    The order is rotated over the layers' border.
    streams: whether each nano-op has a stream of its own, and SMs of its own from `sms`.
    places: the split points to draw from; None for all. Scattered rows are split alike, at multiples of 4.
    """
    by_name = {op.name: op for layer in graph.layers for op in layer}
    makers: dict[str, set[str]] = {}
    for op in itertools.chain(*graph.layers):
        for value in op.outputs:
            makers.setdefault(value, set()).add(op.name)
    cut = st.lists(st.sampled_from(places or range(1, tokens)), max_size=2, unique=True).map(sorted)
    whole = st.lists(st.sampled_from(places or range(4, tokens, 4)), max_size=2, unique=True).map(sorted)
    common, left = draw(whole if graph.scattered else cut), []
    for name, op in by_name.items():
        alike = graph.scattered and (op.local_rows or op.kind == "network")
        cuts = common if alike else draw(st.one_of(st.just(common), st.just(common), cut))
        for i, (start, stop) in enumerate(zip([0, *cuts], [*cuts, tokens], strict=True)):
            left.append(NanoOp(f"{name}.{i}", name, start, stop))
    issued: list[NanoOp] = []
    while left:
        nano = draw(st.sampled_from([nano for nano in left if ready(nano, issued, by_name, makers)]))
        left.remove(nano)
        issued.append(nano)
    if streams:
        fixed = {
            name
            for name, op in by_name.items()
            if op.kind == "network" or op.local_rows or "experts" in op.inputs
        }
        pinned = fixed | {name for name in by_name if "expert" in name or name in ("router", "rope_append")}
        of = lambda nano: 0 if nano.op in pinned else draw(st.integers(0, 2))
        issued = [_with(nano, stream=of(nano), sms=draw(st.sampled_from(sms))) for nano in issued]
        waiting = draw(st.integers(0, len(issued) - 1))
        others = [nano.id for at, nano in enumerate(issued) if at != waiting]
        issued[waiting] = _with(
            issued[waiting], waits=tuple(draw(st.lists(st.sampled_from(others), max_size=3, unique=True)))
        )
    turn = draw(st.integers(0, len(issued) - 1))
    return Plan(
        "drawn", tokens, (*issued[turn:], *(_with(nano, ahead=1) for nano in issued[:turn])), sums=sums
    )


def _with(nano: NanoOp, **changes) -> NanoOp:
    fields = {name: getattr(nano, name) for name in nano.__struct_fields__}
    return NanoOp(**(fields | changes))


@st.composite
def steps(draw, config: ModelConfig, tokens: int, cuts: tuple[int, ...]) -> Batch:
    """Return the batch of a step from `step`: decodes, then chunks, then padding."""
    decodes = draw(st.integers(0, min(ROWS - 1, tokens)))
    left, sizes = tokens - decodes, []
    while left and decodes + len(sizes) < ROWS and draw(st.booleans()):
        sizes.append(draw(st.integers(1, left)))
        left -= sizes[-1]
    return step(config, tokens, cuts, decodes, sizes, draw(st.integers(0, 2**32 - 1)))


def step(
    config: ModelConfig, tokens: int, cuts: tuple[int, ...], decodes: int, sizes: Sequence[int], seed: int = 0
) -> Batch:
    """A step of `decodes` and of chunks of these sizes, at random positions of their sequences, cut at the
    plan's borders.
    """
    rng = np.random.default_rng(seed)
    longest = PAGES_A_ROW * PAGE
    rows = [(1, int(rng.integers(0, longest))) for _ in range(decodes)]
    rows += [(size, int(rng.integers(0, longest - size + 1))) for size in sizes]
    groups = len(config.windows)
    table = np.stack(
        [rng.permutation(ROWS * PAGES_A_ROW).reshape(ROWS, PAGES_A_ROW) for _ in range(groups)]
    ).astype(np.int32)
    token_rows, positions = np.full(tokens, -1, np.int32), np.zeros(tokens, np.int32)
    lengths, sample = np.zeros(ROWS, np.int32), np.zeros(ROWS, np.int32)
    chunks, at = [], 0
    for row, (size, start) in enumerate(rows):
        token_rows[at : at + size], positions[at : at + size] = row, np.arange(start, start + size)
        lengths[row], sample[row] = start + size, at + size - 1
        inner = [at, *(cut for cut in cuts if row >= decodes and at < cut < at + size), at + size]
        if row >= decodes:
            chunks += [(a, b - a, row, start + a - at) for a, b in itertools.pairwise(inner)]
        at += size
    chunks += [(0, 0, 0, 0)] * (ROWS + max(2, len(cuts)) - len(chunks))  # one shape for most plans
    return Batch(
        token_ids=rng.integers(0, config.vocab_size, tokens).astype(np.int32),
        positions=positions,
        slots=np.asarray(
            cache_slots(jnp.asarray(table), jnp.asarray(token_rows), jnp.asarray(positions), PAGE)
        ),
        page_table=table,
        lengths=lengths,
        num_decodes=np.int32(decodes),
        chunks=np.array(chunks, np.int32),
        sample_tokens=sample,
    )


@dataclasses.dataclass(frozen=True)
class Bench:
    """A model with random weights and a random cache, on `tp` devices, to run forwards on; or with both in 8
    bits.
    """

    config: ModelConfig
    tp: int = 1
    quantization: str | None = None  # the weights' dtype, as in EngineConfig
    kv: str = "float32"  # the cache's dtype

    @property
    def narrow(self) -> bool:
        return self.quantization == "fp8" or self.kv != "float32"

    @property
    def options(self) -> dict[str, Any]:
        return {"quantization": self.quantization, "kv_scales": self.kv == "float8_e4m3fn"}

    @property
    def graph(self) -> Graph:
        return model_graph(self.config, self.tp)

    def jitted(self, forward):
        """(weights, kv, batch) -> (logits of the rows, residual stream, cache)."""
        mesh = make_mesh(self.tp)
        c = Context(self.config, REFERENCE, axis_of(mesh))

        def step(w, kv, batch):
            hidden, x, kv = forward(c, w, kv, batch)
            return ops.logits(Site(c, w), hidden), x, kv

        replicated, kv_specs = (
            jax.sharding.PartitionSpec(),
            [(cache_spec(mesh),) * 2 for _ in self.config.cached_layers],
        )
        specs = (weights.shardings(self.config, mesh, **self.options), kv_specs, replicated)
        return jax.jit(over_shards(step, mesh, specs, (replicated, replicated, kv_specs)))

    def check(self, plan: Plan, *batches: Batch) -> None:
        """Check law 1 for the compiled plan: it computes the function of the plain forward."""
        self._compare(_planned(self, plan), batches)

    def check_op_by_op(self, plan: Plan, *batches: Batch) -> None:
        """Check law 1 for the plan's function, evaluated op by op: the plan itself is not compiled.

        Only the ops are compiled, and plans of equal token ranges share them. Devices are a
        mapped axis of one device. Barriers order the ops of a compiled step and return their
        arguments, so they are left out.
        """
        forward = compile_plan(plan, self.config, self.tp, quantized=self.quantization == "fp8")
        eager = {"region": lambda stream, work: work(), "together": list}
        with mock.patch.multiple(streams, **eager):
            self._compare(functools.partial(self._op_by_op, forward), batches)

    def _op_by_op(self, forward: Any, w: Any, kv: Any, batch: Batch) -> tuple:
        c = Context(self.config, REFERENCE, TP if self.tp > 1 else None)

        def step(w, kv):
            hidden, x, kv = forward(c, w, kv, jax.tree.map(jnp.asarray, batch))
            return ops.logits(Site(c, w), hidden), x, kv

        if self.tp == 1:
            return step(w, kv)
        mesh = make_mesh(self.tp)
        specs = (weights.shardings(self.config, mesh, **self.options), [(cache_spec(mesh),) * 2 for _ in kv])

        def shards(array, spec):
            if TP not in spec:
                return jnp.broadcast_to(array, (self.tp, *array.shape))
            return jnp.stack(jnp.split(np.asarray(array), self.tp, axis=list(spec).index(TP)))

        logits, x, kv = jax.vmap(step, axis_name=TP, axis_size=self.tp)(*jax.tree.map(shards, (w, kv), specs))
        join = lambda pages, spec: jnp.concatenate(list(pages), axis=list(spec).index(TP))
        return logits[0], x[0], jax.tree.map(join, kv, specs[1])

    def _compare(self, planned: Any, batches: Sequence[Batch]) -> None:
        """Compare a function with the plain forward on some batches."""
        w, kv, forward = plain(self)
        close = alike if self.narrow else equal
        for batch in batches:
            # To numpy at once: each count of rows that jnp indexed with would be a program of its own.
            logits, x, cache = jax.tree.map(np.asarray, planned(w, kv, batch))
            want_logits, want_x, want_cache = jax.tree.map(np.asarray, forward(w, kv, batch))
            there = batch.lengths > 0
            close(logits[there], want_logits[there])
            first, second = np.sort(want_logits[there], -1)[:, :-3:-1].T
            clear = first - second > (0.05 * np.abs(want_logits[there]).max(initial=0) if self.narrow else 0)
            assert (np.argmax(logits, -1)[there] == np.argmax(want_logits, -1)[there])[clear].all()
            real = int((batch.slots[0] < ROWS * PAGES_A_ROW * PAGE).sum())
            close(x[:real], want_x[:real])
            jax.tree.map(close, cache, want_cache)


@functools.lru_cache(maxsize=4)
def _planned(bench: Bench, plan: Plan):
    """The plan's step, compiled once for many batches."""
    return bench.jitted(compile_plan(plan, bench.config, bench.tp, quantized=bench.quantization == "fp8"))


def equal(got, want) -> None:
    np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)


def alike(got, want) -> None:
    """Compare 8-bit results.

    The order of a float32 sum may change its last bit, and with it a rounding by a sixteenth.
    """
    got, want = (np.asarray(x, np.float32) for x in (got, want))
    assert np.linalg.norm(got - want) <= 0.02 * np.linalg.norm(want)


@functools.cache
def plain(bench: Bench):
    """Weights, a cache and the plain forward, compiled once for each model."""
    config, rng = bench.config, np.random.default_rng(7)

    def noise(x):
        return np.asarray(
            jnp.asarray(rng.normal(size=x.shape) * (40 if x.dtype == jnp.int8 else 1)).astype(x.dtype)
        )

    shapes = cache_shapes(
        page_groups(config, bench.kv, bench.tp), (ROWS * PAGES_A_ROW,) * len(config.windows), PAGE
    )
    made = weights.dummy_weights(config, jnp.float32, make_mesh(bench.tp), seed=3, **bench.options)
    return made, jax.tree.map(noise, shapes), bench.jitted(transformer.forward)
