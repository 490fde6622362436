"""Searches plans for a model on a machine: how a step is cut into nano-batches, in what order they run, on how many SMs.

  python -m search plan --model llama-3.1-8b --profile profiles/h200-llama-3.1-8b.json --tokens 1664,2048
  python -m search plan --model llama-3.1-8b --modelled --device H200 --prompt_tokens 1024,512 --output_tokens 512,512 --out plans

Times are of a profile that was measured on the machine, or with --modelled of the cost model (and --collectives as they were
measured). Of several --tokens, the one with the most tokens a second is kept; under tensor parallelism, of the forms of the sums over
devices (all-reduces, reduce-scatters and all-gathers with the norms on each device's own rows, or copies: of two devices, or in two
steps of four) the best. Beside the solver's order, orders written by hand are simulated at every cut (`search.orders`), and the best
of all is kept; --orders and --cuts leave out the rest, so that a known plan is written again:

  python -m search plan --model llama-3-70b --modelled --gpus 4 --sums copies --orders two --cuts 1024

Several workloads (prompt and output tokens, in pairs) make a portfolio: a plan each, in the folder --out. The last line printed is
the command that runs what was found.
"""

import collections
import dataclasses
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from absl import flags
from tqdm import tqdm

from jaxflow.config import ConfigError, ModelConfig
from jaxflow.model.checkpoint import open_checkpoint
from jaxflow.model.cost import DEVICES, find_device
from jaxflow.model.energy import shipped_power
from jaxflow.model.graph import Widths, model_graph
from jaxflow.pipeline.choice import Gain, is_sequential
from jaxflow.pipeline.handmade import copied as with_copies
from jaxflow.pipeline.order import check
from jaxflow.pipeline.plan import Plan, Target, save
from search.clock import shipped_card
from search.copies import copied
from search.cost import BYTES
from search.cyclic import SearchError
from search.modelled import modelled_profile
from search.nanobatch import TILE, Found, search
from search.op_times import EXCHANGE, Profile, load_profile, with_collectives
from search.orders import ORDERS, Simulated, best_known, cuts_of, sequential, simulated
from search.predict import predict
from search.setting import Setting
from search.shares import Shares, product_columns
from search.simulate import Timeline
from search.structure import RESOURCES, Load

SMS = 132  # of a device that is modelled
FEW_SMS = (16, 24, 28, 32, 40, 48)  # that memory-bound ops are modelled on; products get the rest
_SEARCHED = 0.9  # of the time limit; the rest is for predictions
KEYS = (256, 1024, 4096, 16384)
FORMS = ("all", "reduce", "scatter", "copies")
SOLVER = "solver"  # of --orders: whatever it finds
FOLDER = Path("plans")  # where plans are written without --out, named as the shipped ones are
_NEEDS_E4M3 = {"dtype": "--quantization fp8", "kv_cache_dtype": "--kv_cache_dtype fp8"}  # of an engine that runs such a plan
MODES = {"all": RESOURCES, "memory": ("memory",), "network": ("network",), "none": ()}


def define_flags() -> None:
    flags.DEFINE_string("model", "llama-3.1-8b", "A shipped config's name, a folder or a hub id.")
    flags.DEFINE_string("profile", None, "What `search measure` wrote.")
    flags.DEFINE_boolean("modelled", False, "Take times from the cost model instead of a profile.")
    flags.DEFINE_string("collectives", None, "With --modelled: what `search measure --ops network` wrote, in place of modelled times.")
    flags.DEFINE_enum("device", "H200", sorted(DEVICES), "Which GPU, with --modelled.")
    flags.DEFINE_integer("gpus", 1, "GPUs that share the model (tensor parallel), with --modelled.", lower_bound=1)
    flags.DEFINE_enum("dtype", "bfloat16", sorted(BYTES), "Of weights and products, with --modelled.")
    flags.DEFINE_enum("kv_cache_dtype", "bfloat16", sorted(BYTES), "Of the cache, with --modelled.")
    flags.DEFINE_list("tokens", ["2048"], "Tokens of a step; of several, the best is kept.")
    flags.DEFINE_list("prompt_tokens", ["1024"], "Mean prompt of each workload.")
    flags.DEFINE_list("output_tokens", ["512"], "Mean output of each workload.")
    flags.DEFINE_enum("overlap", "all", list(MODES), "Which resources may run beside compute.")
    flags.DEFINE_boolean("split", False, "Cut the step even where one nano-batch is faster (ablations).")
    flags.DEFINE_list("orders", [SOLVER, *ORDERS], f"Orders that are tried: the {SOLVER}'s, and by hand {', '.join(ORDERS)}.")
    flags.DEFINE_list("cuts", [], f"Where the step may be cut; default: at multiples of {TILE}.")
    flags.DEFINE_enum("sums", "all", FORMS, "Forms of the sums over devices that are tried; copies: of two or four, by the copy engines.")
    flags.DEFINE_list("sms", [], "SMs that ops bound by memory are offered, products the rest; default: all of a profile, a few modelled.")
    flags.DEFINE_integer("nano_batches", 2, "At most so many; 1 is the sequential plan.", lower_bound=1, upper_bound=4)
    flags.DEFINE_integer("time_limit_s", 600, "For everything together.", lower_bound=1)
    flags.DEFINE_string("out", None, f"A file; for several workloads, a folder. Default: in {FOLDER}/, by device, model and dtype.")


