"""FlexGen's cost model (§4.3, A.3): seconds of a layer for a block, and the bytes that each tier must hold.

Every term is linear in the nine shares. The same code gives numbers for a policy and expressions for the
linear program. It supports any family through `jaxflow.model.graph`. Differences from the paper:

- The host's attention is a sixth term next to the device's compute, since they
  overlap. The paper adds the two.
- KV of new tokens crosses to its tier; with host attention, queries and outputs cross
  too. The paper leaves both out.
- Without host attention, KV that is not on the device crosses each step.
- Attention keeps no score matrix on the device, pinned weights need no second copy on the host, and the
  embedding and head stay on the device.
- A batch at a layer costs driver time in which the device waits, so small batches are not free.
- A product takes at least the time of reading its weights. 4-bit tensors are
  unpacked before use, for each batch.
- Where the runtime keeps KV in pages, full pages cross, with room for all tokens of a
  sequence, also beyond a window.
- In the diagonal schedule a pass over the layers has prompts of some batches and decodes of others. Both use
  one fetch of a layer, and their terms add up before the longest term is taken.
- A pipeline of m stages passes m micro-batches through its layers for each token (§4.4). A stage has the
  layers' m-th part, so the seconds are those of all layers for one micro-batch. The prompts wait until the
  stages are filled. The hand-over between stages takes no time. The links of all
  stages together have at most `Machine.all_links_per_s`.
- With top-k sparse values a decode loads all keys and the chosen rows of V; the host's memory gives the rows.
- Where the device is the host itself, compute and copies take turns, so these terms add up. So they do for 4
  bits in FlexGen's own runtime (`Machine.unpack_weights_per_s`).
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxflow.flexgen.block import diagonal_starts
from jaxflow.flexgen.policy import Policy
from search.placement.machine_curves import CURVES, Machine, TimeCurve
from search.placement.workload import BYTES, CrossingTokens, PlacementWorkload

TERMS = (
    "host to device",
    "device to host",
    "disk to host",
    "host to disk",
    "device compute",
    "host attention",
)


@dataclasses.dataclass(frozen=True)
class BlockChoice:
    """The part of a policy that is fixed before its shares are found."""

    gpu_batch_size: int
    num_gpu_batches: int
    weight_bits: int = 16
    kv_bits: int = 16
    host_attention: bool = False
    value_top_k_percent: float = 100.0
    schedule: str = "zigzag"
    pipeline_parallel_size: int = 1

    @property
    def sparse_values(self) -> bool:
        return self.value_top_k_percent < 100

    @property
    def block_size(self) -> int:
        return self.gpu_batch_size * self.num_gpu_batches * self.pipeline_parallel_size


@dataclasses.dataclass(frozen=True)
class TierShares:
    """The nine shares, 0 to 1, of device, host and disk: numbers, or variables of a program."""

    weights: Sequence[Any]
    kv: Sequence[Any]
    activations: Sequence[Any]


def _kinds(placed: TierShares) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    return placed.weights, placed.kv, placed.activations


def split(policy: Policy) -> tuple[BlockChoice, TierShares]:
    """Return a policy's choice and its shares."""
    choice = BlockChoice(
        policy.gpu_batch_size,
        policy.num_gpu_batches,
        policy.weight_bits,
        policy.kv_bits,
        policy.host_attention,
        policy.value_top_k_percent,
        policy.schedule,
        policy.pipeline_parallel_size,
    )
    shares = ([share / 100 for share in kind] for kind in (policy.weights, policy.kv, policy.activations))
    return choice, TierShares(*shares)


@dataclasses.dataclass(frozen=True)
class Passes:
    """A number of passes over the layers, each with the prompts and the decodes of some batches.

    In a pipeline of m stages a pass is the time in which a stage passes m micro-batches through its layers.
    """

    number: float
    prompts: int
    decodes: int


