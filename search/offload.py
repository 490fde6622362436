"""Runs policies: the one found beside its rivals and each tier alone, in one process, each measured against what is predicted of it.

  python -m search offload --model opt-30b --machine h200 --gpu_mem 16 --cpu_mem 100 --output_json runs.json
  python -m search offload --model opt-125m --machine here.json --gpu_mem 0.5 --cpu_mem 2 --disk 2 --disk_path /scratch

The policy is searched for this machine and these memories, and for less of them where the account of bytes, which knows what the
compiled programs take, asks for more than a tier has. It is the time of whole blocks of random prompts that counts, after a batch that
warms up. `--runs_json` gets the same runs as `python -m search machine --runs` reads them, to correct the machine by.
"""

import dataclasses
import gc
import os
from pathlib import Path
from typing import Any

import jax
import msgspec
from absl import flags, logging

from jaxflow.config import ConfigError, EngineConfig
from jaxflow.engine.request import Request, SamplingParams
from jaxflow.model.checkpoint import Checkpoint, open_checkpoint
from jaxflow.offload.accounting import DoesNotFit
from jaxflow.offload.link import Link, measure_link
from jaxflow.offload.policy import TIERS, Policy
from jaxflow.offload.process import prepare
from jaxflow.offload.report import report
from jaxflow.offload.runtime import Runtime, start
from jaxflow.offload.settings import OffloadConfig
from search import placement
from search.machine_curves import Machine, load_machine
from search.machine_runs import Run, Runs
from search.placement_cost import predict, workload
from search.placement_rivals import rivals
from search.placement_solver import GIGA, Memory, Options, PlacementError, search

SCHEMA_VERSION = 1
PAPER_TOKENS_PER_S = {"opt-30b": {"16": 7.32, "4": 8.70}}  # FlexGen Table 2, 512 in, 32 out, on a T4 of 16 GB
SEARCHED = ("all optimisations", "no overlap", "no host attention", "no disk")  # the others are made by hand, as large as fits
_TRIES = 6
_WIDTH = 110


def define_flags() -> None:
    placement.define_flags()
    flags.DEFINE_enum("load_format", "dummy", ["auto", "dummy"], "dummy: random weights.")
    flags.DEFINE_string("dtype", "auto", "Of weights and activations: auto, bfloat16 or float32.")
    flags.DEFINE_integer("block_size", 64, "Tokens in a page of KV.", lower_bound=1)
    flags.DEFINE_string("disk_path", None, "A folder for what lives on disk.")
    flags.DEFINE_list("only", None, "Which of the rivals run, by name; default: all that fit.")
    flags.DEFINE_integer("blocks", 1, "Blocks that are timed of each policy.", lower_bound=1)
    flags.DEFINE_integer("link_mb", 256, "Size of the transfers that the link is measured with.", lower_bound=1)
    flags.DEFINE_string("output_json", None, "File for what was measured.")
    flags.DEFINE_string("runs_json", None, "File for the runs, as search.machine_runs reads them.")


def run() -> None:
    """The command. Raises: ConfigError, PlacementError where nothing fits."""
    f = flags.FLAGS
    memory = Memory(*(getattr(f, tier) * GIGA for tier in placement.TIERS))
    engine = EngineConfig(model=f.model, load_format=f.load_format, dtype=f.dtype, block_size=f.block_size)
    prepare(OffloadConfig(_smallest(f.model), gpu_memory_limit=f.gpu_mem, host_memory_limit=f.cpu_mem), engine)
    checkpoint = open_checkpoint(f.model, load_format=f.load_format)
    machine = load_machine(f.machine)
    work = workload(checkpoint.name, checkpoint.model_config, f.prompt_tokens, f.output_tokens)
    options = placement.options_from_flags()
    link = measure_link(jax.devices()[0], f.link_mb)
    rows: list[dict[str, Any]] = []
    for name in _names(f.only):
        found = _run_one(name, work, machine, memory, options, engine, checkpoint, link)
        if found is not None:
            rows.append(found)
            print(_line(found), flush=True)
    result = {
        "schema_version": SCHEMA_VERSION,
        "command_name": "search offload",
        "model": checkpoint.name,
        "machine": machine.name,
        "device": jax.devices()[0].device_kind,
        "host_cores": os.cpu_count(),
        "memory_gb": dict(zip(TIERS, (capacity / GIGA for capacity in memory), strict=True)),
        "paper_tokens_per_s": PAPER_TOKENS_PER_S.get(checkpoint.name, {}).get(f.weight_bits),
        "rows": rows,
    }
    if f.output_json:
        Path(f.output_json).write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    if f.runs_json:
        runs = tuple(Run(msgspec.convert(row["policy"], Policy), row["block_latency_s"][0]) for row in rows if row["overlap"])
        made = Runs(method=f"whole blocks on {result['device']}", start=machine, runs=runs)
        Path(f.runs_json).write_bytes(msgspec.json.format(msgspec.json.encode(made), indent=1) + b"\n")


