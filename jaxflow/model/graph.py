"""The ops of a step: their names, inputs, outputs and work.

The plan compiler reads a layer's data dependences here, and the cost model and the search read FLOPs and
bytes. Ops are named as in `jaxflow.model.ops`. Values are single-assignment within a layer: `x` is the
residual stream, `y` the sum that a block adds to x, `h` a normed input, `kv` the layer's cache. A layer reads
the `x` and `y` of the previous layer, and the `kv` of its previous step; the first layer has no `y`. A layer
leaves `Graph.leaves(i)`. Where layers have embeddings of their own, a layer reads its own as `layer_input`.
A layer that shares keys and values reads the `kv` of the layer `Graph.caches[i]` and writes none.

Data-parallel ranks have tokens of their own and share the experts. `expert_dispatch` brings the rows of their
tokens to the devices of the experts, and `expert_combine` brings the outputs back. Between both ops the rows
of some tokens are not the rows of a subset of these tokens. Both ops and the products of experts have the
work of the device with the most pairs of a token and an expert (`SharedExperts`).

Under tensor parallelism a block's sum over devices has two forms. `…_reduce` gives every device all rows of
the sum. In the scattered form (Korthikanti et al. 2023), `…_scatter` gives each device the sum of its local
rows, T / tp rows. The residual stream and the norms stay on local rows. The next block's `…_gather` gives all
devices the rows that the block reads, in e4m3 where its GEMMs read e4m3.

An op's work is linear in a few counts of the batch (`Composition`), so that a solver can use it directly. All
work is that of one of the `tp` tensor-parallel devices.
"""

import dataclasses
import operator
from collections.abc import Iterable, Iterator
from typing import Literal

from jaxflow.config import Latent, ModelConfig
from jaxflow.model.composition import Composition, Count
from jaxflow.model.gathered_tokens import ranks_gather
from pallas_kernels.quantized import BLOCK, BLOCK_ROWS, MXFP4_GROUP

