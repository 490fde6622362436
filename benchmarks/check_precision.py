"""Compare the tokens and the experts of low precisions with those of one wide precision, at full width.

    python -m benchmarks.check_precision --model qwen3-30b-a3b --layers 8 --against bfloat16
        --quantization fp8,fp8_per_block --kv_cache_dtype auto,fp8 --output_json FILE

All precisions have the same weights, quantized, and read the same random tokens (teacher forcing) in full
steps of decodes and prefill. Each attends to the keys and values that it wrote. The comparison of the logits,
the noise floor and the scale of the embeddings are those of `benchmarks.check_plan`. The noise is the wide
precision in steps of another size.

In a mixture a small error may choose another expert. `sets_changed` is the share of choices, one for each
token and layer, whose set of experts differs. `experts_replaced` is the share of the chosen experts that the
other precision did not choose.

--quantization also accepts `none`. Each format of weights is combined with each format of the cache.
--rounded names formats whose weights are made wide again. "fp8 rounded" is the wide engine with such weights,
and shows the error of the weights alone. "fp8 beyond rounding" compares the engine in fp8 with it.

A dense model of the same width is a control for the errors that no choice of experts makes larger.
"""

import argparse
import dataclasses
import functools
import gc
import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.check_plan import (
    ABOVE,
    Lengths,
    add_flags,
    all_positions,
    check_sizes,
    comparer,
    described,
    drawn_lengths,
    floor_of,
    give_pages,
    layout_of,
    rows_in,
    spread,
    steps_of,
    streams,
)
from benchmarks.check_weights import embed_scale, heads, scaled
from jaxflow.bench.report import machine
from jaxflow.bench.report.requests import write_json
from jaxflow.config import ConfigError, EngineConfig
from jaxflow.engine.executor import Executor
from jaxflow.engine.executor_start import make_executor
from jaxflow.engine.layout import StepLayout
from jaxflow.engine.programs import STEP_DONATES
from jaxflow.engine.settings import resolve
from jaxflow.engine.start import prepare_process
from jaxflow.model.checkpoints.checkpoint import CheckpointError, open_checkpoint
from jaxflow.model.weight_spec import Leaf
from jaxflow.model.weights import leaves
from jaxflow.pipeline.compiler import compile_plan
from jaxflow.pipeline.handwritten import sequential_plan
from pallas_kernels.gemm.block_fp8_format import dequantize_block_fp8
from pallas_kernels.gemm.grouped.int4_format import dequantize_experts
from pallas_kernels.gemm.grouped.mxfp4_format import dequantize_mxfp4
from pallas_kernels.gemm.int4.reference import dequantize_int4
from pallas_kernels.measure.provenance import provenance
from pallas_kernels.pointwise.quantize.reference import dequantize
from pallas_kernels.quantized import BlockFp8, ExpertInt4, Int4, Mxfp4, Quantized

NOISE = "noise"


@dataclasses.dataclass(frozen=True)
class Precision:
    """The formats of weights and cache. quantization: None for the wide precision."""

    quantization: str | None = None
    kv_cache_dtype: str = "auto"

    @property
    def name(self) -> str:
        cache = "" if self.kv_cache_dtype == "auto" else f", {self.kv_cache_dtype} KV"
        return (self.quantization or "wide") + cache


def precisions_of(quantization: str, kv_cache_dtype: str) -> list[Precision]:
    """Return each format of weights with each format of the cache, all but the wide precision."""
    every = [
        Precision(None if weights == "none" else weights, cache)
        for weights in quantization.split(",")
        for cache in kv_cache_dtype.split(",")
    ]
    return [precision for precision in every if precision != Precision()]


# ---- one precision


@dataclasses.dataclass(frozen=True)
class Run:
    """What one precision computed of all steps' rows, in the order of `places`.

    stream: the residual stream after the last layer, [n, D]. experts: those of each token and mixture layer,
    int32 [n, layers, e]; no layers in a dense model.
    """

    stream: jax.Array
    experts: np.ndarray
    places: Mapping[tuple[int, int], int]


