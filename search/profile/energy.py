r"""Fit the joules of a FLOP and of a byte to runs measured on a card: the constants of the fourth resource.

  python -m search energy --runs benchmarks/settings/h200-energy-runs.json
  python -m search energy --runs benchmarks/settings/h200-energy-runs.json \
      --profile benchmarks/settings/h200-llama-3.1-8b-first-profile.json --out h200.json

A file of runs holds sustained rates of work, with the watts and the clock that each run settled at, and the
card's power cap, idle watts, clocks and FLOPs a cycle. A run's power above idle is the sum of its rates
times their joules at its clock. The logarithms of the joules and the logits of their fixed shares are fitted
with optax to the logarithm of that power. All joules are then lowered together until no run needs less: the
fit is a lower bound.

The entries of --profile, products and attention with watts and clocks, are not fitted. An entry that needs
less than the fit lowers the joules of its own work only: of a byte, or of a FLOP of its dtype. The command
prints the bound next to the shipped one, and writes it in the form of `power` in `pallas_kernels/cards`,
which engines and searches read.
"""

import decimal
import statistics
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
from jaxflow.model.energy import SCHEMA_VERSION, JoulesCurve, Power, shipped_power
from jaxflow.model.graph import Graph, Op, Widths, Work, model_graph
from search.cost import BYTES
from search.profile.modelled import product_dtype
from search.profile.op_bench import OpCase
from search.profile.op_times import NotNegative, OpTime, Pair, Positive, Profile, ProfileError, load_profile

FIXED_PRIOR = 0.4  # prior of the fixed share, since few runs have very different clocks
_PRIOR_RUNS = 0.05  # weight of the prior; a run has weight 1
_STEPS = 3000
_DOWN = decimal.Context(prec=4, rounding=decimal.ROUND_FLOOR)
_L2_BYTES = 60 << 20  # the L2 cache of an H200


class PowerRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A sustained run. Rates are per second; `clock_mhz` and `watts` are its settled values."""

    name: str
    dtype: str
    flops_per_s: NotNegative
    bytes_per_s: NotNegative
    watts: Positive
    clock_mhz: Positive


class PowerRuns(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The runs measured on one device, and the constants of the device."""

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
    """Read a file of runs. Raises: ProfileError naming the file and the field; OSError."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=PowerRuns)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: {error}") from error


def of_profile(measured: PowerRuns, profile: Profile, graph: Graph) -> PowerRuns:
    """Return the runs of a profile: its isolated products and attention, and the pairs with known work.

    Watts come from the energy counter where it was read, else from the sensor. Norms and appends are left
    out. So is decode attention whose KV fits in the L2: in a loop it stays there, and its bytes cost less
    than those of the memory. graph: the profile's model, on one of its devices.

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
                f"{pair.first} on {pair.first_sms} with {pair.second}",
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
    """Return the run of an entry, or none for an entry without watts or clock, or a pair with FLOPs of two
    dtypes.
    """
    watts = found.watts if found.joules is None else found.joules / took_s
    dtypes = {flops_dtype(ops[case.op], profile) for case in cases}
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


def flops_dtype(op: Op, profile: Profile) -> str:
    """Return the dtype of an op's FLOPs. Attention multiplies an e4m3 cache in 8 bits."""
    eight = op.kind == "attention" and profile.kv_cache_dtype == "float8_e4m3fn"
    return profile.kv_cache_dtype if eight else product_dtype(op, profile.dtype)


def predicted(params: Any, rates: jax.Array, clock_share: jax.Array) -> jax.Array:
    """Return watts above idle [n]. rates: [n, kinds] of work, clock_share: [n]."""
    joules, fixed = jnp.exp(params["log_joules"]), jax.nn.sigmoid(params["fixed"])
    by_clock = fixed + (1 - fixed) * clock_share[:, None] ** 2
    return (rates * joules * by_clock).sum(-1)


