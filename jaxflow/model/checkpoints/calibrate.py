"""Measure the distribution of a model's softmax inputs (FlashDecoding++Next §3, Fig. 5).

  python -m jaxflow.model.checkpoints.calibrate MODEL --text FILE
  python -m jaxflow.model.checkpoints.calibrate MODEL --tokens FILE.npy     (token ids [windows, tokens])

The output file holds for each layer the unified max value φ and its bounds, and a flag if the model qualifies
for a unified max value. OPT does not qualify. By default the file is written next to the model, where an
engine finds it. With --output, give the file to the engine as `--calibration`.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jaxtyping import Array, Float, Int
from tqdm import tqdm

from jaxflow.cli.exit_status import exit_status
from jaxflow.cli.output_files import check_output
from jaxflow.config import ConfigError, ModelConfig, check_has_heads
from jaxflow.model import transformer
from jaxflow.model.batch import Batch
from jaxflow.model.checkpoints.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from jaxflow.model.op_registry import Context
from jaxflow.model.softmax_range import VERSION, SoftmaxRange, default_path, layer_range
from jaxflow.parallel.mesh import choose_platform
from jaxflow.text.tokenizer import load_tokenizer
from jaxflow.text.vocabulary import TokenizerError
from pallas_kernels.attention.chunk import reference
from pallas_kernels.kernel_set import REFERENCE

# Scores are counted in bins of 1/8 from -1024 to 1024. Scores outside count in the first or last bin.
_BINS_A_UNIT, _LIMIT = 8, 1024
_CENTRE = 0.9999  # fraction of all scores within the reported range, as in the paper


@dataclasses.dataclass
class ScoreCounts:
    """Histograms of one layer: scores, and maxima of the rows, [2 · 1024 · 8] each."""

    scores: np.ndarray
    tops: np.ndarray


def softmax_range(
    name: str, config: ModelConfig, weights: dict[str, Any], windows: np.ndarray, *, progress: bool = False
) -> SoftmaxRange:
    """Return the range of the attention scores of each layer.

    Args:
      windows: token ids [W, N]. Each row is a separate text.

    Raises:
      ConfigError: `windows` is empty.
    """
    if not windows.size:
        raise ConfigError(
            "windows", list(windows.shape), "token ids [windows, tokens], at least one window and one token"
        )
    counts = [ScoreCounts(*np.zeros((2, 2 * _LIMIT * _BINS_A_UNIT), np.int64)) for _ in config.layers]
    observe = jax.jit(functools.partial(_observe, config))
    for window in tqdm(windows, disable=not progress, unit="window"):
        for found, layer in zip(observe(weights, window), counts, strict=True):
            layer.scores += np.asarray(found[0])
            layer.tops += np.asarray(found[1])
    tail = (1 - _CENTRE) / 2
    layers = tuple(layer_range(*_between(layer.scores, tail), *_between(layer.tops, 0.0)) for layer in counts)
    shape = (int(windows.shape[0]), int(windows.shape[1]))
    return SoftmaxRange(VERSION, name, shape, all(layer.qualifies for layer in layers), layers)


def _observe(
    config: ModelConfig, weights: dict[str, Any], window: Int[Array, " n"]
) -> list[tuple[Array, Array]]:
    """Return the histograms of each layer for one text."""
    seen = []

    def chunk_attention(q: Array, k: Array, v: Array, table: Array, chunks: Array, **settings: Any) -> Array:
        seen.append(_count(q, k[0], settings["scale"], settings["window"], settings["soft_cap"]))
        return reference.chunk_attention(q, k, v, table, chunks, **settings)

    forward_text(config, weights, window, chunk_attention)
    return seen


def forward_text(
    config: ModelConfig,
    weights: dict[str, Any],
    text: Int[Array, " n"],
    chunk_attention: Callable[..., Array],
) -> Float[Array, "n D"]:
    """Return the normed hidden states of one text, with another function for attention.

    The text runs through the plain forward as one prefill chunk with one KV page.
    `chunk_attention` takes what `pallas_kernels.attention.chunk.reference.chunk_attention` takes.
    It is called once a layer, in order.
    """
    check_has_heads(config, "a calibration or a search of spans")
    n = len(text)

    def decode_attention(*_: Any, into: Array, **__: Any) -> Array:
        return into

    kernels = dataclasses.replace(
        REFERENCE, name="observed", chunk_attention=chunk_attention, decode_attention=decode_attention
    )
    groups, dtype = len(config.windows), weights["embed"].dtype
    batch = Batch(
        token_ids=text,
        positions=jnp.arange(n),
        slots=jnp.tile(jnp.arange(n), (groups, 1)),
        page_table=jnp.zeros((groups, 1, 1), jnp.int32),
        lengths=jnp.array([n]),
        num_decodes=jnp.array(0),
        chunks=jnp.array([[0, n, 0, 0]]),
        sample_tokens=jnp.arange(n),
    )
    page = jnp.zeros((1, config.num_kv_heads, n, config.head_dim), dtype)
    context = Context(config, kernels)
    return transformer.forward(context, weights, [(page, page)] * config.num_layers, batch)[0]


def _count(
    q: Float[Array, "T N H"],
    k: Float[Array, "K T H"],
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> tuple[Array, Array]:
    """Return histograms, int32, of (visible scores, maxima of the rows)."""
    t, _, h = q.shape
    grouped = q.reshape(t, k.shape[0], -1, h).astype(jnp.float32)
    scores = jnp.einsum("tkgh,skh->kgts", grouped, k.transpose(1, 0, 2).astype(jnp.float32)) * scale
    if soft_cap is not None:
        scores = jnp.tanh(scores / soft_cap) * soft_cap
    distance = jnp.arange(t)[:, None] - jnp.arange(t)
    visible = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    tops = jnp.where(visible, scores, -jnp.inf).max(-1)
    return _histogram(scores, jnp.broadcast_to(visible, scores.shape)), _histogram(
        tops, jnp.ones(tops.shape, bool)
    )


def _histogram(values: Array, counted: Array) -> Array:
    ends = 2 * _LIMIT * _BINS_A_UNIT
    step = jnp.clip(jnp.floor((values + _LIMIT) * _BINS_A_UNIT), 0, ends - 1).astype(jnp.int32)
    return jnp.zeros(ends, jnp.int32).at[step.reshape(-1)].add(counted.reshape(-1))


def _between(counts: np.ndarray, tail: float) -> tuple[float, float]:
    """Return the range of the counts without a fraction `tail` at each end."""
    share = np.cumsum(counts) / counts.sum()
    first, last = int(np.argmax(share > tail)), int(np.argmax(share >= 1 - tail))
    return first / _BINS_A_UNIT - _LIMIT, (last + 1) / _BINS_A_UNIT - _LIMIT


def text_windows(checkpoint: Checkpoint, text: str, tokens: int) -> np.ndarray:
    """Return a text as token ids [W, tokens].

    An incomplete last window is dropped if it is not the only one.
    """
    if checkpoint.tokenizer_path is None:
        raise ConfigError("text", "...", "--tokens, because the model has no tokenizer")
    ids = np.array(load_tokenizer(checkpoint.tokenizer_path).encode(text))
    tokens = min(tokens, len(ids))
    if tokens < 2:
        raise ConfigError("text", text[:40], "a text of at least two tokens")
    return ids[: len(ids) // tokens * tokens].reshape(-1, tokens)


def _check(options: argparse.Namespace) -> None:
    """Check --window and --windows. Raises: ConfigError."""
    for name, least in (("window", 2), ("windows", 1)):
        if getattr(options, name) < least:
            raise ConfigError(name, getattr(options, name), f"at least {least}")


def load_tokens(path: str | Path) -> np.ndarray:
    """Return the token ids in a .npy file.

    Raises:
      ConfigError: the file is not an array of token ids.
      OSError: the file cannot be read.
    """
    accepted = "a .npy file of token ids [windows, tokens], at least one window of two"
    try:
        found = np.load(path)
    except (EOFError, ValueError) as error:  # not an array, or an array of pickled objects
        raise ConfigError("tokens", str(path), accepted) from error
    if not isinstance(found, np.ndarray):  # an archive of several arrays
        raise ConfigError("tokens", str(path), accepted)
    if found.ndim != 2 or found.shape[0] < 1 or found.shape[1] < 2 or found.dtype.kind not in "iu":
        raise ConfigError("tokens", f"{path}, {found.dtype} {list(found.shape)}", accepted)
    return found


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError("text", str(path), "a file of UTF-8 text") from error


def _load_windows(options: argparse.Namespace, checkpoint: Checkpoint) -> np.ndarray:
    length = min(options.window, checkpoint.model_config.max_position)
    windows = (
        text_windows(checkpoint, _read_text(options.text), length)
        if options.text
        else load_tokens(options.tokens)
    )
    last = checkpoint.model_config.vocab_size - 1
    for token in (int(windows.min()), int(windows.max())):
        if not 0 <= token <= last:
            raise ConfigError("tokens", token, f"0 to {last}")
    return windows[: options.windows, :length].astype(np.int32)


def _lines(found: SoftmaxRange) -> Iterable[str]:
    for i, layer in enumerate(found.layers):
        yield (
            f"layer {i:3}: 99.99% of scores in [{layer.score_low:.2f}, {layer.score_high:.2f}], rows' "
            f"maxima in [{layer.row_low:.2f}, {layer.row_high:.2f}], phi "
            f"{layer.phi:.2f}{'' if layer.qualifies else ': too wide'}"
        )
    yield f"{found.model}: {'qualifies' if found.qualifies else 'does not qualify'} for a unified max value"


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxflow.model.checkpoints.calibrate",
        description="Measure the distribution of a model's softmax inputs.",
    )
    parser.add_argument("model", metavar="MODEL", help="a folder, a .gguf file or a hub id")
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--text", type=Path, help="text file")
    given.add_argument("--tokens", type=Path, help=".npy file of token ids [windows, tokens]")
    parser.add_argument("--window", type=int, default=512, help="tokens in a window (default: %(default)s)")
    parser.add_argument("--windows", type=int, default=64, help="most windows to read (default: %(default)s)")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="float32",
        help="dtype of the model (default: %(default)s)",
    )
    parser.add_argument("--output", type=Path, help="output file (default: next to the model)")
    options = parser.parse_args(arguments)
    choose_platform()
    try:
        _check(options)
        checkpoint = open_checkpoint(options.model)
        if checkpoint.source is None:
            raise ConfigError("model", options.model, "a model with weights")
        path = options.output or default_path(checkpoint.source.path)
        check_output("output", str(path))  # before the model runs
        windows = _load_windows(options, checkpoint)
        found = softmax_range(
            checkpoint.name, checkpoint.model_config, checkpoint.load(options.dtype), windows, progress=True
        )
        path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    except (CheckpointError, ConfigError, TokenizerError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    print(*_lines(found), f"wrote {path}", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main, sys.argv[1:]))
