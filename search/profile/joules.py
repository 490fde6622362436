r"""Print the joules per token of each op of a step, the least that were seen for it, and the difference.

  python -m search joules --profile search/profiles/h200-llama-3.1-8b.json \
      --plans benchmarks/h200/llama-3.1-8b/plans-bf16-sequential.json
  python -m search joules --model llama-3.1-8b --measure --profile ops.json --output_json joules.json

The step is the average one of requests of --prompt_tokens and --output_tokens. Without --measure the joules
come from a profile's entries, between its points, and those of the whole step from a report of `bench plans`.

With --measure each op runs by itself for --seconds at the power cap. Then the whole step runs on an executor.
The energy counter gives the joules. The command writes --profile after every op, and the same command
continues it. --nostep leaves the whole step to a later call. --sms also runs each op on a part of the SMs,
with other variants of its kernels. --parts also runs parts of the step. Each part leaves out ops of the part
before it (`search.profile.step_parts`).

The table has these columns:

- clock and watts of the op by itself
- its joules by itself
- its joules at the step's clock ("now")
- the least measured joules at the step's clock, of --profile and --seen
- the least joules by the curves of the energy bound at the step's clock
- the difference between "now" and the lesser of both, largest first

The last lines compare the sum of the ops with the whole step, and the whole step with the accounts of a
step's joules.

The table of --parts has these columns:

- clock, the sensor's watts and the counter's watts of the part
- its time and joules
- time and joules of its ops one by one, at the part's clock and at their own clocks
- the time until the host has enqueued a run

A "less" is the part's joules less those of the part before it.
"""

import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags

from jaxflow.bench.plans.bed import USUAL, make_bed
from jaxflow.bench.plans.steady import StepWorkload, average_step
from jaxflow.bench.report.requests import write_json
from jaxflow.cli.output_files import check_outputs
from jaxflow.config import ConfigError, EngineConfig, ModelConfig
from jaxflow.engine.start import prepare_process
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.composition import Composition
from jaxflow.model.cost import find_device
from jaxflow.model.energy import shipped_power
from jaxflow.model.graph import Graph, Widths, model_graph
from pallas_kernels.cards import card_of
from pallas_kernels.measure.provenance import provenance
from search.cost import BYTES, check_lengths
from search.profile.clock import shipped_card
from search.profile.measure import DTYPES, TimeBudget, measure, resumed, this_device
from search.profile.op_bench import PAGE_SIZE, LayerBench, OpCase
from search.profile.op_times import Profile, ProfileError, load_profile
from search.profile.step_joules import Account, Accounting, MeasuredStep, OpJoules, StepOp, nearest, step_ops
from search.profile.step_parts import (
    Part,
    PartJoules,
    PartRun,
    described,
    joules_of_run,
    measure_part,
    pages_of,
    part_joules,
    parts,
    parts_table,
)

WIDTH = 118


def define_flags() -> None:
    flags.DEFINE_string("model", "llama-3.1-8b", "A shipped config's name, a folder or a hub id.")
    flags.DEFINE_string("profile", None, "Profile with joules; with --measure it is written and continued.")
    flags.DEFINE_list("seen", [], "Other profiles of the device and model, for the least joules.")
    flags.DEFINE_string("plans", None, "Report of `bench plans` with the joules of the whole step.")
    flags.DEFINE_integer("tokens", 2048, "Tokens of a step: prefill plus decode.", lower_bound=1)
    flags.DEFINE_integer("prompt_tokens", 1024, "Mean prompt length.", lower_bound=1)
    flags.DEFINE_integer("output_tokens", 512, "Mean output length.", lower_bound=1)
    flags.DEFINE_bool("measure", False, "Measure on this device what the profile lacks.")
    flags.DEFINE_bool("step", True, "With --measure: also run the whole step.")
    flags.DEFINE_bool("parts", False, "With --measure: also run parts of the whole step.")
    flags.DEFINE_list("ops", [], "With --measure: the ops to run; default: all.")
    flags.DEFINE_list("sms", [], "With --measure: SM counts for further runs of products and attention.")
    flags.DEFINE_enum("dtype", "bfloat16", DTYPES, "With --measure: of weights and products.")
    flags.DEFINE_enum("kv_cache_dtype", "auto", DTYPES, "With --measure: of the KV cache; auto: the model's.")
    flags.DEFINE_float("seconds", 2.0, "Seconds that each run is sustained.", lower_bound=0.001)
    flags.DEFINE_float("time_limit_s", 80.0, "For the ops; later ones are left out.", lower_bound=0.0)
    flags.DEFINE_string("output_json", None, "File for the report.")


