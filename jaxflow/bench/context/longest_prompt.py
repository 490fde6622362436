"""The longest prompt that a memory holds, with whole-prompt prefill and with chunks.

  python -m jaxflow.bench longest_prompt --model llama-3.1-8b --load_format dummy --gpu_memory_utilization 0.6
  python -m jaxflow.bench longest_prompt --model smollm2-135m --load_format dummy --memory_gib 1

FlashDecoding++Next (§V, §VI) reuses activation buffers so that a prompt can be longer. Chunks bound the
activations by the step instead of the prompt. This command measures both on one sequence:

  whole        one step of the whole prompt
  chunks       steps of --chunk_tokens, and the KV pool that the engine reserves
  every byte   the same steps, and a KV pool of every byte that the compiled step leaves

The prediction comes from XLA's account of the compiled steps: the temporary arrays and the results of one
step exist at a time, because the device runs one step after another. The measurement raises or lowers the
length until it finds a length that runs and one that does not, at most --tolerance apart. Every trial
compiles the prompt's last step without timing its GEMMs, allocates every page of the prompt and runs the step
twice. The model's own position limit is ignored. --gpu_memory_utilization is the limit on a GPU, --memory_gib
on a CPU, where each trial is a process. No trial begins that would end after --time_limit_s; the table then
has the best length so far, and the shortest length that failed.

The row "one arena" is a prediction: pages take the space of the activations, and the last tokens run in steps
of --smallest_step.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags

from jaxflow.bench.context.prompt_trial import (
    ROUNDING,
    Bench,
    Outcome,
    Trial,
    attempt,
    attempt_capped,
    with_positions,
)
from jaxflow.bench.engine.memory import three_buffers
from jaxflow.bench.report import machine
from jaxflow.bench.workload import flags as options
from jaxflow.cli.engine_flags import engine_config_from_flags
from jaxflow.config import MAX_STEP_TOKENS, ConfigError, EngineConfig
from jaxflow.engine.program_memory import SPARE, Need
from jaxflow.engine.settings import resolve
from jaxflow.engine.start import prepare_process
from jaxflow.engine.stored_format import with_stored_format
from jaxflow.kv.device_cache import page_bytes, page_groups
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.parallel.mesh import on_gpu

GIB, MIB = 2**30, 2**20
LONGEST = 2**24  # positions that the model is given
PROBED = 1024  # computed tokens of a whole prompt's step while the length is searched on a CPU
PAPER = {
    "llama 3 8B": (320_000, 502_000),
    "qwen 1.5 7B": (110_000, 128_000),
}  # §VI: without and with its pool


def define_flags() -> None:
    """Define the flags of `bench longest_prompt`."""
    options.define_engine()
    flags.DEFINE_list("chunk_tokens", ["2048"], "Tokens of a step with chunks; several sizes are compared.")
    flags.DEFINE_integer("smallest_step", 64, "Tokens of the smallest step, for the row of one arena.", 1)
    flags.DEFINE_float("memory_gib", None, "Memory of weights, KV and steps on a CPU, GiB.", lower_bound=0.01)
    flags.DEFINE_float(
        "tolerance", 0.05, "Largest relative distance of the longest length from one that fails.", 0.001, 0.5
    )
    flags.DEFINE_float("time_limit_s", 240, "Seconds after which no more trial begins.", lower_bound=1)
    flags.DEFINE_bool("full_prompt", True, "On a CPU, compute every token of the longest whole prompt once.")
    flags.DEFINE_string("output_json", None, "Write the report to this file.")


@dataclasses.dataclass(frozen=True)
class Room:
    """The memory of one device for one sequence.

    Attributes:
      free: bytes without weights.
      page: tokens of a KV page. page_bytes: its bytes.
      needs: memory of the step of so many tokens, by XLA's account.
    """

    free: int
    page: int
    page_bytes: int
    needs: Mapping[int, Need]

    def step_bytes(self, tokens: int) -> float:
        """Return the bytes of a step, extrapolated linearly from the two largest known steps."""
        if tokens in self.needs:
            return _bytes(self.needs[tokens])
        small, large = sorted(self.needs)[-2:]
        slope = (_bytes(self.needs[large]) - _bytes(self.needs[small])) / (large - small)
        return _bytes(self.needs[large]) + slope * (tokens - large)

    def whole(self) -> int:
        """Return the predicted tokens of the longest prompt in one step."""
        low, high = 0, MAX_STEP_TOKENS // self.page
        while low < high:
            pages = (low + high + 1) // 2
            used = (pages + 1) * self.page_bytes + ROUNDING + self.step_bytes(pages * self.page)
            low, high = (pages, high) if used <= self.free else (low, pages - 1)
        return low * self.page

    def chunked(self, tokens: int, reserved: int = 0) -> int:
        """Return the predicted tokens of the longest prompt in steps of `tokens`."""
        pages = (self.free - reserved - ROUNDING - self.step_bytes(tokens)) // self.page_bytes - 1
        return max(0, int(pages)) * self.page


def _bytes(need: Need) -> int:
    return need.temporary + need.results


def longest(
    predicted: int, page: int, tolerance: float, runs: Callable[[int], bool], more: Callable[[], bool]
) -> tuple[int, int | None]:
    """Return a length that runs, and one that fails, at most the tolerance apart.

    The search starts at the prediction and moves in growing steps, then by halves. It ends early when `more`
    returns False. Length 0: none ran. None: none failed.
    """
    good, bad = 0, None
    length = max(page, predicted // page * page)
    stride = max(page, round(tolerance / 4 * length) // page * page)
    while more():
        if runs(length):
            good = max(good, length)
        else:
            bad = length if bad is None else min(bad, length)
        if bad is not None and bad - good <= max(page, tolerance * good):
            break
        if bad is None:
            length, stride = good + stride, 2 * stride
        elif good:
            length = (good + bad) // 2 // page * page
        else:
            length, stride = max(page, bad - stride), 2 * stride
    return good, bad


@dataclasses.dataclass
class TrialClock:
    """The time that trials may take. A trial is assumed to take as long as the longest one before."""

    limit_s: float
    begun_s: float = dataclasses.field(default_factory=time.perf_counter)
    longest_s: float = 0.0

    def more(self) -> bool:
        """Return True if another trial ends before the limit."""
        return time.perf_counter() - self.begun_s + self.longest_s <= self.limit_s

    def timed[**P, R](self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return a trial's result, and remember its time."""
        start = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            self.longest_s = max(self.longest_s, time.perf_counter() - start)


