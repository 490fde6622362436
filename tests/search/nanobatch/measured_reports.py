"""The reports of `bench plans` on H200s, each step with the time that the simulation predicts for it."""

import dataclasses
import functools
import itertools
import json
import statistics

import msgspec
import paths
from search_toys import on_all_sms

from jaxflow.config import ModelConfig
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.cost import DEVICES
from jaxflow.model.energy import shipped_power
from jaxflow.model.graph import BFLOAT16, FP8, Graph, Work, model_graph
from jaxflow.pipeline.choice import Gain, pick
from jaxflow.pipeline.handwritten import sequential_plan
from jaxflow.pipeline.plan import Plan, load
from search.nanobatch.layer_tasks import StepShape
from search.nanobatch.plan import FEW_SMS, KEYS
from search.nanobatch.predict import margin, outside_s
from search.nanobatch.simulate import Timeline, simulate
from search.profile.clock import shipped_card
from search.profile.modelled import copied, modelled_profile
from search.profile.op_times import ATTENTION, Profile, load_profile
from search.profile.share_times import ShareTimes, product_shapes

BENCHMARKS = paths.ROOT / "benchmarks"
PROFILES = paths.ROOT / "search" / "profiles"
H200, POWER, CARD = DEVICES["H200"], shipped_power("H200"), shipped_card("H200")
SMS, PRODUCT_SMS = 132, 108
LLAMA_8B = open_checkpoint("llama-3.1-8b", load_format="dummy").model_config


@dataclasses.dataclass(frozen=True)
class PlansReport:
    """A report of `bench plans`, the plans that it measured, and the profile that predicts its steps.

    plans: patterns of plan files under benchmarks/plans/h200. num_layers: the layers measured; None: all of
    the model. profile: a measured profile under search/profiles; None: the modelled profile.
    parts: the modelled profile has attention on a part of the SMs, too.
    """

    file: str
    model: str = "llama-3.1-8b"
    fp8: bool = False
    tp: int = 1
    plans: tuple[str, ...] = ()
    num_layers: int | None = None
    profile: str | None = None
    parts: bool = False

    @property
    def dtype(self) -> str:
        return "float8_e4m3fn" if self.fp8 else "bfloat16"

    def with_profile(self, profile: str | None) -> "PlansReport":
        return dataclasses.replace(self, profile=profile)


def _tp_report(model: str, fp8: bool, tp: int, suffix: str = "", **rest) -> PlansReport:
    kind = "fp8" if fp8 else "bf16"
    folder = "mixtral-8x7b" if model == "mixtral-8x7b" else "llama-3-70b"
    searched = f"{model}/searched/tp{tp}-{'fp8' if fp8 else 'bfloat16'}.json"
    plans = (f"{folder}/tp{tp}-{kind}/*.json", *([] if suffix else [searched]))
    file = f"h200/{model}/plans-tp{tp}-{kind}{suffix}.json"
    return PlansReport(**{"file": file, "model": model, "fp8": fp8, "tp": tp, "plans": plans} | rest)


