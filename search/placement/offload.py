r"""Run placements: the found policy, its rivals and each tier by itself, and compare each with its
prediction.

  python -m search offload --model opt-30b --machine h200 --gpu_mem 16 --cpu_mem 100 --output_json runs.json
  python -m search offload --model opt-30b --machine h200 --gpu_mem 16 --cpu_mem 100 \
      --policies a.json,b.json --output_json runs.json
  python -m search offload --model opt-125m --machine here.json --gpu_mem 0.5 --cpu_mem 2 --disk 2 \
      --disk_path /scratch

All policies run in one process. A policy is searched for the machine and its memories, and for less memory
where the account of bytes, which includes the compiled programs, exceeds a tier. With `--value_top_k_percents
100,10` each policy is run, or searched, for each share of the V rows. After a warm-up batch, full
blocks of random prompts are timed. `--runs_json` receives the runs in the form of `python -m search machine
--runs`.
"""

import dataclasses
import gc
import itertools
import os
import shlex
import statistics
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import msgspec
from absl import flags, logging

from jaxflow.cli.output_files import check_outputs
from jaxflow.config import ConfigError, EngineConfig
from jaxflow.engine.settings import resolve
from jaxflow.flexgen.accounting import DoesNotFit
from jaxflow.flexgen.config import OffloadConfig
from jaxflow.flexgen.policy import TIERS, Policy, PolicyError, load_policy
from jaxflow.flexgen.report import LinkRates, measure_links, report, totals
from jaxflow.flexgen.runtime import Runtime
from jaxflow.flexgen.start import prepare, start
from jaxflow.model.checkpoints.checkpoint import Checkpoint, open_checkpoint
from jaxflow.request import Request, SamplingParams
from pallas_kernels.measure.provenance import provenance
from pallas_kernels.measure.sensor import sample
from search.placement import command as placement
from search.placement.cost_model import crossing_bytes, predict
from search.placement.machine import BlockRun, BlockRuns
from search.placement.machine_curves import Machine, load_machine
from search.placement.rivals import TierRoom, chosen, policy_named
from search.placement.solver import GIGA, PlacementError, PlacementOptions, TierMemory
from search.placement.workload import PlacementWorkload

SCHEMA_VERSION = 1
PAPER_TOKENS_PER_S = {"opt-30b": {16: 7.32, 4: 8.70}}  # FlexGen Table 2, 512 in, 32 out, on a T4 of 16 GB
_TRIES = 6
_WIDTH = 110


def define_flags() -> None:
    placement.define_workload_flags()
    flags.DEFINE_enum("load_format", "dummy", ["auto", "dummy"], "dummy: random weights.")
    flags.DEFINE_string("disk_path", None, "A folder for tensors on disk.")
    flags.DEFINE_list(
        "policies",
        None,
        "Policy files to run instead of searched policies; needs no solver.",
    )
    flags.DEFINE_list(
        "value_top_k_percents",
        None,
        "Percentages of the cached value vectors that a decode reads. Every policy runs once for each. "
        "Default: the policy's, or --value_top_k_percent.",
    )
    flags.DEFINE_list("only", None, "Names of the rivals to run; default: all that fit.")
    flags.DEFINE_integer("blocks", 1, "Timed blocks of each policy.", lower_bound=1)
    flags.DEFINE_integer("link_mb", 256, "Size in MB of the transfers that measure the link.", lower_bound=1)
    flags.DEFINE_string("output_json", None, "File for the measurements.")
    flags.DEFINE_string("runs_json", None, "File for the runs, as search.placement.machine reads them.")


@dataclasses.dataclass(frozen=True)
class OffloadBench:
    """The inputs that all runs share.

    link, link_alone: rates of a device, while all devices of a run transfer, and while only one does.
    """

    work: PlacementWorkload
    machine: Machine
    memory: TierMemory
    engine: EngineConfig
    checkpoint: Checkpoint
    link: LinkRates
    link_alone: LinkRates

    def config(self, policy: Policy, **settings: Any) -> OffloadConfig:
        """Return the offload settings of a policy under the limits of the tiers."""
        names = ("gpu_memory_limit", "host_memory_limit", "disk_limit")
        limits = dict(zip(names, (capacity / GIGA or None for capacity in self.memory), strict=True))
        return OffloadConfig(policy, disk_path=flags.FLAGS.disk_path, **limits, **settings)