Kind = Literal["dense", "attention", "network", "other"]  # NanoFlow §2.2
WORD = 4  # bytes of an expert's number, of its weight and of a count of rows


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of an op on one device. KV and activation bytes are reads plus writes.

    Network bytes are the bytes sent in one direction.
    """

    flops: float = 0.0
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    activation_bytes: float = 0.0
    network_bytes: float = 0.0

    @property
    def memory_bytes(self) -> float:
        """Return the bytes that device memory reads and writes."""
        return self.weight_bytes + self.kv_bytes + self.activation_bytes

    def __add__(self, other: "Work") -> "Work":
        return Work(*map(operator.add, self._values(), other._values()))

    def __mul__(self, factor: float) -> "Work":
        return Work(*(value * factor for value in self._values()))

    def _values(self) -> tuple[float, ...]:
        return self.flops, self.weight_bytes, self.kv_bytes, self.activation_bytes, self.network_bytes


@dataclasses.dataclass(frozen=True)
class Op:
    """One op of one layer.

    inputs, outputs: names of values. `kv` is read and written in place. demand: (count, work per unit of the
    count) terms. The op's work is their sum. window: the largest number of keys that a query of this layer
    reads. experts: (E, experts per token). The weight bytes are those of all E; a step reads those that its
    tokens choose. local_rows: whether the op works on each device's local rows of the step's tokens.
    """

    name: str
    kind: Kind
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    demand: tuple[tuple[Count, Work], ...]
    window: int | None = None
    experts: tuple[int, int] | None = None
    local_rows: bool = False

    def work(self, step: Composition) -> Work:
        """Return the work of this op in a step."""
        # Plain sums: a simulation asks for millions, and a `Work` for each term would take most of its time.
        flops = weights = kv = activations = network = 0.0
        for what, each in self.demand:
            count = step.count(what, self.window)
            flops += each.flops * count
            weights += each.weight_bytes * count
            kv += each.kv_bytes * count
            activations += each.activation_bytes * count
            network += each.network_bytes * count
        if self.experts:
            weights = weights * self._touched(step) / self.experts[0]
        return Work(flops, weights, kv, activations, network)

    def rows(self, step: Composition) -> float:
        """Return M of a dense op's GEMM, or of each expert's GEMM; 0 for other kinds."""
        if self.kind != "dense":
            return 0.0
        rows = next(step.count(what) for what, each in self.demand if each.flops)
        return rows * self.experts[1] / self._touched(step) if self.experts and rows else rows

    def _touched(self, step: Composition) -> float:
        """Return the expected number of distinct experts of a step, if tokens choose experts evenly."""
        assert self.experts
        number, chosen = self.experts
        return number * (1 - (1 - chosen / number) ** step.tokens)


@dataclasses.dataclass(frozen=True)
class Widths:
    """Bytes of one element."""

    weights: float = 2.0  # of the GEMMs that fp8 affects: qkv, out_proj, up_gate, down
    kv: float = 2.0
    activations: float = 2.0
    wide_weights: float = 2.0  # embeddings, the head, routers and shared experts, which are never fp8
    expert_weights: float | None = None  # experts with a format of their own

    @property
    def experts(self) -> float:
        """Return the bytes of an element of the experts."""
        return self.weights if self.expert_weights is None else self.expert_weights


BFLOAT16 = Widths()
MXFP4 = Widths(expert_weights=1 / 2 + 1 / MXFP4_GROUP)  # a scale is a byte
# A scale has 4 bytes. Matrices of partial blocks, which have 16 bits, are few.
FP8_BLOCKS = Widths(weights=1 + 4 / (BLOCK_ROWS * BLOCK), expert_weights=1 + 4 / (BLOCK_ROWS * BLOCK))
# The quantizations that give experts a format of their own.
EXPERT_WIDTHS = {"mxfp4": MXFP4, "fp8_per_block": FP8_BLOCKS}
FP8 = Widths(weights=1.0, kv=1.0)


@dataclasses.dataclass(frozen=True)
class SharedExperts:
    """The balance of devices that share the experts of a layer, and the bytes that they send.

    slots: of all devices. Each has an expert or a copy. None: one for each expert. balance: the mean number
    of pairs of a device over the largest. sent_bytes, returned_bytes: of an element on its way to the
    expert's device and back. None: the bytes of other activations.
    """

    slots: int | None = None
    balance: float = 1.0
    sent_bytes: float | None = None
    returned_bytes: float | None = None


EVEN = SharedExperts()


@dataclasses.dataclass(frozen=True)
class Graph:
    """The ops of a step, in an order that satisfies their dependences.

    gathers: whether data-parallel ranks gather their tokens in a mixture layer.
    """

    before: tuple[Op, ...]  # embed
    layers: tuple[tuple[Op, ...], ...]
    after: tuple[Op, ...]  # final_norm, logits, sample
    caches: tuple[int, ...]  # the layer whose keys and values each layer reads
    scattered: bool = False
    gathers: bool = False

    def ops(self) -> Iterator[Op]:
        """Yield every op of the step, in order."""
        yield from self.before
        for layer in self.layers:
            yield from layer
        yield from self.after

    def leaves(self, layer: int) -> tuple[str, str]:
        """Return the values of a layer that its successor reads as `x` and `y`."""
        ops = self.layers[layer]
        adding = [op for op in ops if op.name in ("mlp_norm", "layer_gate")]
        return adding[-1].outputs[0], ops[-1].outputs[0]

    def work(self, step: Composition) -> Work:
        """Return the work of the full step on one device."""
        return sum((op.work(step) for op in self.ops()), Work())


def dependences(ops: Iterable[Op]) -> dict[str, tuple[str, ...]]:
    """Return, for each op of a layer by name, the ops of the same layer that make its inputs."""
    maker: dict[str, str] = {}
    found = {}
    for op in ops:
        found[op.name] = tuple(dict.fromkeys(maker[value] for value in op.inputs if value in maker))
        maker.update(dict.fromkeys(op.outputs, op.name))
    return found


def padded_vocabulary(config: ModelConfig, tp: int) -> int:
    """Return the rows of the embedding and head tables: V rounded up to a multiple of 64 · tp."""
    return -(-config.vocab_size // (64 * tp)) * 64 * tp


def model_graph(
    config: ModelConfig,
    tp: int = 1,
    widths: Widths = BFLOAT16,
    *,
    scattered: bool = False,
    swapped: bool = False,
    ranks: int = 1,
    shared: SharedExperts = EVEN,
    by_head: bool = False,
) -> Graph:
    """Return the ops of a model, for one of `tp` tensor-parallel devices.

    scattered, swapped: the form of the sums over devices; all-reduces if both are False.
    ranks: data-parallel ranks of `tp` devices each, which share the experts.
    shared: how all devices share them.
    by_head: whether the chunks of latent attention run with keys and values by head; other models have no
    such form.

    Raises: ValueError for the scattered form on one device, and the swapped form on other numbers than four.
    """
    if scattered and tp == 1:
        raise ValueError("scattered=True: tp of 2 or more is accepted, and tp is 1")
    if swapped and (tp != 4 or scattered):
        raise ValueError(f"swapped=True: tp of 4 and scattered=False are accepted; tp is {tp}")
    layers = tuple(
        layer_ops(config, index, tp, widths, scattered, swapped, ranks=ranks, shared=shared, by_head=by_head)
        for index in range(config.num_layers)
    )
    first, last = _first_ops(config, tp, widths), _last_ops(config, tp, widths)
    caches = tuple(map(config.cache_of, range(config.num_layers)))
    gathers = ranks > 1 and ranks_gather(ranks, tp, config.experts_per_token)
    return Graph(first, layers, last, caches, scattered, gathers)


def layer_ops(
    config: ModelConfig,
    index: int,
    tp: int = 1,
    widths: Widths = BFLOAT16,
    scattered: bool = False,
    swapped: bool = False,
    *,
    ranks: int = 1,
    shared: SharedExperts = EVEN,
    by_head: bool = False,
) -> tuple[Op, ...]:
    """Return the ops of layer `index`, in order. Arguments: see `model_graph`."""
    experts = config.layers[index].experts
    reads, moved = (("x",), 3) if index == 0 else (("x", "y"), 4)
    ops = _block_head(config, "attn", reads, "1", moved, tp, widths, scattered)
    ops += _attention_ops(config, index, tp, widths, by_head)
    tail, y = _block_tail(config, "attn", "y1", tp, widths, scattered, swapped)
    ops += [*tail, *_block_head(config, "mlp", ("x1", y), "2", 4, tp, widths, scattered, wide=experts)]
    own = config.for_layer(config.layers[index])
    ops += _expert_ops(config, tp, widths, ranks, shared) if experts else _mlp_ops(own, tp, widths)
    sums = 2 if experts and config.branch_norms else 1
    tail, y = _block_tail(config, "mlp", "y2", tp, widths, scattered, swapped, sums)
    if config.layer_input_size:
        tail += _layer_input_ops(config, y, tp if scattered else 1, widths, scattered)
    return (*ops, *tail)


def _block_head(
    config: ModelConfig, block: str, reads: tuple[str, ...], number: str, moved: float, tp: int,
    widths: Widths, scattered: bool, wide: bool = False,
) -> list[Op]:  # fmt: skip
    """Return the norm that a block begins with.

    moved: the rows that the norm reads and writes per token. wide: whether the norm's result is 16-bit
    although weights are e4m3.
    """
    d, a = config.hidden_size, widths.activations
    if not scattered:
        return [_pointwise(f"{block}_norm", reads, (f"x{number}", f"h{number}"), 5 * d, moved * d * a)]
    local = f"h{number}_local"
    norm = _pointwise(
        f"{block}_norm", reads, (f"x{number}", local), 5 * d / tp, moved * d * a / tp, local_rows=True
    )
    sent = 1.0 if widths.weights == 1.0 and not wide else a
    return [norm, _collective(f"{block}_gather", (local,), (f"h{number}",), "tokens", d * sent, tp, adds=0)]


def _attention_ops(config: ModelConfig, index: int, tp: int, widths: Widths, by_head: bool) -> list[Op]:
    """Return the attention block's ops, from the normed input to the projection."""
    if config.latent is not None:
        ops = _latent_ops(config, config.latent, tp, widths)
        return _chunks_by_head(config, config.latent, tp, widths, ops) if by_head else ops
    config = config.for_layer(config.layers[index])
    d, h, a = config.hidden_size, config.head_dim, widths.activations
    heads, kv_heads = (
        config.num_heads // tp,
        max(1, config.num_kv_heads // tp),
    )  # devices beyond the number of KV heads hold copies
    window = config.layers[index].window
    cached = 2 * kv_heads * h * widths.kv  # bytes of a token's key and value
    made = 0 if config.layers[index].shares_kv else kv_heads  # heads that get a key and a value
    turn = Work(
        6 * (heads + made) * h,
        kv_bytes=cached if made else 0.0,
        activation_bytes=(2 * heads + 2 * made) * h * a,
    )
    heads_op = (
        Op("rope_append", "other", ("qkv", "kv"), ("q", "kv"), (("tokens", turn),))
        if made
        else Op("rope", "other", ("qkv",), ("q",), (("tokens", turn),))
    )
    return [
        _dense("qkv", ("h1",), ("qkv",), d, (heads + 2 * made) * h, widths),
        heads_op,
        Op("chunk_attention", "attention", ("q", "kv"), ("o_chunk",), (
            ("chunk_pairs", Work(4 * heads * h)),
            ("chunk_keys", Work(kv_bytes=cached)),
            ("chunk_tokens", Work(activation_bytes=2 * heads * h * a)),
        ), window),
        Op("decode_attention", "attention", ("q", "kv"), ("o_decode",), (
            ("decode_keys", Work(4 * heads * h, kv_bytes=cached)),
            ("decode_tokens", Work(activation_bytes=2 * heads * h * a)),
        ), window),
        _dense("out_proj", ("o_decode", "o_chunk"), ("y1",), heads * h, d, widths),
    ]  # fmt: skip


def _latent_ops(config: ModelConfig, latent: Latent, tp: int, widths: Widths) -> list[Op]:
    """Return the ops of latent attention, whose queries and outputs are as wide as the latent vector.

    Every device makes, keeps and reads the latent vector of all tokens.
    """
    d, a, heads = config.hidden_size, widths.activations, config.num_heads // tp
    stored, rank = latent.rank + latent.rope_dim, latent.rank
    cached = stored * widths.kv
    down, up = d * (latent.query_rank + stored), latent.query_rank * heads * config.head_dim
    absorbed, restored = heads * latent.plain_dim * rank, heads * latent.value_dim * rank
    query, out = heads * stored, heads * rank
    projected = heads * config.head_dim + stored
    score = Work(2 * (query + out))

    def weights(elements: int) -> Work:
        return Work(weight_bytes=elements * widths.wide_weights)

    return [
        Op("qkv", "dense", ("h1",), ("qkv",), (
            ("step", weights(down + up)),
            ("tokens", Work(2 * (down + up), activation_bytes=(d + 2 * latent.query_rank + projected) * a)),
        )),
        Op("rope_append", "other", ("qkv", "kv"), ("q", "kv"), (
            ("step", weights(absorbed)),
            ("tokens", Work(2 * absorbed, kv_bytes=cached, activation_bytes=(projected + query) * a)),
        )),
        Op("chunk_attention", "attention", ("q", "kv"), ("o_chunk",), (
            ("chunk_pairs", score),
            ("chunk_keys", Work(kv_bytes=cached)),
            ("chunk_tokens", Work(activation_bytes=(query + out) * a)),
        )),
        Op("decode_attention", "attention", ("q", "kv"), ("o_decode",), (
            ("decode_keys", score + Work(kv_bytes=cached)),
            ("decode_tokens", Work(activation_bytes=(query + out) * a)),
        )),
        Op("out_proj", "dense", ("o_decode", "o_chunk"), ("y1",), (
            ("step", weights(restored + heads * latent.value_dim * d)),
            ("tokens", Work(
                2 * (restored + heads * latent.value_dim * d),
                activation_bytes=(out + 2 * heads * latent.value_dim + d) * a,
            )),
        )),
    ]  # fmt: skip


def _chunks_by_head(config: ModelConfig, latent: Latent, tp: int, widths: Widths, ops: list[Op]) -> list[Op]:
    """Return the ops of latent attention whose chunks run with keys and values by head.

    A step makes the keys and the values of all tokens that its chunks read. Only decodes have absorbed
    queries and outputs, which decode attention makes. It also reads the matrices for both.
    """
    d, a, heads = config.hidden_size, widths.activations, config.num_heads // tp
    stored, made = latent.rank + latent.rope_dim, heads * (latent.plain_dim + latent.value_dim)
    query, out = heads * config.head_dim, heads * latent.value_dim
    cached, ups = stored * widths.kv, Work(weight_bytes=made * latent.rank * widths.wide_weights)
    absorbed = next(op for op in ops if op.name == "decode_attention")
    demands: dict[str, tuple[tuple[Count, Work], ...]] = {
        "rope_append": (("tokens", Work(kv_bytes=cached, activation_bytes=(2 * query + stored) * a)),),
        "chunk_attention": (
            ("chunk_pairs", Work(2 * (query + out))),
            # The products write the keys and values, and attention reads them.
            ("chunk_keys", Work(2 * made * latent.rank, kv_bytes=cached, activation_bytes=2 * made * a)),
            ("chunk_tokens", Work(activation_bytes=(query + out) * a)),
        ),
        "decode_attention": (
            *absorbed.demand,
            ("step", ups),
            ("decode_tokens", Work(2 * made * latent.rank, activation_bytes=(query + out) * a)),
        ),
        "out_proj": (
            ("step", Work(weight_bytes=out * d * widths.wide_weights)),
            ("tokens", Work(2 * out * d, activation_bytes=(out + d) * a)),
        ),
    }
    return [dataclasses.replace(op, demand=demands.get(op.name, op.demand)) for op in ops]


def _mlp_ops(config: ModelConfig, tp: int, widths: Widths) -> list[Op]:
    d, f = config.hidden_size, config.intermediate_size // tp
    columns = (
        2 * f if config.gated_mlp else f
    )  # gate and up are one GEMM with a fused activation, which writes f columns
    return [
        _dense("up_gate", ("h2",), ("a",), d, columns, widths, written=f),
        _dense("down", ("a",), ("y2",), f, d, widths),
    ]


def _layer_input_ops(config: ModelConfig, y: str, share: int, widths: Widths, local_rows: bool) -> list[Op]:
    """Return the ops that add a layer's input to the residual stream.

    Every device has the whole weights. share: the devices that the step's tokens are spread over.
    """
    d, p, a = config.hidden_size, config.layer_input_size, widths.activations
    step = ("step", Work(weight_bytes=d * p * widths.wide_weights))

    def product(moved: float) -> tuple[tuple[Count, Work], ...]:
        return step, ("tokens", Work(2 * d * p / share, activation_bytes=moved * a / share))

    gate = Op(
        "layer_gate", "dense", ("x2", y, "layer_input"), ("x3", "gated"), product(3 * d + 2 * p),
        local_rows=local_rows,
    )  # fmt: skip
    proj = Op("layer_proj", "dense", ("gated",), ("y3",), product(p + d), local_rows=local_rows)
    moved = 2 * d * a / share
    return [
        gate,
        proj,
        _pointwise("post_layer_norm", ("y3",), ("y3_norm",), 4 * d / share, moved, local_rows=local_rows),
    ]


def _expert_ops(config: ModelConfig, tp: int, widths: Widths, ranks: int, shared: SharedExperts) -> list[Op]:
    d, f, a = config.hidden_size, config.expert_intermediate_size // tp, widths.activations
    always = config.shared_expert_intermediate_size // tp  # columns of the expert that all tokens meet
    routed, wide = "y2_routed" if always else "y2", dataclasses.replace(widths, weights=widths.wide_weights)
    experts = (number, chosen) = config.num_experts, config.experts_per_token
    slots = number if shared.slots is None else shared.slots
    moved = Work(activation_bytes=(d + chosen * f) * a)

    def grouped(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], elements: int) -> Op:
        weights = Work(weight_bytes=slots / ranks * elements * widths.experts)
        rows = (moved + Work(2 * chosen * elements)) * (1 / shared.balance)
        return Op(name, "dense", inputs, outputs, (("step", weights), ("tokens", rows)), experts=experts)

    dispatch, combine = (
        _exchange_ops(config, tp, widths, ranks, shared, slots, routed) if ranks > 1 else ([], [])
    )
    ops = [
        _dense("router", ("h2",), ("routing",), d, number, wide),
        *dispatch,
        grouped("expert_up_gate", ("h2_sent" if dispatch else "h2", "routing"), ("expert_rows",), d * 2 * f),
        grouped("expert_down", ("expert_rows", "routing"), ("y2_sent" if combine else routed,), f * d),
        *combine,
    ]
    if always:  # the sum of the routed experts is read and added to
        written = (3 if config.branch_norms else 2) * d
        down = _dense("shared_down", ("a_shared", routed), ("y2",), always, d, wide, written=written)
        ops += [_dense("shared_up_gate", ("h2",), ("a_shared",), d, 2 * always, wide, written=always), down]
    return ops


