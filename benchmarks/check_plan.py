"""Compare the tokens of plans with the tokens of the sequential step, with all layers of the model.

    python -m benchmarks.check_plan --model llama-3-70b --fp8 --tensor_parallel_size 2
        --plans jaxflow/pipeline/plans/h200-llama-3-70b-tp2-float8_e4m3fn.json --other_tokens 1024

All plans read the same random tokens (teacher forcing) in full steps of decodes and prefill. Each plan starts
with an empty cache and attends to the keys and values that it wrote. The script keeps the residual stream
after the last layer, and compares the logits at each position with the logits of the sequential step.

The noise floor comes from two runs of the sequential step over the same tokens with two step sizes. The
margin of a position is the distance between its two largest logits. The floor is the 99.9 % quantile of the
change of the margin. A plan must choose the sequential step's token wherever the margin exceeds the floor.

Random weights give small margins and much noise. So each number of dummy weights is in `--copies` columns,
which average their rounding errors (`benchmarks.check_weights`). The numbers of copies are tried in turn. If
too few positions are above the floor, the rows of the head are scaled to a twentieth, except a few loud rows.
The result is that of the largest number of loud rows with which half of the positions are above the floor.

Controls show that the check can fail: sequential steps whose middle layer is broken. No plan passes unless
every control fails so clearly that the same error in half of the rows would fail, too. Decodes and prefill
must each agree. The mean KL of a plan must also be near that of the noise.
"""

import argparse
import dataclasses
import json
import shlex
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.check_weights import (
    Break,
    broken,
    heads,
    large_embed_scale,
    most_copies,
    repeated,
    repeated_embeddings,
)
from jaxflow.bench.plans.steady import SteadyStep
from jaxflow.config import ConfigError, EngineConfig, ModelConfig
from jaxflow.engine.executor import Executor
from jaxflow.engine.executor_start import make_executor
from jaxflow.engine.layout import StepLayout
from jaxflow.engine.settings import resolve
from jaxflow.engine.start import prepare_process
from jaxflow.model import ops
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.op_registry import Site
from jaxflow.parallel.mesh import over_shards
from jaxflow.pipeline.handwritten import sequential_plan
from jaxflow.pipeline.plan import Plan, digest, load
from jaxflow.scheduler.state import Chunk, StepWork
from pallas_kernels.measure.provenance import provenance
from pallas_kernels.measure.sensor import sample

FLOOR = 0.999  # the noise floor is this quantile of the noise
AGREE = 0.999  # required share of equal tokens at the positions above the floor
ABOVE = 0.5  # required share of the positions above the floor
BROKEN = 1 - 2 * (1 - AGREE)  # largest share of equal tokens of a control
MOST_KL = 1.5  # largest mean KL of a plan, as a multiple of the noise's
BLOCK = 512  # positions whose logits exist at once
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999, "max": 1.0}

Decode = tuple[int, int]  # sequence, position
Piece = tuple[int, int, int]  # sequence, first position, tokens


