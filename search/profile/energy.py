"""What work costs a card in joules, fitted to runs that were measured on it: the constants of the fourth
resource.

  python -m search energy --runs benchmarks/settings/h200-energy-runs.json
  python -m search energy --runs benchmarks/settings/h200-energy-runs.json --profile search/profiles/h200-llama-3.1-8b.json --out
  h200.json

A file of runs holds sustained rates of work with the watts and the clock that they settled at, and what is
known of the card (its power cap, idle watts, clocks, FLOPs a cycle). The fit is a bound: it is lowered until
no run needed less. With profiles of `search measure` their products and attention are runs, too, which are
not fitted: one that needed less than the fit says lowers the joules of its own work, a byte's or a FLOP's of
its dtype. The bound is printed beside the one that this release ships for the device, if any, and written in
the form of `jaxflow/model/power`, from where an engine's and a search's bounds come.
"""

import decimal
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
from absl import flags

from jaxflow.cli.output_files import check_outputs
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.cost import find_device
from jaxflow.model.energy import SCHEMA_VERSION, Curve, Power, shipped_power
from jaxflow.model.graph import Graph, Op, Widths, Work, model_graph
from search.cost import BYTES
from search.profile.modelled import product_dtype
from search.profile.op_bench import OpCase
from search.profile.op_times import NotNegative, OpTime, Pair, Positive, Profile, ProfileError, load_profile

FIXED_PRIOR = 0.4  # a guess that the runs may move: few of them ran at very different clocks
_PRIOR_RUNS = 0.05  # how much the guess weighs, beside a run's 1
_STEPS = 3000
_DOWN = decimal.Context(prec=4, rounding=decimal.ROUND_FLOOR)
_L2_BYTES = 60 << 20  # of an H200


class PowerRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A sustained run. Rates are per second; `clock_mhz` and `watts` are what it settled at."""

    name: str
    dtype: str
    flops_per_s: NotNegative
    bytes_per_s: NotNegative
    watts: Positive
    clock_mhz: Positive


class PowerRuns(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was measured on one device, and what is known of it."""

    device: str
    cap_w: Positive
    idle_w: Positive
    highest_clock_mhz: Positive
    lowest_clock_mhz: Positive
    flops_per_cycle: dict[str, Positive]
    versions: dict[str, str]
    method: str
    runs: list[PowerRun]


