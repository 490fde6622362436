"""The ops of a step: names, what each reads and makes, and how much work it is.

This is where the plan compiler finds a layer's data dependences and where the cost model and the search find
FLOPs and bytes. Ops are named as in `jaxflow.model.ops`. Values are single-assignment within a layer: `x` is
the residual stream, `y` what a block adds to it, `h` a normed input, `kv` the layer's cache. A layer reads
the `x`, `y` and `kv` its neighbour and its last step left (the first layer has no `y`) and leaves
`Graph.leaves(i)`.

Under tensor parallelism a block's sum over devices has two forms. `…_reduce` gives every device all rows of
it. Scattered (Korthikanti et al. 2023), `…_scatter` gives each device the sum of its own rows, T / tp of
them; the residual stream and the norms stay on these, and the next block's `…_gather` brings what it reads,
in e4m3 where its products do, to all devices.

An op's work is *linear* in a few counts of the batch (`Composition`), so that a solver can use it as it
stands. All work is of one of the `tp` tensor-parallel devices.
"""

import dataclasses
import operator
from collections.abc import Iterable, Iterator
from typing import Literal

from jaxflow.config import ModelConfig
from jaxflow.model.composition import Composition, Count

Kind = Literal["dense", "attention", "network", "other"]  # NanoFlow §2.2


@dataclasses.dataclass(frozen=True)
class Work:
    """What an op asks of one device. KV and activation bytes are reads plus writes; network bytes are sent
    one way.
    """

    flops: float = 0.0
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    activation_bytes: float = 0.0
    network_bytes: float = 0.0

    @property
    def memory_bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes + self.activation_bytes

    def __add__(self, other: "Work") -> "Work":
        return Work(*map(operator.add, self._values(), other._values()))

    def __mul__(self, factor: float) -> "Work":
        return Work(*(value * factor for value in self._values()))

    def _values(self) -> tuple[float, ...]:
        return self.flops, self.weight_bytes, self.kv_bytes, self.activation_bytes, self.network_bytes


@dataclasses.dataclass(frozen=True)
class Op:
    """One op on one layer.

    inputs, outputs: names of values; `kv` is read and written in place.
    demand: (count, work per one of it) terms, whose sum is the op's work.
    window: keys a query of this layer sees at most.
    experts: (E, experts per token): the weight bytes are of all E; a step reads those that its tokens choose.
    local_rows: it works on each device's own rows of the step's tokens.
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
        """The work of this op in a step."""
        total = sum((each * step.count(what, self.window) for what, each in self.demand), Work())
        if self.experts:
            total = dataclasses.replace(
                total, weight_bytes=total.weight_bytes * self._touched(step) / self.experts[0]
            )
        return total

    def rows(self, step: Composition) -> float:
        """M of a dense op's matrix product (of each expert's, if there are several); 0 for other kinds."""
        if self.kind != "dense":
            return 0.0
        rows = next(step.count(what) for what, each in self.demand if each.flops)
        return rows * self.experts[1] / self._touched(step) if self.experts and rows else rows

    def _touched(self, step: Composition) -> float:
        """Expected number of distinct experts that the step's tokens choose, if they choose evenly."""
        assert self.experts
        number, chosen = self.experts
        return number * (1 - (1 - chosen / number) ** step.tokens)


@dataclasses.dataclass(frozen=True)
class Widths:
    """Bytes of one element."""

    weights: float = 2.0  # of the products that fp8 narrows: qkv, out_proj, up_gate, down
    kv: float = 2.0
    activations: float = 2.0
    wide_weights: float = 2.0  # of embeddings, the head, routers and experts


BFLOAT16 = Widths()
FP8 = Widths(weights=1.0, kv=1.0)


