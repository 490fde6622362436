"""What `search plan` says of the plans that it found, and the commands that go on with them."""

import collections
import dataclasses
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from jaxflow.model.cost import Device, find_device
from jaxflow.pipeline.choice import Gain
from jaxflow.pipeline.plan import Plan
from pallas_kernels.kernel_set import HOPPER, has_bounded
from search.nanobatch.known_orders import Simulated, cuts_of
from search.nanobatch.memory_fit import UTILIZATION
from search.nanobatch.problem import Setting
from search.nanobatch.simulate import Timeline
from search.nanobatch.stages import Found
from search.nanobatch.step_sizes import tokens_per_s
from search.profile.op_times import Profile

FOLDER = Path("plans")  # where plans are written without --out, named as the shipped ones are
_NEEDS_E4M3 = {
    "dtype": "--quantization",
    "kv_cache_dtype": "--kv_cache_dtype",
}  # fp8, of an engine that runs such a plan


@dataclasses.dataclass(frozen=True)
class Result:
    """A plan with what the simulation says of it, and both that were compared: the solver's answer and the
    best known order.
    """

    setting: Setting
    plan: Plan
    timeline: Timeline
    sequential_s: float  # of a layer, as it is simulated; of several forms of sums over devices the least
    found: Found | None
    solved: Simulated | None
    known: Simulated | None

    @property
    def was_known(self) -> bool:
        """Whether its order was known before the solver began."""
        return self.known is not None and self.timeline is self.known.timeline

    @property
    def tokens_per_s(self) -> float:
        """Of whole steps, padding not counted: for comparing plans."""
        return tokens_per_s(self.setting, self.timeline.step_s)

    @property
    def unsure(self) -> bool:
        """Whether an engine runs the sequential step instead, for the load that the plan was made for."""
        return self.plan.predictions is not None and Gain.of(self.plan.predictions).sure(*self._at) <= 1

    @property
    def _at(self) -> tuple[float, float]:
        return self.setting.load.decode_tokens, self.setting.load.decode_keys


def whole_device(device: Device) -> str:
    """Why ops cannot share it."""
    own = f"{device.name} has {device.compute_capability}"
    return f"kernels always take the whole device, unless it has compute capability {HOPPER}; {own}"


def undivided(profile: Profile) -> str:
    """What is said where no op is offered a part of the device, since the profile has no times of ops on one."""
    device = find_device(profile.device)
    timed = "the profile has no times on a part of the device"
    why = timed if device is None or has_bounded(device.compute_capability) else whole_device(device)
    return f"Nothing but copies is planned beside another op: {why}."


def default_out(profile: Profile, *, several: bool) -> Path:
    """Where plans of a kind are written unless told: `plans/h200-llama-3-70b-tp2-bfloat16.json`, a folder of
    that name for several.
    """
    device, tp = find_device(profile.device), profile.tensor_parallel_size
    kind = (
        device.name if device else profile.device,
        Path(profile.model).name,
        f"tp{tp}" if tp > 1 else "",
        profile.dtype,
    )
    return FOLDER / (
        re.sub(r"[^\w.]+", "-", "-".join(filter(None, kind))).lower() + ("" if several else ".json")
    )


def going_on(
    profile: Profile, model: str, out: Path, prompt: int, output: int, utilization: float = UTILIZATION
) -> str:
    """The command line that runs the plans of `out`, on a machine of the profile's kind."""
    lengths = ("--input_len", str(prompt), "--output_len", str(max(1, output)))
    return _bench(
        "throughput", profile, model, utilization, "--plan", str(out), *lengths, "--beside_sequential"
    )


