"""Perplexity of a text at each precision of weights and KV, from the engine's prompt log-probabilities.

  python -m jaxflow.bench perplexity --model FOLDER_OR_GGUF --tokens tests/data/ppl/wikitext2_8x1024.npy
      --dtype bfloat16

With --span_files the unquantized model is measured with full attention, and then with each file of attention
spans (`python -m search spans`).

The rows of the token file are windows, and each window is scored as a separate prompt. The report also holds
the change of a token's log-probability from the unquantized model. The device has no 4-bit cache. Therefore
4-bit KV is measured with an unquantized cache. Keys and values are rounded to 4 bits before the cache stores
them. Every read, including reads of a chunk's own tokens, then sees the rounded values.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from jaxflow.bench.engine.throughput import head
from jaxflow.bench.report import requests as report
from jaxflow.bench.workload import flags as options
from jaxflow.cli.engine_flags import engine_config_from_flags
from jaxflow.config import EngineConfig
from jaxflow.kv.int4 import dequantize_kv, quantize_kv
from jaxflow.llm import LLM
from jaxflow.model.attention_spans import keys_share, read_spans
from jaxflow.model.checkpoints.calibrate import load_tokens
from jaxflow.request import SamplingParams
from pallas_kernels.kernel_set import REFERENCE, KernelSet
from pallas_kernels.pointwise.rope_append import reference
from pallas_kernels.pointwise.rope_append.reference import append


def rope_append_in_4_bits(
    fused: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    positions: jax.Array,
    slots: jax.Array,
    *,
    head_dim: int,
    **settings: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Run `reference.rope_append` to an unquantized cache, with keys and values rounded to 4 bits."""
    tokens = jnp.arange(fused.shape[0])
    alone = jnp.zeros((len(tokens), k_pages.shape[1], 1, head_dim), fused.dtype)  # a page for each token
    q, *written = reference.rope_append(fused, alone, alone, positions, tokens, head_dim=head_dim, **settings)
    k, v = (dequantize_kv(quantize_kv(jnp.asarray(new)[:, :, 0]), fused.dtype) for new in written)
    return q, append(k_pages, k, slots), append(v_pages, v, slots)


@dataclasses.dataclass(frozen=True)
class Precision:
    """Engine settings, and kernels that differ from the engine's own choice."""

    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    kernels: KernelSet | None = None


KV_4_BITS = dataclasses.replace(
    REFERENCE, name="reference, KV through 4 bits", rope_append=rope_append_in_4_bits
)
PRECISIONS = {
    "unquantized": Precision(),
    "fp8": Precision("fp8"),
    "fp8, fp8 KV": Precision("fp8", "fp8"),
    "fp8 KV": Precision(None, "fp8"),
    "int8 KV": Precision(None, "int8"),
    "int4": Precision("int4"),
    "int4, 4-bit KV": Precision("int4", kernels=KV_4_BITS),
    "4-bit KV": Precision(kernels=KV_4_BITS),
}


def define_flags() -> None:
    options.define_engine(enable_prefix_caching=False, max_num_seqs=8)
    flags.DEFINE_string("output_json", None, "Write the report to this file.")
    flags.DEFINE_string("tokens", None, "File of token ids (.npy), [windows, tokens].", required=True)
    flags.DEFINE_integer(
        "windows", None, "Number of windows to score, from the first; default: all.", lower_bound=1
    )
    flags.DEFINE_list(
        "span_files",
        None,
        "Files of attention spans to measure, instead of the precisions, as a.json,b.json.",
    )


def token_logprobs(llm: LLM, windows: np.ndarray) -> np.ndarray:
    """Return the log-probability of every token but the first of each window, given the tokens before it.

    Shape [W, N - 1], float64.
    """
    scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate(windows.tolist(), scored, use_tqdm=False)

    def row(output: Any, window: list[int]) -> list[float]:
        assert output.prompt_logprobs is not None
        return [
            entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], window[1:], strict=True)
        ]

    return np.array([row(output, window) for output, window in zip(outputs, windows.tolist(), strict=True)])


def measure(
    config: EngineConfig, windows: np.ndarray, precisions: Sequence[str] = tuple(PRECISIONS)
) -> Iterator[tuple[LLM, dict[str, Any]]]:
    """Yield, for each of `precisions`, its open engine and {precision, perplexity, mean_change, max_change}.

    The `changes` values are changes from the first of `precisions`.
    """
    unquantized: np.ndarray | None = None
    for name in precisions:
        precision = PRECISIONS[name]
        settings = dataclasses.replace(
            config, quantization=precision.quantization, kv_cache_dtype=precision.kv_cache_dtype
        )
        with LLM.from_config(settings, progress=False, kernels=precision.kernels) as llm:
            found = token_logprobs(llm, windows)
            unquantized = found if unquantized is None else unquantized
            yield llm, {"precision": name, **changes(found, unquantized)}


def measure_spans(
    config: EngineConfig, windows: np.ndarray, files: Sequence[str]
) -> Iterator[tuple[LLM, dict[str, Any]]]:
    """Yield, for full attention and each spans file, its open engine and {spans,
    keys_percent, held_percent, ...}.

    keys_percent: the keys that the queries of a window see. held_percent: the keys that their page groups
    hold. Other values: see `measure`.
    """
    dense: np.ndarray | None = None
    for path in (None, *files):
        with LLM.from_config(dataclasses.replace(config, attention_spans=path), progress=False) as llm:
            found = token_logprobs(llm, windows)
            dense = found if dense is None else dense
            keys, held = (
                100 * keys_share(llm.model_config, windows.shape[1], held=held) if path else 100.0
                for held in (False, True)
            )
            shares = {"keys_percent": keys, "held_percent": held}
            yield llm, {"spans": path, **shares, **changes(found, dense)}


def changes(found: np.ndarray, unquantized: np.ndarray) -> dict[str, float]:
    """Return the perplexity of these token log-probabilities, and their distance from the unquantized
    model's."""
    distance = np.abs(found - unquantized)
    return {
        "perplexity": float(np.exp(-found.mean())),
        "mean_change": float(distance.mean()),
        "max_change": float(distance.max()),
    }


def run() -> dict[str, Any]:
    """Run the command and return its report. Raises: ConfigError, CheckpointError, OSError."""
    f = flags.FLAGS
    windows = load_tokens(f.tokens)[: f.windows].astype(np.int64)
    config = engine_config_from_flags()
    if f.span_files is None:
        found, name = measure(config, windows), "precision"
    else:
        for path in f.span_files:
            read_spans(path)  # a bad file is refused before the first engine starts
        found, name = measure_spans(config, windows, f.span_files), "spans"
    result: dict[str, Any] = {}
    rows = []
    for llm, row in found:
        result = result or {
            "command_name": "perplexity",
            **head(llm),
            "tokens": f.tokens,
            "windows": list(windows.shape),
        }
        rows.append(row)
        keys = "" if name == "precision" else f"{row['keys_percent']:.1f} % of the keys, perplexity "
        print(
            report.line(
                f"{'full attention' if row[name] is None else row[name]}:",
                (
                    f"{keys}{row['perplexity']:.4f}, mean change of a token's log-probability "
                    f"{row['mean_change']:.4f}"
                ),
            )
        )
    return result | ({"precisions": rows} if name == "precision" else {"kind": "spans", "spans": rows})