def run() -> None:
    """Run the command. Raises: ConfigError, ProfileError, CheckpointError, OSError."""
    f = flags.FLAGS
    check_outputs("output_json")
    if not f.profile:
        raise ConfigError("profile", f.profile, "a profile with joules, or with --measure a file for one")
    for flag, words in (("ops", f.ops), ("sms", f.sms)):
        if words and not f.measure:
            raise ConfigError(flag, ",".join(words), "nothing without --measure")
    if f.parts and not (f.measure and f.step and not f.plans):
        raise ConfigError("parts", True, "--measure and --step, without --plans")
    config = open_checkpoint(f.model, load_format="dummy").model_config
    check_lengths(f.model, config, f.prompt_tokens, f.output_tokens)
    workload = StepWorkload(f.prompt_tokens, f.output_tokens)
    roomy = {"most_rows": 2 * f.tokens, "kv_tokens": sys.maxsize, "page_size": PAGE_SIZE}
    step = average_step(workload, f.tokens, **roomy)
    layer = None
    if f.measure:
        prepare_process(_engine(f.dtype, f.kv_cache_dtype))
        layer, empty = this_device(f.model, config, f.dtype, f.kv_cache_dtype)
        profile = resumed(f.profile, empty)
    else:
        profile = load_profile(f.profile, model=f.model)
    if profile.tensor_parallel_size != 1:
        tp = profile.tensor_parallel_size
        raise ProfileError(f"{f.profile}: tensor_parallel_size={tp}: accepted is a profile of one device")
    # Files are read before anything is measured, so that a wrong file costs no time.
    seen = {Path(path).stem: _same(path, profile) for path in f.seen}
    whole = reported_step(f.plans, workload, f.tokens, profile) if f.plans else None
    left: list[OpCase] = []
    runs: list[PartRun] = []
    if layer is not None:
        profile, left = measured_ops(layer, profile, model_graph(config), step)
        if f.step and whole is None:
            whole, runs = measured_step(workload, profile, layer, step)
    print_and_write(config, profile, step, seen, whole, left, runs)


def _same(path: str, profile: Profile) -> Profile:
    """Return another profile of the same device, model and dtypes. Raises: ProfileError."""
    other = load_profile(path, device=profile.device, model=profile.model)
    for field in ("dtype", "kv_cache_dtype", "tensor_parallel_size"):
        there, here = getattr(other, field), getattr(profile, field)
        if there != here:
            raise ProfileError(f"{path}: {field}={there!r}: accepted is {here!r}, as in --profile")
    return other


# ---- measurements


def measured_ops(
    layer: LayerBench, profile: Profile, graph: Graph, step: Composition
) -> tuple[Profile, list[OpCase]]:
    """Return the profile with the step's ops, and the ops that did not fit the time limit.

    Raises: ConfigError for unknown --ops and impossible --sms.
    """
    f = flags.FLAGS
    wanted = step_ops(graph, step, (*layer.ops, "logits"))
    if unknown := [name for name in f.ops if name not in {one.op.name for one in wanted}]:
        raise ConfigError("ops", ",".join(unknown), ", ".join(one.op.name for one in wanted))
    chosen = [one for one in wanted if not f.ops or one.op.name in f.ops]
    budget, left = TimeBudget(f.time_limit_s), []
    for bench, head in ((layer, False), (layer.head(), True)):
        cases = [one.case for one in chosen if (one.op.name == "logits") == head]
        cases += [] if head else _variants(layer, cases, profile.total_sms)
        profile, late = measure(profile, bench, cases, f.profile, budget, seconds_each=f.seconds)
        left += [case for case in late if isinstance(case, OpCase)]
    return profile, left