def measuring(
    profile: Profile, model: str, out: Path, unsure: Mapping[Path, str], utilization: float = UTILIZATION
) -> list[str]:
    """The command lines, for such a machine, that measure plans and put what they gain in place of what was
    predicted.

    unsure: by the plan's file, its workload as prompt/output. out: the file or folder of all plans, which the
    report is named after; it is written where the commands run, since an engine takes every JSON of a folder
    for a plan.
    """
    report = f"{out.name.removesuffix('.json') or 'plans'}-measured.json"
    plans, workloads = ",".join(map(str, unsure)), ",".join(dict.fromkeys(unsure.values()))
    measure = _bench(
        "plans",
        profile,
        model,
        utilization,
        "--plans",
        plans,
        "--workloads",
        workloads,
        "--output_json",
        report,
    )
    correct = ("python", "-m", "search", "correct", "--report", report)
    return [measure, *(shlex.join((*correct, "--plan", str(path), "--out", str(path))) for path in unsure)]


def _bench(command: str, profile: Profile, model: str, utilization: float, *words: str) -> str:
    """Of an engine of the profile's kind that uses so much of the memory."""
    tp = profile.tensor_parallel_size
    kind = [
        word
        for field, flag in _NEEDS_E4M3.items()
        if getattr(profile, field) == "float8_e4m3fn"
        for word in (flag, "fp8")
    ]
    kind += ["--tensor_parallel_size", str(tp)] if tp > 1 else []
    kind += ["--gpu_memory_utilization", f"{utilization:g}"] if utilization != UTILIZATION else []
    return shlex.join(("python", "-m", "jaxflow.bench", command, "--model", model, *kind, *words))


def report(result: Result, path: Path) -> str:
    """What a person wants to know of a plan."""
    plan, timeline, pieces = (
        result.plan,
        result.timeline,
        collections.Counter(nano.op for nano in result.plan.nano_ops),
    )
    us = {
        "simulated": timeline.period_s,
        "sequential": result.sequential_s,
        "by the joules": timeline.energy_s / timeline.layers,
    }
    load, cuts = result.setting.load, ", ".join(map(str, cuts_of(plan))) or "none"
    padded = f", {load.padding} are padding: memory holds no more requests" if load.padding else ""
    several = result.setting.shares.profile.tensor_parallel_size > 1
    rival = (
        ", sums in whichever form is best; a step's rival is the engine's, with NCCL's sums"
        if several
        else ""
    )
    return "\n".join(
        (
            f"{path}: {plan.name}; {load.decode_tokens} of {plan.tokens} tokens decode{padded}",
            f"  cuts: {cuts}; nano-ops: {', '.join(f'{op} {n}' for op, n in pieces.items())}",
            "  us a layer: " + ", ".join(f"{1e6 * value:.1f} {what}" for what, value in us.items()),
            f"  {'a known order' if result.was_known else "the solver's order"}: {_of_orders(result)}",
            (
                f"  against sequential: {result.sequential_s / timeline.period_s:.3f}x a layer{rival}; "
                f"{_of_a_step(result)}"
            ),
        )
    )


def _of_orders(result: Result) -> str:
    """What a step's layers take in the best of the known orders and in the solver's; of that what it says
    itself, a layer.
    """
    known, found, solved, said = result.known, result.found, result.solved, []
    if known is not None:
        said.append(f"{1e3 * known.step_s:.2f} ms as known ({known.plan.name})")
    if found is not None and solved is not None:
        own = (
            f"{1e6 * found.period_s:.1f} us a layer, gap {100 * found.gap:.1f} %, "
            f"{1e6 * found.stage_one_s:.1f} without interference"
        )
        said.append(
            f"{1e3 * solved.step_s:.2f} ms by the solver (by itself {own}; {found.tried} of "
            f"{found.cut_sets} cuts tried)"
        )
    return ", ".join(said)


def _of_a_step(result: Result) -> str:
    """What is predicted of a whole step, and whether an engine believes it."""
    predicted, load = result.plan.predictions, result.setting.load
    if predicted is None:
        return "an engine runs the sequential step"
    runs = (
        f"the sequential one, since gains of up to {predicted.margin:.0%} may be none"
        if result.unsure
        else "this plan"
    )
    return (
        f"of a step {Gain.of(predicted).at(load.decode_tokens, load.decode_keys):.3f}x: an engine runs {runs}"
    )
