"""Perplexity of a text under each way to keep a model's numbers, through the engine's prompt
log-probabilities.

python -m jaxflow.bench perplexity --model FOLDER_OR_GGUF --tokens tests/data/ppl/wikitext2_8x1024.npy --dtype
bfloat16

The rows of the file are windows, each scored as a prompt of its own; beside the perplexity is how far the
log-probability of a token moved from the wide model's. The device has no cache of 4 bits: what KV of 4 bits
costs is measured over a wide cache, to which keys and values are written as 4 bits give them back, so that
every read is of those, a chunk's own included.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from jaxflow.bench import options, report
from jaxflow.bench.throughput import head
from jaxflow.config import EngineConfig
from jaxflow.engine.request import SamplingParams
from jaxflow.flags import engine_config_from_flags
from jaxflow.llm import LLM
from jaxflow.memory.quantize import dequantize_kv, quantize_kv
from jaxflow.model.calibrate import load_tokens
from pallas_kernels import reference
from pallas_kernels.kernel_set import REFERENCE, KernelSet
from pallas_kernels.reference.rope_append import append


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
    """`reference.rope_append` to a wide cache, of keys and values that have been 4 bits in between."""
    tokens = jnp.arange(fused.shape[0])
    alone = jnp.zeros((len(tokens), k_pages.shape[1], 1, head_dim), fused.dtype)  # a page for each token
    q, *written = reference.rope_append(fused, alone, alone, positions, tokens, head_dim=head_dim, **settings)
    k, v = (dequantize_kv(quantize_kv(jnp.asarray(new)[:, :, 0]), fused.dtype) for new in written)
    return q, append(k_pages, k, slots), append(v_pages, v, slots)


@dataclasses.dataclass(frozen=True)
class Way:
    """Settings of an engine, and its kernels where not those it would choose."""

    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    kernels: KernelSet | None = None


KV_4_BITS = dataclasses.replace(
    REFERENCE, name="reference, KV through 4 bits", rope_append=rope_append_in_4_bits
)
WAYS = {
    "wide": Way(),
    "fp8": Way("fp8"),
    "fp8, fp8 KV": Way("fp8", "fp8"),
    "fp8 KV": Way(None, "fp8"),
    "int8 KV": Way(None, "int8"),
    "int4": Way("int4"),
    "int4, 4-bit KV": Way("int4", kernels=KV_4_BITS),
    "4-bit KV": Way(kernels=KV_4_BITS),
}


def define_flags() -> None:
    options.define_engine(enable_prefix_caching=False, max_num_seqs=8)
    flags.DEFINE_string("output_json", None, "Write the report to this file.")
    flags.DEFINE_string("tokens", None, "A .npy file of token ids, [windows, tokens].", required=True)
    flags.DEFINE_integer("windows", None, "Score only the first so many.", lower_bound=1)


def token_logprobs(llm: LLM, windows: np.ndarray) -> np.ndarray:
    """[W, N - 1] float64: the log-probability of every token of each window but its first, given those before
    it.
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
    config: EngineConfig, windows: np.ndarray, ways: Sequence[str] = tuple(WAYS)
) -> Iterator[tuple[LLM, dict[str, Any]]]:
    """For each of some `WAYS` its engine, open, and {way, perplexity, mean_moved, max_moved}: moved from the
    first way.
    """
    wide: np.ndarray | None = None
    for name in ways:
        way = WAYS[name]
        settings = dataclasses.replace(
            config, quantization=way.quantization, kv_cache_dtype=way.kv_cache_dtype
        )
        with LLM.from_config(settings, progress=False, kernels=way.kernels) as llm:
            found = token_logprobs(llm, windows)
            wide = found if wide is None else wide
            yield llm, {"way": name, **moved(found, wide)}


def moved(found: np.ndarray, wide: np.ndarray) -> dict[str, float]:
    """The perplexity of tokens of these log-probabilities, and how far they are from the wide model's."""
    distance = np.abs(found - wide)
    return {
        "perplexity": float(np.exp(-found.mean())),
        "mean_moved": float(distance.mean()),
        "max_moved": float(distance.max()),
    }


def run() -> dict[str, Any]:
    """The command. Raises: ConfigError, OSError, ValueError for flags that do not work."""
    f = flags.FLAGS
    windows = load_tokens(f.tokens)[: f.windows].astype(np.int64)
    result: dict[str, Any] = {}
    ways = []
    for llm, way in measure(engine_config_from_flags(), windows):
        result = result or {
            "command_name": "perplexity",
            **head(llm),
            "tokens": f.tokens,
            "windows": list(windows.shape),
        }
        ways.append(way)
        print(
            report.line(
                f"{way['way']}:",
                (
                    f"{way['perplexity']:.4f}, a token's log-probability moved by "
                    f"{way['mean_moved']:.4f} at the mean"
                ),
            )
        )
    return result | {"ways": ways}