def _variants(layer: LayerBench, cases: Sequence[OpCase], total_sms: int) -> list[OpCase]:
    """Return the cases of --sms. Raises: ConfigError."""
    words = flags.FLAGS.sms
    if words and not (all(word.isdecimal() for word in words) and layer.kernels.can_be_bounded):
        raise ConfigError("sms", ",".join(words), "numbers of SMs, on a GPU whose kernels can be bounded")
    counts = [int(word) for word in words]
    if any(not 0 < count < total_sms for count in counts):
        raise ConfigError("sms", max(counts), f"1 to {total_sms - 1}, less than the device's {total_sms} SMs")
    bounded = [case for case in cases if layer.ops[case.op].kind in ("dense", "attention")]
    return [dataclasses.replace(case, sms=count) for count in counts for case in bounded]


def _engine(dtype: str, kv_dtype: str) -> EngineConfig:
    """Return the settings of an engine that runs the sequential step."""
    fp8 = dtype == "float8_e4m3fn"
    return EngineConfig(
        model=flags.FLAGS.model,
        load_format="dummy",
        dtype="bfloat16" if fp8 else dtype,
        quantization="fp8" if fp8 else None,
        kv_cache_dtype=kv_dtype,
        plan="sequential",
    )


def measured_step(
    workload: StepWorkload, profile: Profile, layer: LayerBench, wanted: Composition
) -> tuple[MeasuredStep, list[PartRun]]:
    """Run the sequential step of --tokens on an executor, and return its time and joules, and its parts.

    The step has fewer decodes than `wanted` where the KV cache is too small for all. With --parts the cache
    has the pages of `wanted`, and leaves the rest of the memory to the parts.

    Raises: ProfileError without watts.
    """
    f = flags.FLAGS
    config = _engine(profile.dtype, profile.kv_cache_dtype)
    if f.parts:
        config = dataclasses.replace(config, num_kv_pages=pages_of(workload, wanted))
    bed = make_bed(config, [], [f.tokens], [workload], [USUAL], "prompt_tokens")
    ((steady, step),) = bed.ready(workload).values()
    whole_step = Part("step", (), steady.enqueue)
    wanted_parts = parts(steady, layer, model_graph(bed.model)) if f.parts else [whole_step]
    runs = []
    for part in wanted_parts:
        runs.append(measure_part(part, max(f.seconds, 2.0)))
        if f.parts:
            print(described(runs[-1]), flush=True)
    found = runs[0].found
    if (joules := joules_of_run(found)) is None:
        raise ProfileError(f"device {jax.devices()[0].device_kind}: accepted is a GPU whose driver has watts")
    whole = MeasuredStep(step.tokens, found.seconds, joules, found.watts, found.clock_mhz)
    return whole, runs if f.parts else []


def reported_step(path: str, workload: StepWorkload, tokens: int, profile: Profile) -> MeasuredStep:
    """Return the sequential step of a report of `bench plans`.

    Raises: ProfileError for a report of another model, device or KV dtype, or without the step; OSError.
    """
    try:
        report = json.loads(Path(path).read_text("utf-8"))
        rows = [
            row
            for row in report["plans"]
            if (row["workload"], row["tokens"], row["sequential"]) == (workload.name, tokens, True)
            and row["joules_per_token"]
        ]
        engine = report["engine_config"]
        dtype = "float8_e4m3fn" if engine["quantization"] == "fp8" else engine["dtype"]
        of = (report["device"], report["model"], dtype, engine["kv_cache_dtype"])
        wanted = (profile.device, Path(profile.model).name, profile.dtype, profile.kv_cache_dtype)
        if of != wanted:
            raise ProfileError(f"{path}: a report of {', '.join(of)}: accepted is {', '.join(wanted)}")
        if not rows:
            raise ProfileError(
                f"{path}: accepted is a report with joules of the sequential step of {tokens} tokens and "
                f"{workload.name}"
            )
        row = rows[0]
        count = row["decode_tokens"] + row["prefill_tokens"]
        return MeasuredStep(
            count,
            row["step_ms"] / 1e3,
            count * row["joules_per_token"],
            row["watts"],
            row["sm_clock_mhz"],
        )
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ProfileError):
            raise
        raise ProfileError(f"{path}: accepted is a report of `bench plans`: {error!r}") from error