@dataclasses.dataclass(frozen=True)
class Result:
    """A plan with what the simulation says of it, and both that were compared: the solver's answer and the best known order."""

    setting: Setting
    plan: Plan
    timeline: Timeline
    sequential_s: float  # of a layer, as it is simulated
    found: Found | None
    solved: Simulated | None
    known: Simulated | None

    @property
    def was_known(self) -> bool:
        """Whether its order was known before the solver began."""
        return self.known is not None and self.timeline is self.known.timeline

    @property
    def tokens_per_s(self) -> float:
        """Of a step's layers: for comparing plans."""
        return self.plan.tokens / self.timeline.step_s


def run() -> None:
    """The command."""
    f = flags.FLAGS
    prompts, outputs = _numbers("prompt_tokens"), _numbers("output_tokens")
    if len(prompts) != len(outputs):
        raise ConfigError("output_tokens", outputs, f"as many as prompt_tokens: {len(prompts)}")
    if f.collectives is not None and not f.modelled:
        raise ConfigError("collectives", f.collectives, "nothing without --modelled: a profile has its own")
    if f.modelled == (f.profile is not None):
        raise ConfigError("profile", f.profile, "a profile's path, or --modelled")
    model = open_checkpoint(f.model, load_format="dummy").model_config
    budgets, workloads = _numbers("tokens"), list(zip(prompts, outputs, strict=True))
    if unknown := sorted(set(f.orders) - {SOLVER, *ORDERS}):
        raise ConfigError("orders", unknown[0], ", ".join((SOLVER, *ORDERS)))
    if f.cuts and not 0 < min(_numbers("cuts")) <= max(_numbers("cuts")) < min(budgets):
        raise ConfigError("cuts", ",".join(f.cuts), f"1 to {min(budgets) - 1}: within every step")
    rival, forms = _shares(f.model, model, budgets)
    out = Path(f.out) if f.out else default_out(rival.profile, several=len(workloads) > 1)
    (out if len(workloads) > 1 else out.parent).mkdir(parents=True, exist_ok=True)
    limit_s, start = _SEARCHED * f.time_limit_s / (len(budgets) * len(workloads)), time.monotonic()
    with tqdm(total=len(budgets) * len(workloads), unit="step", disable=not sys.stderr.isatty()) as bar:
        for prompt, output in workloads:
            results = []
            for tokens in budgets:
                bar.set_description(f"{tokens} tokens, {prompt}/{output}")
                results.append(solve_one(f.model, model, rival, forms, tokens, prompt, output, limit_s, bar))
                bar.update()
            best = max(results, key=lambda result: result.tokens_per_s)
            path = out / f"{prompt}-{output}.json" if len(workloads) > 1 else out
            save(best.plan, path)
            bar.write(report(best, path), file=sys.stdout)
    print(f"{time.monotonic() - start:.0f} s of {f.time_limit_s}")
    print(going_on(rival.profile, f.model, out, *workloads[0]))


def default_out(profile: Profile, *, several: bool) -> Path:
    """Where plans of a kind are written unless told: `plans/h200-llama-3-70b-tp2-bfloat16.json`, a folder of that name for several."""
    device, tp = find_device(profile.device), profile.tensor_parallel_size
    kind = (device.name if device else profile.device, Path(profile.model).name, f"tp{tp}" if tp > 1 else "", profile.dtype)
    return FOLDER / (re.sub(r"[^\w.]+", "-", "-".join(filter(None, kind))).lower() + ("" if several else ".json"))