def passes(choice: BlockChoice, output_tokens: int, blocks: int | None = None) -> list[Passes]:
    """Return the passes of a run of `blocks` blocks of batches.

    None: one block; for the diagonal schedule, as many passes of a run without end as make a block's tokens.
    """
    batches = choice.num_gpu_batches
    if choice.schedule == "zigzag":
        # The last stage gets its first micro-batch when the first stage has done m - 1 of its m.
        filled = 2 - 1 / choice.pipeline_parallel_size
        return [
            Passes((blocks or 1) * filled, batches, 0),
            Passes((blocks or 1) * (output_tokens - 1), 0, batches),
        ]
    if blocks is None:
        prompts, more = divmod(batches, output_tokens)
        kinds = [(output_tokens - more, prompts), (more, prompts + 1)]
        return [Passes(number, count, batches - count) for number, count in kinds if number]
    starts = diagonal_starts(blocks * batches, output_tokens, batches)
    found = collections.Counter(
        (
            sum(start == one for start in starts),
            sum(start < one < start + output_tokens for start in starts),
        )
        for one in range(starts[-1] + output_tokens)
    )
    return [Passes(number, *kind) for kind, number in found.items()]


def pass_terms(
    work: PlacementWorkload, machine: Machine, choice: BlockChoice, placed: TierShares, one: Passes
) -> dict[str, Any]:
    """Return the seconds of one layer in a pass, by `TERMS`.

    Prompts and decodes share the layer's weights, and all stages the links of the machine.
    """
    machine = machine.shared_by(choice.pipeline_parallel_size)
    found: dict[str, Any] = dict.fromkeys(TERMS, 0.0)
    for batches, terms in ((one.prompts, prefill_terms), (one.decodes, decode_terms)):
        if batches:
            part = terms(work, machine, dataclasses.replace(choice, num_gpu_batches=batches), placed)
            found = {name: found[name] + part[name] for name in TERMS}
    if one.prompts and one.decodes:
        found["device compute"] -= _unpack_weights_once(work, machine, choice)
        weights = work.weights * work.bytes_of(choice.weight_bits)
        found[TERMS[0]] -= machine.host_to_device.seconds(weights) * (1 - placed.weights[0])
        found[TERMS[2]] -= machine.disk_to_host.seconds(weights) * placed.weights[2]
    return found


def prefill_terms(
    work: PlacementWorkload, machine: Machine, choice: BlockChoice, placed: TierShares
) -> dict[str, Any]:
    """Return T_pre's terms: seconds of one layer for the prompts of a block, by `TERMS`."""
    tokens = choice.gpu_batch_size * work.prompt_tokens
    pairs = 4 * work.query * work.prompt_pairs * choice.gpu_batch_size
    packed = _unpack_kv(
        work, machine, choice, choice.gpu_batch_size * work.keys(work.prompt_tokens) * work.kv
    )
    device = _products(work, machine, choice, tokens) + choice.num_gpu_batches * (
        machine.device_attention.seconds(pairs) + packed
    )
    return _terms(
        work, machine, choice, placed, tokens, device, 0.0, read=CrossingTokens(0.0, 0.0), written=work.made
    )


def decode_terms(
    work: PlacementWorkload, machine: Machine, choice: BlockChoice, placed: TierShares
) -> dict[str, Any]:
    """Return T_gen's terms: seconds of one layer for one token of each sequence, averaged over the output."""
    size, batches = choice.gpu_batch_size, choice.num_gpu_batches
    cached = size * work.mean_keys * work.kv
    host = 0.0
    if choice.host_attention:
        host = machine.host_attention.seconds(cached * _attended(work, choice) * work.wide_bytes)
    elif choice.sparse_values:  # the host collects the rows
        rows = size * work.top_rows(choice.value_top_k_percent).mean * work.kv / 2
        host = machine.host_attention.seconds(rows * work.bytes_of(choice.kv_bits))
    cached *= _attended(work, choice)
    attention = max(
        machine.device_attention.seconds(4 * work.query * work.mean_keys * size),
        machine.device_memory.seconds(cached * work.bytes_of(choice.kv_bits)),
    ) + _unpack_kv(work, machine, choice, cached)
    at_home = placed.kv[0] if choice.host_attention else 1.0  # attended to on the device
    device = _products(work, machine, choice, size) + batches * attention * at_home
    host = host * batches * (1 - placed.kv[0])
    return _terms(
        work, machine, choice, placed, size, device, host, read=work.read, written=CrossingTokens(1.0, 1.0)
    )


