"""The sizes of a model's mean layer, read from its graph, and the KV tokens of a sequence that are kept and
moved.
"""

import collections
import dataclasses
import functools

from jaxflow.config import ModelConfig, check_has_heads
from jaxflow.flexgen.sparse_values import top_count
from jaxflow.model.composition import Composition
from jaxflow.model.graph import Widths, model_graph, padded_vocabulary

BYTES = {
    16: 2.0,
    4: 0.5 + 4 / 64,
}  # bytes of an element; a group of 64 has a scale and a minimum of 2 bytes each


@dataclasses.dataclass(frozen=True)
class PlacementWorkload:
    """Sizes of a mean layer, in elements or FLOPs, and the lengths of the requests."""

    model: str
    layers: int
    hidden: int  # elements of a token's activation
    query: int  # elements of a token's queries, and of its attention's output
    heads: int
    kv_heads: int
    kv: int  # elements of a token's key and value
    weights: float
    linear_flops: float  # FLOPs of a token
    widest: int  # elements of a token's largest product, input and output
    windows: tuple[tuple[int | None, int], ...]  # each window, and its number of layers
    ends: float  # elements of the embedding and the head
    vocabulary: int
    prompt_tokens: int
    output_tokens: int
    wide_bytes: float = BYTES[16]  # bytes of a 16-bit element; 4 for a model that runs in float32
    page_size: int | None = None  # tokens; None: the paper's count, token by token

    def bytes_of(self, bits: int) -> float:
        """Return the bytes of an element stored in these bits."""
        return BYTES[bits] if bits == 4 else self.wide_bytes

    def keys(self, tokens: float) -> float:
        """Return the KV tokens that a mean layer keeps of a sequence of `tokens`."""
        return (
            sum(count * (tokens if window is None else min(tokens, window)) for window, count in self.windows)
            / self.layers
        )

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
        """Return the KV tokens with memory at a layer: all but the last, in full pages."""
        return (
            self.last_keys
            if self.page_size is None
            else self._paged(self.prompt_tokens + self.output_tokens - 1)
        )

    @functools.cached_property
    def made(self) -> "CrossingTokens":
        """Return the KV tokens of a prompt that cross to their tier."""
        return (
            CrossingTokens(*(self.keys(self.prompt_tokens),) * 2)
            if self.page_size is None
            else CrossingTokens(self.kept_keys, self._prompt_pages)
        )

    @functools.cached_property
    def read(self) -> "CrossingTokens":
        """Return the KV tokens that a decode loads, averaged over the output.

        A file has the prompt's pages, followed by one record a token.
        """
        if self.page_size is None:
            return CrossingTokens(self.mean_keys, self.mean_keys)
        return CrossingTokens(self.kept_keys, self._prompt_pages + (self.output_tokens - 2) / 2)

    def top_rows(self, percent: float) -> "TopRows":
        """Return the V rows of a sequence and KV head that decodes fetch
        (`jaxflow.flexgen.sparse_values`).
        """
        cached = range(self.prompt_tokens, self.prompt_tokens + self.output_tokens - 1)
        room = self._top(percent, self.prompt_tokens + self.output_tokens - 2)
        return TopRows(room, sum(self._top(percent, n) for n in cached) / max(1, len(cached)))

    def _top(self, percent: float, cached: int) -> float:
        counts = (
            count * top_count(percent, cached if window is None else min(cached, window - 1))
            for window, count in self.windows
        )
        return sum(counts) / self.layers

    @property
    def _prompt_pages(self) -> float:
        return self._paged(self.prompt_tokens)

    def _paged(self, tokens: int) -> float:
        assert self.page_size is not None
        return float(-(-tokens // self.page_size) * self.page_size)

    @functools.cached_property
    def mean_keys(self) -> float:
        """Return the mean context of a decode over the output: the paper's s + n / 2."""
        return self.keys(self.prompt_tokens + self.output_tokens / 2)


@dataclasses.dataclass(frozen=True)
class CrossingTokens:
    """KV tokens of a sequence that cross the link to the device, or between disk and host."""

    link: float
    disk: float


@dataclasses.dataclass(frozen=True)
class TopRows:
    """Chosen V rows of a sequence and KV head: the room for any decode, and the mean of all decodes."""

    room: float
    mean: float


def workload(
    name: str,
    config: ModelConfig,
    prompt_tokens: int,
    output_tokens: int,
    *,
    wide_bytes: float = BYTES[16],
    page_size: int | None = None,
) -> PlacementWorkload:
    """Read the sizes from the model's graph, averaged over its layers.

    Raises: ConfigError for latent attention.
    """
    check_has_heads(config, "an offloaded run")
    graph = model_graph(config, 1, Widths(weights=1.0, wide_weights=1.0))
    many, one = Composition(decode_tokens=1e9, decode_keys=1), Composition(decode_tokens=1, decode_keys=1)
    ops = [op for layer in graph.layers for op in layer]
    width = max(config.intermediate_size, config.experts_per_token * config.expert_intermediate_size)
    fused = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return PlacementWorkload(
        model=name,
        layers=config.num_layers,
        hidden=config.hidden_size,
        query=config.num_heads * config.head_dim,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
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