def going_on(profile: Profile, model: str, out: Path, prompt: int, output: int) -> str:
    """The command line that runs the plans of `out`, on a machine of the profile's kind."""
    kind = [words for field, words in _NEEDS_E4M3.items() if getattr(profile, field) == "float8_e4m3fn"]
    kind += [f"--tensor_parallel_size {profile.tensor_parallel_size}"] if profile.tensor_parallel_size > 1 else []
    lengths = f"--input_len {prompt} --output_len {max(1, output)}"
    return " ".join(("python -m jaxflow.bench throughput --model", model, *kind, f"--plan {out}", lengths, "--beside_sequential"))


def solve_one(
    name: str, model: ModelConfig, rival: Shares, forms: Sequence[Shares], tokens: int, prompt: float, output: float, time_limit_s: float,
    bar: tqdm,
) -> Result:  # fmt: skip
    """The plan for steps of so many tokens of one workload, of the better form."""
    results = [_solve_form(name, model, shares, rival, tokens, prompt, output, time_limit_s / len(forms), bar) for shares in forms]
    best = max(results, key=lambda result: result.tokens_per_s)
    return dataclasses.replace(best, sequential_s=min(result.sequential_s for result in results))


def _solve_form(
    name: str, model: ModelConfig, shares: Shares, rival: Shares, tokens: int, prompt: float, output: float, limit_s: float, bar: tqdm
) -> Result:
    """rival: those of the form that the engine's sequential step has. Raises: SearchError where no order is left."""
    f, profile, stop_s = flags.FLAGS, shares.profile, time.monotonic() + limit_s
    load, device = Load.steady_state(tokens, prompt, output), find_device(profile.device)
    setting = Setting(
        shares.graph, shares, load, device, shipped_power(device.name) if device else None, overlap=MODES[f.overlap],
        nano_batches=f.nano_batches, split=f.split, quantized=profile.dtype == "float8_e4m3fn",
        places=tuple(sorted(set(_numbers("cuts")))) if f.cuts else (),
    )  # fmt: skip
    kind = (name, profile.device, profile.tensor_parallel_size, profile.dtype, profile.kv_cache_dtype)
    target = Target(*kind, load.decode_tokens, tokens - load.decode_tokens, round(load.decode_keys))
    title = f"searched {name} {tokens} {prompt:g}/{output:g}"
    known, found, solved = best_known(model, setting, f.orders, stop_s), None, None
    if SOLVER in f.orders:
        left_s, say = max(1.0, stop_s - time.monotonic()), lambda line: bar.write(line, file=sys.stderr)
        found = _summed(search(setting, time_limit_s=left_s, name=title, target=target, say=say), shares)
        solved = simulated(found.plan, setting)
    tried = [one for one in (known, solved) if one is not None]
    if not tried:
        raise SearchError(f"orders={','.join(f.orders)}: none of them may be cut and overlap as asked; --orders {SOLVER} is without bounds")
    best = min(tried, key=lambda one: one.step_s)
    check(best.plan, shares.graph)
    predicted = None
    if not is_sequential(best.plan):
        predicted = predict(best.plan, shares.graph, shares, load, device=setting.device, power=setting.power, rival=rival)
    plan = msgspec.structs.replace(best.plan, target=target, predictions=predicted)
    return Result(setting, plan, best.timeline, sequential(model, setting).timeline.period_s, found, solved, known)


def _summed(found: Found, shares: Shares) -> Found:
    """With a plan that says how its sums over devices are sent."""
    return dataclasses.replace(found, plan=with_copies(found.plan)) if shares.copies else found


def report(result: Result, path: Path) -> str:
    """What a person wants to know of a plan."""
    plan, timeline, pieces = result.plan, result.timeline, collections.Counter(nano.op for nano in result.plan.nano_ops)
    us = {"simulated": timeline.period_s, "sequential": result.sequential_s, "by the joules": timeline.energy_s / timeline.layers}
    decodes, cuts = result.setting.load.decode_tokens, ", ".join(map(str, cuts_of(plan))) or "none"
    return "\n".join(
        (
            f"{path}: {plan.name}; {decodes} of {plan.tokens} tokens decode",
            f"  cuts: {cuts}; nano-ops: {', '.join(f'{op} {n}' for op, n in pieces.items())}",
            "  us a layer: " + ", ".join(f"{1e6 * value:.1f} {what}" for what, value in us.items()),
            f"  {'a known order' if result.was_known else "the solver's order"}: {_of_orders(result)}",
            f"  against sequential: {result.sequential_s / timeline.period_s:.3f}x; {_of_a_step(result)}",
        )
    )


