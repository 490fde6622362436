"""The compiler of plans: it issues the nano-ops of every layer in the plan's order, as one function for
`jax.jit`.

The function computes `transformer.forward` for every plan (law 1 of the design). A plan changes only when and
where operations run. A value lies in slices, one per token range. Barriers hold XLA to the plan's order at
three places. Between ops of different tokens that follow each other on a stream: XLA would merge their GEMMs
into one. Before an append to a cache that earlier ops read: XLA would copy the cache. Where the plan waits.
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
from jaxflow.model.expert_tokens import mixture_layers
from jaxflow.model.op_registry import KV, Context, Site, Weights, op_scope
from jaxflow.model.routing import by_token
from jaxflow.model.transformer import Routed, layer_inputs
from jaxflow.parallel.collectives import added, gather_rows, local_rows
from jaxflow.pipeline import streams
from jaxflow.pipeline.plan import Plan, PlanError
from jaxflow.pipeline.program import (
    GATHERED_SUMS,
    MAIN,
    LayerOp,
    Reads,
    TokenRange,
    Value,
    check,
    check_sms,
    check_sums,
    final_values,
    graph_of,
    program,
)
from jaxflow.pipeline.regions import IssueGroup, Region, group_entries

Forward = Callable[..., tuple[Float[Array, "R D"], Float[Array, "T D"], list[KV]]]


def compile_plan(
    plan: Plan,
    config: ModelConfig,
    tp: int = 1,
    *,
    ranks: int = 1,
    quantized: bool = False,
    pdl: bool = False,
) -> Forward:
    """Return a plan's function, with the signature and the result of `jaxflow.model.transformer.forward`.

    Its batches have `plan.tokens` tokens, and no prefill chunk in them crosses one of `borders(plan)`.
    ranks: data-parallel ranks of `tp` devices each.
    quantized: the inputs of GEMMs are e4m3 with scales, two arrays each.
    pdl: kernels use programmatic dependent launch, for steps that launch kernels one by one.

    Raises:
      PlanError: for a plan that does not fit this model on `tp` devices.
    """
    graph = graph_of(plan, config, tp, ranks=ranks)
    check(plan, graph)
    check_sums(plan, graph, tp)
    check_sms(plan)
    entries, final = program(plan, graph), final_values(graph)
    reads = Reads(entries, final)
    groups = group_entries(entries, reads, quantized)
    whole = len({(nano.start, nano.stop) for nano in plan.nano_ops}) == 1

    def forward(
        c: Context, weights: Weights, kv: list[KV], batch: Batch, routed: Routed | None = None
    ) -> tuple[Array, Array, list[KV]]:
        if batch.num_tokens != plan.tokens:
            raise PlanError(plan.name, f"takes steps of {plan.tokens} tokens, not of {batch.num_tokens}")
        c = dataclasses.replace(c, kernels=c.kernels.with_pdl()) if pdl else c
        c = dataclasses.replace(c, copies=plan.sums == "copies", whole=whole)
        trace = _StepTrace(c, weights, list(kv), batch, reads)
        for group in groups:
            trace.issue(group)
        trace.flush()
        if routed is not None:
            routed += trace.routed()
        with op_scope("final_norm"):
            x = trace.stream_after(final, plan.tokens)
            sampled = x[trace.sample_tokens()]
        if "final_norm" in weights:
            _, sampled = ops.final_norm(Site(c, weights), sampled, None)
        return sampled, x, trace.kv

    return forward


def xla_options(
    plan: Plan, tp: int = 1, graphs: str | None = None, *, hidden_bytes: int = 0
) -> dict[str, Any]:
    """Return the XLA flags for compiling a step of this plan on GPUs.

    graphs: a name in `streams.GRAPHS`; None for the best measured one. The sequential step was measured with
    XLA's default. Streams do not overlap in the default. hidden_bytes: bytes of a token's hidden values.
    """
    several = len({(nano.start, nano.stop) for nano in plan.nano_ops}) > 1
    sends = tp > 1 or any(nano.op == "expert_dispatch" for nano in plan.nano_ops)
    side = any(nano.stream for nano in plan.nano_ops)
    graphs = graphs or ("concurrent" if side else "whole" if several else "xla")
    copies = streams.COPIES if plan.sums == "copies" else {}
    sum_bytes = plan.tokens * hidden_bytes if tp > 1 else 0
    found = streams.xla_options(graphs, side_streams=side, collectives=several and sends, sum_bytes=sum_bytes)
    return found | copies


@dataclasses.dataclass(eq=False)
class _Slice:
    """A value's rows of some tokens. `array` may be a pytree of arrays with the same rows.

    stream: the stream that made the slice. merged: it holds the heads of both attentions.
    passed: the barriers that it went through, one bit each. behind: the barriers that it, or an input of it,
    went through. followers: the slices that were made from this slice. sent: a collective made the slice.
    """

    value: Value
    tokens: TokenRange
    array: Any
    stream: int = MAIN
    merged: bool = False
    passed: int = 0
    behind: int = 0
    sent: bool = False
    followers: list["_Slice"] = dataclasses.field(default_factory=list)


class _Values:
    """The slices of every value.

    rows: decode attention has no output for token ranges that start at or after this row.
    """

    def __init__(self, rows: int):
        self._rows = rows
        self._slices: dict[Value, list[_Slice]] = {}

    def copy(self) -> "_Values":
        """Return the same slices. Slices that are put into the copy stay out of the original."""
        other = _Values(self._rows)
        other._slices = {value: list(slices) for value, slices in self._slices.items()}
        return other

    def put(self, value: Value, tokens: TokenRange, array: Any) -> _Slice:
        """Add a slice."""
        made = _Slice(value, self._clip(value, tokens), array)
        self._slices.setdefault(value, []).append(made)
        return made

    def put_merged(self, layer: int, tokens: TokenRange, array: Array) -> _Slice:
        """Replace both attentions' outputs for the same tokens by one array."""
        for name in ("o_decode", "o_chunk"):
            value = (layer, name)
            gone = self._clip(value, tokens)
            self._slices[value] = [made for made in self._slices.get(value, []) if made.tokens != gone]
        merged = _Slice((layer, "o_chunk"), tokens, array, merged=True)
        self._slices[layer, "o_chunk"].append(merged)
        return merged

    def is_merged(self, layer: int, tokens: TokenRange) -> bool:
        """Return whether all heads of these tokens are merged."""
        return all(made.merged for made in self.find((layer, "o_chunk"), tokens))

    def find(self, value: Value, tokens: TokenRange) -> list[_Slice]:
        """Return the slices that hold some of the tokens, in order of tokens."""
        return sorted(self.in_order_made(value, tokens), key=lambda made: made.tokens.start)

    def in_order_made(self, value: Value, tokens: TokenRange) -> list[_Slice]:
        """Return the slices that hold some of the tokens, the first made first."""
        tokens = self._clip(value, tokens)
        return [made for made in self._all(value) if made.tokens.overlaps(tokens)]

    def read(self, value: Value, tokens: TokenRange) -> Any:
        """Return the rows of these tokens as one array."""
        tokens = self._clip(value, tokens)
        found = self.find(value, tokens)
        if not found:  # no token of this range can be a decode
            return jax.tree.map(lambda a: a[:0], self._all(value)[0].array)

        def rows(made: _Slice) -> Any:
            first = max(tokens.start, made.tokens.start) - made.tokens.start
            last = min(tokens.stop, made.tokens.stop) - made.tokens.start
            if last - first == made.tokens.stop - made.tokens.start:
                return made.array
            if value[1] == GATHERED_SUMS:  # a token has a row of each rank, and ranges follow each other
                ranks = made.array.shape[0] // (made.tokens.stop - made.tokens.start)
                first, last = ranks * first, ranks * last
            return jax.tree.map(lambda a: a[first:last], by_token(made.array))

        parts = [rows(made) for made in found]
        if len(parts) == 1:
            return parts[0]
        return jax.tree.map(lambda *a: jnp.concatenate(a), *map(by_token, parts))

    def _all(self, value: Value) -> list[_Slice]:
        layer, name = value
        merged = []
        if name == "o_decode":
            merged = [made for made in self._slices.get((layer, "o_chunk"), []) if made.merged]
        return self._slices.get(value, []) + merged

    def _clip(self, value: Value, tokens: TokenRange) -> TokenRange:
        nothing = value[1] == "o_decode" and tokens.start >= self._rows
        return TokenRange(tokens.start, tokens.start) if nothing else tokens