def _exchange_ops(
    config: ModelConfig, tp: int, widths: Widths, ranks: int, shared: SharedExperts, slots: int, routed: str
) -> tuple[list[Op], list[Op]]:
    """Return the ops that bring the rows of a rank's tokens to the experts, and the outputs back.

    A gather sends a row of each token to each other rank, with the token's experts and their weights. An
    exchange sends a row of each pair, after the counts of rows for each slot. The device with the most pairs
    has more of these rows than the mean by the balance. Reads and writes of memory take less time than the
    network, and are not counted.
    """
    others, chosen = ranks - 1, config.experts_per_token
    sent, returned = (
        config.hidden_size * (widths.activations if each is None else each)
        for each in (shared.sent_bytes, shared.returned_bytes)
    )
    if ranks_gather(ranks, tp, chosen):
        counted, there, back = 0.0, others * (sent + 2 * chosen * WORD), others * returned
    else:
        rows = chosen * others / ranks
        counted = others * WORD * slots
        there, back = rows * sent / shared.balance, rows * returned / shared.balance

    def op(name: str, read: str, made: str, of_step: float, of_token: float) -> Op:
        work: tuple[tuple[Count, Work], ...] = (
            ("step", Work(network_bytes=of_step)),
            ("tokens", Work(network_bytes=of_token)),
        )
        return Op(name, "network", (read, "routing"), (made,), work)

    return (
        [op("expert_dispatch", "h2", "h2_sent", counted, there)],
        [op("expert_combine", "y2_sent", routed, 0.0, back)],
    )


