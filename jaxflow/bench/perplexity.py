"""Perplexity of a text under each way to keep a model's numbers, through the engine's prompt log-probabilities.

python -m jaxflow.bench perplexity --model FOLDER_OR_GGUF --tokens tests/data/ppl/wikitext2_8x1024.npy --dtype bfloat16

The rows of the file are windows, each scored as a prompt of its own; beside the perplexity is how far the log-probability
of a token moved from the wide model's.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from absl import flags

from jaxflow.bench import options, report
from jaxflow.bench.throughput import head
from jaxflow.config import EngineConfig
from jaxflow.engine.request import SamplingParams
from jaxflow.flags import engine_config_from_flags
from jaxflow.llm import LLM

WAYS = {
    "wide": {"quantization": None, "kv_cache_dtype": "auto"},
    "fp8": {"quantization": "fp8", "kv_cache_dtype": "auto"},
    "fp8, fp8 KV": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    "fp8 KV": {"quantization": None, "kv_cache_dtype": "fp8"},
    "int8 KV": {"quantization": None, "kv_cache_dtype": "int8"},
}


def define_flags() -> None:
    options.define_engine(enable_prefix_caching=False, max_num_seqs=8)
    flags.DEFINE_string("output_json", None, "Write the report to this file.")
    flags.DEFINE_string("tokens", None, "A .npy file of token ids, [windows, tokens].", required=True)
    flags.DEFINE_integer("windows", None, "Score only the first so many.", lower_bound=1)


def token_logprobs(llm: LLM, windows: np.ndarray) -> np.ndarray:
    """[W, N - 1] float64: the log-probability of every token of each window but its first, given those before it."""
    scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate(windows.tolist(), scored, use_tqdm=False)

    def row(output: Any, window: list[int]) -> list[float]:
        assert output.prompt_logprobs is not None
        return [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], window[1:], strict=True)]

    return np.array([row(output, window) for output, window in zip(outputs, windows.tolist(), strict=True)])


def measure(config: EngineConfig, windows: np.ndarray, ways: Sequence[str] = tuple(WAYS)) -> Iterator[tuple[LLM, dict[str, Any]]]:
    """For each of some `WAYS` its engine, open, and {way, perplexity, mean_moved, max_moved}: moved from the first way."""
    wide: np.ndarray | None = None
    for way in ways:
        with LLM.from_config(dataclasses.replace(config, **WAYS[way]), progress=False) as llm:
            found = token_logprobs(llm, windows)
            wide = found if wide is None else wide
            moved = np.abs(found - wide)
            yield (
                llm,
                {
                    "way": way,
                    "perplexity": float(np.exp(-found.mean())),
                    "mean_moved": float(moved.mean()),
                    "max_moved": float(moved.max()),
                },
            )


def run() -> dict[str, Any]:
    """The command. Raises: ConfigError, OSError, ValueError for flags that do not work."""
    f = flags.FLAGS
    windows = np.load(f.tokens)[: f.windows].astype(np.int64)
    result: dict[str, Any] = {}
    ways = []
    for llm, way in measure(engine_config_from_flags(), windows):
        result = result or {"command_name": "perplexity", **head(llm), "tokens": f.tokens, "windows": list(windows.shape)}
        ways.append(way)
        print(
            report.line(
                f"{way['way']}:", f"{way['perplexity']:.4f}, a token's log-probability moved by {way['mean_moved']:.4f} at the mean"
            )
        )
    return result | {"ways": ways}