def run() -> None:
    """Run the command. Raises: ConfigError, PolicyError, PlacementError where no policy fits or runs."""
    f = flags.FLAGS
    check_outputs("output_json", "runs_json")
    if f.policies and f.only:
        raise ConfigError(
            "only", ",".join(f.only), "unset with policies: all of those are run, and no rivals"
        )
    names, percents = chosen(f.only), _percents(f.value_top_k_percents)
    engine = EngineConfig(model=f.model, load_format=f.load_format, dtype=f.dtype, block_size=f.block_size)
    stages = _stages(f.policies)
    placeholder = _smallest(f.model, stages)
    prepare(OffloadConfig(placeholder, gpu_memory_limit=f.gpu_mem, host_memory_limit=f.cpu_mem), engine)
    checkpoint = open_checkpoint(f.model, load_format=f.load_format)
    machine = load_machine(f.machine)
    work = placement.workload_from_flags(
        checkpoint.name, checkpoint.model_config, resolve(engine, checkpoint.model_config).dtype
    )
    memory = placement.memory_from_flags(machine)
    devices = jax.devices()
    links = [measure_links(devices[:number], f.link_mb) for number in (stages, 1)]
    bench = OffloadBench(work, machine, memory, engine, checkpoint, *links)
    rows: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    for row in (
        _given(bench, f.policies, percents)
        if f.policies
        else _searched(bench, placement.options_from_flags(), names, percents, refused)
    ):
        rows.append(row)
        print(_line(row), flush=True)
        _save(bench, rows)  # after each run, so that an interruption keeps the earlier ones
    reasons = "\n".join(f"{name}: {reason}" for name, reason in refused.items())
    if not rows:
        have = ", ".join(f"{tier}={getattr(f, tier):g}" for tier in placement.TIERS)
        raise PlacementError(f"no policy of {', '.join(names)} fits {have} (GB)\n{reasons}")
    if reasons:
        print(reasons, flush=True)
    if all("failed" in row for row in rows):
        raise PlacementError("no policy ran\n" + "\n".join(f"{row['name']}: {row['failed']}" for row in rows))


def _save(bench: OffloadBench, rows: list[dict[str, Any]]) -> None:
    f = flags.FLAGS
    result = {
        "schema_version": SCHEMA_VERSION,
        "command_name": "search offload",
        **provenance(shlex.join(["python", "-m", "search", *sys.argv[1:]])),
        **{key: _mean([row.get(key) for row in rows]) for key in ("clock_mhz", "watts")},
        "model": bench.checkpoint.name,
        "machine": bench.machine.name,
        "host_cores": os.cpu_count(),
        "memory_gb": dict(zip(TIERS, (capacity / GIGA for capacity in bench.memory), strict=True)),
        "rows": rows,
    }
    if f.output_json:
        Path(f.output_json).write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    if f.runs_json:
        runs = tuple(
            BlockRun(
                msgspec.convert(row["policy"], Policy),
                row["block_latency_s"][0],
                bench.work.wide_bytes,
                bench.work.page_size,
            )
            for row in rows
            if row.get("overlap") and row["schedule"] != "diagonal"
        )
        made = BlockRuns(method=f"whole blocks on {result['device']}", start=bench.machine, runs=runs)
        Path(f.runs_json).write_bytes(msgspec.json.format(msgspec.json.encode(made), indent=1) + b"\n")


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values, or None if no value is known."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _percents(words: list[str] | None) -> list[float]:
    """Return percentages; none: those of the policies. Raises: ConfigError."""
    try:
        found = [float(word) for word in words or ()]
        if not all(0 < percent <= 100 for percent in found):
            raise ValueError
    except ValueError:
        accepted = "numbers above 0 and up to 100, between commas"
        raise ConfigError("value_top_k_percents", ",".join(words or ()), accepted) from None
    return found