def _attended(work: PlacementWorkload, choice: BlockChoice) -> float:
    """Return the share of a decode's cached KV that attention reads: all, or
    the keys and the chosen V rows.
    """
    if not choice.sparse_values:
        return 1.0
    return (1 + work.top_rows(choice.value_top_k_percent).mean / work.mean_keys) / 2


def ends_s(work: PlacementWorkload, machine: Machine, choice: BlockChoice) -> float:
    """Return the seconds of the head for one token of each of a block's sequences, on the last stage."""
    elements = work.vocabulary * work.hidden
    product = machine.device_products.seconds(2 * elements * choice.gpu_batch_size)
    batches = choice.num_gpu_batches * choice.pipeline_parallel_size
    return batches * max(product, machine.device_memory.seconds(elements * work.wide_bytes))


def _terms(
    work: PlacementWorkload,
    machine: Machine,
    choice: BlockChoice,
    placed: TierShares,
    tokens: float,
    device: Any,
    host: Any,
    *,
    read: CrossingTokens,
    written: CrossingTokens,
) -> dict[str, Any]:
    """Return a layer's terms, by `TERMS`, for batches of `tokens`. read, written: KV tokens of a sequence."""
    weights, batches = work.weights * work.bytes_of(choice.weight_bits), choice.num_gpu_batches
    activation, kv = (
        tokens * work.hidden * work.wide_bytes,
        choice.gpu_batch_size * work.kv * work.bytes_of(choice.kv_bits),
    )
    on_host = choice.host_attention and read.link > 0
    crossing = tokens * work.query * work.wide_bytes if on_host else 0.0  # queries one way, outputs the other
    away_w, away_c, away_h = (1 - kind[0] for kind in _kinds(placed))
    disk_w, disk_c, disk_h = (kind[2] for kind in _kinds(placed))
    down, up, load, store = (
        machine.host_to_device,
        machine.device_to_host,
        machine.disk_to_host,
        machine.host_to_disk,
    )
    loaded = down.seconds(crossing) if on_host else down.seconds(read.link * kv)
    from_disk, asked = load.seconds(read.disk * kv), 0.0
    if choice.sparse_values and read.link > 0:  # all keys; then positions up, and chosen rows of V down
        top = work.top_rows(choice.value_top_k_percent)
        if not on_host:
            loaded = down.seconds(read.link * kv / 2) + down.seconds(top.room * kv / 2)
            asked = up.seconds(4 * choice.gpu_batch_size * work.kv_heads * top.room)
        # the host also reads the row of the new token, which is in the file by then
        from_disk = load.seconds(read.disk * kv / 2) + load.seconds((top.mean + on_host) * kv / 2)
    return dict(zip(TERMS, (
        down.seconds(weights) * away_w + batches * (loaded * away_c + down.seconds(activation) * away_h),
        batches * (
            (up.seconds(written.link * kv) + up.seconds(crossing) + asked) * away_c
            + up.seconds(activation) * away_h
        ),
        load.seconds(weights) * disk_w + batches * (from_disk * disk_c + load.seconds(activation) * disk_h),
        batches * (store.seconds(written.disk * kv) * disk_c + store.seconds(activation) * disk_h),
        device,
        host,
    ), strict=True))  # fmt: skip