@dataclasses.dataclass
class Room:
    """What each tier has for a policy, as far as it is known: runs take more than the cost model says, the more the larger a batch."""

    memory: Memory
    beyond: dict[str, float]  # bytes that a sequence of a batch takes of a tier beyond the cost model

    def of(self, gpu_batch_size: int) -> Memory:
        """What the cost model may fill with batches of this size."""
        return Memory(*(max(0.0, capacity - self.beyond[tier] * gpu_batch_size) for tier, capacity in zip(TIERS, self.memory, strict=True)))

    def learn(self, error: DoesNotFit, policy: Policy, modelled: float) -> None:
        """From a policy that the account refused; modelled: what the cost model thought it takes of the tier."""
        self.memory = dataclasses.replace(self.memory, **{error.tier: min(getattr(self.memory, error.tier), error.limit_bytes)})
        # Whole tensors do not follow shares smoothly: a percent of the tier is left besides.
        beyond = (error.needed_bytes - modelled + 0.01 * error.limit_bytes) / policy.gpu_batch_size
        self.beyond[error.tier] = max(self.beyond[error.tier], beyond)


def _run_one(
    name: str, work: Any, machine: Machine, memory: Memory, options: Options, engine: EngineConfig, checkpoint: Checkpoint, link: Link
) -> dict[str, Any] | None:
    """A rival's best policy that really fits, run; None where there is none."""
    room = Room(memory, dict.fromkeys(TIERS, 0.0))
    limits = dict(zip(("gpu_memory_limit", "host_memory_limit", "disk_limit"), (m / GIGA or None for m in memory), strict=True))
    overlap, schedule = name != "no overlap", "row" if name == "row by row" else "zigzag"
    for _ in range(_TRIES):
        policy = _policy(name, work, machine, room, options)
        if policy is None:
            logging.info("%s does not fit", name)
            return None
        predicted = predict(work, machine, policy, overlap=overlap)
        offload = OffloadConfig(policy, disk_path=flags.FLAGS.disk_path, overlap=overlap, schedule=schedule, **limits)
        try:
            with start(offload, engine, checkpoint, progress=False) as runtime:
                return _measured(name, runtime, predicted, link)
        except DoesNotFit as error:
            room.learn(error, policy, predicted.memory_bytes[TIERS.index(error.tier)])
            logging.info("%s of batches of %d: %s needs %.3f GB", name, policy.gpu_batch_size, error.tier, error.needed_bytes / GIGA)
        finally:
            gc.collect()
    logging.warning("%s: no policy was found that fits in %d tries", name, _TRIES)
    return None


def _policy(name: str, work: Any, machine: Machine, room: Room, options: Options) -> Policy | None:
    """The fastest policy of a name that is thought to fit."""
    if name == "no host attention":
        options = dataclasses.replace(options, host_attention=False)
    if name == "no disk":
        room = Room(dataclasses.replace(room.memory, disk=0.0), room.beyond)
    found: list[tuple[float, float, Policy]] = []
    for size in options.gpu_batch_sizes:
        own, memory = dataclasses.replace(options, gpu_batch_sizes=(size,)), room.of(size)
        try:
            policy = search(work, machine, memory, own)
        except PlacementError:
            continue
        if name not in SEARCHED:
            row = next(row for row in rivals(work, machine, memory, own, policy) if row.name == name)
            if row.policy is None:
                continue
            policy = row.policy
        made = predict(work, machine, policy)
        found.append((made.tokens_per_s, -made.latency_s, policy))
    return max(found, key=lambda one: one[:2])[2] if found else None


def _measured(name: str, runtime: Runtime, predicted: Any, link: Link) -> dict[str, Any]:
    """Blocks of random prompts of the policy's length."""
    policy, vocabulary = runtime.policy, runtime.geometry.config.vocab_size
    sampling = SamplingParams(temperature=0.0, max_tokens=policy.output_tokens, ignore_eos=True, seed=0)
    for block in range(flags.FLAGS.blocks):
        ids = [[(block + 7 * i + 31 * j) % vocabulary for j in range(policy.prompt_tokens)] for i in range(policy.block_size)]
        for _ in runtime.generate([Request(f"{block}-{i}", prompt, sampling) for i, prompt in enumerate(ids)]):
            pass
    result = report(runtime, link)
    error = predicted.latency_s * flags.FLAGS.blocks / result["latency_s"] - 1
    about = {"latency_s": predicted.latency_s, "tokens_per_s": predicted.tokens_per_s, "latency_error": error}
    return {"name": name, "predicted": about | {"memory_bytes": predicted.memory_bytes}} | result


def _names(only: list[str] | None) -> list[str]:
    known = ["all optimisations", "no overlap", "no search", "no host attention", "no disk", "row by row"]
    known += ["all on the device", "all on the host", "all on disk"]
    unknown = set(only or ()) - set(known)
    if unknown:
        raise ConfigError("only", ",".join(sorted(unknown)), ", ".join(known))
    return [name for name in known if only is None or name in only]


def _smallest(model: str) -> Policy:
    """A policy that says nothing: the process is prepared before one is searched."""
    from jaxflow.offload.policy import Shares

    device = Shares(device=100.0)
    return Policy(
        model=model, prompt_tokens=1, output_tokens=1, gpu_batch_size=1, num_gpu_batches=1, weights=device, kv=device, activations=device
    )


def _line(row: dict[str, Any]) -> str:
    policy = row["policy"]
    shares = " ".join("/".join(f"{policy[kind][tier]:.0f}" for tier in TIERS) for kind in ("weights", "kv", "activations"))
    block = f"{policy['gpu_batch_size']}x{policy['num_gpu_batches']}"
    predicted = row["predicted"]
    return (
        f"{row['name']:20}{block:>8} {shares:34}{row['tokens_per_s']:>10.2f} tok/s, predicted {predicted['tokens_per_s']:>9.2f} "
        f"({predicted['latency_error']:+.0%} latency), link busy {row['link']['busy_share']:.0%}"
    )
