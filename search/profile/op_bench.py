"""Programs that run one op, or two concurrent ops, many times on random data, for `search.profile.measure`.

The ops are those of `jaxflow.model.ops` on the device's kernels. An op is called in a loop on the device, on
several sets of inputs and weights in turn, so neither the host nor the L2 cache is timed. Results stay in
place from call to call.
"""

import copy
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from jaxflow.config import ModelConfig, check_has_heads
from jaxflow.kv.device_cache import page_groups
from jaxflow.model import ops
from jaxflow.model.batch import Batch, cache_slots
from jaxflow.model.composition import Composition
from jaxflow.model.graph import Op, Widths, Work, layer_ops, model_graph, padded_vocabulary
from jaxflow.model.op_registry import Context, Site
from jaxflow.model.routing import Routing
from jaxflow.model.weights import expert_width, shapes
from jaxflow.pipeline import streams
from pallas_kernels.kernel_set import KernelSet
from search.profile.op_times import ATTENTION, EXCHANGE


@dataclasses.dataclass(frozen=True)
class TimedProgram:
    """A function (given, kept) -> kept that makes `calls` calls. `given` and `kept` hold shapes, filled by
    `draw`.

    sharding: of all arrays, where the program runs on several devices.
    """

    function: Callable[[Any, Any], Any]
    given: Any
    kept: Any
    calls: int
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sharding: NamedSharding | None = None

    def compile(self) -> Any:
        """Compile the program for the present devices."""
        donated = () if self.kept is None else (1,)
        return jax.jit(self.function, donate_argnums=donated).lower(*self.structs).compile(dict(self.options))

    def drawn(self, experts: int) -> tuple[Any, Any]:
        """Return random arrays for `given` and `kept`."""
        pair = draw(self.given, experts), draw(self.kept, experts, seed=1)
        return pair if self.sharding is None else jax.device_put(pair, self.sharding)

    @property
    def structs(self) -> tuple[Any, Any]:
        """Return the shapes of both arguments with their shardings."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharding), (self.given, self.kept)
        )


def draw(tree: Any, experts: int = 1, seed: int = 0) -> Any:
    """Return random arrays of the shapes in a tree, roughly normal. Integers are experts' numbers.

    Present arrays are copied, since a program may donate each of its arguments once.
    """
    leaves, form = jax.tree.flatten(tree)
    seeds = np.random.SeedSequence(seed).generate_state(max(1, len(leaves)))
    return jax.tree.unflatten(
        form,
        [
            jnp.copy(x) if isinstance(x, jax.Array) else _draw(seeds[i], x.shape, x.dtype, experts)
            for i, x in enumerate(leaves)
        ],
    )


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _draw(seed: jax.Array, shape: tuple[int, ...], dtype: Any, experts: int) -> jax.Array:
    x = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape) + seed
    # A hash compiles faster than jax.random and needs less memory.
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        x = (x ^ (x >> 16)) * np.uint32(factor)
    x = x ^ (x >> 16)
    if jnp.issubdtype(dtype, jnp.integer):
        return (x % experts).astype(dtype)
    drawn = (
        sum((((x >> shift) & 255).astype(jnp.float32) for shift in (0, 8, 16, 24)), jnp.float32(0)) - 510
    ) / 148
    return (1 + drawn / 16 if len(shape) <= 1 else drawn).astype(dtype)  # norms and scales are near 1


PAGE_SIZE = 64
PHASES = 12  # joins of the two streams in a program of pairs
_COLD_BYTES = 256 << 20  # weights read in turn on a GPU: several times its L2
_MOST_CACHE_BYTES = 8 << 30  # beyond this size rows share pages, with no effect on the L2
_BODY_S, _MOST_CALLS = 3e-4, 32  # seconds of a loop's body on a GPU, and its most calls
_GUESSED_RATES = {
    "gpu": (4e14, 3e12, 5e-3),
    "cpu": (5e10, 1e10, 2e-3),
}  # FLOP/s, bytes/s, seconds that a program should last


@dataclasses.dataclass(frozen=True)
class OpCase:
    """One op on `tokens` tokens. keys: attention's mean context, else 0. sms: the SM limit; None: all."""

    op: str
    tokens: int
    keys: int = 0
    sms: int | None = None

    @property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """Return (tokens, position of the first) of prefill chunks, in the fewest chunks of that context."""
        if self.op != "chunk_attention":
            return ((self.tokens, 0),)
        pieces = max(1, math.ceil(self.tokens / (2 * self.keys)) if self.keys else 1)
        edges = [self.tokens * i // pieces for i in range(pieces + 1)]
        return tuple((b - a, max(0, self.keys - (b - a) // 2)) for a, b in itertools.pairwise(edges))

    @property
    def composition(self) -> Composition:
        if self.op == "chunk_attention":
            return Composition(chunks=self.chunks)
        return Composition(decode_tokens=self.tokens, decode_keys=self.keys or 1)


def one_shard(config: ModelConfig, tp: int) -> ModelConfig:
    """Return a one-device model with the layers of a shard of one of `tp` devices."""
    return dataclasses.replace(
        config,
        num_heads=config.num_heads // tp,
        num_kv_heads=max(1, config.num_kv_heads // tp),
        intermediate_size=config.intermediate_size // tp,
        expert_intermediate_size=expert_width(config.expert_intermediate_size, tp) // tp,
        shared_expert_intermediate_size=config.shared_expert_intermediate_size // tp,
    )


class LayerBench:
    """One layer of a model: its ops, and the shapes of its weights and of the inputs of each op.

    tp: the layer is one device's shard. `ops` then holds both forms of the collectives, and on two or four
    devices an exchange.

    Raises: ConfigError for devices that the model cannot be split over, and for latent attention.
    """

    def __init__(
        self,
        config: ModelConfig,
        kernels: KernelSet,
        *,
        dtype: Any,
        kv_dtype: Any,
        fp8: bool,
        platform: str,
        tp: int = 1,
    ):
        check_has_heads(config, "a profile")
        whole = [i for i, layer in enumerate(config.layers) if layer.window is None]
        config = dataclasses.replace(config, layers=(config.layers[whole[-1] if whole else -1],))
        self.kernels, self.dtype, self.kv_dtype, self.platform, self.tp = (
            kernels,
            jnp.dtype(dtype),
            jnp.dtype(kv_dtype),
            platform,
            tp,
        )
        options = {"quantization": "fp8" if fp8 else None, "kv_scales": self.kv_dtype == jnp.float8_e4m3fn}
        shapes(config, tp, self.dtype, **options)  # refuses a model that cannot be split
        self.config = one_shard(config, tp)
        self.weights: dict[str, Any] = shapes(self.config, 1, self.dtype, **options)["layers"][0]
        widths = Widths(
            1.0 if fp8 else self.dtype.itemsize,
            self.kv_dtype.itemsize,
            self.dtype.itemsize,
            self.dtype.itemsize,
        )
        forms = (True, False) if tp > 1 else (False,)
        self.ops: dict[str, Op] = {
            op.name: op for form in forms for op in layer_ops(config, 0, tp, widths, form)
        }
        if tp in (2, 4):
            sent = config.hidden_size * self.dtype.itemsize
            self.ops[EXCHANGE] = Op(
                EXCHANGE,
                "network",
                ("y1",),
                (),
                (("tokens", Work(activation_bytes=2 * sent, network_bytes=sent)),),
            )

    def head(self) -> "LayerBench":
        """Return a bench whose one op is `logits`, on one device. Its tokens are the rows that sample."""
        found, columns = copy.copy(self), padded_vocabulary(self.config, 1)
        found.ops = {op.name: op for op in model_graph(self.config, 1).after if op.name == "logits"}
        found.weights = {"lm_head": jax.ShapeDtypeStruct((columns, self.config.hidden_size), self.dtype)}
        return found

    def context(self, sms: int | None = None) -> Context:
        return Context(self.config, self.kernels, sms=sms)

    def inputs(self, op: str, tokens: int) -> tuple[Any, ...]:
        """Return the shapes of the arrays that an op reads, without cache and weights."""
        c, w = self.context(), self.weights
        stream = jax.ShapeDtypeStruct((tokens, self.config.hidden_size), self.dtype)
        heads = jax.ShapeDtypeStruct((tokens, self.config.num_heads, self.config.head_dim), self.dtype)
        match op:
            case "attn_norm" | "mlp_norm":
                return stream, stream
            case (
                "logits"
                | "post_attn_norm"
                | "post_mlp_norm"
                | "attn_reduce"
                | "mlp_reduce"
                | "attn_scatter"
                | "mlp_scatter"
                | "exchange"
            ):
                return (stream,)
            case "attn_gather" | "mlp_gather":
                return self.inputs("qkv" if op == "attn_gather" else "up_gate", tokens // self.tp)
            case "decode_attention" | "chunk_attention" | "out_proj":
                return (heads,)
            case "qkv":
                return (jax.eval_shape(lambda w, x: ops.attn_norm(Site(c, w), x, x)[1], w, stream),)
            case "rope_append":
                return (jax.eval_shape(lambda w, h: ops.qkv(Site(c, w), h), w, *self.inputs("qkv", tokens)),)
            case "up_gate" | "router" | "shared_up_gate":
                return (jax.eval_shape(lambda w, x: ops.mlp_norm(Site(c, w), x, x)[1], w, stream),)
            case "down":
                return (
                    jax.eval_shape(
                        lambda w, h: ops.up_gate(Site(c, w), h), w, *self.inputs("up_gate", tokens)
                    ),
                )
            case "shared_down":
                up = lambda w, h: ops.shared_up_gate(Site(c, w), h)
                return jax.eval_shape(up, w, *self.inputs("shared_up_gate", tokens)), stream
            case "expert_up_gate" | "expert_down":
                routing = self.routing(tokens)
                if op == "expert_up_gate":
                    return stream, routing
                made = jax.eval_shape(lambda w, h: ops.expert_up_gate(Site(c, w), h, routing), w, stream)
                # The rows are drawn, and the groups are real.
                listed = jax.jit(self.kernels.list_groups, static_argnums=1)
                return dataclasses.replace(
                    made, groups=listed(routing.experts, self.config.num_experts)
                ), routing
            case _:
                raise ValueError(f"op={op!r}: {', '.join(self.ops)} are this layer's")

    def routing(self, tokens: int) -> Routing:
        """Return a routing of `tokens` tokens to experts that are drawn evenly."""
        rng, number = np.random.default_rng(tokens), self.config.num_experts
        chosen = np.argsort(rng.random((tokens, number)), axis=1)[:, : self.config.experts_per_token]
        experts = jnp.asarray(chosen, jnp.int32)
        weights = jnp.full(experts.shape, 1 / experts.shape[1], jnp.float32)
        return Routing(experts, weights)

    def work(self, case: OpCase, batch: Batch, kv: Any) -> Any:
        """Return the work list of attention, which the engine builds once a step; None for other ops."""
        if case.op not in ATTENTION:
            return None
        return ops.attention_work(
            self.context(case.sms), self.config.layers[0], batch, 0, batch.num_tokens, case.op, kv
        )

    def call(
        self, op: str, w: Any, batch: Batch, inputs: tuple[Any, ...], kv: Any, work: Any = None, *, c: Context
    ) -> Any:
        """Call an op on its inputs; rope_append also returns the cache."""
        layer, tokens = self.config.layers[0], batch.num_tokens
        w = (
            self.weights | w
        )  # an op may need the form of other weights: a norm quantises for the next product
        cache = (kv,) if op == "rope_append" or op in ATTENTION else ()
        return ops.find_op(op)(Site(c, w, layer, batch, 0, tokens, work), *inputs, *cache)

    def cache(self, pages: int) -> Any:
        """Return the shapes of a cache of this many pages."""
        return page_groups(self.config, self.kv_dtype, 1)[0].shapes(pages, PAGE_SIZE)[0]

    def pages(self, case: OpCase, most_keys: int) -> tuple[int, int, int]:
        """Return (rows of the page table, its columns, pages) of a case with
        contexts of up to `most_keys`.
        """
        rows, longest = case.tokens, most_keys
        if case.op != "decode_attention":
            rows, longest = (
                len(case.chunks),
                max(size + start for size, start in case.chunks) + max(0, most_keys - case.keys),
            )
        columns = max(1, -(-longest // PAGE_SIZE))
        a_page = sum(math.prod(part.shape) * part.dtype.itemsize for part in jax.tree.leaves(self.cache(1)))
        return rows, columns, max(columns, min(rows * columns, _MOST_CACHE_BYTES // a_page))

    def batch(self, case: OpCase, most_keys: int | None = None) -> Batch:
        """Return the tokens of a case, in random pages.

        most_keys: the page table's room; None: the case's.
        """
        rows, columns, pages = self.pages(case, most_keys or case.keys)
        t, at = (
            case.tokens,
            np.random.default_rng(0).permutation(rows * columns).reshape(1, rows, columns) % pages,
        )
        chunks = np.zeros((max(1, len(case.chunks)), 4), np.int32)
        lengths, positions, owners = (
            np.full(rows, case.keys, np.int32),
            np.full(t, max(0, case.keys - 1)),
            np.arange(t),
        )
        if case.op != "decode_attention":
            first = 0
            for row, (size, start) in enumerate(case.chunks):
                chunks[row] = first, size, row, start
                lengths[row], owners[first : first + size] = start + size, row
                positions[first : first + size] = np.arange(start, start + size)
                first += size
        decodes = t if case.op == "decode_attention" else t // 2 if case.op == "out_proj" else 0
        table, places = jnp.asarray(at, jnp.int32), jnp.asarray(positions, jnp.int32)
        return Batch(
            token_ids=jnp.zeros(t, jnp.int32),
            positions=places,
            slots=cache_slots(table, jnp.asarray(owners, jnp.int32), places, PAGE_SIZE),
            page_table=table,
            lengths=jnp.asarray(lengths),
            num_decodes=jnp.int32(decodes),
            chunks=jnp.asarray(chunks),
            sample_tokens=jnp.zeros(rows, jnp.int32),
        )

    def alone(self, case: OpCase) -> TimedProgram:
        """Return a program that calls a case in a loop."""
        c, (_, _, pages) = self.context(case.sms), self.pages(case, case.keys)
        batch, inputs, weights = self.batch(case), self.inputs(case.op, case.tokens), self.read(case.op)
        copies = self.copies(weights)
        appends, attends = case.op == "rope_append", self.ops[case.op].kind == "attention"
        kv = self.cache(pages) if appends or attends else None
        call = jax.jit(
            functools.partial(self.call, case.op, c=c)
        )  # jitted, so that all calls share one lowering
        outputs = jax.eval_shape(lambda w, x, kv: call(w, batch, x, kv), weights, inputs, kv)
        turns, rounds = self.rounds(case, copies)

        def function(given: Any, kept: Any) -> Any:
            work = self.work(case, given["batch"], given["kv"])

            def body(_: Any, kept: Any) -> Any:
                inputs, made, several = kept["inputs"], kept["made"], []
                for _ in range(turns):
                    made = [
                        call(w, given["batch"], x, before[1] if appends else given["kv"], work)
                        for w, x, before in zip(given["weights"], inputs, made, strict=False)
                    ]
                    # The next inputs come with all that was made, and the loop keeps it: else XLA sees that
                    # turns are equal, and does one.
                    several = made if appends else [*several, *made]
                    inputs, several = streams.together([inputs, several])
                    made = several
                return {"inputs": inputs, "made": several}

            return lax.fori_loop(0, rounds, body, kept)

        given = {"batch": batch, "weights": [weights] * copies, "kv": None if appends else kv}
        made = [outputs] * (copies if appends else copies * turns)
        return TimedProgram(
            function, given, {"inputs": [inputs] * copies, "made": made}, copies * turns * rounds
        )

    def concurrent(self, first: OpCase, second: OpCase, most_keys: int, phases: int = PHASES) -> TimedProgram:
        """Return a program of products on stream 2 and attention on stream 1, joined after each call of
        both.

        Attention's batch is data.
        """
        batch, own = self.batch(second, most_keys), self.batch(first)
        weights, attention = self.read(first.op), self.read(second.op)
        copies = min(phases, self.copies(weights))
        # Jitted, although regions inline the call: an op traced once is lowered once and, byte for byte the
        # same, compiled once.
        call_first = jax.jit(functools.partial(self.call, first.op, kv=None, c=self.context(first.sms)))
        call_second = jax.jit(functools.partial(self.call, second.op, c=self.context(second.sms)))

        def function(given: Any, kept: None) -> Any:
            work, made = self.work(second, given["batch"], given["kv"]), []
            x, q = given["inputs"], given["queries"]
            for phase in range(phases):
                w = given["weights"][phase % copies]
                leaves, tree = jax.tree.flatten((x, q))
                # A join holds the later reads, so every result is passed to the end.
                joined = streams.together([*leaves, *made])
                (x, q), made = jax.tree.unflatten(tree, joined[: len(leaves)]), joined[len(leaves) :]
                attend = functools.partial(
                    call_second, given["attention"], given["batch"], q, given["kv"], work
                )
                product = functools.partial(call_first, w, given["own"], x)
                # A region makes one array: of a quantised result the values, with which the scales come.
                made = [
                    *made,
                    streams.region(1, attend),
                    streams.region(2, lambda product=product: jax.tree.leaves(product())[0]),
                ]
            return made

        given = {
            "batch": batch,
            "own": own,
            "weights": [weights] * copies,
            "attention": attention,
            "inputs": self.inputs(first.op, first.tokens),
            "queries": self.inputs(second.op, second.tokens),
            "kv": self.cache(self.pages(second, most_keys)[2]),
        }
        options = (
            streams.xla_options("concurrent", side_streams=True, collectives=False)
            if self.platform == "gpu"
            else {}
        )
        return TimedProgram(function, given, None, phases, options)

    def read(self, op: str) -> dict[str, Any]:
        """Return the weights that an op may read: its own, and those of no product."""
        products = {name for name in self.weights if name in self.ops and self.ops[name].kind == "dense"}
        return {name: leaf for name, leaf in self.weights.items() if name == op or name not in products}

    def copies(self, weights: Any) -> int:
        """Return the number of sets of weights and inputs to use in turn."""
        if self.platform != "gpu":
            return 1
        size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights))
        return min(8, max(2, -(-_COLD_BYTES // max(1, size)))) if size > _COLD_BYTES // 64 else 2

    def rounds(self, case: OpCase, copies: int) -> tuple[int, int]:
        """Return the passes over the sets in the loop's body, and the rounds of the loop; a round costs a
        GPU microseconds.
        """
        flops, moved, lasting = _GUESSED_RATES.get(self.platform, _GUESSED_RATES["cpu"])
        work = self.ops[case.op].work(case.composition)
        turn = copies * (2e-6 + max(work.flops / flops, work.memory_bytes / moved))
        turns = max(1, min(_MOST_CALLS // copies, round(_BODY_S / turn))) if self.platform == "gpu" else 1
        return turns, min(256, max(1, round(lasting / turn / turns)))