def _products(work: PlacementWorkload, machine: Machine, choice: BlockChoice, tokens: float) -> float:
    """Return the seconds of a layer's products for all batches of a block, `tokens` each, with their launch.

    Each batch's program unpacks 4-bit weights, except with `Machine.unpack_weights_per_s`.
    """
    product = max(
        machine.device_products.seconds(work.linear_flops * tokens),
        machine.device_memory.seconds(work.weights * work.wide_bytes),
    )
    unpacked = (
        machine.device_memory.seconds(work.weights * (BYTES[4] + work.wide_bytes))
        if choice.weight_bits == 4 and machine.unpack_weights_per_s is None
        else 0.0
    )
    batches = choice.num_gpu_batches * (machine.batch_layer_s + product + unpacked)
    return batches + _unpack_weights_once(work, machine, choice)


def _unpack_weights_once(work: PlacementWorkload, machine: Machine, choice: BlockChoice) -> float:
    """Return the seconds in which all batches of a block wait for a layer's weights in 16 bits."""
    if choice.weight_bits == 16 or machine.unpack_weights_per_s is None:
        return 0.0
    return work.weights / machine.unpack_weights_per_s


def _unpack_kv(work: PlacementWorkload, machine: Machine, choice: BlockChoice, elements: float) -> float:
    """Return the seconds of conversion between 4 and 16 bits, in either direction."""
    return (
        machine.device_memory.seconds(elements * (BYTES[4] + work.wide_bytes)) if choice.kv_bits == 4 else 0.0
    )


def resources(machine: Machine, choice: BlockChoice, terms: dict[str, Any]) -> list[Any]:
    """Return the seconds of each resource that works at the same time; a layer takes the longest."""
    in_turns = machine.unpack_weights_per_s is not None and choice.weight_bits == 4
    if not (machine.one_processor or in_turns):
        return list(terms.values())
    disk = ("disk to host", "host to disk")
    return [sum(term for name, term in terms.items() if name not in disk), *(terms[name] for name in disk)]


def memory_bytes(work: PlacementWorkload, choice: BlockChoice, placed: TierShares) -> tuple[Any, Any, Any]:
    """Return the peak bytes on device, host and disk: resident tensors, and double buffers of crossing ones.

    The peak is over prefill and decode, with the prompts' activations and the KV of finished sequences. In a
    pipeline the bytes are those of each stage, which has the KV of all
    micro-batches and the activations of one.
    """
    size, block, stages = choice.gpu_batch_size, choice.block_size, choice.pipeline_parallel_size
    layers = work.layers / stages
    weights, kv = work.weights * work.bytes_of(choice.weight_bits), work.kv * work.bytes_of(choice.kv_bits)
    activation = work.prompt_tokens * work.hidden * work.wide_bytes
    totals = layers * weights, layers * block * work.kept_keys * kv, block / stages * activation
    homes = [
        sum(total * kind[tier] for total, kind in zip(totals, _kinds(placed), strict=True))
        for tier in range(3)
    ]
    away_w, away_c, away_h = (1 - kind[0] for kind in _kinds(placed))
    passing = (
        work.made.link if choice.host_attention else work.kept_keys
    )  # KV of a batch that the device ever holds
    if choice.sparse_values and not choice.host_attention:  # keys, and chosen rows of V
        passing = (work.kept_keys + work.top_rows(choice.value_top_k_percent).room) / 2
    working = (
        size * work.prompt_tokens * work.widest * work.wide_bytes
        + size * work.vocabulary * 4.0
        + work.ends * work.wide_bytes
    )
    working += work.weights * work.wide_bytes if choice.weight_bits == 4 else 0.0
    working += size * work.kept_keys * work.kv * work.wide_bytes if choice.kv_bits == 4 else 0.0
    device = (
        homes[0]
        + working
        + 2 * (weights * away_w + size * passing * kv * away_c + size * activation * away_h)
    )
    staged = (
        weights * placed.weights[2]
        + size * work.kept_keys * kv * placed.kv[2]
        + size * activation * placed.activations[2]
    )
    scores = (
        size * (work.heads * work.last_keys * 4.0 + 2 * work.query * work.wide_bytes) * away_c
        if choice.host_attention
        else 0.0
    )
    return device, homes[1] + 2 * staged + scores, homes[2]


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The predicted cost of a policy.

    `prefill`, `decode`: seconds of each term for a layer; of the diagonal schedule, in a pass with the most
    and with the fewest prompts. `link_s`: of the busier direction, for a full block.
    """

    latency_s: float
    prefill_s: float  # the part of latency_s until the first token
    tokens_per_s: float
    prefill: dict[str, float]
    decode: dict[str, float]
    memory_bytes: tuple[float, float, float]
    link_s: float

    def decode_tokens_per_s(self, output_tokens: int) -> float:
        """Return the throughput without the prompts and their tokens, as in FlexGen's Table 3."""
        tokens = self.tokens_per_s * self.latency_s * (1 - 1 / output_tokens)
        return tokens / (self.latency_s - self.prefill_s) if output_tokens > 1 else 0.0

    @property
    def binding(self) -> tuple[str, str]:
        """Return the longest term of prefill, and of decode."""
        return max(self.prefill, key=self.prefill.__getitem__), max(self.decode, key=self.decode.__getitem__)

    @property
    def link_tokens_per_s(self) -> float:
        """Return the throughput if only this policy's traffic between host and device took time."""
        return self.tokens_per_s * self.latency_s / self.link_s if self.link_s else float("inf")


