"""Choose the span of each KV head by its effect on a model's answers (after MoA; FlashDecoding++Next §III).

  python -m search spans --model FOLDER_OR_GGUF --tokens tests/data/ppl/wikitext2_8x1024.npy --first_window 4
      --keys_percent 75,50,25 --output_folder spans

For each target share of the keys, the search starts with one window for all heads. It measures the divergence
from the model with full attention, and the first-order effect of every other span of every head
(`search/span_effects.py`). Then all heads move at once to the spans with the least effect that see no more
keys than the start. A move is kept only if the measured divergence falls. `spans-50.json` holds the spans for
50 %. `uniform-50.json` holds the start, as the rival.

  python -m search spans --model llama-3.1-8b --spread 8 --keys_percent 50 --output_folder spans

With --spread nothing is measured, and no weights are read. The heads of each layer get windows from the
shortest to one that is 8 times as long, in even steps, and each window is a share of the text.
`spread-50.json` is for timing
alone: it says nothing about the model.
"""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from absl import flags

from jaxflow.config import SPAN_UNITS, ConfigError, ModelConfig, Span
from jaxflow.model.attention_spans import VERSION, SpansFile, apply_spans, keys_share
from jaxflow.model.checkpoints.calibrate import load_tokens
from jaxflow.model.checkpoints.checkpoint import Checkpoint, open_checkpoint
from search.span_effects import Effects, Measurement

# The candidates are windows of one length at every position, and full attention. A text of one length cannot
# tell alpha from beta. A longer window covers the shorter ones, so the heads of a page group hold no more
# keys than the largest of their spans.
STEP = 2**0.5  # from one candidate window to the next
SHORTER = 8  # candidates below the rival's window
REACH = 2  # candidates that a head may move at once, first


def define_flags() -> None:
    flags.DEFINE_string("model", None, "Model to measure: a folder, a .gguf file or a hub id.", required=True)
    flags.DEFINE_string("tokens", None, "File of token ids (.npy), [windows, tokens]; not with --spread.")
    flags.DEFINE_integer("windows", 2, "Number of windows to read.", lower_bound=1)
    flags.DEFINE_integer("first_window", 0, "The first window to read.", lower_bound=0)
    flags.DEFINE_integer("sinks", 16, "The first tokens of a sequence, which all heads see.", lower_bound=0)
    flags.DEFINE_list("keys_percent", ["75", "50", "25"], "Target shares of the keys that queries see.")
    flags.DEFINE_integer("rounds", 4, "Most moves of all heads, for each target share.", lower_bound=1)
    flags.DEFINE_float(
        "spread",
        None,
        "Write spans for timing, without a measurement: in each layer the longest window over the shortest.",
        lower_bound=1.0,
    )
    flags.DEFINE_string("output_folder", None, "Folder of the spans files, which may exist.", required=True)


def candidates(start: Span, tokens: int) -> list[Span]:
    """Return the spans to choose from for texts of so many tokens, the shortest first.

    Full attention is last.
    """
    alphas = (round(start.alpha * STEP**i) for i in range(-SHORTER, 10_000))
    windows = itertools.takewhile(lambda alpha: alpha < tokens - start.sinks, alphas)
    some = [dataclasses.replace(start, alpha=max(1, alpha)) for alpha in windows]
    return [*dict.fromkeys((*some, start)), Span(start.sinks, 0, SPAN_UNITS)]


def seen_keys(spans: list[Span], tokens: int) -> np.ndarray:
    """Return int64 [C]: the keys that all queries of a text see with each span."""
    positions = np.arange(tokens)
    last_keys = np.minimum([span.window(positions) for span in spans], positions + 1)
    sinks = np.array([span.sinks for span in spans])[:, None]
    return (last_keys + np.minimum(sinks, positions + 1 - last_keys)).sum(axis=1)


def choose(changes: np.ndarray, keys: np.ndarray, most: float, near: np.ndarray, reach: int) -> np.ndarray:
    """Return int [heads]: one candidate a head, of the least sum of changes with
    at most a mean number of keys.

    A multiple-choice knapsack by its Lagrangian: each head takes the candidate with the least
    change + price · keys, at the lowest price that keeps the mean.

    Args:
      changes: [heads, C]. keys: [C], ascending. most: the mean, at least that of the
        shortest candidates in reach.
      near: [heads]. A head takes a candidate that is at most `reach` away from its present one.
    """
    parts = keys / keys[-1]
    allowed = np.abs(np.arange(len(keys)) - near[:, None]) <= reach

    def at(price: float) -> np.ndarray:
        return np.where(allowed, changes + price * parts, np.inf).argmin(axis=1)

    low, high = 0.0, float(np.ptp(changes) / np.min(np.diff(np.unique(parts)))) + 1.0
    for _ in range(60):
        price = (low + high) / 2
        low, high = (low, price) if keys[at(price)].mean() <= most else (price, high)
    return at(high)


