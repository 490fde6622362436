"""Plans written by hand, from the sequential plan to two nano-batches that overlap on streams."""

import msgspec

from jaxflow.config import ModelConfig
from jaxflow.model.graph import Graph, model_graph
from jaxflow.pipeline.plan import NanoOp, Plan, PlanError
from jaxflow.pipeline.program import ATTENTION


def sequential_plan(
    config: ModelConfig, tokens: int, tp: int = 1, scattered: bool = False, *, ranks: int = 1
) -> Plan:
    """Return the plain forward as a plan: every op over all tokens, in the graph's order.

    The scattered form has a name of its own. ranks: data-parallel ranks of `tp` devices each.
    """
    ops = _op_names(model_graph(config, tp, scattered=scattered, ranks=ranks))
    return Plan(
        "sequential, sums scattered" if scattered else "sequential",
        tokens,
        tuple(NanoOp(op, op, 0, tokens) for op in ops),
    )


def two_nano_batch_plan(
    config: ModelConfig, tokens: int, split: int, tp: int = 1, scattered: bool = False, *, ranks: int = 1
) -> Plan:
    """Return a plan where tokens [0, split) and [split, tokens) take turns on the main stream.

    Each half runs attention in one turn and its MLP in another. Under tensor parallelism one half's sum over
    devices is sent while the other half computes (NanoFlow §4.1). The reader of a sum therefore belongs to
    the next turn. In the scattered form the gather after a sum is issued before the last GEMM of the other
    half's turn, so that the gather overlaps with a GEMM too.

    Data-parallel ranks send the rows of one half, or its experts' outputs, while the other half computes. A
    half runs everything from `expert_combine` to `expert_dispatch` in one turn and its experts in another.
    """
    ranges, graph = _halves(tokens, split), model_graph(config, tp, scattered=scattered, ranks=ranks)
    names, network = _op_names(graph), _network(graph)
    form = "scatter" if scattered else "reduce"
    if "expert_dispatch" in names:
        last, middle = (1 + names.index(name) for name in ("expert_combine", "expert_dispatch"))
    else:
        last = len(names) if not network else 1 + names.index(f"mlp_{form}")
        middle = names.index(f"attn_{form}") + 1 if network else names.index("mlp_norm")
    attention = [(op, -1) for op in names[last:]] + [(op, 0) for op in names[:middle]]
    mlp = [(op, 0) for op in names[middle:last]]
    turns = [(i, turn) for turn in (attention, mlp) for i in (0, 1)]
    if scattered:
        turns = _gathering_early(turns)
    nano_ops = [NanoOp(f"{op}.{i}", op, *ranges[i], ahead=ahead) for i, turn in turns for op, ahead in turn]
    return Plan(f"two nano-batches, {split} + {tokens - split}", tokens, tuple(nano_ops))


def whole_experts_plan(config: ModelConfig, tokens: int, split: int, tp: int = 1, *, ranks: int) -> Plan:
    """Return a plan for data-parallel ranks with the experts over all tokens and all other ops in two halves.

    The halves are tokens [0, split) and [split, tokens). A device reads the weights of its experts once. The
    gather of the first half is sent while the second half attends, and the sums of the second half while the
    first half attends in the next layer. Nothing overlaps with the other gather and the other sums.

    The ranks must gather their tokens (`jaxflow.model.gathered_tokens`). `out_proj` waits for what is sent
    beside attention: XLA starts a collective late, so it would otherwise run beside the router.
    """
    ranges, names = _halves(tokens, split), _op_names(model_graph(config, tp, ranks=ranks))
    experts, combine = (names.index(name) for name in ("expert_up_gate", "expert_combine"))
    sent = ("expert_combine.1",), ("expert_dispatch.0",)
    turn = [(op, -1) for op in names[combine + 1 :]] + [(op, 0) for op in names[:experts]]
    nano_ops = [
        *(
            NanoOp(f"{op}.{i}", op, *ranges[i], ahead=ahead, waits=sent[i] if op == "out_proj" else ())
            for i in (0, 1)
            for op, ahead in turn
        ),
        *(NanoOp(op, op, 0, tokens) for op in names[experts:combine]),
        *(NanoOp(f"expert_combine.{i}", "expert_combine", *ranges[i]) for i in (0, 1)),
    ]
    return Plan(f"whole experts, {split} + {tokens - split}", tokens, tuple(nano_ops))


def _gathering_early(
    turns: list[tuple[int, list[tuple[str, int]]]],
) -> list[tuple[int, list[tuple[str, int]]]]:
    """Return the turns (half, [(op, ahead)]) with the gathers issued earlier.

    The ops of a turn up to its gather move before the last GEMM of the previous turn.
    """
    heads, tails = [], []
    for half, turn in turns:
        gathered = 1 + next(at for at, (op, _) in enumerate(turn) if op.endswith("_gather"))
        heads.append((half, turn[:gathered]))
        tails.append((half, turn[gathered:]))
    half, first = heads[0]
    heads.append((half, [(op, ahead + 1) for op, ahead in first]))  # the first turn of the next round
    found = []
    for (half, tail), following in zip(tails, heads[1:], strict=True):
        product = max(at for at, (op, _) in enumerate(tail) if op in _LAST_GEMMS)
        found += [(half, tail[:product]), following, (half, tail[product:])]
    return found


