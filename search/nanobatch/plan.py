"""Searches plans for a model on a machine: how a step is cut into nano-batches, in what order they run, on
how many SMs.

  python -m search plan --model llama-3.1-8b --profile search/profiles/h200-llama-3.1-8b.json --tokens 1664,2048
  python -m search plan --model llama-3.1-8b --modelled --device H200 --prompt_tokens 1024,512 --output_tokens
  512,512 --out plans

Times are of a profile that was measured on the machine, or with --modelled of the cost model (and
--collectives as they were measured). A step decodes no more requests than an engine with this
--gpu_memory_utilization has pages for (`search.nanobatch.memory_fit`); the rows that it then lacks are padding, which
makes no tokens. Of several --tokens plans are searched for the two whose sequential steps make the most
tokens a second (`search.nanobatch.step_sizes`), and the best of all is kept; under tensor parallelism, of the forms of the
sums over devices (all-reduces, reduce-scatters and all-gathers with the norms on each device's own rows, or
copies: of two devices, or in two steps of four) the best. Beside the solver's order, orders written by hand
are simulated at every cut (`search.nanobatch.known_orders`), and the best of all is kept; --orders and --cuts leave out the
rest, so that a known plan is written again:

  python -m search plan --model llama-3-70b --modelled --gpus 4 --sums copies --orders two --cuts 1024

On a GPU whose kernels always take the whole device (any but Hopper's) no op is offered a part of it, and the
first line says so.

Several workloads (prompt and output tokens, in pairs) make a portfolio: a plan each, in the folder --out. The
last line printed is the command that runs what was found. An engine runs a plan only where it is sure to
gain, since a prediction may be too good by its margin (`search.nanobatch.predict`), and else the sequential one. Of
plans that are not sure the lines before the last are the commands that measure them (`bench plans`) and write
into their files what they gained (`search correct`): then they run where they were seen to.
"""

import dataclasses
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from absl import flags
from tqdm import tqdm

from jaxflow.config import ConfigError, ModelConfig, ParallelConfig
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.cost import DEVICES, find_device
from jaxflow.model.energy import shipped_power
from jaxflow.model.graph import Widths, model_graph
from jaxflow.pipeline.choice import is_sequential
from jaxflow.pipeline.handwritten import copied as with_copies
from jaxflow.pipeline.plan import Target, save
from jaxflow.pipeline.program import check, check_sums
from pallas_kernels.kernel_set import has_bounded
from search.command_checks import check_files, check_gpus, check_lengths, check_scattered
from search.cost import BYTES
from search.nanobatch.cuts import TILE
from search.nanobatch.cyclic import SearchError
from search.nanobatch.known_orders import ORDERS, best_known, cuts_of, sequential, simulated
from search.nanobatch.layer_tasks import RESOURCES, Load
from search.nanobatch.memory_fit import UTILIZATION, most_decodes
from search.nanobatch.plan_report import (
    FOLDER,
    Result,
    default_out,
    going_on,
    measuring,
    report,
    undivided,
    whole_device,
)
from search.nanobatch.predict import predict
from search.nanobatch.problem import Setting
from search.nanobatch.stages import Found, search
from search.nanobatch.step_sizes import SEARCHED, SIZES, Size, line, most_promising
from search.profile.clock import shipped_card
from search.profile.copy_engine import copied
from search.profile.modelled import modelled_profile
from search.profile.op_times import EXCHANGE, Profile, load_profile, with_collectives
from search.profile.share_times import ShareTimes, product_shapes
from search.time_budget import Turns

FEW_SMS = (
    16,
    24,
    28,
    32,
    40,
    48,
)  # that memory-bound ops are modelled on, where kernels can be kept to them; products get the rest
_BYTES = BYTES | {"float32": 4.0}  # of a profile, which a CPU may have measured
_SEARCHED = 0.9  # of the time limit; the rest is for predictions
KEYS = (256, 1024, 4096, 16384)
FORMS = ("all", "reduce", "scatter", "copies")
SOLVER = "solver"  # of --orders: whatever it finds
MODES = {"all": RESOURCES, "memory": ("memory",), "network": ("network",), "none": ()}


