"""Perplexity and last-word accuracy of a text by the share of V rows that
attention reads (FlexGen §5, Table 5).

  python -m jaxflow.bench value_rows --model FOLDER_OR_GGUF --value_top_k_percents 100,10
      --tokens tests/data/ppl/wikitext2_rawtext_8x1024.npy

The rows of the token file are windows. The perplexity is over the first --windows of them, each scored as a
separate prompt. The last-word set is made from all windows as LAMBADA is: a passage ends with the
last word of a clause, and the word occurs earlier in the passage. A word counts as right if each of
its tokens is the likeliest one.

Every token of a prompt attends as a decode of an offloaded run does (`jaxflow.flexgen.sparse_values`): a
softmax over all keys, and the V rows of the top k percent.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax import lax

from jaxflow.bench.engine.perplexity import changes, token_logprobs
from jaxflow.bench.engine.throughput import head
from jaxflow.bench.report import requests as report
from jaxflow.bench.workload import flags as options
from jaxflow.cli.engine_flags import engine_config_from_flags
from jaxflow.config import ConfigError
from jaxflow.flexgen.sparse_values import attend, choose, take_rows, top_count
from jaxflow.llm import LLM
from jaxflow.model.checkpoints.calibrate import load_tokens
from jaxflow.request import SamplingParams
from jaxflow.text.tokenizer import Tokenizer
from pallas_kernels.attention.reference import read_pages
from pallas_kernels.kernel_set import REFERENCE, KernelSet

_QUERIES = 32  # query tokens that choose at a time
_PASSAGE_WORDS = (40, 120)  # words of a passage
_CLAUSE_END = re.compile(r"(?<=[.!?,;])\s+")
_WORD = re.compile(r"[A-Za-z]{3,}")


def define_flags() -> None:
    options.define_engine(enable_prefix_caching=False, max_num_seqs=2)
    flags.DEFINE_string("output_json", None, "Write the report to this file.")
    flags.DEFINE_string("tokens", None, "File of token ids (.npy), [windows, tokens].", required=True)
    flags.DEFINE_integer(
        "windows", None, "Number of windows to score, from the first; default: all.", lower_bound=1
    )
    flags.DEFINE_integer(
        "words", None, "Number of last words to score, from the first; default: all.", lower_bound=1
    )
    flags.DEFINE_list(
        "value_top_k_percents",
        ["100", "50", "25", "10", "5", "1"],
        "Percentages of the cached value vectors that attention reads, one measurement each.",
    )


def kernels(percent: float) -> KernelSet:
    """Return the reference implementations, with chunks that read `percent` of the V rows; 100: all."""
    if percent == 100:
        return REFERENCE
    return dataclasses.replace(
        REFERENCE,
        name=f"reference, {percent:g} % of the V rows",
        chunk_attention=functools.partial(_chunk_attention, percent),
    )


def _chunk_attention(
    percent: float,
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    chunks: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sink_logits: jax.Array | None = None,
    **_: Any,
) -> jax.Array:
    """Run chunk attention over a 16-bit or wider cache, where every query attends to few V rows.

    Arguments and result: see `pallas_kernels.attention.chunk.reference`.
    """
    if sink_logits is not None:
        raise ConfigError("model", "a model with attention sinks", "a model without them")
    most = top_count(percent, page_table.shape[1] * k_pages.shape[2])

    def one_query(token: jax.Array, position: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        chosen, weights = choose(
            token[None], k[None], k[None, :, position], position[None], jnp.ones(1, bool),
            percent=percent, most=most, scale=scale, window=window, soft_cap=soft_cap,
        )  # fmt: skip
        return attend(weights, take_rows(v[None], chosen), v[None, :, position])[0].astype(q.dtype)

    def one_chunk(c: jax.Array, out: jax.Array) -> jax.Array:
        first, tokens, row, position = chunks[c]
        at = jnp.arange(q.shape[0]) - first
        mine = (at >= 0) & (at < tokens)
        k, v = (read_pages(pages, None, page_table[row]) for pages in (k_pages, v_pages))
        positions = jnp.clip(position + at, 0, k.shape[1] - 1)
        new = lax.map(lambda one: one_query(one[0], one[1], k, v), (q, positions), batch_size=_QUERIES)
        return jnp.where(mine[:, None, None], new, out)

    def if_any(c: jax.Array, out: jax.Array) -> jax.Array:
        return lax.cond(chunks[c, 1] > 0, one_chunk, lambda c, out: out, c, out)

    return lax.fori_loop(0, chunks.shape[0], if_any, jnp.zeros_like(q))


class LastWord(NamedTuple):
    """A passage without its last word, and the word."""

    context: str
    word: str


def last_words(text: str) -> Iterator[LastWord]:
    """Yield a passage for each clause of a text with a last word that occurs earlier in the passage."""
    before: list[str] = []
    for clause in _CLAUSE_END.split(text):
        passage = [*before, *clause.split()]
        before = list(passage)
        while passage and not any(map(str.isalnum, passage[-1])):
            passage.pop()  # a mark by itself
        last = passage[-1].rstrip(".!?,;") if passage else ""
        context = passage[-_PASSAGE_WORDS[1] : -1]
        if len(context) >= _PASSAGE_WORDS[0] and _WORD.fullmatch(last) and last in context:
            yield LastWord(" ".join(context), last)


def tokenized(tokenizer: Tokenizer, passages: Iterable[LastWord]) -> Iterator[tuple[list[int], int]]:
    """Yield the token ids of each passage, and how many of the last ones are its last word."""
    for context, word in passages:
        ids, start = (
            tokenizer.encode(text, add_special_tokens=False) for text in (f"{context} {word}", context)
        )
        if ids[: len(start)] == start:  # else the word's tokens begin before the word
            yield ids, len(ids) - len(start)


def right_words(llm: LLM, words: Sequence[tuple[list[int], int]]) -> list[bool]:
    """Return for each passage whether every token of its last word is the likeliest one."""
    scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([ids for ids, _ in words], scored, use_tqdm=False)
    found = []
    for output, (ids, count) in zip(outputs, words, strict=True):
        assert output.prompt_logprobs is not None
        last = zip(output.prompt_logprobs[-count:], ids[-count:], strict=True)
        found.append(all(entry is not None and entry[token].rank == 1 for entry, token in last))
    return found


def parse_percents(words: Sequence[str]) -> list[float]:
    """Return percentages. Raises: ConfigError."""
    try:
        found = [float(word) for word in words]
        if not found or not all(0 < percent <= 100 for percent in found):
            raise ValueError
    except ValueError:
        accepted = "comma-separated numbers above 0 and up to 100"
        raise ConfigError("value_top_k_percents", ",".join(words), accepted) from None
    return found


def measure(
    open_llm: Callable[[KernelSet], LLM],
    windows: np.ndarray,
    texts: np.ndarray,
    percents: Sequence[float],
    most_words: int | None,
) -> Iterator[tuple[LLM, dict[str, Any]]]:
    """Yield, for each percentage, its open engine and its figures. Changes are from the first percentage."""
    first: np.ndarray | None = None
    for percent in percents:
        with open_llm(kernels(percent)) as llm:
            tokenizer = llm.tokenizer
            passages = [] if tokenizer is None else [
                passage for ids in texts.tolist() for passage in last_words(tokenizer.decode(ids))
            ]  # fmt: skip
            words = [] if tokenizer is None else list(tokenized(tokenizer, passages))[:most_words]
            found = token_logprobs(llm, windows)
            first = found if first is None else first
            right = right_words(llm, words) if words else []
            yield (
                llm,
                {
                    "value_top_k_percent": percent,
                    **changes(found, first),
                    "words": len(right),
                    "accuracy": sum(right) / len(right) if right else None,
                },
            )


def run() -> dict[str, Any]:
    """Run the command and return its report. Raises: ConfigError, CheckpointError, OSError."""
    f = flags.FLAGS
    texts = load_tokens(f.tokens).astype(np.int64)
    percents, config = parse_percents(f.value_top_k_percents), engine_config_from_flags()
    result: dict[str, Any] = {}
    rows = []

    def open_llm(chosen: KernelSet) -> LLM:
        return LLM.from_config(config, progress=False, kernels=chosen)

    for llm, row in measure(open_llm, texts[: f.windows], texts, percents, f.words):
        result = result or {
            "command_name": "value_rows",
            **head(llm),
            "tokens": f.tokens,
            "windows": list(texts[: f.windows].shape),
        }
        rows.append(row)
        accuracy = "no words" if row["accuracy"] is None else f"{row['accuracy']:.3f} of {row['words']} words"
        print(
            report.line(
                f"{row['value_top_k_percent']:g} % of the V rows:",
                f"perplexity {row['perplexity']:.4f}, last-word accuracy {accuracy}",
            ),
            flush=True,
        )
    return result | {"rows": rows}