def load_runs(path: str | Path) -> PowerRuns:
    """Raises: ProfileError naming the file and the field; OSError."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=PowerRuns)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: {error}") from error


def of_profile(measured: PowerRuns, profile: Profile, graph: Graph) -> PowerRuns:
    """The runs that a profile holds, in the others' place: products and attention alone, and pairs of them
    that say what they worked on.

    Watts are the energy counter's where it was read, else the sensor's. Norms and appends are left out, and
    decode attention whose keys fit in the L2: alone in a loop, what they read stays there, and its bytes cost
    less than the memory's. graph: the profile's model, on one of its devices.

    Raises: ProfileError for a profile of another device.
    """
    device = find_device(profile.device)
    if device is None or device.name != measured.device:
        raise ProfileError(f"device={profile.device!r} of the profile: the runs are of {measured.device!r}")
    ops = {op.name: op for op in graph.layers[0] if op.kind in ("dense", "attention")}
    runs = []
    for one in profile.op_times:
        case = OpCase(one.op, one.tokens, one.keys)
        if one.op in ops and not (
            one.op == "decode_attention" and ops[one.op].work(case.composition).memory_bytes <= _L2_BYTES
        ):
            runs += _run(
                f"{one.op} {one.tokens} {one.keys} on {one.sms}", (case,), one, one.seconds, profile, ops
            )
    for pair in profile.pairs:
        if pair.second in ops and pair.seconds and pair.first_tokens and pair.second_tokens and pair.keys:
            cases = OpCase(pair.first, pair.first_tokens), OpCase(pair.second, pair.second_tokens, pair.keys)
            runs += _run(
                f"{pair.first} on {pair.first_sms} beside {pair.second}",
                cases,
                pair,
                pair.seconds,
                profile,
                ops,
            )
    return msgspec.structs.replace(measured, runs=runs)


def _run(
    name: str,
    cases: tuple[OpCase, ...],
    found: OpTime | Pair,
    took_s: float,
    profile: Profile,
    ops: Mapping[str, Op],
) -> list[PowerRun]:
    """Of an entry; none of one without watts or a clock, nor of a pair whose FLOPs are of two dtypes, which
    no run can say.
    """
    watts = found.watts if found.joules is None else found.joules / took_s
    dtypes = {_flops_dtype(ops[case.op], profile) for case in cases}
    if watts is None or found.clock_mhz is None or len(dtypes) > 1:
        return []
    work = sum((ops[case.op].work(case.composition) for case in cases), Work())
    return [
        PowerRun(
            f"{profile.model} {name}",
            dtypes.pop(),
            work.flops / took_s,
            work.memory_bytes / took_s,
            watts,
            found.clock_mhz,
        )
    ]


def _flops_dtype(op: Op, profile: Profile) -> str:
    """Attention multiplies an e4m3 cache in 8 bits, in chunks and in decodes."""
    eight = op.kind == "attention" and profile.kv_cache_dtype == "float8_e4m3fn"
    return profile.kv_cache_dtype if eight else product_dtype(op, profile.dtype)


def predicted(params: Any, rates: jax.Array, clock_share: jax.Array) -> jax.Array:
    """Watts above idle [n]. rates: [n, kinds] of work, clock_share: [n]."""
    joules, fixed = jnp.exp(params["log_joules"]), jax.nn.sigmoid(params["fixed"])
    by_clock = fixed + (1 - fixed) * clock_share[:, None] ** 2
    return (rates * joules * by_clock).sum(-1)


def fit(measured: PowerRuns) -> Power:
    """The joules of `measured`'s dtypes and of a byte, lowered to a bound.

    Raises: ProfileError for a cap or clocks that cannot be, for runs of a dtype whose peak is not given, or
    without any; for a run that did no work, or drew no more than the idle card.
    """
    if measured.cap_w <= measured.idle_w or measured.lowest_clock_mhz > measured.highest_clock_mhz:
        given = (
            f"cap_w={measured.cap_w:g} beside idle_w={measured.idle_w:g}, clocks "
            f"{measured.lowest_clock_mhz:g} to"
        )
        raise ProfileError(
            f"{given} {measured.highest_clock_mhz:g} MHz: a cap above the idle card's watts, and "
            f"clocks that rise, are accepted"
        )
    for run in measured.runs:  # the logarithms of its watts would be no numbers
        if run.watts <= measured.idle_w or not (run.flops_per_s or run.bytes_per_s):
            rates = f"{run.flops_per_s:g} FLOPs and {run.bytes_per_s:g} bytes a second"
            raise ProfileError(
                f"run {run.name!r}: {run.watts:g} W at {rates}; some work and more than the idle "
                f"{measured.idle_w:g} W are accepted"
            )
    dtypes = sorted({run.dtype for run in measured.runs if run.flops_per_s})
    unknown = [dtype for dtype in dtypes if dtype not in measured.flops_per_cycle]
    if unknown or not dtypes:
        raise ProfileError(
            f"runs of dtypes {dtypes}: flops_per_cycle is given for {sorted(measured.flops_per_cycle)}"
        )
    rates = (
        jnp.array(
            [
                [*(run.flops_per_s * (run.dtype == dtype) for dtype in dtypes), run.bytes_per_s]
                for run in measured.runs
            ]
        )
        / 1e12
    )
    share = jnp.array([run.clock_mhz for run in measured.runs]) / measured.highest_clock_mhz
    watts = jnp.array([run.watts for run in measured.runs]) - measured.idle_w
    prior = jax.scipy.special.logit(FIXED_PRIOR)
    kinds = rates.shape[1]
    params: Any = {"log_joules": jnp.zeros(kinds), "fixed": jnp.full(kinds, prior)}

    def loss(params: Any) -> jax.Array:
        off = jnp.log(predicted(params, rates, share) / watts)
        return (off**2).mean() + _PRIOR_RUNS / len(measured.runs) * ((params["fixed"] - prior) ** 2).mean()

    import optax  # an extra that only the fit needs

    optimizer = optax.adam(optax.cosine_decay_schedule(0.05, _STEPS))

    def step(carry: Any, _: None) -> Any:
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return (optax.apply_updates(params, updates), state), None

    start: Any = (params, optimizer.init(params))
    (params, _), _ = jax.lax.scan(step, start, length=_STEPS)
    lowest = float((watts / predicted(params, rates, share)).min())
    joules, fixed = jnp.exp(params["log_joules"]) * lowest / 1e12, jax.nn.sigmoid(params["fixed"])
    curves = [Curve(float(f"{j:.4g}"), round(float(f), 3)) for j, f in zip(joules, fixed, strict=True)]
    return Power(
        schema_version=SCHEMA_VERSION,
        device=measured.device,
        cap_w=measured.cap_w,
        idle_w=measured.idle_w,
        highest_clock_hz=measured.highest_clock_mhz * 1e6,
        lowest_clock_hz=measured.lowest_clock_mhz * 1e6,
        flops_per_cycle={dtype: measured.flops_per_cycle[dtype] for dtype in dtypes},
        flop=dict(zip(dtypes, curves[:-1], strict=True)),
        byte=curves[-1],
    )


def errors(measured: PowerRuns, power: Power) -> Sequence[float]:
    """For each run: measured watts above idle over the model's (1 or more once the model is a bound)."""
    return [(run.watts - power.idle_w) / sum(watts_of(run, power)) for run in measured.runs]


