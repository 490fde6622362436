r"""Find plans for a model on a machine: the nano-batches of a step, their order, and the SMs of each op.

  python -m search plan --model llama-3.1-8b --profile search/profiles/h200-llama-3.1-8b.json \
      --tokens 1664,2048
  python -m search plan --model llama-3.1-8b --modelled --device H200 --prompt_tokens 1024,512 \
      --output_tokens 512,512 --out plans

Op times come from a profile measured on the machine, or with --modelled from the cost model (with
--collectives, its collectives are the measured ones). A step decodes at most the requests that an engine
with this --gpu_memory_utilization has pages for (`search.nanobatch.memory_fit`). The rows that it then lacks
are padding and produce no tokens. Of several --tokens, plans are searched for the two whose sequential steps
are fastest, in tokens per second. The best plan of all is kept: with --objective energy the one with the
fewest joules a token, with tokens the one with the most tokens a second at the power cap. Both need a
profile with joules, or the watts of a modelled one.

Under tensor parallelism the search tries each form of the collectives: all-reduces; reduce-scatters and
all-gathers with the norms between them; peer copies between two devices, or in two exchanges of four. Next
to the solver's order it simulates hand-written orders at every cut (`search.nanobatch.known_orders`).
--orders and --cuts restrict the search, so that a known plan is written again:

  python -m search plan --model llama-3-70b --modelled --gpus 4 --sums copies --orders two --cuts 1024

On a GPU other than Hopper kernels always take the full device, so no op is offered a part of it. The first
line printed then says so.

Several workloads (pairs of prompt and output tokens) make a portfolio: one plan each, in the folder --out.
The last line printed is the command that runs the plans. An engine runs a plan only where its predicted gain
exceeds the margin of error (`search.nanobatch.predict`), and the sequential plan otherwise. For plans below
the margin the lines before the last are commands that measure the plans (`bench plans`) and write the
measured gains into their files (`search correct`).
"""

import contextlib
import dataclasses
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from absl import flags
from tqdm import tqdm

from jaxflow.config import ConfigError, ModelConfig, ParallelConfig, check_has_heads
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.cost import DEVICES, find_device
from jaxflow.model.energy import shipped_power
from jaxflow.model.graph import Widths, model_graph
from jaxflow.model.stage_split import split_layers
from jaxflow.pipeline.choice import is_sequential
from jaxflow.pipeline.handwritten import copied as with_copies
from jaxflow.pipeline.plan import Plan, Target, save
from jaxflow.pipeline.program import check, check_sums
from pallas_kernels.kernel_set import has_bounded
from pallas_kernels.tune.rules import OBJECTIVES
from search.cost import BYTES, check_gpus, check_lengths
from search.nanobatch.cuts import TILE
from search.nanobatch.cyclic import SearchError, check_solver
from search.nanobatch.known_orders import ORDERS, best_known, cuts_of, sequential, simulated
from search.nanobatch.layer_tasks import RESOURCES, StepShape
from search.nanobatch.memory_fit import UTILIZATION, most_decodes
from search.nanobatch.objective import TIME, check_objective
from search.nanobatch.plan_report import (
    FOLDER,
    PlanResult,
    default_out,
    engine_command,
    full_device_note,
    measure_commands,
    report,
    whole_device,
)
from search.nanobatch.predict import SEARCHED, SIZES, StepSize, line, most_promising, predict
from search.nanobatch.problem import SearchProblem
from search.nanobatch.stages import search
from search.profile.clock import shipped_card
from search.profile.modelled import copied, modelled_profile
from search.profile.op_times import EXCHANGE, Profile, load_profile, with_collectives
from search.profile.share_times import ShareTimes, product_shapes

FEW_SMS = (
    16,
    24,
    28,
    32,
    40,
    48,
)
_BYTES = BYTES | {"float32": 4.0}  # float32: profiles measured on a CPU
_SEARCHED = 0.9  # share of the time limit; the rest is for predictions
MOST_TOKENS = 16384  # a search over every cut of a larger step outlasts its time limit
KEYS = (256, 1024, 4096, 16384)
FORMS = ("all", "reduce", "scatter", "copies")
SOLVER = "solver"  # the word of --orders for the solver's order
MODES = {"all": RESOURCES, "memory": ("memory",), "network": ("network",), "none": ()}