def _block_tail(
    config: ModelConfig, block: str, y: str, tp: int, widths: Widths, scattered: bool, swapped: bool,
    sums: int = 1,
) -> tuple[list[Op], str]:  # fmt: skip
    """Return the ops after a block's last GEMM, and the name of the block's last value.

    sums: the values of D columns side by side that are summed over devices and normed.

    The ops are the sum over devices and Gemma's norm. In the swapped form a device adds its partner's partial
    sum, and then the other pair's sum. It sends a full partial sum twice.
    """
    d, a, ops = sums * config.hidden_size, widths.activations, []
    if swapped:
        step = Work(d, activation_bytes=3 * d * a, network_bytes=d * a)
        ops += [
            Op(f"{block}_swap", "network", (y,), (f"{y}_swap",), (("tokens", step),)),
            Op(f"{block}_reduce", "network", (f"{y}_swap",), (f"{y}_sum",), (("tokens", step),)),
        ]
        y = f"{y}_sum"
    elif tp > 1:
        name, moved = (f"{block}_scatter", d * a) if scattered else (f"{block}_reduce", 2 * d * a)
        ops.append(_collective(name, (y,), (f"{y}_sum",), "tokens", moved, tp, adds=d))
        y = f"{y}_sum"
    if config.post_norms:
        share = tp if scattered else 1
        ops.append(
            _pointwise(
                f"post_{block}_norm",
                (y,),
                (f"{y}_norm",),
                4 * d / share,
                (d + config.hidden_size) * a / share,
                local_rows=scattered,
            )
        )
        y = f"{y}_norm"
    return ops, y