def _of_orders(result: Result) -> str:
    """What a step's layers take in the best of the known orders and in the solver's; of that what it says itself, a layer."""
    known, found, solved, said = result.known, result.found, result.solved, []
    if known is not None:
        said.append(f"{1e3 * known.step_s:.2f} ms as known ({known.plan.name})")
    if found is not None and solved is not None:
        own = f"{1e6 * found.period_s:.1f} us a layer, gap {100 * found.gap:.1f} %, {1e6 * found.stage_one_s:.1f} without interference"
        said.append(f"{1e3 * solved.step_s:.2f} ms by the solver (by itself {own}; {found.tried} of {found.cut_sets} cuts tried)")
    return ", ".join(said)


def _of_a_step(result: Result) -> str:
    """What is predicted of a whole step, and whether an engine believes it."""
    predicted, load = result.plan.predictions, result.setting.load
    if predicted is None:
        return "an engine runs the sequential step"
    gain = Gain.of(predicted)
    at = load.decode_tokens, load.decode_keys
    runs = "this plan" if gain.sure(*at) > 1 else f"the sequential one, since gains of up to {predicted.margin:.0%} may be none"
    return f"of a step {gain.at(*at):.3f}x: an engine runs {runs}"


def _shares(name: str, model: ModelConfig, budgets: list[int]) -> tuple[Shares, list[Shares]]:
    """Of the form that the sequential step has, and of each form of the sums over devices that is asked for and whose times are known."""
    f = flags.FLAGS
    profile, widths, columns = _profile(name, model, budgets)
    tp, timed = profile.tensor_parallel_size, {one.op for one in profile.op_times}
    plain, device = model_graph(model, tp, widths), find_device(profile.device)
    card = shipped_card(device.name) if device else None
    few = tuple(_numbers("sms")) if f.sms else None
    if few and (unknown := sorted(set(few) - {one.sms for one in profile.op_times})):
        raise ConfigError("sms", unknown[0], "SMs that ops of the profile were timed on, of which the products beside them get the rest")
    rival = Shares(profile, plain, columns, few=few)
    forms = {"reduce": lambda: rival}
    if tp > 1 and "attn_scatter" in timed:
        forms["scatter"] = lambda: Shares(profile, model_graph(model, tp, widths, scattered=True), columns, few=few)
    if tp in (2, 4) and card is not None and (card.exchange_s is not None or EXCHANGE in timed):
        exchanged = model_graph(model, tp, widths, swapped=tp == 4)
        forms["copies"] = lambda: Shares(copied(profile, exchanged, card), exchanged, columns, few=few)
    wanted = [form for name, form in forms.items() if f.sums in ("all", name)]
    if not wanted:
        raise ConfigError("sums", f.sums, f"{', '.join(forms)}: on {tp} devices, with a profile of {len(timed)} ops")
    return rival, [form() for form in wanted]


def _profile(name: str, model: ModelConfig, budgets: list[int]) -> tuple[Profile, Widths, dict[str, int] | None]:
    """The profile, the widths of its numbers, and the columns of products where it does not know all of waves."""
    f = flags.FLAGS
    if f.profile is not None:
        profile = load_profile(f.profile, model=name)
        widths = Widths(weights=BYTES.get(profile.dtype, 2.0), kv=BYTES.get(profile.kv_cache_dtype, 2.0))
        return profile, widths, product_columns(model, profile.tensor_parallel_size) if profile.pairs else None
    device = DEVICES[f.device]
    if f.dtype not in device.rates.flops_per_s:
        raise ConfigError("dtype", f.dtype, f"what a {f.device} multiplies: {', '.join(device.rates.flops_per_s)}")
    widths = Widths(weights=BYTES[f.dtype], kv=BYTES[f.kv_cache_dtype])
    parts = _numbers("sms") if f.sms else FEW_SMS
    if max(parts) >= SMS or not min(parts):
        raise ConfigError("sms", ",".join(f.sms), f"1 to {SMS - 1} of a device's {SMS} SMs")
    made: Profile = modelled_profile(
        name, model, device, tp=f.gpus, widths=widths, dtype=f.dtype, kv_dtype=f.kv_cache_dtype,
        tokens=range(128, max(budgets) + 1, 128) if max(budgets) >= 128 else (max(budgets),),
        keys=KEYS, sms=(SMS, *parts, *(SMS - few for few in parts)),
    )  # fmt: skip
    if f.collectives is not None:
        made = with_collectives(made, load_profile(f.collectives, model=name))
    return made, widths, product_columns(model, f.gpus)


def _numbers(flag: str) -> list[int]:
    words = flags.FLAGS[flag].value or []
    try:
        found = [int(word) for word in words]
    except ValueError:
        found = []
    if not found or min(found) < 0 or (flag == "tokens" and not min(found)):
        raise ConfigError(flag, ",".join(words), "whole numbers with commas between them")
    return found
