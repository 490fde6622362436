"""The report of `search plan` on its plans, and the commands to run next."""

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
from search.nanobatch.known_orders import SimulatedPlan, cuts_of
from search.nanobatch.memory_fit import UTILIZATION
from search.nanobatch.objective import ENERGY, TIME
from search.nanobatch.problem import SearchProblem
from search.nanobatch.simulate import Timeline
from search.nanobatch.stages import FoundPlan
from search.profile.op_times import Profile

FOLDER = Path("plans")  # the default output folder; its files have the names of shipped plans
_NEEDS_E4M3 = {
    "dtype": "--quantization",
    "kv_cache_dtype": "--kv_cache_dtype",
}  # the flags of an engine that runs such a plan


@dataclasses.dataclass(frozen=True)
class PlanResult:
    """A plan with its simulation, and the two candidates: the solver's plan and the best known order."""

    setting: SearchProblem
    plan: Plan
    timeline: Timeline
    sequential_s: float  # simulated, of a layer; the least over the forms of the collectives
    cost: float  # of a token, by the problem's objective
    sequential_cost: float  # of a token in the sequential step, the least over the forms
    found: FoundPlan | None
    solved: SimulatedPlan | None
    known: SimulatedPlan | None

    @property
    def was_known(self) -> bool:
        """Return whether the plan's order was known before the solver began."""
        return self.known is not None and self.timeline is self.known.timeline

    @property
    def unsure(self) -> bool:
        """Return whether an engine runs the sequential step instead, at the plan's target."""
        return self.plan.predictions is not None and Gain.of(self.plan.predictions).sure(*self._at) <= 1

    @property
    def _at(self) -> tuple[float, float]:
        return self.setting.load.decode_tokens, self.setting.load.decode_keys


def whole_device(device: Device) -> str:
    """Return the reason why ops cannot share a device."""
    own = f"{device.name} has {device.compute_capability}"
    return f"kernels always take the whole device, unless it has compute capability {HOPPER}; {own}"


def full_device_note(profile: Profile) -> str:
    """Return the line for a profile without times on a part of the device."""
    device = find_device(profile.device)
    timed = "the profile has no times on a part of the device"
    why = timed if device is None or has_bounded(device.compute_capability) else whole_device(device)
    return f"Only copies are planned at the same time as another op: {why}."


def default_out(profile: Profile, *, several: bool) -> Path:
    """Return the default output path, as `plans/h200-llama-3-70b-tp2-bfloat16.json`; several: a folder."""
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


def engine_command(
    profile: Profile,
    model: str,
    out: Path,
    prompt: int,
    output: int,
    utilization: float = UTILIZATION,
    stages: int = 1,
) -> str:
    """Return the command line that runs the plans of `out` on a machine of the profile's kind.

    stages: pipeline stages.
    """
    lengths = ("--input_len", str(prompt), "--output_len", str(max(1, output)))
    if stages > 1:
        lengths += ("--pipeline_parallel_size", str(stages))
    return _bench(
        "throughput", profile, model, utilization, "--plan", str(out), *lengths, "--compare_sequential"
    )


def measure_commands(
    profile: Profile, model: str, out: Path, unsure: Mapping[Path, str], utilization: float = UTILIZATION
) -> list[str]:
    """Return the command lines that measure plans and replace their predicted gains with measured ones.

    unsure: each plan's file with its workload as prompt/output. out: the file or folder of all plans, which
    names the report. The report is written to the current folder, since an engine reads every JSON of a plan
    folder as a plan.
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
    """Return a command line of `jaxflow.bench` with the engine flags of the profile."""
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


def report(result: PlanResult, path: Path) -> str:
    """Return the lines that describe a plan."""
    plan, timeline, pieces = (
        result.plan,
        result.timeline,
        collections.Counter(nano.op for nano in result.plan.nano_ops),
    )
    us = {
        "simulated": timeline.period_s,
        "sequential": result.sequential_s,
        "energy bound": timeline.energy_s / timeline.layers,
    }
    load, cuts = result.setting.load, ", ".join(map(str, cuts_of(plan))) or "none"
    padded = f", {load.padding} are padding: memory holds no more requests" if load.padding else ""
    several = result.setting.shares.profile.tensor_parallel_size > 1
    rival = (
        " with the best form of sums; the rival of a step is the engine's step with NCCL's sums"
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
                f"  relative to the sequential plan: {result.sequential_s / timeline.period_s:.3f}x a "
                f"layer{rival}; {_of_a_step(result)}"
            ),
            *_of_a_token(result),
        )
    )


def _of_a_token(result: PlanResult) -> list[str]:
    """Return the line of an objective other than time: the plan's value and the sequential plan's."""
    objective, costs = result.setting.objective, (result.cost, result.sequential_cost)
    if objective == TIME:
        return []
    if objective == ENERGY:
        plan, alone = (f"{1e3 * cost:.2f}" for cost in costs)
        return [f"  predicted mJ a token: {plan}, of the sequential plan {alone}"]
    plan, alone = (f"{1 / cost:,.0f}" for cost in costs)
    return [f"  predicted tokens/s at the power cap: {plan}, of the sequential plan {alone}"]


def _of_orders(result: PlanResult) -> str:
    """Return the step times of the best known order and of the solver's, with the solver's own figures a
    layer.
    """
    known, found, solved, said = result.known, result.found, result.solved, []
    if known is not None:
        said.append(f"{1e3 * known.step_s:.2f} ms in the known order ({known.plan.name})")
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


def _of_a_step(result: PlanResult) -> str:
    """Return the predicted gain of a full step, and the plan that an engine runs."""
    predicted, load = result.plan.predictions, result.setting.load
    if predicted is None:
        return "an engine runs the sequential step"
    runs = (
        f"the sequential plan, since the margin of error of a predicted gain is {predicted.margin:.0%}"
        if result.unsure
        else "this plan"
    )
    return f"{Gain.of(predicted).at(load.decode_tokens, load.decode_keys):.3f}x a step: an engine runs {runs}"