@dataclasses.dataclass(frozen=True)
class Graph:
    """The ops of a whole step, in an order that satisfies their dependences."""

    before: tuple[Op, ...]  # embed
    layers: tuple[tuple[Op, ...], ...]
    after: tuple[Op, ...]  # final_norm, logits, sample
    scattered: bool = False

    def ops(self) -> Iterator[Op]:
        """Every op of the step, in order."""
        yield from self.before
        for layer in self.layers:
            yield from layer
        yield from self.after

    def leaves(self, layer: int) -> tuple[str, str]:
        """The values of layer `layer` that its successor reads as `x` and `y`."""
        ops = self.layers[layer]
        return next(op.outputs[0] for op in ops if op.name == "mlp_norm"), ops[-1].outputs[0]

    def work(self, step: Composition) -> Work:
        """The whole step's work on one device."""
        return sum((op.work(step) for op in self.ops()), Work())


def dependences(ops: Iterable[Op]) -> dict[str, tuple[str, ...]]:
    """For each op of a layer, by name: the ops of the same layer whose outputs it reads."""
    maker: dict[str, str] = {}
    found = {}
    for op in ops:
        found[op.name] = tuple(dict.fromkeys(maker[value] for value in op.inputs if value in maker))
        maker.update(dict.fromkeys(op.outputs, op.name))
    return found


