"""FlexGen's cost model (§4.3, A.3): seconds of a layer for a block, and the bytes that each tier must hold, for any policy.

Every term is linear in the nine shares, and the same code gives numbers for a policy and expressions for the linear program.
It is written for any family through `jaxflow.model.graph`. Where it departs from the paper's text:

- the host's attention is a sixth term beside the device's compute, since they overlap (the paper adds the two);
- KV of new tokens crosses to its home, and with host attention queries and outputs cross too (the paper leaves both out);
- without host attention, KV that is not on the device crosses each step;
- attention keeps no matrix of scores on the device, pinned weights need no second copy on the host, and the embedding and
  head stay on the device;
- a product takes at least as long as reading its weights; 4-bit tensors are unpacked before use, by the device's memory, for each batch;
- where the runtime keeps KV in pages, whole pages cross, with room for all tokens of a sequence and beyond a window too;
- where the device is the host itself, what both compute and copy takes turns: these terms add up.
"""

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from jaxflow.config import ModelConfig
from jaxflow.model.composition import Composition
from jaxflow.model.graph import Widths, model_graph, padded_vocabulary
from jaxflow.offload.policy import Policy
from search.machine_curves import Machine

BYTES = {16: 2.0, 4: 0.5 + 4 / 64}  # of an element; a group of 64 has a scale and a minimum of 2 bytes each
TERMS = ("host to device", "device to host", "disk to host", "host to disk", "device compute", "host attention")