# ---- the table


def print_and_write(
    config: ModelConfig,
    profile: Profile,
    step: Composition,
    seen: dict[str, Profile],
    whole: MeasuredStep | None,
    left: Sequence[OpCase],
    runs: Sequence[PartRun] = (),
) -> None:
    """Print the tables of a step and its parts, and write them to --output_json."""
    f = flags.FLAGS
    widths = Widths(weights=BYTES.get(profile.dtype, 2.0), kv=BYTES.get(profile.kv_cache_dtype, 2.0))
    graph: Graph = model_graph(config, 1, widths)
    names = [op.name for op in graph.ops()]
    ops: list[StepOp] = step_ops(graph, step, names)
    device = find_device(profile.device)
    power = shipped_power(device.name) if device else None
    power = power if power is not None and profile.dtype in power.flop else None
    card = shipped_card(device.name) if device else None
    fixed = card_of(device.name).fixed_joules if device else None
    accounting = Accounting(graph, profile, step, ops, device, power, card, fixed)
    clock = whole.clock_mhz if whole else None
    rows = accounting.rows(seen, clock)
    unknown = [one for one in ops if one.op.name not in {row.op for row in rows}]
    missing, least = [one.op.name for one in unknown], [accounting.curves_j(one, clock) for one in unknown]
    missing_j = sum(joules for joules in least if joules is not None) or None
    dynamic_j = (
        accounting.dynamic_j(whole.joules / whole.tokens, whole.seconds / whole.tokens) if whole else None
    )
    accounts = accounting.accounts(clock)
    print(*table(profile, step, rows, whole, missing, missing_j), sep="\n")
    print(*compared(accounts, step.tokens, dynamic_j, whole), sep="\n")
    found = [part_joules(run, accounting) for run in runs]
    if found and whole:
        print(*parts_table(found, whole.tokens), sep="\n")
    if left:
        late = ", ".join(case.op for case in left)
        print(f"Left out for --time_limit_s={f.time_limit_s:g}: {late}. The same command continues.")
    if f.output_json:
        write_json(f.output_json, report(profile, step, rows, whole, accounts, missing, found))
        print(f"{f.output_json}: written")