class TimeShares:
    """The time limits of consecutive searches: each one may use its equal part of the time that is left.

    clock: returns seconds.
    """

    def __init__(self, limit_s: float, number: int, clock: Callable[[], float] = time.monotonic):
        self.limit_s, self.left, self.clock, self.started = limit_s, number, clock, clock()

    @property
    def spent_s(self) -> float:
        """Return the seconds since the search started."""
        return self.clock() - self.started

    def next_s(self) -> float:
        """Return the limit of the next search, at least one second."""
        part = (self.limit_s - self.spent_s) / self.left
        self.left -= 1
        return max(1.0, part)


def define_flags() -> None:
    flags.DEFINE_string("model", "llama-3.1-8b", "A shipped config's name, a folder or a hub id.")
    flags.DEFINE_string("profile", None, "A profile that `search measure` wrote.")
    flags.DEFINE_boolean("modelled", False, "Take times from the cost model instead of a profile.")
    flags.DEFINE_string(
        "collectives",
        None,
        "With --modelled: a profile of `search measure --ops network`; its times replace the modelled ones.",
    )
    flags.DEFINE_enum("device", "H200", sorted(DEVICES), "The GPU whose rates count, with --modelled.")
    flags.DEFINE_integer(
        "gpus", 1, "GPUs that share the model (tensor parallel), with --modelled.", lower_bound=1
    )
    flags.DEFINE_integer(
        "pipeline_parallel_size", 1, "Pipeline stages, which the plan file then names.", lower_bound=1
    )
    flags.DEFINE_enum(
        "dtype", "bfloat16", sorted(BYTES), "The dtype of weights and products, with --modelled."
    )
    flags.DEFINE_enum(
        "kv_cache_dtype", "bfloat16", sorted(BYTES), "The dtype of the KV cache, with --modelled."
    )
    flags.DEFINE_list(
        "tokens",
        [str(size) for size in SIZES],
        f"Tokens of a step, at most {MOST_TOKENS}; of several, plans are searched for the {SEARCHED} best.",
    )
    flags.DEFINE_list("prompt_tokens", ["1024"], "Mean prompt tokens, a number for each workload.")
    flags.DEFINE_list("output_tokens", ["512"], "Mean output tokens, a number for each workload.")
    flags.DEFINE_float(
        "gpu_memory_utilization",
        UTILIZATION,
        "The engine's share of GPU memory; it limits the decodes of a step.",
        0.01,
        1.0,
    )
    flags.DEFINE_enum("overlap", "all", list(MODES), "Resources that may run concurrently with compute.")
    flags.DEFINE_boolean(
        "split", False, "Split the step even where one nano-batch is faster (for ablations)."
    )
    flags.DEFINE_list(
        "orders",
        [SOLVER, *ORDERS],
        f"Orders to try: {SOLVER}, and the hand-written {', '.join(ORDERS)}.",
    )
    flags.DEFINE_list("cuts", [], f"Tokens at which the step may be split; default: multiples of {TILE}.")
    flags.DEFINE_enum(
        "sums",
        "all",
        FORMS,
        "Forms of the collectives to try; copies: peer copies between two or four devices.",
    )
    flags.DEFINE_list(
        "sms",
        [],
        (
            "SM counts offered to memory-bound ops; concurrent products get the rest. Default: all counts of "
            "a profile, a few with --modelled."
        ),
    )
    flags.DEFINE_integer(
        "nano_batches", 2, "The most nano-batches; 1 is the sequential plan.", lower_bound=1, upper_bound=4
    )
    flags.DEFINE_integer(
        "nano_ops",
        1,  # plans cut op by op were predicted 10 % too fast (docs/plans.md)
        "The most nano-operations of one op, where each op is cut by itself; 1: all ops are cut alike.",
        lower_bound=1,
        upper_bound=4,
    )
    flags.DEFINE_enum(
        "objective",
        TIME,
        OBJECTIVES,
        "What the best plan has least of: time, time at the power cap (tokens), joules a token (energy).",
    )
    flags.DEFINE_integer("time_limit_s", 600, "Time limit in seconds of the full search.", lower_bound=1)
    flags.DEFINE_string(
        "out",
        None,
        f"Output file; for several workloads, a folder. Default: in {FOLDER}/, by device, model and dtype.",
    )