def executor_of(given: argparse.Namespace, precision: Precision, lengths: Lengths) -> Executor:
    """Return an executor whose cache holds all sequences, before warm-up. Raises: ConfigError."""
    pages = int((-(-lengths.totals // given.block_size)).sum()) + 1
    settings = EngineConfig(
        model=given.model,
        load_format=given.load_format,
        dtype=given.against,
        quantization=precision.quantization,
        kv_cache_dtype=precision.kv_cache_dtype,
        block_size=given.block_size,
        max_model_len=int(lengths.totals.max()) + 1,
        max_num_batched_tokens=given.tokens,
        max_num_seqs=given.sequences,
        num_kv_pages=pages,
        compilation_cache_dir=given.compilation_cache_dir,
        plan="sequential",
    )
    prepare_process(settings)
    checkpoint = open_checkpoint(settings.model, load_format=given.load_format)
    model = checkpoint.model_config
    model = dataclasses.replace(model, layers=model.layers[: given.layers])
    plans = {size: (sequential_plan(model, size),) for size in (given.other_tokens, given.tokens)}
    checkpoint = dataclasses.replace(checkpoint, model_config=model)
    executor = make_executor(resolve(settings, model), checkpoint, plans, progress=False)
    give_pages(executor, lengths)
    return executor


def routed_step(executor: Executor, layout: StepLayout, *, quantized: bool) -> Callable:
    """Return the engine's sequential step, whose stream is a pair: the residual stream, and the experts.

    quantized: the inputs of GEMMs are e4m3.
    """
    programs = executor.programs
    model = programs.context.config
    forward = compile_plan(sequential_plan(model, layout.tokens), model, quantized=quantized)

    def run(weights, kv, page_table, source, buffer, *counts):
        page_table, batch, rows = programs.inputs(layout, page_table, source, buffer)
        routed: Any = []
        hidden, x, kv = forward(programs.context, weights, kv, batch, routed=routed)
        none = jnp.zeros((layout.tokens, 0, 0), jnp.int32)
        experts = jnp.stack(routed, 1) if routed else none
        return hidden, (x, experts), rows, kv, page_table, *counts

    return jax.jit(run, donate_argnums=STEP_DONATES)


def run_of(
    executor: Executor, layout: StepLayout, step: Callable, weights: Any, lengths: Lengths, ids: np.ndarray
) -> Run:
    """Return what a step computes with some weights."""
    (stream, experts), places = streams(executor, layout, weights, lengths, ids, step)
    return Run(stream, np.asarray(experts), places)


def widened(weights: Any, executor: Executor, quantization: str, dtype: Any) -> Any:
    """Return quantized weights as arrays of `dtype`. A rounded weight keeps its value but for that rounding.

    executor: the one that has the weights.
    """
    specs = leaves(executor.programs.context.config, quantization=quantization)

    def wide(leaf: Leaf, value: Any) -> Any:
        match value:
            case Quantized():
                return dequantize(value).astype(dtype)
            case BlockFp8():
                return dequantize_block_fp8(value, leaf.gate_block, dtype)
            case Int4():
                return dequantize_int4(value, dtype)
            case ExpertInt4():
                return dequantize_experts(value, dtype)
            case Mxfp4():
                return dequantize_mxfp4(value, dtype)
        return value

    # One program for each weight keeps intermediate arrays out of the device's memory.
    return jax.tree.map(
        lambda leaf, value: jax.jit(functools.partial(wide, leaf))(value),
        specs,
        weights,
        is_leaf=lambda node: isinstance(node, Leaf),
    )


# ---- comparing


def changed_experts(one: np.ndarray, other: np.ndarray) -> dict[str, Any]:
    """Return how many choices of experts differ. one, other: int [n, layers, e] of the same positions."""
    if not one.size:
        return {"sets_changed": None, "experts_replaced": None, "sets_changed_by_layer": []}
    sets = (np.sort(one, -1) != np.sort(other, -1)).any(-1)
    kept = (one[..., :, None] == other[..., None, :]).any(-1)
    return {
        "sets_changed": float(sets.mean()),
        "experts_replaced": float(1 - kept.mean()),
        "sets_changed_by_layer": sets.mean(0).tolist(),
    }


def compared_runs(
    executor: Executor, weights: Any, pairs: Mapping[str, tuple[Run, Run]], lengths: Lengths, loud: str
) -> dict[str, Any]:
    """Return the comparison of each pair's second run with its first, for each head until half of the
    positions exceed the noise floor. The pair `NOISE` gives the floor."""
    positions = [p for p in pairs[NOISE][0].places if all(p in run.places for run in pairs[NOISE])]
    decodes = np.array([position >= lengths.prompts[i] for i, position in positions])
    rows = {name: rows_in(one.places, other.places, positions) for name, (one, other) in pairs.items()}
    compare, found = comparer(executor), {}
    for head_name, head in heads(weights, [int(number) for number in loud.split(",") if number]):
        values = {
            name: all_positions(compare, head, one.stream, other.stream, rows[name])
            for name, (one, other) in pairs.items()
        }
        floor = floor_of(values[NOISE])
        found[head_name] = {
            "noise_floor": floor,
            "margin": spread(values[NOISE]["margin"]),
            "ways": {name: described(one, floor, decodes) for name, one in values.items()},
        }
        if found[head_name]["ways"][NOISE]["share_above_floor"] >= ABOVE:
            break
    experts = {
        name: changed_experts(one.experts[rows[name][0]], other.experts[rows[name][1]])
        for name, (one, other) in pairs.items()
    }
    return {"positions": len(positions), "head": list(found)[-1], "heads": found, "experts": experts}


def check(given: argparse.Namespace) -> dict[str, Any]:
    """Return the comparison of all precisions. Raises: ConfigError, CheckpointError."""
    began = time.monotonic()
    lengths = drawn_lengths(given.sequences, given.prompt, given.output, given.longest)
    check_sizes(lengths, [given.tokens, given.other_tokens])
    wide = executor_of(given, Precision(), lengths)
    model = wide.programs.context.config
    drawn: Any = wide.weights
    scale = given.embed_scale or embed_scale(given.load_format, model.num_layers)
    embed: dict[str, Any] = {"embed": scaled(drawn["embed"], scale)}
    shape = len(lengths.totals), int(lengths.totals.max())
    ids = np.random.default_rng(1).integers(0, model.vocab_size, shape).astype(np.int32)

    def run(executor: Executor, tokens: int, weights: Any, quantization: str | None = None) -> Run:
        layout = layout_of(executor, tokens, "sequential")
        step = routed_step(executor, layout, quantized=quantization == "fp8")
        return run_of(executor, layout, step, weights | embed, lengths, ids)

    reference = run(wide, given.tokens, drawn)
    pairs = {NOISE: (reference, run(wide, given.other_tokens, drawn))}
    seconds, refused = {"wide": time.monotonic() - began}, {}
    for precision in precisions_of(given.quantization, given.kv_cache_dtype):
        at, name, kind = time.monotonic(), precision.name, precision.quantization
        try:
            executor = executor_of(given, precision, lengths)
        except ConfigError as error:
            refused[name] = str(error)
            continue
        low = run(executor, given.tokens, executor.weights, kind)
        pairs[name] = reference, low
        if kind is not None and kind in given.rounded.split(",") and precision.kv_cache_dtype == "auto":
            rounded = run(wide, given.tokens, widened(executor.weights, executor, kind, given.against))
            pairs |= {f"{kind} rounded": (reference, rounded), f"{kind} beyond rounding": (rounded, low)}
        wide.weights = drawn
        del executor
        gc.collect()
        seconds[name] = time.monotonic() - at
    return {
        "model": Path(given.model).name,
        "num_layers": model.num_layers,
        "load_format": given.load_format,
        "against": given.against,
        "kernels": wide.programs.context.kernels.name,
        "tokens": given.tokens,
        "other_tokens": given.other_tokens,
        "steps": len(list(steps_of(lengths, given.tokens))),
        "embed_scale": scale,
        "refused": refused,
        "seconds": seconds,
        **compared_runs(wide, drawn | embed, pairs, lengths, given.loud),
        "took_s": time.monotonic() - began,
    }


# ---- the command


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the flags of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_flags(parser)
    parser.set_defaults(model="qwen3-30b-a3b", sequences=64, prompt=96, output=32)
    parser.add_argument("--against", default="bfloat16", help="the wide precision: bfloat16 or float32")
    parser.add_argument("--quantization", default="none,fp8", help="formats of weights, comma-separated")
    parser.add_argument("--kv_cache_dtype", default="auto,fp8", help="formats of the cache, comma-separated")
    parser.add_argument("--rounded", default="", help="formats of weights to make wide again")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a step")
    parser.add_argument("--other_tokens", type=int, default=256, help="tokens of a step for the noise floor")
    return parser.parse_args(words)


def table(report: Mapping[str, Any]) -> str:
    """Return the main figures of the head that counts as text."""
    found = report["heads"][report["head"]]
    head = f"{report['model']}, {report['num_layers']} layers, against {report['against']}"
    lines = [
        f"{head}; head {report['head']}: floor {found['noise_floor']:.4f}, "
        f"median margin {found['margin']['p50']:.4f}, {report['positions']} positions",
        f"{'precision':<28}{'same':>9}{'above':>8}{'same above':>12}{'KL mean':>11}{'KL p99':>11}"
        f"{'sets changed':>14}{'replaced':>10}",
    ]

    def cell(value: float | None, width: int) -> str:
        return f"{'-' if value is None else format(value, '.4f'):>{width}}"

    for name, way in found["ways"].items():
        experts = report["experts"][name]
        lines.append(
            f"{name:<28}{cell(way['same'], 9)}{cell(way['share_above_floor'], 8)}"
            f"{cell(way['same_above_floor'], 12)}{way['kl']['mean']:>11.2e}{way['kl']['p99']:>11.2e}"
            f"{cell(experts['sets_changed'], 14)}{cell(experts['experts_replaced'], 10)}"
        )
    return "\n".join(lines + [f"{name:<28}refused: {why}" for name, why in report["refused"].items()])


def main(words: Sequence[str]) -> int:
    """Run the check and write its report. Return 2 for a wrong command line, else 0."""
    given = parse(words)
    try:
        with machine.watch(1) as readings:
            body = check(given)
    except (ConfigError, CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    head = {
        "command_name": "check_precision",
        **provenance(shlex.join(["python", "-m", "benchmarks.check_precision", *words])),
    }
    report = machine.with_power(head | body, readings)
    print(table(report))
    if given.output_json:
        write_json(given.output_json, report)
    else:
        print(json.dumps(report["seconds"]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
