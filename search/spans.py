"""Choose the span of each KV head from a model's own attention (MoA; FlashDecoding++Next §III).

  python -m search spans --model FOLDER_OR_GGUF --tokens tests/data/ppl/wikitext2_8x1024.npy --first_window 4
      --keys_percent 75,50,25 --output_folder spans

The texts run through the plain forward. For every KV head and every candidate span, the command adds up the
attention that the head pays to keys outside the span. Then it picks one candidate a head, so that all heads
together lose the least attention and see at most the target share of the keys. `spans-50.json` holds the spans for
50 %. `uniform-50.json` holds equal windows for all heads, with at least as many keys, as the rival.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from absl import flags
from jaxtyping import Array, Float
from tqdm import tqdm

from jaxflow.config import SPAN_UNITS, ConfigError, ModelConfig, Span
from jaxflow.model.attention_spans import VERSION, SpansFile, apply_spans, keys_share
from jaxflow.model.checkpoints.calibrate import load_tokens, observe
from jaxflow.model.checkpoints.checkpoint import open_checkpoint

# Candidates of a text of n tokens, beside full attention: alpha as a part of n, and beta. Each candidate covers the
# candidates before it. So the heads of a page group hold no more keys than the largest of their spans: with any
# pair of alpha and beta, SmolLM2-135M at half of the keys would hold 72 % of the keys instead of 52 %.
PARTS = (
    *((1 / 64, 0.0), (1 / 32, 1 / 16), (1 / 16, 1 / 16), (1 / 8, 1 / 8), (1 / 8, 1 / 4)),
    *((1 / 4, 1 / 4), (1 / 4, 3 / 8), (1 / 4, 1 / 2), (1 / 2, 1 / 2), (1 / 2, 3 / 4)),
)


def define_flags() -> None:
    flags.DEFINE_string("model", None, "Model to measure: a folder, a .gguf file or a hub id.", required=True)
    flags.DEFINE_string("tokens", None, "File of token ids (.npy), [windows, tokens].", required=True)
    flags.DEFINE_integer("windows", 4, "Number of windows to read.", lower_bound=1)
    flags.DEFINE_integer("first_window", 0, "The first window to read.", lower_bound=0)
    flags.DEFINE_integer("sinks", 16, "The first tokens of a sequence, which all heads see.", lower_bound=0)
    flags.DEFINE_list("keys_percent", ["75", "50", "25"], "Target shares of the keys that queries see.")
    flags.DEFINE_string("output_folder", None, "Folder of the spans files, which may exist.", required=True)


def candidates(tokens: int, sinks: int) -> list[Span]:
    """Return the spans to choose from for texts of so many tokens. Full attention is last."""
    some = [Span(sinks, max(1, round(a * tokens)), round(b * SPAN_UNITS)) for a, b in PARTS]
    return [*dict.fromkeys(some), Span(sinks, 0, SPAN_UNITS)]


def seen_keys(spans: list[Span], tokens: int) -> np.ndarray:
    """Return int64 [C]: the keys that all queries of a text see with each span."""
    positions = np.arange(tokens)
    last_keys = np.minimum([span.window(positions) for span in spans], positions + 1)
    sinks = np.array([span.sinks for span in spans])[:, None]
    return (last_keys + np.minimum(sinks, positions + 1 - last_keys)).sum(axis=1)


def lost_attention(
    spans: list[Span],
    q: Float[Array, "T N H"],
    k: Float[Array, "K T H"],
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Float[Array, "K C"]:
    """Return the attention that each KV head's queries pay to keys outside each span, over all queries of a text.

    A query pays 1 in all.
    """
    assert window is None, "a layer without a window"
    (t, _, h), kv_heads, positions = q.shape, k.shape[0], np.arange(q.shape[0])
    last_keys = np.array([span.window(positions) for span in spans])
    first = np.maximum(positions + 1 - last_keys, 0).T  # [T, C]
    sinks = np.minimum(spans[0].sinks, first)

    def of_head(queries: Float[Array, "G T H"], keys: Float[Array, "T H"]) -> Float[Array, " C"]:
        scores = jnp.einsum("gth,sh->gts", queries, keys) * scale
        if soft_cap is not None:
            scores = jnp.tanh(scores / soft_cap) * soft_cap
        paid = jax.nn.softmax(jnp.where(positions[:, None] >= positions, scores, -jnp.inf), axis=-1).sum(0)
        before = jnp.pad(jnp.cumsum(paid, axis=-1), ((0, 0), (1, 0)))  # [T, T + 1]: of the keys before a key
        return sum_between(before, sinks, first)

    grouped = q.reshape(t, kv_heads, -1, h).transpose(1, 2, 0, 3).astype(jnp.float32)
    return jax.lax.map(lambda pair: of_head(*pair), (grouped, k.astype(jnp.float32)))


def sum_between(before: Float[Array, "T _"], start: np.ndarray, stop: np.ndarray) -> Float[Array, " C"]:
    """Return the sums over keys [start, stop) of each query and candidate [T, C], added over the queries."""
    sums = (jnp.take_along_axis(before, jnp.asarray(at), axis=1) for at in (stop, start))
    high, low = sums
    return (high - low).sum(0)


def measure(config: ModelConfig, weights: Any, texts: np.ndarray, spans: list[Span]) -> np.ndarray:
    """Return float64 [L, K, C]: the share of its attention that each head pays outside of each span."""
    look = functools.partial(lost_attention, spans)
    run = jax.jit(lambda weights, text: jnp.stack(observe(config, weights, text, look)))
    lost = np.sum([np.asarray(run(weights, text), np.float64) for text in tqdm(texts, unit="window")], axis=0)
    return np.maximum(lost, 0.0) / (texts.size * config.num_heads // config.num_kv_heads)


def choose(lost: np.ndarray, keys: np.ndarray, share: float) -> np.ndarray:
    """Return int [heads]: one candidate a head, of the least lost attention with at most a share of all keys.

    A multiple-choice knapsack by its Lagrangian: each head takes the candidate with the least
    lost + price · keys, at the lowest price that keeps the share.

    Args:
      lost: [heads, C]. keys: [C]; the last candidate sees all keys.
    """
    parts = keys / keys[-1]

    def at(price: float) -> np.ndarray:
        return (lost + price * parts).argmin(axis=1)

    low, high = 0.0, float(np.max(lost) / np.min(np.diff(np.unique(parts)))) + 1.0
    for _ in range(60):
        price = (low + high) / 2
        low, high = (low, price) if parts[at(price)].mean() <= share else (price, high)
    return at(high)


def uniform(tokens: int, sinks: int, share: float) -> Span:
    """Return the smallest window that, in all heads, sees at least a share of the keys of a text."""
    spans = [Span(sinks, alpha, 0) for alpha in range(1, tokens + 1)]
    keys = seen_keys(spans, tokens)
    return spans[int(np.argmax(keys >= share * keys[-1]))]


def spans_file(name: str, config: ModelConfig, chosen: list[Span]) -> SpansFile:
    """Return the file of one span for each head of each layer, layer by layer."""
    rows = [chosen[i : i + config.num_kv_heads] for i in range(0, len(chosen), config.num_kv_heads)]
    return SpansFile(
        VERSION,
        name,
        config.num_layers,
        config.num_kv_heads,
        chosen[0].sinks,
        tuple(tuple(float(span.alpha) for span in row) for row in rows),
        tuple(tuple(span.beta / SPAN_UNITS for span in row) for row in rows),
    )


def _percents(given: list[str]) -> list[float]:
    try:
        percents = [float(one) for one in given]
    except ValueError:
        percents = []
    if not percents or not all(0 < one < 100 for one in percents):
        raise ConfigError("keys_percent", ",".join(given), "percentages between 0 and 100, as 75,50,25")
    return percents


def run() -> None:
    """Run the command. Raises: ConfigError, CheckpointError, OSError."""
    f = flags.FLAGS
    percents = _percents(f.keys_percent)
    texts = load_tokens(f.tokens)[f.first_window :][: f.windows].astype(np.int32)
    if not len(texts):
        raise ConfigError("first_window", f.first_window, f"a window of {f.tokens}")
    checkpoint = open_checkpoint(f.model)
    config, tokens = checkpoint.model_config, texts.shape[1]
    if any(layer.window is not None for layer in config.layers):
        raise ConfigError("model", f.model, "a model whose layers have no window")
    if texts.min() < 0 or texts.max() >= config.vocab_size:
        raise ConfigError("tokens", f.tokens, f"token ids below {config.vocab_size}")
    folder = Path(f.output_folder)
    folder.mkdir(parents=True, exist_ok=True)
    spans = candidates(tokens, f.sinks)
    lost = measure(config, checkpoint.load("float32"), texts, spans).reshape(-1, len(spans))
    keys = seen_keys(spans, tokens)
    least = keys.min() / keys[-1]
    print(f"{'file':24}{'keys %':>9}{'held %':>9}{'lost attention %':>19}")
    for percent in percents:
        if percent / 100 < least:
            raise ConfigError("keys_percent", percent, f"at least {100 * least:.1f} for {tokens} tokens")
        picked = choose(lost, keys, percent / 100)
        chosen = [spans[i] for i in picked]
        share = keys_share(apply_spans(spans_file(checkpoint.name, config, chosen), config), tokens)
        same = [uniform(tokens, f.sinks, share)] * len(chosen)
        attention = {"spans": f"{100 * lost[np.arange(len(picked)), picked].mean():.2f}", "uniform": ""}
        for kind, each in (("spans", chosen), ("uniform", same)):
            found = spans_file(checkpoint.name, config, each)
            path = folder / f"{kind}-{percent:g}.json"
            path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=0) + b"\n")
            model = apply_spans(found, config)
            shares = (100 * keys_share(model, tokens, held=held) for held in (False, True))
            print(f"{path.name:24}" + "".join(f"{one:9.1f}" for one in shares) + f"{attention[kind]:>19}")
