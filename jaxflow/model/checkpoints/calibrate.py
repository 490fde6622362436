"""Runs text through a model and writes how its softmax inputs are distributed (FlashDecoding++Next §3, Fig.
5).

python -m jaxflow.model.checkpoints.calibrate MODEL --text FILE      (or --tokens FILE.npy, token ids [windows, tokens])

The result says, for each layer, φ and its bound, and whether the model qualifies for a unified maximum; OPT
does not. It is written beside the model, where an engine finds it by itself, or to --output, for
`--calibration`.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Iterable
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
from jaxflow.config import ConfigError, ModelConfig
from jaxflow.model import transformer
from jaxflow.model.batch import Batch
from jaxflow.model.checkpoints.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from jaxflow.model.op_registry import Context
from jaxflow.model.softmax_range import VERSION, SoftmaxRange, layer_range, path_beside
from jaxflow.parallel.mesh import choose_platform
from jaxflow.text.tokenizer import load_tokenizer
from jaxflow.text.vocabulary import TokenizerError
from pallas_kernels.attention.chunk import reference
from pallas_kernels.kernel_set import REFERENCE

_STEPS_A_UNIT, _REACH = (
    8,
    1024,
)  # scores are counted in steps of 1/8 from -1024 to 1024; what is beyond counts as the end
_CENTRE = 0.9999  # of all scores, the paper's figure


@dataclasses.dataclass
class Counts:
    """Of one layer: scores and rows' maxima by step, [2 · 1024 · 8] each."""

    scores: np.ndarray
    tops: np.ndarray


def softmax_range(
    name: str, config: ModelConfig, weights: dict[str, Any], windows: np.ndarray, *, progress: bool = False
) -> SoftmaxRange:
    """What the scores of each layer are over `windows`, token ids [W, N], each a text of its own.

    Raises: ConfigError for no tokens at all, of which nothing can be counted.
    """
    if not windows.size:
        raise ConfigError("windows", list(windows.shape), "token ids [windows, tokens], at least one of each")
    counts = [Counts(*np.zeros((2, 2 * _REACH * _STEPS_A_UNIT), np.int64)) for _ in config.layers]
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
    """Each layer's counts of one text, by the plain forward with an attention that counts: one prefill chunk,
    one page.
    """
    n, seen = len(window), []

    def chunk_attention(q: Array, k: Array, v: Array, table: Array, chunks: Array, **settings: Any) -> Array:
        seen.append(_count(q, k[0], settings["scale"], settings["window"], settings["soft_cap"]))
        return reference.chunk_attention(q, k, v, table, chunks, **settings)

    def decode_attention(*_: Any, into: Array, **__: Any) -> Array:
        return into

    kernels = dataclasses.replace(
        REFERENCE, name="observed", chunk_attention=chunk_attention, decode_attention=decode_attention
    )
    groups, dtype = len(config.windows), weights["embed"].dtype
    batch = Batch(
        token_ids=window,
        positions=jnp.arange(n),
        slots=jnp.tile(jnp.arange(n), (groups, 1)),
        page_table=jnp.zeros((groups, 1, 1), jnp.int32),
        lengths=jnp.array([n]),
        num_decodes=jnp.array(0),
        chunks=jnp.array([[0, n, 0, 0]]),
        sample_tokens=jnp.array([n - 1]),
    )
    page = jnp.zeros((1, config.num_kv_heads, n, config.head_dim), dtype)
    transformer.forward(Context(config, kernels), weights, [(page, page)] * config.num_layers, batch)
    return seen