def gemms_in_two_plan(config: ModelConfig, tokens: int, split: int, tp: int) -> Plan:
    """Return a plan with attention over all tokens and all other ops in two halves.

    The halves are tokens [0, split) and [split, tokens). The first half's sum over devices overlaps with the
    same GEMM of the second half. The second half's sum overlaps with the first half's next op. Attention
    stays one kernel.
    """
    ranges, names = _halves(tokens, split), _op_names(model_graph(config, tp))
    out, norm, down = names.index("out_proj"), names.index("mlp_norm"), names.index("mlp_reduce") - 1

    def pieces(ops: tuple[str, ...], first: tuple[int, ...] = (0, 1)) -> list[NanoOp]:
        return [NanoOp(f"{op}.{i}", op, *ranges[i]) for i in first for op in ops]

    full = [NanoOp(op, op, 0, tokens) for op in ATTENTION[::-1]]
    blocks = (names[out:norm], names[norm:down], names[down:])
    head = pieces(tuple(op for op in names[:out] if op not in ATTENTION))
    nano_ops = (*head, *full, *(nano for block in blocks for nano in pieces(block)))
    return Plan(f"products in two, {split} + {tokens - split}", tokens, nano_ops)


def swapped(plan: Plan) -> Plan:
    """Return a plan over four devices with its sums sent by the copy engines in two exchanges.

    The first exchange sums within pairs of devices, the second between pairs. The second exchange is issued
    between a sum and its reader: before attention or before a block's last GEMM.
    """
    found, later = [], {}
    for at, nano in enumerate(plan.nano_ops):
        if nano.op.endswith("_reduce"):
            following = [*range(at + 1, len(plan.nano_ops)), *range(at)]
            to = next(
                i for i in following if plan.nano_ops[i].op in _AMID or _reads_sum(plan.nano_ops[i], nano)
            )
            amid = plan.nano_ops[to].op in _AMID
            later.setdefault(to if amid else at + 1, []).append(
                msgspec.structs.replace(nano, ahead=nano.ahead - (amid and to < at))
            )
    for at, nano in enumerate(plan.nano_ops):
        sent = {name: getattr(nano, name).replace("_reduce", "_swap") for name in ("id", "op")}
        found += [
            *later.pop(at, []),
            msgspec.structs.replace(nano, **sent) if nano.op.endswith("_reduce") else nano,
        ]
    nano_ops = (*found, *(nano for rest in later.values() for nano in rest))
    return msgspec.structs.replace(plan, name=f"{plan.name}, sums swapped", sums="copies", nano_ops=nano_ops)


_LAST_GEMMS = ("out_proj", "down", "expert_down", "shared_down")  # the last GEMM of a block is one of them
_AMID = ("chunk_attention", *_LAST_GEMMS[1:])


def _reads_sum(nano: NanoOp, sent: NanoOp) -> bool:
    return nano.op.endswith("_norm") and nano.start < sent.stop and sent.start < nano.stop


def waited(plan: Plan) -> Plan:
    """Return the plan with every reader of a sum over devices moved right behind the sum.

    Nothing then overlaps with a sum, which leaves the effect of the nano-batches only. The plan's sums must
    be read in the token ranges that they were made in.
    """
    order = list(plan.nano_ops)
    for sent in (nano for nano in plan.nano_ops if nano.op.endswith("_reduce")):
        at = order.index(sent)
        following = (*range(at + 1, len(order)), *range(at))
        reader = next(i for i in following if _reads_sum(order[i], sent))
        moved = order.pop(reader)
        earlier = reader < at  # in the next round
        order.insert(at + 1 - earlier, msgspec.structs.replace(moved, ahead=moved.ahead + earlier))
    return msgspec.structs.replace(plan, name=f"{plan.name}, waited for", nano_ops=tuple(order))


def copied(plan: Plan) -> Plan:
    """Return the plan with its sums over two devices sent by the copy engines."""
    return msgspec.structs.replace(plan, name=f"{plan.name}, sums copied", sums="copies")