def define_flags() -> None:
    flags.DEFINE_string("model", "llama-3.1-8b", "A shipped config's name, a folder or a hub id.")
    flags.DEFINE_string("profile", None, "What `search measure` wrote.")
    flags.DEFINE_boolean("modelled", False, "Take times from the cost model instead of a profile.")
    flags.DEFINE_string(
        "collectives",
        None,
        "With --modelled: what `search measure --ops network` wrote, in place of modelled times.",
    )
    flags.DEFINE_enum("device", "H200", sorted(DEVICES), "Which GPU, with --modelled.")
    flags.DEFINE_integer(
        "gpus", 1, "GPUs that share the model (tensor parallel), with --modelled.", lower_bound=1
    )
    flags.DEFINE_enum("dtype", "bfloat16", sorted(BYTES), "Of weights and products, with --modelled.")
    flags.DEFINE_enum("kv_cache_dtype", "bfloat16", sorted(BYTES), "Of the cache, with --modelled.")
    flags.DEFINE_list(
        "tokens",
        [str(size) for size in SIZES],
        f"Tokens of a step; of several, the {SEARCHED} best are searched.",
    )
    flags.DEFINE_list("prompt_tokens", ["1024"], "Mean prompt of each workload.")
    flags.DEFINE_list("output_tokens", ["512"], "Mean output of each workload.")
    flags.DEFINE_float(
        "gpu_memory_utilization", UTILIZATION, "The engine's: steps decode what it then holds.", 0.01, 1.0
    )
    flags.DEFINE_enum("overlap", "all", list(MODES), "Which resources may run beside compute.")
    flags.DEFINE_boolean("split", False, "Cut the step even where one nano-batch is faster (ablations).")
    flags.DEFINE_list(
        "orders",
        [SOLVER, *ORDERS],
        f"Orders that are tried: the {SOLVER}'s, and by hand {', '.join(ORDERS)}.",
    )
    flags.DEFINE_list("cuts", [], f"Where the step may be cut; default: at multiples of {TILE}.")
    flags.DEFINE_enum(
        "sums",
        "all",
        FORMS,
        "Forms of the sums over devices that are tried; copies: of two or four, by the copy engines.",
    )
    flags.DEFINE_list(
        "sms",
        [],
        (
            "SMs that ops bound by memory are offered, products the rest; default: all of a profile, a "
            "few modelled."
        ),
    )
    flags.DEFINE_integer(
        "nano_batches", 2, "At most so many; 1 is the sequential plan.", lower_bound=1, upper_bound=4
    )
    flags.DEFINE_integer("time_limit_s", 600, "For everything together.", lower_bound=1)
    flags.DEFINE_string(
        "out",
        None,
        f"A file; for several workloads, a folder. Default: in {FOLDER}/, by device, model and dtype.",
    )


def run() -> None:
    """The command."""
    f = flags.FLAGS
    prompts, outputs = _numbers("prompt_tokens", 1), _numbers("output_tokens")
    if len(prompts) != len(outputs):
        raise ConfigError("output_tokens", outputs, f"as many as prompt_tokens: {len(prompts)}")
    if f.collectives is not None and not f.modelled:
        raise ConfigError("collectives", f.collectives, "nothing without --modelled: a profile has its own")
    if f.modelled == (f.profile is not None):
        raise ConfigError("profile", f.profile, "a profile's path, or --modelled")
    model = open_checkpoint(f.model, load_format="dummy").model_config
    budgets, workloads = _sizes(), list(zip(prompts, outputs, strict=True))
    for workload in workloads:
        check_lengths(f.model, model, *workload)
    if (unknown := sorted(set(f.orders) - {SOLVER, *ORDERS})) or not f.orders:
        raise ConfigError("orders", ",".join(unknown), f"one or more of {', '.join((SOLVER, *ORDERS))}")
    if f.cuts and not 0 < min(_numbers("cuts")) <= max(_numbers("cuts")) < min(budgets):
        raise ConfigError("cuts", ",".join(f.cuts), f"1 to {min(budgets) - 1}: within every step")
    rival, forms = _shares(f.model, model, budgets)
    if all(form.graph.scattered for form in forms):
        check_scattered(
            rival.profile.tensor_parallel_size, tokens=budgets, cuts=_numbers("cuts") if f.cuts else []
        )
    if len(rival.offered_sms()) == 1:
        print(undivided(rival.profile))
    used = f.gpu_memory_utilization
    fitting = {
        (*one, tokens): most_decodes(f.model, model, rival.profile, *one, tokens, used)
        for one in workloads
        for tokens in budgets
    }
    out = Path(f.out) if f.out else default_out(rival.profile, several=len(workloads) > 1)
    files = [out / f"{prompt}-{output}.json" for prompt, output in workloads] if len(workloads) > 1 else [out]
    check_files(out, files)
    names, unsure = set(), {}
    turns = Turns(_SEARCHED * f.time_limit_s, min(SEARCHED, len(budgets)) * len(workloads))
    with tqdm(total=turns.left, unit="step", disable=not sys.stderr.isatty()) as bar:
        for (prompt, output), path in zip(workloads, files, strict=True):
            loads = {
                tokens: Load.steady_state(tokens, prompt, output, fitting[prompt, output, tokens])
                for tokens in budgets
            }
            sizes = [Size.of(model, _setting(rival, load)) for load in loads.values()]
            results = []
            for tokens in (size.tokens for size in most_promising(sizes)):
                bar.set_description(f"{tokens} tokens, {prompt}/{output}")
                results.append(
                    solve_one(
                        f.model, model, rival, forms, loads[tokens], f"{prompt}/{output}", turns.next_s(), bar
                    )
                )
                bar.update()
            best = _named(max(results, key=lambda result: result.tokens_per_s), f"{prompt}/{output}", names)
            save(best.plan, path)
            unsure |= {path: f"{prompt}/{output}"} if best.unsure else {}
            bar.write(report(best, path), file=sys.stdout)
            if len(sizes) > 1:
                bar.write(line(sizes, most_promising(sizes), best.plan.tokens), file=sys.stdout)
    print(f"{turns.budget.spent_s:.0f} s of {f.time_limit_s}")
    if unsure:
        print(
            f"Not sure to gain, so that an engine runs the sequential step: "
            f"{', '.join(map(str, unsure))}. To measure, then to run:"
        )
        print(*measuring(rival.profile, f.model, out, unsure, used), sep="\n")
    print(going_on(rival.profile, f.model, out, *workloads[0], used))