# ---- the tokens and their steps


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Prompt tokens and all tokens of each sequence, [S] int."""

    prompts: np.ndarray
    totals: np.ndarray


def drawn_lengths(sequences: int, prompt: int, output: int, longest: int, seed: int = 0) -> Lengths:
    """Return lengths of `sequences`: prompts around `prompt`, every fortieth between a third of `longest`
    and `longest`."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(max(1, prompt // 8), 2 * prompt, sequences)
    long = np.arange(sequences) % 40 == 20
    prompts[long] = rng.integers(max(1, longest // 3), max(2, longest - output), int(long.sum()))
    return Lengths(prompts, prompts + output)


def steps_of(lengths: Lengths, tokens: int) -> Iterator[tuple[list[Decode], list[Piece]]]:
    """Yield full steps of `tokens`: every started sequence's next token, filled up with prompts in order.

    The steps end where no prompt is left to fill one.
    """
    done = np.zeros(len(lengths.prompts), int)
    while True:
        going = np.flatnonzero((done >= lengths.prompts) & (done < lengths.totals))[:tokens]
        decodes = [(int(i), int(done[i])) for i in going]
        left, pieces = tokens - len(decodes), []
        for i in np.flatnonzero(done < lengths.prompts):
            if not left:
                break
            size = min(left, int(lengths.prompts[i] - done[i]))
            pieces.append((int(i), int(done[i]), size))
            left -= size
        if left:
            return
        for i, _ in decodes:
            done[i] += 1
        for i, _, size in pieces:
            done[i] += size
        yield decodes, pieces


def places_of(steps: Sequence[tuple[list[Decode], list[Piece]]]) -> dict[tuple[int, int], int]:
    """Return the row, of all steps' rows in a line, that computes each (sequence, position)."""
    order: list[tuple[int, int]] = []
    for decodes, pieces in steps:
        order += decodes
        order += [(i, start + k) for i, start, size in pieces for k in range(size)]
    return {place: row for row, place in enumerate(order)}


def step_of(
    executor: Executor, layout: StepLayout, step: tuple[list[Decode], list[Piece]], token_ids: np.ndarray
) -> SteadyStep:
    """Return the step, ready to run. Its decodes read `token_ids` [S, N], not sampled tokens."""
    decodes, pieces = step
    slots, positions = (np.array([one[k] for one in decodes], np.int32) for k in (0, 1))
    chunks = tuple(
        Chunk(types.SimpleNamespace(token_ids=token_ids[i]), i, start, size, samples=False)  # pyright: ignore[reportArgumentType]
        for i, start, size in pieces
    )
    nobody = np.full(len(decodes), None, object)
    nothing = np.empty((0, 4), np.int32)
    tokens = len(decodes) + sum(size for *_, size in pieces)
    work = StepWork(nobody, slots, positions, chunks, (), tokens, layout.tokens, nothing)
    found = SteadyStep.of(executor, layout, work)
    layout.views(found.buffer)["token_ids"][: len(decodes)] = token_ids[slots, positions]
    return found


# ---- the ways


def check_sizes(lengths: Lengths, sizes: Sequence[int]) -> None:
    """Refuse step sizes without a full step. Raises: ConfigError."""
    for tokens in sizes:
        if next(iter(steps_of(lengths, tokens)), None) is None:
            accepted = f"fewer tokens, because all prompts together have {int(lengths.prompts.sum())}"
            raise ConfigError("tokens", tokens, f"{accepted}; --sequences and --prompt make more")


def streams(
    executor: Executor,
    layout: StepLayout,
    weights: Any,
    lengths: Lengths,
    token_ids: np.ndarray,
    program: Callable | None = None,
    after_step: Break | None = None,
) -> tuple[Any, dict[tuple[int, int], int]]:
    """Return the residual stream after the last layer of all steps' rows [n, D], and each position's row.

    program: a step of the layout, whose stream may be a pytree of arrays with a row for each token. None: the
    executor's step. after_step: may break the cache after each step.
    """
    steps, found = list(steps_of(lengths, layout.tokens)), []
    program, executor.weights = program or executor.compiler.program(layout), weights
    everywhere = NamedSharding(executor.programs.mesh, PartitionSpec())
    for step in steps:
        buffer = jax.device_put(step_of(executor, layout, step, token_ids).buffer, everywhere)
        _, x, _ = executor.run_program(program, buffer)
        found.append(x)
        if after_step is not None:
            after_step(executor)
        jax.block_until_ready(found[-3:-2])
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *found), places_of(steps)


def give_pages(executor: Executor, lengths: Lengths) -> None:
    """Give each sequence pages of its own for all its tokens, also for tokens that a window will hide."""
    table = page_table(lengths, executor.page_size, executor.page_table.shape)
    pages = (int(table.max()) + 1,) * executor.groups
    if executor.num_pages != pages:
        executor.allocate(pages)
    executor.page_table = jax.device_put(table, executor.page_table.sharding)


def page_table(lengths: Lengths, block_size: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return a page table [groups, slots, pages]. Each sequence has its own pages, numbered from 1."""
    table, used = np.zeros(shape, np.int32), 1
    for slot, total in enumerate(lengths.totals):
        pages = -(-int(total) // block_size)
        table[:, slot, :pages] = np.arange(used, used + pages)
        used += pages
    return table


# ---- comparing


def compare(one: jax.Array, other: jax.Array) -> dict[str, jax.Array]:
    """Compare the logits [n, V] of two runs. Return n values of each kind.

    margin: the distance between the two largest logits of the first run.
    margin_change: the change of the margin in the other run.
    same: whether the best token is the same.
    kl: KL(first run || other run), in nats.
    """
    best = jnp.argmax(one, axis=1)
    second = jnp.argmax(jnp.where(jnp.arange(one.shape[1]) == best[:, None], -jnp.inf, one), axis=1)

    def margin(logits: jax.Array) -> jax.Array:
        first, next_ = (jnp.take_along_axis(logits, at[:, None], axis=1)[:, 0] for at in (best, second))
        return first - next_

    difference = jnp.abs(one - other)
    log_one, log_other = jax.nn.log_softmax(one), jax.nn.log_softmax(other)
    return {
        "margin": margin(one),
        "margin_change": jnp.abs(margin(one) - margin(other)),
        "same": jnp.argmax(other, axis=1) == best,
        "kl": (jnp.exp(log_one) * (log_one - log_other)).sum(1),
        "mean_difference": difference.mean(1),
        "largest_difference": difference.max(1),
    }


def comparer(executor: Executor) -> Callable[[dict, jax.Array, jax.Array], dict[str, jax.Array]]:
    """Return a program (head, streams [n, D], streams [n, D]) -> `compare` of their logits."""
    programs = executor.programs
    context, specs = programs.context, programs.weight_specs
    vocabulary, nowhere = context.config.vocab_size, PartitionSpec()

    def logits(head: dict, x: jax.Array) -> jax.Array:
        ends = Site(context, head)
        return ops.logits(ends, ops.final_norm(ends, x, None)[1])

    def run(head: dict, one: jax.Array, other: jax.Array) -> dict[str, jax.Array]:
        known = {name: specs.get(name, specs["embed"]) for name in head}
        sharded = over_shards(logits, programs.mesh, (known, nowhere), nowhere)
        return compare(sharded(head, one)[:, :vocabulary], sharded(head, other)[:, :vocabulary])

    return jax.jit(run)


def all_positions(
    compared: Callable, head: dict, one: jax.Array, other: jax.Array, rows: tuple[np.ndarray, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return `compare` of the rows of two ways' streams, block by block."""
    found: list[dict[str, np.ndarray]] = []
    for at in range(0, len(rows[0]), BLOCK):
        mine, theirs = (np.resize(part[at : at + BLOCK], BLOCK) for part in rows)
        values = jax.device_get(compared(head, one[mine], other[theirs]))
        found.append({name: value[: len(rows[0]) - at] for name, value in values.items()})
    return {name: np.concatenate([one[name] for one in found]) for name in found[0]}


def spread(values: np.ndarray) -> dict[str, float]:
    """Return mean and quantiles."""
    return {"mean": float(values.mean())} | {k: float(np.quantile(values, q)) for k, q in QUANTILES.items()}


def floor_of(noise: Mapping[str, np.ndarray]) -> float:
    """Return the noise floor: the `FLOOR` quantile of the margin's change."""
    return float(np.quantile(noise["margin_change"], FLOOR))


def agreement(
    values: Mapping[str, np.ndarray], floor: float, chosen: np.ndarray | None = None
) -> dict[str, Any]:
    """Return the share of equal tokens, at all positions and at the positions above the floor.

    chosen: the positions to count, bool [n]; None: all.
    """
    chosen = np.ones(len(values["same"]), bool) if chosen is None else chosen
    same, above = values["same"][chosen], values["margin"][chosen] > floor
    number = int(above.sum())
    return {
        "positions": len(same),
        "same": float(same.mean()) if len(same) else None,
        "above_floor": number,
        "share_above_floor": number / len(same) if len(same) else None,
        "other_above_floor": int((~same[above]).sum()),
        "same_above_floor": float(same[above].mean()) if number else None,
    }


def described(values: Mapping[str, np.ndarray], floor: float, decodes: np.ndarray) -> dict[str, Any]:
    """Return the report of one way: agreement of all positions, decodes and prefill, and the differences."""
    kinds = {"decodes": decodes, "prefill": ~decodes}
    return {
        **agreement(values, floor),
        **{kind: agreement(values, floor, chosen) for kind, chosen in kinds.items()},
        **{
            name: spread(values[name])
            for name in ("kl", "mean_difference", "largest_difference", "margin_change")
        },
    }


def least_agreement(way: Mapping[str, Any]) -> float:
    """Return the smallest share of equal tokens above the floor: of all positions, decodes or prefill."""
    parts = [part["same_above_floor"] for part in (way, way["decodes"], way["prefill"])]
    return min((share for share in parts if share is not None), default=0.0)


def passes(way: Mapping[str, Any], noise: Mapping[str, Any]) -> bool:
    """Return whether a plan is sound: `ABOVE` of the positions exceed the floor, `AGREE` of them have the
    expected token, and the mean KL is at most `MOST_KL` times the noise's.
    """
    enough = (way["share_above_floor"] or 0.0) >= ABOVE
    near = way["kl"]["mean"] <= MOST_KL * noise["kl"]["mean"]
    return enough and near and least_agreement(way) >= AGREE


# ---- the command


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a check that compares ways on equal tokens."""
    parser.add_argument("--model", default="llama-3-70b")
    parser.add_argument("--load_format", default="dummy", help="dummy, or auto: the checkpoint's weights")
    parser.add_argument("--layers", type=int, help="the first ones alone; default: all")
    parser.add_argument("--sequences", type=int, default=640)
    parser.add_argument("--prompt", type=int, default=128, help="mean prompt tokens of most sequences")
    parser.add_argument("--output", type=int, default=64, help="tokens behind each prompt")
    parser.add_argument("--longest", type=int, default=1500, help="tokens of the longest sequence")
    parser.add_argument("--embed_scale", type=float, help="default: 1 of a checkpoint, more of dummy weights")
    parser.add_argument(
        "--loud", default="1024,64,16,4,2", help="loud rows of the head, falling, tried in turn"
    )
    parser.add_argument("--block_size", type=int, default=64)
    parser.add_argument("--compilation_cache_dir")
    parser.add_argument("--output_json")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_flags(parser)
    parser.add_argument("--fp8", action="store_true", help="weights and cache in e4m3")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--copies", default="32,64", help="columns of each number of dummy weights, rising, tried in turn"
    )
    parser.add_argument("--tensor_parallel_size", type=int, default=1)
    parser.add_argument("--plans", required=True, help="plan files of one step size, comma-separated")
    parser.add_argument("--other_tokens", type=int, required=True, help="step size of the noise floor's way")
    parser.add_argument("--gpu_memory_utilization", type=float, default=0.92)
    return parser.parse_args(arguments)


def executor_of(given: argparse.Namespace, plans: Sequence[Plan], lengths: Lengths) -> Executor:
    """Return an executor with the compiled steps of the plans and of the sequential plan."""
    sequences = len(lengths.totals)
    sizes = sorted({given.other_tokens, *(plan.tokens for plan in plans)})
    settings = EngineConfig(
        model=given.model,
        load_format=given.load_format,
        dtype=given.dtype,
        quantization="fp8" if given.fp8 else None,
        kv_cache_dtype="fp8" if given.fp8 else "auto",
        tensor_parallel_size=given.tensor_parallel_size,
        block_size=given.block_size,
        max_model_len=int(lengths.totals.max()) + 1,
        max_num_batched_tokens=sizes[-1],
        max_num_seqs=sequences,
        num_kv_pages=int((-(-lengths.totals // given.block_size)).sum()) + 1,
        gpu_memory_utilization=given.gpu_memory_utilization,
        compilation_cache_dir=given.compilation_cache_dir,
        plan="sequential",
    )
    prepare_process(settings)
    checkpoint = open_checkpoint(settings.model, load_format=given.load_format)
    model = checkpoint.model_config
    model = dataclasses.replace(model, layers=model.layers[: given.layers])
    checkpoint = dataclasses.replace(checkpoint, model_config=model)
    config = resolve(settings, model)
    ways = {
        size: (
            sequential_plan(model, size, given.tensor_parallel_size),
            *(plan for plan in plans if plan.tokens == size),
        )
        for size in sizes
    }
    executor = make_executor(config, checkpoint, ways, progress=False)
    give_pages(executor, lengths)
    executor.warm_up()
    return executor


def layout_of(executor: Executor, tokens: int, plan: str) -> StepLayout:
    """Return the layout of a plan's steps."""
    return next(layout for layout in executor.layouts[tokens] if layout.plan == plan)


def copies_of(given: argparse.Namespace, model: ModelConfig) -> list[int]:
    """Return the numbers of copies to try, which the model can have. A checkpoint has one."""
    wanted = [int(number) for number in given.copies.split(",")] if given.load_format == "dummy" else [1]
    return sorted({most_copies(model, number) for number in wanted})


def measured(executor: Executor, given: argparse.Namespace, plans: Sequence[Plan], lengths: Lengths) -> dict:
    """Run every way with each number of copies until all plans pass, and return the report's body.

    tried: what passed with each number of copies. The rest of the report is of the last number.
    """
    model = executor.programs.context.config
    scale = given.embed_scale or large_embed_scale(given.load_format, model)
    drawn: Any = executor.weights
    head = {"lm_head": ops.head_table(drawn)}
    weights, before, report, tried = drawn, 1, {}, {}
    for copies in copies_of(given, model):
        if copies != before:
            weights = repeated(executor, weights, copies, before)
        embed = repeated_embeddings(drawn["embed"], copies, scale)
        report = run_all(executor, given, plans, lengths, weights | {"embed": embed}, head)
        print(f"{copies} copies of each number\n{table(report)}", flush=True)
        tried[str(copies)] = {key: report[key] for key in ("head", "passes", "controls_fail", "took_s")}
        before = copies
        if all(report["passes"].values()):
            break
    return report | {"embed_scale": scale, "copies": before, "tried": tried}


def run_all(
    executor: Executor,
    given: argparse.Namespace,
    plans: Sequence[Plan],
    lengths: Lengths,
    weights: Any,
    table_as_drawn: Mapping[str, Any],
) -> dict:
    """Run every way with some weights and compare it. table_as_drawn: of the head, as `lm_head`."""
    began = time.monotonic()
    model = executor.programs.context.config
    shape = len(lengths.totals), int(lengths.totals.max())
    token_ids = np.random.default_rng(1).integers(0, model.vocab_size, shape).astype(np.int32)
    tokens = plans[0].tokens
    sequential = layout_of(executor, tokens, "sequential")
    noise, again = f"sequential, {given.other_tokens} tokens", f"{plans[0].name}, again"
    controls = broken(weights, model.num_layers // 2, given.tensor_parallel_size)
    ways = {
        noise: (layout_of(executor, given.other_tokens, "sequential"), weights, None),
        **{plan.name: (layout_of(executor, tokens, plan.name), weights, None) for plan in plans},
        again: (layout_of(executor, tokens, plans[0].name), weights, None),
        **{name: (sequential, *control) for name, control in controls.items()},
    }
    reference, places = streams(executor, sequential, weights, lengths, token_ids)
    made, seconds = {}, {}
    for name, (layout, own, break_cache) in ways.items():
        at = time.monotonic()
        found = streams(executor, layout, own, lengths, token_ids, after_step=break_cache)
        made[name] = jax.block_until_ready(found)
        seconds[name] = time.monotonic() - at
    twice = bool((made[plans[0].name][0] == made.pop(again)[0]).all())
    common = [place for place in places if all(place in theirs for _, theirs in made.values())]
    decodes = np.array([position >= lengths.prompts[i] for i, position in common])
    rows = {name: rows_in(places, theirs, common) for name, (_, theirs) in made.items()}
    compared, reports = comparer(executor), {}
    loud = [int(number) for number in given.loud.split(",") if number]
    for head_name, head in heads(weights | table_as_drawn, loud):
        values = {
            name: all_positions(compared, head, reference, x, rows[name]) for name, (x, _) in made.items()
        }
        floor = floor_of(values[noise])
        reports[head_name] = {
            "noise_floor": floor,
            "margin": spread(values[noise]["margin"]),
            "ways": {name: described(one, floor, decodes) for name, one in values.items()},
        }
        if reports[head_name]["ways"][noise]["share_above_floor"] >= ABOVE:
            break
    counted = list(reports)[-1]
    found = reports[counted]["ways"]
    fail = {name: least_agreement(found[name]) <= BROKEN for name in controls}
    return {
        "model": Path(given.model).name,
        "num_layers": model.num_layers,
        "tensor_parallel_size": given.tensor_parallel_size,
        "precision": "fp8" if given.fp8 else str(reference.dtype),
        "kernels": executor.programs.context.kernels.name,
        "tokens": tokens,
        "plans": {plan.name: digest(plan) for plan in plans},
        "noise": noise,
        "positions": len(common),
        "steps": len(list(steps_of(lengths, tokens))),
        "same_bits_twice": twice,
        "seconds": seconds,
        "took_s": time.monotonic() - began,
        "head": counted,
        "controls_fail": fail,
        "passes": {
            plan.name: passes(found[plan.name], found[noise]) and all(fail.values()) for plan in plans
        },
        "heads": reports,
    }


def rows_in(
    places: Mapping[tuple[int, int], int],
    theirs: Mapping[tuple[int, int], int],
    common: Sequence[tuple[int, int]],
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of the common positions in the reference and in another way."""
    return np.array([places[place] for place in common]), np.array([theirs[place] for place in common])


def table(report: Mapping[str, Any]) -> str:
    """Return the report's main figures as text."""
    lines = []
    for head, found in report["heads"].items():
        lines.append(
            f"head {head}: floor {found['noise_floor']:.4f}, median margin {found['margin']['p50']:.4f}"
        )
        for name, way in found["ways"].items():
            above, decodes = way["same_above_floor"], way["decodes"]["same_above_floor"]
            lines.append(
                f"  {name[:60]:<62}same {way['same']:.5f}  above {way['share_above_floor']:.4f}"
                f"  same above {'-' if above is None else format(above, '.6f')}"
                f"  of decodes {'-' if decodes is None else format(decodes, '.6f')}"
                f"  KL {way['kl']['mean']:.2e}  mean {way['mean_difference']['mean']:.4f}"
                f"  p99.9 of margin {way['margin_change']['p99.9']:.4f}"
            )
    lines.append(f"controls fail: {report['controls_fail']}")
    lines.append(f"bitwise twice: {report['same_bits_twice']}; passes: {report['passes']}")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    given = parse(arguments)
    plans = [load(path) for path in given.plans.split(",")]
    if len({plan.tokens for plan in plans}) > 1:
        sizes = sorted({plan.tokens for plan in plans})
        raise SystemExit(f"--plans: plans of one step size are accepted, these have {sizes}")
    lengths = drawn_lengths(given.sequences, given.prompt, given.output, given.longest)
    try:
        check_sizes(lengths, [plans[0].tokens, given.other_tokens])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with sample(given.tensor_parallel_size, every_s=0.1) as readings:
        executor = executor_of(given, plans, lengths)
        body = measured(executor, given, plans, lengths)
    head = provenance(shlex.join(["python", "-m", "benchmarks.check_plan", *arguments]))
    power = {"watts": readings.watts_by_card, "clock_mhz": readings.clock_mhz_by_card}
    report: dict[str, Any] = head | power | {"num_devices": jax.device_count()} | body
    if given.output_json:
        Path(given.output_json).parent.mkdir(parents=True, exist_ok=True)
        Path(given.output_json).write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    return 0 if all(report["passes"].values()) and report["same_bits_twice"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