def _given(bench: OffloadBench, files: list[str], percents: list[float]) -> Iterator[dict[str, Any]]:
    """Run given policies of the workload. A failing policy yields a row with its error."""
    policies = {Path(file).stem: load_policy(file, model=bench.work.model) for file in files}
    if percents:
        policies = {
            _with_percent(name, percent): msgspec.structs.replace(policy, value_top_k_percent=percent)
            for name, policy in policies.items()
            for percent in percents
        }
    for name, policy in policies.items():
        asked = bench.work.prompt_tokens, bench.work.output_tokens
        if (policy.prompt_tokens, policy.output_tokens) != asked:
            raise PolicyError(
                f"{name}: a policy for {policy.prompt_tokens} + {policy.output_tokens} tokens, "
                f"{asked[0]} + {asked[1]} are run"
            )
    for name, policy in policies.items():
        try:
            row = _run(bench, name, policy)
        except (
            ConfigError,
            jax.errors.JaxRuntimeError,
        ) as error:  # out of memory; the next policy may need less
            row = {"name": name, "policy": msgspec.to_builtins(policy), "failed": str(error)}
        gc.collect()
        yield row


def _searched(
    bench: OffloadBench,
    options: PlacementOptions,
    names: list[str],
    percents: list[float],
    refused: dict[str, str],
) -> Iterator[dict[str, Any]]:
    """Run the best policy of each name and percentage.

    `refused` receives the reasons of those that do not fit.
    """
    for name, percent in itertools.product(names, percents or [options.value_top_k_percent]):
        title = _with_percent(name, percent) if percents else name
        try:
            row = _run_named(bench, dataclasses.replace(options, value_top_k_percent=percent), name)
        except PlacementError as error:
            refused[title] = str(error)
        else:
            yield row | {"name": title}


def _with_percent(name: str, percent: float) -> str:
    return f"{name}, {percent:g} % of V"


def _run_named(bench: OffloadBench, options: PlacementOptions, name: str) -> dict[str, Any]:
    """Run a rival's best policy that fits. Raises: PlacementError where no policy does, MissingSolver."""
    room = TierRoom(bench.memory.of_stage(options.pipeline_parallel_size), dict.fromkeys(TIERS, 0.0))
    overlap, schedule = name != "no overlap", "row" if name == "row by row" else None
    refused: DoesNotFit | None = None
    for _ in range(_TRIES):
        try:
            policy = policy_named(name, bench.work, bench.machine, room, options)
        except PlacementError:
            if refused is None:
                raise
            # The account of the runtime says more than the cost model, which has the rest of the memory.
            break
        predicted = predict(bench.work, bench.machine, policy, overlap=overlap)
        try:
            return _run(bench, name, policy, overlap=overlap, schedule=schedule)
        except DoesNotFit as error:
            room.learn(error, policy, predicted.memory_bytes[TIERS.index(error.tier)])
            refused = error
            logging.info(
                "%s of batches of %d: %s needs %.3f GB",
                name,
                policy.gpu_batch_size,
                error.tier,
                error.needed_bytes / GIGA,
            )
        finally:
            gc.collect()
    assert refused is not None
    more = (refused.needed_bytes - refused.limit_bytes) / GIGA
    raise PlacementError(f"the {refused.tier} is {more:.4g} GB too small: {refused}") from refused


def _run(bench: OffloadBench, name: str, policy: Policy, **settings: Any) -> dict[str, Any]:
    """Run a policy's blocks and compare them with the prediction."""
    blocks = flags.FLAGS.blocks
    predicted = predict(
        bench.work, bench.machine, policy, overlap=settings.get("overlap", True), blocks=blocks
    )
    with start(bench.config(policy, **settings), bench.engine, bench.checkpoint) as runtime:
        return _measured(bench, name, runtime, predicted)