def run() -> None:
    """Run the command."""
    f = flags.FLAGS
    prompts, outputs, budgets = _numbers("prompt_tokens", 1), _numbers("output_tokens"), _sizes()
    if len(prompts) != len(outputs):
        raise ConfigError("output_tokens", outputs, f"as many as prompt_tokens: {len(prompts)}")
    if (unknown := sorted(set(f.orders) - {SOLVER, *ORDERS})) or not f.orders:
        raise ConfigError("orders", ",".join(unknown), f"one or more of {', '.join((SOLVER, *ORDERS))}")
    if f.cuts and not 0 < min(_numbers("cuts")) <= max(_numbers("cuts")) < min(budgets):
        raise ConfigError("cuts", ",".join(f.cuts), f"1 to {min(budgets) - 1}: within every step")
    if f.collectives is not None and not f.modelled:
        raise ConfigError(
            "collectives", f.collectives, "accepted only with --modelled: a profile has its own collectives"
        )
    if f.modelled == (f.profile is not None):
        raise flags.Error(
            "give one of --profile FILE and --modelled; `python -m search measure` writes a profile"
        )
    if SOLVER in f.orders:
        check_solver()
    model = open_checkpoint(f.model, load_format="dummy").model_config
    check_has_heads(model, "the search of a plan")
    workloads = list(zip(prompts, outputs, strict=True))
    for workload in workloads:
        check_lengths(f.model, model, *workload)
    rival, forms = _shares(f.model, model, budgets)
    if all(form.graph.scattered for form in forms):
        check_scattered(
            rival.profile.tensor_parallel_size, tokens=budgets, cuts=_numbers("cuts") if f.cuts else []
        )
    check_objective(f.objective, rival)
    if len(rival.offered_sms()) == 1:
        print(full_device_note(rival.profile))
    used = f.gpu_memory_utilization
    fitting = {
        (*one, tokens): most_decodes(
            f.model, model, rival.profile, *one, tokens, used, _stages(model, rival.profile)
        )
        for one in workloads
        for tokens in budgets
    }
    out = Path(f.out) if f.out else default_out(rival.profile, several=len(workloads) > 1)
    files = [out / f"{prompt}-{output}.json" for prompt, output in workloads] if len(workloads) > 1 else [out]
    check_files(out, files)
    names, unsure = set(), {}
    most = SEARCHED if f.objective == TIME else SEARCHED + 1  # sizes with fewer joules may be slower
    turns = TimeShares(_SEARCHED * f.time_limit_s, min(most, len(budgets)) * len(workloads))
    with tqdm(total=turns.left, unit="step", disable=not sys.stderr.isatty()) as bar:
        for (prompt, output), path in zip(workloads, files, strict=True):
            loads = {
                tokens: StepShape.steady_state(tokens, prompt, output, fitting[prompt, output, tokens])
                for tokens in budgets
            }
            sizes = [StepSize.of(model, _setting(rival, load)) for load in loads.values()]
            results = []
            for tokens in (size.tokens for size in most_promising(sizes)):
                bar.set_description(f"{tokens} tokens, {prompt}/{output}")
                results.append(
                    solve_one(
                        f.model, model, rival, forms, loads[tokens], f"{prompt}/{output}", turns.next_s(), bar
                    )
                )
                bar.update()
            best = _named(min(results, key=lambda result: result.cost), f"{prompt}/{output}", names)
            save(best.plan, path)
            unsure |= {path: f"{prompt}/{output}"} if best.unsure else {}
            bar.write(report(best, path), file=sys.stdout)
            if len(sizes) > 1:
                bar.write(line(sizes, most_promising(sizes), best.plan.tokens), file=sys.stdout)
    print(f"{turns.spent_s:.0f} s of {f.time_limit_s}")
    if unsure and f.pipeline_parallel_size == 1:  # `bench plans` runs one stage
        print(
            f"The predicted gain is within the margin of error, so an engine runs the sequential step: "
            f"{', '.join(map(str, unsure))}. Commands that measure the plans, then run them:"
        )
        print(*measure_commands(rival.profile, f.model, out, unsure, used), sep="\n")
    print(engine_command(rival.profile, f.model, out, *workloads[0], used, f.pipeline_parallel_size))