def run() -> dict[str, Any]:
    """Run the command and return its report.

    Raises:
      ConfigError, CheckpointError
    """
    f = flags.FLAGS
    if not all(text.isdecimal() and int(text) for text in f.chunk_tokens):
        raise ConfigError("chunk_tokens", ",".join(f.chunk_tokens), "comma-separated positive whole numbers")
    chunks = sorted({int(text) for text in f.chunk_tokens})
    config = engine_config_from_flags()
    prepare_process(config)
    if (f.memory_gib is None) == (not on_gpu()):
        accepted = (
            "unset on a GPU, where gpu_memory_utilization is the limit"
            if on_gpu()
            else "GiB, because a CPU has no limit"
        )
        raise ConfigError("memory_gib", f.memory_gib, accepted)
    checkpoint = with_positions(open_checkpoint(config.model, load_format=config.load_format), LONGEST)
    model = checkpoint.model_config
    config = resolve(
        dataclasses.replace(
            with_stored_format(config, checkpoint),
            plan="sequential",
            max_num_seqs=1,
            max_num_batched_tokens=max(chunks),
        ),
        model,
    )
    bench = Bench.of(config, checkpoint, loaded=on_gpu())
    free = _free(bench, f.memory_gib)
    groups = page_groups(model, config.kv_cache_dtype, config.tensor_parallel_size)
    if len(groups) > 1:
        raise ConfigError("model", config.model, "a model with one kind of attention layers")
    size = sum(page_bytes(groups, config.block_size, config.tensor_parallel_size))
    clock = TrialClock(f.time_limit_s)
    sizes = sorted({f.smallest_step, *chunks, 2 * max(chunks)})
    room = Room(free, config.block_size, size, {tokens: bench.need(tokens) for tokens in sizes})
    # The account of a step of about the predicted length, instead of an extrapolation from small steps.
    guess = room.whole()
    if guess > sizes[-1]:
        room = dataclasses.replace(room, needs={**room.needs, guess: bench.need(guess)})
    report: dict[str, Any] = {
        "command_name": "longest_prompt",
        "model": Path(config.model).name,
        "engine_config": dataclasses.asdict(config),
        "weight_bytes": bench.weight_bytes,
        "free_bytes": free,
        "kv_bytes_per_token": size / config.block_size,
        "step_bytes": {str(tokens): dataclasses.asdict(need) for tokens, need in room.needs.items()},
        "paper": PAPER,
        "rows": [],
        **machine.describe(),
    }
    print(
        f"{free / GIB:.2f} GiB beside the weights, {size / config.block_size / 1024:.0f} KiB of KV a token",
        flush=True,
    )

    def keep(row: dict[str, Any]) -> None:
        report["rows"].append(row)
        machine.keep(f.output_json, report)

    measure(config, bench, room, chunks, f.tolerance, clock, keep, full_prompt=f.full_prompt)
    predict(room, bench, config, chunks, f.smallest_step, keep)
    report["rows"] = beside_whole(report["rows"])
    print("\n".join([HEAD, *map(line, report["rows"])]), flush=True)
    return report


