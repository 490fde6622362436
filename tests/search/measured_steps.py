"""The steps of Llama-3.1-8B that an H200 took (benchmarks/h200-plans-*.json), each as it is predicted."""

import dataclasses
import functools
import json

import paths

from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.cost import DEVICES
from jaxflow.model.energy import shipped_power
from jaxflow.model.graph import Widths, Work, model_graph
from jaxflow.pipeline.choice import Gain, pick
from jaxflow.pipeline.handmade import sequential_plan
from jaxflow.pipeline.plan import Plan, load
from search.nanobatch.layer_tasks import Load
from search.nanobatch.plan import FEW_SMS, KEYS
from search.nanobatch.predict import MARGIN, outside_s
from search.nanobatch.shares import Shares, product_shapes
from search.nanobatch.simulate import Timeline, simulate
from search.profile.modelled import modelled_profile
from search.profile.op_times import load_profile

BENCHMARKS = paths.ROOT / "benchmarks"
H200, POWER = DEVICES["H200"], shipped_power("H200")
LLAMA = open_checkpoint("llama-3.1-8b", load_format="dummy").model_config
FILES = {"bfloat16": "h200-plans-llama-3.1-8b.json", "float8_e4m3fn": "h200-plans-llama-3.1-8b-fp8.json"}


@functools.cache
def shares(dtype: str) -> Shares:
    """bfloat16: the profile that was measured. fp8: nothing of it was, but a layer's trace; modelled."""
    if dtype == "bfloat16":
        profile = load_profile(
            paths.ROOT / "search" / "profiles" / "h200-llama-3.1-8b.json",
            device="NVIDIA H200",
            model="llama-3.1-8b",
        )
        return Shares(profile, model_graph(LLAMA, 1, Widths()), product_shapes(LLAMA, 1))
    return modelled(dtype)


@functools.cache
def modelled(dtype: str) -> Shares:
    widths = Widths(weights=1.0, kv=1.0) if dtype == "float8_e4m3fn" else Widths()
    sms = (132, *FEW_SMS, *(132 - few for few in FEW_SMS))
    profile = modelled_profile(
        "llama-3.1-8b", LLAMA, H200, widths=widths, dtype=dtype, kv_dtype=dtype, keys=KEYS, sms=sms
    )
    return Shares(profile, model_graph(LLAMA, 1, widths), product_shapes(LLAMA, 1))


@functools.cache
def plans(dtype: str) -> dict[str, Plan]:
    found = [load(path) for path in (BENCHMARKS / "plans" / dtype).glob("*.json")]
    return {plan.name: plan for plan in (sequential_plan(LLAMA, 2048, 1), *found)}


@functools.cache
def lean_rows(base: Shares | None = None) -> list["Row"]:
    """Of the layer as it has been issued since, with attention's newer kernel for few SMs."""
    found = [load(path) for path in (BENCHMARKS / "plans" / "lean").glob("*.json")]
    named = {plan.name: plan for plan in (*plans("bfloat16").values(), *found)}
    return timed("h200-plans-llama-3.1-8b-lean.json", base or shares("bfloat16"), named)


@functools.cache
def variant_rows(base: Shares | None = None) -> list["Row"]:
    """Plans by hand around the one that gained, and nano-batches alone, at six workloads; windows of 0.3 s."""
    found = [
        load(path)
        for folder in ("lean", "variants")
        for path in (BENCHMARKS / "plans" / folder).glob("*.json")
    ]
    named = {plan.name: plan for plan in (*plans("bfloat16").values(), *found)}
    return timed("h200-plans-llama-3.1-8b-variants.json", base or shares("bfloat16"), named)


@functools.cache
def trace_rows(base: Shares | None = None) -> list["Row"]:
    """The plan that gained, where it gained and at the traces' mean lengths, after a third start; windows of
    3 s.
    """
    plan = load(BENCHMARKS / "plans" / "lean" / "1024-512-92-40.json")
    return timed(
        "h200-plans-llama-3.1-8b-traces.json",
        base or shares("bfloat16"),
        plans("bfloat16") | {plan.name: plan},
    )