def _first_ops(config: ModelConfig, tp: int, widths: Widths) -> tuple[Op, ...]:
    d, a = config.hidden_size, widths.activations
    tables = 1 if config.learned_position_offset is None else 1 + tp  # learned positions are replicated
    work = Work(weight_bytes=d * tables / tp * widths.wide_weights, activation_bytes=d * a)
    if tp > 1:  # the op sums the vocabulary-parallel lookup over devices
        work += _ring(2 * d * a, tp, adds=d)
    embed = Op("embed", "other", ("token_ids",), ("x",), (("tokens", work),))
    return (embed, _layer_embed(config, tp, widths)) if config.layer_input_size else (embed,)


def _layer_embed(config: ModelConfig, tp: int, widths: Widths) -> Op:
    """Return the op that makes the input of each layer: a row of a table and a product with the embedding.

    The rows of the table are spread over the devices. Every device has the whole weight of the product.
    """
    d, columns, a = config.hidden_size, config.num_layers * config.layer_input_size, widths.activations
    row = Work(
        2 * d * columns + 8 * columns,
        weight_bytes=columns / tp * widths.wide_weights,
        activation_bytes=(d + 3 * columns) * a,
    )
    if tp > 1:
        row += _ring(2 * columns * a, tp, adds=columns)
    step = Work(weight_bytes=d * columns * widths.wide_weights)
    return Op("layer_embed", "dense", ("token_ids", "x"), ("layer_input",), (("step", step), ("tokens", row)))