def _bytes(bench: OffloadBench, runtime: Runtime) -> dict[str, Any]:
    """Return the predicted and the counted bytes over link and disk."""
    moved = totals(runtime.stats).values()
    counted = (
        sum(getattr(one, f"{name}_bytes") for one in moved)
        for name in ("link_down", "link_up", "disk_read", "disk_write")
    )
    predicted = crossing_bytes(bench.work, runtime.policy, flags.FLAGS.blocks)
    return {
        "moved_bytes": {
            term: {"predicted": predicted[term], "counted": bytes_moved}
            for term, bytes_moved in zip(predicted, counted, strict=True)
        }
    }


def _measured(bench: OffloadBench, name: str, runtime: Runtime, predicted: Any) -> dict[str, Any]:
    """Run blocks of random prompts with the policy's length, and return their report."""
    policy, vocabulary = runtime.policy, runtime.geometry.config.vocab_size
    sampling = SamplingParams(temperature=0.0, max_tokens=policy.output_tokens, ignore_eos=True, seed=0)
    ids = [
        [(block + 7 * i + 31 * j) % vocabulary for j in range(policy.prompt_tokens)]
        for block in range(flags.FLAGS.blocks)
        for i in range(policy.block_size)
    ]
    with sample(runtime.geometry.tp * policy.pipeline_parallel_size) as readings:
        requests = [Request(f"{i}", prompt, sampling) for i, prompt in enumerate(ids)]
        for _ in runtime.generate(requests, progress=True):
            pass
    result = report(runtime, bench.link)
    error = predicted.latency_s / result["latency_s"] - 1
    about = {
        "latency_s": predicted.latency_s,
        "prefill_s": predicted.prefill_s,
        "tokens_per_s": predicted.tokens_per_s,
        "latency_error": error,
        "seconds_a_layer": {"prefill": predicted.prefill, "decode": predicted.decode},
        "memory_bytes": predicted.memory_bytes,
    }
    paper = PAPER_TOKENS_PER_S.get(policy.model, {}).get(policy.weight_bits)
    power = {"clock_mhz": readings.clock_mhz, "watts": readings.watts}
    alone = dataclasses.asdict(bench.link_alone)
    named = {"name": name, "predicted": about, "paper_tokens_per_s": paper, "link_alone": alone, **power}
    return named | result | _bytes(bench, runtime)


def _stages(files: list[str] | None) -> int:
    """Return the pipeline stages of the policies of a process, whose pinned pools share the host's memory.

    Raises: ConfigError.
    """
    if not files:
        return flags.FLAGS.pipeline_parallel_size
    found = {load_policy(file).pipeline_parallel_size for file in files}
    if len(found) > 1:
        accepted = f"policies of one pipeline_parallel_size, not of {', '.join(map(str, sorted(found)))}"
        raise ConfigError("policies", ",".join(files), accepted)
    return found.pop()


def _smallest(model: str, stages: int) -> Policy:
    """Return a placeholder policy, for the preparation of the process before a search."""
    from jaxflow.flexgen.policy import Shares

    device = Shares(device=100.0)
    return Policy(
        model=model,
        prompt_tokens=1,
        output_tokens=1,
        gpu_batch_size=1,
        num_gpu_batches=1,
        weights=device,
        kv=device,
        activations=device,
        pipeline_parallel_size=stages,
    )


def _line(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"{row['name']:20} failed: {row['failed'].partition(chr(10))[0]}"
    policy = row["policy"]
    shares = " ".join(
        "/".join(f"{policy[kind][tier]:.0f}" for tier in TIERS) for kind in ("weights", "kv", "activations")
    )
    block = f"{policy['gpu_batch_size']}x{policy['num_gpu_batches']}"
    predicted = row["predicted"]
    return (
        f"{row['name']:20}{block:>8} {shares:34}{row['tokens_per_s']:>10.2f} tok/s, predicted "
        f"{predicted['tokens_per_s']:>9.2f} ({predicted['latency_error']:+.0%} latency), link busy "
        f"{row['link']['busy_share']:.0%}"
    )