# The first two reports ran older kernels of attention, those of the first profile. The later profile has the
# kernels of the other reports.
MEASURED_8B = "../../benchmarks/settings/h200-llama-3.1-8b-first-profile.json"
LATER_8B = "h200-llama-3.1-8b.json"
MEASURED_8B_FP8 = "../../benchmarks/settings/h200-llama-3.1-8b-fp8-profile.json"
LEAN = "llama-3.1-8b/bf16-lean/1024-512-92-40.json"
ONE_GPU = {
    "8b": PlansReport(
        "h200/llama-3.1-8b/plans-bf16.json", plans=("llama-3.1-8b/bf16/*.json",), profile=MEASURED_8B
    ),
    "8b-fp8": PlansReport(
        "h200/llama-3.1-8b/plans-fp8.json",
        fp8=True,
        plans=("llama-3.1-8b/fp8/*.json",),
        profile=MEASURED_8B_FP8,
    ),
    "8b-lean": PlansReport(
        "h200/llama-3.1-8b/plans-bf16-lean.json",
        plans=("llama-3.1-8b/bf16/*.json", "llama-3.1-8b/bf16-lean/*.json"),
        profile=LATER_8B,
    ),
    "8b-variants": PlansReport(
        "h200/llama-3.1-8b/plans-bf16-variants.json",
        plans=(
            "llama-3.1-8b/bf16/*.json",
            "llama-3.1-8b/bf16-lean/*.json",
            "llama-3.1-8b/bf16-variants/*.json",
        ),
        profile=LATER_8B,
    ),
    "8b-traces": PlansReport(
        "h200/llama-3.1-8b/plans-bf16-traces.json",
        plans=("llama-3.1-8b/bf16/*.json", LEAN),
        profile=LATER_8B,
    ),
    "8b-fourth": PlansReport(
        "h200/llama-3.1-8b/plans-bf16-cuts.json",
        plans=(LEAN, "llama-3.1-8b/bf16-variants/*.json"),
        profile=LATER_8B,
    ),
    "8b-lean-fp8": PlansReport(
        "h200/llama-3.1-8b/plans-fp8-lean.json",
        fp8=True,
        plans=("llama-3.1-8b/fp8-lean/*.json",),
        profile=MEASURED_8B_FP8,
    ),
    "8b-lean-fp8-lmsys": PlansReport(
        "h200/llama-3.1-8b/plans-fp8-lean-lmsys.json",
        fp8=True,
        plans=("llama-3.1-8b/fp8-lean/*.json",),
        profile=MEASURED_8B_FP8,
    ),
}
EIGHT_LAYERS = "h200/llama-3-70b/plans-tp2-fp8-8-layers.json"
SIXTEEN_LAYERS = "h200/llama-3-70b/plans-tp2-fp8-16-layers-ablation.json"
TWO_GPUS = {
    "70b": _tp_report("llama-3-70b", False, 2),
    "70b-fp8": _tp_report("llama-3-70b", True, 2),
    "llama-2-70b-fp8": _tp_report("llama-2-70b", True, 2),
    "deepseek-67b-fp8": _tp_report("deepseek-67b", True, 2),
    "qwen2-72b": _tp_report("qwen2-72b", False, 2),
    "qwen2-72b-fp8": _tp_report("qwen2-72b", True, 2),
    "mixtral-8x7b": _tp_report("mixtral-8x7b", False, 2),
    "70b-8-layers-fp8": _tp_report("llama-3-70b", True, 2, "?", file=EIGHT_LAYERS, num_layers=8),
    "70b-16-layers-fp8": _tp_report(
        "llama-3-70b", True, 2, "?", file=SIXTEEN_LAYERS, num_layers=16, parts=True
    ),
}
FOUR_GPUS = {
    "70b-tp4": _tp_report("llama-3-70b", False, 4),
    "70b-tp4-fp8": _tp_report("llama-3-70b", True, 4),
    "70b-tp4-fp8-kernels": _tp_report("llama-3-70b", True, 4, "-kernels"),
}
CUT_AT_1280 = {
    model: _tp_report(model, True, 2, "?", file=f"h200/{model}/plans-tp2-fp8-cut-1280.json")
    for model in ("deepseek-67b", "qwen2-72b")
}
WINDOWS = {
    "70b-fp8-windows": _tp_report(
        "llama-3-70b", True, 2, file="h200/llama-3-70b/windows-tp2-fp8.json", parts=True
    ),
    "70b-fp8-sharegpt": _tp_report(
        "llama-3-70b", True, 2, file="h200/llama-3-70b/sharegpt-tp2-fp8.json", parts=True
    ),
    "70b-tp4-fp8-windows": _tp_report(
        "llama-3-70b", True, 4, file="h200/llama-3-70b/windows-tp4-fp8.json", parts=True
    ),
    "70b-tp4-fp8-sharegpt": _tp_report(
        "llama-3-70b", True, 4, file="h200/llama-3-70b/sharegpt-tp4-fp8.json", parts=True
    ),
    "70b-tp4-windows": _tp_report("llama-3-70b", False, 4, file="h200/llama-3-70b/windows-tp4-bf16.json"),
    "70b-tp4-sharegpt": _tp_report("llama-3-70b", False, 4, file="h200/llama-3-70b/sharegpt-tp4-bf16.json"),
    "70b-tp4-op-by-op": PlansReport(
        "h200/llama-3-70b/windows-tp4-bf16-op-by-op.json",
        model="llama-3-70b",
        tp=4,
        plans=("llama-3-70b/tp4-bf16/*.json", "llama-3-70b/searched/tp4-bfloat16*.json"),
        parts=True,
    ),
}
REPORTS = ONE_GPU | TWO_GPUS | FOUR_GPUS | WINDOWS


@dataclasses.dataclass(frozen=True)
class PredictedStep:
    """A measured step of a report (`row`), with its simulation. outside: the work outside the layers."""

    row: dict
    timeline: Timeline
    outside: Work
    seconds: float
    margin: float

    @property
    def error(self) -> float:
        """Predicted over measured seconds, less 1."""
        return 1e3 * self.seconds / self.row["step_ms"] - 1

    @property
    def plan_name(self) -> str:
        return self.row["plan"].rpartition(f", {self.row['tokens']} tokens")[0]


def read_rows(file: str) -> list[dict]:
    """Return the steps of a report. Of `benchmarks.plan_windows`, long windows replace short ones."""
    report = json.loads((BENCHMARKS / file).read_text("utf-8"))
    if "plans" in report:
        return report["plans"]
    long = {one["plan"]: one for one in report["contenders"]}
    found = []
    for row in report["survey"]:
        window = long.get(row["plan"])
        if window is not None:
            clock, watts = (statistics.median(window[key]) for key in ("clock_mhz", "watts"))
            row |= {"step_ms": window["step_ms"], "watts": watts, "sm_clock_mhz": clock}
        found.append(row)
    return found


