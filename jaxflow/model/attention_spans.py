"""Attention spans: the file of a model's spans, and the page groups of heads (MoA; FlashDecoding++Next §III).

Every KV head of every layer has its own span: sink tokens and a window of alpha + beta · length tokens, where
`length` is the number of tokens up to the query. `python -m search spans`
measures a model and writes the file.

The pages of heads with similar spans are held together. A class of spans is one page group: its window covers
the windows of its heads at every length, so that no page is freed that a head still sees. A head itself
attends to its own span exactly. At most `MOST_CLASSES` classes exist, because each one has its own page
tables and kernels.
"""

import collections
import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from jaxflow.config import (
    SPAN_UNITS,
    ConfigError,
    EngineConfig,
    ModelConfig,
    Span,
    Window,
    check_has_own_inputs,
)

VERSION = 1
MOST_CLASSES = 4
LONGEST = 2**20  # tokens; alpha + beta · length then fits in an int32
_FIELD = "attention_spans"


class SpansFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of the file.

    Attributes:
      model: name of the model. layers, kv_heads: its numbers of layers and of KV heads.
      sinks: the first tokens of a sequence, which all heads see.
      alpha: of each layer and KV head, a whole number of tokens.
      beta: of each layer and KV head, 0 to 1. It is rounded up to a multiple of 1/1024.
    """

    schema_version: int
    model: str
    layers: int
    kv_heads: int
    sinks: int
    alpha: tuple[tuple[float, ...], ...]
    beta: tuple[tuple[float, ...], ...]


def read_spans(path: str | Path) -> SpansFile:
    """Return the contents of a spans file.

    Raises: ConfigError, which names the field, its value and the accepted.
    """
    accepted = "a file that `python -m search spans` wrote"
    try:
        # Not msgspec's decoder: it refuses NaN as bad syntax, without the place.
        found = msgspec.convert(json.loads(Path(path).read_bytes()), SpansFile)
    except (OSError, ValueError, RecursionError) as error:  # msgspec.ValidationError is a ValueError
        raise ConfigError(_FIELD, str(path), f"{accepted} ({error})") from error
    if found.schema_version != VERSION:
        raise ConfigError(f"{_FIELD}.schema_version", found.schema_version, str(VERSION))
    if not 0 <= found.sinks <= LONGEST:
        raise ConfigError(f"{_FIELD}.sinks", found.sinks, f"0 to {LONGEST} tokens")
    for name in ("layers", "kv_heads"):
        if getattr(found, name) < 1:
            raise ConfigError(f"{_FIELD}.{name}", getattr(found, name), "a positive number")
    for name in ("alpha", "beta"):
        _check_counts(found, name)
    for layer in range(found.layers):
        for head in range(found.kv_heads):
            _check_span(found.alpha[layer][head], found.beta[layer][head], f"[{layer}][{head}]")
    return found


def _check_counts(found: SpansFile, name: str) -> None:
    rows = getattr(found, name)
    if len(rows) != found.layers:
        raise ConfigError(f"{_FIELD}.{name}", f"{len(rows)} layers", f"layers={found.layers}")
    for layer, row in enumerate(rows):
        if len(row) != found.kv_heads:
            raise ConfigError(f"{_FIELD}.{name}[{layer}]", f"{len(row)} heads", f"kv_heads={found.kv_heads}")


def _check_span(alpha: float, beta: float, place: str) -> None:
    if not (0 <= alpha <= LONGEST and alpha == int(alpha)):
        raise ConfigError(f"{_FIELD}.alpha{place}", alpha, f"a whole number of tokens, 0 to {LONGEST}")
    if not 0 <= beta <= 1:
        raise ConfigError(f"{_FIELD}.beta{place}", beta, "0 to 1: a window grows at most as fast as the text")
    if alpha == 0 and beta == 0:
        raise ConfigError(
            f"{_FIELD}.alpha{place}", alpha, "a span of at least 1 token: alpha or beta above 0"
        )


def with_spans(config: EngineConfig, model: ModelConfig, name: str) -> ModelConfig:
    """Return the model with the spans of `config.attention_spans`; the model itself without a file.

    name: of the model.

    Raises:
      ConfigError: a bad file, a file of another model, or a model that needs full attention in all layers:
        with windows, shared keys and values, or embeddings of each layer.
    """
    if config.attention_spans is None:
        return model
    found = read_spans(config.attention_spans)
    for field, own in (("model", name), ("layers", model.num_layers), ("kv_heads", model.num_kv_heads)):
        if getattr(found, field) != own:
            raise ConfigError(f"{_FIELD}.{field}", getattr(found, field), f"{own!r}, of the model {name}")
    windows = [layer.window for layer in model.layers if layer.window is not None]
    if windows:
        raise ConfigError(
            _FIELD, config.attention_spans, f"unset: the model has windows of {windows[0]} tokens"
        )
    check_has_own_inputs(model, _FIELD, config.attention_spans, "a file of spans")
    if model.max_position > LONGEST:
        raise ConfigError(_FIELD, config.attention_spans, f"unset for a context over {LONGEST} tokens")
    return apply_spans(found, model)


def apply_spans(found: SpansFile, model: ModelConfig) -> ModelConfig:
    """Return the model with the spans of a checked file, and with the page groups of its heads."""
    spans = tuple(
        tuple(Span(found.sinks, int(a), math.ceil(b * SPAN_UNITS)) for a, b in zip(*rows, strict=True))
        for rows in zip(found.alpha, found.beta, strict=True)
    )
    classes = span_classes(tuple(span for layer in spans for span in layer), model.max_position)
    layers = tuple(
        dataclasses.replace(
            layer,
            spans=own,
            head_groups=tuple(class_of(span, classes, model.max_position) for span in own),
        )
        for layer, own in zip(model.layers, spans, strict=True)
    )
    return dataclasses.replace(model, layers=layers, span_classes=classes)


def class_of(span: Span, classes: Sequence[Window], longest: int) -> int:
    """Return the index of the smallest class that covers a span. longest: tokens of the longest sequence."""
    covering = [i for i, window in enumerate(classes) if _covers(window, span, longest)]
    return min(covering, key=lambda i: (_size(classes[i], longest), classes[i] is None))


def _covers(window: Window, span: Span, longest: int) -> bool:
    if not isinstance(window, Span):
        return window is None
    return not _is_full(span, longest) and window.alpha >= span.alpha and window.beta >= span.beta


def _is_full(span: Span, longest: int) -> bool:
    return span.beta >= SPAN_UNITS or span.alpha >= longest


def _size(window: Window, longest: int) -> int:
    """Return the last keys that the last query of the longest sequence sees."""
    return min(longest, window.window(longest - 1)) if isinstance(window, Span) else longest


def keys_share(model: ModelConfig, length: int, *, held: bool = False) -> float:
    """Return the share of the keys that the queries of a text see with spans, over all layers and heads.

    length: tokens of the text. held: count the keys that the page groups hold for
      the query, page borders left out.
    """
    positions = np.arange(length)

    def seen(window: Window) -> int:
        if not isinstance(window, Span):
            return int((positions + 1).sum())
        last_keys = np.minimum(window.window(positions), positions + 1)
        first = np.minimum(window.sinks, positions + 1 - last_keys)
        return int((last_keys + first).sum())

    number = {window: seen(window) for window in (*model.windows, *_spans_of(model))}
    chosen = [
        model.windows[group] if held else span
        for layer in model.layers
        for span, group in zip(layer.spans or (), layer.head_groups, strict=True)
    ]
    return sum(number[window] for window in chosen) / (number_of_heads(model) * seen(None))


def number_of_heads(model: ModelConfig) -> int:
    """Return the KV heads of all layers."""
    return model.num_layers * model.num_kv_heads


def _spans_of(model: ModelConfig) -> set[Span]:
    return {span for layer in model.layers for span in layer.spans or ()}


@functools.cache
def span_classes(spans: tuple[Span, ...], longest: int) -> tuple[Window, ...]:
    """Return at most `MOST_CLASSES` classes that cover the spans, with the fewest keys held in sum.

    Full attention is first, and is the class of all heads that see every key of the longest
    sequence. The other spans, ordered by their size, are cut into runs; a run's class has the
    largest alpha and the largest beta.
    """
    heads = collections.Counter(spans)
    partial = [span for span in heads if not _is_full(span, longest)]
    full: tuple[Window, ...] = (None,) if len(partial) < len(heads) else ()
    partial.sort(key=lambda span: (_size(span, longest), span.alpha, span.beta))
    runs = _runs(partial, [heads[span] for span in partial], longest, MOST_CLASSES - len(full))
    classes = {_join(run) for run in runs}
    return full + tuple(sorted(classes, key=lambda span: (-_size(span, longest), span.alpha, span.beta)))


def _join(spans: Sequence[Span]) -> Span:
    """Return the smallest span that covers several of the same sinks."""
    return Span(spans[0].sinks, max(span.alpha for span in spans), max(span.beta for span in spans))


def _runs(spans: Sequence[Span], heads: Sequence[int], longest: int, most: int) -> list[Sequence[Span]]:
    """Return the spans in at most `most` runs, with the smallest sum of heads times keys of the run's class.

    heads: the number of heads of each span.
    """
    # best[n][r]: the smallest sum of the first n spans in r runs, and the ends of the runs.
    best: list[dict[int, tuple[int, tuple[int, ...]]]] = [{0: (0, ())}]
    for stop in range(1, len(spans) + 1):
        found: dict[int, tuple[int, tuple[int, ...]]] = {}
        joined, members = spans[stop - 1], 0
        for start in range(stop - 1, -1, -1):
            joined, members = _join((joined, spans[start])), members + heads[start]
            keys = members * _size(joined, longest)
            for runs, (before, ends) in best[start].items():
                if runs < most and (runs + 1 not in found or before + keys < found[runs + 1][0]):
                    found[runs + 1] = before + keys, (*ends, stop)
        best.append(found)
    ends = min(best[-1].values())[1]
    return [spans[start:stop] for start, stop in itertools.pairwise((0, *ends))]