def fit(measured: PowerRuns) -> Power:
    """Return the joules of each dtype and of a byte, lowered to a bound.

    Raises: ProfileError for an impossible cap or clock, for runs of a dtype without a known peak, without
    runs, and for a run that did no work or drew no more than the idle card.
    """
    if measured.cap_w <= measured.idle_w or measured.lowest_clock_mhz > measured.highest_clock_mhz:
        given = (
            f"cap_w={measured.cap_w:g} with idle_w={measured.idle_w:g}, clocks "
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
            f"runs of dtypes {dtypes}: runs of dtypes with flops_per_cycle are accepted, which are "
            f"{sorted(measured.flops_per_cycle)}"
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
    curves = [JoulesCurve(float(f"{j:.4g}"), round(float(f), 3)) for j, f in zip(joules, fixed, strict=True)]
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
    """Return for each run the measured watts above idle over the model's; at least 1 for a bound."""
    return [(run.watts - power.idle_w) / sum(watts_of(run, power)) for run in measured.runs]


def watts_of(run: PowerRun, power: Power) -> tuple[float, float]:
    """Return the model's watts of a run's FLOPs and of its bytes."""
    share = run.clock_mhz * 1e6 / power.highest_clock_hz
    flop = power.flop[run.dtype].at(share) if run.flops_per_s else 0.0
    return float(run.flops_per_s * flop), float(run.bytes_per_s * power.byte.at(share))


def lowered(power: Power, runs: Iterable[PowerRun]) -> Power:
    """Return the model with joules that no run beats; the fixed shares of the curves do not change.

    The joules of a byte fall first. If a run's bytes take more of the model's watts than its FLOPs, the run
    lowers them to the watts that the FLOPs leave; another run lowers them to all its watts. Then the FLOPs of
    each dtype fall, by the runs of that dtype. The order of the runs does not matter, and no joules are
    negative.

    Raises: ProfileError for a run of an unknown dtype, or with no more than the idle watts.
    """
    needs = []
    for run in runs:
        if run.watts <= power.idle_w or (run.flops_per_s and run.dtype not in power.flop):
            raise ProfileError(
                f"run {run.name!r} of {run.watts:.0f} W and dtype {run.dtype}: a run of more than the idle "
                f"{power.idle_w} W and of a dtype in {sorted(power.flop)} is accepted"
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


def _lower(curve: JoulesCurve, factor: float) -> JoulesCurve:
    """Return the curve times the factor, rounded down to four digits; unchanged for a factor of 1."""
    return (
        curve
        if factor == 1
        else JoulesCurve(float(_DOWN.create_decimal_from_float(curve.joules * factor)), curve.fixed)
    )


def define_flags() -> None:
    flags.DEFINE_string("runs", None, "File of the sustained runs and their watts (JSON).", required=True)
    flags.DEFINE_list(
        "profile", [], "Profiles of the same device whose entries lower the fit where they needed less."
    )
    flags.DEFINE_string("out", None, "File for the joules that the fit found (JSON).")


def entries(measured: PowerRuns, profiles: list[str]) -> list[PowerRun]:
    """Return the runs of profiles. Raises: ProfileError, CheckpointError or OSError, naming the file."""
    found = []
    for one in profiles:
        profile = load_profile(Path(one))
        widths = Widths(weights=BYTES.get(profile.dtype, 2.0), kv=BYTES.get(profile.kv_cache_dtype, 2.0))
        model = open_checkpoint(profile.model, load_format="dummy").model_config
        found += of_profile(measured, profile, model_graph(model, profile.tensor_parallel_size, widths)).runs
    return found


def table(power: Power, shipped: Power | None, settled: float) -> list[str]:
    """Return a line for each kind of work: joules at the highest clock, their fixed share, and joules at a
    usual clock.

    settled: the usual clock, as a share of the highest.
    """
    lines = [f"{'pJ a':>16} {'at 100%':>8} {'fixed':>6} {f'at {settled:.0%}':>8}  shipped"]
    for name, curve in (*power.flop.items(), ("byte", power.byte)):
        theirs = None if shipped is None else shipped.byte if name == "byte" else shipped.flop.get(name)
        known = "-" if theirs is None else f"{1e12 * theirs.joules:.3f}, {theirs.fixed:.0%} fixed"
        lines.append(
            f"{name:>16} {1e12 * curve.joules:8.3f} {curve.fixed:6.0%} "
            f"{1e12 * curve.at(settled):8.3f}  {known}"
        )
    return lines


def run() -> None:
    """Run the command. Raises: ConfigError, ProfileError, CheckpointError, OSError."""
    f = flags.FLAGS
    check_outputs("out")
    measured = load_runs(f.runs)
    found = entries(measured, f.profile)
    power = lowered(fit(measured), found)
    above = errors(msgspec.structs.replace(measured, runs=[*measured.runs, *found]), power)
    settled = statistics.median(one.clock_mhz for one in measured.runs) / measured.highest_clock_mhz
    print(*table(power, shipped_power(power.device), settled), sep="\n")
    print(
        f"{len(above)} runs needed {min(above):.3f} to {max(above):.3f} times these joules, "
        f"{sum(above) / len(above):.3f} in the mean"
    )
    if f.out:
        Path(f.out).write_bytes(msgspec.json.format(msgspec.json.encode(power), indent=1) + b"\n")
        print(f"{f.out}: written")