def _last_ops(config: ModelConfig, tp: int, widths: Widths) -> tuple[Op, ...]:
    """Return the ops after the layers. Only the rows that sample pass here. Logits are float32."""
    d, vocab = config.hidden_size, padded_vocabulary(config, tp)
    head = Work(2 * d * vocab / tp, activation_bytes=d * widths.activations + 4 * vocab)
    if tp > 1:  # the op gathers the vocabulary's shards
        head += _ring(4 * vocab, tp, adds=0)
    table = Work(weight_bytes=d * vocab / tp * widths.wide_weights)
    return (
        Op(
            "final_norm",
            "other",
            ("x", "y"),
            ("hidden",),
            (("samples", Work(5 * d, activation_bytes=3 * d * widths.activations)),),
        ),
        Op("logits", "dense", ("hidden",), ("scores",), (("step", table), ("samples", head))),
        Op(
            "sample",
            "other",
            ("scores",),
            ("tokens",),
            (("samples", Work(4 * vocab, activation_bytes=4 * vocab)),),
        ),
    )


def _dense(
    name: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    k: int,
    n: int,
    widths: Widths,
    written: int | None = None,
) -> Op:
    """Return a GEMM of [T, k] with a weight [n, k]. written: the columns of the output; None for n."""
    moved = (k + (n if written is None else written)) * widths.activations
    step = Work(weight_bytes=k * n * widths.weights)
    return Op(
        name, "dense", inputs, outputs, (("step", step), ("tokens", Work(2 * k * n, activation_bytes=moved)))
    )


def _pointwise(
    name: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    flops: float,
    moved: float,
    local_rows: bool = False,
) -> Op:
    return Op(
        name,
        "other",
        inputs,
        outputs,
        (("tokens", Work(flops, activation_bytes=moved)),),
        local_rows=local_rows,
    )


def _ring(moved: float, tp: int, adds: float) -> Work:
    """Return the work of a ring collective (NanoFlow §3.2).

    moved: the full data movement per device in bytes, of which 1 / tp stays on the device.
    """
    share = (tp - 1) / tp
    return Work(adds * share, activation_bytes=moved * share, network_bytes=moved * share)


def _collective(
    name: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    what: Count,
    moved: float,
    tp: int,
    adds: float,
) -> Op:
    return Op(name, "network", inputs, outputs, ((what, _ring(moved, tp, adds)),))