def _named(result: PlanResult, workload: str, names: set[str]) -> PlanResult:
    """Return the result with a plan name that is unique in the portfolio.

    names: the names so far; gets this one.
    """
    plan = result.plan
    if plan.name in names and not is_sequential(plan):
        plan = msgspec.structs.replace(plan, name=f"{plan.name}, {workload}")
    names.add(plan.name)
    return dataclasses.replace(result, plan=plan)


def solve_one(
    name: str,
    model: ModelConfig,
    rival: ShareTimes,
    forms: Sequence[ShareTimes],
    load: StepShape,
    workload: str,
    time_limit_s: float,
    bar: tqdm,
) -> PlanResult:
    """Return the plan for a workload's step, in the best form of the collectives that allows its cuts.

    rival: the op times of the engine's sequential step.
    """
    cuts, tp = _numbers("cuts") if flags.FLAGS.cuts else [0], rival.profile.tensor_parallel_size
    even = (
        load.tokens % tp == 0
        and any(cut % tp == 0 for cut in cuts)
        and not (flags.FLAGS.split and load.tokens == tp)
    )
    forms = [
        form for form in forms if even or not form.graph.scattered
    ] or forms  # without an even form the search explains the refusal
    results = [
        _solve_form(name, model, shares, load, workload, time_limit_s / len(forms), bar) for shares in forms
    ]
    best = min(results, key=lambda result: result.cost)
    plan, setting = best.plan, best.setting
    if not is_sequential(plan):
        said = predict(
            plan, setting.graph, setting.shares, load, device=setting.device, power=setting.power, rival=rival
        )
        plan = msgspec.structs.replace(plan, predictions=said)
    return dataclasses.replace(
        best,
        plan=plan,
        sequential_s=min(result.sequential_s for result in results),
        sequential_cost=min(result.sequential_cost for result in results),
    )


def _solve_form(
    name: str,
    model: ModelConfig,
    shares: ShareTimes,
    load: StepShape,
    workload: str,
    limit_s: float,
    bar: tqdm,
) -> PlanResult:
    """Return the best plan of one form, without predictions. Raises: SearchError where no order is left."""
    f, profile, stop_s, setting = (
        flags.FLAGS,
        shares.profile,
        time.monotonic() + limit_s,
        _setting(shares, load),
    )
    stages = _stages(model, profile)
    parallel = ParallelConfig(profile.tensor_parallel_size, pp=max(1, len(stages)))
    kind = (name, profile.device, parallel, profile.dtype, profile.kv_cache_dtype)
    target = Target(*kind, load.decode_tokens, load.real_tokens - load.decode_tokens, round(load.decode_keys))
    # The name of a model's folder, without its path.
    title = f"searched {Path(name).name} {load.tokens} {workload}"
    known, found, solved = best_known(model, setting, f.orders, stop_s), None, None
    if SOLVER in f.orders:
        left_s, say = max(1.0, stop_s - time.monotonic()), lambda line: bar.write(line, file=sys.stderr)
        found = search(setting, time_limit_s=left_s, name=title, target=target, say=say)
        plans = [_told(plan, shares) for plan in (found.plan, *found.others)]
        solved = min((simulated(plan, setting) for plan in plans), key=lambda one: one.cost)
    tried = [one for one in (known, solved) if one is not None]
    if not tried:
        raise SearchError(
            f"orders={','.join(f.orders)}: none of them may be cut and overlap as asked; --orders "
            f"{SOLVER} is without bounds"
        )
    alone = sequential(model, setting)
    if f.objective != TIME and SOLVER in f.orders and not f.split:
        tried.append(alone)  # the solver compares times only
    best = min(tried, key=lambda one: one.cost)
    check(best.plan, shares.graph)
    check_sums(best.plan, shares.graph, profile.tensor_parallel_size)
    plan = msgspec.structs.replace(best.plan, target=target, stages=stages)
    costs = best.cost, alone.cost
    return PlanResult(setting, plan, best.timeline, alone.timeline.period_s, *costs, found, solved, known)


