"""Plan -> forward: the nano-ops of every layer, issued in the plan's order, as one function to be jitted.

The function is `transformer.forward` for every plan (law 1 of the design); a plan changes only when and where
things run. Values live as pieces of token ranges. XLA is held to the plan's order by barriers at three
places: between ops of different tokens that follow each other on a stream (or it would merge their products
back into one), before an append to a cache that earlier ops read (or it would copy the cache), and where the
plan waits.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
from jaxtyping import Array, Float

from jaxflow.config import ModelConfig
from jaxflow.model import ops
from jaxflow.model.batch import Batch
from jaxflow.model.ops import KV, Context, Weights
from jaxflow.parallel.peer_reduce import added
from jaxflow.parallel.sequence_parallel import own_rows
from jaxflow.pipeline import streams
from jaxflow.pipeline.calls import call
from jaxflow.pipeline.order import (
    ATTENTION,
    MAIN,
    Reads,
    Run,
    Source,
    Span,
    check,
    check_sms,
    check_sums,
    final_values,
    graph_of,
    program,
)
from jaxflow.pipeline.pieces import Piece, Pieces
from jaxflow.pipeline.plan import Plan, PlanError
from jaxflow.pipeline.regions import Group, Segment, grouped

Forward = Callable[
    [Context, Weights, list[KV], Batch], tuple[Float[Array, "R D"], Float[Array, "T D"], list[KV]]
]


def compile_plan(
    plan: Plan, config: ModelConfig, tp: int = 1, *, quantized: bool = False, early: bool = False
) -> Forward:
    """The function of a plan, of the signature and the meaning of `jaxflow.model.transformer.forward`.

    Its batches have `plan.tokens` tokens, and no prefill chunk in them crosses one of `borders(plan)`.
    quantized: the inputs of products are e4m3 with scales beside them, two arrays each. early: kernels begin
    before the ones before them have ended (`KernelSet.begun_early`), which is for a step whose kernels are
    launched one by one.

    Raises:
      PlanError: for a plan that is not one of this model on `tp` devices, or that asks for what is not there.
    """
    graph = graph_of(plan, config, tp)
    check(plan, graph)
    check_sums(plan, graph, tp)
    check_sms(plan)
    runs, final = program(plan, graph), final_values(graph)
    reads = Reads(runs, final)
    groups = grouped(runs, reads, quantized)

    def forward(c: Context, weights: Weights, kv: list[KV], batch: Batch) -> tuple[Array, Array, list[KV]]:
        if batch.num_tokens != plan.tokens:
            raise PlanError(plan.name, f"a batch of {batch.num_tokens} tokens in a plan for {plan.tokens}")
        c = dataclasses.replace(c, kernels=c.kernels.begun_early()) if early else c
        step = _Step(dataclasses.replace(c, copies=plan.sums == "copies"), weights, list(kv), batch, reads)
        for group in groups:
            step.issue(group)
        step.flush()
        with jax.named_scope("final_norm"):
            x = step.stream_after(final, plan.tokens)
            _, hidden = ops.final_norm(c, weights, x[step.sample_tokens()], None)
        return hidden, x, step.kv

    return forward


def xla_options(plan: Plan, tp: int = 1, graphs: str | None = None) -> dict[str, Any]:
    """The XLA flags that a step of this plan is compiled with on GPUs.

    graphs: a name in `streams.GRAPHS`; None: the best measured. The sequential step was measured with XLA's
    own; streams do not overlap so.
    """
    several = len({(nano.start, nano.stop) for nano in plan.nano_ops}) > 1
    side = any(nano.stream for nano in plan.nano_ops)
    graphs = graphs or ("concurrent" if side else "whole" if several else "xla")
    copies = streams.COPIES if plan.sums == "copies" else {}
    return streams.xla_options(graphs, side_streams=side, collectives=several and tp > 1) | copies


class _Step:
    """One step while it is traced: what was made so far, and what the next op must follow."""

    def __init__(self, c: Context, weights: Weights, kv: list[KV], batch: Batch, reads: Reads):
        self.c, self.weights, self.kv, self.batch, self.reads = c, weights, kv, batch, reads
        self.values = Pieces(batch.num_rows)
        with jax.named_scope("embed"):
            x = ops.embed(c, weights, batch.token_ids, batch.positions)
        self.values.put((-1, "x"), Span(0, batch.num_tokens), x)
        self.made: dict[str, list[Piece]] = {}  # nano-op id -> what its last run made
        self.readers: dict[
            int, list[Piece]
        ] = {}  # layer -> what was read from its cache since the last append
        self.last: dict[Any, Run] = {}  # stream, or "network" -> the last run there
        self.collectives: list[Run] = []  # issued, but not traced yet
        self.works: dict[tuple, Any] = {}  # attention op, window, tokens and SMs -> the kernel's list of work
        self.at = 0  # where in the program this is
        self.barriers = 0
        beside = {run.nano.op in ATTENTION for run in reads.runs if run.nano.stream}
        self.aside = bool(beside)  # whether there are side streams
        self.overlaps = len(beside) == 2  # attention and others are on side streams
        self.awaited: list[
            Array
        ] = []  # what the next op waits for by the plan alone, where there are side streams
        self.zero = Piece(
            (-2, "zero"), Span(0, batch.num_tokens), streams.zero_behind(jax.tree.leaves(batch))
        )

    def issue(self, group: Group) -> None:
        """The next nano-ops of the program.

        A collective is traced behind the barrier that makes the next op follow what the collective sends: XLA
        drops from a barrier what nobody reads behind it, and with it the order.
        """
        self.at = group.first
        sent = {(run.layer, value) for run in self.collectives for value in run.makes}
        if any(source in sent for run in group.runs for source in run.reads):
            self.flush()
        if group.runs[0].op.kind == "network":
            self.collectives += group.runs
            return
        if any(sent.nano.id in group.runs[0].nano.waits for sent in self.collectives):
            # what is not traced is not in `made`: the wait would be for the previous layer's run of it
            self.flush()
        self.order(group.runs[0])
        self.flush()
        self.awaited = self.waited_for(group.runs[0])
        if group.segments:
            self.place(group)
        else:
            self.run(group.runs[0])
        self.awaited = []

    def waited_for(self, run: Run) -> list[Array]:
        """What of the plan's order only data can say, in a CUDA graph, which has no barriers: waits, and what
        attention has before it.

        Attention that is ready long before the products before it on its stream would take their SMs (`qkv`'s
        it follows by its keys).
        """
        if not self.aside:
            return []
        waits = [piece for wait in run.nano.waits for piece in self.made.get(wait, [])]
        before = self.last.get(run.nano.stream) if run.nano.op in ATTENTION and run.nano.stream else None
        if (
            before is not None
            and before.op.kind == "dense"
            and before.nano.op != "qkv"
            and not before.span.meets(run.span)
        ):
            waits += self.made[before.nano.id]
        return [jax.tree.leaves(alive.array)[0] for piece in waits for alive in self.frontier(piece)]

    def flush(self) -> None:
        """Traces the collectives that were issued."""
        while self.collectives:
            self.order(self.collectives[0])
            self.run(self.collectives.pop(0))

    def run(self, run: Run) -> None:
        """A nano-op on the main stream."""
        if run.nano.op == "rope_append":
            return self.append(run)
        prefilled = (
            self.values.find((run.layer, "o_chunk"), run.span) if run.nano.op == "decode_attention" else []
        )
        into = len(prefilled) == 1 and prefilled[0].span == run.span and prefilled[0].stream == MAIN
        with jax.named_scope(run.nano.op), jax.named_scope(run.nano.id):
            inputs = [
                *self.inputs(self.values, run, run.reads),
                *(piece.array for piece in prefilled if into),
            ]
            if run.op.own_rows and run.reads[0][0] < 0:  # all devices have the embeddings
                inputs[0] = own_rows(self.c, inputs[0])
            outputs = self.call(run, inputs)
        if into:
            self.values.merge(prefilled[0], outputs[0])
            self.record(run)
            return
        for value, made in zip(run.makes, outputs, strict=True):
            self.values.put((run.layer, value), run.span, made)
        self.record(run)

    def append(self, run: Run) -> None:
        """`rope_append`: a kernel for each array that its tokens lie in, the first made first, beside the
        product that makes the next.
        """
        for piece in self.values.as_made(run.reads[0], run.span):
            own = Span(max(piece.span.start, run.nano.start), min(piece.span.stop, run.nano.stop))
            part = dataclasses.replace(
                run, nano=msgspec.structs.replace(run.nano, start=own.start, stop=own.stop)
            )
            with jax.named_scope(run.nano.op), jax.named_scope(run.nano.id):
                q, self.kv[run.layer] = self.call(part, [self.values.read(run.reads[0], own)])
            self.values.put((run.layer, "q"), own, q)
        self.record(run)

    def place(self, group: Group) -> None:
        """Nano-ops that follow each other on a side stream, as regions of one output each."""
        for run in group.runs:
            if run.nano.op in ATTENTION:
                self.work(run)  # on the main stream, once for all layers
        attends = self.overlaps and group.runs[0].nano.op in ATTENTION
        if attends:  # the region must read what `zero_behind` reads, not another form of it
            self.join([self.zero, *self.values.find((group.runs[0].layer, "q"), group.runs[0].span)])
        for part in group.segments:
            out = streams.region(group.runs[0].nano.stream, functools.partial(self.trace, part))
            (layer, value), span = part.output
            put = (
                self.values.put_merged(layer, span, out)
                if part.merged
                else self.values.put((layer, value), span, out)
            )
            put.stream = group.runs[0].nano.stream
        for run in group.runs:
            self.record(run)
        if attends:
            self.begin([run for run in group.runs if run.nano.op in ATTENTION])

    def begin(self, runs: list[Run]) -> None:
        """Attention on a side stream has what it needs: what the plan issues after it is issued behind its
        beginning.
        """
        layer, own = runs[0].layer, self.weights["layers"][runs[0].layer]
        scales = [own[name] for name in ("unified", "k_scale", "v_scale") if name in own]
        needed = [
            self.values.read((layer, "q"), runs[0].span),
            self.kv[layer],
            scales,
            [self.work(run) for run in runs],
        ]
        zero = streams.zero_behind([self.zero.array, *jax.tree.leaves(needed)])
        self.zero = Piece(self.zero.source, self.zero.span, zero)

    def sample_tokens(self) -> Array:
        """The batch's, in a form that reads `zero`: XLA would forget it otherwise."""
        return self.batch.sample_tokens + self.zero.array if self.overlaps else self.batch.sample_tokens

    def trace(self, part: Segment) -> Array:
        """The steps of a segment; returns the one value that outlives it."""
        local = self.values.copy()
        for step in part.steps:
            run = step.run
            with jax.named_scope(run.nano.op), jax.named_scope(run.nano.id):
                inputs = self.inputs(local, run, step.reads)
                if step.part in ("merge", "into"):
                    heads = self.call(run, inputs)[0] if step.part == "into" else self.merge(run, inputs)
                    local.put_merged(run.layer, run.span, heads)
                    continue
                outputs = self.call(run, inputs)
            for value, made in zip(step.makes, outputs, strict=True):
                local.put((run.layer, value), run.span, made)
        return local.read(*part.output)

    def inputs(self, values: Pieces, run: Run, reads: tuple[Source, ...]) -> list[Any]:
        """What a nano-op reads of `values`; both attentions' outputs in one array."""
        if run.nano.op == "out_proj" and values.merged(run.layer, run.span):
            return [values.read((run.layer, "o_chunk"), run.span)]
        found = [values.read(source, run.span) for source in reads]
        if run.nano.op != "out_proj":
            return found
        decoded, prefilled = found
        apart = run.nano.stream != MAIN and decoded.shape == prefilled.shape
        return [prefilled, decoded, self.batch.num_decodes] if apart else [self.merge(run, found)]

    def merge(self, run: Run, outputs: list[Array]) -> Array:
        """Both attentions' outputs, decode attention's first, in one array."""
        is_decode = self.batch.is_decode(run.nano.start, run.nano.stop)
        return ops.merge_heads(is_decode, *outputs, in_place=run.nano.stream == MAIN)

    def work(self, run: Run) -> Any:
        """What an attention kernel is to do, the same in all layers of a window."""
        nano, layer = run.nano, self.c.config.layers[run.layer]
        key = (nano.op, layer.window, nano.start, nano.stop, nano.sms)
        if key not in self.works:
            c = dataclasses.replace(self.c, sms=nano.sms)
            with jax.named_scope(nano.op):
                listed = ops.attention_work(
                    c, layer, self.batch, nano.start, nano.stop, nano.op, self.kv[run.layer]
                )
            leaves, tree = jax.tree.flatten(
                listed
            )  # made before anything reads a part of it, `zero_behind` too
            self.works[key] = jax.tree.unflatten(tree, streams.together(leaves))
        return self.works[key]

    def call(self, run: Run, inputs: list[Any]) -> tuple:
        """One op of `jaxflow.model.ops` on its inputs; its outputs in the graph's order."""
        work = self.work(run) if run.nano.op in ATTENTION else None
        return call(
            self.c,
            self.weights["layers"][run.layer],
            self.batch,
            self.kv[run.layer],
            run,
            inputs,
            work,
            self.awaited,
        )

    def order(self, run: Run) -> None:
        """Makes a run, by its inputs, follow what the plan issued before it."""
        first = [piece for wait in run.nano.waits for piece in self.made.get(wait, [])]
        if run.nano.op == "rope_append":
            first += self.readers.pop(run.layer, [])
        first = [alive for piece in first for alive in self.frontier(piece)]
        lanes = [run.nano.stream, "network"] if run.op.kind == "network" else [run.nano.stream]
        for before in (self.last[lane] for lane in lanes if lane in self.last):
            if not before.span.meets(run.span):
                first += filter(self.alive, self.made[before.nano.id])
        inputs = [piece for source in run.reads for piece in self.values.find(source, run.span)]
        if self.overlaps and (
            run.nano.op == "rope_append" or (run.nano.stream and run.nano.op not in ATTENTION)
        ):
            first.append(self.zero)
        first = [piece for piece in first if not any(piece.passed & other.behind for other in inputs)]
        if first:  # else there is nothing to follow, or an earlier barrier sees to it
            self.join([*first, *inputs])

    def join(self, pieces: list[Piece]) -> None:
        """A barrier: whatever uses one of the pieces from now on comes after all of them are there."""
        pieces = list({id(piece): piece for piece in pieces}.values())
        behind = functools.reduce(int.__or__, (piece.behind for piece in pieces), 1 << self.barriers)
        for piece, array in zip(pieces, streams.together([piece.array for piece in pieces]), strict=True):
            piece.array, piece.passed, piece.behind = array, piece.passed | 1 << self.barriers, behind
        self.barriers += 1

    def stream_after(self, final: tuple[Source, Source], tokens: int) -> Array:
        """The residual stream of all tokens after the last layer, whose two parts these are."""
        scattered = any(run.op.own_rows for run in self.reads.runs)
        spans = (
            [piece.span for piece in self.values.find(final[1], Span(0, tokens))]
            if scattered
            else [Span(0, tokens)]
        )
        sums = [self.values.read(final[0], span) + added(self.values.read(final[1], span)) for span in spans]
        return jnp.concatenate([ops.attn_gather(self.c, own) for own in sums]) if scattered else sums[0]

    def alive(self, piece: Piece) -> bool:
        """Whether anything will still read a piece: XLA forgets the others' part in a barrier."""
        sent = any(piece.source in run.reads and run.span.meets(piece.span) for run in self.collectives)
        return sent or self.reads.later(self.at, piece.source, piece.span)

    def frontier(self, piece: Piece) -> list[Piece]:
        """The piece, or where nothing will read it any more, what was made from it."""
        return (
            [piece]
            if self.alive(piece)
            else [alive for follower in piece.followers for alive in self.frontier(follower)]
        )

    def record(self, run: Run) -> None:
        made = [piece for value in run.makes for piece in self.values.find((run.layer, value), run.span)]
        for piece in (piece for source in run.reads for piece in self.values.find(source, run.span)):
            for follower in made:
                if follower is not piece:
                    piece.followers.append(follower)
                    follower.behind |= piece.behind
        self.made[run.nano.id] = made
        self.last["network" if run.op.kind == "network" else run.nano.stream] = run
        if run.nano.op in ATTENTION:
            self.readers.setdefault(run.layer, []).extend(made)