@functools.cache
def _profile(report: PlansReport) -> Profile:
    if report.profile is not None:
        return load_profile(PROFILES / report.profile)
    if report.tp == 1:
        sms = (SMS, *FEW_SMS, *(SMS - few for few in FEW_SMS))
    else:
        sms = (48, 84, SMS) if report.parts else (PRODUCT_SMS, SMS)
    made = modelled_profile(
        report.model,
        model_of(report),
        H200,
        tp=report.tp,
        widths=FP8 if report.fp8 else BFLOAT16,
        dtype=report.dtype,
        kv_dtype=report.dtype,
        tokens=range(128, 1 + max(2048, *(row["tokens"] for row in read_rows(report.file))), 128),
        keys=KEYS,
        sms=sms,
    )
    if report.tp == 1 or report.parts:
        return made
    on_parts = tuple(one for one in made.op_times if one.sms == SMS or one.op not in ATTENTION)
    return msgspec.structs.replace(made, op_times=on_parts)


def model_of(report: PlansReport) -> ModelConfig:
    config = open_checkpoint(report.model, load_format="dummy").model_config
    return dataclasses.replace(config, layers=config.layers[: report.num_layers])


def graph_of(report: PlansReport, **forms: bool) -> Graph:
    return model_graph(model_of(report), report.tp, FP8 if report.fp8 else BFLOAT16, **forms)


def graph_8b_fp8() -> Graph:
    return graph_of(ONE_GPU["8b-fp8"])


def share_times_8b() -> ShareTimes:
    return share_times_of(ONE_GPU["8b"])


def share_times_of(report: PlansReport) -> ShareTimes:
    return forms_of(report, False, False, False)


def share_times_70b(profile: str) -> ShareTimes:
    return share_times_of(TWO_GPUS["70b-fp8"].with_profile(profile))


@functools.cache
def forms_of(report: PlansReport, copies: bool, scattered: bool, swapped: bool) -> ShareTimes:
    """Return the op times of a report, for plans with this form of the sums over devices."""
    config, graph = model_of(report), graph_of(report, scattered=scattered, swapped=swapped)
    profile, shapes = _profile(report), product_shapes(config, report.tp)
    return ShareTimes(copied(profile, graph, CARD) if copies else profile, graph, shapes)


def _plans(report: PlansReport) -> dict[str, Plan]:
    files = (path for pattern in report.plans for path in (BENCHMARKS / "plans/h200").glob(pattern))
    loaded = (
        on_all_sms(load(path)) if "searched" in path.parts and report.tp > 1 else load(path) for path in files
    )
    return {plan.name: plan for plan in loaded}


@functools.cache
def predicted_steps(report: PlansReport) -> list[PredictedStep]:
    """Return each measured step with its prediction; on one GPU only steps of 2048 tokens with prefill."""
    config = model_of(report)
    plans, found = _plans(report), []
    for row in read_rows(report.file):
        if report.tp == 1 and not (row["prefill_tokens"] and row["tokens"] == 2048):
            continue
        name = row["plan"].rpartition(f", {row['tokens']} tokens")[0]
        plan = plans.get(name) or sequential_plan(config, row["tokens"], report.tp)
        assert plan.name == name
        ops = {nano.op for nano in plan.nano_ops}
        scattered, swapped = (any(op.endswith(end) for op in ops) for end in ("_scatter", "_swap"))
        times = forms_of(report, plan.sums == "copies", scattered, swapped)
        prompt, output = map(int, row["workload"].split("/"))
        chunk_keys = StepShape.steady_state(row["tokens"], prompt, output).chunk_keys
        shape = StepShape(row["tokens"], row["decode_tokens"], row["mean_context_tokens"] or 0.0, chunk_keys)
        timeline = simulate(plan, times.graph, times, shape, device=H200, power=POWER)
        step = shape.part(0, shape.tokens)
        outside = sum((op.work(step) for op in (*times.graph.before, *times.graph.after)), Work())
        seconds = timeline.step_s + outside_s(times.graph, step, H200, report.dtype)
        kind = margin(plan, times.graph, report.tp, report.dtype)
        found.append(PredictedStep(row, timeline, outside, seconds, kind))
    return found


def alternatives(report: PlansReport) -> list[list[PredictedStep]]:
    """Return the steps of each workload and size: one group is what an engine chooses from."""

    def key(step: PredictedStep) -> tuple[str, int]:
        return step.row["workload"], step.row["tokens"]

    return [list(steps) for _, steps in itertools.groupby(sorted(predicted_steps(report), key=key), key)]


def sequential_of(steps: list[PredictedStep]) -> PredictedStep:
    return next(step for step in steps if step.plan_name == "sequential")


def picked(steps: list[PredictedStep]) -> PredictedStep:
    """Return the step that an engine runs: the shortest plan whose predicted gain exceeds its margin."""
    sequential = sequential_of(steps)
    others = [step for step in steps if step is not sequential]
    gains = [Gain((0,), (0,), ((sequential.seconds / step.seconds,),), step.margin) for step in others]
    return [sequential, *others][pick([None, *gains], 1, 1)]


def lost(chosen: PredictedStep, steps: list[PredictedStep]) -> float:
    """Return how much longer the chosen step took than the shortest one, as a share."""
    return chosen.row["step_ms"] / min(step.row["step_ms"] for step in steps) - 1