def _count(
    q: Float[Array, "T N H"],
    k: Float[Array, "K T H"],
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> tuple[Array, Array]:
    """(scores, rows' maxima) by step, int32, of the keys that each token sees."""
    t, _, h = q.shape
    grouped = q.reshape(t, k.shape[0], -1, h).astype(jnp.float32)
    scores = jnp.einsum("tkgh,skh->kgts", grouped, k.transpose(1, 0, 2).astype(jnp.float32)) * scale
    if soft_cap is not None:
        scores = jnp.tanh(scores / soft_cap) * soft_cap
    distance = jnp.arange(t)[:, None] - jnp.arange(t)
    visible = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    tops = jnp.where(visible, scores, -jnp.inf).max(-1)
    return _steps(scores, jnp.broadcast_to(visible, scores.shape)), _steps(tops, jnp.ones(tops.shape, bool))


def _steps(values: Array, counted: Array) -> Array:
    ends = 2 * _REACH * _STEPS_A_UNIT
    step = jnp.clip(jnp.floor((values + _REACH) * _STEPS_A_UNIT), 0, ends - 1).astype(jnp.int32)
    return jnp.zeros(ends, jnp.int32).at[step.reshape(-1)].add(counted.reshape(-1))


def _between(counts: np.ndarray, tail: float) -> tuple[float, float]:
    """Values that all but `tail` of what was counted lies above, and below."""
    share = np.cumsum(counts) / counts.sum()
    first, last = int(np.argmax(share > tail)), int(np.argmax(share >= 1 - tail))
    return first / _STEPS_A_UNIT - _REACH, (last + 1) / _STEPS_A_UNIT - _REACH


def text_windows(checkpoint: Checkpoint, text: str, tokens: int) -> np.ndarray:
    """A text as token ids [W, tokens]; what does not fill a window is left out, unless it is all there is."""
    if checkpoint.tokenizer_path is None:
        raise ConfigError("text", "...", "--tokens: this model came without a tokenizer")
    ids = np.array(load_tokenizer(checkpoint.tokenizer_path).encode(text))
    tokens = min(tokens, len(ids))
    if tokens < 2:
        raise ConfigError("text", text[:40], "a text of at least two tokens")
    return ids[: len(ids) // tokens * tokens].reshape(-1, tokens)


def _check(options: argparse.Namespace) -> None:
    """Raises ConfigError for windows in which no token follows another, or no windows."""
    for name, least in (("window", 2), ("windows", 1)):
        if getattr(options, name) < least:
            raise ConfigError(name, getattr(options, name), f"at least {least}")


def load_tokens(path: str | Path) -> np.ndarray:
    """The array of a .npy file of token ids. Raises: ConfigError for what is no such file; OSError for one
    that cannot be read.
    """
    accepted = "a .npy file of token ids [windows, tokens], at least one window of two"
    try:
        found = np.load(path)
    except (EOFError, ValueError) as error:  # no file of numbers; objects, which are pickled, are none either
        raise ConfigError("tokens", str(path), accepted) from error
    if not isinstance(found, np.ndarray):  # an archive of several
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
            f"layer {i:3}: 99.99% of scores in [{layer.score_low:.2f}, {layer.score_high:.2f}], rows' maxima in "
            f"[{layer.row_low:.2f}, {layer.row_high:.2f}], phi {layer.phi:.2f}{'' if layer.qualifies else ': too wide'}"
        )
    yield f"{found.model}: {'qualifies' if found.qualifies else 'does not qualify'} for a unified maximum"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jaxflow.model.checkpoints.calibrate",
        description="How a model's softmax inputs are distributed.",
    )
    parser.add_argument("model", metavar="MODEL", help="a folder, a .gguf file or a hub id")
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--text", type=Path, help="a file of text")
    given.add_argument("--tokens", type=Path, help="a .npy file of token ids [windows, tokens]")
    parser.add_argument(
        "--window", type=int, default=512, help="tokens that are read together (default: %(default)s)"
    )
    parser.add_argument(
        "--windows", type=int, default=64, help="how many windows at most (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="float32",
        help="of the forward (default: %(default)s)",
    )
    parser.add_argument("--output", type=Path, help="where to write; default: beside the model")
    options = parser.parse_args(arguments)
    choose_platform()
    try:
        _check(options)
        checkpoint = open_checkpoint(options.model)
        if checkpoint.source is None:
            raise ConfigError(
                "model", options.model, "a model with weights: random ones have nothing to find"
            )
        path = options.output or path_beside(checkpoint.source.path)
        check_output("output", str(path))  # before the model has run
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