def phased_plan(
    config: ModelConfig,
    tokens: int,
    split: int,
    tp: int = 1,
    sms: tuple[int, int] | None = None,
    scattered: bool = False,
) -> Plan:
    """Return a plan where one half's attention overlaps with the other half's GEMMs (NanoFlow's pipeline).

    A layer has two phases. A phase appends one half's keys on the main stream and runs the half's attention
    on stream 1. Stream 2 runs the other half from `out_proj` to the next layer's `qkv`. The next phase waits
    for both streams.

    sms: the SMs of attention, and of the GEMMs that overlap with it; None: all SMs for both.
    """
    graph, ranges = model_graph(config, tp, scattered=scattered), _halves(tokens, split)
    names = _op_names(graph)
    main = _network(graph) | {op.name for ops in graph.layers for op in ops if op.local_rows}
    tail = names[names.index("out_proj") :]
    head = names[: names.index("qkv") + 1]
    attention_sms, gemm_sms = sms or (None, None)

    def nano(op: str, half: int, **rest) -> NanoOp:
        return NanoOp(f"{op}.{half}", op, *ranges[half], **rest)

    def phase(half: int) -> list[NanoOp]:
        """Return the nano-ops of the phase that runs attention of `half`.

        The other half is one layer behind in the first phase of a layer, and in the same layer in the second.
        """
        other, behind = 1 - half, half - 1
        join = (f"decode_attention.{other}", f"chunk_attention.{other}", *(f"{op}.{half}" for op in head))
        append = [nano(op, half, waits=join) for op in _turning(names)]
        attention = [nano(op, half, stream=1, sms=attention_sms) for op in reversed(ATTENTION)]
        following = [(op, behind) for op in tail] + [(op, behind + 1) for op in head]
        side = {"stream": 2, "sms": gemm_sms}
        return [
            *append,
            *attention,
            *(nano(op, other, ahead=ahead, **({} if op in main else side)) for op, ahead in following),
        ]

    return Plan(f"two phases a layer, {split} + {tokens - split}", tokens, (*phase(0), *phase(1)))


def four_qkv_plan(
    config: ModelConfig, tokens: int, split: int, tp: int = 1, sms: tuple[int, int] | None = None
) -> Plan:
    """Return NanoFlow's pipeline of Llama-2-70B (§4.1.4, Figure 6): `qkv` in
    four nano-ops, other GEMMs in two.

    Tokens [0, split) and [split, tokens) are the two nano-batches. `qkv`, appends and decode attention cut
    each nano-batch in the middle. Decode attention of a quarter runs on stream 1, and the `qkv` of the next
    quarter on stream 2. After the last quarter, stream 2 runs chunk attention of the first nano-batch. The
    sum over devices of one nano-batch is sent while the other nano-batch computes.

    sms: the SMs of decode attention, and of the ops on stream 2; None: all SMs for both.
    """
    graph, halves = model_graph(config, tp), _halves(tokens, split)
    names, network = _op_names(graph), _network(graph)
    quarters = [
        cut for start, stop in halves for cut in ((start, (start + stop) // 2), ((start + stop) // 2, stop))
    ]
    if any(start == stop for start, stop in quarters):
        raise PlanError("split", f"{split} leaves a nano-batch of one token, which has no halves")
    attention_sms, other_sms = sms or (None, None)
    second = {"stream": 2, "sms": other_sms}
    last = len(names) if not network else 1 + names.index("mlp_reduce")
    middle = names.index("attn_reduce") + 1 if network else names.index("mlp_norm")
    head, before = names[last:], names[: names.index("qkv")]

    found: list[NanoOp] = []
    for i, cut in enumerate(quarters):
        if i % 2 == 0:
            half = i // 2
            found += [NanoOp(f"{op}.{half}", op, *halves[half], ahead=-1) for op in head]
            found += [NanoOp(f"{op}.{half}", op, *halves[half]) for op in before]
        found.append(NanoOp(f"qkv.{i}", "qkv", *cut, **(second if i > 0 else {})))
        found += [NanoOp(f"{op}.{i}", op, *cut) for op in _turning(names)]
        found.append(NanoOp(f"decode_attention.{i}", "decode_attention", *cut, stream=1, sms=attention_sms))
    for half, cut in enumerate(halves):
        side = second if half == 0 else {}
        found.append(NanoOp(f"chunk_attention.{half}", "chunk_attention", *cut, **side))
        found += [NanoOp(f"{op}.{half}", op, *cut) for op in names[names.index("out_proj") : middle]]
    for half, cut in enumerate(halves):
        found += [NanoOp(f"{op}.{half}", op, *cut) for op in names[middle:last]]
    return Plan(f"four qkv, {split} + {tokens - split}", tokens, tuple(found))


def _op_names(graph: Graph) -> tuple[str, ...]:
    """Return the op names of all kinds of layers, in an order that suits each kind."""
    names: list[str] = []
    for ops in graph.layers:
        at = 0
        for op in ops:
            if op.name in names:
                at = names.index(op.name) + 1
            else:
                names.insert(at, op.name)
                at += 1
    return tuple(names)


def _turning(names: tuple[str, ...]) -> list[str]:
    """Return the ops that rotate heads: in a layer with keys and values of its own, and in one without."""
    return [op for op in ("rope_append", "rope") if op in names]


def _network(graph: Graph) -> set[str]:
    return {op.name for ops in graph.layers for op in ops if op.kind == "network"}


def _halves(tokens: int, split: int) -> tuple[tuple[int, int], tuple[int, int]]:
    if not 0 < split < tokens:
        raise PlanError("split", f"{split} does not cut [0, {tokens}) in two: 1 to {tokens - 1}")
    return (0, split), (split, tokens)