def _setting(shares: ShareTimes, load: StepShape) -> SearchProblem:
    """Return the problem that the flags describe."""
    f, profile, device = flags.FLAGS, shares.profile, find_device(shares.profile.device)
    return SearchProblem(
        shares.graph, shares, load, device, shipped_power(device.name) if device else None,
        overlap=MODES[f.overlap], nano_batches=f.nano_batches, split=f.split,
        quantized=profile.dtype == "float8_e4m3fn",
        places=tuple(sorted(set(_numbers("cuts")))) if f.cuts else (), nano_ops=f.nano_ops,
        objective=f.objective,
    )  # fmt: skip


def _told(plan: Plan, shares: ShareTimes) -> Plan:
    """Return the plan with the method of its collectives, and with both that and its cuts in its name."""
    cuts, spans = cuts_of(plan), {(nano.start, nano.stop) for nano in plan.nano_ops}
    if spans <= {*itertools.pairwise((0, *cuts, plan.tokens)), (0, plan.tokens)} and cuts:
        sizes = " + ".join(str(stop - start) for start, stop in itertools.pairwise((0, *cuts, plan.tokens)))
        plan = msgspec.structs.replace(plan, name=f"{plan.name}, {sizes}")
    elif cuts:
        plan = msgspec.structs.replace(plan, name=f"{plan.name}, op by op at {', '.join(map(str, cuts))}")
    return with_copies(plan) if shares.copies else plan


def _shares(name: str, model: ModelConfig, budgets: list[int]) -> tuple[ShareTimes, list[ShareTimes]]:
    """Return the op times of the sequential step's form, and of each requested form with known times."""
    f = flags.FLAGS
    profile, widths, products = _profile(name, model, budgets)
    tp, timed = profile.tensor_parallel_size, {one.op for one in profile.op_times}
    plain, device = model_graph(model, tp, widths), find_device(profile.device)
    card = shipped_card(device.name) if device else None
    memory_sms = tuple(_numbers("sms")) if f.sms else None
    parts = sorted({one.sms for one in profile.op_times} - {profile.total_sms})
    if memory_sms and (unknown := sorted(set(memory_sms) - set(parts))):
        timed_on = ", ".join(map(str, parts)) or "no part of the device"
        raise ConfigError(
            "sms",
            unknown[0],
            f"SMs that ops of the profile were timed on ({timed_on}); concurrent products get the rest",
        )
    rival = ShareTimes(profile, plain, products, memory_sms=memory_sms)
    forms = {"reduce": lambda: rival}
    if tp > 1 and "attn_scatter" in timed:
        forms["scatter"] = lambda: ShareTimes(
            profile, model_graph(model, tp, widths, scattered=True), products, memory_sms=memory_sms
        )
    if tp in (2, 4) and card is not None and (card.exchange_s is not None or EXCHANGE in timed):
        exchanged = model_graph(model, tp, widths, swapped=tp == 4)
        forms["copies"] = lambda: ShareTimes(
            copied(profile, exchanged, card), exchanged, products, memory_sms=memory_sms
        )
    wanted = [form for name, form in forms.items() if f.sums in ("all", name)]
    if not wanted:
        raise ConfigError(
            "sums", f.sums, f"{', '.join(forms)}: on {tp} devices, with a profile of {len(timed)} ops"
        )
    return rival, [form() for form in wanted]


def _stages(model: ModelConfig, profile: Profile) -> tuple[int, ...]:
    """Return the layers of each pipeline stage that the flags ask for; empty without stages.

    Raises: ConfigError for more stages than layers.
    """
    number, device = flags.FLAGS.pipeline_parallel_size, find_device(profile.device)
    rates = (device or DEVICES["H200"]).rates
    return (
        () if number == 1 else split_layers(model, number, profile.tensor_parallel_size, rates, MOST_TOKENS)
    )