@functools.cache
def fourth_rows(base: Shares | None = None) -> list["Row"]:
    """The plan that gained and three written since: of three nano-batches, with attention in two phases, cut
    at 640; 6 s each.
    """
    files = ("lean/1024-512-92-40", "variants/three92-40", "variants/parts92-40", "variants/cut640-92-40")
    found = [load(BENCHMARKS / "plans" / f"{file}.json") for file in files]
    named = {plan.name: plan for plan in (sequential_plan(LLAMA, 2048, 1), *found)}
    return timed("h200-plans-llama-3.1-8b-fourth.json", base or shares("bfloat16"), named)


@functools.cache
def lean_fp8_rows(lengths: str = "") -> list["Row"]:
    """What the search finds in fp8 for the layer as it has been issued since, at six workloads; with "-lmsys"
    at a seventh, later.
    """
    found = [load(path) for path in (BENCHMARKS / "plans" / "lean-fp8").glob("*.json")]
    named = {plan.name: plan for plan in (sequential_plan(LLAMA, 2048, 1), *found)}
    return timed(f"h200-plans-llama-3.1-8b-lean-fp8{lengths}.json", shares("float8_e4m3fn"), named)


@dataclasses.dataclass(frozen=True)
class Row:
    measured: dict
    timeline: Timeline
    outside: Work
    seconds: float

    @property
    def error(self) -> float:
        return self.seconds / (self.measured["step_ms"] / 1e3) - 1


@functools.cache
def rows(dtype: str, base: Shares) -> list[Row]:
    return timed(FILES[dtype], base, plans(dtype))


def name_of(measured: dict) -> str:
    """The plan's, without its step's size and how it was launched."""
    return measured["plan"].rpartition(f", {measured['tokens']} tokens")[0]


def timed(file: str, base: Shares, named: dict[str, Plan]) -> list[Row]:
    """All that were filled with prefill: a step of 2048 tokens."""
    found, simulated = [], {}
    for row in json.loads((BENCHMARKS / file).read_text("utf-8"))["plans"]:
        if row["prefill_tokens"] and row["tokens"] == 2048:
            prompt, output = map(int, row["workload"].split("/"))
            load_ = Load(
                2048,
                row["decode_tokens"],
                row["mean_context_tokens"],
                Load.steady_state(2048, prompt, output).chunk_keys,
            )
            name = name_of(row)
            if (name, row["workload"]) not in simulated:
                simulated[name, row["workload"]] = simulate(
                    named[name], base.graph, base, load_, device=H200, power=POWER
                )
            timeline, step = simulated[name, row["workload"]], load_.part(0, 2048)
            outside = sum((op.work(step) for op in (*base.graph.before, *base.graph.after)), Work())
            dtype = base.profile.dtype
            found.append(
                Row(row, timeline, outside, timeline.step_s + outside_s(base.graph, step, H200, dtype))
            )
    return found


REPORTS = {
    **FILES,
    **{
        name: f"h200-plans-llama-3.1-8b-{name.replace(' ', '-')}.json"
        for name in ("lean", "variants", "traces", "fourth", "lean fp8", "lean fp8 lmsys")
    },
}


GAINS = {
    "variants": variant_rows,
    "traces": trace_rows,
    "fourth": fourth_rows,
    "lean fp8": lean_fp8_rows,
    "lean fp8 lmsys": lambda: lean_fp8_rows("-lmsys"),
}


def by_workload(name: str) -> list[list[Row]]:
    """The rows of one of `REPORTS`, of each workload."""
    found: dict[str, list[Row]] = {}
    later = {"lean": lean_rows, **GAINS}
    for row in later[name]() if name in later else rows(name, shares(name)):
        found.setdefault(row.measured["workload"], []).append(row)
    return list(found.values())


def picked(found: list[Row]) -> Row:
    """What an engine would run of these by their predictions and the margin."""
    alone = next(row for row in found if row.measured["sequential"])
    others = [row for row in found if not row.measured["sequential"]]
    gains = [None, *(Gain((0,), (0,), ((alone.seconds / row.seconds,),), MARGIN) for row in others)]
    return [alone, *others][pick(gains, 1, 1)]