class _StepTrace:
    """One step while it is traced: the values made so far, and the order that the next op must follow."""

    def __init__(self, c: Context, weights: Weights, kv: list[KV], batch: Batch, reads: Reads):
        self.c, self.weights, self.kv, self.batch, self.reads = c, weights, kv, batch, reads
        self.values = _Values(batch.num_rows)
        x = batch.hidden
        if x is None:
            x = ops.embed(Site(c, weights), batch.token_ids, batch.positions)
        everything = TokenRange(0, batch.num_tokens)
        self.values.put((-1, "x"), everything, x)
        for layer, rows in enumerate(layer_inputs(Site(c, weights), batch, x)):
            self.values.put((layer, "layer_input"), everything, rows)
        self.made: dict[str, list[_Slice]] = {}  # nano-op id -> the outputs of its last entry
        self.readers: dict[
            int, list[_Slice]
        ] = {}  # layer with a cache -> outputs read from its cache since the last append
        self.last: dict[Any, LayerOp] = {}  # stream, or "network" -> the last entry there
        self.pending: list[LayerOp] = []  # collectives that were issued and are not traced yet
        self.works: dict[tuple, Any] = {}  # attention op, window, tokens and SMs -> the kernel's work list
        self.at = 0  # the index of the current entry in the program
        self.barriers = 0
        on_side = {entry.attends for entry in reads.entries if entry.nano.stream}
        self.has_side_streams = bool(on_side)
        self.overlaps = len(on_side) == 2  # attention and other ops are on side streams
        self.awaited: list[
            Array
        ] = []  # the arrays that the next op follows by the plan only, with side streams
        self.zero = _Slice((-2, "zero"), everything, streams.zero_behind(jax.tree.leaves(batch)))

    def issue(self, group: IssueGroup) -> None:
        """Trace the next nano-ops of the program.

        A collective is traced after the barrier that makes the next op follow the collective's input. XLA
        drops an array from a barrier if nobody reads the array behind the barrier, and the order with it.
        """
        self.at, first = group.first, group.entries[0]
        sent = {(entry.layer, name) for entry in self.pending for name in entry.makes}
        if any(value in sent for entry in group.entries for value in entry.reads):
            self.flush()
        if first.is_collective:
            self.pending += group.entries
            return
        if any(entry.nano.id in first.nano.waits for entry in self.pending):
            # A pending collective is not in `made`: the wait would find the previous layer's.
            self.flush()
        self.order(first)
        self.flush()
        self.awaited = self.waited_for(first)
        if group.regions:
            self.run_regions(group)
        else:
            self.run(first)
        self.awaited = []

    def waited_for(self, entry: LayerOp) -> list[Array]:
        """Return the arrays that an entry must follow by data, because a CUDA graph has no barriers.

        These are its waits and, for attention, the GEMM before it on its stream: attention that is ready long
        before would take the GEMM's SMs. Attention follows `qkv` by its keys.
        """
        if not self.has_side_streams:
            return []
        waits = [made for wait in entry.nano.waits for made in self.made.get(wait, [])]
        before = self.last.get(entry.nano.stream) if entry.attends and entry.nano.stream else None
        if (
            before is not None
            and before.op.kind == "dense"
            and before.nano.op != "qkv"
            and not before.tokens.overlaps(entry.tokens)
        ):
            waits += self.made[before.nano.id]
        return [jax.tree.leaves(alive.array)[0] for made in waits for alive in self.frontier(made)]

    def flush(self) -> None:
        """Trace the pending collectives."""
        while self.pending:
            self.order(self.pending[0])
            self.run(self.pending.pop(0))

    def run(self, entry: LayerOp) -> None:
        """Trace a nano-op on the main stream."""
        if entry.appends:
            return self.append(entry)
        chunks = self.values.find((entry.layer, "o_chunk"), entry.tokens) if entry.attends else []
        into = (
            entry.nano.op == "decode_attention"
            and len(chunks) == 1
            and chunks[0].tokens == entry.tokens
            and chunks[0].stream == MAIN
        )
        with op_scope(entry.nano.op, entry.nano.id):
            inputs = self.inputs(self.values, entry, entry.reads)
            if entry.op.local_rows and entry.reads[0][0] < 0:  # all devices hold the embeddings
                assert self.c.axis is not None
                inputs[0] = local_rows(inputs[0], self.c.axis)
        outputs = self.call(entry, [*inputs, *(made.array for made in chunks if into)])
        if into:  # the former array of the chunks' heads is overwritten
            chunks[0].array, chunks[0].merged, chunks[0].passed = outputs[0], True, 0
        else:
            for name, array in zip(entry.makes, outputs, strict=True):
                self.values.put((entry.layer, name), entry.tokens, array)
        self.record(entry)

    def append(self, entry: LayerOp) -> None:
        """Trace `rope_append`, one kernel per input slice, the first made first.

        The kernel of one slice runs while the GEMM of the next slice runs.
        """
        for made in self.values.in_order_made(entry.reads[0], entry.tokens):
            start = max(made.tokens.start, entry.nano.start)
            stop = min(made.tokens.stop, entry.nano.stop)
            part = dataclasses.replace(
                entry, nano=msgspec.structs.replace(entry.nano, start=start, stop=stop)
            )
            with op_scope(entry.nano.op, entry.nano.id):
                fused = self.values.read(entry.reads[0], part.tokens)
            q, self.kv[entry.cache] = self.call(part, [fused])
            self.values.put((entry.layer, "q"), part.tokens, q)
        self.record(entry)

    def run_regions(self, group: IssueGroup) -> None:
        """Trace consecutive nano-ops of a side stream, as regions of one output each."""
        first, stream = group.entries[0], group.entries[0].nano.stream
        attention = [entry for entry in group.entries if entry.attends]
        for entry in attention:
            self.work(entry)  # on the main stream, once for all layers
        attends = self.overlaps and first.attends
        if attends:  # the region must read the same form of an array as `zero_behind`
            self.join([self.zero, *self.values.find((first.layer, "q"), first.tokens)])
        for region in group.regions:
            out = streams.region(stream, functools.partial(self.trace_region, region))
            (layer, name), tokens = region.output
            if region.merged:
                put = self.values.put_merged(layer, tokens, out)
            else:
                put = self.values.put((layer, name), tokens, out)
            put.stream = stream
        for entry in group.entries:
            self.record(entry)
        if attends:
            self.order_behind(attention)

    def order_behind(self, attention: list[LayerOp]) -> None:
        """Make XLA issue the entries after this one after the start of attention on a side stream."""
        first = attention[0]
        w = self.weights["layers"][first.layer]
        needed = [
            self.values.read((first.layer, "q"), first.tokens),
            self.kv[first.cache],
            [w[name] for name in ("unified_max", "k_scale", "v_scale") if name in w],
            [self.work(entry) for entry in attention],
        ]
        zero = streams.zero_behind([self.zero.array, *jax.tree.leaves(needed)])
        self.zero = _Slice(self.zero.value, self.zero.tokens, zero)

    def routed(self) -> Routed:
        """Return the experts of each mixture layer. A region of a side stream does not tell its routing."""
        everything = TokenRange(0, self.batch.num_tokens)
        return [
            self.values.read((layer, "routing"), everything).chosen
            if self.values.find((layer, "routing"), everything)
            else None
            for layer in mixture_layers(self.c.config)
        ]

    def sample_tokens(self) -> Array:
        """Return the batch's `sample_tokens`, read together with `zero`: XLA would drop `zero` otherwise."""
        return self.batch.sample_tokens + self.zero.array if self.overlaps else self.batch.sample_tokens

    def trace_region(self, region: Region) -> Array:
        """Trace the operations of a region. Returns the value that outlives the region."""
        local = self.values.copy()
        for op in region.ops:
            entry = op.entry
            with op_scope(entry.nano.op, entry.nano.id):
                inputs = self.inputs(local, entry, op.reads)
                if op.form == "merge":
                    inputs = [self.merge_heads(entry, inputs)]
            outputs = inputs if op.form == "merge" else self.call(entry, inputs)
            if op.form == "op":
                for name, array in zip(op.makes, outputs, strict=True):
                    local.put((entry.layer, name), entry.tokens, array)
            else:
                local.put_merged(entry.layer, entry.tokens, outputs[0])
        return local.read(*region.output)

    def inputs(self, values: _Values, entry: LayerOp, reads: tuple[Value, ...]) -> list[Any]:
        """Return an entry's inputs, except the cache. The projection reads both attentions' heads as one
        input."""
        if entry.nano.op != "out_proj":
            return [values.read(value, entry.tokens) for value in reads]
        if values.is_merged(entry.layer, entry.tokens):
            return [values.read((entry.layer, "o_chunk"), entry.tokens)]
        decodes, chunks = (values.read(value, entry.tokens) for value in reads)
        if entry.nano.stream != MAIN and decodes.shape == chunks.shape:
            return [ops.UnmergedHeads(chunks, decodes, self.batch.num_decodes, entry.nano.start)]
        return [self.merge_heads(entry, [decodes, chunks])]

    def merge_heads(self, entry: LayerOp, outputs: list[Array]) -> Array:
        """Return both attentions' outputs, decode attention's first, as one array."""
        is_decode = self.batch.is_decode(entry.nano.start, entry.nano.stop)
        return ops.merge_heads(is_decode, *outputs, in_place=entry.nano.stream == MAIN)

    def work(self, entry: LayerOp) -> Any:
        """Return an attention kernel's work list, which all layers of a window share."""
        nano, layer = entry.nano, self.c.config.layers[entry.layer]
        key = (nano.op, layer.window, nano.start, nano.stop, nano.sms)
        if key not in self.works:
            c = dataclasses.replace(self.c, sms=nano.sms)
            kv = self.kv[entry.cache]
            with op_scope(nano.op):
                listed = ops.attention_work(c, layer, self.batch, nano.start, nano.stop, nano.op, kv)
            # The list is made in full before anything reads a part of it, `zero_behind` included.
            leaves, tree = jax.tree.flatten(listed)
            self.works[key] = jax.tree.unflatten(tree, streams.together(leaves))
        return self.works[key]

    def call(self, entry: LayerOp, inputs: list[Any]) -> tuple:
        """Run the op of an entry. inputs: without the cache. Returns its outputs in the graph's order."""
        nano, layer = entry.nano, self.c.config.layers[entry.layer]
        site = Site(
            dataclasses.replace(self.c, sms=nano.sms),
            self.weights["layers"][entry.layer],
            layer,
            self.batch,
            nano.start,
            nano.stop,
            self.work(entry) if entry.attends else None,
            nano.id,
        )
        if "kv" in entry.op.inputs:
            inputs.insert(entry.op.inputs.index("kv"), self.kv[entry.cache])
        outputs = ops.find_op(nano.op).jitted(_after(site, nano.op, self.awaited), *inputs)
        return outputs if len(entry.op.outputs) > 1 else (outputs,)

    def order(self, entry: LayerOp) -> None:
        """Make an entry, by its inputs, follow the entries that the plan issued before it."""
        first = [made for wait in entry.nano.waits for made in self.made.get(wait, [])]
        if entry.appends:
            first += self.readers.pop(entry.cache, [])
        first = [alive for made in first for alive in self.frontier(made)]
        lanes = [entry.nano.stream, "network"] if entry.is_collective else [entry.nano.stream]
        for before in (self.last[lane] for lane in lanes if lane in self.last):
            if not before.tokens.overlaps(entry.tokens):
                first += filter(self.is_alive, self.made[before.nano.id])
        inputs = [made for value in entry.reads for made in self.values.find(value, entry.tokens)]
        if self.overlaps and (entry.appends or (entry.nano.stream and not entry.attends)):
            first.append(self.zero)
        first = [made for made in first if not any(made.passed & other.behind for other in inputs)]
        if first:  # otherwise there is nothing to follow, or an earlier barrier keeps the order
            self.join([*first, *inputs])

    def join(self, slices: list[_Slice]) -> None:
        """Put a barrier: all later uses of one of the slices come after all of them exist."""
        slices = list({id(made): made for made in slices}.values())
        behind = functools.reduce(int.__or__, (made.behind for made in slices), 1 << self.barriers)
        for made, array in zip(slices, streams.together([made.array for made in slices]), strict=True):
            made.array, made.passed, made.behind = array, made.passed | 1 << self.barriers, behind
        self.barriers += 1

    def stream_after(self, final: tuple[Value, Value], tokens: int) -> Array:
        """Return the residual stream of all tokens after the last layer. final: the two terms of the
        stream."""
        everything = TokenRange(0, tokens)
        if self.c.axis is None or not any(entry.op.local_rows for entry in self.reads.entries):
            return self.values.read(final[0], everything) + added(self.values.read(final[1], everything))
        ranges = [made.tokens for made in self.values.find(final[1], everything)]
        sums = [self.values.read(final[0], some) + added(self.values.read(final[1], some)) for some in ranges]
        return jnp.concatenate([gather_rows(local, self.c.axis) for local in sums])

    def is_alive(self, made: _Slice) -> bool:
        """Return whether an entry will still read a slice: XLA drops unread arrays from barriers."""
        sent = any(made.value in entry.reads and entry.tokens.overlaps(made.tokens) for entry in self.pending)
        return sent or self.reads.later(self.at, made.value, made.tokens)

    def frontier(self, made: _Slice) -> list[_Slice]:
        """Return the slice or, if nothing will read it any more, the live slices that were made from it.

        Results of collectives are returned only where there are no others. An op that follows a result waits
        for the collective, and one live slice keeps the order.
        """
        if self.is_alive(made):
            return [made]
        found = [alive for follower in made.followers for alive in self.frontier(follower)]
        return [alive for alive in found if not alive.sent] or found

    def record(self, entry: LayerOp) -> None:
        """Record the outputs of an entry for the order of later entries."""
        outputs = [
            made for name in entry.makes for made in self.values.find((entry.layer, name), entry.tokens)
        ]
        for made in outputs:
            made.sent = entry.is_collective
        for made in (made for value in entry.reads for made in self.values.find(value, entry.tokens)):
            for follower in outputs:
                if follower is not made:
                    made.followers.append(follower)
                    follower.behind |= made.behind
        self.made[entry.nano.id] = outputs
        self.last["network" if entry.is_collective else entry.nano.stream] = entry
        if entry.attends:
            self.readers.setdefault(entry.cache, []).extend(outputs)


def _after(site: Site, name: str, awaited: list[Array]) -> Site:
    """Return the site with a small input of the op that depends on the awaited arrays (`streams.behind`).

    Only the ops that plans start with after a wait have such an input.
    """
    if name == "rope_append":
        assert site.batch is not None
        slots = streams.behind(awaited, site.batch.slots)
        return dataclasses.replace(site, batch=dataclasses.replace(site.batch, slots=slots))
    if name == "rope":
        assert site.batch is not None
        positions = streams.behind(awaited, site.batch.positions)
        return dataclasses.replace(site, batch=dataclasses.replace(site.batch, positions=positions))
    if name in ("attn_norm", "mlp_norm"):
        weight = streams.behind(awaited, ops.norm_weight(site.w, name))
        return dataclasses.replace(site, w={**site.w, name: weight})
    return dataclasses.replace(site, work=streams.behind(awaited, site.work))