@dataclasses.dataclass(frozen=True)
class Workload:
    """Sizes of a mean layer, in elements or FLOPs, and what is asked of the model."""

    model: str
    layers: int
    hidden: int  # elements of a token's activation
    query: int  # elements of a token's queries, and of its attention's output
    heads: int
    kv: int  # elements of a token's key and value
    weights: float
    linear_flops: float  # of a token
    widest: int  # elements of a token's largest product, input and output
    windows: tuple[tuple[int | None, int], ...]  # and how many layers have each
    ends: float  # elements of the embedding and the head
    vocabulary: int
    prompt_tokens: int
    output_tokens: int
    wide_bytes: float = BYTES[16]  # of an element of "16 bits": 4 where the model runs in float32
    page_size: int | None = None  # tokens; None: the paper's count, token by token

    def bytes_of(self, bits: int) -> float:
        """Of an element that is stored in so many bits."""
        return BYTES[bits] if bits == 4 else self.wide_bytes

    def keys(self, tokens: float) -> float:
        """Keys that a mean layer keeps of a sequence of so many tokens."""
        return sum(count * (tokens if window is None else min(tokens, window)) for window, count in self.windows) / self.layers

    @functools.cached_property
    def prompt_pairs(self) -> float:
        """Query-key pairs of a prompt, causal."""
        chunk = Composition(chunks=((self.prompt_tokens, 0),))
        return sum(count * chunk.count("chunk_pairs", window) for window, count in self.windows) / self.layers

    @functools.cached_property
    def last_keys(self) -> float:
        return self.keys(self.prompt_tokens + self.output_tokens)

    @functools.cached_property
    def kept_keys(self) -> float:
        """For which a sequence has memory at a layer: all tokens but the last, in whole pages."""
        return self.last_keys if self.page_size is None else self._paged(self.prompt_tokens + self.output_tokens - 1)

    @functools.cached_property
    def made(self) -> "Crossing":
        """Keys that a prompt's KV takes home."""
        return Crossing(*(self.keys(self.prompt_tokens),) * 2) if self.page_size is None else Crossing(self.kept_keys, self._prompt_pages)

    @functools.cached_property
    def read(self) -> "Crossing":
        """Keys that a decode brings, over the output. A file has the prompt's pages, and behind them a record a token."""
        if self.page_size is None:
            return Crossing(self.mean_keys, self.mean_keys)
        return Crossing(self.kept_keys, self._prompt_pages + (self.output_tokens - 2) / 2)

    @property
    def _prompt_pages(self) -> float:
        return self._paged(self.prompt_tokens)

    def _paged(self, tokens: int) -> float:
        assert self.page_size is not None
        return float(-(-tokens // self.page_size) * self.page_size)

    @functools.cached_property
    def mean_keys(self) -> float:
        """Of a decode, over the output: the paper's s + n / 2."""
        return self.keys(self.prompt_tokens + self.output_tokens / 2)


@dataclasses.dataclass(frozen=True)
class Crossing:
    """Keys of a sequence that cross the link to the device, or between disk and host."""

    link: float
    disk: float


def workload(
    name: str, config: ModelConfig, prompt_tokens: int, output_tokens: int, *, wide_bytes: float = BYTES[16], page_size: int | None = None
) -> Workload:
    """Reads the sizes off the model's graph; what differs between layers is averaged."""
    graph = model_graph(config, 1, Widths(weights=1.0, wide_weights=1.0))
    many, one = Composition(decode_tokens=1e9, decode_keys=1), Composition(decode_tokens=1, decode_keys=1)
    ops = [op for layer in graph.layers for op in layer]
    width = max(config.intermediate_size, config.experts_per_token * config.expert_intermediate_size)
    fused = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return Workload(
        model=name,
        layers=config.num_layers,
        hidden=config.hidden_size,
        query=config.num_heads * config.head_dim,
        heads=config.num_heads,
        kv=2 * config.num_kv_heads * config.head_dim,
        weights=sum(op.work(many).weight_bytes for op in ops) / config.num_layers,
        linear_flops=sum(op.work(one).flops for op in ops if op.kind == "dense") / config.num_layers,
        widest=config.hidden_size + max(width, fused),
        windows=tuple(collections.Counter(layer.window for layer in config.layers).items()),
        ends=padded_vocabulary(config, 1) * config.hidden_size * (1 if config.tie_word_embeddings else 2),
        vocabulary=padded_vocabulary(config, 1),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        wide_bytes=wide_bytes,
        page_size=page_size,
    )


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a policy fixes before its shares are found."""

    gpu_batch_size: int
    num_gpu_batches: int
    weight_bits: int = 16
    kv_bits: int = 16
    host_attention: bool = False

    @property
    def block_size(self) -> int:
        return self.gpu_batch_size * self.num_gpu_batches


@dataclasses.dataclass(frozen=True)
class Placed:
    """The nine shares, 0 to 1, device, host and disk: numbers, or variables of a program."""

    weights: Sequence[Any]
    kv: Sequence[Any]
    activations: Sequence[Any]


def _kinds(placed: Placed) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    return placed.weights, placed.kv, placed.activations


def split(policy: Policy) -> tuple[Choice, Placed]:
    """A policy's two halves."""
    choice = Choice(policy.gpu_batch_size, policy.num_gpu_batches, policy.weight_bits, policy.kv_bits, policy.host_attention)
    shares = ([share / 100 for share in kind] for kind in (policy.weights, policy.kv, policy.activations))
    return choice, Placed(*shares)


def prefill_terms(work: Workload, machine: Machine, choice: Choice, placed: Placed) -> dict[str, Any]:
    """T_pre's terms: seconds of one layer for the prompts of a block, by `TERMS`."""
    tokens = choice.gpu_batch_size * work.prompt_tokens
    pairs = 4 * work.query * work.prompt_pairs * choice.gpu_batch_size
    packed = _unpack_kv(work, machine, choice, choice.gpu_batch_size * work.keys(work.prompt_tokens) * work.kv)
    device = _products(work, machine, choice, tokens) + choice.num_gpu_batches * (machine.device_attention.seconds(pairs) + packed)
    return _terms(work, machine, choice, placed, tokens, device, 0.0, read=Crossing(0.0, 0.0), written=work.made)


def decode_terms(work: Workload, machine: Machine, choice: Choice, placed: Placed) -> dict[str, Any]:
    """T_gen's terms: seconds of one layer for one token of each of a block's sequences, averaged over the output."""
    size, batches = choice.gpu_batch_size, choice.num_gpu_batches
    cached = size * work.mean_keys * work.kv
    attention = max(
        machine.device_attention.seconds(4 * work.query * work.mean_keys * size),
        machine.device_memory.seconds(cached * work.bytes_of(choice.kv_bits)),
    ) + _unpack_kv(work, machine, choice, cached)
    at_home = placed.kv[0] if choice.host_attention else 1.0  # attended to on the device
    device = _products(work, machine, choice, size) + batches * attention * at_home
    host = machine.host_attention.seconds(cached * work.wide_bytes) * batches * (1 - placed.kv[0]) if choice.host_attention else 0.0
    return _terms(work, machine, choice, placed, size, device, host, read=work.read, written=Crossing(1.0, 1.0))


def ends_s(work: Workload, machine: Machine, choice: Choice) -> float:
    """Seconds of the head for one token of each of a block's sequences."""
    elements = work.vocabulary * work.hidden
    product = machine.device_products.seconds(2 * elements * choice.gpu_batch_size)
    return choice.num_gpu_batches * max(product, machine.device_memory.seconds(elements * work.wide_bytes))


def _terms(
    work: Workload,
    machine: Machine,
    choice: Choice,
    placed: Placed,
    tokens: float,
    device: Any,
    host: Any,
    *,
    read: Crossing,
    written: Crossing,
) -> dict[str, Any]:
    """The I/O of a layer, by `TERMS`, for batches of `tokens`. read, written: keys of a sequence."""
    weights, batches = work.weights * work.bytes_of(choice.weight_bits), choice.num_gpu_batches
    activation, kv = tokens * work.hidden * work.wide_bytes, choice.gpu_batch_size * work.kv * work.bytes_of(choice.kv_bits)
    on_host = choice.host_attention and read.link > 0
    crossing = tokens * work.query * work.wide_bytes if on_host else 0.0  # queries one way, outputs the other
    away_w, away_c, away_h = (1 - kind[0] for kind in _kinds(placed))
    disk_w, disk_c, disk_h = (kind[2] for kind in _kinds(placed))
    down, up, load, store = machine.host_to_device, machine.device_to_host, machine.disk_to_host, machine.host_to_disk
    loaded = down.seconds(crossing) if on_host else down.seconds(read.link * kv)
    return dict(zip(TERMS, (
        down.seconds(weights) * away_w + batches * (loaded * away_c + down.seconds(activation) * away_h),
        batches * ((up.seconds(written.link * kv) + up.seconds(crossing)) * away_c + up.seconds(activation) * away_h),
        load.seconds(weights) * disk_w + batches * (load.seconds(read.disk * kv) * disk_c + load.seconds(activation) * disk_h),
        batches * (store.seconds(written.disk * kv) * disk_c + store.seconds(activation) * disk_h),
        device,
        host,
    ), strict=True))  # fmt: skip


def _products(work: Workload, machine: Machine, choice: Choice, tokens: float) -> float:
    """Of a layer for all batches of a block, `tokens` each; 4-bit weights are unpacked by each batch's program."""
    product = max(
        machine.device_products.seconds(work.linear_flops * tokens), machine.device_memory.seconds(work.weights * work.wide_bytes)
    )
    unpacked = machine.device_memory.seconds(work.weights * (BYTES[4] + work.wide_bytes)) if choice.weight_bits == 4 else 0.0
    return choice.num_gpu_batches * (product + unpacked)


def _unpack_kv(work: Workload, machine: Machine, choice: Choice, elements: float) -> float:
    """Between 4 bits and 16, either way."""
    return machine.device_memory.seconds(elements * (BYTES[4] + work.wide_bytes)) if choice.kv_bits == 4 else 0.0


def resources(machine: Machine, terms: dict[str, Any]) -> list[Any]:
    """What takes the time of a layer that its verbs overlap in: the longest of these, seconds of what is in use at the same time."""
    if not machine.one_processor:
        return list(terms.values())
    disk = ("disk to host", "host to disk")
    return [sum(term for name, term in terms.items() if name not in disk), *(terms[name] for name in disk)]


def memory_bytes(work: Workload, choice: Choice, placed: Placed) -> tuple[Any, Any, Any]:
    """Peak bytes on device, host and disk: what lives there, and the double buffers of what passes through.

    The peak is over prefill and decode: activations are the prompts', KV that of the finished sequences.
    """
    size, block, layers = choice.gpu_batch_size, choice.block_size, work.layers
    weights, kv = work.weights * work.bytes_of(choice.weight_bits), work.kv * work.bytes_of(choice.kv_bits)
    activation = work.prompt_tokens * work.hidden * work.wide_bytes
    totals = layers * weights, layers * block * work.kept_keys * kv, block * activation
    homes = [sum(total * kind[tier] for total, kind in zip(totals, _kinds(placed), strict=True)) for tier in range(3)]
    away_w, away_c, away_h = (1 - kind[0] for kind in _kinds(placed))
    passing = work.made.link if choice.host_attention else work.kept_keys  # KV of a batch that the device ever holds
    working = size * work.prompt_tokens * work.widest * work.wide_bytes + size * work.vocabulary * 4.0 + work.ends * work.wide_bytes
    working += work.weights * work.wide_bytes if choice.weight_bits == 4 else 0.0
    working += size * work.kept_keys * work.kv * work.wide_bytes if choice.kv_bits == 4 else 0.0
    device = homes[0] + working + 2 * (weights * away_w + size * passing * kv * away_c + size * activation * away_h)
    staged = weights * placed.weights[2] + size * work.kept_keys * kv * placed.kv[2] + size * activation * placed.activations[2]
    scores = size * (work.heads * work.last_keys * 4.0 + 2 * work.query * work.wide_bytes) * away_c if choice.host_attention else 0.0
    return device, homes[1] + 2 * staged + scores, homes[2]


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a policy takes. `prefill`, `decode`: seconds of each term for a layer; `link_s`: the busier direction's, of a whole block."""

    latency_s: float
    prefill_s: float  # of it
    tokens_per_s: float
    prefill: dict[str, float]
    decode: dict[str, float]
    memory_bytes: tuple[float, float, float]
    link_s: float

    @property
    def binding(self) -> tuple[str, str]:
        """The term that decides in prefill, and in decode."""
        return max(self.prefill, key=self.prefill.__getitem__), max(self.decode, key=self.decode.__getitem__)

    @property
    def link_tokens_per_s(self) -> float:
        """If nothing but this policy's traffic between host and device took time."""
        return self.tokens_per_s * self.latency_s / self.link_s if self.link_s else float("inf")


def predict(work: Workload, machine: Machine, policy: Policy, *, overlap: bool = True) -> Prediction:
    """T = T_pre l + T_gen (n - 1) l, and the head of n tokens; without overlap a layer takes the sum of its terms."""
    choice, placed = split(policy)
    prefill, decode = prefill_terms(work, machine, choice, placed), decode_terms(work, machine, choice, placed)
    layers, steps = work.layers, work.output_tokens - 1
    ends = ends_s(work, machine, choice)
    one_prompt, one_token = (max(resources(machine, terms)) if overlap else sum(terms.values()) for terms in (prefill, decode))
    prompts = layers * one_prompt + ends
    latency = prompts + steps * (layers * one_token + ends)
    tokens = choice.block_size * work.output_tokens
    link = layers * (max(prefill[term] for term in TERMS[:2]) + steps * max(decode[term] for term in TERMS[:2]))
    return Prediction(latency, prompts, tokens / latency, prefill, decode, memory_bytes(work, choice, placed), link)