def _named(result: Result, workload: str, names: set[str]) -> Result:
    """With a name that no other plan of the portfolio has, by which an engine tells them apart. names: those
    so far; gets this one's.
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
    load: Load,
    workload: str,
    time_limit_s: float,
    bar: tqdm,
) -> Result:
    """The plan for a workload's step, of the best form in which it may be cut. rival: of the form that the
    engine's sequential step has.
    """
    cuts, tp = _numbers("cuts") if flags.FLAGS.cuts else [0], rival.profile.tensor_parallel_size
    even = (
        load.tokens % tp == 0
        and any(cut % tp == 0 for cut in cuts)
        and not (flags.FLAGS.split and load.tokens == tp)
    )
    forms = [
        form for form in forms if even or not form.graph.scattered
    ] or forms  # without any the search says why
    results = [
        _solve_form(name, model, shares, load, workload, time_limit_s / len(forms), bar) for shares in forms
    ]
    best = max(results, key=lambda result: result.tokens_per_s)
    plan, setting = best.plan, best.setting
    if not is_sequential(plan):
        said = predict(
            plan, setting.graph, setting.shares, load, device=setting.device, power=setting.power, rival=rival
        )
        plan = msgspec.structs.replace(plan, predictions=said)
    return dataclasses.replace(best, plan=plan, sequential_s=min(result.sequential_s for result in results))


def _solve_form(
    name: str, model: ModelConfig, shares: ShareTimes, load: Load, workload: str, limit_s: float, bar: tqdm
) -> Result:
    """Without predictions. Raises: SearchError where no order is left."""
    f, profile, stop_s, setting = (
        flags.FLAGS,
        shares.profile,
        time.monotonic() + limit_s,
        _setting(shares, load),
    )
    parallel = ParallelConfig(profile.tensor_parallel_size)
    kind = (name, profile.device, parallel, profile.dtype, profile.kv_cache_dtype)
    target = Target(*kind, load.decode_tokens, load.real_tokens - load.decode_tokens, round(load.decode_keys))
    title = f"searched {Path(name).name} {load.tokens} {workload}"  # of a folder without its path
    known, found, solved = best_known(model, setting, f.orders, stop_s), None, None
    if SOLVER in f.orders:
        left_s, say = max(1.0, stop_s - time.monotonic()), lambda line: bar.write(line, file=sys.stderr)
        found = _told(search(setting, time_limit_s=left_s, name=title, target=target, say=say), shares)
        solved = simulated(found.plan, setting)
    tried = [one for one in (known, solved) if one is not None]
    if not tried:
        raise SearchError(
            f"orders={','.join(f.orders)}: none of them may be cut and overlap as asked; --orders "
            f"{SOLVER} is without bounds"
        )
    best = min(tried, key=lambda one: one.step_s)
    check(best.plan, shares.graph)
    check_sums(best.plan, shares.graph, profile.tensor_parallel_size)
    plan = msgspec.structs.replace(best.plan, target=target)
    return Result(
        setting, plan, best.timeline, sequential(model, setting).timeline.period_s, found, solved, known
    )


def _setting(shares: ShareTimes, load: Load) -> Setting:
    """As the flags ask for it."""
    f, profile, device = flags.FLAGS, shares.profile, find_device(shares.profile.device)
    return Setting(
        shares.graph, shares, load, device, shipped_power(device.name) if device else None, overlap=MODES[f.overlap],
        nano_batches=f.nano_batches, split=f.split, quantized=profile.dtype == "float8_e4m3fn",
        places=tuple(sorted(set(_numbers("cuts")))) if f.cuts else (),
    )  # fmt: skip


def _told(found: Found, shares: ShareTimes) -> Found:
    """With a plan that says how its sums over devices are sent, and whose name says that and where it is cut."""
    plan, cuts = found.plan, cuts_of(found.plan)
    if cuts:
        sizes = " + ".join(str(stop - start) for start, stop in itertools.pairwise((0, *cuts, plan.tokens)))
        plan = msgspec.structs.replace(plan, name=f"{plan.name}, {sizes}")
    return dataclasses.replace(found, plan=with_copies(plan) if shares.copies else plan)


def _shares(name: str, model: ModelConfig, budgets: list[int]) -> tuple[ShareTimes, list[ShareTimes]]:
    """Of the form that the sequential step has, and of each form of the sums over devices that is asked for
    and whose times are known.
    """
    f = flags.FLAGS
    profile, widths, products = _profile(name, model, budgets)
    tp, timed = profile.tensor_parallel_size, {one.op for one in profile.op_times}
    plain, device = model_graph(model, tp, widths), find_device(profile.device)
    card = shipped_card(device.name) if device else None
    few = tuple(_numbers("sms")) if f.sms else None
    parts = sorted({one.sms for one in profile.op_times} - {profile.total_sms})
    if few and (unknown := sorted(set(few) - set(parts))):
        timed_on = ", ".join(map(str, parts)) or "no part of the device"
        raise ConfigError(
            "sms",
            unknown[0],
            f"SMs that ops of the profile were timed on ({timed_on}); products beside them get the rest",
        )
    rival = ShareTimes(profile, plain, products, few=few)
    forms = {"reduce": lambda: rival}
    if tp > 1 and "attn_scatter" in timed:
        forms["scatter"] = lambda: ShareTimes(
            profile, model_graph(model, tp, widths, scattered=True), products, few=few
        )
    if tp in (2, 4) and card is not None and (card.exchange_s is not None or EXCHANGE in timed):
        exchanged = model_graph(model, tp, widths, swapped=tp == 4)
        forms["copies"] = lambda: ShareTimes(copied(profile, exchanged, card), exchanged, products, few=few)
    wanted = [form for name, form in forms.items() if f.sums in ("all", name)]
    if not wanted:
        raise ConfigError(
            "sums", f.sums, f"{', '.join(forms)}: on {tp} devices, with a profile of {len(timed)} ops"
        )
    return rival, [form() for form in wanted]


def _profile(
    name: str, model: ModelConfig, budgets: list[int]
) -> tuple[Profile, Widths, dict[str, tuple[int, int]] | None]:
    """The profile, the widths of its numbers, and the [K, N] of products where it does not know all of waves."""
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
        keys=KEYS, sms=(total, *parts, *(total - few for few in parts)),
    )  # fmt: skip
    if f.collectives is not None:
        made = with_collectives(made, load_profile(f.collectives, model=name))
    return made, widths, product_shapes(model, f.gpus)


def _sizes() -> list[int]:
    """Tokens of the steps: as told, else those that may be cut at --cuts, or the largest, which is then
    refused.
    """
    f, told = flags.FLAGS, sorted(set(_numbers("tokens", 1)))
    if f["tokens"].present or not f.cuts:
        return told
    return [size for size in told if size > max(_numbers("cuts"))] or told[-1:]


def _check_given(profile: Profile) -> None:
    """Raises: ConfigError for a flag that was given, and says something else than the profile."""
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


def _numbers(flag: str, least: int = 0) -> list[int]:
    words = flags.FLAGS[flag].value or []
    try:
        found = [int(word) for word in words]
    except ValueError:
        found = []
    if not found or min(found) < least:
        raise ConfigError(
            flag, ",".join(words), f"whole numbers of {least} or more, with commas between them"
        )
    return found