def descend(
    measure: Callable[[np.ndarray], Effects], start: int, heads: int, keys: np.ndarray, rounds: int
) -> tuple[np.ndarray, float, float]:
    """Return (the candidate of each head, its loss, the loss of the start), with at most the start's keys.

    The effects are linear and hold near the present choice. So a head moves by few candidates at once, and by
    fewer after a move that did not lower the measured loss.
    """
    chosen, reach = np.full(heads, start), REACH
    found = measure(chosen)
    first = found.loss
    for _ in range(rounds):
        tried = choose(found.changes, keys, keys[start], chosen, reach)
        after = measure(tried)
        if after.loss < found.loss:
            chosen, found = tried, after
        elif reach == 1:
            break
        else:
            reach -= 1
    return chosen, found.loss, first


def uniform(tokens: int, sinks: int, share: float) -> Span:
    """Return the smallest window that, in all heads, sees at least a share of the keys of a text."""
    spans = [Span(sinks, alpha, 0) for alpha in range(1, tokens + 1)]
    keys = seen_keys(spans, tokens)
    return spans[int(np.argmax(keys >= share * keys[-1]))]


def spread_out(config: ModelConfig, sinks: int, share: float, spread: float) -> list[Span]:
    """Return a span for each KV head, layer by layer, without a measurement.

    A layer's windows are shares of the text in even steps, `share` on average, the longest `spread` times the
    shortest. Each layer turns the order of the last one by a head, so that layers differ.

    Raises: ConfigError for a window longer than the text.
    """
    heads = config.num_kv_heads
    steps = np.linspace(1.0, spread, heads)
    shares = share * steps / steps.mean()
    if shares[-1] > 1:
        raise ConfigError(
            "spread", spread, f"a longest window of at most the text, not {shares[-1]:.2f} of the text"
        )
    spans = [Span(sinks, 0, round(one * SPAN_UNITS)) for one in shares]
    return [spans[(head + layer) % heads] for layer in range(config.num_layers) for head in range(heads)]


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
    if (f.tokens is None) == (f.spread is None):
        raise ConfigError("tokens", f.tokens, "a file, or --spread without a file")
    checkpoint = open_checkpoint(f.model, load_format="auto" if f.spread is None else "dummy")
    config = checkpoint.model_config
    if any(layer.window is not None for layer in config.layers):
        raise ConfigError("model", f.model, "a model whose layers have no window")
    folder = Path(f.output_folder)
    if f.spread is None:
        _measured(checkpoint, percents, folder)
        return
    made = {percent: spread_out(config, f.sinks, percent / 100, f.spread) for percent in percents}
    folder.mkdir(parents=True, exist_ok=True)
    print(HEAD)
    for percent, spans in made.items():
        _write(folder / f"spread-{percent:g}.json", checkpoint, spans, config.max_position)


HEAD = f"{'file':24}{'keys %':>9}{'held %':>9}{'divergence, nats':>19}"


def _measured(checkpoint: Checkpoint, percents: list[float], folder: Path) -> None:
    """Choose spans for each share of the keys, and write their files."""
    f = flags.FLAGS
    config = checkpoint.model_config
    texts = load_tokens(f.tokens)[f.first_window :][: f.windows].astype(np.int32)
    if not len(texts):
        raise ConfigError("first_window", f.first_window, f"a window of {f.tokens}")
    tokens = texts.shape[1]
    if texts.min() < 0 or texts.max() >= config.vocab_size:
        raise ConfigError("tokens", f.tokens, f"token ids below {config.vocab_size}")
    shortest, full = seen_keys([Span(f.sinks, 1, 0), Span(f.sinks, 0, SPAN_UNITS)], tokens)
    for percent in percents:
        if percent * full < 100 * shortest:
            least = f"at least {100 * shortest / full:.1f} for {tokens} tokens"
            raise ConfigError("keys_percent", percent, least)
    folder.mkdir(parents=True, exist_ok=True)
    weights, heads = checkpoint.load("float32"), config.num_layers * config.num_kv_heads
    print(HEAD)
    for percent in percents:
        same = uniform(tokens, f.sinks, percent / 100)
        spans = candidates(same, tokens)
        measure = Measurement(config, weights, texts, spans)
        picked, loss, start = descend(measure, spans.index(same), heads, seen_keys(spans, tokens), f.rounds)
        chosen = [spans[i] for i in picked]
        _write(folder / f"spans-{percent:g}.json", checkpoint, chosen, tokens, loss)
        _write(folder / f"uniform-{percent:g}.json", checkpoint, [same] * heads, tokens, start)


def _write(
    path: Path, checkpoint: Checkpoint, spans: list[Span], tokens: int, loss: float | None = None
) -> None:
    """Write a spans file. Print the keys that a text sees and that its page groups hold, and the loss."""
    found = spans_file(checkpoint.name, checkpoint.model_config, spans)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=0) + b"\n")
    model = apply_spans(found, checkpoint.model_config)
    shares = (100 * keys_share(model, tokens, held=held) for held in (False, True))
    lost = "" if loss is None else f"{loss:19.4f}"
    print(f"{path.name:24}" + "".join(f"{one:9.1f}" for one in shares) + lost, flush=True)