def table(
    profile: Profile,
    step: Composition,
    rows: Sequence[OpJoules],
    whole: MeasuredStep | None,
    missing: Sequence[str],
    missing_j: float | None,
) -> list[str]:
    """Return the lines of the table, in millijoules per token.

    missing: ops without a measurement. missing_j: their joules in a step by the energy bound.
    """
    f = flags.FLAGS
    title = (
        f" {Path(profile.model).name} on {profile.device}, {profile.dtype}, {f.prompt_tokens}/"
        f"{f.output_tokens}, {step.tokens:.0f} tokens a step: mJ a token "
    )
    head = f"{'op':18}{'MHz':>7}{'watts':>7}{'alone':>9}{'now':>9}{'least':>9}{'bound':>9}{'difference':>12}"
    lines = [title.center(WIDTH, "="), f"{head}  least of"]

    def cells(*joules: float | None) -> str:
        each = ("-" if one is None else f"{1e3 * one / step.tokens:.3f}" for one in joules)
        return "".join(f"{text:>9}" for text in each)

    for row in rows:
        lines.append(
            f"{row.op:18}{row.clock_mhz:7.0f}{row.watts:7.0f}"
            f"{cells(row.alone, row.now, row.least, row.bound)}{cells(row.difference):>12}  {row.source}"
        )
    bounds = [row.bound for row in rows if row.bound is not None]
    total = [sum(getattr(row, name) for row in rows) for name in ("alone", "now", "least")]
    difference = cells(sum(row.difference for row in rows))
    limit = sum(bounds) if bounds else None
    lines += ["-" * WIDTH, f"{'sum of the ops':32}{cells(*total, limit)}{difference:>12}"]
    if whole:
        scaled = whole.joules / whole.tokens * step.tokens
        clock = "-" if whole.clock_mhz is None else f"{whole.clock_mhz:.0f}"
        watts = "-" if whole.watts is None else f"{whole.watts:.0f}"
        rate = f"{whole.tokens / whole.seconds:.0f} tokens/s, {whole.tokens:.0f} tokens a step"
        lines += [
            f"{'whole step':18}{clock:>7}{watts:>7}{'':9}{cells(scaled)}   {rate}",
            f"{'step minus sum':41}{cells(scaled - total[1])}   idle time, the ops below, scaling of clocks",
        ]
    if missing:
        least = f", by the bound{cells(missing_j)}" if missing_j else ""
        lines.append(f"Not in the sum: {', '.join(missing)}{least}")
    return lines


def compared(
    accounts: Sequence[Account], tokens: float, dynamic_j: float | None, whole: MeasuredStep | None
) -> list[str]:
    """Return the lines that compare the accounts with the whole step. dynamic_j: measured, per token."""
    if not accounts:
        return ["Accounts: none, the joules of this device and dtype are unknown."]
    lines = [f"{'account':36}{'MHz':>7}{'mJ above idle':>15}{'tokens/s':>10}{'measured/account':>18}"]
    for account in accounts:
        each = account.dynamic_j / tokens
        clock = "-" if account.clock_mhz is None else f"{account.clock_mhz:.0f}"
        ratio = "-" if dynamic_j is None else f"{dynamic_j / each:.3f}"
        lines.append(f"{account.name:36}{clock:>7}{1e3 * each:15.3f}{account.tokens_per_s:10.0f}{ratio:>18}")
    if dynamic_j is not None and dynamic_j > 0 and whole:
        best = nearest(accounts, dynamic_j * tokens)
        lines.append(
            f"{'whole step, measured':36}{whole.clock_mhz or 0:7.0f}{1e3 * dynamic_j:15.3f}"
            f"{whole.tokens / whole.seconds:10.0f}"
        )
        lines.append(f"Nearest to the measured step: {best.name}.")
    return lines


def report(
    profile: Profile,
    step: Composition,
    rows: Sequence[OpJoules],
    whole: MeasuredStep | None,
    accounts: Sequence[Account],
    missing: Sequence[str],
    of_parts: Sequence[PartJoules] = (),
) -> dict[str, Any]:
    """Return the report: joules of all layers of one step."""
    f = flags.FLAGS
    origin = provenance(shlex.join(["python", "-m", "search", *sys.argv[1:]]))
    measured = whole if f.measure else None
    origin |= {"clock_mhz": measured.clock_mhz, "watts": measured.watts} if measured else {}
    return {
        "command_name": "joules",
        **origin,
        "measured_device": profile.device,
        "model": Path(profile.model).name,
        "dtype": profile.dtype,
        "kv_cache_dtype": profile.kv_cache_dtype,
        "prompt_tokens": f.prompt_tokens,
        "output_tokens": f.output_tokens,
        "step": dataclasses.asdict(step) | {"tokens": step.tokens},
        "ops": [dataclasses.asdict(row) | {"difference": row.difference} for row in rows],
        "not_in_the_sum": list(missing),
        "whole_step": dataclasses.asdict(whole) if whole else None,
        "accounts": [dataclasses.asdict(account) for account in accounts],
        "parts": [dataclasses.asdict(part) for part in of_parts],
    }