def padded_vocabulary(config: ModelConfig, tp: int) -> int:
    """Rows of the embedding and head tables: V rounded up to a multiple of 64 · tp."""
    return -(-config.vocab_size // (64 * tp)) * 64 * tp


def model_graph(
    config: ModelConfig,
    tp: int = 1,
    widths: Widths = BFLOAT16,
    *,
    scattered: bool = False,
    swapped: bool = False,
) -> Graph:
    """The ops that a model has, for one of `tp` tensor-parallel devices. scattered, swapped: the form of its
    sums over devices.

    Raises: ValueError for a scattered form on one device, and a swapped one on other numbers than four.
    """
    if scattered and tp == 1:
        raise ValueError("scattered=True: one device has no sums to scatter; tp is 1")
    if swapped and (tp != 4 or scattered):
        raise ValueError(f"swapped=True: sums over four devices in two steps, not scattered; tp is {tp}")
    layers = tuple(
        layer_ops(config, index, tp, widths, scattered, swapped) for index in range(config.num_layers)
    )
    return Graph(_first_ops(config, tp, widths), layers, _last_ops(config, tp, widths), scattered)


def layer_ops(
    config: ModelConfig,
    index: int,
    tp: int = 1,
    widths: Widths = BFLOAT16,
    scattered: bool = False,
    swapped: bool = False,
) -> tuple[Op, ...]:
    """The ops of layer `index`, in order."""
    experts = config.layers[index].experts
    reads, moved = (("x",), 3) if index == 0 else (("x", "y"), 4)
    ops = _block_head(config, "attn", reads, "1", moved, tp, widths, scattered)
    ops += _attention_ops(config, index, tp, widths)
    tail, y = _block_tail(config, "attn", "y1", tp, widths, scattered, swapped)
    ops += [*tail, *_block_head(config, "mlp", ("x1", y), "2", 4, tp, widths, scattered, wide=experts)]
    ops += _expert_ops(config, tp, widths) if experts else _mlp_ops(config, tp, widths)
    tail, _ = _block_tail(config, "mlp", "y2", tp, widths, scattered, swapped)
    return (*ops, *tail)


def _block_head(
    config: ModelConfig, block: str, reads: tuple[str, ...], number: str, moved: float, tp: int, widths: Widths, scattered: bool,
    wide: bool = False,
) -> list[Op]:  # fmt: skip
    """The norm that a block begins with, of `moved` rows read and written for each token. wide: e4m3 weights
    do not narrow its result.
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


def _attention_ops(config: ModelConfig, index: int, tp: int, widths: Widths) -> list[Op]:
    """The attention block's ops, from the normed input to the projection."""
    d, h, a = config.hidden_size, config.head_dim, widths.activations
    heads, kv_heads = (
        config.num_heads // tp,
        max(1, config.num_kv_heads // tp),
    )  # fewer kv heads than devices: copies
    window = config.layers[index].window
    cached = 2 * kv_heads * h * widths.kv  # bytes of a token's key and value
    return [
        _dense("qkv", ("h1",), ("qkv",), d, (heads + 2 * kv_heads) * h, widths),
        Op("rope_append", "other", ("qkv", "kv"), ("q", "kv"), (
            ("tokens", Work(6 * (heads + kv_heads) * h, kv_bytes=cached, activation_bytes=(2 * heads + 2 * kv_heads) * h * a)),
        )),
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


def _mlp_ops(config: ModelConfig, tp: int, widths: Widths) -> list[Op]:
    d, f = config.hidden_size, config.intermediate_size // tp
    columns = (
        2 * f if config.gated_mlp else f
    )  # gate and up are one product, and the activation is fused: f are written
    return [
        _dense("up_gate", ("h2",), ("a",), d, columns, widths, written=f),
        _dense("down", ("a",), ("y2",), f, d, widths),
    ]


def _expert_ops(config: ModelConfig, tp: int, widths: Widths) -> list[Op]:
    d, f, a = config.hidden_size, config.expert_intermediate_size // tp, widths.activations
    experts = (number, chosen) = config.num_experts, config.experts_per_token
    moved = Work(activation_bytes=(d + chosen * f) * a)

    def grouped(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], elements: int) -> Op:
        weights = Work(weight_bytes=number * elements * widths.wide_weights)
        return Op(
            name,
            "dense",
            inputs,
            outputs,
            (("step", weights), ("tokens", moved + Work(2 * chosen * elements))),
            experts=experts,
        )

    return [
        _dense(
            "router",
            ("h2",),
            ("routing",),
            d,
            number,
            dataclasses.replace(widths, weights=widths.wide_weights),
        ),
        grouped("expert_up_gate", ("h2", "routing"), ("a",), d * 2 * f),
        grouped("expert_down", ("a", "routing"), ("y2",), f * d),
    ]


def _block_tail(
    config: ModelConfig, block: str, y: str, tp: int, widths: Widths, scattered: bool, swapped: bool
) -> tuple[list[Op], str]:
    """What follows a block's last product: the sum over devices, Gemma's norm. Returns them and the block's
    last value.

    Swapped, a device adds its partner's part to its own, and then the other pair's sum: twice a whole part is
    sent.
    """
    d, a, ops = config.hidden_size, widths.activations, []
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
                2 * d * a / share,
                local_rows=scattered,
            )
        )
        y = f"{y}_norm"
    return ops, y


def _first_ops(config: ModelConfig, tp: int, widths: Widths) -> tuple[Op, ...]:
    d, a = config.hidden_size, widths.activations
    tables = 1 if config.learned_position_offset is None else 1 + tp  # every device has all learned positions
    work = Work(weight_bytes=d * tables / tp * widths.wide_weights, activation_bytes=d * a)
    if tp > 1:  # the vocabulary-parallel table sums over devices inside the op
        work += _ring(2 * d * a, tp, adds=d)
    return (Op("embed", "other", ("token_ids",), ("x",), (("tokens", work),)),)


def _last_ops(config: ModelConfig, tp: int, widths: Widths) -> tuple[Op, ...]:
    """Only the rows that sample pass here. Logits are float32."""
    d, vocab = config.hidden_size, padded_vocabulary(config, tp)
    head = Work(2 * d * vocab / tp, activation_bytes=d * widths.activations + 4 * vocab)
    if tp > 1:  # the vocabulary's shares are gathered inside the op
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
    """A product of [T, k] with a weight [n, k]; `written` columns leave the op (None: all n)."""
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
    """A collective whose full data movement would be `moved` bytes a device: a ring keeps 1 / tp of it at
    home (NanoFlow §3.2).
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