def watts_of(run: PowerRun, power: Power) -> tuple[float, float]:
    """Of its FLOPs and of its bytes, by the model."""
    share = run.clock_mhz * 1e6 / power.highest_clock_hz
    flop = power.flop[run.dtype].at(share) if run.flops_per_s else 0.0
    return float(run.flops_per_s * flop), float(run.bytes_per_s * power.byte.at(share))


def lowered(power: Power, runs: Iterable[PowerRun]) -> Power:
    """The model with joules that none of the runs beats: only what they tell of falls, and no curve's fixed
    share moves.

    First a byte's: by runs whose bytes take more of the given model's watts than their FLOPs to what these
    leave, by others to all that they drew. Then, beside such bytes, the FLOPs' of each dtype, by its own
    runs. So no order of runs matters, and nothing is negative.

    Raises: ProfileError for a run of a dtype that the model does not know, or that drew no more than the idle
    card.
    """
    needs = []
    for run in runs:
        if run.watts <= power.idle_w or (run.flops_per_s and run.dtype not in power.flop):
            raise ProfileError(
                f"run {run.name!r}: {run.watts:.0f} W, {run.dtype}; idle {power.idle_w} W, known "
                f"{sorted(power.flop)}"
            )
        needs.append((run.dtype, *watts_of(run, power), run.watts - power.idle_w))
    byte = _least((left - flop if flop < moved else left) / moved for _, flop, moved, left in needs if moved)
    flops = {
        dtype: _least((left - byte * moved) / flop for of, flop, moved, left in needs if of == dtype and flop)
        for dtype in power.flop
    }
    flop = {dtype: _lower(curve, flops[dtype]) for dtype, curve in power.flop.items()}
    return msgspec.structs.replace(power, flop=flop, byte=_lower(power.byte, byte))


def _least(factors: Iterable[float]) -> float:
    return min(1.0, max(0.0, min(factors, default=1.0)))


def _lower(curve: Curve, factor: float) -> Curve:
    """In four digits, rounded down; as it is by a factor of 1."""
    return (
        curve
        if factor == 1
        else Curve(float(_DOWN.create_decimal_from_float(curve.joules * factor)), curve.fixed)
    )


SETTLED = 0.77  # of the highest clock: where an H200's products settle at its cap


def define_flags() -> None:
    flags.DEFINE_string("runs", None, "The sustained runs' file.", required=True)
    flags.DEFINE_list(
        "profile", [], "Profiles of the same device whose entries lower the fit where they needed less."
    )
    flags.DEFINE_string("out", None, "Where the fit is written.")


def entries(measured: PowerRuns, profiles: list[str]) -> list[PowerRun]:
    """The runs of profiles. Raises: ProfileError, ProfileError, CheckpointError or OSError, naming the file."""
    found = []
    for one in profiles:
        profile = load_profile(Path(one))
        widths = Widths(weights=BYTES.get(profile.dtype, 2.0), kv=BYTES.get(profile.kv_cache_dtype, 2.0))
        model = open_checkpoint(profile.model, load_format="dummy").model_config
        found += of_profile(measured, profile, model_graph(model, profile.tensor_parallel_size, widths)).runs
    return found


def table(power: Power, shipped: Power | None) -> list[str]:
    """A line for each kind of work: joules at the highest clock, what of them does not fall with it, and
    joules where products settle.
    """
    lines = [f"{'pJ a':>16} {'at 100%':>8} {'fixed':>6} {f'at {SETTLED:.0%}':>8}  shipped"]
    for name, curve in (*power.flop.items(), ("byte", power.byte)):
        theirs = None if shipped is None else shipped.byte if name == "byte" else shipped.flop.get(name)
        known = "-" if theirs is None else f"{1e12 * theirs.joules:.3f}, {theirs.fixed:.0%} fixed"
        lines.append(
            f"{name:>16} {1e12 * curve.joules:8.3f} {curve.fixed:6.0%} "
            f"{1e12 * curve.at(SETTLED):8.3f}  {known}"
        )
    return lines


def run() -> None:
    """The command. Raises: ConfigError, ValueError, CheckpointError, OSError."""
    f = flags.FLAGS
    check_outputs("out")
    measured = load_runs(f.runs)
    found = entries(measured, f.profile)
    power = lowered(fit(measured), found)
    above = errors(msgspec.structs.replace(measured, runs=[*measured.runs, *found]), power)
    print(*table(power, shipped_power(power.device)), sep="\n")
    print(
        f"{len(above)} runs needed {min(above):.3f} to {max(above):.3f} times these joules, "
        f"{sum(above) / len(above):.3f} in the mean"
    )
    if f.out:
        Path(f.out).write_bytes(msgspec.json.format(msgspec.json.encode(power), indent=1) + b"\n")
        print(f"{f.out}: written")