def _profile(
    name: str, model: ModelConfig, budgets: list[int]
) -> tuple[Profile, Widths, dict[str, tuple[int, int]] | None]:
    """Return the profile, its widths, and the [K, N] of products where the profile lacks their waves."""
    f = flags.FLAGS
    if f.profile is not None:
        profile = load_profile(f.profile, model=name)
        _check_given(profile)
        widths = Widths(weights=_BYTES[profile.dtype], kv=_BYTES[profile.kv_cache_dtype])
        return profile, widths, product_shapes(model, profile.tensor_parallel_size) if profile.pairs else None
    check_gpus(name, model, f.gpus)
    device = DEVICES[f.device]
    if f.dtype not in device.rates.flops_per_s:
        raise ConfigError(
            "dtype", f.dtype, f"what a {f.device} multiplies: {', '.join(device.rates.flops_per_s)}"
        )
    widths = Widths(weights=BYTES[f.dtype], kv=BYTES[f.kv_cache_dtype])
    bounded, total = has_bounded(device.compute_capability), device.sms
    if f.sms and not bounded:
        raise ConfigError("sms", ",".join(f.sms), f"nothing: {whole_device(device)}")
    parts = () if not bounded else _numbers("sms") if f.sms else FEW_SMS
    if parts and (max(parts) >= total or not min(parts)):
        raise ConfigError("sms", ",".join(f.sms), f"1 to {total - 1} of a device's {total} SMs")
    made: Profile = modelled_profile(
        name, model, device, tp=f.gpus, widths=widths, dtype=f.dtype, kv_dtype=f.kv_cache_dtype,
        tokens=range(128, max(budgets) + 1, 128) if max(budgets) >= 128 else (max(budgets),),
        keys=KEYS, sms=(total, *parts, *(total - part for part in parts)),
    )  # fmt: skip
    if f.collectives is not None:
        made = with_collectives(made, load_profile(f.collectives, model=name))
    return made, widths, product_shapes(model, f.gpus)


def _sizes() -> list[int]:
    """Return the step sizes: those of --tokens, or by default the ones that --cuts can split.

    If no default size can be split, the largest is returned, and later refused.
    """
    f, sizes = flags.FLAGS, sorted(set(_numbers("tokens", 1, MOST_TOKENS)))
    if f["tokens"].present or not f.cuts:
        return sizes
    return [size for size in sizes if size > max(_numbers("cuts"))] or sizes[-1:]


def _check_given(profile: Profile) -> None:
    """Raises: ConfigError for a given flag that contradicts the profile."""
    f, device = flags.FLAGS, find_device(profile.device)
    there = {
        "gpus": profile.tensor_parallel_size,
        "device": device.name if device else profile.device,
        "dtype": profile.dtype,
        "kv_cache_dtype": profile.kv_cache_dtype,
    }
    for flag, value in there.items():
        if f[flag].present and f[flag].value != value:
            raise ConfigError(
                flag, f[flag].value, f"{value!r}, which --profile {f.profile} was measured with"
            )


def _numbers(flag: str, least: int = 0, most: float = math.inf) -> list[int]:
    """Return the whole numbers of a list flag. Raises: ConfigError for any other word or number."""
    words = flags.FLAGS[flag].value or []
    try:
        found = [int(word) for word in words]
    except ValueError:
        found = []
    if not found or not least <= min(found) <= max(found) <= most:
        accepted = f"of {least} or more" if most == math.inf else f"from {least} to {most}"
        raise ConfigError(flag, ",".join(words), f"whole numbers {accepted}, separated by commas")
    return found


def check_scattered(tp: int, **numbers: Sequence[int]) -> None:
    """Raises: ConfigError for rows that do not divide among the devices. numbers: by flag."""
    for flag, given in numbers.items():
        if odd := [number for number in given if number % tp]:
            raise ConfigError(flag, odd[0], f"multiples of the {tp} devices that rows are scattered over")


def check_files(out: Path, files: Sequence[Path]) -> None:
    """Make the output folder, before the search.

    Raises: ConfigError where a plan's file cannot be written.
    """
    with contextlib.suppress(OSError):
        files[0].parent.mkdir(parents=True, exist_ok=True)
    for file in files:
        there = file if file.exists() else file.parent
        if file.is_dir() or not file.parent.is_dir() or not os.access(there, os.W_OK):
            accepted = (
                "a folder that is there or can be made, of files that can be written: one for each "
                "workload's plan"
            )
            raise ConfigError(
                "out",
                str(out),
                accepted if len(files) > 1 else "a file that can be written, for the plan of one workload",
            )