def beside_whole(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows, whole prompts first, each with its length as a
    multiple of the longest whole prompt.
    """
    first = next((row["longest_tokens"] for row in rows if row["mode"] == "whole"), None)
    ordered = sorted(rows, key=lambda row: row["mode"] != "whole")
    return [
        row | {"against_whole": row["longest_tokens"] / first if first and row["longest_tokens"] else None}
        for row in ordered
    ]


def _free(bench: Bench, memory_gib: float | None) -> int:
    """Return the bytes of one device beside the weights. Raises: ConfigError."""
    if memory_gib is None:
        stats = [device.memory_stats() for device in bench.mesh.local_devices]
        return min(s["bytes_limit"] - s["bytes_in_use"] for s in stats if s)
    free = int(memory_gib * GIB) - bench.weight_bytes
    if free <= 0:
        raise ConfigError("memory_gib", memory_gib, f"more than {bench.weight_bytes / GIB:.3f}, the weights")
    return free


def measure(
    config: EngineConfig,
    bench: Bench,
    room: Room,
    chunks: list[int],
    tolerance: float,
    clock: TrialClock,
    keep: Callable[[dict[str, Any]], None],
    *,
    full_prompt: bool,
) -> None:
    """Find the longest prompt of each mode, and give each row to `keep`.

    Modes without time have no trials.
    """

    def outcome(mode: str, trial: Trial) -> Outcome:
        run = (
            functools.partial(attempt, bench, trial)
            if on_gpu()
            else functools.partial(attempt_capped, config, LONGEST, trial, room.free)
        )
        one = clock.timed(run)
        ended = one.failed_at if one.seconds is None else f"runs, {one.seconds:.2f} s"
        print(f"{mode}, {trial.length:,} tokens in steps of {trial.tokens:,}: {ended}", flush=True)
        return one

    def row(mode: str, chunk: int | None, predicted: int, trials: dict[int, Outcome]) -> dict[str, Any]:
        found = max((length for length, one in trials.items() if one.ran), default=0 if trials else None)
        need = trials[found].need if found else None
        return {
            "mode": mode,
            "step_tokens": chunk or found,
            "predicted_tokens": predicted,
            "longest_tokens": found,
            "shortest_failed_tokens": min(
                (length for length, one in trials.items() if not one.ran), default=None
            ),
            "step_mib": None if need is None else _bytes(need) / MIB,
            "last_step_s": trials[found].seconds if found else None,
            "trials": {str(length): one.failed_at or "ran" for length, one in trials.items()},
        }

    def search(mode: str, chunk: int | None, predicted: int) -> None:
        trials: dict[int, Outcome] = {}

        def runs(length: int) -> bool:
            tokens = min(length, chunk or length)
            computed = tokens if chunk or on_gpu() else min(tokens, PROBED)
            trials[length] = outcome(mode, Trial(tokens, length, computed))
            return trials[length].ran

        found, _ = longest(predicted, room.page, tolerance, runs, clock.more)
        if found and chunk is None and full_prompt and not on_gpu() and clock.more():
            trials[found] = outcome(mode, Trial(found, found, found))
        keep(row(mode, chunk, predicted, trials))

    for chunk in chunks:
        pool = engine_pool(room, config, chunk)
        fits = pool > 0 and clock.more()
        keep(row("chunks", chunk, pool, {pool: outcome("chunks", Trial(chunk, pool, chunk))} if fits else {}))
        search("every byte", chunk, room.chunked(chunk))
    search("whole", None, room.whole())


def engine_pool(room: Room, config: EngineConfig, chunk: int) -> int:
    """Return the tokens of the KV pool that the engine reserves beside steps of this size.

    On a GPU the engine keeps a spare share of the memory, and the results of two steps. On a CPU it takes
    half of `gpu_memory_utilization` of the free memory.
    """
    if not on_gpu():
        return int(room.free * config.gpu_memory_utilization / 2 // room.page_bytes - 1) * room.page
    limit = min((device.memory_stats() or {}).get("bytes_limit", 0) for device in jax.local_devices())
    reserved = int(SPARE * limit) + room.needs[chunk].results
    return room.chunked(chunk, reserved)


def predict(
    room: Room,
    bench: Bench,
    config: EngineConfig,
    chunks: list[int],
    smallest: int,
    keep: Callable[[dict[str, Any]], None],
) -> None:
    """Give the rows without a measurement to `keep`: one arena, and the paper's three buffers."""
    tp = config.tensor_parallel_size
    buffers = three_buffers(bench.checkpoint.model_config, 1, config.dtype, tp)
    pool = room.free // (room.page_bytes + room.page * buffers) * room.page
    keep(_predicted("three buffers (§V), whole", pool, pool))
    for chunk in chunks:
        separate, arena = room.chunked(chunk), room.chunked(smallest)
        row = _predicted("one arena", chunk, arena)
        keep(row | {"gain_of_arena": arena / separate - 1 if separate else None})


def _predicted(mode: str, tokens: int, length: int) -> dict[str, Any]:
    return {"mode": mode, "step_tokens": tokens, "predicted_tokens": length, "longest_tokens": None}


HEAD = (
    f"{'mode':28}{'step':>9}{'predicted':>12}{'longest':>12}{'/whole':>8}{'step MiB':>10}{'last step s':>13}"
)


def line(row: Mapping[str, Any]) -> str:
    """Return a row as a line of text."""

    def cell(key: str, form: str, width: int) -> str:
        value = row.get(key)
        return f"{'-' if value is None else format(value, form):>{width}}"

    text = (
        f"{row['mode']:28}"
        + cell("step_tokens", ",d", 9)
        + cell("predicted_tokens", ",d", 12)
        + cell("longest_tokens", ",d", 12)
        + cell("against_whole", ".2f", 8)
        + cell("step_mib", ".1f", 10)
        + cell("last_step_s", ".2f", 13)
    )
    gain = row.get("gain_of_arena")
    return text if gain is None else f"{text}  {gain:+.2%} over a pool beside the step"