def crossing_bytes(work: PlacementWorkload, policy: Policy, blocks: int = 1) -> dict[str, float]:
    """Return the bytes of a run over the link and the disk, each direction, by `TERMS`."""
    byte_a_second: dict[str, Any] = dict.fromkeys(CURVES, TimeCurve(0.0, 1.0))
    machine, (choice, placed) = Machine(name="bytes", method="", **byte_a_second), split(policy)
    micro_batches = choice.pipeline_parallel_size
    choice = dataclasses.replace(choice, pipeline_parallel_size=1)
    made = [
        (micro_batches * work.layers * one.number, pass_terms(work, machine, choice, placed, one))
        for one in passes(choice, work.output_tokens, blocks)
    ]
    return {term: sum(number * terms[term] for number, terms in made) for term in TERMS[:4]}


def predict(
    work: PlacementWorkload,
    machine: Machine,
    policy: Policy,
    *,
    overlap: bool = True,
    blocks: int | None = None,
) -> Prediction:
    """Return T = T_pre l + T_gen (n - 1) l, plus the head of n tokens; without overlap a layer's terms add
    up.

    `blocks`: as for `passes`. The times are then those of all blocks together.
    """
    choice, placed = split(policy)
    found = [
        (one, pass_terms(work, machine, choice, placed, one))
        for one in passes(choice, work.output_tokens, blocks)
    ]
    layers, ends = work.layers, ends_s(work, machine, choice)

    def layer_s(terms: dict[str, Any]) -> float:
        return max(resources(machine, choice, terms)) if overlap else sum(terms.values())

    blocks = blocks or 1
    latency = layers * sum(one.number * layer_s(terms) for one, terms in found)
    latency += blocks * work.output_tokens * ends
    tokens = blocks * choice.block_size * work.output_tokens
    link = layers * sum(one.number * max(terms[term] for term in TERMS[:2]) for one, terms in found)
    prefill = max(found, key=lambda one: one[0].prompts)[1]
    decode = min(found, key=lambda one: one[0].prompts)[1]
    filled = found[0][0].number / blocks if choice.schedule == "zigzag" else 1
    prompts = layers * filled * layer_s(prefill) + ends
    return Prediction(
        latency, prompts, tokens / latency, prefill, decode, memory_bytes(work, choice, placed), link
    )
